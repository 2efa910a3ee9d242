"""Reads checkpoint files as data: tensors and plain types only, so that nothing in a file can run.

torch's and DeepSpeed's own readers unpickle any class that a file names."""

import contextlib
import os
import pickle
import re
from collections.abc import Generator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from .. import processes
from ..compat.torch import metadata_path
from ..errors import InputError, another_rank_is_gone, is_out_of_memory, reason, shortened

SWITCH = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"  # torch's: overrides weights_only=False
# Raised for a damaged file, or one that names a class which may not be unpickled.
UNREADABLE = (OSError, EOFError, LookupError, ValueError, RuntimeError, pickle.UnpicklingError)
# What unpickling a damaged file raises.
DAMAGED = (pickle.UnpicklingError, ValueError, LookupError, EOFError, AttributeError, TypeError)


@contextlib.contextmanager
def reading(
    path: Path, written_by: str, classes: list[type] | None = None, trusted: bool = False
) -> Generator[None]:
    """Inside, torch.load creates only tensors, plain types and `classes`, for libraries too.

    `path` and `written_by` name the checkpoint in messages; `trusted` allows any class.

    Raises:
        InputError: the checkpoint is damaged, or names another class.
        RuntimeError: another rank was lost or memory ran out, so that a restart may help."""
    before = os.environ.get(SWITCH)
    if not trusted:
        os.environ[SWITCH] = "1"
    try:
        with torch.serialization.safe_globals(list(classes or ())):
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
        why = reason(cause)
        # Without torch's advice to load the file with weights_only=False.
        refused = re.search(r"GLOBAL (\S+)", str(cause))
        if refused and isinstance(cause, pickle.UnpicklingError):
            why = f"it names the class {refused[1]}; only tensors and plain types are allowed"
        sentence = f"checkpoint {str(path)!r} ({written_by}'s) cannot be read: {why}"
        raise InputError(sentence) from error
    finally:
        os.environ.pop(SWITCH, None)
        if before is not None:
            os.environ[SWITCH] = before


# Lightning's entries of a checkpoint, and the types that it writes.
ENTRIES: dict[str, type] = {
    "epoch": int,
    "global_step": int,
    "pytorch-lightning_version": str,
    "loops": dict,
    "callbacks": dict,
    "optimizer_states": list,
    "lr_schedulers": list,
    "parameter_names": list,
}
OF_STATES = ("loops", "callbacks", "optimizer_states", "lr_schedulers")  # their values are dicts


def check_entries(path: Path, content: dict[str, Any]) -> None:
    """Raises InputError if an entry of Lightning's has another type than Lightning writes: it, and
    callbacks, read them without a check, and fail in the middle of a start."""

    def refuse(name: str, why: str) -> None:
        raise InputError(f"checkpoint {str(path)!r} is damaged: its {name} {why}; give another")

    for name, kind in ENTRIES.items():
        if name in content and not isinstance(content[name], kind):
            refuse(name, f"is a {type(content[name]).__name__}, and not a {kind.__name__}")
    for name in OF_STATES:
        states = content.get(name, {})
        if isinstance(states, dict):
            states = states.values()
        for state in states:
            if not isinstance(state, dict):
                refuse(name, f"have a {type(state).__name__} in place of a state")
    for state in content.get("optimizer_states", ()):
        groups = state.get("param_groups", [])
        is_right = isinstance(groups, list) and all(isinstance(group, dict) for group in groups)
        if not is_right or not isinstance(state.get("state", {}), dict):
            refuse("optimizer_states", "have no states and groups of parameters")
    version = content.get("pytorch-lightning_version")
    if version is not None and not re.fullmatch(r"\d+\.\d+[\w.+-]*", version):
        refuse("pytorch-lightning_version", f"is {shortened(repr(version), 100)}")


@contextlib.contextmanager
def agreed_on_errors() -> Generator[None]:
    """Raises on all ranks the InputError of one rank inside, which must wait for no other rank.
    Collective."""
    refusal = None
    try:
        yield
    except InputError as error:
        refusal = str(error)
    refusals = [text for text in processes.to_rank_zero(refusal) if text]
    first = processes.broadcast(refusals[0] if refusals else None)
    if first:
        raise InputError(first)


class DataReader(FileSystemReader):
    """torch's reader of the distributed format, which by itself runs code in a `.metadata` file."""

    _metadata: Metadata | None = None  # of thousands of ranks: it takes seconds to read

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._metadata is None:
            try:
                with self.fs.create_stream(metadata_path(self, kwargs.get("rank")), "rb") as file:
                    self._metadata = _MetadataUnpickler(file).load()
            except DAMAGED as error:
                if isinstance(error, _RefusedError):
                    raise
                raise pickle.UnpicklingError(
                    f"its .metadata is damaged: {reason(error)}"
                ) from error
            self._metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return self._metadata


class _RefusedError(pickle.UnpicklingError):
    """A file names a class that no description of tensors needs."""


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickles only descriptions of tensors."""

    def find_class(self, module: str, name: str) -> object:
        is_type = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_type or name in DESCRIPTIONS.get(module, ()):
            return super().find_class(module, name)
        raise _RefusedError(f"its .metadata names {module}.{name}, which describes no tensor")


DESCRIPTIONS = {
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "_MEM_FORMAT_ENCODING",
    ),
    "pathlib": ("PosixPath", "WindowsPath"),
    "pathlib._local": ("PosixPath", "WindowsPath"),  # the same, from Python 3.13 on
}
