"""Published weights, read one tensor at a time: safetensors files are memory-mapped. A rank reads
its slices of sharded tensors that are not converted, and all of those that it makes.

transformers renames, stacks and splits the tensors of the files; its `from_pretrained` reads all in
one process. Only what is in safetensors files is read: other formats can run code."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ...checkpoint.stored import copy_shard
from ...compat import published as compat
from ...compat.recording import write_later
from ...errors import InputError
from ...progress import Progress
from .mtp import name_in_model, names_to_save

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from transformers import PreTrainedConfig, PreTrainedModel

# casts that change no value
EXACT = [(dtype, torch.float32) for dtype in (torch.float32, torch.float16, torch.bfloat16)]
# of new rows, in standard deviations of the others: as transformers, which takes their covariance
NOISE = 1e-9**0.5


class PublishedWeights:
    """The weights of a folder, or of a name on the hub, for a model of transformers' class `kind`.

    Raises:
        OSError: there are none, or a file is missing.
        SafetensorError: a file is damaged."""

    def __init__(self, name: str, kind: Any, config: PreTrainedConfig) -> None:
        self.name, self._kind, self._config = name, kind, copy.deepcopy(config)
        self._slices: dict[str, Any] = {}
        for file in compat.safetensors_of(name):
            try:
                opened = safe_open(file, framework="pt")
            except SafetensorError as error:
                raise SafetensorError(f"{Path(file).name}: {error}") from error
            for key in opened.keys():  # noqa: SIM118  (no dict)
                own = name_in_model(key, config)
                if own is not None:
                    self._slices[own] = opened.get_slice(key)
        self._skeleton: PreTrainedModel | None = None
        self._sources: dict[str, tuple[list[str], str | None]] = {}

    def write_into(self, model: PreTrainedModel, prefix: str = "") -> list[str]:
        """Lets the recorded `model` have these weights, of the names with `prefix`; returns the
        names of those that it has and the files do not."""
        self._sources = compat.sources_of_weights(model, list(self._slices))
        tensors: dict[str, Tensor] = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            if name.startswith(prefix):
                tensors[name] = tensor
        first_names: dict[int, str] = {}  # of a shared tensor, the first that is in the files
        for name, tensor in tensors.items():
            if not self._sources.get(name):
                continue
            first = first_names.setdefault(id(tensor), name)
            if first == name:
                self._write(name, tensor)
            elif not torch.equal(self.read(first), self.read(name)):
                raise NotImplementedError(
                    f"{first} and {name} share a parameter, and differ in {self.name}"
                )
        return [name for name, tensor in tensors.items() if id(tensor) not in first_names]

    def _write(self, name: str, tensor: Tensor) -> None:
        """Lets a tensor of the recorded model have its values: a rank reads its slice of one that
        is not converted, and else all of it."""
        (key, *others), pattern = self._sources[name]
        stored = self._slices[key]
        values = stored[...]  # mapped, not read
        is_converted = others or pattern
        write: Callable[..., object] = self._read_into
        source: Any = name
        if (
            not is_converted
            and values.shape == tensor.shape
            and (values.dtype, tensor.dtype) in EXACT
        ):
            write, source = copy_shard, stored
        if not write_later(write, [tensor], source, is_random=True):
            write(tensor.data, source)  # a constructor has put it on the host

    def differing(self, expected: Mapping[str, Any], dtype: torch.dtype) -> Iterator[str]:
        """Yields the names of weights that are not those in `expected`, which may be stored, in
        `dtype`."""
        model = self._skeleton = self._on_meta()
        self._sources = compat.sources_of_weights(model, list(self._slices))
        dtypes = compat.loaded_dtypes(model, dtype)
        names = names_to_save(model)
        for name in Progress("export: comparing", "weights", len(names)).over(names):
            if not self._sources.get(name):
                yield name
                continue
            values = expected[name][...].to(dtypes[name]).float()
            if not self.read(name).equal(values):
                yield name

    def _on_meta(self) -> PreTrainedModel:
        with torch.device("meta"):
            return self._kind.from_config(self._config, dtype=torch.float32)

    def _read_into(self, target: Tensor, name: str) -> None:
        values = self.read(name)
        if target.shape == values.shape:
            target.copy_(values)
            return
        if target.shape[1:] != values.shape[1:] or len(target) < len(values):
            what = f"its {name} is {tuple(values.shape)}, and the model's {tuple(target.shape)}"
            raise InputError(f"model.pretrained {self.name!r} cannot be loaded: {what}")
        num = len(values)  # the tokenizer has more tokens
        target[:num] = values
        target[num:] = values.mean(0) + values.std(0) * NOISE * torch.randn(target[num:].shape)

    def read(self, name: str) -> Tensor:
        """Returns a tensor of the model, in fp32. Raises InputError if it cannot be converted."""
        if self._skeleton is None:
            self._skeleton = self._on_meta()
        sources = {key: self._slices[key] for key in self._sources[name][0]}
        tensor, problem = compat.converted(self._skeleton, sources, name)
        if tensor is None:
            raise InputError(f"model.pretrained {self.name!r} cannot be loaded: {problem}")
        return tensor
