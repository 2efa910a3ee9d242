"""Exports adapters: as peft's folder, or merged into their base."""

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


def write_adapter(module: Any, data: object, dtype: torch.dtype, folder: Path) -> nn.Module:
    """Writes adapter_config.json and adapter_model.safetensors; returns the model without adapters
    with the folder's, loaded by peft."""
    from peft import PeftModel, get_peft_model_state_dict
    from safetensors.torch import save_file

    model, tensors = module.model, {}
    for name, tensor in get_peft_model_state_dict(model, adapter_name="default").items():
        tensors[name] = tensor.to(dtype)
    # Modules that were trained besides adapters keep their type: routing depends on it. A router
    # is one because of its buffer.
    full: set[str] = set()
    for path, child in model.named_modules():
        state: dict[str, Tensor] = {}
        for name, tensor in child.state_dict().items():
            if "." not in name:
                state[f"{path}.{name}"] = tensor
        is_trained = any(p.requires_grad for p in child.parameters(recurse=False))
        has_buffer = any(f"{path}.{name}" in state for name, _ in child.named_buffers())
        if ".lora_" not in path and state and (is_trained or has_buffer):
            tensors |= state
            full.add(path)
    config = model.peft_config["default"]
    config.modules_to_save = sorted(full) if full else None
    config.base_model_name_or_path = getattr(module, "pretrained", None)
    config.inference_mode = True
    saved = {}
    for name, tensor in tensors.items():
        saved[f"base_model.model.{name}"] = tensor.detach().clone()  # safetensors shares no memory
    save_file(saved, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(str(folder))
    torch.manual_seed(torch.initial_seed())
    untrained = module.base_on_host(data).requires_grad_(False)
    if module.adapter.quantize:
        quantize(untrained)
    with warnings.catch_warnings():  # peft 0.21 reads a deprecated property of transformers
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        return PeftModel.from_pretrained(untrained, str(folder)).eval()
