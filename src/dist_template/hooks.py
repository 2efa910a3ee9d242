"""Hooks: functions of other packages that the core calls during a run.

An entry point of the group `dist_template.hooks` names a module with some of

    def on_crash(error: Exception) -> str | None
        Called when a verb ends with an unexpected error, on the rank that reports it. The text is
        printed after the error. `observe.crash.record_of(error)` is the path of the rank's record.
    def at_run_end(run: Path, error: BaseException | None) -> None
        Called on rank 0 when `fit` has finished, with None, or stops because of `error`; `run` is
        the run's folder. All metrics are written. The small trainings of `rehearse` call it too.
    def at_start(settings: Namespace, verb: str | None) -> None
        Called on every rank before the run's folder and the checkpoint are chosen; it may change
        values of `settings`, the configuration, and each change is printed. An InputError refuses
        the start. None: nothing will run.
    def fetch(address: str, files: list[str], folder: Path) -> str | None
        Fetches files of a checkpoint from `address` into its `folder`, which lacks them. Returns
        why it could not, or None; a StoreIsDown if the same command may succeed later. The next one
        is called if files are still missing or damaged.

Every function of a name is called: this library's, the project's, then packages' by their names
(plugins.py), and at last those of the group `dist_template.last_hooks`, which is this library's
alone: they read the settings that the others have left, and upload what they have written.

If one raises, or returns another type, one line reports it: result and exit code do not change, and
`settings` are as they were before its call."""

import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

from .errors import InputError, first_line
from .plugins import Plugin, PluginError, all_of, contained, note

HOOKS = "dist_template.hooks"
LAST = "dist_template.last_hooks"
RETURNS: dict[str, tuple[type, ...]] = {"on_crash": (str,), "fetch": (str,)}  # or None

__all__ = ["StoreIsDown"]


class StoreIsDown(str):
    """Why files could not be fetched, if the store does not answer: the job is to be relaunched."""


def call(name: str, *arguments: object) -> list[str]:
    """Calls the function `name` of every hook that has it, and returns the texts among the
    results."""
    results: list[str] = []
    try:
        plugins = _all()
    except InputError as error:
        print(f"hooks: {error}", file=sys.stderr, flush=True)
        return results
    for plugin in plugins:
        try:
            result = _called(plugin, name, *arguments)
        except (Exception, SystemExit) as error:  # of this library's; others' are PluginErrors
            text = first_line(error)
            if not isinstance(error, PluginError):
                kind = "" if isinstance(error, InputError) else f"{type(error).__name__}: "
                where = plugin.name if plugin.is_ours else plugin.label
                text = f"{name} of {where} failed: {kind}{text}"
            print(text, file=sys.stderr, flush=True)
            continue
        if isinstance(result, str):
            results.append(result)
    return results


def start(settings: Any, verb: str | None, check: Callable[[], object]) -> None:
    """Calls `at_start` of every hook. `check` raises if `settings` are no configuration any more.
    Raises InputError if a hook refuses the start."""
    for plugin in _all():
        if plugin.is_ours:
            _called(plugin, "at_start", settings, verb)
            continue
        before, changed = deepcopy(settings), {}
        try:
            _called(plugin, "at_start", settings, verb)
            with contained(plugin, "has set keys to what they cannot be"):
                if changed := _changes(before, settings):
                    _check_keys(before, settings)
                    check()
        except PluginError as error:
            _restore(settings, before)
            note(f"{error}; the configuration is as before")
        except InputError as error:
            raise InputError(f"{plugin.label} refuses the start: {error}") from error
        else:
            for key, value in changed.items():
                note(f"{plugin.label} has set {key} to {value!r}")


def fetch(
    address: str, files: list[str], folder: Path, lacking: Callable[[list[str]], list[str]]
) -> tuple[list[str], str | None]:
    """Lets the hooks fetch `files` until `lacking` returns none of them. Returns those that it
    still returns, and why the last hook could not fetch them."""
    why: str | None = "no package has the hook fetch"
    for plugin in _all():
        try:
            said = _called(plugin, "fetch", address, files, folder, missing=False)
        except InputError as error:
            said = str(error)
        if said is False:
            continue
        why = said
        if not (files := lacking(files)):
            return [], None
    return files, why


_broken: set[Plugin] = set()


def _all() -> list[Plugin]:
    """Returns the hooks in their order, without those that cannot be imported, each of which is
    reported once. Raises InputError as `all_of`."""
    last = [plugin for plugin in all_of(LAST) if plugin.is_ours]
    usable = []
    for plugin in [*all_of(HOOKS), *last]:
        if plugin in _broken:
            continue
        try:
            if not plugin.is_ours:  # its own are imported when they are called
                plugin.load()
            usable.append(plugin)
        except InputError as error:
            _broken.add(plugin)
            note(str(error))
    return usable


def _called(plugin: Plugin, name: str, *arguments: object, missing: Any = None) -> Any:
    """Returns what the function `name` of a hook returns, `missing` if it has none. Raises
    PluginError for what another package does wrong."""
    function = getattr(plugin.load(), name, None)
    if function is None:
        return missing
    with contained(plugin, f"fails in {name}"):
        result = function(*arguments)
    if result is not None and not isinstance(result, RETURNS.get(name, ())):
        kinds = " or ".join([*(kind.__name__ for kind in RETURNS.get(name, ())), "None"])
        found = f"a {type(result).__name__}, and not {kinds}"
        raise PluginError(f"{plugin.label} returns {found} from {name}")
    return result


def _changes(before: Any, after: Any) -> dict[str, object]:
    """Returns the keys whose values differ, with the new ones."""
    old, new = dict(_leaves(before)), dict(_leaves(after))
    return {key: value for key, value in new.items() if key not in old or old[key] != value} | {
        key: "nothing" for key in old.keys() - new.keys()
    }


def _check_keys(before: Any, after: Any) -> None:
    old, new = {key for key, _ in _leaves(before)}, {key for key, _ in _leaves(after)}
    # what is below a class that YAML chooses may change with the class
    removed = {key for key in old - new if key.partition(".")[0] not in CHOSEN}
    if removed:
        raise ValueError(f"{', '.join(sorted(removed)[:5])} is removed")


CHOSEN = ("trainer", "model", "data", "optimizer", "lr_scheduler")


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, object]]:
    """Yields the keys, dotted, and values of a Namespace."""
    if type(value).__name__ == "Namespace":
        for name, each in vars(value).items():
            yield from _leaves(each, f"{key}.{name}".lstrip("."))
    else:
        yield key, value


def _restore(settings: Any, before: Any) -> None:
    """Gives `settings`, which others refer to, the content of the Namespace `before`."""
    vars(settings).clear()
    vars(settings).update(vars(before))
