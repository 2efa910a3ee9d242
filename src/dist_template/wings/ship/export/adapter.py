"""Exports adapters: as peft's folder, or merged into their base."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ....text.model.quantize import dequantize, quantize, replace_layers


def merge(model: Any) -> None:
    """Adds the adapters of `model` to its weights, unpacked, and removes them."""

    def merged(layer: Any) -> nn.Module:
        layer.merge()
        return layer.get_base_layer()

    dequantize(model)
    replace_layers(model, lambda layer: hasattr(layer, "lora_A"), merged)
    model.delete_adapter("default")


def write_adapter(module: Any, data: Any, dtype: torch.dtype, folder: Path) -> nn.Module:
    """Writes adapter_config.json and adapter_model.safetensors; returns the model without adapters
    with the folder's, loaded by peft."""
    from peft import PeftModel, get_peft_model_state_dict
    from safetensors.torch import save_file

    model, base = module.model, getattr(module, "pretrained", None)
    config = model.peft_config["default"]
    state = get_peft_model_state_dict(model, adapter_name="default")
    full = _saved_in_full(model)
    config.modules_to_save = sorted({name.rpartition(".")[0] for name in full}) or None
    config.base_model_name_or_path, config.inference_mode = base, True
    cast = {name: tensor.to(dtype) for name, tensor in state.items()}  # routing depends on the rest
    tensors = {f"base_model.model.{n}": t.detach().clone() for n, t in (cast | full).items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(str(folder))
    torch.manual_seed(torch.initial_seed())
    untrained = module.build_model(data).requires_grad_(False)
    if module.adapter.quantize:
        quantize(untrained)
    with warnings.catch_warnings():  # peft 0.21 reads a deprecated property of transformers
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        return PeftModel.from_pretrained(untrained, str(folder)).eval()


def _saved_in_full(model: nn.Module) -> dict[str, Tensor]:
    """Returns what training changed besides adapters, module by module: routers have a buffer."""
    saved: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        own = {n: t for n, t in module.state_dict().items() if "." not in n}
        trained = any(p.requires_grad for p in module.parameters(recurse=False))
        if ".lora_" not in path and (trained or own.keys() & dict(module.named_buffers()).keys()):
            saved |= {f"{path}.{name}": tensor for name, tensor in own.items()}
    return saved
