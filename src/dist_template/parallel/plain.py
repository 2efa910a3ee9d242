"""Strategies of Lightning's own, one device and DDP first; and the formulas that all strategies
share, of the memory of a rank. Sizes are bytes; docs/strategies explains them.

Weights, gradients and optimizer state follow from parameters, strategy and precision. Activations are traced
(`Facts.traced`, within 15 %), or counted as tensors (Korthikanti et al., arXiv:2205.05198, section 4.1) of blocks with
a gated MLP, norms in fp32, fused attention and no dropout, which is right within a factor of two."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import TYPE_CHECKING, Any, ClassVar

from ..errors import InputError
from .facts import ARGS, BlockRun, Configured, Facts, Saving, Sent, Small
from .pipeline.costs import StageFacts

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

LOGIT_BYTES = 12  # per logit in backward: log-probability, its gradient and the logit's, in fp32
BYTES_IN_4_BITS = 1 / 2 + 1 / 64  # packed, and a scale of 64 weights in 8 bits
ADAMW_BYTES = 8  # per parameter in fp32: two moments
SELECTIVE = 0.5  # share of a block's activations that selective checkpointing keeps
FIRST_BUCKET, BUCKET = 2**20, 25 * 2**20  # bytes of DDP's gradients (torch 2.13)
SLOWER = "the optimizer runs on the CPU, and steps take longer."
FSDP2, ZERO_2 = "configs/strategy/fsdp2.yaml", "configs/strategy/zero2.yaml"
FILES: dict[str, dict[str, Any]] = {  # what `savings` proposes in place of DDP
    FSDP2: {"class_path": "MeshStrategy"},
    ZERO_2: {"class_path": "ZeroStrategy", "init_args": {"stage": 2}},
}
REPLACED = {  # Lightning's strategies without support for CPUs or for transformers' plans
    "deepspeed": ("ZeroStrategy", "zero2.yaml (with stage: 1 for ZeRO-1) or zero3.yaml"),
    "fsdp": ("MeshStrategy", "fsdp2.yaml, hsdp.yaml, fsdp2_tp.yaml or tp.yaml"),
    "modelparallel": ("MeshStrategy", "fsdp2.yaml, hsdp.yaml, fsdp2_tp.yaml or tp.yaml"),
}


@dataclass(frozen=True)
class Plain:
    """A strategy under which each rank has the full model, and its own batches."""

    arguments: Mapping[str, Any] = field(default_factory=dict)  # trainer.strategy.init_args
    name: str = "ddp"  # Lightning's name of the strategy, or its class
    bases: tuple[str, ...] = ()  # names of that class and its base classes

    is_replicated: ClassVar[bool] = True
    creates_state_at_start: ClassVar[bool] = False  # of the optimizer; else in the first step
    precisions: ClassVar[tuple[str, ...]] = ()  # that the strategy supports; (): all

    complexity = 0  # how many kinds of sharding it combines; another engine and offload are two

    # ---- ranks -----------------------------------------------------------------------------------

    def data_parallel(self, world_size: int) -> int:
        return world_size

    def axes(self, world_size: int) -> list[str]:
        return ["ddp"] if world_size > 1 else []

    def accumulation(self, facts: Facts) -> int:
        """Returns the micro-batches of an optimizer step."""
        return max(1, self.rows(facts) // facts.micro_batch_size)

    def rows(self, facts: Facts) -> int:
        """Returns a rank's sequences in an optimizer step."""
        return facts.global_batch_size // self.data_parallel(facts.world_size)

    def tokens(self, facts: Facts) -> int:
        """Returns a rank's tokens in a micro-batch."""
        return facts.micro_batch_size * facts.seq_len

    # ---- before a start --------------------------------------------------------------------------

    def refusals(self, setup: Configured) -> Iterator[str]:
        given = setup.machine.precision
        if self.precisions and given not in self.precisions:
            choice = f"{', '.join(self.precisions[:-1])} or {self.precisions[-1]}"
            yield f"trainer.precision {given!r} does not exist under {self.name}: set {choice}"
        if not self.is_replicated:
            return
        if self.name in ("MeshStrategy", "ZeroStrategy"):
            way_out = f"give a file of configs/strategy/, or --trainer.strategy.class_path {self.name}"
            yield f"trainer.strategy {self.name!r} is a class: {way_out}"
            return
        for start, (instead, files) in REPLACED.items():
            if any(name.lower().startswith(start) for name in (self.name, *self.bases)):
                yield f"trainer.strategy {self.name!r} is replaced by {instead}: use configs/strategy/{files}"
                return
        if any(word in self.name for word in ("spawn", "fork", "notebook")):
            yield f"trainer.strategy {self.name!r} is not supported, because it pickles the module: set ddp"

    def trials(self, setup: Configured) -> Iterator[tuple[str, Callable[[PreTrainedModel], None]]]:
        return iter(())

    def shrunk(self, processes: int | None) -> Small:
        num = processes or 2
        return Small(dict(self.arguments), num, num)

    def halved(self, processes: int) -> Small:
        if processes < 2:
            raise InputError("one process cannot be halved; give --processes 2 or more")
        return Small(dict(self.arguments), processes // 2, processes // 2)

    # ---- memory ----------------------------------------------------------------------------------

    def memory(self, facts: Facts) -> dict[str, float]:
        kept, backward = self.activations(facts)
        return self.state(facts) | {"activations": kept, "logits": self.logits(facts), "backward": backward}

    def state(self, facts: Facts) -> dict[str, float]:
        """Returns weights, gradients, optimizer state and their buffers."""
        share, width = self.share(facts), self.weight_bytes(facts)
        return {
            "weights": self.all_weights(facts) * share,
            "gradients": facts.trainable * width * share,
            "optimizer state": facts.trainable * ADAMW_BYTES * width / 4 * share,
        } | self.buffers(facts)

    def buffers(self, facts: Facts) -> dict[str, float]:
        """Returns what is needed besides a rank's shards; without an accumulation, DDP's gradients are its buffers."""
        if self.data_parallel(facts.world_size) == 1 or self.accumulation(facts) == 1:
            return {}
        return {"communication buffers": facts.trainable * self.weight_bytes(facts)}

    def share(self, facts: Facts) -> float:
        """Returns the share of the parameters that a rank stores."""
        return 1.0

    def weight_bytes(self, facts: Facts) -> int:
        """Returns the bytes of a stored weight."""
        return 2 if facts.stores_half else 4

    def used_bytes(self, facts: Facts) -> int:
        """Returns the bytes of a weight that is gathered or multiplied."""
        return 2 if facts.is_half else self.weight_bytes(facts)

    def all_weights(self, facts: Facts) -> float:
        """Returns the bytes of the unsharded weights."""
        full = (facts.parameters - facts.in_4_bits) * self.weight_bytes(facts)
        return full + facts.in_4_bits * BYTES_IN_4_BITS

    def block_run(self, facts: Facts) -> BlockRun:
        return BlockRun(facts.is_half and self.weight_bytes(facts) == 2, facts.is_mixed, shared_by=1)

    def activations(self, facts: Facts) -> tuple[float, float]:
        """Returns what blocks keep from forward to backward, and what one block's backward adds."""
        if facts.traced is not None:
            kept, most = facts.traced(self.block_run(facts))
            return kept, most - kept
        tokens, block = self.tokens(facts), self.block_activations(facts)
        casts = facts.is_half and self.weight_bytes(facts) == 4
        # autocast keeps 16-bit copies of matrices
        cast = 2 * (facts.parameters - facts.embedding) * self.share(facts) if casts else 0.0
        layers = self.layers_kept(facts)
        if facts.checkpointing == "none":
            return tokens * layers * block + cast, tokens * block
        kept = block * SELECTIVE
        if facts.checkpointing == "full":  # a block's input
            kept = facts.width * (2 if facts.stores_half else 4)
        return tokens * (block + layers * kept) + cast, tokens * block  # one block is recomputed

    def block_activations(self, facts: Facts) -> float:
        """Returns the activations of one block, per token."""
        norms = 4 * 4 * facts.width  # two norms, input and output, in fp32
        attention = 5 * facts.width  # queries, keys, values, output, input of the projection
        mlp = 4 * 8 / 3 * facts.width  # gate, its activation, up, their product: 8/3 as wide
        shared_by = self.block_run(facts).shared_by
        return norms + (attention + mlp) * (2 if facts.is_half else 4) / shared_by

    def layers_kept(self, facts: Facts) -> float:
        """Returns the blocks whose activations a rank keeps, times micro-batches."""
        return float(facts.layers)

    def logits(self, facts: Facts) -> float:
        """Returns the logits of a chunk; the gradient of a trained output layer is summed in fp32 over chunks."""
        tokens, chunk = self.tokens(facts), facts.loss_chunk
        if not chunk or chunk >= tokens:
            return LOGIT_BYTES * tokens * facts.vocab_size
        sums = 4 * facts.width if facts.trainable == facts.parameters else 0
        return (LOGIT_BYTES * chunk + sums) * facts.vocab_size

    def savings(self, facts: Facts) -> Iterator[Saving]:
        """Yields changes of the strategy that need less memory, the cheapest first."""
        if facts.world_size > 1 and facts.precision == "16-mixed":  # a mesh does not support it
            sentence = "ZeRO stage 2: shards optimizer state and gradients."
            yield Saving(sentence, {"config": ("ddp", ZERO_2)})
        elif facts.world_size > 1:
            sentence = "FSDP2: each rank keeps a shard, and gathers a block when it runs."
            yield Saving(sentence, {"config": ("ddp", FSDP2)})
        sentence = f"ZeRO stage 2 with optimizer state in host memory: {SLOWER}"
        changes = {"config": ("ddp", ZERO_2), f"{ARGS}.offload_optimizer": (None, True)}
        yield Saving(sentence, changes, is_on_host=True)

    # ---- messages and time -----------------------------------------------------------------------

    def traffic(self, facts: Facts) -> Iterator[Sent]:
        """Gradients once a step, in buckets that backward fills from the last parameter on."""
        n, width = self.data_parallel(facts.world_size), self.weight_bytes(facts)
        calls = 1 + ceil(max(0, facts.trainable * width - FIRST_BUCKET) / BUCKET)
        yield Sent("all_reduce", facts.trainable, width, n, calls, span=n)

    def allows(self, facts: Facts) -> bool:
        """Whether `fit` accepts the checkpointing and the number of micro-batches."""
        return True

    def stage_facts(self, model: nn.Module, world_size: int) -> StageFacts | None:
        """Returns the stages of `model`; None without a pipeline. Raises InputError if it cannot be divided."""
        return None

    def slowdown(self, facts: Facts) -> float:
        """Returns the time of a step over that of a rank that computes its even part without a pause."""
        return 1.0

    def on_host(self, facts: Facts) -> tuple[float, float]:
        """Returns the parameters that a rank's host updates in a step, and that its device fetches per micro-batch."""
        return 0.0, 0.0


def selective_refusal(setup: Configured, what: str) -> Iterator[str]:
    """Refuses selective checkpointing of blocks that communicate (torch 2.13: "not found in storage" in backward)."""
    if setup.setting("blocks.checkpointing") == "selective":
        why = f"{what}, which communicates inside of a block again in backward"
        yield f"model.blocks.checkpointing 'selective' does not work with {why}: set full"
