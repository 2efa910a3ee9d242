"""`docs`: lists the pages of the installed version's documentation, or shows one, offline.

A wheel installs them into share/doc/dist-template; a checkout, or vendor/dist-template, has
docs/."""

import pydoc
import site
import sysconfig
from contextlib import suppress
from pathlib import Path

from ...errors import InputError
from ...project import Flags, Project, program


def main(argv: list[str], project: Project) -> None:
    parser = Flags("docs", description=__doc__)
    parser.add_argument("page", nargs="?", default="", help="a name of the list, or its end: zero")
    name = parser.parse_args(argv[1:]).page.removesuffix(".md").removeprefix("docs/")
    folder, shown = folder_of_pages(), []
    for file in sorted(folder.rglob("*.md")):
        page, text = file.relative_to(folder).with_suffix("").as_posix(), file.read_text("utf-8")
        if not name:
            shown.append(f"{page:<26} {text.splitlines()[0].lstrip('# ')}")
        elif f"/{page}".endswith(f"/{name}"):
            shown.append(text)
    if not shown:
        generated = ""
        if name == "reference":
            generated = f" here, as `make docs` writes it (`{program('fit')} --help` has the keys)"
        raise InputError(f"there is no page {name!r}{generated}: `{program('docs')}` lists all")
    with suppress(BrokenPipeError):  # of `docs | head`
        pydoc.pager("\n".join(shown) + "\n")


def folder_of_pages() -> Path:
    """Returns the folder of the installed version's pages. Raises InputError where there are
    none."""
    package = Path(__file__).parents[2]
    places = [package.parents[1] / "docs"]  # of a checkout
    for base in (package.parent, sysconfig.get_path("data"), site.getuserbase()):
        places.append(Path(base, "share/doc/dist-template"))
    for place in places:
        if (place / "index.md").is_file():
            return place
    raise InputError(
        "no page is installed here; the project's README.md has the address of the documentation"
    )
