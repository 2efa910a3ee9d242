"""Reads files without importing them: imports (also late ones), private names, comments."""

import ast
import inspect
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

Graph = dict[str, set[str]]
STANDARD = {"os._exit", "sys._current_frames"}  # documented functions of Python's own
LIBRARIES = {"lightning", "torch", "deepspeed", "transformers", "jsonargparse"}
CONNECTORS = {"self", "cls", "super"}
BY_NAME = {"getattr", "setattr", "hasattr"}
PUBLIC = ("strategies", "testing")  # files beside the rooms that stand above all of them
NOT_CORE = ("wings", "text", "compat", *PUBLIC)  # a wing may take what belongs to another library


def modules(package: Path) -> dict[str, Path]:
    """Returns each module of the folder by its name: "room.file", "file" or "" (the package)."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def room_of(name: str, path: Path) -> str:
    """Returns the folder below the package, for a file beside them "public" or "ground"."""
    first, _, rest = name.partition(".")
    return first if rest or path.name == "__init__.py" else _beside(first)


def _beside(name: str) -> str:
    return "public" if name in PUBLIC else "ground"


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _own(name: str, path: Path) -> list[str]:
    own = name.split(".") if name else []
    return own if path.name == "__init__.py" else own[:-1]


def _base(node: ast.ImportFrom, own: list[str], package: str) -> list[str] | None:
    """Returns the module below `package` from which a file in `own` imports."""
    if node.level:
        found: list[str] = own[: len(own) - node.level + 1]
        return [*found, node.module] if node.module else found
    parts = str(node.module or "").split(".")
    return parts[1:] if parts[0] == package else None


def imports(name: str, path: Path, known: set[str], package: str) -> Iterator[str]:
    """Yields the modules of the package that a file imports, at any depth."""
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            yield from (n.removeprefix(f"{package}.") for n in names if n.startswith(f"{package}."))
        elif isinstance(node, ast.ImportFrom):
            base = _base(node, _own(name, path), package)
            for alias in node.names if base is not None else ():
                deeper = ".".join([*(base or ()), alias.name])
                yield deeper if deeper in known else ".".join(base or ())


def graph(package: Path) -> Graph:
    files, known = modules(package), set(modules(package))
    return {n: {*imports(n, path, known, package.name)} - {n} for n, path in files.items()}


def rooms(package: Path) -> Graph:
    files, found = modules(package), {}
    for name, targets in graph(package).items():
        arrows = found.setdefault(room_of(name, files[name]), set())
        arrows |= {room_of(target, files[target]) for target in targets}
    return {room: targets - {room} for room, targets in found.items() if room}


def cycles(arrows: Graph) -> list[str]:
    """Returns one path for each node that reaches itself through a cycle, as "a -> b -> a"."""
    found = {}
    for start in sorted(arrows):
        paths, seen = [[start]], set()
        while paths:
            path = paths.pop(0)
            for target in sorted(arrows.get(path[-1], ())):
                if target == start:
                    found.setdefault(frozenset(path), " -> ".join([*path, start]))
                elif target not in seen:
                    seen.add(target)
                    paths.append([*path, target])
    return list(found.values())


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_names(path: Path) -> list[str]:
    """Returns the private names in a file that another package defines, as "file:line: name"."""
    nodes = [*ast.walk(_tree(path))]
    stored = [n for n in nodes if isinstance(getattr(n, "ctx", None), ast.Store)]
    own = {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    own |= {n.id for n in stored if isinstance(n, ast.Name)}
    for n in stored:
        if isinstance(n, ast.Attribute) and getattr(n.value, "id", "") in CONNECTORS:
            own.add(n.attr)
    found = []
    for node in nodes:
        names = []
        if isinstance(node, ast.Import):
            names = [a.name for a in node.names if any(map(is_private, a.name.split(".")))]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{a.name}" for a in node.names]
            names = [name for name in names if any(map(is_private, name.split(".")))]
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own:
            owner = node.value.func if isinstance(node.value, ast.Call) else node.value
            names = [] if getattr(owner, "id", "") in CONNECTORS else [ast.unparse(node)]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in BY_NAME:
            given = [str(a.value) for a in node.args[1:2] if isinstance(a, ast.Constant)]
            names = [name for name in given if is_private(name) and name not in own]
        line = getattr(node, "lineno", 0)
        found += [f"{path.name}:{line}: {name}" for name in names if name not in STANDARD]
    return found


def inherited_private_names(module: ModuleType) -> dict[str, list[str]]:
    """Returns, by class of `module`, private names of other libraries' bases that it uses."""
    found = {}
    classes = [
        c for c in vars(module).values() if isinstance(c, type) and c.__module__ == module.__name__
    ]
    for one in classes:
        foreign = [base for base in one.__mro__ if base.__module__.split(".")[0] in LIBRARIES]
        theirs = set().union(*(_private_in(base) for base in foreign))
        if names := sorted(theirs & _private_in(one)):
            found[one.__name__] = names
    return found


def _private_in(one: Any) -> set[str]:
    try:
        source = inspect.getsource(one)
    except (OSError, TypeError):  # written in C, or made on the fly
        return set()
    return set(re.findall(r"(?:\bself\.|\bsuper\([^)]*\)\.|\bdef )(_[a-zA-Z]\w*)", source))


def uses_mock(path: Path) -> bool:
    return bool(re.search(r"import.*unittest|unittest.*import", path.read_text(encoding="utf-8")))


