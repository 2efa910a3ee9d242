"""Plugins: what packages, the user's project and this library register as entry points.

Groups: dist_template.verbs: a module with `main(argv, project)`, started by `python -m <package>
    NAME`. dist_template.hooks: a module with functions that the core calls, see hooks.py.
    dist_template.callbacks: a Lightning callback of every run, configured by its name's key.
    dist_template.rules: a rule of diagnosis, a function from a run to findings.
    dist_template.launch_targets: a target of `launch --on NAME`. dist_template.strategies,
    dist_template.loggers: classes that `class_path` knows by their names. dist_template.shardings,
    dist_template.estimates: by a strategy's name, what answers for its configuration.
    dist_template.checkpoint_formats: likewise, the format of its checkpoints.

A source of text needs none: YAML takes the import path of its class. docs/extend.md has an example
of each. A value is "module" or "module:attribute". Nothing is imported before `EntryPoint.load`."""

import importlib.util
import re
import tomllib
from collections.abc import Collection
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from .errors import InputError
from .project import program_name

__all__ = ["registered"]

HOOKS = "dist_template.hooks"
LIBRARY = __name__.split(".")[0]


def registered(group: str, taken: Collection[str] = ()) -> dict[str, EntryPoint]:
    """Returns the entry points of a group, sorted by name.

    `taken` are names that this library has without an entry point.

    For a package that is imported from its source folder (this library or the user's project),
    pyproject.toml replaces the installed metadata: the package may not be installed, and the
    metadata of an editable install is as old as the installation.

    Raises InputError if two packages register one name, or one registers a name of this library, or
    a pyproject.toml is not valid TOML."""
    points = []  # (package, entry point)
    in_source = set()  # packages
    for import_name in dict.fromkeys((LIBRARY, program_name())):
        if file := _pyproject(import_name):
            try:
                project = tomllib.loads(file.read_text(encoding="utf-8")).get("project", {})
            except tomllib.TOMLDecodeError as error:
                raise InputError(f"{file}: {error}") from error
            package = normalized(project.get("name", import_name))
            in_source.add(package)
            for name, value in project.get("entry-points", {}).get(group, {}).items():
                points.append((package, EntryPoint(name, value, group)))
    for point in entry_points(group=group):
        package = normalized(point.dist.name) if point.dist else "a package without metadata"
        if package not in in_source:
            points.append((package, point))
    owners, found = dict.fromkeys(taken, LIBRARY), {}
    for package, point in points:
        if (other := owners.setdefault(point.name, package)) != package:
            raise InputError(
                f"{other} and {package} both have {point.name!r} in the group"
                f" {point.group}: uninstall one, or rename it in its pyproject.toml"
            )
        found.setdefault(point.name, point)
    return dict(sorted(found.items()))


def ask(name: str, *arguments: object) -> Any:
    """Calls the function `name` of the first hook that has it, see hooks.py, and returns its
    result."""
    for point in registered(HOOKS).values():
        if function := getattr(point.load(), name, None):
            return function(*arguments)
    return f"no package has the hook {name}"


@cache
def loaded(group: str) -> dict[str, Any]:
    """Returns what the entry points of a group name, imported once in a process; raises InputError
    as `registered`."""
    return {name: point.load() for name, point in registered(group).items()}


def _pyproject(import_name: str) -> Path | None:
    """Returns the pyproject.toml of a package in a source folder, flat or below src/."""
    spec = importlib.util.find_spec(import_name) if import_name else None
    for place in getattr(spec, "submodule_search_locations", None) or ():
        parent = Path(place).absolute().parent
        file = (parent.parent if parent.name == "src" else parent) / "pyproject.toml"
        if file.is_file():
            return file
    return None


def normalized(name: str) -> str:
    """Returns the name of a package as indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def file_of(module: str) -> Path | None:
    """Returns the source of a module; the packages that contain it are not imported."""
    root, *parts = module.split(".")
    spec = importlib.util.find_spec(root) if root else None
    if spec and spec.origin and not parts:
        return Path(spec.origin)
    for folder in getattr(spec, "submodule_search_locations", None) or ():
        path = Path(folder, *parts)
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file
    return None
