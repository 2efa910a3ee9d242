"""What the diagnosis says holds the memory, against the tensors of real trainings."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch.distributed.tensor import DTensor

from ..diagnosis.memory import Cut, Training, cut_of, training_of
from ..diagnosis.remedies import GIB, held, remedies
from ..history.run import History
from ..rehearsal.workers import Workers
from .conftest import CONFIGS, run

WIDTH, LAYERS, MLP, VOCAB, HEADS = 256, 4, 512, 257, 4
ARCHITECTURE = (
    f"{{model_type: llama, hidden_size: {WIDTH}, intermediate_size: {MLP}, num_hidden_layers: {LAYERS},"
    f" num_attention_heads: {HEADS}, num_key_value_heads: {HEADS}}}"
)
PARAMETERS = LAYERS * (4 * WIDTH**2 + 3 * WIDTH * MLP + 2 * WIDTH) + 2 * VOCAB * WIDTH + WIDTH


class State(Callback):
    """The most bytes of parameters, gradients and optimizer state in the second step, when all of them are there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.most = 0

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.on_after_backward(trainer, pl_module)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        if trainer.global_step != 1:
            return
        tensors = [t for p in pl_module.parameters() for t in (p, p.grad, getattr(p, "ds_tensor", None))]
        for each in gc.get_objects():
            if isinstance(each, torch.optim.Optimizer):
                tensors += [t for state in each.state.values() for t in state.values()]
                tensors += [p for group in each.param_groups for p in group["params"]]
                tensors += [p.grad for group in each.param_groups for p in group["params"]]
        zero = getattr(trainer.model, "optimizer", None)
        for gradients in getattr(zero, "averaged_gradients", {}).values():
            tensors += gradients or []
        tensors += [*getattr(zero, "fp32_groups_gradients_flat", []), getattr(zero, "grad_partitions_flat_buffer", None)]
        sizes: dict[int, int] = {}
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
                sizes[storage.data_ptr()] = storage.nbytes()
        self.most = max(self.most, sum(sizes.values()))
        (self.folder / f"state{trainer.global_rank}.json").write_text(json.dumps(self.most))


def strategy(name: str) -> list[str]:
    path = CONFIGS / "strategy" / f"{name}.yaml"
    return [f"--config={path}", "--trainer.devices=2"]
