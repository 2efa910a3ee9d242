"""Mistakes in --config files and flags that show before torch is imported: told in a moment, not after ten seconds.

A misspelt key, a word for a number, a file that is not there, sizes that do not divide. Which keys there are stands in
the constructors. They are read as text (`ast`): importing them is what takes the time. What is not understood here
passes, and the parser of fit.py, which knows everything, comes after it.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from ..errors import InputError
from ..project import Project
from ..text import sources
from ..text.limits import check_numbers
from . import config_file

HERE = Path(__file__).parent
LIBRARY = HERE.parent
NUMBERS = {"int", "float", "None", "Optional", "Union", ""}  # words of the annotation of a number
LIGHTNINGS = {"config", "seed_everything", "optimizer", "lr_scheduler"}  # keys that LightningCLI adds
READS_FILES = ("TextFiles", "Jsonl", "Parquet")
SIZES = ("seq_len", "global_batch_size", "micro_batch_size", "validation_share", "test_share")


@dataclass
class Given:
    """One value, the names on the way to it, and where it was given."""

    path: tuple[str, ...]
    value: Any
    where: str


@dataclass
class Class:
    """A class as its file has it: its arguments with their annotations and defaults, None where all are allowed."""

    file: Path
    arguments: dict[str, tuple[str, Any]] | None
    is_dataclass: bool = False


def refuse(argv: list[str], project: Project) -> None:
    """Look at `argv`, a verb and what follows it.

    Raises:
        InputError: this cannot run.
    """
    config_file.refuse_variables()
    given = list(_given(argv[1:]))
    if any(one.path[0] in ("help", "print_config") for one in given):
        return
    slots, known = _slots(project), _top(argv[0])
    for one in given:
        config_file.check_section(".".join(one.path), one.value, one.where)
        if one.path[0] in slots:
            _check(one, one.path[:1], slots[one.path[0]])
        elif one.path[0] not in known and (near := get_close_matches(one.path[0], {*slots, *known}, 1)):
            raise InputError(_unknown(one, one.path[:1], near))
    defaults = {name: default for name, (_, default) in (slots["data"].arguments or {}).items()}
    _check_data(defaults, [one for one in given if one.path[0] == "data"], trains=argv[0] == "fit")


# ---- what was given --------------------------------------------------------------------------------------------------


def _given(flags: list[str]) -> Iterator[Given]:
    """In order: a later one wins."""
    words = iter(enumerate(flags))
    for number, word in words:
        if not word.startswith("--") and word != "-c":
            continue
        name, has_value, text = word.lstrip("-").partition("=")
        if not has_value and number + 1 < len(flags) and not flags[number + 1].startswith("--"):
            text = next(words)[1]
        if name in ("c", "config"):
            yield from _of_file(text)
        else:
            yield Given(tuple(name.split(".")), _value(text), f"--{name}")


def _of_file(text: str) -> Iterator[Given]:
    if "://" not in text and not text.startswith("{"):
        yield from _leaves((), config_file.read(text), f"--config {text}")


def _leaves(path: tuple[str, ...], value: Any, where: str) -> Iterator[Given]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves((*path, str(name)), inner, where)
    elif path:
        yield Given(path, value, where)


def _value(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


# ---- what is known ---------------------------------------------------------------------------------------------------


@cache
def _parsed(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_text(encoding="utf-8"), str(file))
    except SyntaxError as error:
        raise InputError(f"{file}:{error.lineno}: {error.msg}: {(error.text or '').strip()}") from error


def _slots(project: Project) -> dict[str, Class]:
    """Top-level key -> the class whose arguments it takes: fit.py and defaults.py pair them, in calls and in a dict."""
    cli, defaults = HERE / "fit.py", HERE / "defaults.py"
    found = {"model": _users(project, project.module), "data": _users(project, project.data)}
    for file, node in ((each, node) for each in (cli, defaults) for node in ast.walk(_parsed(each))):
        keys, values = (node.keys, node.values) if isinstance(node, ast.Dict) else ([], [])
        if isinstance(node, ast.Call) and len(node.args) == 2:
            keys, values = node.args[1:], node.args[:1]
        for key, value in zip(keys, values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(value, ast.Name):
                found[str(key.value)] = _class(value.id, file)
    model, data = (found.pop(key) or Class(HERE, None) for key in ("model", "data"))  # None: renamed
    slots = {key: one for key, one in found.items() if one}
    return {**slots, "model": model, "data": data, "trainer": _lightning("__init__")}


def _top(verb: str) -> set[str]:
    """Keys without a class: Lightning's, and whatever fit.py has as a string."""
    strings = {node.value for node in ast.walk(_parsed(HERE / "fit.py")) if isinstance(node, ast.Constant)}
    return (
        LIGHTNINGS
        | {text.lstrip("-") for text in strings if isinstance(text, str)}
        | {*(_lightning(verb).arguments or ())}
    )


