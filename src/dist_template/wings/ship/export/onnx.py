"""ONNX: one graph by transformers' own exporter, with a key-value cache, and its runner.

Batch and length are dynamic; a prompt is run with a cache of length 0. Padding is on the left.
"""

from __future__ import annotations

import logging
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ....errors import InputError, reason

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel

PACKAGES = ("onnx", "onnxscript", "onnxruntime")  # of the extra
MANIFEST = "export.json"  # transformers' name


def write_onnx(model: PreTrainedModel, dtype: str, folder: Path) -> None:
    """Writes model.onnx and its weights into `folder`; int8: linear layers' weights in 8 bits.

    Raises:
        InputError: transformers' exporter cannot export this model.
    """
    from transformers import GenerationConfig, exporters
    from transformers.exporters.utils import decompose_for_generation

    quantizer = exporters.OnnxRuntimeQuantizer(exporters.OnnxRuntimeDynamicConfig())
    config = exporters.OnnxConfig(dynamic=True, quantizer=quantizer if dtype == "int8" else None)
    tokens = torch.arange(12).repeat(2, 1)
    mask = (tokens >= torch.tensor([[3], [0]])).long()  # without padding the graph gets no mask
    steps = GenerationConfig(max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0)
    logging.disable(logging.WARNING)  # dozens of lines about operators of other models
    try:
        model = model.half() if dtype == "float16" else model
        with redirect_stdout(StringIO()):
            given = {"input_ids": tokens, "attention_mask": mask}
            stages: Any = decompose_for_generation(model, given, steps, multi_token_decode=True)
            exporters.OnnxExporter().export(*stages["decode"], config).save_pretrained(folder)
        model.generation_config.save_pretrained(folder)
    except Exception as error:  # of torch.export, onnxscript and onnxruntime
        if isinstance(error, OSError):  # a full disk: numpy's error has no number
            raise
        name = type(model).__name__
        raise InputError(f"--to onnx cannot export {name}: {reason(error)}; give hf") from error
    finally:
        logging.disable(logging.NOTSET)


class OnnxModel:
    """An exported graph in onnxruntime on the CPU, called like a model of transformers."""

    def __init__(self, folder: Path) -> None:
        from transformers.exporters import ExportedModel

        self.exported: Any = ExportedModel.from_pretrained(folder, device="cpu")
        self.config, self.dtype, self.training = self.exported.config, self.exported.dtype, False
        inputs = self.exported.runners["model"].session.get_inputs()
        self.cache = [one.shape for one in inputs if ".past_key_values." in one.name]

    def __call__(
        self, input_ids: Tensor, past_key_values: Cache | None = None,
        attention_mask: Tensor | None = None, position_ids: Tensor | None = None, **_: object,
    ) -> Any:  # fmt: skip
        from transformers import DynamicCache

        num_rows, length = input_ids.shape
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
        return self.exported(
            input_ids=input_ids, past_key_values=past_key_values, attention_mask=attention_mask,
            position_ids=position_ids,
        )  # fmt: skip
