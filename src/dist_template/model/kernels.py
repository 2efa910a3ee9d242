"""Which kernels a transformers model ends in: attention over packed documents, and products of experts.

transformers 5.23 chooses well and asks late: whether rows hold several documents it reads off the device, once a
forward (FlashAttention: once a layer, and only for a single row: in a batch of several rows documents would see each
other). Here it is told by the data, which know on the host.

    attention            several documents in a row, kept apart     one document a row, or cross_document_attention
    sdpa (null)          a (B, 1, T, T) mask: efficient, cuDNN      causal, no mask: flash, cuDNN
    flex_attention       block-sparse, compiled                     the same
    flash_attention_2    varlen                                     flash
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..compat import transformers as compat
from ..errors import InputError

# (documents + 1,) int32: where each begins among the B*T tokens, and B*T; (0,) where they may see each other.
BOUNDS = "cu_seq_lens"

Attention = Literal["sdpa", "flex_attention", "flash_attention_2", "flash_attention_3", "eager"]


def set_attention(config: Any, attention: Attention | None) -> Any:
    """`config`, of transformers, with that kernel; None leaves it to the model.

    Raises:
        InputError: it is not installed, or needs a GPU.
    """
    from transformers import utils

    available = getattr(utils, f"is_{attention}_available".replace("flash_attention", "flash_attn"), None)
    if available and not available():
        raise InputError(f"model.attention {attention} needs its package and an NVIDIA GPU: set sdpa or flex_attention")
    if attention:
        compat.set_attention(config, attention)
    return config


@contextmanager
def known_documents(model: nn.Module, batch: dict[str, Any], compiled: bool = False) -> Generator[dict[str, Any]]:
    """Inside, transformers need not look for documents; yields further keyword arguments of the model's `forward`.

    Args:
        model: Of transformers.
        batch: With `BOUNDS`; without, transformers looks itself.
        compiled: Its blocks are: then a batch in which every row happens to be one document gets a mask all the same,
            so that no second version of them is compiled in the middle of training.

    Raises:
        InputError: the batch does not say where documents begin, and the kernel would let them see each other.
    """
    bounds, (num_rows, seq_len) = batch.get(BOUNDS), batch["input_ids"].shape
    is_flash = "flash" in (compat.attention_of(model) or "")
    if bounds is None:
        if is_flash and num_rows > 1:
            raise InputError(f"flash attention needs {BOUNDS} in a batch of yours, as text/rows.py has it; see data.py")
        yield {}
        return
    apart = len(bounds) > (0 if compiled else num_rows + 1)  # a shape: known on the host
    with compat.finding_documents(_documents if apart else _none):
        varlen = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": seq_len, "max_length_k": seq_len}
        yield varlen if is_flash and apart else {}


def _documents(position_ids: Tensor) -> Tensor:
    """(B, T) the number of each token's document in its row: transformers' own function, but for its look."""
    steps = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1)
    return (steps != 1).cumsum(-1)


def _none(position_ids: Tensor) -> None:
    """What it answers for one document a row."""


@cache
def cast_experts() -> None:
    """Let autocast reach the experts' grouped products, as it reaches every other product.

    torch's autocast does not know `grouped_mm` (pytorch#174763), and transformers follows the weights: under bf16-mixed
    experts would multiply in float32, for which a GPU has no grouped kernel, and wait for the device in each layer.
    """

    def casting(grouped_mm: Any) -> Any:
        def cast_and_multiply(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
            device = weight.device.type
            if torch.is_autocast_enabled(device):
                weight = weight.to(torch.get_autocast_dtype(device))
            return grouped_mm(input, weight, offs)

        return cast_and_multiply

    compat.wrap_grouped_mm(casting)
