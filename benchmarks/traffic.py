"""What a strategy sends in an optimizer step, from the model's shapes and the number of ranks alone.

In rings: of a tensor of S bytes over n ranks, each rank sends S (n-1)/n in n-1 messages when it is gathered or
scattered, and both twice when it is all-reduced; an all-to-all sends as much as a gather. NCCL may take trees, which
send as many bytes in fewer messages.

Left out is what does not grow with the model: the count of tokens, the gradient norm, votes, metrics at log steps; and
a model's buffers. Every parameter is taken to be trained. `tests/template/test_traffic.py` sets these numbers against
the collectives that two and four processes really do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Any, Literal, NamedTuple

from torch import nn

from dist_template.model.flops import find_experts, text_config
from dist_template.parallel.blocks import find_blocks

MIB = 2**20


@dataclass(frozen=True)
class Setting:
    """Where a model trains, and how.

    Args:
        ranks: Processes.
        tokens: Of a micro-batch on one rank.
        accumulation: Micro-batches per optimizer step.
        node: Ranks that hold one copy under HSDP, and share matrices, experts or sequences under tp, ep and cp.
        stages: Of a pipeline, one per rank.
        half: Precision bf16-mixed in place of 32-true.
        reduces_each: FSDP2's `reduce_each_micro_batch`.
        ddp_bucket_mib: Of DDP's gradients; its first bucket is smaller, to begin early (torch 2.13).
        zero_bucket: Elements that ZeRO reduces, or gathers after a step, at once.
        zero_whole: Elements below which ZeRO-3 leaves a parameter whole.
        zero_kept: Elements of a model below which ZeRO-3 keeps what forward has gathered for backward: its
            `stage3_max_live_parameters` and `stage3_max_reuse_distance`.
    """

    ranks: int
    tokens: int
    accumulation: int = 1
    node: int = 8
    stages: int = 2
    half: bool = True
    reduces_each: bool = True
    ddp_bucket_mib: int = 25
    zero_bucket: int = 200_000_000
    zero_whole: int = 100_000
    zero_kept: int = 1_000_000_000


class Collective(NamedTuple):
    """One kind of call of one rank.

    Args:
        kind: As torch names it.
        elements: Of the whole tensor: after it is gathered, before it is scattered or dealt out.
        size: Bytes of an element.
        ranks: That take part.
        times: Calls in an optimizer step; the mean over ranks, which differ in a pipeline.
    """

    kind: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
    elements: int
    size: int
    ranks: int
    times: float

    @property
    def sent(self) -> float:
        """Bytes that a rank sends in an optimizer step."""
        share = 1 if self.kind == "send" else (self.ranks - 1) / self.ranks
        return self._ways * self.elements * self.size * share * self.times

    @property
    def messages(self) -> float:
        """That a rank sends in an optimizer step."""
        return self._ways * (self.ranks - 1) * self.times

    @property
    def _ways(self) -> int:
        return 2 if self.kind == "all_reduce" else 1


Traffic = Iterator[Collective]


def ddp(model: Any, at: Setting) -> Traffic:
    """Gradients in fp32 once a step, in buckets that backward fills from the last parameter on."""
    filled, limit = 0, MIB
    for parameter in reversed(list(model.parameters())):
        filled += parameter.numel()
        if 4 * filled >= limit:
            yield Collective("all_reduce", filled, 4, at.ranks, 1)
            filled, limit = 0, at.ddp_bucket_mib * MIB
    if filled:
        yield Collective("all_reduce", filled, 4, at.ranks, 1)


def fsdp2(model: Any, at: Setting, copies: int = 1, tp: int = 1, ep: int = 1, gathers: int = 2) -> Traffic:
    """Units gathered in forward and, unless they are kept, again in backward; gradients scattered in each or the last.

    Copies add up their shards once per optimizer step. Parameters are padded to a multiple of the ranks along their
    first dimension. Under `ep` the experts are units of their own, which lie over fewer ranks.
    """
    wide, shards = 2 if at.half else 4, at.ranks // copies // tp
    experts = {id(p) for module in find_experts(model) for p in module.parameters(recurse=False)} if ep > 1 else set()
    for unit, kept in _units(model):
        for inside in (False, True):
            over, cut = (shards * tp // ep, ep) if inside else (shards, tp)
            mine = [(name, p) for name, p in unit.items() if (id(p) in experts) == inside]
            elements = sum(_padded(p, cut if inside else _cut(model, name, tp), over) for name, p in mine)
            if elements and over > 1:
                yield Collective("all_gather", elements, wide, over, at.accumulation * (1 if kept else gathers))
                yield Collective("reduce_scatter", elements, 4, over, at.accumulation if at.reduces_each else 1)
            if elements and copies > 1:
                yield Collective("all_reduce", elements // over, 4, copies, 1)  # waits for the last micro-batch


def hsdp(model: Any, at: Setting) -> Traffic:
    """FSDP2 within a node."""
    return fsdp2(model, at, copies=max(1, at.ranks // at.node))


def tensor_parallel(model: Any, at: Setting, size: int = 0) -> Traffic:
    """Activations, by the model's plan: an output summed in forward, or the gradient of an input in backward."""
    size, wide = size or min(at.ranks, at.node), 2 if at.half else 4
    for name, module in model.named_modules():
        style = _style(model.tp_plan, name)
        width = {"rowwise": "out_features", "embedding_rowwise": "embedding_dim"}.get(style, "in_features")
        if style and hasattr(module, width):
            yield Collective("all_reduce", at.tokens * getattr(module, width), wide, size, at.accumulation)
        if style == "colwise_gather_output":
            yield Collective("all_gather", at.tokens * module.out_features, wide, size, at.accumulation)


