"""Selects kernels of a transformers model: attention over packed documents.

transformers 5.23 reads from the device in each forward pass whether rows hold several documents
(FlashAttention: in each layer, and only for a single row: in a batch of several rows documents
would attend to each other). Here the data module, which knows it on the host, passes it.

    attention            several separate documents in a row    one document per row, or
                                                                cross_document_attention
    sdpa (null)          a (B, 1, T, T) mask: efficient, cuDNN  causal, no mask: flash, cuDNN
    flex_attention       block-sparse, compiled                 the same
    flash_attention_2    varlen                                 flash"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from ...compat import transformers as compat
from ...errors import InputError
from ...parallel.mesh.axes import SequenceAxis
from ...parallel.mesh.sequence import IS_SHARD, UNSHARDED, masks_of_all
from .positions import positions_of_documents

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# (documents + 1,) int32: start of each document among the B*T tokens, and B*T; (0,) for
# cross-document attention.
BOUNDS = "cu_seq_lens"

Attention = Literal["sdpa", "flex_attention", "flash_attention_2", "flash_attention_3", "eager"]


def set_attention(config: PreTrainedConfig, attention: Attention | None) -> PreTrainedConfig:
    """Returns `config` with that kernel; None: the model's default. Raises InputError if the kernel
    is not installed, or needs a GPU."""
    from transformers import utils

    name = f"is_{attention}_available".replace("flash_attention", "flash_attn")
    is_available = getattr(utils, name, None)  # there is none for kernels that are part of torch
    if is_available is not None and not is_available():
        raise InputError(
            f"model.attention {attention} needs its package and an NVIDIA GPU: set sdpa or"
            " flex_attention"
        )
    if attention:
        compat.set_attention(config, attention)
    return config


@contextmanager
def known_documents(
    model: nn.Module, batch: Mapping[str, Tensor], compiled: bool = False
) -> Generator[dict[str, object]]:
    """Inside, transformers does not search for documents, and counts positions within them; yields
    keyword arguments for the model's `forward`.

    Args:
        model: A model of transformers.
        batch: A batch with `BOUNDS`; without them, transformers searches itself.
        compiled: Whether its blocks are compiled. A batch in which every row is one document then
            gets a mask too, so that no second version is compiled during training.

    Raises:
        InputError: the batch has no `BOUNDS`, and with this kernel, or in a shard of sequences,
            documents would attend to each other."""
    from transformers import masking_utils

    bounds, full = batch.get(BOUNDS), batch.get(UNSHARDED)
    num_rows, seq_len = batch.get(UNSHARDED, batch["input_ids"]).shape
    is_flash = "flash" in (compat.attention_of(model) or "")
    if bounds is None:
        if full is not None or (is_flash and num_rows > 1):
            raise InputError(
                f'flash attention and {SequenceAxis.key} > 1 need batch["{BOUNDS}"] (document'
                " offsets): add it in the transform of data.py"
            )
        positions = batch.get("position_ids")
        if positions is None:
            yield {}
            return
        search, rows = masking_utils.find_packed_sequence_indices, positions.expand(num_rows, -1)
        with (
            masks_of_all(model, rows, search, False),  # reads from the device
            positions_of_documents(model, rows),
        ):
            yield {}
        return
    # a shape, which is known on the host: with one document a row there are num_rows + 1
    is_packed = len(bounds) > (0 if compiled else num_rows + 1)
    positions = batch["position_ids"]
    arguments: dict[str, object] = {}
    if full is not None:
        positions = full
        arguments[IS_SHARD] = True
    if is_flash and is_packed:
        arguments |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
        arguments |= {"max_length_q": seq_len, "max_length_k": seq_len}
    search = _documents if is_packed else None
    with (
        masks_of_all(model, positions, search, full is not None),
        positions_of_documents(model, batch["position_ids"]),
    ):
        yield arguments


def _documents(position_ids: Tensor) -> Tensor:
    """Returns (B, T): document numbers in each row, as transformers does, without a device sync."""
    steps = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1)
    return (steps != 1).cumsum(-1)
