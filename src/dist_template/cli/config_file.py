"""Reads --config files, and refuses unreadable files and unknown sections before torch is imported.

The parser checks the keys below a section later, when it has imported the classes.
"""

from __future__ import annotations

import os
import re
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from ..errors import InputError
from .defaults import always_on

__all__ = ["check", "read"]

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
VARIABLE = re.compile(r"PL_(?:FIT__|VALIDATE__|TEST__|PREDICT__|(?=TRAINER_|MODEL__|DATA__|CONFIG$))(\w+)")


def check(argv: list[str]) -> None:
    """Checks the sections in the flags and files of `argv`, a verb and what follows it.

    Raises:
        InputError: a file cannot be read, or a section is unknown.
    """
    flags, known = argv[1:], TOP_LEVEL | always_on().keys()
    for word, following in zip(flags, [*flags[1:], ""], strict=False):
        name, has_value, value = word.lstrip("-").partition("=")
        if not has_value and not following.startswith("--"):
            value = following
        if word == "-c" or name == "config":
            if "://" in value or value.startswith("{"):
                continue  # jsonargparse reads addresses and mappings itself
            for key in read(value):
                _refuse_unknown(str(key), known, f"--config {value}: ")
        elif word.startswith("--"):
            is_mapping = value in ("", "null") or value.startswith("{")
            check_section(name, {} if is_mapping else value, f"--{name}")
            _refuse_unknown(name.partition(".")[0], known, "--")


def _refuse_unknown(section: str, known: set[str], where: str) -> None:
    if section not in known:
        near = get_close_matches(section, known, 1)
        hint = f"; did you mean {near[0]}?" if near else ";"
        what = f"{where}{section} is not a key of this program"
        raise InputError(f"{what}{hint} see --help for every key")


def read(path: str, flag: str = "--config", package: str | None = None) -> dict[str, Any]:
    """Returns the keys of the file at `path`; with `package`, with its classes' present names (rename_old_classes).

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
    if package:
        rename_old_classes(content, package)
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
            for outer in sections:  # the parser drops a dotted key before its section
                for name, line in lines.items():
                    if name.startswith(f"{outer}."):
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


def rename_old_classes(content: object, package: str) -> bool:
    """Replaces class paths of modules that `package` no longer has by the classes' names, in place.

    Older projects contained the library's modules, and the config.yaml of their runs names them.
    Returns whether anything was replaced.
    """
    renamed = False
    if isinstance(content, list):
        for item in content:
            renamed |= rename_old_classes(item, package)
    elif isinstance(content, dict):
        for value in content.values():
            renamed |= rename_old_classes(value, package)
        module, _, name = str(content.get("class_path")).rpartition(".")
        if module.startswith(f"{package}."):
            try:
                exists = find_spec(module) is not None
            except ModuleNotFoundError:  # a package above it
                exists = False
            if not exists:
                content["class_path"] = name
                renamed = True
    return renamed
