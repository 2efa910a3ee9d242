"""`config`: lists the configurations that --config reads by a name, shows one, or copies one into
the project; writes a training's DeepSpeed JSON.

config list                    the library's and the project's, with a line each
config show strategy/fsdp2     the file that --config strategy/fsdp2 reads
config copy strategy/fsdp2     writes it to configs/strategy/fsdp2.yaml, where it is yours
config deepspeed --config …    writes what fit would give to DeepSpeed; `config deepspeed --help`"""

from argparse import RawDescriptionHelpFormatter
from pathlib import Path

from ...cli.config_file import locate, names, read
from ...errors import InputError, reason
from ...project import Flags, Project
from ...records import write_atomically
from . import deepspeed_json

SHIPPED = Path(__file__).parents[2] / "configs"
PROJECT = Path("configs")


def main(argv: list[str], project: Project) -> None:
    """Runs `list`, `show NAME`, `copy NAME` or `deepspeed`. Raises InputError without such a
    configuration, or if a copy exists."""
    if argv[1:2] == ["deepspeed"]:
        deepspeed_json.main(argv[2:], project)
        return
    parser = Flags("config", description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("list", "show", "copy", "deepspeed"))
    parser.add_argument("name", nargs="?", default="", help="of the list, such as strategy/fsdp2")
    given = parser.parse_args(argv[1:])
    if given.action == "list" and given.name:
        raise InputError(f"config list takes no name: `config show {given.name}` shows one")
    if given.action == "list":
        for name, file in names().items():
            first = file.read_text("utf-8").partition("\n")[0]
            about = first.removeprefix("#").strip() if first.startswith("#") else ""
            owner = "" if SHIPPED in file.parents else "yours"
            if owner and (SHIPPED / f"{name}.yaml").is_file():
                owner = "overridden"
            print(f"{name:<24} {owner:<10} {about}")
        return
    if not given.name:
        raise InputError(f"config {given.action} needs a name: `config list` has every name")
    read(given.name, f"config {given.action}")  # refuses a name that is nowhere
    file = locate(given.name)
    if given.action == "show":
        print(f"# {file.absolute()}\n{file.read_text('utf-8')}", end="")
        return
    _copy(file)


def _copy(file: Path) -> None:
    is_shipped = SHIPPED in file.parents
    copy = PROJECT / file.relative_to(SHIPPED) if is_shipped else file
    if copy.exists():
        raise InputError(
            f"config copy: {copy} is yours already: edit it, or remove it for the library's"
        )
    try:
        copy.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(copy, file.read_text("utf-8"))
    except OSError as error:
        raise InputError(f"config copy: {copy} cannot be written: {reason(error)}") from error
    print(
        f"written to {copy}: from now on --config {copy.relative_to(PROJECT).with_suffix('')}"
        " reads it"
    )
