"""Loads published weights, and refuses missing or damaged files in one sentence.

Weights come from safetensors files alone: other formats can run code when they are read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ..errors import InputError, reason

INDEX = "model.safetensors.index.json"


def check_files(name: str) -> None:
    """Reads the headers of a local folder's weights, before any process is started; a hub name passes.

    Raises:
        InputError: a file is missing or damaged.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return
    try:
        files = {"model.safetensors"}
        if (folder / INDEX).exists():
            files = set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
        for file in sorted(files):
            if not (folder / file).is_file():
                raise InputError(
                    f"model.pretrained {name!r} has no {file}: give a complete folder in transformers' layout, with"
                    " weights as safetensors (save_pretrained writes them)"
                )
            with safe_open(folder / file, framework="pt"):
                pass  # opening compares the header's offsets with the file's size
    except InputError:
        raise
    except (OSError, ValueError, LookupError, AttributeError, SafetensorError) as error:
        sentence = f"model.pretrained {name!r} is damaged ({reason(error)}): copy or download it again"
        raise InputError(sentence) from error


def load_pretrained(name: str, config: Any) -> Any:
    """Returns transformers' causal language model with the weights of `name`, a local folder or a hub name, in fp32.

    Raises:
        InputError: they cannot be loaded.
    """
    import torch
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(
            name, config=config, dtype=torch.float32, trust_remote_code=False, use_safetensors=True
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise InputError(f"model.pretrained {name!r} cannot be loaded: {reason(error)}") from error
