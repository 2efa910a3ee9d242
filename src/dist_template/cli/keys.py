"""Finds misspelt keys below a section before torch is imported, which takes seconds.

The arguments of the classes are read as source text. What is not certain there passes: the parser,
which imports the classes, checks it later.
"""

from __future__ import annotations

import ast
import importlib
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec, resolve_name
from pathlib import Path

from ..errors import InputError
from ..project import Project
from .defaults import always_on

LIBRARY = __name__.partition(".")[0]
LAZY = {LIBRARY, f"{LIBRARY}.text"}  # modules whose `PLACES` name the files of their classes
OF_CLASSES = ("class_path", "init_args", "dict_kwargs")
NEAR = 0.8  # likeness of two keys, as in parser.py
Place = tuple[str, str]  # of a class: module, name
Arguments = dict[str, Place | None]  # and of the dataclass whose fields are keys below this one


def refuse_misspelt(key: str, where: str, project: Project) -> None:
    """Raises InputError if a name in the dotted `key` is unknown and near a known one."""
    path, *names = key.split(".")
    place = _sections(project).get(path)
    for name in names:
        known = place and _arguments(*place)
        if not known or name in OF_CLASSES:
            return
        if name.rstrip("+") not in known:
            near = get_close_matches(f"{path}.{name}", [f"{path}.{one}" for one in known], 1, NEAR)
            if near:
                what = f"{where}{path}.{name} is not a key of this program"
                raise InputError(f"{what}; did you mean {near[0]}? see --help for every key")
            return
        path, place = f"{path}.{name}", known.get(name)


def _sections(project: Project) -> dict[str, Place]:
    sections = {key: (point.module, point.attr) for key, point in always_on().items()}
    sections["run"] = f"{LIBRARY}.cli.run", "RunConfig"
    sections["cluster"] = f"{LIBRARY}.cluster.site", "Site"
    sections["trainer"] = "lightning.pytorch.trainer.trainer", "Trainer"
    for key, given in (("model", project.module), ("data", project.data)):
        module, _, name = given.partition(":")
        sections[key] = (resolve_name(module, project.package), name)
    return sections


@cache
def _arguments(module: str, name: str) -> Arguments | None:
    """Returns what the class accepts; None if that cannot be read."""
    file = file_of(module)
    if file is None:
        return None
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):  # the import will report it
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return _of_class(node, module)
        if isinstance(node, ast.ImportFrom) and name in [one.name for one in node.names]:
            origin = resolve_name("." * node.level + (node.module or ""), package)
            if origin in LAZY:
                place = importlib.import_module(origin).PLACES.get(name)
                origin = f"{LIBRARY}.{place}" if place else ""
            return _arguments(origin, name)
    return None


def file_of(module: str) -> Path | None:
    """Returns the source of a module; the packages that contain it are not imported."""
    root, *parts = module.split(".")
    spec = find_spec(root) if root else None
    if spec and spec.origin and not parts:
        return Path(spec.origin)
    for folder in (spec.submodule_search_locations if spec else None) or ():
        path = Path(folder, *parts)
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file
    return None


def _of_class(node: ast.ClassDef, module: str) -> Arguments | None:
    init = next(
        (n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None
    )
    if init is None and any("dataclass" in ast.unparse(one) for one in node.decorator_list):
        fields = [n for n in node.body if isinstance(n, ast.AnnAssign)]
        known = {ast.unparse(n.target): _below(n, n.value, module) for n in fields}
        return None if node.bases else known
    found: Arguments = {}
    if init:
        given = init.args
        places = [*given.posonlyargs, *given.args][1:]
        defaults: list[ast.expr | None] = [None] * (len(places) - len(given.defaults))
        pairs = [*zip(places, [*defaults, *given.defaults], strict=True)]
        pairs += zip(given.kwonlyargs, given.kw_defaults, strict=True)
        found = {argument.arg: _below(argument, default, module) for argument, default in pairs}
        if given.kwarg is None:
            return found
        rest = [n.value for n in ast.walk(init) if isinstance(n, ast.Attribute | ast.Subscript)]
        if given.kwarg.arg in map(ast.unparse, rest):
            return None  # it takes arguments out of **kwargs by name
    base = _arguments(module, ast.unparse(node.bases[0])) if len(node.bases) == 1 else None
    return None if base is None else base | found


def _below(given: ast.arg | ast.AnnAssign, default: ast.expr | None, module: str) -> Place | None:
    """Where the annotated class is also the default's, the value is no other class's."""
    kind = given.annotation and ast.unparse(given.annotation)
    is_own = isinstance(default, ast.Call) and ast.unparse(default.func) == kind
    return (module, str(kind)) if is_own else None
