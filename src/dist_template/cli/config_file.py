"""Finds and reads --config files, and refuses unreadable ones; parser.py checks the keys."""

import os
import re
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from ..errors import InputError
from ..foreign import check_tree
from ..project import program
from ..records import read_text

__all__ = ["locate", "names", "read"]

# strategies, presets, … : a project may have its own of the same name
SHIPPED = Path(__file__).parents[1] / "configs"

INT = "tag:yaml.org,2002:int"
OF_SOME_VERBS = {"ckpt_path", "weights_only", "verbose", "return_predictions"}


def locate(given: str) -> Path:
    """Returns the path of a configuration: the file `given`, else the file of this name in the
    project's configs/, else in the library's. configs/strategy/fsdp2.yaml has the name
    strategy/fsdp2. Returns `given` if there is no file."""
    if os.path.isfile(given):
        return Path(given)
    above, is_below, name = f"/{given}".rpartition("/configs/")
    name = name if is_below else given
    for folder in (Path(above[1:], "configs"), SHIPPED):
        for file in (folder / name, folder / f"{name}.yaml"):
            if os.path.isfile(file):
                return file
    return Path(given)


def names() -> dict[str, Path]:
    """Returns the files that --config reads by a name: the library's, and the project's in place of
    the library's."""
    found: dict[str, Path] = {}
    for folder in (SHIPPED, Path("configs")):
        for file in folder.rglob("*.yaml"):
            found[file.relative_to(folder).with_suffix("").as_posix()] = file
    return dict(sorted(found.items()))


def _near(given: str) -> str:
    name = given.rpartition("configs/")[2].removesuffix(".yaml")
    known = names()
    near = [each for each in known if each.endswith(f"/{name}")] or get_close_matches(
        name, known, 3
    )
    return f"; did you mean {' or '.join(near)}?" if near else ";"


def read(path: str, flag: str = "--config") -> dict[str, Any]:
    """Returns the keys of the file or the name `path`. Raises InputError if it cannot be read, is
    not YAML, has no keys, or has a key twice."""
    where = f"{flag} {path}"
    try:
        content = yaml.load(read_text(locate(path)), _Loader)
    except OSError as error:
        why = (
            f"seen from {Path.cwd()}: {error.strerror}{_near(path)} `{program('config list')}` has"
            " every name"
        )
        raise InputError(f"{where} cannot be read, {why}") from error
    except RecursionError as error:
        raise InputError(
            f"{where} is nested too deeply: a configuration has ten levels at most"
        ) from error
    except InputError as error:
        raise InputError(f"{where} {error}") from error
    except Exception as error:  # PyYAML's: YAMLError, ValueError, for `!!int x` also others
        raise InputError(f"{where} is not YAML: {' '.join(str(error).split())}") from error
    try:
        check_tree(content)
    except ValueError as error:
        raise InputError(f"{where}: {error}; write the values themselves") from error
    if content is None:
        raise InputError(f"{where} is empty; give keys, as in `trainer: {{max_steps: 9}}`")
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise InputError(f"{where} is a {kind}: give keys, as in `trainer: {{max_steps: 9}}`")
    return content


def misread(text: str) -> str:
    """Returns which number YAML 1.1 makes of an integer that is written as another, and what to
    write; "" for any other. Times are written with colons, and read as seconds: HH:MM:SS."""
    digits = text.lstrip("+-").replace("_", "")
    if re.fullmatch(r"0[0-7]+", digits):
        value = int(digits, 8)
        return f"{text}, which YAML reads as octal, {value}: write {digits.lstrip('0') or 0}"
    if re.fullmatch(r"\d+:\d+", digits):
        first, second = map(int, digits.split(":"))
        return f"{text}, which YAML reads as {60 * first + second}: write the number"
    return ""


def line_of(path: str, key: str) -> int:
    """Returns the line in which the file `path`, which `read` accepts, has a dotted key."""
    node, line = yaml.compose(read_text(locate(path)), yaml.SafeLoader), 1
    while isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            if f"{key}.".startswith(f"{name.value}."):
                key, line, node = key[len(name.value) + 1 :], name.start_mark.line + 1, value
                break
        else:  # merged by `<<`
            return line
    return line


class _Loader(yaml.SafeLoader):
    """Refuses a key that is given twice, or beside its section: YAML or the parser would drop one;
    and a number that YAML 1.1 reads as another than is written: 010 is 8, and 1:30 is 90.

    A key beside `<<: *name` replaces one of the mapping that is merged: each is given once."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self.times = set[int]()  # ids of the nodes that are times, with colons

    def construct_scalar(self, node: Any) -> Any:
        value = super().construct_scalar(node)
        is_time = ":" in value and id(node) in self.times
        if node.tag == INT and not is_time and (found := misread(value)):
            raise InputError(f"has {found} in line {node.start_mark.line + 1}")
        return value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, value in node.value:
            name, line = str(key.value)[:80], key.start_mark.line + 1
            if name in lines:
                raise InputError(
                    f"has the key {name} twice, in lines {lines[name]} and {line}: remove one of"
                    " them"
                )
            lines[name] = line
            if name.rpartition(".")[2] in ("time_limit", "max_time"):
                self.times.add(id(value))
        for section, value in node.value:
            for name in lines if isinstance(value, yaml.MappingNode) else ():
                if name.startswith(
                    f"{section.value}."
                ):  # the parser drops a dotted key before its section
                    raise InputError(
                        f"has {section.value} and {name}: move the second into the first"
                    )
        return super().construct_mapping(node, deep)
