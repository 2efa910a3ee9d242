"""Records how a constructor computes tensors on the meta device, so that each can be computed
later, by itself.

A recording lists the operations that made or changed meta tensors. `Recording.compute` repeats
those on which one tensor depends, in host memory. Each random operation has a seed of its own, from
the run's seed and its number among the constructor's random operations: values do not depend on the
order, or on the rank, in which tensors are computed, and a copy of a layer equals it. Draws from a
generator of the constructor are repeated from the first. torch (2.13) has nothing like it, and
torchdistX, which had it as deferred initialization, is no longer maintained.

Private: torch's dispatch mode, the schema of an operation, and functions of `nn.init` that skip
meta tensors."""

import hashlib
import sys
import warnings
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import reason
from . import replaced
from .torch import tree_leaves, tree_map

MODELS = "transformers.modeling_utils"
# Operations that overwrite their first argument, whatever was in it.
OVERWRITES = {"normal_", "uniform_", "zero_", "fill_", "copy_", "eye"}
SKIPPED = ("orthogonal_", "sparse_")  # functions of nn.init that return a meta tensor unchanged
IS_META = torch.Tensor.is_meta.__get__  # ty: ignore[missing-attribute]
# Functions that are given values, which the meta device would lose.
VALUES = (torch.tensor, torch.as_tensor, torch.scalar_tensor)


@dataclass(frozen=True)
class Place:  # no tuple: torch's tree_map would go into it
    """A tensor as a view of a storage."""

    storage: StorageWeakRef
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    is_full: bool  # whether it is all of the storage


class Operation(NamedTuple):
    call: Callable[..., Any]
    args: tuple[Any, ...]  # with a Place for each meta tensor
    kwargs: dict[str, Any]
    results: list[Place]
    random: int | None  # its number among the random ones
    # numbers of the operations on which it depends; None: one that was not recorded
    needs: set[int | None]
    dtype: torch.dtype  # torch's default

    @property
    def writes(self) -> bool:
        """Whether it initializes its results; torch.empty does not."""
        return "empty" not in getattr(self.call, "__name__", "")


class NotRecordedError(RuntimeError):
    """A constructor read values of meta tensors, when it had made tensors of `num_bytes`."""

    num_bytes = 0


class Recording(TorchDispatchMode):
    """Inside, operations on meta tensors are recorded."""

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[Operation] = []
        # Numbers of the operations that made a storage, and that last wrote to it; of a generator,
        # of the first and the last that drew from it.
        self._first: dict[StorageWeakRef | torch.Generator, int] = {}
        self._newest: dict[StorageWeakRef | torch.Generator, int] = {}
        self._generators: dict[torch.Generator, torch.Generator] = {}  # as they were at first
        self._num_random = 0
        self._sizes: dict[StorageWeakRef, int] = {}

    @property
    def num_bytes(self) -> int:
        """Of the recorded tensors that exist."""
        return sum(size for storage, size in self._sizes.items() if not storage.expired())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kwargs is None:
            kwargs = {}
        results = func(*args, **kwargs)
        changed = []
        for index, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                changed.append(args[index] if index < len(args) else kwargs.get(argument.name))
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        overwrites = func.overloadpacket.__name__ in OVERWRITES
        self.add(func, args, kwargs, results, changed, is_random, overwrites)
        return results

    def add(
        self,
        call: Callable[..., Any],
        args: Any,
        kwargs: dict[str, Any],
        results: object,
        changed: list[Any],
        is_random: bool,
        overwrites: bool,
    ) -> None:
        """Adds an operation, unless it makes views alone, or nothing on the meta device."""
        made, written = _places(results), _places(changed)
        reads, changes = _storages(_places((args, kwargs))), _storages(written)
        makes = _storages(made) - reads
        if not makes | changes:
            return
        for place in made:
            if place.storage in makes:  # else it is a view, maybe of a part
                self._sizes[place.storage] = place.shape.numel() * place.dtype.itemsize
        # Storages whose earlier values do not matter: they only have to exist.
        full = set()
        if overwrites:
            full = _storages(place for place in written if place.is_full)
            full -= _storages(_places((args[1:], kwargs)))  # a copy of a view of itself
        needs = {self._newest.get(storage) for storage in reads - full}
        needs |= {self._first.get(storage) for storage in full}
        drawn = {leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Generator)}
        for generator in drawn:
            if generator in self._newest:
                needs.add(self._newest[generator])
            if generator not in self._generators:
                self._generators[generator] = generator.clone_state()
        if kwargs.get("device") is not None:
            kwargs = kwargs | {"device": torch.device("cpu")}
        args, kwargs = tree_map(_recorded, (args, kwargs))
        random = None
        if is_random:
            random = self._num_random
            self._num_random += 1
        for key in (*makes, *changes, *drawn):
            self._newest[key] = len(self._operations)
            self._first.setdefault(key, len(self._operations))
        dtype = torch.get_default_dtype()
        self._operations.append(Operation(call, args, kwargs, made, random, needs, dtype))

    def operations_for(self, tensor: Tensor) -> list[Operation] | None:
        """Returns the operations on which the values of `tensor` depend, in order; None if one was
        not recorded."""
        found: set[int] = set()
        open_ends = [self._newest.get(place_of(tensor).storage)]
        while open_ends:
            number = open_ends.pop()
            if number is None:
                return None
            if number not in found:
                found.add(number)
                open_ends += self._operations[number].needs
        return [self._operations[number] for number in sorted(found)]

    @torch.no_grad()
    def compute(self, tensor: Tensor, seed: int) -> Tensor:
        """Returns the values of a meta tensor, in host memory. Changes the state of the CPU's
        random generator."""
        storages: dict[StorageWeakRef, torch.UntypedStorage] = {}
        generators = {each: state.clone_state() for each, state in self._generators.items()}

        def real(value: object) -> object:
            if isinstance(value, torch.Generator):
                return generators[value]
            if not isinstance(value, Place):
                return value
            view = torch.empty(0, dtype=value.dtype, device="cpu")
            return view.set_(storages[value.storage], value.offset, value.shape, value.stride)

        operations = self.operations_for(tensor)
        if operations is None:
            operations = []
        with ExitStack() as stack:
            stack.enter_context(torch.device("cpu"))  # Lightning's default may be a GPU
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            for operation in operations:
                args, kwargs = tree_map(real, (operation.args, operation.kwargs))
                if operation.random is not None:
                    digest = hashlib.sha256(f"{seed} {operation.random}".encode()).digest()
                    torch.default_generator.manual_seed(int.from_bytes(digest[:8], "little"))
                torch.set_default_dtype(operation.dtype)
                made = operation.call(*args, **kwargs)
                if not operation.results:  # it changes tensors in place
                    continue
                results = [leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor)]
                for place, result in zip(operation.results, results, strict=True):
                    if place.storage in storages:
                        continue
                    if result.stride() != place.stride:
                        # LAPACK's results have other strides than on the meta device.
                        like = torch.empty_strided(place.shape, place.stride, dtype=place.dtype)
                        result = like.copy_(result)
                    storages[place.storage] = result.untyped_storage()
        return real(place_of(tensor))  # ty: ignore[invalid-explicit-return]


