"""The relative speeds of data-parallel ranks, by which slow ones get fewer samples: given, or
measured in the first steps of a run."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_only
from torch import nn
from torch.distributed.fsdp import FSDPModule

from .. import processes
from ..compat.lightning import accumulates
from ..model.any_module import callbacks_of
from ..parallel import rank_view

SKIPPED_STEPS = 2  # they start kernels, allocators and DDP's buckets
MEASURED_STEPS = 5
EQUAL = 0.9  # a rank is slow below this speed; the rest is noise of the measurement

Change = tuple[int, list[float]]  # position of the stream, speeds of the steps from there on


class RankSpeeds:
    """The ranks' speeds in each step. Checkpoints have them, because the assignment of samples
    follows from them."""

    def __init__(self, num_ranks: int, given: Sequence[float] | None) -> None:
        self.num_ranks = num_ranks
        self.is_measured = given is None
        self.changes: list[Change] = [] if given is None else [(0, [*given])]

    def at(self, position: int) -> list[float] | None:
        """Returns the speeds in the step at a position of the stream; None: not known yet."""
        found = None
        for start, speeds in self.changes:
            if start <= position:
                found = speeds
        return found

    def load(self, changes: list[Change]) -> None:
        """Takes over what an earlier attempt measured; given speeds have precedence, and those of
        another number of ranks stand for nothing here."""
        if self.is_measured and all(len(speeds) == self.num_ranks for _, speeds in changes):
            self.changes = [(start, [*speeds]) for start, speeds in changes]


class MeasureSpeeds(Callback):
    """Measures each rank's time of a sample in the first steps of a run, and sets `speeds`.

    The time is that of forward passes, without the waits for other ranks that FSDP2 has before each
    block: a rank's own work, on a GPU by events of its stream. All ranks agree on the speeds at the
    end of the measured steps. They hold from the first step of which no rank has read a batch.

    Args:
        speeds: Is changed once; nothing is measured if it has speeds.
        drawn: Returns the position of the stream behind the newest step that this rank has read.
        rows: Returns this rank's number of samples in the optimizer step so far."""

    def __init__(
        self, speeds: RankSpeeds, drawn: Callable[[], int], rows: Callable[[], int]
    ) -> None:
        self._speeds, self._drawn, self._rows = speeds, drawn, rows
        self._steps = 0  # measured ones and skipped ones
        self._clock: _Clock | None = None
        self._own_s: list[float] = []  # of a sample, in each measured step

    def attach(self, trainer: Any) -> None:
        """Becomes the trainer's last callback, so that no other's work is timed."""
        others = [each for each in callbacks_of(trainer) if not isinstance(each, type(self))]
        trainer.callbacks = [*others, self]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not self._speeds.changes:
            self._clock = _Clock(pl_module)

    def on_train_batch_start(self, trainer: L.Trainer, *_: object, **__: object) -> None:
        if self._clock:
            self._clock.start()

    def on_before_backward(self, *_: object, **__: object) -> None:
        if self._clock:
            self._clock.stop()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *_: object, **__: object
    ) -> None:
        if self._clock is None or accumulates(trainer):
            return
        own_s = self._clock.read()
        self._steps += 1
        if self._steps > SKIPPED_STEPS:
            self._own_s.append(own_s / self._rows())
        if len(self._own_s) == MEASURED_STEPS:
            self._clock.close()
            self._clock = None
            self._agree(rank_view(trainer.strategy).data_rank.rank)

    def _agree(self, data_rank: int) -> None:
        """Sets the speeds of all ranks. Collective. Ranks that share samples are as fast as the
        slowest of them."""
        own = (data_rank, statistics.median(self._own_s), self._drawn())
        of_ranks = processes.from_all_ranks(own)
        slowest_s = dict.fromkeys(range(self._speeds.num_ranks), 0.0)
        for rank, sample_s, _ in of_ranks:
            slowest_s[rank] = max(slowest_s[rank], sample_s)
        start = max(drawn for _, _, drawn in of_ranks)
        speeds = relative(list(slowest_s.values()))
        self._speeds.changes.append((start, speeds))
        what = "equally many samples" if len({*speeds}) == 1 else "samples in proportion"
        rank_zero_only(print)(
            f"data.rank_speeds measured {speeds}: ranks get {what} from sample {start:,} on",
            flush=True,
        )


def relative(times_s: list[float]) -> list[float]:
    """Returns speeds, the fastest 1, of times of a sample; ranks that differ little are equal."""
    fastest = min(times_s)
    speeds = [round(fastest / each, 2) for each in times_s]
    return [1.0 if speed > EQUAL else max(speed, 0.01) for speed in speeds]


class _Clock:
    """Sums the time of forward passes, without the waits before modules that FSDP2 has sharded.
    FSDP2's own hook, which waits for the weights, is between the two that are added."""

    def __init__(self, module: nn.Module) -> None:
        device = next(module.parameters()).device
        self._is_on_gpu = device.type == "cuda"
        self._spans: list[tuple[Any, Any, int]] = []  # begin, end, and whether it counts or not
        self._forward: Any = None  # began; None outside of a forward pass
        self._wait: Any = None
        self._hooks = []
        for each in module.modules():
            if isinstance(each, FSDPModule):
                first: Any = each.register_forward_pre_hook(self._begin_wait, prepend=True)
                last: Any = each.register_forward_pre_hook(self._end_wait)
                self._hooks += [first, last]

    def _now(self) -> Any:
        if not self._is_on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start(self) -> None:
        self._forward = self._now()

    def stop(self) -> None:
        if self._forward is not None:
            self._spans.append((self._forward, self._now(), 1))
        self._forward = None

    def _begin_wait(self, *_: object) -> None:
        if self._forward is not None:  # else a block is computed again in the backward pass
            self._wait = self._now()

    def _end_wait(self, *_: object) -> None:
        if self._wait is not None:
            self._spans.append((self._wait, self._now(), -1))
        self._wait = None

    def read(self) -> float:
        """Returns the seconds since the last call. On a GPU it waits for the device."""
        spans, self._spans = self._spans, []
        if not self._is_on_gpu:
            return sum((end - begin) * sign for begin, end, sign in spans)
        torch.cuda.synchronize()
        return sum(begin.elapsed_time(end) * sign / 1000 for begin, end, sign in spans)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