def fsdp2_tp(model: Any, at: Setting) -> Traffic:
    """FSDP2 between groups of a node's ranks; these share each matrix."""
    size = min(at.ranks, at.node)
    yield from tensor_parallel(model, at, size)
    yield from fsdp2(model, at, tp=size)


def fsdp2_ep(model: Any, at: Setting, tp: int = 1) -> Traffic:
    """FSDP2, and each token sent to the ranks that hold its experts and back, in forward and in backward.

    Of `tp` ranks, which have the same tokens, each sends a part; what comes back is gathered, and in backward the
    gradients of hidden states and routing weights (transformers' `AllToAllEP`).
    """
    size = min(at.ranks, at.node)
    yield from fsdp2(model, at, tp=tp, ep=size)
    yield from _routed(model, at, size, tp)


def _routed(model: Any, at: Setting, size: int, tp: int = 1) -> Traffic:
    experts, wide = find_experts(model), 2 if at.half else 4
    if experts:
        config, times = text_config(model), len(experts) * at.accumulation
        routed, hidden = at.tokens * config.num_experts_per_tok, config.hidden_size
        yield Collective("all_to_all", routed * hidden // tp, wide, size, 4 * times)
        if tp > 1:
            yield Collective("all_gather", at.tokens * hidden, wide, tp, 2 * times)
            yield Collective("all_gather", routed, wide, tp, times)


def cp(model: Any, at: Setting) -> Traffic:
    """FSDP2, and in each block an all-to-all of queries, keys, values and output, in forward and in backward."""
    yield from fsdp2(model, at)
    config, size, wide = text_config(model), min(at.ranks, at.node), 2 if at.half else 4
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    keys = max(config.num_key_value_heads, size)  # fewer are repeated
    times = 2 * config.num_hidden_layers * at.accumulation
    for number in (heads, keys):  # queries and output, keys and values
        yield Collective("all_to_all", at.tokens * number * width, wide, size, 2 * times)


def pp(model: Any, at: Setting, shards: bool = False, ep: bool = False) -> Traffic:
    """Hidden states to the next stage and their gradients back, for every micro-batch.

    Inside, ranks are replicas, or with `shards` gather weights and reduce gradients once per optimizer step. The first
    and the last stage add up the gradients of tied weights.
    """
    stages, wide, inside = at.stages, 2 if at.half else 4, at.ranks // at.stages
    fsdp, size = inside if shards else 1, min(inside, at.node) if ep else 1
    hidden, table = at.tokens * text_config(model).hidden_size, model.get_input_embeddings().weight
    yield Collective("send", hidden, wide, 2, 2 * (stages - 1) / stages * at.accumulation)
    once = replace(at, ranks=inside, accumulation=1)
    of_stages = [*fsdp2(model, once, copies=inside // fsdp, ep=size, gathers=1)]
    if model.config.tie_word_embeddings:
        elements = _padded(table, 1, fsdp)
        yield Collective("all_reduce", elements // fsdp, 4, 2, 2 / stages)
        if fsdp > 1:  # the last stage's copy
            of_stages.append(Collective("all_gather", elements, wide, fsdp, 1))
            of_stages.append(Collective("reduce_scatter", elements, 4, fsdp, 1))
    for one in (*of_stages, *(_routed(model, at, size) if ep else ())):
        yield one._replace(times=one.times / stages)


def fsdp2_tp_ep(model: Any, at: Setting) -> Traffic:
    """A node's ranks share each dense matrix and deal out the experts."""
    size = min(at.ranks, at.node)
    yield from tensor_parallel(model, at, size)
    yield from fsdp2_ep(model, at, tp=size)


def zero(model: Any, at: Setting, stage: int) -> Traffic:
    """Stages 1 and 2 all-reduce gradients, once or in every micro-batch, and gather parameters after the step.

    Stage 3 is an upper bound in calls: what is fetched ahead is fetched together.
    """
    parameters, size = list(model.parameters()), 2 if at.half else 4
    cut = [p for p in parameters if stage == 3 and p.numel() >= at.zero_whole]
    again = 1 if sum(p.numel() for p in parameters) < at.zero_kept else 2
    for parameter in cut:
        yield Collective("all_gather", parameter.numel(), size, at.ranks, again * at.accumulation)
    kind, times = "reduce_scatter" if stage == 3 else "all_reduce", at.accumulation if stage > 1 else 1
    for elements in _buckets(parameters, at.zero_bucket):
        yield Collective(kind, elements, size, at.ranks, times)
    for decayed in (True, False):  # optim.py's groups, each flattened for itself
        whole = [p for p in parameters if (p.ndim > 1) == decayed and (stage < 3 or p.numel() < at.zero_whole)]
        for elements in _buckets(whole, at.zero_bucket):
            yield Collective("all_gather", elements, size, at.ranks, 1)


STRATEGIES: dict[str, Callable[[Any, Setting], Traffic]] = {  # by their files in configs/strategy/
    "ddp": ddp,
    "fsdp2": fsdp2,
    "hsdp": hsdp,
    "tp": tensor_parallel,
    "fsdp2_tp": fsdp2_tp,
    "fsdp2_ep": fsdp2_ep,
    "fsdp2_tp_ep": fsdp2_tp_ep,
    "cp": cp,
    "pp": pp,
    "pp_fsdp2": lambda model, at: pp(model, at, shards=True),
    "pp_ep": lambda model, at: pp(model, at, shards=True, ep=True),
    "zero1": lambda model, at: zero(model, at, 1),
    "zero2": lambda model, at: zero(model, at, 2),
    "zero3": lambda model, at: zero(model, at, 3),
}


def _units(model: Any) -> Iterator[tuple[dict[str, nn.Parameter], bool]]:
    """What FSDP2 gathers at once, and whether it is kept from forward to backward; the root's own is."""
    plan = getattr(model, "fsdp_plan", None) or {}
    blocks = set(map(id, find_blocks(model)))
    left, tail = dict(model.named_parameters()), {}  # each shared parameter once
    tied = len(left) < len(list(model.named_parameters(remove_duplicate=False)))
    table = model.get_input_embeddings() if plan and not tied else None
    for name, module in model.named_modules():
        style = _style(plan, name) if plan else "free_full_weight" if id(module) in blocks else ""
        if id(module) in blocks or module is table and style:
            inside = [key for key in left if key.startswith(f"{name}.")]
            yield {key: left.pop(key) for key in inside}, style == "keep_full_weight"
        elif style == "keep_full_weight":
            tail |= {key: left.pop(key) for key in list(left) if key.startswith(f"{name}.")}
    for unit in (tail, left):
        if unit:
            yield unit, True


def _style(plan: dict[str, str], name: str) -> str:
    """Of a module in one of transformers' plans, which write `*` for the number of a layer."""
    return plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name), "")


def _cut(model: Any, name: str, tp: int) -> int:
    """Over how many ranks tensor parallelism cuts a parameter."""
    return tp if tp > 1 and _style(model.tp_plan, name.rpartition(".")[0]) else 1


def _padded(parameter: nn.Parameter, cut: int, shards: int) -> int:
    """Elements that are gathered of a parameter of which `cut` ranks hold a part each."""
    rows, *rest = parameter.shape
    return ceil(ceil(rows / cut) / shards) * shards * prod(rest)


def _buckets(parameters: list[nn.Parameter], limit: int) -> Iterator[int]:
    """Elements of neighbours together, each at most `limit` or of one."""
    filled = 0
    for size in (p.numel() for p in parameters):
        if filled and filled + size > limit:
            yield filled
            filled = 0
        filled += size
    if filled:
        yield filled
