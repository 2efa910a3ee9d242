"""Sequence parallelism: the ranks of a group share each sequence (DeepSpeed-Ulysses,
arXiv:2309.14509).

Each of n ranks has T / n consecutive tokens of every sequence of a micro-batch. Only attention
combines tokens: an all-to-all before it gives each rank all tokens of H / n heads, and one after it
all heads of the rank's tokens. The kernel in between is the configured one, with the masks of one
process.

Shapes: B sequences, T tokens of a sequence, H heads, W width of a head."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...compat import replaced
from ...compat import transformers as compat
from ...errors import InputError
from ..configured import ARGS

UNSHARDED = "unsharded_position_ids"  # key of a sharded batch: (B, T) the positions of all tokens
IS_SHARD = "is_sequence_shard"  # keyword argument of a model's forward pass, for its attention


def shard_batch(batch: Any, group: dist.ProcessGroup) -> Any:
    """Returns the rank's T / n tokens of each tensor (B, T, …) of a batch that has labels. Other
    batches, such as a prompt, are returned unchanged. Raises InputError if n does not divide T."""
    if not isinstance(batch, dict) or not {"input_ids", "position_ids", "labels"} <= batch.keys():
        return batch
    shape, num = batch["input_ids"].shape, group.size()
    if shape[1] % num:
        raise InputError(
            f"{shape[1]} tokens cannot be shared by {ARGS}.cp_size {num}: edit data.seq_len"
        )
    sharded = batch | {UNSHARDED: batch["position_ids"], "unsharded_input_ids": batch["input_ids"]}
    for name, value in batch.items():
        if isinstance(value, Tensor) and value.shape[:2] == shape:
            sharded[name] = value.chunk(num, dim=1)[group.rank()].contiguous()
    if "tokens_per_micro_batch" in batch:  # a mean over ranks, each of which has 1 / n of its rows
        sharded["tokens_per_micro_batch"] = batch["tokens_per_micro_batch"] / num
    return sharded


def share_attention(model: nn.Module, num: int, group: dist.ProcessGroup) -> None:
    """Makes the model's attention kernel combine the tokens of the `num` ranks of `group`.

    The kernel is replaced in transformers' registry for the process; a forward pass without
    `IS_SHARD`, such as that of `generate`, still runs the kernel alone.

    Raises ValueError if more than attention combines the model's tokens."""
    if why := compat.reason_against_sequence_shards(model):
        raise ValueError(f"{why}: set {ARGS}.cp_size to 1")
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

    kernel = compat.attention_of(model) or ""
    attend = ALL_ATTENTION_FUNCTIONS[kernel]

    def attend_to_all(
        module: nn.Module,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        *mask: object,
        **options: Any,
    ) -> tuple[object, ...]:
        """Maps (B, H, T / n, W) queries, keys and values to (B, T / n, H, W)."""
        if not options.pop(IS_SHARD, False):
            if torch.is_grad_enabled():
                needs = (
                    "batches with input_ids, position_ids and labels, and `known_documents`"
                    " around the model"
                )
                raise InputError(
                    f"{ARGS}.cp_size above 1 needs {needs}, as in module.py: set it to 1"
                )
            return attend(module, queries, keys, values, *mask, **options)
        options.pop("position_ids", None)  # of the shard, for which flash attention would read them
        heads = queries.shape[1]
        if heads % num:
            raise InputError(
                f"{heads} attention heads cannot be shared by {ARGS}.cp_size {num}: edit one of"
                " them"
            )
        copies = num // gcd(num, keys.shape[1])  # where there are fewer heads of keys than ranks
        groups = {"num_key_value_groups": heads // keys.shape[1] // copies} if copies > 1 else {}
        keys, values = (each.repeat_interleave(copies, dim=1) for each in (keys, values))
        of_all = (_AllToAll.apply(each, group, num, 1, 2) for each in (queries, keys, values))
        with replaced(module, **groups):
            attended, *others = attend(module, *of_all, *mask, **options)
        return _AllToAll.apply(attended, group, num, 1, 2), *others

    AttentionInterface.register(kernel, attend_to_all)


class _AllToAll(torch.autograd.Function):
    """Shards dimension `split` over the ranks, and gathers dimension `join`."""

    @staticmethod
    def forward(
        ctx: Any, local: Tensor, group: dist.ProcessGroup, num: int, split: int, join: int
    ) -> Tensor:
        ctx.reverse = group, num, join, split
        parts = torch.stack(local.chunk(num, dim=split))
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return torch.cat(received.unbind(), dim=join)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _AllToAll.apply(*gradients, *ctx.reverse), None, None, None, None


@contextmanager
def masks_of_all(
    model: nn.Module,
    positions: Tensor,
    find: Callable[[Tensor], Tensor | None] | None,
    is_shard: bool = True,
) -> Generator[None]:
    """Inside, transformers makes attention masks of all tokens, not of the rank's, from their
    `positions` (B, T), which `find` maps to the numbers of their documents.

    transformers' own search needs positions that several models (GPT-OSS, AFMoE, Falcon, OPT and
    BLOOM in 5.23) do not pass on when they make masks: their documents would see each other."""
    from transformers import masking_utils

    masks, kernel = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS, compat.attention_of(model) or ""
    if kernel not in masks:  # a model without attention
        yield
        return
    documents = find(positions) if find else None  # one in each row
    make_mask, num_tokens = masks[kernel], positions.shape[1]

    def make(mask_function: Callable[..., Tensor], **options: object) -> object:
        if is_shard:
            options |= {"q_length": num_tokens, "kv_length": num_tokens}
        if documents is not None and options["kv_length"] == num_tokens:
            separated = masking_utils.packed_sequence_compatibility_function
            mask_function = separated(mask_function, positions, documents)
            options["allow_is_causal_skip"] = False
        return make_mask(mask_function=mask_function, **options)

    masks[kernel] = make  # in this object alone, not in what is registered
    try:
        with compat.without_search():
            yield
    finally:
        del masks[kernel]