class _OnMeta(TorchFunctionMode):
    """Makes `torch.tensor` of Python's values on the host, from where a recording keeps them, and
    `torch.normal` on the meta device. Two functions of nn.init do their work there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kwargs is None:
            kwargs = {}
        device = kwargs.get("device")
        device = torch.device(device if device else "meta")
        if func in VALUES and device.type == "meta":
            if not any(isinstance(argument, Tensor) for argument in args):
                return func(*args, **{**kwargs, "device": "cpu"}).to("meta")
        if func == IS_META and sys._getframe(1).f_code.co_name in SKIPPED:
            return False
        if func is torch.normal and "size" in kwargs:  # ignores the default device
            kwargs = {**kwargs, "device": device}
        return func(*args, **kwargs)


_current: list[Recording] = []


def record(build: Callable[[], nn.Module]) -> tuple[nn.Module, Recording]:
    """Returns what `build` makes on the meta device, and the recording. Raises the errors of
    `build`, and of torch where it reads a value of a meta tensor."""
    had_models = MODELS in sys.modules
    recording = Recording()
    with ExitStack() as stack:
        stack.enter_context(replaced(nn.init, _no_grad_trunc_normal_=_truncated_later))
        if had_models:
            # transformers initializes nothing on the meta device, so that nothing would be
            # recorded: here it does not find out.
            no_device = {"get_torch_context_manager_or_global_device": lambda: None}
            stack.enter_context(replaced(sys.modules[MODELS], **no_device))
        stack.enter_context(torch.device("meta"))
        stack.enter_context(_OnMeta())
        stack.enter_context(recording)
        _current.append(recording)
        stack.callback(_current.pop)
        stack.enter_context(warnings.catch_warnings())
        # Of `load_state_dict` on the meta device: its copies are recorded.
        warnings.filterwarnings("ignore", message=".*is a no-op")
        try:
            model = build()
        except (RuntimeError, TypeError) as error:
            not_recorded = NotRecordedError(reason(error))
            not_recorded.num_bytes = recording.num_bytes  # the frames of `error` have the tensors
            raise not_recorded from error
    if MODELS in sys.modules and not had_models:  # `build` has imported it
        return record(build)
    return model, recording


def is_recording() -> bool:
    return bool(_current)


def write_later(
    function: Callable[..., object], tensors: list[Tensor], *inputs: object, is_random: bool = False
) -> bool:
    """Records `function(*tensors, *inputs)`, which overwrites `tensors`, if they are on the meta
    device and something records. Returns whether it does; nothing is called."""
    if not _current or not tensors[0].is_meta:
        return False
    inputs = (*tensors, *inputs)
    _current[-1].add(function, inputs, {}, None, list(tensors), is_random, overwrites=True)
    return True


# torch draws until all values are inside the limits, so it reads values.
_truncated_normal: Callable[..., Tensor] = nn.init._no_grad_trunc_normal_


def _truncated_later(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Records torch's function; the last argument is a generator or None."""
    if write_later(_truncated_normal, [tensor], *args, *kwargs.values(), is_random=True):
        return tensor
    return _truncated_normal(tensor, *args, **kwargs)


def place_of(tensor: Tensor) -> Place:
    if tensor.is_conj() or tensor.is_neg():
        raise NotImplementedError("it makes a conjugate or negative view")
    storage = tensor.untyped_storage()
    return Place(
        StorageWeakRef(storage),
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        offset=int(tensor.storage_offset()),
        is_full=tensor.numel() * tensor.element_size() == storage.nbytes(),
    )


def _places(values: object) -> list[Place]:
    """Returns the places of the meta tensors in `values`."""
    found = []
    for leaf in tree_leaves(values):
        if isinstance(leaf, Tensor) and leaf.is_meta:
            found.append(place_of(leaf))
    return found


def _storages(places: Iterable[Place]) -> set[StorageWeakRef]:
    return {place.storage for place in places}


def _recorded(value: object) -> object:
    """Returns a meta tensor's place; a copy of another tensor, which may change."""
    if not isinstance(value, Tensor):
        return value
    if value.is_meta:
        return place_of(value)
    return value.detach().clone()
