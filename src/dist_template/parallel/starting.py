"""Starting weights: makes a model's tensors on the ranks that share this work, and gives every rank
its shards.

    every rank    builds the model on torch's meta device, which is recorded (compat/recording.py)
    owners        compute tensors of the model in turns: N ranks compute N units at a time every
    rank    reads its shards of published weights that are not converted, and receives the others
    (scatter.py)

A rank has one unit, a large tensor or some small ones, besides its shards. The values depend on the
run's seed alone: they are equal under every strategy, number of ranks and division into stages. A
model whose constructor reads values of tensors is built in full on each rank, with a warning, and
gets rank 0's tensors one by one."""

import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import processes, weights
from ..checkpoint.frozen import FrozenHash
from ..checkpoint.stored import copy_shard
from ..checkpoint.untrusted import agreed_on_errors
from ..cluster.memory import memory_limit
from ..compat.recording import Recording, place_of, record
from ..compat.torch import tree_leaves
from ..errors import InputError, reason
from ..layout import shard_of
from ..records import GIB
from . import scatter
from .configured import ARGS

UNIT = 1 << 26  # bytes
Build = Callable[[], nn.Module]
Prepare = Callable[[nn.Module], nn.Module]


class Start(Protocol):
    """A model without memory, and its values."""

    model: nn.Module

    def fill(self, module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        """Gives this rank's tensors of `module`, the model after sharding, their values.
        Collective. `group`: the ranks that have the same layers. None: all."""


class StartByOwners:
    """A recorded model; `unexplained` says which of its values were not recorded, "" if all
    were."""

    def __init__(
        self, model: nn.Module, recording: Recording, seed: int, frozen: FrozenHash | None
    ) -> None:
        self.model, self._recording, self._seed, self._frozen = model, recording, seed, frozen
        self._refused: InputError | None = None
        self._stored: dict[str, Any] = {}  # tensors of files
        self._tensors: dict[str, Tensor] = {}  # as recorded: the types of the model's may change
        self._names: dict[str, list[str]] = defaultdict(list)  # of a shared tensor, by the first
        self.unexplained = (
            "a tensor of it is neither a parameter nor a buffer"
            if _has_other_tensors(model)
            else ""
        )
        first, unwritten = dict[int, str](), list[str]()
        for name, tensor in _every_tensor(model).items():
            if nn.parameter.is_lazy(tensor):
                raise InputError(
                    f"{name} has no shape before the first batch: give its layer the size of its"
                    " input"
                )
            self._names[first.setdefault(id(tensor), name)].append(name)
            operations = recording.operations_for(tensor) if tensor.is_meta else []
            if operations is None:
                self.unexplained = (
                    f"{name} is computed from values that a meta tensor does not have"
                )
            elif (
                isinstance(tensor, nn.Parameter)
                and operations
                and not any(each.writes for each in operations)
            ):
                unwritten.append(name)
            if first[id(tensor)] == name:
                self._tensors[name] = tensor.detach()
                if (
                    operations
                    and operations[-1].call is copy_shard
                    and operations[-1].args[0] == place_of(tensor)
                ):
                    self._stored[name] = operations[-1].args[1]
        if unwritten and processes.is_rank_zero():
            number = f" ({len(unwritten)} such parameters)" if len(unwritten) > 1 else ""
            warnings.warn(
                f"{unwritten[0]} has no starting values{number}: write them in build_model",
                stacklevel=4,
            )
        self._frozen_names = {
            name for name, each in model.named_parameters() if frozen and not each.requires_grad
        }
        self.units = _units(self._tensors)

    def make(self, names: list[str]) -> dict[str, Tensor]:
        """Returns full tensors in host memory. The random state of the CPU stays."""
        found = {}
        with torch.random.fork_rng(devices=[]):
            for name in names:
                tensor = self._tensors[name]
                try:
                    found[name] = (
                        self._recording.compute(tensor, self._seed)
                        if tensor.is_meta
                        else tensor.detach()
                    )
                except InputError as error:  # the other ranks wait for the tensor
                    self._refused, found[name] = error, torch.zeros(tensor.shape)
                if self._frozen and name in self._frozen_names:
                    self._frozen.add(name, found[name])
        return found

    def fill(self, module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        here, targets, hashed = _every_tensor(module), {}, list[str]()
        for name, names in self._names.items():
            if found := [each for each in names if each in here]:
                targets[name] = here[found[0]]
                if names == [name] and name in self._stored and shard_of(targets[name]).place != "":
                    copy_shard(targets.pop(name), self._stored[name][...])
                    hashed += self._frozen_names & {name}
        for name in hashed[processes.rank(group) :: processes.world_size(group)]:
            self.make([name])
        units = [[name for name in unit if name in targets] for unit in self.units]
        scatter.distribute([unit for unit in units if unit], targets, self.make, group)
        with agreed_on_errors():
            if self._refused:
                raise self._refused


class StartOnRankZero:
    """A model that was built in full on rank 0; `why` it could not be recorded."""

    def __init__(
        self, model: nn.Module, prepare: Prepare, frozen: FrozenHash | None, why: str
    ) -> None:
        self._why = why
        for name, parameter in model.named_parameters():
            if frozen and not (parameter.requires_grad or parameter.is_meta):
                frozen.add(name, parameter)
        self.model = prepare(model)
        self._full = scatter.move_to_meta(self.model)

    def fill(self, module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        if group is not None:
            raise InputError(
                f"{self._why}, as the stages of a pipeline need it: set {ARGS}.pp_size to 1, or"
                " edit build_model"
            )
        scatter.from_rank_zero(weights.named_tensors(module), self._full)
        self._full = {}


def start_of(build: Build, prepare: Prepare, seed: int, frozen: FrozenHash | None = None) -> Start:
    """Returns the model that `build` makes, without memory, and its starting values. Collective.
    `prepare` changes the types of its tensors; `frozen` gets the frozen parameters that this rank
    makes. Raises InputError if the model has to be built in full, and host memory cannot hold
    it."""
    model: nn.Module | None = None
    try:
        with agreed_on_errors(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model, recording = record(build)
        found = StartByOwners(model, recording, seed, frozen)
        if not (why := found.unexplained):
            found.model = prepare(model)
            return found
        num_bytes = recording.num_bytes
    except (RuntimeError, TypeError) as error:
        why, num_bytes = reason(error), getattr(error, "num_bytes", 0)
    what = f"the model cannot be built on torch's meta device ({why})"
    if num_bytes > memory_limit():
        raise InputError(
            f"{what}, and {num_bytes / GIB:.1f} GiB do not fit this machine's memory: edit"
            " build_model"
        )
    on_each = model is None or _has_other_tensors(model)
    if processes.is_rank_zero():
        warnings.warn(
            f"{what}: {'each rank' if on_each else 'rank 0'} builds it in full", stacklevel=3
        )
    if on_each or processes.is_rank_zero():
        torch.manual_seed(seed)
        with torch.device("cpu"):  # Lightning's default may be a GPU, which has another generator
            model = build()
    return StartOnRankZero(model, prepare, frozen, what)


def _every_tensor(model: nn.Module) -> dict[str, Tensor]:
    """Returns parameters and buffers by name, shared ones by each of their names."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return parameters | dict(model.named_buffers(remove_duplicate=False))


def _has_other_tensors(model: nn.Module) -> bool:
    """Returns whether a module has a meta tensor, also in a list or dict, that is neither a
    parameter nor a buffer."""
    known = {*map(id, _every_tensor(model).values())}
    values = tree_leaves([vars(module) for module in model.modules()])
    return any(
        isinstance(value, Tensor) and value.is_meta and id(value) not in known for value in values
    )


def _units(tensors: dict[str, Tensor]) -> list[list[str]]:
    """Returns names of tensors that one rank makes at a time: one large tensor, or some of `UNIT`
    bytes together. The largest come first, so that the ranks' units in a round take equally
    long."""
    large = [[name] for name, tensor in tensors.items() if tensor.nbytes > UNIT]
    large.sort(key=lambda unit: -tensors[unit[0]].nbytes)
    small, room = list[list[str]](), 0
    for name, tensor in tensors.items():
        if tensor.nbytes > UNIT:
            continue
        if tensor.nbytes > room:
            small.append([])
            room = UNIT
        small[-1].append(name)
        room -= tensor.nbytes
    return large + small
