"""Reads an exported model's folder: its weights, and its logits for a batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Returns the weights of an exported model, by their names in memory."""
    if (folder / "config.json").exists():
        return _load(folder).state_dict()
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


@torch.no_grad()
def logits(folder: Path, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    inputs = {name: batch[name] for name in ("input_ids", "position_ids") if name in batch}
    return _load(folder)(**inputs, use_cache=False).logits


def _load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # it would be printed between the results
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).eval()
