"""Detects a checkpoint's format, and reads any format as Lightning's unsharded dict.

Lightning's and torch's converters (`consolidate_checkpoint`, `dcp_to_torch_save`) read only the
distributed format, and unpickle without restrictions. Here no code in a file can run
(untrusted.py)."""

from __future__ import annotations

import contextlib
import pickle
import re
import zipfile
from collections.abc import Generator
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from ..compat.torch import read_unsharded
from ..errors import InputError, another_rank_is_gone, is_out_of_memory, reason
from ..layout import full_shape
from ..weights import from_all_ranks
from . import zero
from .frozen import refuse_another_base
from .optimizer import by_name, by_name_from_flat, is_by_name
from .untrusted import DataReader, as_data

Format = Literal["file", "distributed", "zero"]
Shapes = dict[str, tuple[int, ...]]
WRITTEN_BY = {"file": "one process or DDP", "distributed": "MeshStrategy", "zero": "ZeroStrategy"}
# Raised for a damaged file, or one that names a class which may not be unpickled.
UNREADABLE = (OSError, EOFError, LookupError, ValueError, RuntimeError, pickle.UnpicklingError)
FILE = "checkpoint.pt"  # the only file beside the manifest in a folder of the format "file"
META = "meta.pt"  # Lightning's name for the part of a distributed checkpoint that is not tensors


def format_of(path: Path) -> Format | None:
    """Returns the format of a checkpoint, or None if `path` is none or an incomplete one."""
    if path.is_file():
        return "file" if zipfile.is_zipfile(path) else None
    if (path / FILE).is_file():
        return format_of(path / FILE)
    if (path / ".metadata").is_file() and (path / META).is_file():
        return "distributed"
    if (path / "latest").is_file() and next(path.glob("*/*_model_states.pt"), None):
        return "zero"
    return None


def read_full(
    path: str | Path, module: nn.Module | None = None, optimizer: bool = True
) -> dict[str, Any]:
    """Reads a checkpoint of any strategy in one process, with full (unsharded) tensors on the host.

    Call commit.agreed before, which verifies the files.

    Args:
        path: The checkpoint.
        module: The module into which it is to be loaded. None: any.
        optimizer: false saves the memory of the optimizer's state, twice that of the weights.

    Returns:
        Lightning's dict. "state_dict" holds the trained weights, in fp32 if the strategy keeps an
        fp32 copy. "optimizer_states" holds each optimizer's state by parameter name (optimizer.py),
        if the checkpoint has any.

    Raises:
        InputError: `path` is no checkpoint, incomplete, unreadable, not data alone, or of another
            model than `module`.
    """
    path = Path(path)
    readers = {"file": _read_file, "distributed": _read_distributed, "zero": zero.read}
    found = format_of(path)
    if found is None:
        raise InputError(f"{str(path)!r} is not a checkpoint, or is incomplete")
    with refusing_unreadable(path):
        full = readers[found](path, optimizer)
    if module is not None:
        refuse_another_base(path, full, module)
        refuse_another_models(path, full, module)
    return full


@contextlib.contextmanager
def refusing_unreadable(path: Path) -> Generator[None]:
    """Converts the errors of reading a damaged or foreign checkpoint.

    Raises:
        InputError: it cannot be read.
        RuntimeError: another rank was lost or memory ran out, so that a restart may help.
    """
    try:
        yield
    except (InputError, dist.DistError):
        raise
    except (*UNREADABLE, CheckpointException) as error:  # torch's is not a subclass of Exception
        cause: BaseException = error
        if isinstance(error, CheckpointException):
            cause = next(iter(error.failures.values()))[0]
        timed_out = "Timed out waiting" in str(cause)
        if timed_out or another_rank_is_gone(cause) or is_out_of_memory(cause):
            raise RuntimeError(str(cause)) from error
        found = f"checkpoint {str(path)!r} ({WRITTEN_BY.get(format_of(path) or 'file')}'s)"
        raise InputError(f"{found} cannot be read: {_why(cause)}") from error