def _lightning(method: str) -> Class:
    """The Trainer's."""
    package = importlib.util.find_spec("lightning")
    assert package and package.origin
    file = Path(package.origin).parent / "pytorch" / "trainer" / "trainer.py"
    functions = [n for n in ast.walk(_parsed(file)) if isinstance(n, ast.FunctionDef) and n.name == method]
    return Class(file, _arguments(functions[0]) if functions else None)


def _users(project: Project, where: str) -> Class | None:
    file = project.file_of(where)
    return _class(where.partition(":")[2], file) if file else None


def _class(name: str, file: Path) -> Class | None:
    """The class that `name` stands for in `file`: defined there, or imported from its package or this library."""
    for node in _parsed(file).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            init = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
            is_dataclass = any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)
            if is_dataclass and node.bases:
                return Class(file, None)  # a base has fields of its own
            fields = {
                n.target.id: (ast.unparse(n.annotation), _default(n.value))
                for n in node.body
                if is_dataclass and isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
            }
            return Class(file, _arguments(init[0]) if init else fields or None, is_dataclass)
        if isinstance(node, ast.ImportFrom) and name in {alias.name for alias in node.names}:
            parts = (node.module or "").split(".")
            folder = file.parents[node.level - 1] if node.level else LIBRARY
            if not node.level and parts.pop(0) != LIBRARY.name:
                return None
            other = folder.joinpath(*parts).with_suffix(".py")
            return _class(name, other) if other.exists() else None
    return None


def _arguments(function: ast.FunctionDef) -> dict[str, tuple[str, Any]] | None:
    """Name -> annotation and default."""
    if function.args.kwarg:
        return None
    places = [*function.args.posonlyargs, *function.args.args][1:]
    defaults = [None] * (len(places) - len(function.args.defaults)) + function.args.defaults
    pairs = [
        *zip(places, defaults, strict=True),
        *zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True),
    ]
    return {place.arg: (ast.unparse(place.annotation or ast.Constant(None)), _default(value)) for place, value in pairs}


def _default(node: ast.expr | None) -> Any:
    try:
        return ast.literal_eval(node) if node else None
    except ValueError:  # a call, a name: not needed
        return None


# ---- whether they go together ----------------------------------------------------------------------------------------


def _check(given: Given, known: tuple[str, ...], of: Class) -> None:
    """That `given`'s next name is one of `of`'s arguments, and that a number is a number."""
    if of.arguments is None or len(given.path) == len(known):
        return
    name = given.path[len(known)].rstrip("+")
    path = (*known, name)
    if name not in of.arguments:
        if not of.is_dataclass and name in ("class_path", "init_args", "dict_kwargs", "help"):
            return
        raise InputError(_unknown(given, path, get_close_matches(name, of.arguments, 1)))
    annotation = of.arguments[name][0]
    inner = _class(annotation, of.file)
    if inner and inner.is_dataclass:
        _check(given, path, inner)
    elif len(given.path) == len(path) and isinstance(given.value, str) and given.value not in ("", "null", "None"):
        if NUMBERS.issuperset(re.split(r"\W+", annotation)) and not _is_number(given.value):
            raise InputError(f"{_at(given, path)} is {given.value!r}: it must be a number ({annotation})")


def _is_number(text: str) -> bool:
    try:
        float(text)  # "1e-3", which YAML reads as a word
    except ValueError:
        return False
    return True


def _check_data(values: dict[str, Any], given: list[Given], trains: bool) -> None:
    """The sizes on one rank, what is wrong there is wrong on any number; and that the source's files are there."""
    source, arguments = "", {}
    for one in given:
        if any(name.endswith("+") for name in one.path):
            return
        _, name, *rest = (*one.path, "") if len(one.path) == 1 else one.path
        rest = [each for each in rest if each != "init_args"]
        if name != "source":
            values[name] = values.get(name) if rest else one.value
        elif not rest or rest == ["class_path"]:
            source, arguments = str(one.value), arguments if one.value == source else {}
        elif len(rest) == 1:
            arguments[rest[0]] = one.value
    if trains and all(isinstance(values.get(name), int | float) for name in SIZES):
        check_numbers(SimpleNamespace(**values), world_size=1)
    kind = getattr(sources, source, None) if source in READS_FILES else None
    if kind and values.get("check_source") is not False and isinstance(arguments.get("paths"), list):
        if set(arguments) <= {*inspect.signature(kind).parameters}:
            kind(**arguments).files()


def _at(given: Given, path: tuple[str, ...]) -> str:
    return given.where if given.where == f"--{'.'.join(path)}" else f"{given.where}: {'.'.join(path)}"


def _unknown(given: Given, path: tuple[str, ...], near: list[str]) -> str:
    hint = f"; did you mean {'.'.join([*path[:-1], *near])}?" if near else ";"
    return f"{_at(given, path)} is no key of this program{hint} see --help for every key"
