"""What a training really needs: bytes of its state, and the most that torch allocates in a
micro-batch."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from dist_template.compat.fake_tensors import LiveBytes

ZERO = ("averaged_gradients", "fp32_groups_gradients_flat", "single_partition_of_fp32_groups",
        "fp32_partitioned_groups_flat", "grad_partitions_flat_buffer")  # fmt: skip


class State(Callback):
    """Records the largest size of parameters, gradients and optimizer state in the second step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.most = 0

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.on_after_backward(trainer, pl_module)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        if trainer.global_step != 1:
            return
        tensors = [
            t
            for p in pl_module.parameters()
            for t in (kept(p), p.grad, getattr(p, "ds_tensor", None))
        ]
        for optimizer in [
            each for each in gc.get_objects() if isinstance(each, torch.optim.Optimizer)
        ]:
            tensors += [t for state in optimizer.state.values() for t in state.values()]
            tensors += [
                t
                for group in optimizer.param_groups
                for p in group["params"]
                for t in (kept(p), p.grad)
            ]
        for name in ZERO:
            tensors += flat(getattr(getattr(trainer.model, "optimizer", None), name, None))
        sizes: dict[int, int] = {}
        for tensor in flat(tensors):
            storage = (
                tensor.to_local() if isinstance(tensor, DTensor) else tensor
            ).untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
        self.most = max(self.most, sum(sizes.values()))
        (self.folder / f"state{trainer.global_rank}.json").write_text(json.dumps(self.most))


def kept(parameter: Any) -> Any:
    """Returns None under ZeRO-3, whose shards are counted and not the gathered parameters."""
    return None if hasattr(parameter, "ds_tensor") else parameter


def flat(value: Any) -> list[torch.Tensor]:
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (
        [value]
        if isinstance(value, torch.Tensor)
        else [tensor for each in values for tensor in flat(each)]
    )


class Live(Callback):
    """Records the most bytes of new tensors that live at once in the third step's last batch: in a
    pipeline, in the whole step, at whose end torch's profiler (2.13) has crashed."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._counter = folder, None

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == 2 and (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            gc.collect()
            self._counter: Any = LiveBytes(
                [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
            )
            self._counter.__enter__()

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        if self._counter is not None:
            self._counter.__exit__(None, None, None)
            (self.folder / f"live{trainer.global_rank}.json").write_text(
                json.dumps(self._counter.peak)
            )
            self._counter = None


class Allocated(Callback):
    """Records the most bytes that a micro-batch allocates, forward and backward, beyond those that
    it starts with.

    It is the last micro-batch of the third step, when gradients and optimizer state exist. torch's
    profiler counts every allocation on the host.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._profile: Any = None

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == 2 and (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            gc.collect()
            self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self._profile.__enter__()

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        if self._profile is None:
            return
        self._profile.__exit__(None, None, None)
        events = [
            event
            for event in self._profile.profiler.kineto_results.events()
            if event.name() == "[memory]"
        ]
        self._profile, live, most = None, 0, 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            live += event.nbytes()
            most = max(most, live)
        (self.folder / f"allocated{trainer.global_rank}.json").write_text(json.dumps(most))
