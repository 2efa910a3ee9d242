"""ONNX: one graph by transformers' own exporter, with a key-value cache, and its runner.

Batch and length are dynamic. A prompt is run with a cache of length 0; padding is on the left.
Models with sliding windows get a graph of `input_ids` alone, without a cache and for rows without
padding. The weights are in model.onnx.data beside the graph, so that no limit of protobuf (2 GB)
applies."""

from __future__ import annotations

import logging
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ....errors import InputError, reason, require

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel

PACKAGES = ("onnx", "onnxscript", "onnxruntime")  # of the extra
DTYPES = ("float32", "float16", "int8")
# Of the card and of docs/evaluate.md: the logits of a prompt, without transformers.
EXAMPLE = """\
import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession("model.onnx")
tokens = np.array([[1, 2, 3]])  # of the tokenizer beside it
places = np.arange(tokens.shape[1])[None]
feeds = {"input_ids": tokens, "attention_mask": np.ones_like(tokens), "position_ids": places}
for one in session.get_inputs():
    if ".past_key_values." in one.name:  # (1, heads, 0, width): nothing was read before
        kind = np.float16 if "float16" in one.type else np.float32
        heads, width = int(one.shape[1]), int(one.shape[3])
        feeds[one.name] = np.zeros((1, heads, 0, width), kind)
known = {one.name for one in session.get_inputs()}
outputs = session.run(None, {name: feeds[name] for name in known})
logits, *cache = outputs  # (1, length, vocabulary); the cache goes in beside the next tokens
"""


def require_packages() -> None:
    """Raises InputError where a package of the extra is not installed."""
    for package in PACKAGES:
        require(package, "--to onnx", extra="onnx")


def write_onnx(model: PreTrainedModel, dtype: str, folder: Path) -> None:
    """Writes model.onnx and its weights into `folder`; int8: linear layers' weights in 8 bits.
    Raises InputError if transformers' exporter cannot export this model."""
    from transformers import GenerationConfig, exporters
    from transformers.exporters.utils import decompose_for_generation

    quantizer = None
    if dtype == "int8":
        quantizer = exporters.OnnxRuntimeQuantizer(exporters.OnnxRuntimeDynamicConfig())
    config = exporters.OnnxConfig(dynamic=True, quantizer=quantizer)
    vocabulary = model.config.get_text_config().vocab_size
    tokens = torch.arange(12).remainder(vocabulary).repeat(2, 1)
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0  # without padding the graph would get no mask
    steps = GenerationConfig(max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0)
    logging.disable(logging.WARNING)  # dozens of lines about operators of other models
    try:
        if dtype == "float16":
            model = model.half()
        with redirect_stdout(StringIO()):
            given = {"input_ids": tokens, "attention_mask": mask}
            stages: Any = decompose_for_generation(model, given, steps, multi_token_decode=True)
            model_of_stage, inputs = stages["decode"]
            if not _has_plain_cache(inputs):
                model_of_stage, inputs = model, {"input_ids": tokens}
                model.config.use_cache = False
            exporter: Any = exporters.OnnxExporter()
            exporter.export(model_of_stage, inputs, config).save_pretrained(folder)
        model.generation_config.save_pretrained(folder)
    except Exception as error:  # of torch.export, onnxscript and onnxruntime
        if isinstance(error, OSError):  # a full disk: numpy's error has no number
            raise
        name = type(model).__name__
        raise InputError(
            f"--to onnx: {name} cannot be exported by transformers' exporter"
            f" ({reason(error)}): give --to hf"
        ) from error
    finally:
        logging.disable(logging.NOTSET)


def _has_plain_cache(inputs: dict[str, Any]) -> bool:
    """Returns whether each layer caches keys and values alone, of all tokens. A graph of a sliding
    window or a recurrent state would need inputs that differ from one model to the next."""
    layers = getattr(inputs.get("past_key_values"), "layers", [])
    return bool(layers) and all(type(each).__name__ == "DynamicLayer" for each in layers)


class OnnxModel:
    """An exported graph in onnxruntime on the CPU, called like a model of transformers."""

    def __init__(self, folder: Path) -> None:
        import onnxruntime
        from transformers.exporters import ExportedModel

        onnxruntime.set_default_logger_severity(4)  # an error of a graph is raised, too
        self.exported: Any = ExportedModel.from_pretrained(folder, device="cpu")
        self.config, self.dtype = self.exported.config, self.exported.dtype
        inputs = self.exported.runners["model"].session.get_inputs()
        self.names = {one.name for one in inputs}
        self.cache = [one.shape for one in inputs if ".past_key_values." in one.name]

    def __call__(
        self,
        input_ids: Tensor,
        past_key_values: Cache | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        **_: object,
    ) -> Any:
        """Returns the logits (B, T, V) of tokens (B, T) that follow those of `past_key_values`, and
        the cache after them."""
        from transformers import DynamicCache

        num_rows, length = input_ids.shape
        if not self.cache:
            return self.exported(input_ids=input_ids)
        if past_key_values is None:
            empty = []
            for _, heads, _, width in self.cache:
                empty.append(torch.zeros((num_rows, int(heads), 0, int(width)), dtype=self.dtype))
            past_key_values = DynamicCache(list(zip(empty[::2], empty[1::2], strict=True)))
        seen = past_key_values.get_seq_length()
        if attention_mask is None:
            attention_mask = torch.ones((num_rows, seen + length), dtype=torch.long)
        if position_ids is None:
            position_ids = torch.arange(seen, seen + length).expand(num_rows, -1)
        given = {"attention_mask": attention_mask, "position_ids": position_ids}
        # a model that takes no positions, such as GPT-2's relatives, has no such input
        given = {name: value for name, value in given.items() if name in self.names}
        return self.exported(input_ids=input_ids, past_key_values=past_key_values, **given)
