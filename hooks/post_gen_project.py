"""Keep the licence and the CI file that were asked for, and say what to type next. No network."""

import json
import shutil
from pathlib import Path

ANSWERS = json.loads(r'''{{ cookiecutter | tojson }}''')
CI = {"GitHub": ".github", "GitLab": ".gitlab-ci.yml"}

for text in sorted(Path().glob("LICENSE.*")):
    if text.name == f"LICENSE.{ANSWERS['license']}":
        text.replace("LICENSE")
    else:
        text.unlink()

for name, path in CI.items():
    if name != ANSWERS["ci"]:
        shutil.rmtree(path) if Path(path).is_dir() else Path(path).unlink(missing_ok=True)

# The template has docs/ at its top and a link to it here. Python unpacks a zip file without links and executable bits.
for script in Path("launch").glob("*.sh"):
    script.chmod(0o755)
if not Path("docs").is_dir():
    Path("docs").unlink()
    shutil.copytree(Path(ANSWERS["_repo_dir"]) / "docs", "docs")
Path("docs/reference.py").unlink()  # generates reference.md from the template
for page in Path("docs").rglob("*.md"):  # written for the default answers
    text = page.read_text(encoding="utf-8").replace("my_trainer", ANSWERS["package_name"])
    page.write_text(text.replace("my-trainer", ANSWERS["project_slug"]), encoding="utf-8")

# A checkout whose package was run in place holds these; an archive does not.
for cache in [*Path().rglob("__pycache__"), *Path().rglob(".pytest_cache"), *Path().rglob(".ruff_cache")]:
    if cache.relative_to(".").parts[0] != ".venv":
        shutil.rmtree(cache, ignore_errors=True)

print(f"\nGenerated {Path.cwd()}. Next:\n\n  cd {ANSWERS['project_slug']}\n  make setup\n  make train\n")
