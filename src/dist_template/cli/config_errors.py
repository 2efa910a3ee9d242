"""Configuration errors that are found before torch is imported: unreadable files and unknown keys.

Checks the top-level keys and the keys of `model` and `data`, which are the arguments of the project's two classes:
their files are read as text (`ast`), because importing them takes seconds. The parser checks everything else.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

import yaml

from ..errors import InputError
from ..project import Project
from . import config_file
from .defaults import ALWAYS_ON

TOP_LEVEL = {"trainer", "model", "data", "run", "optimizer", "lr_scheduler", "seed_everything", *ALWAYS_ON}
TOP_LEVEL |= {"config", "help", "print_config", "ckpt_path", "weights_only", "verbose", "return_predictions"}


def check(argv: list[str], project: Project) -> None:
    """Checks the flags and files of `argv`, a verb and what follows it.

    Raises:
        InputError: a file cannot be read, or a key is unknown.
    """
    config_file.refuse_variables()
    known = {"model": _arguments(project, project.module), "data": _arguments(project, project.data), "": TOP_LEVEL}
    for key, where in _given(argv[1:]):
        section, dot, name = key.rpartition(".")
        if known[section] and name not in known[section]:
            near = get_close_matches(name, known[section], 1)
            hint = f"; did you mean {section}{dot}{near[0]}?" if near else ";"
            raise InputError(f"{where}{key} is not a key of this program{hint} see --help for every key")


def _given(flags: list[str]) -> Iterator[tuple[str, str]]:
    """Yields each top-level key, `model.KEY` and `data.KEY`, and where it is given, as the beginning of a sentence."""
    for word, following in zip(flags, [*flags[1:], ""], strict=False):
        name, has_value, value = word.lstrip("-").partition("=")
        if not has_value and not following.startswith("--"):
            value = following
        if word == "-c" or name == "config":
            if "://" not in value and not value.startswith("{"):  # jsonargparse reads addresses and mappings itself
                yield from _keys(config_file.read(value), f"--config {value}: ")
        elif word.startswith("--"):
            config_file.check_section(name, _parsed(value), f"--{name}")
            section, *below = name.split(".")
            yield from _keys({section: dict.fromkeys(below[:1])}, "--")


def _keys(content: dict[str, Any], where: str) -> Iterator[tuple[str, str]]:
    for section, values in content.items():
        yield str(section), where
        if section in ("model", "data") and isinstance(values, dict):
            yield from ((f"{section}.{str(name).rstrip('+')}", where) for name in values)


def _parsed(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _arguments(project: Project, where: str) -> set[str]:
    """Returns the constructor's arguments of the class at `where`; {} if it inherits them or passes them on."""
    file, name = project.file_of(where), where.partition(":")[2]
    if file is None:
        return set()
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"), str(file))
    except SyntaxError as error:
        raise InputError(f"{file}:{error.lineno}: {error.msg}: {(error.text or '').strip()}") from error
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    body = [node for one in classes for node in one.body]
    found = [node.args for node in body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    if not found or found[0].kwarg:
        return set()
    return {argument.arg for argument in [*found[0].posonlyargs, *found[0].args, *found[0].kwonlyargs][1:]}
