"""Keeps the licence and the CI file that were asked for, pins the library to where the template
came from, and records the template's version and the answers in .cruft.json, which `upgrade` reads.
"""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

ANSWERS = json.loads(r"""{{ cookiecutter | tojson }}""")
CI = {"GitHub": ".github", "GitLab": ".gitlab-ci.yml"}


HERE = Path(os.environ.get("PWD", ""))  # where cookiecutter was called: relative paths start there


def git(*arguments: str) -> str:
    """Runs git in the template, a clone or a folder; returns "" where git fails."""
    command = ["git", "-C", str(HERE / ANSWERS["_repo_dir"]), *arguments]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def sources() -> tuple[str, str, str, str, str]:
    """Returns the line that pins the library, where the pages of docs/ are, and the template's
    address, commit and tag.

    Template and library are one repository, so that the address of the one is the address of the
    other. `upgrade` renders a clone of its own, and gives the project's template as `_origin`.
    """
    template = ANSWERS["_origin"] or ANSWERS["_template"]
    if template.endswith(".zip"):
        address = template if "://" in template else (HERE / template).resolve().as_uri()
        return f"dist-template @ {address}", f"{address}#docs/", address, "", ""
    if Path(template).is_dir() if ANSWERS["_origin"] else template == ANSWERS["_repo_dir"]:
        folder = (
            HERE / template
        ).resolve()  # `make setup` installs what ends with a slash editable
        if not (folder / "cookiecutter.json").is_file():
            raise SystemExit(
                f"the template's folder {template!r} was not found; give its full path."
            )
        commit = "" if git("rev-parse", "--show-prefix") else git("rev-parse", "HEAD")
        return (
            f"dist-template @ {folder.as_uri()}/",
            f"{folder.as_uri()}/docs/",
            str(folder),
            commit,
            "",
        )
    address = re.sub(r"^([\w.-]+@[\w.-]+):", r"ssh://\1/", git("config", "remote.origin.url"))
    address = re.sub(r"^(https?://)[^/@]+@", r"\1", address)  # no password goes into a file
    # pip 23 refuses an address without a host
    address = address.replace("file:///", "file://localhost/")
    tag, commit = git("tag", "--list", ANSWERS["_checkout"] or "no tag"), git("rev-parse", "HEAD")
    version, name = ANSWERS["_version"], tag or commit
    page = (
        re.sub(r"^ssh://(?:[^/@]+@)?", "https://", address).removesuffix(".git")
        + f"/blob/{name}/docs/"
    )
    is_published = ANSWERS["_published"] and tag == f"v{version}"
    pin = f"dist-template=={version}" if is_published else f"dist-template @ git+{address}@{name}"
    return pin, page, address, commit, tag


for text in sorted(Path().glob("LICENSE.*")):
    if text.name == f"LICENSE.{ANSWERS['license']}":
        text.replace("LICENSE")
    else:
        text.unlink()

for name, path in CI.items():
    if name != ANSWERS["ci"]:
        shutil.rmtree(path) if Path(path).is_dir() else Path(path).unlink(missing_ok=True)

pin, docs, template, commit, tag = sources()
pyproject, readme = Path("pyproject.toml"), Path("README.md")
text = pyproject.read_text(encoding="utf-8").replace('\nlibrary = ""', f'\nlibrary = "{pin}"', 1)
pyproject.write_text(text, encoding="utf-8")
readme.write_text(
    readme.read_text(encoding="utf-8").replace("](docs/", f"]({docs}"), encoding="utf-8"
)

own = {key: value for key, value in ANSWERS.items() if not key.startswith("_")}
record = {
    "template": template,
    "commit": commit or None,
    "checkout": tag or None,
    "context": {"cookiecutter": own},
}
Path(".cruft.json").write_text(json.dumps(record) + "\n", encoding="utf-8")

for script in Path("launch").glob("*.sh"):  # Python unpacks a zip file without executable bits
    script.chmod(0o755)

# A checkout whose package was run in place holds these; an archive does not.
for cache in [
    *Path().rglob("__pycache__"),
    *Path().rglob(".pytest_cache"),
    *Path().rglob(".ruff_cache"),
]:
    if cache.relative_to(".").parts[0] != ".venv":
        shutil.rmtree(cache, ignore_errors=True)

print(
    f"\nGenerated {Path.cwd()}. Next:\n\n  cd {ANSWERS['project_slug']}\n  make setup\n  make"
    " train\n"
)
