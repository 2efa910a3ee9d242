"""Plugins: what packages, the user's project and this library register as entry points.

Groups: dist_template.verbs: a module with `main(argv, project)`, started by `python -m <package>
    NAME`. dist_template.hooks: a module with functions that the core calls, see hooks.py.
    dist_template.callbacks: a Lightning callback of every run, configured by its name's key.
    dist_template.rules: a rule of diagnosis, a function from a run to findings.
    dist_template.launch_targets: a target of `launch --on NAME`. dist_template.strategies: by
    the name of a strategy's class, its Spec (parallel/spec/base.py), which has the class and the
    format of its checkpoints. dist_template.axes: a dimension of MeshStrategy's mesh.
    dist_template.loggers: classes that `class_path` knows by their names.
    dist_template.objectives: likewise. dist_template.run_keys: a dataclass whose fields are further
    keys of the section `run`. dist_template.last_hooks: this library's alone, hooks that are called
    after all others.

A source of text needs none: YAML takes the import path of its class. docs/extend.md has an example
of each. A value is "module" or "module:attribute". Nothing is imported before `Plugin.load`.

The order is: this library's, the project's, then packages by their names, each sorted by the names
of its entry points. Of two that register one name, the first counts.

A package that nobody has chosen for this run may be broken in any way: what it does wrong becomes
one line that names it (`note`), and the run continues without it. What a user has typed, such as
its verb, is refused in a sentence (`PluginError`)."""

import importlib.util
import io
import os
import re
import signal
import sys
import threading
import tomllib
import traceback
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, EntryPoints, distributions, entry_points
from pathlib import Path
from typing import Any

from .errors import InputError, first_line, is_first_on_node, shortened
from .project import program_name

__all__ = ["Plugin", "PluginError", "contained", "note", "registered"]

LIBRARY = __name__.split(".")[0]
STRATEGIES = "dist_template.strategies"  # a group of which several rooms ask for a part
OURS = "dist-template"  # this library's package
MODULE = re.compile(r"[\w.]+(\s*:\s*[\w.]+)?\s*(\[.*\]\s*)?")  # an entry point's value
NAME = re.compile(r"[A-Za-z_][\w.-]*")  # it becomes a verb, a key or a class's name
HANDLED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)  # a run's own handlers
ABSENT = object()  # of a class that has no such part
_noted: set[str] = set()


class PluginError(InputError):
    """A plug-in of another package is broken: the message names the package and the reason."""


@dataclass(frozen=True)
class Plugin:
    """An entry point, and the package that registers it."""

    point: EntryPoint
    package: str

    @property
    def name(self) -> str:
        return self.point.name

    @property
    def value(self) -> str:
        return self.point.value

    @property
    def module(self) -> str:
        return self.point.module

    @property
    def attr(self) -> str:
        return self.point.attr

    @property
    def is_ours(self) -> bool:
        """Whether it is this library's."""
        return self.package == OURS

    @property
    def label(self) -> str:
        """Names it in a sentence."""
        return f"the plug-in {self.name} of the package {self.package}"

    def load(self) -> Any:
        """Imports and returns what the value names. Raises PluginError if another package's fails
        in any way."""
        with contained(self, "cannot be imported"):
            return self.point.load()


def note(sentence: str) -> None:
    """Prints a line about a plug-in, once in a process and on one rank of each node."""
    if sentence not in _noted and is_first_on_node():
        _noted.add(sentence)
        print(shortened(" ".join(sentence.split())), file=sys.stderr, flush=True)


class _Captured(io.StringIO):
    """Output of a plug-in. A log handler that it has created with this stream is passed on to the
    true one afterwards."""

    def __init__(self, after: Any) -> None:
        super().__init__()
        self.after: Any = after
        self.is_open = True

    def write(self, text: str) -> int:
        return super().write(text) if self.is_open else self.after.write(text)

    def flush(self) -> None:
        if not self.is_open and self.after is not None:
            self.after.flush()


@contextmanager
def contained(plugin: Plugin, failed: str) -> Generator[None]:
    """Runs code of another package: what it raises becomes a PluginError, what it prints to stdout
    one line on stderr, and working directory and signal handlers stay as they are. InputError and
    Ctrl-C pass. This library's own code is not changed by it."""
    if plugin.is_ours:
        yield
        return
    captured, folder = _Captured(sys.stdout), Path.cwd()
    is_main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in HANDLED} if is_main else {}
    try:
        with redirect_stdout(captured):
            yield
    except (InputError, KeyboardInterrupt):
        raise
    except BaseException as error:  # SystemExit, and pytest's, too
        if os.environ.get("TRACEBACK", "0") != "0":
            traceback.print_exc()
        what = f"{type(error).__name__}: {first_line(error)}"
        raise PluginError(f"{plugin.label} {failed}: {what}") from error
    finally:
        captured.is_open = False
        with suppress(FileNotFoundError):
            if not Path.cwd().samefile(folder):
                os.chdir(folder)
        for number, handler in handlers.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        if printed := captured.getvalue().strip():
            more = len(printed.splitlines()) - 1
            rest = f" (and {more} more lines)" if more else ""
            note(f"{plugin.label} printed: {printed.splitlines()[0][:500]}{rest}")


