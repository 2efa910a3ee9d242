"""`docs`: lists the pages of the installed version's documentation, or shows one, offline.

A wheel installs them into share/doc/dist-template; a checkout, or vendor/dist-template, has docs/.
"""

import pydoc
import re
import site
import sysconfig
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path

from ...errors import InputError
from ...project import Flags, Project, program


def main(argv: list[str], project: Project) -> None:
    """Shows the list or a page; raises InputError if it is not there."""
    parser = Flags("docs", description=__doc__)
    parser.add_argument("page", nargs="?", help="a name of the list, or its end: zero")
    name = re.sub(r"^docs/|\.md$", "", parser.parse_args(argv[1:]).page or "")
    folder, readme = folder_of_pages(), project.folder.parent / "README.md"
    address = "not recorded"
    if readme.is_file():
        link = re.search(r"\[Documentation\]\((\S+?)index\.md\)", readme.read_text("utf-8"))
        if link:
            address = link[1]
    if folder is None:
        raise InputError(f"no page is installed here; the project's README.md has: {address}")
    shown, lines, names = "", [], []
    for file in sorted(folder.rglob("*.md")):
        page, text = file.relative_to(folder).with_suffix("").as_posix(), file.read_text("utf-8")
        if f"/{page}".endswith(f"/{name}"):
            shown = shown or text
        lines.append(f"{page:<26} {text.splitlines()[0].lstrip('# ')}")
        names.append(file.stem)
    if not name:
        end = f"\n`{program('docs')} PAGE` shows one.\nFolder: {folder}\nAddress: {address}\n"
        shown = "\n".join([*lines, end])
    if not shown:
        near = " or ".join(get_close_matches(name, names, 3))
        hint = f"; did you mean {near}?" if near else ""
        raise InputError(f"there is no page {name!r}: `{program('docs')}` lists all{hint}")
    with suppress(BrokenPipeError):  # of `docs | head`
        pydoc.pager(shown)


def folder_of_pages() -> Path | None:
    """Returns the folder of the installed version's pages, or None where there are none."""
    package = Path(__file__).parents[2]
    bases = (package.parent, sysconfig.get_path("data"), site.getuserbase())
    places = [package.parents[1] / "docs"]
    for base in bases:
        places.append(Path(base) / "share/doc/dist-template")
    for place in places:
        if (place / "index.md").is_file():
            return place
    return None
