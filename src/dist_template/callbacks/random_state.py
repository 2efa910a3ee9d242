"""Random state in checkpoints: a resumed run has the dropout that an uninterrupted run would have.

Lightning saves no random state. Ranks' states may differ, and a checkpoint keeps one rank's dictionary, so all states
are gathered into it.
"""

from __future__ import annotations

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

from .. import weights
from ..compat.lightning import validation_may_follow

KEY = "random_state"  # of a checkpoint: one `_as_plain` per rank


class RandomState(Callback):
    """Saves and restores the state of torch's, CUDA's, Python's and NumPy's generators on every rank.

    Training has its own stream, which continues after a validation as if there had been none, and across epochs. A run
    that resumes on another number of ranks starts new streams, from the seed, the step and the data-parallel rank, and
    prints a warning.
    """

    def __init__(self) -> None:
        self._state: Callable[[], dict[str, Any]] | None = None  # from when training last drew; None: the current state
        self._restores = False  # before the next batch

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            self._state, self._restores = None, False

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        # An epoch's loader draws a seed for its workers; after a resume it has done so before.
        self._restores = True

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._restores and self._state is not None:
            _set_state(self._state())
        self._state, self._restores = None, False

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if validation_may_follow(trainer):
            self._keep()  # validation draws next; keeping the state in each step would cost 25 µs

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._keep()

    def _keep(self) -> None:
        self._state = self._state or _get_state()

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._restores = True  # its loaders drew from the same generator before it started

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        state = self._state or _get_state()
        checkpoint[KEY] = weights.from_all_ranks(state())

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        states = checkpoint.get(KEY, [])
        if len(states) == trainer.world_size:
            own = states[trainer.global_rank]
            self._state, self._restores = lambda: own, True
        else:
            rank_zero_warn(
                f"The checkpoint holds the random state of {len(states)} ranks and there are {trainer.world_size} now:"
                " dropout and other draws use new states. Samples are not affected."
            )
            torch.manual_seed(self._new_seed(trainer, checkpoint["global_step"]))
            self._state, self._restores = _get_state(), True

    @staticmethod
    def _new_seed(trainer: L.Trainer, step: int) -> int:
        """Returns this rank's seed; ranks that share a batch (tensor parallelism) share the seed."""
        sampler = getattr(trainer.strategy, "distributed_sampler_kwargs", {"rank": 0})
        sequence = np.random.SeedSequence([torch.initial_seed(), step, sampler["rank"]])
        return int(sequence.generate_state(1, np.uint64)[0] >> 1)


def _get_state() -> Callable[[], dict[str, Any]]:
    """Copies the current state in microseconds; the result converts it to the plain types of a checkpoint."""
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    return partial(_as_plain, torch.get_rng_state(), cuda, random.getstate(), np.random.get_state(legacy=False))


def _as_plain(torch_state: Tensor, cuda: Tensor | None, python: Any, numpy: Any) -> dict[str, Any]:
    """Converts the states to tensors and plain types."""
    version, internal, gauss = python
    key = torch.from_numpy(numpy["state"]["key"].astype(np.int64))
    return {
        "torch": torch_state,
        "cuda": cuda,
        "python": (version, torch.tensor(internal), gauss),
        "numpy": numpy | {"state": {**numpy["state"], "key": key}},
    }


def _set_state(state: dict[str, Any]) -> None:
    version, internal, gauss = state["python"]
    numpy = state["numpy"] | {"state": {**state["numpy"]["state"]}}
    numpy["state"]["key"] = numpy["state"]["key"].numpy().astype(np.uint32)
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    random.setstate((version, tuple(internal.tolist()), gauss))
    np.random.set_state(numpy)
