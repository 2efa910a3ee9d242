"""A model type that no table has, whose tensor-parallel plan is wrong without any sign of it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

NAME = "planted"


class PlantedConfig(LlamaConfig):
    model_type = NAME


class CentredMLP(nn.Module):
    """Subtracts the mean over features from the gate; under tensor parallelism each rank has its
    own mean."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.act_fn = mlp.act_fn

    def forward(self, hidden: Tensor) -> Tensor:
        gate = self.gate_proj(hidden)
        return self.down_proj(
            self.act_fn(gate - gate.mean(-1, keepdim=True)) * self.up_proj(hidden)
        )


class PlantedForCausalLM(LlamaForCausalLM):
    config_class = PlantedConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = CentredMLP(layer.mlp)


def register() -> None:
    """As a user's module.py would."""
    AutoConfig.register(NAME, PlantedConfig, exist_ok=True)
    AutoModelForCausalLM.register(PlantedConfig, PlantedForCausalLM, exist_ok=True)
