"""Selects kernels of a transformers model: attention over packed documents, and products of
experts.

transformers 5.23 reads from the device in each forward pass whether rows hold several documents
(FlashAttention: in each layer, and only for a single row: in a batch of several rows documents
would attend to each other). Here the data module passes it, which knows it on the host.

    attention            several separate documents in a row    one document per row, or
                                                                cross_document_attention
    sdpa (null)          a (B, 1, T, T) mask: efficient, cuDNN  causal, no mask: flash, cuDNN
    flex_attention       block-sparse, compiled                 the same
    flash_attention_2    varlen                                 flash
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..compat import transformers as compat
from ..errors import InputError
from ..parallel.axes import SequenceAxis
from ..parallel.sequence import IS_SHARD, WHOLE, masks_of_all

# (documents + 1,) int32: start of each document among the B*T tokens, and B*T; (0,) for
# cross-document attention.
BOUNDS = "cu_seq_lens"

Attention = Literal["sdpa", "flex_attention", "flash_attention_2", "flash_attention_3", "eager"]


def set_attention(config: Any, attention: Attention | None) -> Any:
    """Returns the transformers configuration `config` with that kernel; None: the model's default.

    Raises:
        InputError: the kernel is not installed, or needs a GPU.
    """
    from transformers import utils

    name = f"is_{attention}_available".replace("flash_attention", "flash_attn")
    available = getattr(utils, name, None)
    if available and not available():
        raise InputError(
            f"model.attention {attention} needs its package and an NVIDIA GPU: set sdpa or"
            " flex_attention"
        )
    if attention:
        compat.set_attention(config, attention)
    return config


@contextmanager
def known_documents(
    model: nn.Module, batch: dict[str, Any], compiled: bool = False
) -> Generator[dict[str, Any]]:
    """Inside, transformers does not search for documents; yields keyword arguments for the model's
    `forward`.

    Args:
        model: A model of transformers.
        batch: A batch with `BOUNDS`; without them, transformers searches itself.
        compiled: Whether its blocks are compiled. A batch in which every row is one document then
            gets a mask too, so that no second version is compiled during training.

    Raises:
        InputError: the batch has no `BOUNDS`, and with this kernel, or in a shard of sequences,
            documents would attend to each other.
    """
    bounds, whole = batch.get(BOUNDS), batch.get(WHOLE)
    num_rows, seq_len = batch.get(WHOLE, batch["input_ids"]).shape
    is_flash = "flash" in (compat.attention_of(model) or "")
    if bounds is None:
        if whole is not None or (is_flash and num_rows > 1):
            raise InputError(
                f"flash attention and {SequenceAxis.key} above 1 need {BOUNDS} in a batch of"
                " yours, as text/batches/rows.py has it; see data.py"
            )
        given = batch.get("position_ids")
        rows = None if given is None else given.expand(num_rows, -1)
        with nullcontext() if rows is None else masks_of_all(model, rows, _found, False):
            yield {}
        return
    apart = len(bounds) > (0 if compiled else num_rows + 1)  # a shape: known on the host
    find, shard = _documents if apart else None, {} if whole is None else {IS_SHARD: True}
    positions = batch["position_ids"] if whole is None else whole
    with masks_of_all(model, positions, find, whole is not None):
        varlen = {f"cu_seq_lens_{one}": bounds for one in "qk"}
        varlen |= {f"max_length_{one}": seq_len for one in "qk"}
        yield shard | (varlen if is_flash and apart else {})


def _documents(position_ids: Tensor) -> Tensor:
    """Returns (B, T): document numbers in each row, as transformers does, without a device sync."""
    steps = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1)
    return (steps != 1).cumsum(-1)


def _found(position_ids: Tensor) -> Tensor | None:
    """Searches as transformers does, with a read from the device."""
    from transformers import masking_utils

    return masking_utils.find_packed_sequence_indices(position_ids)


@cache
def cast_experts() -> None:
    """Applies autocast to the experts' grouped products, as to every other product.

    torch's autocast does not support `grouped_mm` (pytorch#174763), and transformers uses the
    weights' type: under bf16-mixed experts would multiply in float32, for which a GPU has no
    grouped kernel, and wait for the device.
    """

    def casting(grouped_mm: Any) -> Any:
        def cast_and_multiply(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
            device = weight.device.type
            if torch.is_autocast_enabled(device):
                weight = weight.to(torch.get_autocast_dtype(device))
            return grouped_mm(input, weight, offs)

        return cast_and_multiply

    compat.wrap_grouped_mm(casting)
