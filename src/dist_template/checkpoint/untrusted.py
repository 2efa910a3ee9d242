"""Reads checkpoint files as data: tensors and plain types only, so that nothing in a file can run.

torch's and DeepSpeed's own readers unpickle any class that a file names.
"""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Generator
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader

from ..compat.torch import metadata_path
from ..errors import reason

# What unpickling a damaged file raises.
DAMAGED = (pickle.UnpicklingError, ValueError, LookupError, EOFError, AttributeError, TypeError)


@contextlib.contextmanager
def as_data(*classes: type) -> Generator[None]:
    """Inside, torch.load creates only tensors, plain types and `classes`, for libraries too.

    DeepSpeed and torch's distributed format pass `weights_only=False`, which this environment
    variable overrides."""
    switch = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(switch)
    os.environ[switch] = "1"
    try:
        with torch.serialization.safe_globals(list(classes)):
            yield
    finally:
        if before is None:
            del os.environ[switch]
        else:
            os.environ[switch] = before


class DataReader(FileSystemReader):
    """torch's reader of the distributed format, which by itself runs code in a `.metadata` file."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        try:
            with self.fs.create_stream(metadata_path(self, kwargs.get("rank")), "rb") as file:
                _MetadataUnpickler(file).load()
        except DAMAGED as error:
            if isinstance(error, _RefusedError):
                raise
            raise pickle.UnpicklingError(f"its .metadata is damaged: {reason(error)}") from error
        return super().read_metadata(*args, **kwargs)


class _RefusedError(pickle.UnpicklingError):
    """A file names a class that no description of tensors needs."""


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickles only descriptions of tensors."""

    def find_class(self, module: str, name: str) -> Any:
        is_type = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_type or name in DESCRIPTIONS.get(module, ()):
            return super().find_class(module, name)
        raise _RefusedError(f"its .metadata names {module}.{name}, which describes no tensor")


DESCRIPTIONS = {
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata",
        "ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING",
    ),
    "pathlib": ("PosixPath", "WindowsPath"),
    "pathlib._local": ("PosixPath", "WindowsPath"),  # the same, from Python 3.13 on
}  # fmt: skip
