"""Reads --config files, and finds configuration errors before torch is imported.

These are unreadable files and unknown top-level keys; the parser checks the other keys later.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from ..errors import InputError
from ..project import Project
from .defaults import always_on
from .keys import refuse_misspelt

TOP_LEVEL = {"trainer", "model", "data", "run", "cluster", "optimizer", "lr_scheduler"}
TOP_LEVEL |= {"config", "help", "print_config", "seed_everything"}
OF_SOME_VERBS = {"ckpt_path", "weights_only", "verbose", "return_predictions"}
TOP_LEVEL |= OF_SOME_VERBS
MAX_VALUES = 100_000  # in a file whose aliases are expanded; a full configuration has 200
TOO_DEEP = "is nested too deeply: a configuration has ten levels at most"
SECTIONS = {  # keys that hold keys, and where their class is defined
    "trainer": "",
    "model": "; the model's class is LanguageModule of module.py: edit it there",
    "data": "; the data module's class is DataModule of data.py: edit it there",
}
# Names of environment variables from which Lightning could read keys; this command line does not.
VARIABLE = re.compile(
    r"PL_(?:FIT__|VALIDATE__|TEST__|PREDICT__|(?=TRAINER_|MODEL__|DATA__|CONFIG$))(\w+)"
)


def check(argv: list[str], project: Project | None = None) -> None:
    """Checks the flags and files of `argv`, a verb and what follows it.

    Raises:
        InputError: a file cannot be read, or a key is unknown.
    """
    known = TOP_LEVEL | always_on().keys()
    for path, where in _given(argv[1:]):
        key = path.partition(".")[0]
        if project and "help" not in path:
            refuse_misspelt(path, where, project)
        if key not in known:
            near = get_close_matches(key, known, 1)
            hint = f"; did you mean {near[0]}?" if near else ";"
            what = f"{where}{key} is not a key of this program"
            raise InputError(f"{what}{hint} see --help for every key")


def _given(flags: list[str]) -> Iterator[tuple[str, str]]:
    """Yields each key, dotted, and where it is given, as the beginning of a sentence."""
    for word, following in zip(flags, [*flags[1:], ""], strict=False):
        name, has_value, value = word.lstrip("-").partition("=")
        if not has_value and not following.startswith("--"):
            value = following
        if word == "-c" or name == "config":
            if "://" in value or value.startswith("{"):
                continue  # jsonargparse reads addresses and mappings itself
            for key in _paths(read(value)):
                yield key, f"--config {value}: "
        elif word.startswith("--"):
            is_mapping = value in ("", "null") or value.startswith("{")
            check_section(name, {} if is_mapping else value, f"--{name}")
            yield name, "--"


def _paths(content: dict[str, Any]) -> Iterator[str]:
    for name, value in content.items():
        yield str(name)
        if isinstance(value, dict):
            yield from (f"{name}.{path}" for path in _paths(value))


def read(path: str, flag: str = "--config") -> dict[str, Any]:
    """Returns the keys of the file at `path`.

    Raises:
        InputError: it cannot be read, is not YAML, has no keys or too many values.
    """
    where = f"{flag} {path}"
    try:
        text = Path(path).read_text(encoding="utf-8")
        _check_nodes(yaml.compose(text, yaml.SafeLoader), where)
        content = yaml.safe_load(text)
    except InputError:
        raise
    except OSError as error:
        why = f"seen from {Path.cwd()}: {error.strerror}"
        raise InputError(f"{where} cannot be read, {why}") from error
    except RecursionError as error:
        raise InputError(f"{where} {TOO_DEEP}") from error
    except Exception as error:  # PyYAML's: YAMLError, ValueError, for `!!int x` also others
        raise InputError(f"{where} is not YAML: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise InputError(f"{where} is a {kind}: give keys, as in `trainer: {{max_steps: 9}}`")
    for name, value in content.items():
        check_section(str(name), value, f"{where}: {name}")
    return content


def check_inline(argv: list[str]) -> None:
    """Checks the values of flags that are written as YAML, [...] or {...}, like a file.

    Raises:
        InputError: a key is given twice, or there are too many values or levels.
    """
    for word in argv:
        name, _, value = word.partition("=") if word.startswith("--") else ("", "", word)
        if value.startswith(("[", "{")):
            where = f"{name or value[:40]}"
            try:
                _check_nodes(yaml.compose(value, yaml.SafeLoader), where)
            except yaml.YAMLError:
                pass  # the parser takes it as text, or refuses it
            except RecursionError as error:
                raise InputError(f"{where} {TOO_DEEP}") from error


def _check_nodes(root: Any, where: str) -> None:
    """Refuses a key that is given twice, or beside its section: YAML or the parser would drop one.

    It counts the values as if each alias (*name) were expanded, without expanding it. A key beside
    `<<: *name` replaces one of the mapping that is merged: each is given once.
    """
    nodes, count = [root], 0
    while nodes:
        count += 1
        if count > MAX_VALUES:
            why = "when its aliases (*name) are expanded: remove some"
            raise InputError(f"{where} has over {MAX_VALUES:,} values {why}")
        node = nodes.pop()
        if isinstance(node, yaml.SequenceNode):
            nodes += node.value
        elif isinstance(node, yaml.MappingNode):
            lines: dict[str, int] = {}
            sections: list[str] = []
            for key, value in node.value:
                nodes += key, value
                name, line = str(key.value)[:80], key.start_mark.line + 1
                if name in lines:
                    which = f"twice, in lines {lines[name]} and {line}: remove one of them"
                    raise InputError(f"{where} has the key {name} {which}")
                lines[name] = line
                sections += [name] * isinstance(value, yaml.MappingNode)
            for name, line in lines.items():  # the parser drops a dotted key before its section
                if outer := next((one for one in sections if name.startswith(f"{one}.")), None):
                    which = f"{outer} and {name}, in lines {lines[outer]} and {line}"
                    raise InputError(f"{where} has {which}: move the second into the first")


def check_section(name: str, value: Any, where: str) -> None:
    """Checks the value of a key that holds keys.

    Raises:
        InputError: it is neither keys nor a file of them.
    """
    is_file = isinstance(value, str) and os.path.isfile(value)  # Path raises for some texts
    if name in SECTIONS and not isinstance(value, dict) and not is_file:
        allowed = f"it takes keys, as in {name}.KEY, or a YAML file{SECTIONS[name]}"
        raise InputError(f"{where} is {value!r}: {allowed}")


def refuse_variables() -> None:
    """Refuses configuration keys in environment variables.

    Raises:
        InputError: a variable is set.
    """
    for variable in sorted(os.environ):
        if found := VARIABLE.fullmatch(variable):
            key = found[1].lower().replace("__", ".").replace("trainer_", "trainer.", 1)
            why = "no key is read from the environment"
            raise InputError(f"{variable} is set, and {why}: unset it, and give --{key}")


def with_classes_of_the_library(content: Any, package: str) -> Any:
    """Returns a configuration in which class paths of old modules of `package` are class names.

    Older projects contained the library's modules, and the config.yaml of their runs names them.
    """
    if isinstance(content, list):
        return [with_classes_of_the_library(item, package) for item in content]
    if not isinstance(content, dict):
        return content
    found = {key: with_classes_of_the_library(value, package) for key, value in content.items()}
    if str(found.get("class_path")).startswith(f"{package}."):
        module, _, name = found["class_path"].rpartition(".")
        if not _exists(module):
            found["class_path"] = name
    return found


def _exists(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # a package above it
        return False
