"""`migrate`: gives the keys and values of earlier versions their new names, in YAML files.

Only these names change: comments, order, quotes and spaces stay.
"""

from __future__ import annotations

from pathlib import Path

import yaml

from .. import deprecations
from ..cli import config_file
from ..errors import InputError
from ..project import Flags, Project
from ..records import write_atomically


def main(argv: list[str], project: Project) -> None:
    """Rewrites the given files, all or none.

    Raises:
        InputError: a file cannot be read, or a name cannot be replaced.
    """
    parser = Flags("migrate", description=__doc__)
    what = "a YAML file, or a folder, for every *.yaml and *.yml in it"
    parser.add_argument("configs", nargs="+", type=Path, metavar="CONFIG", help=what)
    given = parser.parse_args(argv[1:]).configs
    folders = ((path.rglob("*.y*ml") if path.is_dir() else [path]) for path in given)
    paths = sorted({path for folder in folders for path in folder})
    changed = {path: found for path in paths if (found := migrated(path))[1]}
    for path, (text, entries) in changed.items():
        write_atomically(path.resolve(), text)
        print("\n".join(f"{path}: {entry}" for entry in entries))
    print(f"{len(changed)} of {len(paths)} files had names of earlier versions")


def migrated(path: Path) -> tuple[str, list[deprecations.Deprecation]]:
    """Returns the text of a file with this version's names, and which were old.

    ruamel.yaml would write every line again, with its own indentation and line breaks.
    """
    config_file.read(str(path), "file", report=False)
    old = path.read_bytes().decode()
    new, entries = deprecations.current(old, None)
    try:
        pairs = zip(yaml.parse(old), yaml.parse(new), strict=True)
        differing = sum(repr(before) != repr(after) for before, after in pairs)
    except ValueError:  # of different lengths
        differing = -1
    if differing != len(entries):
        names = "; ".join(str(entry) for entry in entries)
        raise InputError(f"{path} would lose more than the old names: edit it ({names})")
    return new, entries
