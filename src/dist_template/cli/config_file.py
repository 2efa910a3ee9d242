"""Reads and checks a --config file, before the slow imports."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from ..errors import InputError

MOST_VALUES = 100_000  # values in a file with its aliases expanded; a full configuration has 200
SECTIONS = {  # keys that hold keys, and where their class is defined
    "trainer": "",
    "model": "; the model's class is LanguageModule of module.py: edit it there",
    "data": "; the data module's class is DataModule of data.py: edit it there",
}
REMOVED = {"follow_links": False, "loss_kernel": "torch"}  # keys of older runs, whose defaults are what is done now
# Names of environment variables from which Lightning could read keys; this command line does not.
VARIABLE = re.compile(r"PL_(?:FIT__|VALIDATE__|TEST__|PREDICT__|(?=TRAINER_|MODEL__|DATA__|CONFIG$))(\w+)")


def read(path: str) -> dict[str, Any]:
    """Returns the keys of the file at `path`.

    Raises:
        InputError: it cannot be read, is not YAML, holds no keys, or far too many.
    """
    where = f"--config {path}"
    try:
        text = Path(path).read_text(encoding="utf-8")
        _check_size(yaml.compose(text, yaml.SafeLoader), where)
        content = yaml.safe_load(text)
    except OSError as error:
        raise InputError(f"{where} cannot be read, seen from {Path.cwd()}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{where} is not YAML: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise InputError(
            f"{where} is a {type(content).__name__}: give keys and values, as in `trainer: {{max_steps: 9}}`"
        )
    for name, value in content.items():
        check_section(str(name), value, f"{where}: {name}")
    return content


def with_classes_of_the_library(content: Any, package: str) -> Any:
    """Returns a configuration in which a class path of `package` that is now the library's is the class's name alone.

    Older projects contained the library's modules, and the config.yaml of their runs names them.
    """
    if isinstance(content, list):
        return [with_classes_of_the_library(item, package) for item in content]
    if not isinstance(content, dict):
        return content
    kept = {key: value for key, value in content.items() if key not in REMOVED or value != REMOVED[key]}
    found = {key: with_classes_of_the_library(value, package) for key, value in kept.items()}
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


def check_section(name: str, value: Any, where: str) -> None:
    """Checks the value of a key that holds keys.

    Raises:
        InputError: it is neither keys nor a file of them.
    """
    is_file = isinstance(value, str) and os.path.isfile(value)  # False for what is no name, where Path raises
    if name in SECTIONS and value is not None and not isinstance(value, dict) and not is_file:
        raise InputError(f"{where} is {value!r}: it takes keys, as in {name}.KEY, or a YAML file{SECTIONS[name]}")


def refuse_variables() -> None:
    """Refuses configuration keys in environment variables.

    Raises:
        InputError: a variable is set.
    """
    for variable in sorted(os.environ):
        if found := VARIABLE.fullmatch(variable):
            key = found[1].lower().replace("__", ".").replace("trainer_", "trainer.", 1)
            raise InputError(f"{variable} is set, and no key is read from the environment: unset it, and give --{key}")


def _check_size(root: Any, where: str) -> None:
    """Counts the values as if each alias (*name) were expanded, without expanding it."""
    todo, count = [root], 0
    while todo:
        count += 1
        if count > MOST_VALUES:
            raise InputError(
                f"{where} has over {MOST_VALUES:,} values when its aliases (*name) are expanded: remove some"
            )
        node = todo.pop()
        if isinstance(node, yaml.SequenceNode):
            todo += node.value
        elif isinstance(node, yaml.MappingNode):
            todo += [part for pair in node.value for part in pair]
