"""What each rank adds to a checkpoint: a resumed rank gets its own back.

Lightning writes rank 0's part of a dictionary that each rank has made: of a hidden state that goes
from batch to batch, or of a data module's position in its stream, every rank would get rank 0's.
Here what differs between ranks is written for each of them. What is equal on all, and what this
library's and Lightning's own classes add, is written once, as before."""

import hashlib
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import lightning as L
import torch
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from .. import processes
from ..checkpoint.plain_types import plain
from ..compat.lightning import metrics_group
from ..compat.torch import tree_map
from ..parallel.configured import is_users

KEY = "states_of_ranks"  # of a checkpoint: for each rank, {place: state}
Place = tuple[str, ...]  # keys on the way to a state in a checkpoint


class RankStates(Callback):
    """Lets a module, its data and a user's callbacks have a state of each rank.

    A run that resumes on another number of ranks gives all of them rank 0's, with a warning."""

    def __init__(self) -> None:
        self._hooks: dict[str, Callable[[dict[str, Any]], None]] = {}  # of the module itself

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if trainer.world_size == 1 or self._hooks:
            return
        saves = is_overridden("on_save_checkpoint", pl_module, L.LightningModule)
        if not saves and not list(_places(trainer)):
            return
        for name in ("on_save_checkpoint", "on_load_checkpoint"):
            self._hooks[name] = getattr(pl_module, name)

        # `wraps`, because Lightning's `is_overridden` compares the wrapped functions.
        @wraps(self._hooks["on_save_checkpoint"])
        def save(checkpoint: dict[str, Any]) -> None:
            before = checkpoint.keys() | {KEY}
            self._hooks["on_save_checkpoint"](checkpoint)
            added = [(key,) for key in checkpoint if key not in before]
            self._write(trainer, checkpoint, [*added, *_places(trainer)])

        @wraps(self._hooks["on_load_checkpoint"])
        def load(checkpoint: dict[str, Any]) -> None:
            _read(trainer, checkpoint)
            self._hooks["on_load_checkpoint"](checkpoint)

        # Of all hooks these are the last that saves, and the first that reads.
        vars(pl_module).update(on_save_checkpoint=save, on_load_checkpoint=load)

    def _write(self, trainer: L.Trainer, checkpoint: dict[str, Any], places: list[Place]) -> None:
        states = {}
        for place in places:
            found = _at(checkpoint, place)
            if found is not None:
                states[place] = found
        group = metrics_group(trainer)
        digests = {place: _digest(state, place) for place, state in states.items()}
        of_ranks = processes.from_all_ranks(digests, group)
        differ = set()
        for place in set().union(*of_ranks):
            if len({digest.get(place) for digest in of_ranks}) > 1:
                differ.add(place)
        if not differ:
            return
        own = {place: tree_map(_on_host, states.get(place)) for place in differ}
        # Empty on the other ranks. Under ZeRO each rank has a file, and what it adds is there.
        checkpoint[KEY] = []
        for of_rank in processes.to_rank_zero(own, group):
            named = {".".join(place): [list(place), state] for place, state in of_rank.items()}
            checkpoint[KEY].append(named)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        for name in self._hooks:
            vars(pl_module).pop(name, None)
        self._hooks = {}


def _places(trainer: L.Trainer) -> Iterator[Place]:
    """Yields where the states of a user's callbacks and data module are in a checkpoint."""
    callbacks: list[Any] = getattr(trainer, "callbacks", [])
    for callback in callbacks:
        if is_users(type(callback)) and is_overridden("state_dict", callback, Callback):
            yield ("callbacks", callback.state_key)
    data: Any = getattr(trainer, "datamodule", None)
    if data is None or not is_users(type(data)):
        return
    if is_overridden("state_dict", data, LightningDataModule):
        yield (type(data).__qualname__,)


def _at(checkpoint: dict[str, Any], place: Place) -> Any:
    found: Any = checkpoint
    for key in place:
        found = found.get(key) if isinstance(found, dict) else None
    return found


def _digest(state: object, place: Place) -> str:
    """Returns a digest of a state, at about 1 s per GB, without a copy of all of it."""
    digest = hashlib.sha256()

    def add(value: object) -> None:
        if isinstance(value, dict):
            digest.update(f"{{{len(value)}".encode())
            for key, each in value.items():
                add(key)
                add(each)
        elif isinstance(value, list | tuple):
            digest.update(f"[{len(value)}".encode())
            for each in value:
                add(each)
        elif isinstance(value, Tensor) and value.layout is torch.strided:
            digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
            content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            digest.update(memoryview(content.numpy()))
        else:
            digest.update(repr(value).encode())

    add(plain(state, place))
    return digest.hexdigest()


def _on_host(value: object) -> object:
    if isinstance(value, Tensor):
        return value.detach().cpu()
    return value


def _read(trainer: L.Trainer, checkpoint: dict[str, Any]) -> None:
    """Puts this rank's states where rank 0's are."""
    ranks = checkpoint.pop(KEY, None)
    if not ranks:
        return
    if len(ranks) != trainer.world_size:
        places = ", ".join(sorted(ranks[0]))
        rank_zero_warn(
            f"The checkpoint has {places} of {len(ranks)} ranks, which differ, and there are"
            f" {trainer.world_size} now: each gets rank 0's."
        )
        return
    for place, state in ranks[trainer.global_rank].values():
        owner = _at(checkpoint, tuple(place[:-1]))
        owner[place[-1]] = state
