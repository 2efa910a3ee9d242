"""What held a rank's memory when it ran out, and what would free some: each remedy with the bytes it saves this run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ...records import GIB
from .finding import Cause, Change
from .memory import Cut, Training

SPARE = 0.05  # of the device, to be left free: allocators and collectives need room that nobody counts
UNDERCOUNTED = 1.6  # what a DeepSeek-V3 kept for backward over what was counted; a Llama 1.1 (test_diagnosis_memory.py)
WORTH = 0.01  # of what is held; what saves less is not proposed
QLORA_BYTES = 4.127 / 8  # of a parameter in NF4 with double quantization, arXiv:2305.14314 section 3
LOSS_CHUNK = 4096  # module.py's default
OF_TOKENS = ("activations", "logits")  # parts that grow with the micro-batch
STRATEGY = "trainer.strategy.init_args"


@dataclass(frozen=True)
class Held:
    """A rank's memory in bytes, by part.

    Args:
        training: What it is of.
        parts: The largest first. They add up to `total`.
        needed: By a whole step, which may have been interrupted: measured or counted, whichever is more.
        limit: Of the device, or of the process. 0: not known.
        is_measured: As a whole; else all of it is counted.
        is_partial: No step had been done, so that what is needed is partly counted.
    """

    training: Training
    parts: dict[str, float]
    needed: dict[str, float]
    limit: float = 0.0
    is_measured: bool = False
    is_partial: bool = False

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def missing(self) -> float:
        """What has to go for a step to fit; 0 where that is not known."""
        return max(0.0, sum(self.needed.values()) - (1 - SPARE) * self.limit) if self.limit else 0.0

    def saves(self, **changes: Any) -> float:
        """Bytes that the same training with other fields would need less."""
        now, then = self.training.needs(), replace(self.training, **changes).needs()
        saved = 0.0
        for part in now | then:
            before, after = now.get(part, 0.0), then.get(part, 0.0)
            if part in OF_TOKENS and before:  # the count says by what share, the measurement of what
                saved += self.needed[part] * (1 - after / before)
            else:
                saved += before - after
        return saved


def held(training: Training, memory: dict[str, Any] | None = None, phase: str = "", is_first: bool = False) -> Held:
    """Where the memory of a rank is.

    Args:
        training: Of which.
        memory: What the rank noted when it crashed (callbacks/crash.py). None: all is counted.
        phase: In which that was.
        is_first: Whether no optimizer step had been done: AdamW's state is made in the first.
    """
    counted, memory = training.needs(), memory or {}
    used, limit, asked = (GIB * (memory.get(f"{key}_gib") or 0.0) for key in ("used", "total", "asked"))
    if not used:
        return Held(training, _sorted(counted), counted, limit)
    parts = training.state()
    if is_first and training.cut.kind != "zero":  # DeepSpeed makes it at start
        parts["optimizer state"] = 0.0
        if phase == "forward":
            parts["gradients"] = 0.0
    parts["outside of torch"] = GIB * (memory.get("outside_gib") or 0.0)
    parts["unused pieces"] = GIB * (memory.get("pieces_gib") or 0.0)
    left = max(0.0, used - sum(parts.values()))
    of_tokens = max(sum(counted[part] for part in OF_TOKENS), 1.0)
    parts |= {part: left * counted[part] / of_tokens for part in OF_TOKENS}
    step = max(left + asked, UNDERCOUNTED * of_tokens if is_first else 0.0)
    needed = parts | training.state() | {part: step * counted[part] / of_tokens for part in OF_TOKENS}
    return Held(training, _sorted(parts), needed, limit, is_measured=True, is_partial=is_first)


def _sorted(parts: dict[str, float]) -> dict[str, float]:
    return dict(sorted(((k, v) for k, v in parts.items() if v > 0), key=lambda part: -part[1]))


# ---- remedies, the cheapest first ------------------------------------------------------------------------------------


def remedies(memory: Held, accumulation: int, has_bf16: bool) -> list[Cause]:
    """What can be changed here, the least costly first; nothing that is so already, or that limits/ would refuse.

    Args:
        memory: What holds it.
        accumulation: Micro-batches per optimizer step.
        has_bf16: Whether the device multiplies in bfloat16.
    """
    found = [
        *_fewer_logits(memory),
        *_smaller_micro_batch(memory, accumulation),
        *_reduce_at_once(memory),
        *_shard_more(memory),
        *_half_precision(memory, has_bf16),
        *_checkpoint_activations(memory),
        *_offload(memory),
        *_shorter(memory),
    ]
    worth = [cause for cause in found if (cause.changes[0].saves_gib or 0.0) * GIB > WORTH * memory.total]
    return [*worth, *_without_a_key(memory)]


def _cause(memory: Held, sentence: str, key: str, now: Any, to: Any, saved: float) -> Cause:
    enough = "enough, as far as can be counted" if memory.is_partial else "enough by itself"
    note = enough if memory.missing and saved >= memory.missing else ""
    return Cause(sentence, [Change(key, now, to, saves_gib=saved / GIB, note=note)])


def _fewer_logits(memory: Held) -> Iterator[Cause]:
    """head.py: at equal speed."""
    now = memory.training.loss_chunk
    if not now or now > LOSS_CHUNK:
        saved = memory.saves(loss_chunk=LOSS_CHUNK)
        sentence = "Logits of some tokens at a time: the loss curve stays, and the speed."
        yield _cause(memory, sentence, "model.loss_chunk", now, LOSS_CHUNK, saved)


def _smaller_micro_batch(memory: Held, accumulation: int) -> Iterator[Cause]:
    """The largest divisor of the micro-batch that fits: the global batch stays a multiple of it."""
    now = memory.training.micro_batch_size
    smaller = [size for size in range(now - 1, 0, -1) if now % size == 0]
    if not smaller:
        return
    saved = {size: memory.saves(micro_batch_size=size) for size in smaller}
    fits = [size for size in smaller if saved[size] >= memory.missing > 0]
    to = fits[0] if fits else smaller[0 if not memory.missing else -1]
    yield _cause(
        memory,
        f"Smaller micro-batches, {now // to * accumulation} accumulated in place of {accumulation}: the global batch"
        " and the loss curve stay, a step takes somewhat longer.",
        "data.micro_batch_size",
        now,
        to,
        saved[to],
    )


def _reduce_at_once(memory: Held) -> Iterator[Cause]:
    cut = memory.training.cut
    if cut.waits:
        sentence = "Gradients reduced in every micro-batch and kept as shards: more is sent, the loss curve stays."
        saved = memory.saves(cut=replace(cut, waits=False))
        yield _cause(memory, sentence, f"{STRATEGY}.reduce_each_micro_batch", False, True, saved)


def _shard_more(memory: Held) -> Iterator[Cause]:
    """The next stage of sharding, where there are ranks to shard over."""
    training, cut = memory.training, memory.training.cut
    if cut.ranks == 1 or (cut.kind == "mesh" and cut.shards > cut.tp):
        return
    if cut.kind == "zero" and cut.stage < 3:
        other, key, now, to = replace(cut, stage=cut.stage + 1), f"{STRATEGY}.stage", cut.stage, cut.stage + 1
        costs = "the same bytes are sent" if cut.stage == 1 else "weights are gathered in every forward and backward"
        name = f"ZeRO stage {to}"
    elif cut.kind == "whole":
        if training.precision == "16-mixed":  # which a mesh does not have
            other, file, name = Cut("zero", cut.ranks, stage=2, bucket=200_000_000), "zero2.yaml", "ZeRO stage 2"
            costs = "optimizer state and gradients are sharded"
        else:
            other, file, name = Cut("mesh", cut.ranks, shards=cut.ranks), "fsdp2.yaml", "FSDP2"
            costs = "each rank keeps a part, and gathers a block when it runs"
        key, now, to = "config", "ddp", f"configs/strategy/{file}"
    else:
        return
    yield _cause(memory, f"{name}: {costs}.", key, now, to, memory.saves(cut=other))


def _half_precision(memory: Held, has_bf16: bool) -> Iterator[Cause]:
    if has_bf16 and not memory.training.half:
        saved = memory.saves(precision="bf16-mixed")
        yield _cause(
            memory,
            "Matrix products in bfloat16: faster on a GPU; docs/strategies/numerics.md says what changes.",
            "trainer.precision",
            memory.training.precision,
            "bf16-mixed",
            saved,
        )


def _checkpoint_activations(memory: Held) -> Iterator[Cause]:
    """`full` goes with every strategy; `selective` does not."""
    training = memory.training
    sentence = "Activation checkpointing: blocks are computed again in backward, about a third more compute, same loss."
    saved = memory.saves(checkpointing="full", checkpoint_every=1)
    if training.checkpointing != "full":
        key, now, to = "model.blocks.checkpointing", training.checkpointing, "full"
    else:
        key, now, to = "model.blocks.checkpoint_every", training.checkpoint_every, 1
    if training.layers > 1 and now != to:
        yield _cause(memory, sentence, key, now, to, saved)


def _offload(memory: Held) -> Iterator[Cause]:
    """State in host memory; not on a CPU, where it is already."""
    cut = memory.training.cut
    if memory.training.on_host:
        return
    slow = "the optimizer runs on the CPU, and steps take longer."
    if cut.kind == "mesh" and not cut.offload_parameters and cut.shards > cut.tp:
        other = replace(cut, offload_optimizer=True, offload_parameters=True)
        sentence = f"Parameters, gradients and optimizer state in host memory: {slow}"
        yield _cause(memory, sentence, f"{STRATEGY}.cpu_offload", False, True, memory.saves(cut=other))
    elif cut.kind == "zero" and not cut.offload_optimizer:
        other = replace(cut, offload_optimizer=True)
        sentence = f"Optimizer state in host memory: {slow}"
        yield _cause(memory, sentence, f"{STRATEGY}.offload_optimizer", False, True, memory.saves(cut=other))
    elif cut.kind == "zero" and cut.stage == 3 and not cut.offload_parameters:
        other = replace(cut, offload_parameters=True)
        sentence = "Parameters in host memory too: each is fetched when its module runs."
        yield _cause(memory, sentence, f"{STRATEGY}.offload_parameters", False, True, memory.saves(cut=other))
    elif cut.kind == "whole":
        other = Cut("zero", cut.ranks, stage=2, bucket=200_000_000, offload_optimizer=True)
        sentence = f"ZeRO stage 2 with optimizer state in host memory: {slow}"
        cause = _cause(memory, sentence, "config", "ddp", "configs/strategy/zero2.yaml", memory.saves(cut=other))
        yield replace(cause, changes=[*cause.changes, Change(f"{STRATEGY}.offload_optimizer", None, True)])


def _shorter(memory: Held) -> Iterator[Cause]:
    now = memory.training.seq_len
    if now >= 128:
        sentence = "Shorter sequences: another training, which sees less context and half the tokens a step."
        yield _cause(memory, sentence, "data.seq_len", now, now // 2, memory.saves(seq_len=now // 2))


def _without_a_key(memory: Held) -> Iterator[Cause]:
    """What helps and is no key of this project."""
    training = memory.training
    if (pieces := memory.parts.get("unused pieces", 0.0)) > SPARE * memory.total:
        yield Cause(
            f"{pieces / GIB:.1f} GiB lie unused between tensors of changing sizes: set"
            " PYTORCH_ALLOC_CONF=expandable_segments:True in the environment."
        )
    state = sum(training.state().get(part, 0.0) for part in ("weights", "gradients", "optimizer state"))
    saved = state - training.parameters * QLORA_BYTES
    if not training.on_host and saved > SPARE * memory.total and training.cut.kind == "whole":
        yield Cause(
            f"Fine-tuning of adapters on 4-bit weights (QLoRA) would save about {saved / GIB:.1f} GiB of weights,"
            " gradients and optimizer state; this project has no key for it, build_model in module.py is its place."
        )
