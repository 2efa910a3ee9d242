"""Trainings with adapters whose first step already has a gradient for every matrix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback
from torch import nn
from torch.distributed.tensor import DTensor

from dist_template.text import module as text_module
from tests.support.parity import mask_labels

TARGETS = {
    "llama": "[q_proj, v_proj, o_proj, gate_proj, down_proj]",
    "attention": "[q_a_proj, q_b_proj, kv_a_proj_with_mqa, kv_b_proj, o_proj]",
    # Both stacked parameters; peft takes gate_proj and up_proj together for the first.
    "experts": "[gate_up_proj, down_proj]",
}
MODEL = {"llama": "llama", "attention": "deepseek_v3", "experts": "deepseek_v3"}


def flags(targets: str, *more: str) -> list[str]:
    keys = (f"targets={targets}", "rank=4", "alpha=8", *more)
    return [f"--model.adapter.{key}" for key in keys]


def with_random_b() -> None:
    """In each worker: B is not zero, or the gradient of A would be zero in the first step."""
    mask_labels()
    add = text_module.add_adapters

    def add_and_fill(*args: Any) -> nn.Module:
        model = add(*args)
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                nn.init.normal_(parameter, std=0.1)
        return model

    vars(text_module)["add_adapters"] = add_and_fill


class LocalBytes(Callback):
    """Writes {name: bytes of this rank's shard} of every parameter, one file for each rank."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        sizes = {}
        for name, parameter in pl_module.model.named_parameters():
            local = getattr(parameter, "ds_tensor", parameter)
            local = local.to_local() if isinstance(local, DTensor) else local
            sizes[name] = local.numel() * local.element_size()
        self.folder.mkdir(exist_ok=True)
        (self.folder / f"{trainer.global_rank}.json").write_text(json.dumps(sizes))

    def read(self) -> list[dict[str, int]]:
        return [json.loads(file.read_text()) for file in sorted(self.folder.glob("*.json"))]