def all_of(group: str) -> list[Plugin]:
    """Returns the entry points of a group in their order, also several of one name.

    For a package that is imported from its source folder (this library or the user's project),
    pyproject.toml replaces the installed metadata: the package may not be installed, and the
    metadata of an editable install is as old as the installation.

    Raises InputError if one of these pyproject.toml is not valid."""
    found: list[Plugin] = []
    in_source = set()  # packages
    for import_name in dict.fromkeys((LIBRARY, program_name())):
        if file := _pyproject(import_name):
            try:
                project = tomllib.loads(file.read_text(encoding="utf-8")).get("project", {})
                package = normalized(project.get("name", import_name))
                points = project.get("entry-points", {}).get(group, {})
                listed = [EntryPoint(name, str(value), group) for name, value in points.items()]
            except tomllib.TOMLDecodeError as error:
                raise InputError(f"{file}: {error}") from error
            except (AttributeError, TypeError) as error:
                raise InputError(f"{file}: {group} is not a table of names and modules") from error
            in_source.add(package)
            found += _usable(package, listed)
    others = [
        (package, points) for package, points in _installed(group) if package not in in_source
    ]
    for package, points in sorted(others, key=lambda pair: (pair[0] != OURS, pair[0])):
        found += _usable(package, points)
    return found


def _installed(group: str) -> list[tuple[str, list[EntryPoint]]]:
    """Returns the entry points of installed packages, by package."""
    try:
        points = [*_of_all_groups(_search_path()).select(group=group)]
    except Exception:  # metadata that cannot be read: find out whose
        points = []
        for folder in distributions():
            try:
                points += folder.entry_points.select(group=group)
            except Exception as error:
                note(f"{_package_of(folder)}: its entry_points.txt cannot be read: {error}")
    found: dict[str, list[EntryPoint]] = {}
    for point in points:
        of_package = found.setdefault(_package_of(point.dist), [])
        if point not in of_package:  # installed twice
            of_package.append(point)
    return [*found.items()]


def _search_path() -> tuple[tuple[str, int], ...]:
    """Returns the folders of installed packages, and when each last got or lost an entry."""
    found = []
    for folder in sys.path:
        with suppress(OSError):
            found.append((folder, os.stat(folder or ".").st_mtime_ns))
    return tuple(found)


@cache
def _of_all_groups(path: tuple[tuple[str, int], ...]) -> EntryPoints:
    """Reads the entry points of all installed packages: 0.02 s for 200 of them, and a start asks
    for eight groups."""
    return entry_points()  # ty: ignore[invalid-explicit-return]  (typed by an older Python's)


def _package_of(folder: Any) -> str:
    """Returns the package's name, or its folder if its metadata are not readable."""
    try:
        return normalized(folder.name)
    except Exception:
        where = f" in {folder.locate_file('')}" if folder else ""
        return f"a package without metadata{where}"


def _usable(package: str, points: list[EntryPoint]) -> Iterator[Plugin]:
    for point in sorted(points, key=lambda point: point.name):
        if NAME.fullmatch(point.name) and MODULE.fullmatch(point.value):
            yield Plugin(point, package)
        else:
            note(
                f"{package}: the entry point {point.name!r} = {point.value!r} of {point.group} is"
                " skipped: a name is letters, digits, - and _, a value module or module:attribute"
            )


def registered(group: str, taken: Collection[str] = ()) -> dict[str, Plugin]:
    """Returns the entry points of a group by their names, in their order.

    `taken` are names that this library has without an entry point. A name that is taken, or that a
    package before has registered, is skipped, and one line reports it.

    Raises InputError as `all_of`."""
    found: dict[str, Plugin] = {}
    owners = dict.fromkeys(taken, OURS)
    for plugin in all_of(group):
        if (other := owners.setdefault(plugin.name, plugin.package)) != plugin.package:
            note(
                f"{plugin.package}: its {plugin.name!r} of {group} is skipped: {other} has this"
                " name; uninstall one, or rename it in its pyproject.toml"
            )
        else:
            found.setdefault(plugin.name, plugin)
    return found


@cache
def loaded(group: str, is_kind: Callable[[Any], bool] | None = None) -> dict[str, Any]:
    """Returns what the entry points of a group name, imported once in a process, in their order. A
    package's that cannot be imported, or for which `is_kind` is false, is skipped with one line;
    `is_kind`'s docstring says what is allowed. Raises InputError as `all_of`."""
    return _loaded(group, Plugin.load, is_kind)


@cache
def loaded_parts(group: str, part: str, is_kind: Callable[[Any], bool]) -> dict[str, Any]:
    """Returns what the static method `part` of each class in a group returns, without those that
    return None; the rest is as in `loaded`, which reports a value that is no such class."""

    def load_part(plugin: Plugin) -> Any:
        make = getattr(plugin.load(), part, None)
        if make is None:
            return ABSENT
        with contained(plugin, f"fails in {part}"):
            value = make()
        return ABSENT if value is None else value

    return _loaded(group, load_part, is_kind)


def _loaded(
    group: str, load: Callable[[Plugin], Any], is_kind: Callable[[Any], bool] | None
) -> dict[str, Any]:
    """Returns what `load` returns for each plug-in, by its name, without ABSENT. What a package
    does wrong is reported in one line."""
    values = {}
    for name, plugin in registered(group).items():
        try:
            value = load(plugin)
            if value is ABSENT:
                continue
            if is_kind is not None:
                _check_kind(plugin, value, is_kind)
        except PluginError as error:
            note(f"{error}; it is skipped")
            continue
        values[name] = value
    return values


def _check_kind(plugin: Plugin, value: object, is_kind: Callable[[Any], bool]) -> None:
    """Raises PluginError if another package's value is not what `is_kind` accepts."""
    if not plugin.is_ours and not is_kind(value):
        expected = " ".join((is_kind.__doc__ or "").split())
        raise PluginError(f"{plugin.label} is {value!r:.200}; give {expected}")


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
