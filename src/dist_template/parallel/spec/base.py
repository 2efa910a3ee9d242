"""The memory of a rank, in bytes, by formulas that all strategies share; docs/strategies explains
them.

Weights, gradients and optimizer state follow from parameters, strategy and precision. Activations
are traced (`Facts.traced`, within 15 %), or counted as tensors (Korthikanti et al.,
arXiv:2205.05198, section 4.1) of blocks with a gated MLP, norms in fp32, fused attention and no
dropout, which is right within a factor of two."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from ..configured import ARGS
from ..mesh.pipeline.stages import StageFacts
from .facts import STATE, BlockRun, Facts, Saving, Sent
from .plain import Plain

LOGIT_BYTES = 12  # per logit in backward: log-probability, its gradient and the logit's, in fp32
BYTES_IN_4_BITS = 1 / 2 + 1 / 64  # packed, and a scale of 64 weights in 8 bits
ADAMW_BYTES = 8  # per parameter in fp32: two moments
MUON_BYTES = 4  # one moment
SELECTIVE = 0.5  # share of a block's activations that selective checkpointing keeps
SLOWER = "the optimizer runs on the CPU, and steps take longer."
FSDP2, ZERO_2 = "strategy/fsdp2", "strategy/zero2"
FILES: dict[str, dict[str, Any]] = {  # what `savings` proposes in place of DDP
    FSDP2: {"class_path": "MeshStrategy"},
    ZERO_2: {"class_path": "ZeroStrategy", "init_args": {"stage": 2}},
}


@dataclass(frozen=True)
class Estimate(Plain):
    """Each rank has the full model, and its own batches."""

    STATE: ClassVar[tuple[str, ...]] = STATE
    creates_state_at_start: ClassVar[bool] = False  # of the optimizer; else in the first step

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
        """Returns what is needed besides a rank's shards; without an accumulation, DDP's gradients
        are its buffers."""
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
        if facts.world_size > 1 and facts.precision != "16-mixed":  # which a mesh does not support
            sentence = "FSDP2: each rank keeps a shard, and gathers a block when it runs."
            yield Saving(sentence, {"config": ("ddp", FSDP2)})
        sentence = f"ZeRO stage 2 with optimizer state in host memory: {SLOWER}"
        changes = {"config": ("ddp", ZERO_2), f"{ARGS}.offload_optimizer": (None, True)}
        yield Saving(sentence, changes, is_on_host=True)

    # ---- messages and time -----------------------------------------------------------------------

    def traffic(self, facts: Facts) -> Iterator[Sent]:
        """Yields what a rank sends in an optimizer step: here gradients, once."""
        n = self.data_parallel(facts.world_size)
        yield Sent("all_reduce", facts.trainable, self.weight_bytes(facts), n, span=n)

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
