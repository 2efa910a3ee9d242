"""Trainings with adapters whose first step already has a gradient for every matrix."""

from typing import Any

from torch import nn

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
