"""What modules and callbacks add to a checkpoint, as tensors and plain types, and back.

A checkpoint is read as data (untrusted.py), so that torch refuses most of what people put into it
by `on_save_checkpoint`, `save_hyperparameters`, or a schedule that computes with numpy: hours after
it was written. Here such values are written as a mapping {TYPE: name, "value": …} that is read back
as what it was; a number of numpy becomes Python's. What cannot be written so is refused at the
first save.

`plain` converts to this form, in the order: tensors, numbers and texts, arrays, containers, other
types of Python's library (WRITE), classes that torch was told of. `back` converts back."""

from argparse import Namespace
from collections import defaultdict, deque
from collections.abc import Callable, Hashable
from datetime import date, datetime, time, timedelta
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..errors import InputError, first_line

TYPE = "dist_template.type"
FACTORIES: dict[str, Any] = {
    kind.__name__: kind for kind in (bool, dict, float, int, list, set, str)
}
# What torch reads as data (tried with torch 2.13), not with its containers' content.
READ = (type(None), bool, int, float, complex, str, bytes, bytearray, torch.dtype, torch.device)
# Their subclasses, such as IntEnum and StrEnum, become what they are equal to.
BASE: dict[type, Callable[[Any], Any]] = {
    int: int.__int__,
    float: float.__float__,
    complex: complex.__complex__,
    str: str.__str__,
}
# Of a checkpoint, with the strategy's own tensors
OF_STRATEGY = {"state_dict", "optimizer_states"}
VIEW = 1 << 20  # bytes beside a view, above which it is copied: torch saves all of a storage
# The first class that a value is of: a datetime is a date, too.
WRITE: dict[type, Callable[[Any], Any]] = {
    PurePath: str,
    datetime: datetime.isoformat,
    date: date.isoformat,
    time: time.isoformat,
    timedelta: lambda value: [value.days, value.seconds, value.microseconds],
    frozenset: list,
    range: lambda value: [value.start, value.stop, value.step],
}
BACK: dict[str, Callable[[Any], Any]] = {
    "path": Path,
    "datetime": datetime.fromisoformat,
    "date": date.fromisoformat,
    "time": time.fromisoformat,
    "timedelta": lambda value: timedelta(*value),
    "frozenset": frozenset,
    "range": lambda value: range(*value),
    "array": lambda value: value.numpy(),
    "texts": lambda value: np.array(value[0], dtype=value[1]),
    "set": set,
    "namespace": lambda value: Namespace(**value),
    "pairs": lambda value: {key: one for key, one in value},
    "deque": lambda value: deque(*value),
    "defaultdict": lambda value: defaultdict(FACTORIES.get(value[0]), value[1]),
}


def plain(value: Any, where: tuple[str, ...] = ()) -> Any:
    """Returns `value` with tensors and plain types alone. Raises InputError for another class,
    unless torch was told that it is safe (`torch.serialization.add_safe_globals`)."""
    if isinstance(value, Tensor):
        if where[:1] and where[0] in OF_STRATEGY:
            return value
        if isinstance(value, DTensor):
            raise InputError(
                f"the checkpoint would have a sharded tensor at {'.'.join(where)}: each rank has"
                " its own shard, and a resumed run would get rank 0's: keep it as a parameter or a"
                " buffer of the module, or save its `full_tensor()`"
            )
        return _without_the_rest(value)
    if isinstance(value, np.generic):
        if value.dtype.kind not in "biufcSU":
            raise _refusal(value, where)
        return plain(value.item(), where)
    if type(value) in READ:
        return value
    for base, convert in BASE.items():
        if isinstance(value, base):
            return convert(value)
    if isinstance(value, np.ndarray):
        return _plain_array(value, where)
    if isinstance(value, defaultdict):
        factory = value.default_factory
        name = getattr(factory, "__name__", "")
        if factory is not None and FACTORIES.get(name) is not factory:
            raise _refusal(value, where)
        return {TYPE: "defaultdict", "value": [name, _items(value, where)]}
    if isinstance(value, dict):
        items = _items(value, where)
        if _is_read(type(value)) and TYPE not in items:
            return type(value)(items)
        return items
    if isinstance(value, deque):
        return {TYPE: "deque", "value": [_each(value, where), value.maxlen]}
    if type(value) in (list, tuple):
        return type(value)(_each(value, where))
    if type(value) is set:
        return {TYPE: "set", "value": _each(value, where)}
    if type(value) is Namespace:
        return {TYPE: "namespace", "value": _items(vars(value), where)}
    for kind, write in WRITE.items():
        if isinstance(value, kind):
            name = "path" if kind is PurePath else kind.__name__
            return {TYPE: name, "value": _each_if(write(value), where)}
    if type(value) in torch.serialization.get_safe_globals() or isinstance(value, torch.Size):
        return value
    if type(value).__module__.startswith("deepspeed."):  # of its optimizer; zero.py reads them
        return value
    raise _refusal(value, where)


