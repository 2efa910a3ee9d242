"""Exports adapters: as peft's folder, or merged into their base; and compares logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..model.quantize import dequantize

MOST = 1e-5  # of the largest logit: adding two products and adding their sum round differently


def merged(model: Any, build: Callable[[], nn.Module]) -> nn.Module:
    """Returns the model of `build`, unpacked, with the adapters of `model` added to its weights.

    Raises:
        InputError: it gives other logits.
    """
    from peft import PeftModel

    with TemporaryDirectory() as folder:
        write_adapter(model, build, None, torch.float32, Path(folder))
        base = build()
        dequantize(base)
        plain = PeftModel.from_pretrained(base, folder).merge_and_unload().eval()
    tokens = probe(model)
    _agree(logits(plain, tokens), logits(model, tokens), "the merged weights")
    return plain


def write_adapter(
    model: Any, build: Callable[[], nn.Module], base: str | None, dtype: torch.dtype, folder: Path
) -> str:
    """Writes adapter_config.json and adapter_model.safetensors; returns a comparison in words.

    Raises:
        InputError: the folder, loaded by peft on the model of `build`, gives other logits.
    """
    from peft import PeftModel, get_peft_model_state_dict
    from safetensors.torch import save_file

    config = model.peft_config["default"]
    state = get_peft_model_state_dict(model, adapter_name="default")
    full = _saved_in_full(model)
    config.modules_to_save = sorted({name.rpartition(".")[0] for name in full}) or None
    config.base_model_name_or_path, config.inference_mode = base, True
    cast = {name: tensor.to(dtype) for name, tensor in state.items()}  # routing depends on the rest
    tensors = {f"base_model.model.{n}": t.detach().clone() for n, t in (cast | full).items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(str(folder))
    tokens = probe(model)
    trained = logits(model, tokens)
    loaded: Any = PeftModel.from_pretrained(build(), str(folder)).eval()
    written = logits(loaded, tokens)
    if dtype == torch.float32:
        _agree(written, trained, "the adapter folder")
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


def _agree(a: Any, b: Any, what: str) -> None:
    difference = largest_difference(a, b)
    if not difference <= MOST * max(1.0, b.abs().max().item()):
        raise InputError(
            f"{what} give logits that differ by up to {difference:.1e} from training's"
        )


def probe(model: Any) -> Tensor:
    """Returns (B, T) random tokens, the same in every call."""
    shape = (2, min(64, getattr(model.config, "max_position_embeddings", 64)))
    vocab_size = model.get_input_embeddings().num_embeddings
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def logits(model: Any, tokens: Tensor) -> Tensor:
    """Returns (B, T, V) logits in float32."""
    return model(input_ids=tokens, use_cache=False).logits.float()


def largest_difference(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()
