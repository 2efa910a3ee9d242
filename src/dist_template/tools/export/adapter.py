"""Exports adapters: as peft's folder, or merged into their base; and compares logits."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import InputError
from ...model.quantize import dequantize, quantize, replace_layers

MOST = 1e-5  # of the largest logit: adding two products and adding their sum round differently


def merged(model: Any) -> nn.Module:
    """Returns `model`, unpacked, with its adapters added to its weights.

    Raises:
        InputError: it gives other logits.
    """

    def merge(layer: Any) -> nn.Module:
        layer.merge()
        return layer.get_base_layer()

    trained = logits(model)
    dequantize(model)
    replace_layers(model, lambda layer: hasattr(layer, "lora_A"), merge)
    model.delete_adapter("default")
    _refuse_other(logits(model), trained, "the merged weights")
    return model


def write_adapter(module: Any, data: Any, dtype: torch.dtype, folder: Path) -> str:
    """Writes adapter_config.json and adapter_model.safetensors; returns a comparison in words.

    Raises:
        InputError: the folder, loaded by peft on the model without adapters, gives other logits.
    """
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
        loaded = PeftModel.from_pretrained(untrained, str(folder)).eval()
    written, trained = logits(loaded), logits(model)
    if dtype == torch.float32:
        _refuse_other(written, trained, "the adapter folder")
    difference = largest_difference(written, trained)
    return f"an adapter for {base or 'a base from scratch'}, largest difference {difference:g}"


def _saved_in_full(model: nn.Module) -> dict[str, Tensor]:
    """Returns what training changed besides adapters, module by module: routers have a buffer."""
    saved: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        own = {n: t for n, t in module.state_dict().items() if "." not in n}
        trained = any(p.requires_grad for p in module.parameters(recurse=False))
        if ".lora_" not in path and (trained or own.keys() & dict(module.named_buffers()).keys()):
            saved |= {f"{path}.{name}": tensor for name, tensor in own.items()}
    return saved


def _refuse_other(given: Tensor, trained: Tensor, what: str) -> None:
    difference = largest_difference(given, trained)
    if not difference <= MOST * max(1.0, trained.abs().max().item()):
        differ = f"differ by up to {difference:.1e} from training's"
        raise InputError(f"{what} give logits that {differ}")


@torch.no_grad()
def logits(model: Any) -> Tensor:
    """Returns (B, T, V) logits in float32 of random tokens, which depend on the model's sizes."""
    shape = (2, min(64, getattr(model.config, "max_position_embeddings", 64)))
    vocab_size = model.get_input_embeddings().num_embeddings
    tokens = torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(0))
    return model(input_ids=tokens, use_cache=False).logits.float()


def largest_difference(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()
