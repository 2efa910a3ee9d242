"""Random state in checkpoints: a resumed run draws the same dropout as an uninterrupted run.

Lightning saves no random state. Ranks' states may differ, and a checkpoint has one dictionary, so
all states are gathered into it. What datasets and samplers draw is apart from it: draws.py."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from .. import processes
from ..compat.lightning import validation_may_follow
from ..parallel import rank_view

KEY = "random_state"  # of a checkpoint: one State per rank
State = dict[str, Any]


class RandomState(Callback):
    """Saves and restores the generators of torch, CUDA, Python and NumPy on every rank.

    Validation and the start of an epoch do not change the random stream of training. A run that
    resumes on another number of ranks starts new streams, from the seed, the step and the
    data-parallel rank, and prints a warning."""

    def __init__(self) -> None:
        # The state after training's last draw; None: the current state.
        self._state: Callable[[], State] | None = None
        self._restores = False  # before the next batch
        self._loaded = False  # from a checkpoint, and not restored since

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit":
            self._state, self._restores, self._loaded = None, False, False

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # An epoch's loader draws a seed for its workers; after a resume it has done so before.
        self._restores = True

    def on_train_batch_start(self, trainer: L.Trainer, *_: object, **__: object) -> None:
        if self._restores:
            self._restore()
        self._state, self._restores = None, False

    def _restore(self) -> None:
        self._loaded = False
        if self._state is not None:
            set_state(self._state())

    def on_train_batch_end(self, trainer: L.Trainer, *_: object, **__: object) -> None:
        # A validation draws next. In each step this would cost 25 µs.
        if self._state is None and validation_may_follow(trainer):
            self._state = get_state()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._state is None:
            self._state = get_state()

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._loaded:  # due right after the checkpoint's batch: nothing has been restored yet
            self._restore()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._restores = True  # its loaders drew from the same generator before it started

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: object, checkpoint: dict[str, object]
    ) -> None:
        state = get_state() if self._state is None else self._state
        own = state()
        states = processes.to_rank_zero(own)
        if not states:  # rank 0 writes them; under ZeRO-3 each rank reads its own file
            states = [{}] * trainer.world_size
            states[trainer.global_rank] = own
        checkpoint[KEY] = states

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        states, self._restores, self._loaded = checkpoint.get(KEY, []), True, True
        if len(states) == trainer.world_size:
            self._state = partial(states.__getitem__, trainer.global_rank)
            return
        rank_zero_warn(
            f"The checkpoint has the random state of {len(states)} ranks and there are"
            f" {trainer.world_size} now: dropout and other draws use new states. The order of"
            " samples is not affected."
        )
        # Tensor-parallel ranks, which share a batch, share the seed.
        rank = rank_view(trainer.strategy).random_rank
        entropy = [torch.initial_seed(), checkpoint["global_step"], rank]
        seed = np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0]
        torch.manual_seed(int(seed >> 1))
        self._state = get_state()


def get_state() -> Callable[[], State]:
    """Copies the current state in microseconds; calling the result converts it to plain types."""
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    numpy = np.random.get_state(legacy=False)
    return partial(_as_plain, torch.get_rng_state(), cuda, random.getstate(), numpy)


def _as_plain(torch_state: Tensor, cuda: Tensor | None, python: Any, numpy: Any) -> State:
    """Converts the states to tensors and plain types."""
    version, internal, gauss = python
    key = torch.from_numpy(numpy["state"]["key"].astype(np.int64))
    return {
        "torch": torch_state,
        "cuda": cuda,
        "python": (version, torch.tensor(internal), gauss),
        "numpy": numpy | {"state": {**numpy["state"], "key": key}},
    }


def set_state(state: State) -> None:
    version, internal, gauss = state["python"]
    numpy = state["numpy"] | {"state": {**state["numpy"]["state"]}}
    numpy["state"]["key"] = numpy["state"]["key"].numpy().astype(np.uint32)
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(state["cuda"])
    random.setstate((version, tuple(internal.tolist()), gauss))
    np.random.set_state(numpy)
