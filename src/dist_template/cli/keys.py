"""Finds unknown sections and misspelt keys before torch is imported, which takes seconds.

The arguments of the classes are read as source text. What is not certain there passes: the parser,
which imports the classes, checks it later and says the same.

1  `_places` says which class each section of the configuration sets.
2  `_given` yields each key of the flags and the files.
3  The section has to be known, and each name after it an argument of the class, or of the dataclass
   below it (`_refuse_misspelt`); a name that is near a known one is refused.
4  A class's arguments are those of its `__init__` or its fields, and those of its base classes, if
   nothing in its source can change that (`_of_class`)."""

import ast
import importlib
from collections.abc import Iterator
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec, resolve_name
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..plugins import registered
from ..project import Project
from . import config_file
from .defaults import always_on
from .verbs import TRAINING

LIBRARY = __name__.partition(".")[0]
LAZY = {LIBRARY, f"{LIBRARY}.text"}  # modules whose `PLACES` name the files of their classes
OF_CLASSES = ("class_path", "init_args", "dict_kwargs")
NEAR = 0.8  # likeness of two keys, as in parser.py
SECTIONS = {
    "trainer": "lightning.pytorch.trainer.trainer:Trainer",
    "run": f"{LIBRARY}.cli.run:RunConfig",
    "cluster": f"{LIBRARY}.cluster.site:Site",
}
RUN_KEYS = f"{LIBRARY}.run_keys"  # entry points whose classes add keys to `run`: see run.py
# Keys without keys below them, and those whose class is chosen.
OTHERS = {"optimizer", "lr_scheduler", "config", "help", "print_config", "seed_everything"}
OTHERS |= {"deepspeed", *config_file.OF_SOME_VERBS}
Place = tuple[str, str]  # of a class: module, name
Arguments = dict[str, Place | None]  # and of the dataclass whose fields are keys below this one


def check(argv: list[str], project: Project) -> None:
    """Checks the flags and files of `argv`, a verb and what follows it. Raises InputError for a
    section that is none, a key that is near a known one, and a file that cannot be read."""
    places = _places(project)
    known = places.keys() | OTHERS
    for path, where in _given(argv[1:], is_training=argv[0] in TRAINING):
        section, _, rest = path.rstrip("+").partition(".")
        _refuse_chosen_class(section, rest.partition(".")[0], where)
        is_own = where == "--" and argv[0] not in TRAINING and "." not in path
        if section not in known and not is_own:  # another verb has flags of its own
            hint = ";"
            near = get_close_matches(section, known, 1, NEAR)
            if near:
                meant = f"{near[0]}.{rest}" if rest else near[0]
                hint = f"; did you mean {meant}?"
            what = f"{where}{path} is not a key of this program"
            raise InputError(f"{what}{hint} see --help for every key")
        _refuse_misspelt(path, where, places)


ARGUMENTS_OF_MAIN = {"model": "module", "data": "data"}


def _refuse_chosen_class(section: str, name: str, where: str) -> None:
    """Refuses `model: {class_path: …, init_args: …}`, the form of LightningCLI in subclass mode."""
    if section in ARGUMENTS_OF_MAIN and name in OF_CLASSES:
        raise InputError(
            f"{where}{section}.{name}: a configuration does not choose the class of `{section}`,"
            f" which is the argument `{ARGUMENTS_OF_MAIN[section]}` of `main` in your __main__.py:"
            f" write the keys of its init_args directly below `{section}`, as in"
            f" {section}.KEY, without class_path"
        )


def _given(flags: list[str], is_training: bool) -> Iterator[tuple[str, str]]:
    """Yields each key, dotted, and where it is given, as the beginning of a sentence. A file that
    cannot be read is refused for a verb of training; another verb has flags to check before."""
    for number, word in enumerate(flags):
        name, has_value, value = word.partition("=")
        if name in ("-c", "--config"):
            if not has_value:
                value = flags[number + 1] if number + 1 < len(flags) else ""
            if not value or "://" in value or value.startswith("{"):
                continue  # jsonargparse reads addresses and mappings
            try:
                content = config_file.read(value)
            except InputError:
                if is_training:
                    raise
                continue
            for path in _paths(content):
                yield path, f"--config {value}:{config_file.line_of(value, path)}: "
        elif name.startswith("--"):
            yield name.removeprefix("--"), "--"


