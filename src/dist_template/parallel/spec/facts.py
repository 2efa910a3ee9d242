"""The data that estimates are computed from, and what they consist of. No torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ..mesh.pipeline.stages import StageFacts

__all__ = ["Facts", "Saving", "Sent"]

STATE = ("weights", "gradients", "optimizer state")  # parts of `Spec.memory`


class BlockRun(NamedTuple):
    """How a rank runs a block: weights in 16 bits, or cast to them by autocast, and the number of
    ranks that share each matrix."""

    is_half: bool
    casts: bool
    shared_by: int


@dataclass(frozen=True)
class Facts:
    """The figures of a model and its training on which memory and messages depend."""

    world_size: int  # processes
    parameters: int  # of the model
    trainable: int
    in_4_bits: int = 0
    matrices: int = 0  # parameters that Muon updates, with one moment; 0 if AdamW updates all
    frozen: int = 0  # parameters of frozen models besides: a reference, a teacher
    embedding: int = 0
    experts: int = 0  # parameters of all experts
    tp_replicates: int = 0  # parameters that the tensor-parallel plan leaves on every rank
    block: int = 0  # parameters of the largest block; 0: not known
    block_experts: int = 0  # of the experts in it
    layers: int = 1  # with those of `predicted`
    predicted: int = 0  # modules of multi-token prediction
    width: int = 0
    vocab_size: int = 0
    moe_layers: int = 0
    experts_per_token: int = 0
    tp_widths: int = (
        0  # elements of a token that tensor parallelism all-reduces in forward or backward
    )
    heads: tuple[int, int, int] = (1, 1, 0)  # of attention, of keys, and the width of one
    precision: str = "32-true"
    checkpointing: str = "none"
    micro_batch_size: int = 1
    seq_len: int = 0
    global_batch_size: int = 0
    loss_chunk: int | None = None  # tokens whose logits exist at a time; None: all
    on_host: bool = False  # devices are CPUs, so that offloading frees nothing
    pipeline: StageFacts | None = None  # its stages; None: a rank has all layers
    # Measures on the meta device what blocks keep for backward, and the most that exists in
    # backward, in bytes.
    traced: Callable[[BlockRun], tuple[float, float]] | None = (
        None  # None: `Spec.activations` counts tensors
    )

    @property
    def is_half(self) -> bool:
        """Whether matrix products are in 16 bits."""
        return self.precision not in ("32-true", "32", "64-true")

    @property
    def is_mixed(self) -> bool:
        """Whether weights are stored in 32 bits and cast."""
        return self.precision.endswith("-mixed")

    @property
    def stores_half(self) -> bool:
        """Whether the optimizer updates weights of 16 bits."""
        return self.is_half and self.precision.endswith("true")


class Sent(NamedTuple):
    """One kind of collective of a rank in an optimizer step. With ring algorithms, a gather of S
    bytes over n ranks sends S (n-1)/n per rank, as a reduce-scatter and an all-to-all do, and an
    all-reduce twice that."""

    kind: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
    elements: float  # of the unsharded tensors of all calls
    size: float  # bytes of an element
    ranks: int  # that take part
    span: int  # neighbouring ranks that the messages reach; within a node they are faster
    waits: bool = False  # whether computation waits for it

    @property
    def sent(self) -> float:
        """Bytes that a rank sends."""
        if self.kind == "send":
            return self.elements * self.size
        times = 2 if self.kind == "all_reduce" else 1
        return times * self.elements * self.size * (self.ranks - 1) / self.ranks


class Saving(NamedTuple):
    """A change of the strategy with which a rank needs less memory."""

    sentence: str  # what it does, and costs
    # key of the configuration: its value now, and the proposed one
    changes: Mapping[str, tuple[object, object]]
    is_on_host: bool = False  # whether host memory is used in place of the device's