def strings(path: Path) -> list[str]:
    constants = [node.value for node in ast.walk(_tree(path)) if isinstance(node, ast.Constant)]
    return [value for value in constants if isinstance(value, str)]


def texts(path: Path) -> list[str]:
    """Returns the strings of a file without its docstrings."""
    nodes = [*ast.walk(_tree(path))]
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    constants = [node for node in nodes if isinstance(node, ast.Constant)]
    values = [node.value for node in constants if id(node) not in docstrings]
    return [value for value in values if isinstance(value, str)]


def names_and_strings(path: Path) -> list[str]:
    """Returns names, attributes and strings of a file's code, without docstrings."""
    tree, found = _tree(path), []
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                docstrings.add(id(first.value))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found.append(node.id)
        elif isinstance(node, ast.Attribute):
            found.append(node.attr)
        elif isinstance(node, ast.arg):
            found.append(node.arg)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) not in docstrings:
                found.append(node.value)
    return found


def closure(package: Path, roots: set[str]) -> set[str]:
    """Returns the modules that importing `roots` can load, with late imports and packages above."""
    arrows, found, to_do = graph(package), set[str](), {*roots}
    while to_do:
        name = to_do.pop()
        found.add(name)
        above = {name.rpartition(".")[0]} & arrows.keys()
        to_do |= (arrows.get(name, set()) | above) - found
    return found - {""}


def wing_names(package: Path) -> set[str]:
    """Returns what wings/ and testing.py import from the core or use of it, as "module.name"."""
    files, found = modules(package), set[str]()
    for name, path in files.items():
        if room_of(name, path) != "wings" and name != "testing":
            continue
        tree = _tree(path)
        for node in ast.walk(tree):
            base = None
            if isinstance(node, ast.ImportFrom):
                base = _base(node, _own(name, path), package.name)
            for alias in node.names if base is not None else ():  # ty: ignore
                target = ".".join([*(base or ()), alias.name])
                # a package may offer a function by the name of a module
                used = _attributes(tree, alias.asname or alias.name) if target in files else set()
                found |= {f"{target}.{each}" for each in used} or {target}
    return {name for name in found if name.split(".")[0] not in NOT_CORE}


def _attributes(tree: ast.Module, name: str) -> set[str]:
    """Returns the attributes of the variable `name` that a file uses."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    return {node.attr for node in found if getattr(node.value, "id", None) == name}


def offered(package: Path) -> set[str]:
    """Returns the names in each module's `__all__`, or PLACES if it is lazy, as "module.name"."""
    found = set()
    for name, path in modules(package).items():
        for node in _tree(path).body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            if any(getattr(target, "id", "") in ("__all__", "PLACES") for target in targets):
                given: Any = node
                value = given.value  # a dictionary, a list or a tuple
                texts = value.keys if isinstance(value, ast.Dict) else getattr(value, "elts", [])
                found |= {f"{name}.{getattr(text, 'value', '')}".lstrip(".") for text in texts}
    return found


FILE = r"(?:[\w-]+/)+[\w-]+\.(?:py|yaml|md|sh|toml)|(?:configs|docs|tests|src)/[\w/-]+"
PATH = re.compile(rf"(?<![\w./{{}}<$*:~-])({FILE})(?![\w/.*<{{(-])")


def comments(path: Path) -> Iterator[str]:
    """Yields the comments of a file, and the docstrings of Python."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield from (line[line.index("#") :] for line in text.splitlines() if "#" in line)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def missing_paths(path: Path, bases: list[Path]) -> list[str]:
    """Returns the paths that a file's comments name and no folder of `bases` or above it has."""
    found, places = [], [*bases, *path.parents]
    for comment in comments(path):
        for match in PATH.finditer(comment):
            if not any((place / match[1]).exists() for place in places):
                found.append(f"{path.name}: {match[1]}")
    return found


# Rooms that are no sections of a configuration, where `model.adapter` is a key.
ROOMS_ALONE = "checkpoint|cli|compat|observe|parallel|text|wings"
DOTTED = re.compile(
    rf"(?<![\w./-])(?:dist_template|(?={ROOMS_ALONE}))((?:\.?\b[a-zA-Z_]\w*)(?:\.[a-zA-Z_]\w*)+)"
)
SUFFIXED = re.compile(r"\.(py|json|html|yaml|data)$")


def missing_modules(text: str, package: Path, groups: set[str]) -> list[str]:
    """Returns the dotted names in `text` that the package does not have: dist_template.room.module,
    room.module, or a name in one. `groups` are entry points' groups, which look the same."""
    found = []
    for match in DOTTED.finditer(text):
        parts, place = match[1].strip(".").split("."), package
        if SUFFIXED.search(match[0]) or match[0] in groups:
            continue
        while parts and (place / parts[0]).is_dir():
            place = place / parts.pop(0)
        file = place / f"{parts[0]}.py" if parts else place
        if parts and file.exists():
            parts.pop(0)
        else:
            file = place / "__init__.py"
        if parts and not re.search(rf"\b{parts[0]}\b", file.read_text("utf-8")):
            found.append(match[0])
    return found


def checks_of_strategies(path: Path) -> list[str]:
    """`isinstance(…, …Strategy)` and `hasattr(strategy, …)` of a file."""
    found = []
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) == 2:
            asked, of = (ast.unparse(each) for each in node.args)
            is_class = node.func.id == "isinstance" and re.search(r"Strategy\b", of)
            has = node.func.id == "hasattr" and asked.split(".")[-1].endswith("strategy")
            if is_class or has:
                found.append(ast.unparse(node))
    return found