def _paths(content: dict[str, Any]) -> Iterator[str]:
    for name, value in content.items():
        if isinstance(value, dict) and value:
            for path in _paths(value):
                yield f"{name}.{path}"
        else:
            yield str(name)


def _refuse_misspelt(key: str, where: str, places: dict[str, list[Place]]) -> None:
    """Raises InputError if a name in the dotted `key` is unknown and near a known one."""
    path, *names = key.split(".")
    classes = places.get(path, [])
    for name in names:
        known = _arguments_of_all(classes)
        if not known or name in OF_CLASSES:
            return
        if name.rstrip("+") not in known:
            paths = [f"{path}.{argument}" for argument in known]
            near = get_close_matches(f"{path}.{name}", paths, 1, NEAR)
            if near:
                what = f"{where}{path}.{name} is not a key of this program"
                raise InputError(f"{what}; did you mean {near[0]}? see --help for every key")
            return
        below = known.get(name)
        path, classes = f"{path}.{name}", [below] if below else []


def _places(project: Project) -> dict[str, list[Place]]:
    """Returns where the classes of each section are defined."""
    places = SECTIONS | {key: point.value for key, point in always_on().items()}
    found = {key: [_place(value)] for key, value in places.items()}
    found["run"] += [_place(point.value) for point in registered(RUN_KEYS).values()]
    for key, given in (("model", project.module), ("data", project.data)):
        module, name = _place(given)
        found[key] = [(resolve_name(module, project.package), name)]
    return found


def _place(value: str) -> Place:
    module, _, name = value.partition(":")
    return module, name


def _arguments_of_all(classes: list[Place]) -> Arguments | None:
    """Returns what the classes of a section accept; None if that cannot be read of one, or there is
    none."""
    found: Arguments = {}
    for place in classes:
        arguments = _arguments(*place)
        if arguments is None:
            return None
        found |= arguments
    return found or None


@cache
def _arguments(module: str, name: str) -> Arguments | None:
    """Returns what the class accepts; None if that cannot be read."""
    found = _definition(module, name)
    if found is None:
        return None
    return _of_class(*found)


@cache
def _definition(module: str, name: str) -> tuple[ast.ClassDef, str] | None:
    """Returns the class that `name` is in a module, as source text, and the module that defines it;
    None if that cannot be found."""
    file = _file_of(module)
    if file is None:
        return None
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):  # the import will report it
        return None
    alias, is_in_module, attribute = name.rpartition(".")
    if is_in_module:  # L.LightningModule, by `import lightning as L`
        named = _modules_named(alias, tree)
        return _definition(named[0], attribute) if len(named) == 1 else None
    if _times_bound(tree, name) != 1:
        return None
    # A star import may bind it again. Lightning's own ones are known not to.
    if _has_star(tree) and module.partition(".")[0] != "lightning":
        return None
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node, module
        if isinstance(node, ast.ImportFrom):
            for one in node.names:
                if _bound_name(one) == name:
                    return _definition(_origin(node, one.name, package), one.name)
    return None  # it is bound under a condition


def _bound_name(alias: ast.alias) -> str:
    return alias.name if alias.asname is None else alias.asname


def _modules_named(name: str, tree: ast.Module) -> list[str]:
    """Returns the modules that `import … as name` binds at the top of a module."""
    found = []
    for node in tree.body:
        if isinstance(node, ast.Import):
            found += [one.name for one in node.names if _bound_name(one) == name]
    return found


def _has_star(tree: ast.Module) -> bool:
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            return True
    return False


def _origin(node: ast.ImportFrom, name: str, package: str) -> str:
    """Returns the module that an import in `package` takes `name` from; "" if it is not known."""
    module = "." * node.level
    if node.module is not None:
        module += node.module
    origin = resolve_name(module, package)
    if origin not in LAZY:
        return origin
    place = importlib.import_module(origin).PLACES.get(name)
    return f"{LIBRARY}.{place}" if place else ""


