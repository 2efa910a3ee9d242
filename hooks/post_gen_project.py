"""Keeps the licence and the CI file that were asked for, pins the library to where the template came from."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

ANSWERS = json.loads(r'''{{ cookiecutter | tojson }}''')
CI = {"GitHub": ".github", "GitLab": ".gitlab-ci.yml"}


def git(*arguments: str) -> str:
    """Runs git in the clone that cookiecutter made of the template; returns "" where git fails."""
    command = ["git", "-C", ANSWERS["_repo_dir"], *arguments]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def library_and_docs() -> tuple[str, str]:
    """Returns the line that pins the library, and where the pages of docs/ are.

    Template and library are one repository, so that the address of the one is the address of the other.
    """
    template = ANSWERS["_template"]
    here = Path(os.environ.get("PWD", ""))  # where cookiecutter was called: relative paths start there
    if template.endswith(".zip"):
        address = template if "://" in template else (here / template).resolve().as_uri()
        return f"dist-template @ {address}", f"{address}#docs/"
    if template == ANSWERS["_repo_dir"]:  # a folder: `make setup` installs what ends with a slash editable
        folder = (here / template).resolve()
        if not (folder / "cookiecutter.json").is_file():
            raise SystemExit(f"the template's folder {template!r} was not found; give its full path.")
        return f"dist-template @ {folder.as_uri()}/", f"{folder.as_uri()}/docs/"
    address = re.sub(r"^([\w.-]+@[\w.-]+):", r"ssh://\1/", git("config", "remote.origin.url"))
    address = re.sub(r"^(https?://)[^/@]+@", r"\1", address)  # no password goes into a file
    address = address.replace("file:///", "file://localhost/")  # pip 23 refuses an address without a host
    tag = git("tag", "--list", ANSWERS["_checkout"] or "no tag")
    version, commit = ANSWERS["_version"], tag or git("rev-parse", "HEAD")
    page = re.sub(r"^ssh://(?:[^/@]+@)?", "https://", address).removesuffix(".git") + f"/blob/{commit}/docs/"
    if ANSWERS["_published"] and tag == f"v{version}":
        return f"dist-template=={version}", page
    return f"dist-template @ git+{address}@{commit}", page


for text in sorted(Path().glob("LICENSE.*")):
    if text.name == f"LICENSE.{ANSWERS['license']}":
        text.replace("LICENSE")
    else:
        text.unlink()

for name, path in CI.items():
    if name != ANSWERS["ci"]:
        shutil.rmtree(path) if Path(path).is_dir() else Path(path).unlink(missing_ok=True)

pin, docs = library_and_docs()
lock, readme = Path("constraints.txt"), Path("README.md")
lock.write_text(re.sub(r"^(?!#)", f"{pin}\n", lock.read_text(encoding="utf-8"), count=1, flags=re.M), encoding="utf-8")
readme.write_text(readme.read_text(encoding="utf-8").replace("](docs/", f"]({docs}"), encoding="utf-8")

for script in Path("launch").glob("*.sh"):  # Python unpacks a zip file without executable bits
    script.chmod(0o755)

# A checkout whose package was run in place holds these; an archive does not.
for cache in [*Path().rglob("__pycache__"), *Path().rglob(".pytest_cache"), *Path().rglob(".ruff_cache")]:
    if cache.relative_to(".").parts[0] != ".venv":
        shutil.rmtree(cache, ignore_errors=True)

print(f"\nGenerated {Path.cwd()}. Next:\n\n  cd {ANSWERS['project_slug']}\n  make setup\n  make train\n")
