"""What a training really needs: bytes of its state, and what torch allocates in a micro-batch."""

import gc
import json
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from dist_template.compat.fake_tensors import LiveBytes

ZERO = (
    "averaged_gradients",
    "fp32_groups_gradients_flat",
    "single_partition_of_fp32_groups",
    "fp32_partitioned_groups_flat",
    "grad_partitions_flat_buffer",
)


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
        shards = [getattr(p, "ds_tensor", None) for p in pl_module.parameters()]
        tensors = [t for p in pl_module.parameters() for t in (kept(p), p.grad)] + shards
        for each in gc.get_objects():
            if isinstance(each, torch.optim.Optimizer):
                tensors += [t for state in each.state.values() for t in state.values()]
                for p in [p for group in each.param_groups for p in group["params"]]:
                    tensors += [kept(p), p.grad]
        for name in ZERO:
            tensors += flat(getattr(getattr(trainer.model, "optimizer", None), name, None))
        sizes: dict[int, int] = {}
        for tensor in flat(tensors):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            storage = local.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
        self.most = max(self.most, sum(sizes.values()))
        (self.folder / f"state{trainer.global_rank}.json").write_text(json.dumps(self.most))


def kept(parameter: Any) -> Any:
    """Returns None under ZeRO-3, whose shards are counted and not the gathered parameters."""
    return None if hasattr(parameter, "ds_tensor") else parameter


def flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [tensor for each in values for tensor in flat(each)]


def is_measured(trainer: Any, batch_idx: int) -> bool:
    """The third step's last micro-batch, when gradients and optimizer state exist."""
    return trainer.global_step == 2 and (batch_idx + 1) % trainer.accumulate_grad_batches == 0


class Live(Callback):
    """Records the most bytes of new tensors that live at once in the third step's last batch.

    In a pipeline it is the whole step, at whose end torch's profiler (2.13) has crashed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._running: Any = None

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if is_measured(trainer, batch_idx):
            gc.collect()
            self._running = self.measure()
            self._running.__enter__()

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        if self._running is not None:
            self._running.__exit__(None, None, None)
            name = f"{type(self).__name__.lower()}{trainer.global_rank}.json"
            (self.folder / name).write_text(json.dumps(self.most(self._running)))
            self._running = None

    def measure(self) -> Any:
        return LiveBytes([each for each in gc.get_objects() if isinstance(each, torch.Tensor)])

    def most(self, ended: Any) -> int:
        return ended.peak


class Allocated(Live):
    """Records the most bytes that a micro-batch allocates, by torch's profiler on the host."""

    def measure(self) -> Any:
        return profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    def most(self, ended: Any) -> int:
        live = most = 0
        events = ended.profiler.kineto_results.events()
        for event in sorted(events, key=lambda event: event.start_ns()):
            live += event.nbytes() if event.name() == "[memory]" else 0
            most = max(most, live)
        return most