def _why(error: BaseException) -> str:
    """Returns the reason without torch's advice to load the file with weights_only=False."""
    refused = re.search(r"GLOBAL (\S+)", str(error))
    if refused and isinstance(error, pickle.UnpicklingError):
        return f"it names the class {refused[1]}; only tensors and plain types are allowed"
    return reason(error)


def state_dict_of(path: Path, checkpoint: Any) -> dict[str, Tensor]:
    """Returns the weights in the content of the file `path`.

    Raises:
        InputError: there are none.
    """
    weights = checkpoint.get("state_dict") if isinstance(checkpoint, dict) else None
    if not isinstance(weights, dict):
        raise InputError(f"checkpoint {str(path)!r} has no `state_dict` of Lightning; give another")
    return weights


def refuse_another_models(path: Path, checkpoint: Any, module: nn.Module) -> None:
    """Compares names and shapes with those of `module`, before any tensor is copied.

    Raises:
        InputError: they differ, or the content of the file `path` has no weights.
    """
    saved, own = state_dict_of(path, checkpoint), module.state_dict(keep_vars=True)
    refuse_other_shapes(path, shapes(saved), shapes(own))


def shapes(state_dict: dict[str, Any]) -> Shapes:
    """Returns the full (unsharded) shape of each tensor."""
    tensors = {name: one for name, one in state_dict.items() if isinstance(one, Tensor)}
    return {name: tuple(full_shape(tensor)) for name, tensor in tensors.items()}


def of_all_stages(own: Shapes) -> Shapes:
    """Returns the shapes on all ranks: in a pipeline, each has those of its stage. Collective."""
    return {name: shape for each in from_all_ranks(own) for name, shape in each.items()}


def refuse_other_shapes(path: Path, saved: Shapes, own: Shapes) -> None:
    """Compares the names and shapes of a checkpoint's weights with the model's.

    Raises:
        InputError: they differ.
    """
    if differing := [name for name in saved | own if saved.get(name) != own.get(name)]:
        name = differing[0]
        here, there = own.get(name, "missing"), saved.get(name, "missing")
        raise InputError(
            f"checkpoint {str(path)!r} is another model's: its {name} is {there}, here it is {here}"
            f" ({len(differing)} such differences); give the --config list of its run"
        )


def file_in(path: Path) -> Path:
    """Returns the file of a checkpoint of the format "file"."""
    return path / FILE if path.is_dir() else path


def _read_file(path: Path, optimizer: bool) -> dict[str, Any]:
    with as_data():
        checkpoint = torch.load(file_in(path), map_location="cpu", mmap=True)
    state_dict_of(path, checkpoint)
    names = checkpoint.get("parameter_names")
    states = checkpoint.pop("optimizer_states", [])
    if not optimizer:
        return checkpoint
    if states and is_by_name(states[0]):  # a user has saved the result of `read_full`
        checkpoint["optimizer_states"] = states
    elif states and names:
        pairs = zip(states, names, strict=True)
        checkpoint["optimizer_states"] = [by_name(state, known) for state, known in pairs]
    return checkpoint


def _read_distributed(path: Path, optimizer: bool) -> dict[str, Any]:
    with as_data():
        reader = DataReader(path)
        reader.read_metadata()  # first: torch would log a refusal with a stack trace
        tensors = read_unsharded(reader, None if optimizer else {"state_dict"})
        checkpoint = torch.load(path / META, map_location="cpu")
    checkpoint["state_dict"] = weights = tensors.pop("state_dict")
    states = [tensors[f"optimizer_{index}"] for index in range(len(tensors))]
    if states:
        checkpoint["optimizer_states"] = [by_name_from_flat(state, weights) for state in states]
    return checkpoint


def saved_shapes(reader: DataReader) -> Shapes:
    """Returns the shape of each of the model's tensors in a distributed checkpoint."""
    described = reader.read_metadata().state_dict_metadata
    prefix = "state_dict."
    return {
        name.removeprefix(prefix): tuple(one.size)
        for name, one in described.items()
        if name.startswith(prefix) and hasattr(one, "size")
    }
