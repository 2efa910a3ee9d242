"""Checkpoints that are written while training goes on.

    a thread beside training's    weights, moments → copy in host memory    during the next forward and backward pass:
                                                                            they change in the optimizer's step
    training's own                all else → copy; what is left of the thread's copy is waited for before that step
    a thread beside it, then      write aside → hash → commit               as commit.save does, over a group of its own

The group matters: collectives of two threads in one group meet each other's, and the ranks abort. torch's own
`dcp.async_save` does the copies and half of the last: it neither hashes nor commits, and knows the distributed format
alone. Its stager is used here; that a copy may go on until the optimizer's step is from DataStates-LLM
(arXiv:2406.10707). What DeepSpeed saves by collectives of training's own groups it is asked for in training's thread,
and each file's content is copied at once, for where DeepSpeed would write it (zero.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor

from .. import weights
from ..compat.lightning import checkpoint_of, timeout_of
from ..compat.torch import tree_leaves, version_of
from . import commit, sharded, zero

Tensors = dict[str, Any]  # "state_dict", and the optimizers' states
TORN = (
    "something other than the optimizer's step has changed weights or moments while they were copied; if it must, set"
    " last_checkpoint.asynchronous to false"
)


@dataclass
class Begun:
    """A save of which this rank's copy may still be under way.

    Args:
        path: The checkpoint's name.
        about: What its manifest says.
        write: Writes the copied tensors into a folder.
        source: What is copied in the thread.
        copy: Of `source`. None: all is copied already.
    """

    path: Path
    about: dict[str, Any]
    write: Callable[[Tensors, Path], object]
    source: Tensors
    copy: Future[Tensors] | None = None

    def __post_init__(self) -> None:
        self._versions = list(_versions(self.source))

    def wait(self) -> tuple[Tensors, str | None]:
        """The copy, and why it is none: it could not be made, or something has written in place what it is of."""
        error = self.copy.exception() if self.copy else None
        trouble = f"weights and moments could not be copied: {error!r}" if error else None
        if self._versions != list(_versions(self.source)):
            trouble = TORN
        self.source = {}  # some may have been made for this alone
        return self.copy.result() if self.copy and not trouble else {}, trouble


class BackgroundSaver:
    """Saves one checkpoint at a time; made by all ranks together.

    Args:
        strategy: Any, without optimizer state on NVMe. Its timeout holds for the ranks' agreement too.
    """

    def __init__(self, strategy: Any) -> None:
        self._pins = pins = torch.cuda.is_available()  # only there can memory be pinned, and is it worth anything
        options = StagingOptions(
            use_pinned_memory=pins, use_non_blocking_copy=pins, use_shared_memory=False, use_async_staging=False
        )
        self._at_once = DefaultStager(options)
        self._beside = DefaultStager(replace(options, use_async_staging=pins))
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._begun: Begun | None = None
        self._underway: Future[None] | None = None
        timeout = timeout_of(strategy)
        self._group: Any = dist.new_group(backend="gloo", timeout=timeout) if dist.is_initialized() else None

    def start(self, trainer: L.Trainer, path: Path) -> None:
        """Begin to copy the present state, and to save it as `path`; `wait` must have ended the one before.

        Until `copied` was called, weights and optimizer state must stay as they are. Collective.
        """
        assert self._begun is self._underway is None
        path = Path(weights.broadcast(str(path)))
        checkpoint = checkpoint_of(trainer)
        write, source = self._split(trainer, checkpoint)
        self._begun = Begun(path, commit.describe(trainer), write, source, self._copy(source) if source else None)

    def copied(self) -> None:
        """Wait for the copy, and begin to write it; at the same step on all ranks."""
        begun, self._begun = self._begun, None
        if begun is not None:
            copy, trouble = begun.wait()
            self._underway = self._thread.submit(self._save, begun, copy, trouble)

    def wait(self) -> None:
        """Until what was begun is committed. Collective.

        Raises:
            SaveError: it was not, on any rank; a disk refused it, or one rank has no whole copy.
        """
        self.copied()
        underway, self._underway = self._underway, None
        if underway is not None:
            underway.result()

    def abandon(self) -> None:
        """Let what was begun end as it may, when training has failed: it is committed, or only a folder aside."""
        self.copied()
        underway, self._underway = self._underway, None
        if underway is not None:
            underway.exception()

    def close(self) -> None:
        """Give back memory, threads and group."""
        self.abandon()
        self._thread.shutdown()
        self._at_once.close()
        self._beside.close()
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)

    def _split(self, trainer: Any, checkpoint: dict[str, Any]) -> tuple[Callable[[Tensors, Path], object], Tensors]:
        """What writes a checkpoint into a folder, given a copy of the tensors that are told with it."""
        strategy, group = trainer.strategy, self._group
        if hasattr(strategy, "deepspeed_engine"):
            without_frozen = strategy.exclude_frozen_parameters
            write_all = zero.staged(strategy.deepspeed_engine, checkpoint, without_frozen, self._at_once.stage)
            return lambda _, aside: write_all(aside), {}
        is_sharded = isinstance(strategy, ModelParallelStrategy)  # MeshStrategy
        if not (is_sharded or strategy.is_global_zero):
            return lambda copy, aside: None, {}  # rank 0 has all, and writes it
        tensors, rest = sharded.split(checkpoint) if is_sharded else _tensors_of(checkpoint)
        trained = {name for name, _ in trainer.lightning_module.named_parameters(remove_duplicate=False)}
        state = tensors.pop("state_dict")
        # A forward pass may change buffers, and the next batch all else.
        now: Any = self._at_once.stage({"buffers": {n: v for n, v in state.items() if n not in trained}, "rest": rest})

        def write(copy: Tensors, aside: Path) -> None:
            copy["state_dict"] |= now["buffers"]
            if is_sharded:
                sharded.write(copy, now["rest"], aside, group)
            else:
                strategy.checkpoint_io.save_checkpoint(now["rest"] | copy, aside)

        return write, {"state_dict": {n: v for n, v in state.items() if n in trained}, **tensors}

    def _copy(self, source: Tensors) -> Future[Tensors]:
        stage: Any = self._beside.stage
        if not self._pins:
            return self._thread.submit(stage, source)  # torch's thread wants a stream, which a CPU or MPS has not
        torch.cuda.synchronize()  # that stream does not wait for the optimizer's step in training's
        return stage(source)

    def _save(self, begun: Begun, copy: Tensors, trouble: str | None) -> None:
        """In the thread; as commit.save. No collective of another group may be called here."""
        aside = commit.begin(begun.path, self._group, trouble)
        trouble = commit.disk_trouble(lambda: begun.write(copy, aside))
        commit.finish(begun.path, begun.about, trouble, self._group)


def _tensors_of(checkpoint: dict[str, Any]) -> tuple[Tensors, dict[str, Any]]:
    """As `sharded.split`, of a checkpoint that one rank writes."""
    names = ("state_dict", "optimizer_states")
    tensors = {name: checkpoint[name] for name in names if name in checkpoint}
    return tensors, {name: value for name, value in checkpoint.items() if name not in names}


def _versions(tree: Any) -> Iterator[int]:
    """Of all tensors: whatever writes one in place counts it up."""
    for tensor in tree_leaves(tree):
        if isinstance(tensor, Tensor):
            yield version_of(tensor.to_local() if isinstance(tensor, DTensor) else tensor)