def _plain_array(value: np.ndarray, where: tuple[str, ...]) -> dict[str, Any]:
    kind = value.dtype.kind
    if kind in "SU":  # texts, which torch has no type for
        return {TYPE: "texts", "value": [value.tolist(), value.dtype.str]}
    # torch has no numbers of more than 8 bytes, complex ones of 16.
    most_bytes = 16 if kind == "c" else 8
    if kind not in "biufc" or value.dtype.itemsize > most_bytes:
        raise _refusal(value, where)
    native = value.astype(value.dtype.newbyteorder("="))  # a copy
    return {TYPE: "array", "value": torch.from_numpy(native)}


def back(value: Any) -> Any:
    """Returns what `plain` was given."""
    if isinstance(value, dict):
        if TYPE in value and value.keys() == {TYPE, "value"} and value[TYPE] in BACK:
            try:
                return BACK[value[TYPE]](back(value["value"]))
            except (TypeError, ValueError, LookupError, AttributeError, MemoryError) as error:
                raise InputError(
                    f"the checkpoint is damaged: a {value[TYPE]} in it cannot be read"
                    f" ({first_line(error)}); give another"
                ) from error
        for key, one in value.items():
            if isinstance(one, dict | list | tuple):
                value[key] = back(one)
        return value
    if type(value) in (list, tuple):
        return type(value)(back(one) for one in value)
    return value


def _items(value: dict[Any, Any], where: tuple[str, ...]) -> dict[Any, Any]:
    pairs = []
    for key, one in value.items():
        pairs.append([plain(key, where), plain(one, (*where, str(key)))])
    if all(isinstance(key, Hashable) for key, _ in pairs):
        return dict(pairs)
    return {TYPE: "pairs", "value": pairs}  # a Path as a key becomes a mapping


def _without_the_rest(tensor: Tensor) -> Tensor:
    """Returns a copy of a view of a tensor that is much larger."""
    if type(tensor) is not Tensor or tensor.device.type == "meta" or tensor.is_sparse:
        return tensor
    size = tensor.numel() * tensor.element_size()
    if tensor.untyped_storage().nbytes() - size > VIEW:
        return tensor.clone()
    return tensor


def _each(values: Any, where: tuple[str, ...]) -> list[Any]:
    return [plain(one, (*where, str(number))) for number, one in enumerate(values)]


def _each_if(value: Any, where: tuple[str, ...]) -> Any:
    return _each(value, where) if isinstance(value, list) else value


def _is_read(kind: type) -> bool:
    return kind.__name__ in ("OrderedDict", "Counter") and kind.__module__ == "collections"


def _refusal(value: Any, where: tuple[str, ...]) -> InputError:
    kind = type(value)
    return InputError(
        f"the checkpoint would have a {kind.__module__}.{kind.__qualname__} at {'.'.join(where)},"
        " which cannot be read back as data: give numbers, texts, arrays or containers of them to"
        " `on_save_checkpoint` and `save_hyperparameters` (it has ignore=[…]), or allow the class"
        f" where it is defined: torch.serialization.add_safe_globals([{kind.__name__}])"
    )