def _times_bound(tree: ast.Module, name: str) -> int:
    """Returns how often a module binds a name, below conditions too."""
    found = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found += node.name == name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found += [_bound_name(one) for one in node.names].count(name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found += node.id == name
    return found


def _file_of(module: str) -> Path | None:
    root, *parts = module.split(".")
    spec = find_spec(root) if root else None
    if spec is None or spec.submodule_search_locations is None:
        return None
    for folder in spec.submodule_search_locations:
        path = Path(folder, *parts)
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file
    return None


# Statements of a class whose meaning for its constructor is known.
PLAIN = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Assign, ast.AnnAssign, ast.Expr, ast.Pass)


def _of_class(node: ast.ClassDef, module: str) -> Arguments | None:
    """Returns what the constructor accepts; None if something may change that: a decorator, a
    metaclass, `__new__`, a condition, arguments that are read out of **kwargs."""
    decorators = {ast.unparse(each).partition("(")[0] for each in node.decorator_list}
    functions = [each for each in node.body if isinstance(each, ast.FunctionDef)]
    names = [each.name for each in functions]
    if node.keywords or not all(isinstance(each, PLAIN) for each in node.body):
        return None
    if not decorators <= {"dataclass", "dataclasses.dataclass"}:
        return None
    if "__new__" in names or names.count("__init__") > 1:
        return None
    init = next((each for each in functions if each.name == "__init__"), None)
    if init is None and _is_dataclass(node):
        return _of_dataclass(node, module)
    found: Arguments = {}
    if init is not None:
        found = _of_constructor(init.args, module)
        rest = init.args.kwarg
        if rest is None:
            return found
        if init.decorator_list or not _is_passed_on(init, rest.arg):
            return None  # it takes arguments out of **kwargs
    if not node.bases:
        return found
    if len(node.bases) > 1:
        return None
    inherited = _arguments(module, ast.unparse(node.bases[0]))
    return None if inherited is None else inherited | found


def _of_dataclass(node: ast.ClassDef, module: str) -> Arguments | None:
    """Returns the fields of a dataclass and of those that it inherits from."""
    known: Arguments = {}
    for field in node.body:
        if isinstance(field, ast.AnnAssign):
            known[ast.unparse(field.target)] = _below(field, field.value, module)
    for base in node.bases:
        above = _definition(module, ast.unparse(base))
        if above is None:
            return None
        if _is_dataclass(above[0]):  # others add no argument
            inherited = _of_class(*above)
            if inherited is None:
                return None
            known = inherited | known
    return known


def _of_constructor(given: ast.arguments, module: str) -> Arguments:
    """Returns the arguments of a method, without `self`."""
    positional = [*given.posonlyargs, *given.args][1:]
    # ast has the defaults of the last ones alone.
    num_without = len(positional) - len(given.defaults)
    defaults: list[ast.expr | None] = [None] * num_without + given.defaults
    found = {}
    for argument, default in zip(positional, defaults, strict=True):
        found[argument.arg] = _below(argument, default, module)
    for argument, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        found[argument.arg] = _below(argument, default, module)
    return found


def _is_passed_on(init: ast.FunctionDef, name: str) -> bool:
    """Returns whether **`name` is only given to the base class's constructor, once."""
    num_uses = num_passed = 0
    for node in ast.walk(init):
        if isinstance(node, ast.Name) and node.id == name:
            num_uses += 1
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "super().__init__":
            unpacked = [ast.unparse(each.value) for each in node.keywords if each.arg is None]
            num_passed += name in unpacked
    return num_uses == num_passed == 1


def _is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(one) for one in node.decorator_list)


def _below(given: ast.arg | ast.AnnAssign, default: ast.expr | None, module: str) -> Place | None:
    """Returns where the dataclass is whose fields are keys below this argument: its annotation is
    also its default's class, so that the value is no other class's."""
    if given.annotation is None or not isinstance(default, ast.Call):
        return None
    kind = ast.unparse(given.annotation)
    if ast.unparse(default.func) != kind:
        return None
    return module, kind
