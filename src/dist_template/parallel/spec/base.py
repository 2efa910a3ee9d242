"""What a configured strategy answers before a process starts: its ranks, what it refuses, its
memory and messages, and its form for a rehearsal. No torch.

A strategy's `Spec` is its entry point (`dist_template.strategies`), and names the classes that need
torch: the strategy's own and its checkpoint format's. docs/extend.md has an example.

Memory is of one rank, in bytes, by formulas that all strategies share; docs/strategies explains
them. Weights, gradients and optimizer state follow from parameters, strategy and precision.
Activations are traced (`Facts.traced`, within 15 %), or counted as tensors (Korthikanti et al.,
arXiv:2205.05198, section 4.1) of blocks with a gated MLP, norms in fp32, fused attention and no
dropout, which is right within a factor of two."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from ...errors import InputError
from ..configured import Configured
from ..mesh.pipeline.stages import StageFacts
from .facts import STATE, BlockRun, Facts, Saving, Sent
from .refusals import measured_refusal, widths_of_experts

__all__ = ["ReducedStrategy", "Spec"]

LOGIT_BYTES = 12  # per logit in backward: log-probability, its gradient and the logit's, in fp32
BYTES_IN_4_BITS = 1 / 2 + 1 / 64  # packed, and a scale of 64 weights in 8 bits
ADAMW_BYTES = 8  # per parameter in fp32: two moments
MUON_BYTES = 4  # one moment
SELECTIVE = 0.5  # share of a block's activations that selective checkpointing keeps
SLOWER = "the optimizer runs on the CPU, and steps take longer."


@dataclass(frozen=True)
class ReducedStrategy:
    """A strategy on a few processes, for a rehearsal: its `init_args`, ranks, and those with
    batches of their own; stages of a pipeline; a sentence for each difference from production."""

    arguments: dict[str, Any]
    processes: int
    data_parallel: int
    stages: int = 1
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Spec:
    """A configured strategy. Where a class does not say otherwise, each rank has the full model and
    its own batches."""

    arguments: Mapping[str, Any] = field(default_factory=dict)  # trainer.strategy.init_args
    name: str = ""  # of its class, or Lightning's name of it
    bases: tuple[str, ...] = ()  # names of that class and its base classes

    is_replicated: ClassVar[bool] = False  # whether the full model is on every rank
    precisions: ClassVar[tuple[str, ...]] = ()  # that the strategy supports; (): all
    creates_state_at_start: ClassVar[bool] = False  # of the optimizer; else in the first step
    STATE: ClassVar[tuple[str, ...]] = STATE

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Self:
        """Returns the spec of a strategy with these arguments."""
        return cls(arguments)

    @staticmethod
    def strategy_class() -> type | None:
        """Imports and returns the subclass of Lightning's Strategy that `class_path` names."""
        return None

    @staticmethod
    def format_class() -> type | None:
        """Imports and returns the format of its checkpoints, a CheckpointFormat; None: Lightning's
        single file."""
        return None

    # ---- ranks -----------------------------------------------------------------------------------

    def data_parallel(self, world_size: int) -> int:
        """Returns the number of ranks that read different batches. Raises InputError for sizes that
        do not fit."""
        return world_size

    def rows_together(self, world_size: int, micro_batch_size: int) -> int:
        """Returns the rows that an optimizer step has at least; it has a multiple of them."""
        return micro_batch_size * self.data_parallel(world_size)

    def axes(self, world_size: int) -> list[str]:
        """Returns the dimensions of the sharding that are above one, as proof.json names them."""
        return ["ddp"] if world_size > 1 else []

    def why_not_manual(self, world_size: int) -> str:
        """Returns what does not train a module that optimizes manually; "": all of it does."""
        return self.name

    def expert_parts(self, world_size: int) -> int:
        """Returns over how many ranks the width of each expert is divided."""
        return 1

    def reduced(self, processes: int | None = None) -> ReducedStrategy:
        """Returns the strategy on `processes`; None: as few as keep each kind of parallelism, at
        most 4. Raises InputError if the number does not fit."""
        num = processes or 2
        return ReducedStrategy(dict(self.arguments), num, num)

    # ---- refusals --------------------------------------------------------------------------------

    def refusals(self, setup: Configured) -> Iterator[str]:
        """Yields a sentence for each thing of `setup` that cannot work."""
        given = setup.machine.precision
        if self.precisions and given not in self.precisions:
            choice = f"{', '.join(self.precisions[:-1])} or {self.precisions[-1]}"
            yield f"trainer.precision {given!r} does not exist under {self.name}: set {choice}"
        if setup.setting("blocks.compile"):
            yield from measured_refusal(
                setup, "model.blocks.compile", "whose first steps compile and are no measure"
            )
        try:
            parts = self.expert_parts(setup.machine.world_size)
        except InputError:
            return  # of sizes that do not fit, which the strategy reports
        yield from widths_of_experts(setup, parts)

    # ---- batches ---------------------------------------------------------------------------------

    def accumulation(self, facts: Facts) -> int:
        """Returns the micro-batches of an optimizer step."""
        return max(1, self.rows(facts) // facts.micro_batch_size)

    def rows(self, facts: Facts) -> int:
        """Returns a rank's sequences in an optimizer step."""
        return facts.global_batch_size // self.data_parallel(facts.world_size)

    def tokens(self, facts: Facts) -> int:
        """Returns a rank's tokens in a micro-batch."""
        return facts.micro_batch_size * facts.seq_len

    # ---- memory ----------------------------------------------------------------------------------

    def memory(self, facts: Facts) -> dict[str, float]:
        """Returns bytes of one rank by part: STATE, buffers, then "activations" that are kept for
        backward, "logits" and "backward"; the last two do not exist at the same time."""
        kept, backward = self.activations(facts)
        return self.state(facts) | {
            "activations": kept,
            "logits": self.logits(facts),
            "backward": backward,
        }

    def state(self, facts: Facts) -> dict[str, float]:
        """Returns weights, gradients, optimizer state and their buffers."""
        share, width = self.share(facts), self.weight_bytes(facts)
        moments = (facts.trainable - facts.matrices) * ADAMW_BYTES + facts.matrices * MUON_BYTES
        return {
            "weights": self.all_weights(facts) * share,
            "gradients": facts.trainable * width * share,
            "optimizer state": moments * width / 4 * share,
        } | self.buffers(facts)

    def buffers(self, facts: Facts) -> dict[str, float]:
        """Returns bytes of a rank besides its shards, by part."""
        return {}

    def share(self, facts: Facts) -> float:
        """Returns the share of the parameters that the rank with most of them stores."""
        return 1.0

    def mean_share(self, facts: Facts) -> float:
        """Returns the mean over ranks of the share of the parameters that a rank stores."""
        return self.share(facts)

    def weight_bytes(self, facts: Facts) -> int:
        """Returns the bytes of a stored weight."""
        return 2 if facts.stores_half else 4

    def used_bytes(self, facts: Facts) -> int:
        """Returns the bytes of a weight that is gathered or multiplied."""
        return 2 if facts.is_half else self.weight_bytes(facts)

    def all_weights(self, facts: Facts) -> float:
        """Returns the bytes of the unsharded weights, of frozen models too."""
        in_full = facts.parameters - facts.in_4_bits + facts.frozen
        return in_full * self.weight_bytes(facts) + facts.in_4_bits * BYTES_IN_4_BITS

    def block_run(self, facts: Facts) -> BlockRun:
        return BlockRun(
            facts.is_half and self.weight_bytes(facts) == 2, facts.is_mixed, shared_by=1
        )

    def activations(self, facts: Facts) -> tuple[float, float]:
        """Returns what blocks keep from forward to backward, and what one block's backward adds."""
        run = self.block_run(facts)
        if facts.traced is not None:
            kept, most = facts.traced(run)
            return kept, most - kept
        tokens, width = self.tokens(facts), facts.width
        norms = 4 * 4 * width  # two norms, input and output, in fp32
        attention = 5 * width  # queries, keys, values, output, input of the projection
        mlp = 4 * 8 / 3 * width  # gate, its activation, up, their product: 8/3 as wide
        block = norms + (attention + mlp) * (2 if facts.is_half else 4) / run.shared_by
        kept = self.layers_kept(facts) * block
        if facts.checkpointing == "selective":
            kept = block + kept * SELECTIVE  # one block is recomputed
        elif facts.checkpointing == "full":  # a block's input
            kept = block + self.layers_kept(facts) * width * (2 if facts.stores_half else 4)
        cast = 0.0  # autocast keeps 16-bit copies of matrices
        if facts.is_half and self.weight_bytes(facts) == 4:
            cast = 2 * (facts.parameters - facts.embedding) * self.share(facts)
        return tokens * kept + cast, tokens * block

    def layers_kept(self, facts: Facts) -> float:
        """Returns the blocks whose activations a rank keeps, times micro-batches."""
        return float(facts.layers)

    def logits(self, facts: Facts) -> float:
        """Returns the logits of a chunk; the gradient of a trained output layer is summed in fp32
        over chunks."""
        tokens, chunk, passes = self.tokens(facts), facts.loss_chunk, 1 + facts.predicted
        if not chunk or chunk >= tokens:
            return LOGIT_BYTES * tokens * passes * facts.vocab_size
        sums = 4 * facts.width * passes if facts.trainable == facts.parameters else 0
        return (LOGIT_BYTES * chunk + sums) * facts.vocab_size

    def savings(self, facts: Facts) -> Iterator[Saving]:
        """Yields changes of the strategy that need less memory, the cheapest first."""
        return iter(())

    # ---- messages and time -----------------------------------------------------------------------

    def traffic(self, facts: Facts) -> Iterator[Sent]:
        """Yields what a rank sends in an optimizer step."""
        return iter(())

    def allows(self, facts: Facts) -> bool:
        """Whether `fit` accepts the checkpointing and the number of micro-batches."""
        return True

    def stage_facts(self, model: Any, world_size: int) -> StageFacts | None:
        """Returns the stages of `model`; None without a pipeline. Raises InputError if it cannot be
        divided."""
        return None

    def slowdown(self, facts: Facts) -> float:
        """Returns the time of a step over that of a rank that computes its even part without a
        pause."""
        return 1.0

    def on_host(self, facts: Facts) -> tuple[float, float]:
        """Returns the parameters that a rank's host updates in a step, and that its device fetches
        per micro-batch."""
        return 0.0, 0.0
