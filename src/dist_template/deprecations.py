"""Keys, values and classes of earlier versions' configurations: their table and translation.

What the table lists is accepted with a warning until the version `removed`, which refuses it;
`migrate` rewrites files. A run's own config.yaml is translated silently, whatever its version.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import yaml

from .errors import InputError, is_first_on_node
from .project import program


@dataclass(frozen=True)
class Deprecation:
    """A key with a new name in the same section, or with new names of its values.

    Keys are dotted, without `init_args`; class names are the values of `<key>.class_path`.
    """

    key: str
    since: str  # the version that renamed it
    removed: str  # the version that refuses the old name: at least one release later
    new: str = ""
    values: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        values = ", ".join(f"{old} is {new}" for old, new in self.values.items())
        return f"{self.key}: {values}" if values else f"{self.key} is {self.new}"


DEPRECATIONS: tuple[Deprecation, ...] = ()  # docs/upgrade.md explains how one is added
_reported: set[str] = set()


def current(text: str, where: str | None) -> tuple[str, list[Deprecation]]:
    """Returns a YAML text with this version's names, and which were old; nothing else changes.

    Args:
        text: Of a configuration.
        where: What names it in messages. None: nothing is reported or refused.

    Raises:
        InputError: an old name is not accepted any more, or is given together with the new one.
    """
    edits: dict[tuple[int, int], tuple[str, Deprecation]] = {}
    root = yaml.compose(text, yaml.SafeLoader) if DEPRECATIONS else None
    for entry in DEPRECATIONS:
        for siblings, key, value in _matches(root, entry.key):
            name = key.value.removesuffix(entry.key.rpartition(".")[2])
            name += entry.new.rpartition(".")[2]
            node, new = (value, entry.values.get(value.value)) if entry.values else (key, name)
            if new is None:
                continue
            if node is key and name in siblings:
                which = f"{entry.key} and {entry.new}, its new name, are both given"
                raise InputError(f"{where or 'config.yaml'}: {which}: remove the first")
            if where is not None:
                command = f"{program('migrate')} {where.partition(' ')[2]}"
                _report(entry, where, f"`{command}` rewrites it")
            edits[node.start_mark.index, node.end_mark.index] = (new, entry)
    for start, end in sorted(edits, reverse=True):
        text = text[:start] + edits[start, end][0] + text[end:]
    return text, [entry for _, entry in edits.values()]


def recorded(text: str) -> Any:
    """Returns the content of the config.yaml of any version's run, under this version's names."""
    return yaml.safe_load(current(text, None)[0])


def _matches(node: Any, rest: str) -> Iterator[tuple[set[str], Any, Any]]:
    """Yields for each place of the dotted key `rest` the keys of its section, its key and value."""
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        if key.value == rest:
            yield {each.value for each, _ in node.value}, key, value
        elif key.value == "init_args" or rest.startswith(f"{key.value}."):
            yield from _matches(value, rest.removeprefix(f"{key.value}."))


def current_flags(argv: list[str]) -> list[str]:
    """Returns a command line in which renamed --KEYs have this version's names. Raises as above."""
    found = list(argv)
    for entry in DEPRECATIONS:
        old = re.compile(rf"--{re.escape(entry.key).replace('.', '.(?:init_args.)?')}(?=[.=]|$)")
        for index, word in enumerate(found):
            if entry.new and (match := old.match(word)):
                _report(entry, match[0], "edit the command")
                found[index] = old.sub(f"--{entry.new}", word, count=1)
    return found


def _report(entry: Deprecation, where: str, cure: str) -> None:
    """Warns of an old name, once. Raises InputError where it is not accepted any more."""
    what = f"{where}: {entry} since version {entry.since}"
    here, end = (re.findall(r"\d+", text) for text in (version("dist-template"), entry.removed))
    if [int(number) for number in here[:3]] >= [int(number) for number in end[:3]]:
        raise InputError(f"{what}, and the old name is not accepted any more: {cure}")
    text = f"warning: {what}; version {entry.removed} refuses the old name: {cure}"
    if text not in _reported and is_first_on_node():
        print(text, file=sys.stderr, flush=True)
    _reported.add(text)


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
