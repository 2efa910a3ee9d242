"""Writes weights for transformers a few tensors at a time: as safetensors in the layout that
`from_pretrained` reads.

`save_pretrained` needs all weights in memory, and a copy of a file's bytes. `write_weights` writes

    1. the configurations, by `save_pretrained` without weights
    2. the files' headers and the index, from shapes on the meta device (`_allocate`)
    3. each tensor at its offset, in groups that can be converted by themselves (`_groups`)"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from ...cluster.memory import memory_limit
from ...compat import published as compat
from ...progress import Progress
from .mtp import NAME as MTP
from .mtp import names_to_save, published

INDEX = "model.safetensors.index.json"
ROOM = 1.3  # of a model's memory: for activations and the largest tensors
# safetensors' names
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
Names = list[str]


def larger_than_memory(build: Callable[[], nn.Module]) -> nn.Module | None:
    """Returns a model of transformers on the meta device if the host has no memory for it; else
    None."""
    try:
        with torch.device("meta"):
            model = build()
    except (NotImplementedError, RuntimeError):  # its constructor reads values
        return None
    if not hasattr(model, "save_pretrained"):
        return None
    needed = ROOM * sum(tensor.nbytes for tensor in model.state_dict().values())
    left_of_limit = memory_limit() - psutil.Process().memory_info().rss
    free = min(psutil.virtual_memory().available, left_of_limit)
    return model if needed > free else None


def write_weights(
    model: Any, tensors: dict[str, Any], dtype: torch.dtype, size: str, folder: Path
) -> None:
    """Writes configuration and weights into `folder`, in files of at most `size` bytes (5GB) if no
    tensor is larger. `tensors` are the values of `model`, in memory or stored, each of which is
    removed once it is written; `model` is moved to the meta device and cast."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    model.to("meta")
    dtypes = compat.loaded_dtypes(model, dtype)
    names = names_to_save(model)
    has_modules = any(name.startswith(f"{MTP}.") for name in names)
    if not has_modules:  # where the number is not 0, vLLM, SGLang and transformers expect them
        for key in ("num_mtp_layers", "num_nextn_predict_layers"):
            if key in dir(model.config):  # an alias of another key is not
                setattr(model.config, key, 0)
    model.to(dtype).save_pretrained(folder, state_dict={})  # the configurations
    meta = dict[str, Tensor]()
    for name in names:
        meta[name] = torch.empty(tensors[name].shape, dtype=dtypes[name], device="meta")
    places = _allocate(published(model, meta), folder, size)
    groups = list(_groups(model, meta))
    for group in Progress("export: writing", "groups of weights", len(groups)).over(groups):
        values = {name: tensors.pop(name)[...].to(dtypes[name]) for name in group}
        for name, value in published(model, values).items():
            file, offset = places[name]
            with file.open("r+b") as out:
                out.seek(offset)
                out.write(value.contiguous().reshape(-1).view(torch.uint8).numpy())


def _allocate(meta: Mapping[str, Tensor], folder: Path, size: str) -> dict[str, tuple[Path, int]]:
    """Writes headers and the index; returns the file and offset of each tensor of `meta`."""
    from huggingface_hub import split_torch_state_dict_into_shards

    split = split_torch_state_dict_into_shards(
        dict(meta), filename_pattern="model{suffix}.safetensors", max_shard_size=size
    )
    places = {}
    for file, names in split.filename_to_tensors.items():
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        # the types of most bytes first, so that each tensor is aligned to its type
        for name in sorted(names, key=lambda name: meta[name].itemsize, reverse=True):
            begin, end = end, end + meta[name].nbytes
            header[name] = {
                "dtype": DTYPES[meta[name].dtype],
                "shape": list(meta[name].shape),
                "data_offsets": [begin, end],
            }
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # the tensors start at a multiple of 8
        data_start = 8 + len(text)
        with (folder / file).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            out.truncate(data_start + end)
        for name in names:
            places[name] = folder / file, data_start + header[name]["data_offsets"][0]
    if split.is_sharded:
        num_parameters = sum(tensor.numel() for tensor in meta.values())
        metadata = {"total_parameters": num_parameters} | split.metadata
        index = {"metadata": metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX).write_text(
            json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8"
        )
    return places


def _groups(model: Any, meta: Mapping[str, Tensor]) -> list[Names]:
    """Returns the smallest groups of tensors that are converted by themselves: one, a block, or
    all."""

    def shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
        return {name: tensor.shape for name, tensor in published(model, dict(tensors)).items()}

    expected = shapes(meta)
    for pattern in (".*", r"(.*?\.\d+\.)?"):  # by the full name; by the block
        groups = defaultdict[str, Names](list)
        for name in meta:
            groups[re.match(pattern, name)[0]].append(name)  # ty: ignore[not-subscriptable]
        converted = dict[str, torch.Size]()
        try:
            for group in groups.values():
                converted |= shapes({name: meta[name] for name in group})
        except Exception:  # noqa: S112  a conversion misses a tensor of another group, and raises what it likes
            continue
        if converted == expected:
            return list(groups.values())
    return [list(meta)]
