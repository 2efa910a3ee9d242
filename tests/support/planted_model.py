"""A model type that no table has, whose tensor-parallel plan is wrong without any sign of it."""

from typing import Any

from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

NAME = "planted"


class PlantedConfig(LlamaConfig):
    model_type = NAME


class CentredMLP(LlamaMLP):
    """Subtracts from the gate its mean over features, which each tensor-parallel rank has alone."""

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        return self.down_proj(self.act_fn(gate - gate.mean(-1, keepdim=True)) * self.up_proj(x))


class PlantedForCausalLM(LlamaForCausalLM):
    config_class = PlantedConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp.__class__ = CentredMLP


def register() -> None:
    """Registers the type, as a user's module.py would."""
    AutoConfig.register(NAME, PlantedConfig, exist_ok=True)
    AutoModelForCausalLM.register(PlantedConfig, PlantedForCausalLM, exist_ok=True)
