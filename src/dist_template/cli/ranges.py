"""Checks the values of a configuration against the types of their arguments, before anything is
built.

jsonargparse has checked int, float and str. A number may still be out of the range that its
argument declares (dist_template.ranges), nan, or too long for torch; training would run with it, or
fail in another library. Ranges of other libraries' arguments are in compat/ranges.py."""

import math
import re
from collections.abc import Iterator
from functools import cache
from pydoc import locate
from types import UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from jsonargparse import Namespace

from ..compat import ranges as of_others
from ..compat.lightning_cli import Key
from ..errors import InputError
from ..ranges import NotBlank, Range, checks_of

NO_TEXT = re.compile("[\0\ud800-\udfff]")  # NUL, half of a pair: no file, path or log can have them
LIBRARY = __name__.partition(".")[0]
CHECKED = {LIBRARY, "torch", "lightning"}  # of other classes, only declared ranges are checked
LEAST, MOST = -(2**63), 2**63 - 1  # integers that C and torch hold


class Alternative(NamedTuple):
    """One of the types that an argument accepts, with what it requires of a value."""

    kind: Any
    checks: list[Range | NotBlank]


def alternatives(hint: Any) -> list[Alternative]:
    """Returns the types of a union, and of any other the type itself, without `Annotated`."""
    try:
        return _alternatives(hint)
    except TypeError:  # of a package, with metadata that have no hash
        return _alternatives.__wrapped__(hint)


@cache
def _alternatives(hint: Any) -> list[Alternative]:
    if get_origin(hint) in (Union, UnionType):
        return [each for one in get_args(hint) for each in alternatives(one)]
    if get_origin(hint) is Annotated:
        inner, *metadata = get_args(hint)
        checks = checks_of(metadata)
        return [Alternative(kind, [*own, *checks]) for kind, own in alternatives(inner)]
    return [Alternative(hint, [])]


def _has_range(hint: Any) -> bool:
    """Returns whether a type, or one that it contains, declares what it accepts."""
    if get_origin(hint) is Annotated and checks_of(get_args(hint)[1:]):
        return True
    return any(_has_range(each) for each in get_args(hint))


@cache
def arguments_of(kind: type) -> dict[str, Any]:
    """Returns the types of a constructor's arguments, with those of base classes, to which **kwargs
    passes them. An argument that is declared anew without a range keeps the base class's."""
    found: dict[str, Any] = {}
    for each in reversed(kind.__mro__):
        if "__init__" not in vars(each):
            continue
        try:
            own = get_type_hints(each.__init__, include_extras=True)
        except Exception:  # a name that only type checkers import
            own = getattr(each.__init__, "__annotations__", {})
        for name, hint in (own | of_others.arguments_of(each)).items():
            if _has_range(hint) or not _has_range(found.get(name)):
                found[name] = hint
    return found


def check(settings: Namespace, classes: dict[str, type]) -> None:
    """Checks the numbers and texts of `settings`; `classes` has the class of each section. Raises
    InputError if a value is none that its argument accepts, nan, or a text with characters that no
    text has."""
    for section, value in vars(settings).items():
        kind = classes.get(section) or of_others.KEYS.get(section)
        for leaf in _leaves(value, Key(section), alternatives(kind)):
            leaf.check()


class Leaf(NamedTuple):
    """A number or a text of a configuration."""

    key: Key
    value: int | float | str
    accepted: list[Alternative]
    is_foreign: bool  # an argument of a user's or a package's class

    def check(self) -> None:
        key, value = self.key, self.value
        if isinstance(value, str) and not self.is_foreign and (found := NO_TEXT.search(value)):
            raise InputError(f"{key} has the character {found[0]!r}; give a text without it")
        numeric = [checks for kind, checks in self.accepted if kind in (int, float)]
        if isinstance(value, str):
            textual = [checks for kind, checks in self.accepted if kind is str]
            if textual and (why := _refusal(textual, value)):
                raise InputError(f"{key} is {value!r}; give {why}")
            if not any(numeric) or not value.isdecimal():
                return
            value = int(value[:99])
        if numeric and (why := _refusal(numeric, value)):
            raise InputError(f"{key} is {value}; give {why}")
        if self.is_foreign:
            return
        if isinstance(value, int) and not LEAST <= value <= MOST:
            raise InputError(f"{key} is {value}; give fewer digits")
        if math.isnan(value):
            raise InputError(f"{key} is {value}; give a number")


def _refusal(choices: list[list[Range | NotBlank]], value: Any) -> str:
    """Returns what is allowed if none of several types accepts the value, as the first of them says
    it; "" if one accepts it."""
    refused = [[str(each) for each in checks if not each.accepts(value)] for checks in choices]
    return "" if [] in refused else refused[0][0]


def _leaves(
    value: object, key: Key, accepted: list[Alternative], is_foreign: bool = False
) -> Iterator[Leaf]:
    """Yields each number and text of `value`, of one of the types `accepted`."""
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        yield Leaf(key, value, accepted, is_foreign)
    elif isinstance(value, list | tuple):
        for position, each in enumerate(value):
            inside = _items(accepted, position)
            yield from _leaves(each, key.item(position), inside, is_foreign)
    elif isinstance(value, Namespace | dict):
        items = vars(value) if isinstance(value, Namespace) else value
        if "class_path" in items:
            key = Key(key.name, is_class=True)
            path, given = str(items["class_path"]), items.get("init_args") or {}
            accepted = [Alternative(locate(path), [])]
            is_foreign = path.partition(".")[0] not in CHECKED
            items = vars(given) if isinstance(given, Namespace) else given
            if not isinstance(items, dict):  # it is refused where the class is read
                return
        known = of_others.fields_of_model(items)
        for name, each in items.items():
            inside = alternatives(known[name]) if name in known else _below(accepted, name)
            yield from _leaves(each, key.argument(name), inside, is_foreign)


def _items(accepted: list[Alternative], position: int) -> list[Alternative]:
    """Returns the types of an item of a list or a tuple."""
    found = []
    for kind, _ in accepted:
        inner = get_args(kind)
        origin = get_origin(kind)
        if not isinstance(origin, type) or not inner or issubclass(origin, dict):
            continue
        if origin is tuple and ... not in inner:
            inner = inner[position : position + 1]
        if inner:
            found += alternatives(inner[0])
    return found


def _below(accepted: list[Alternative], name: Any) -> list[Alternative]:
    """Returns the types of an argument of a class, or of a value of a mapping."""
    found = []
    for kind, _ in accepted:
        if isinstance(kind, type) and get_origin(kind) is None:
            if hint := arguments_of(kind).get(name):
                found += alternatives(hint)
        elif len(inner := get_args(kind)) == 2 and get_origin(kind) is not tuple:
            found += alternatives(inner[1])
    return found
