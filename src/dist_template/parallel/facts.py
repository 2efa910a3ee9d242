"""The data that a strategy answers from, and with. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from .pipeline.costs import StageFacts

if TYPE_CHECKING:
    import lightning as L

ARGS = "trainer.strategy.init_args"
NOT_READ_YET: Final = object()  # the model's configuration needs the vocabulary of the data
STATE = ("weights", "gradients", "optimizer state")  # parts of `Sharding.memory`


@dataclass(frozen=True)
class Hardware:
    """What a training runs on; `precision` as Lightning names it: 32-true, bf16-mixed, …"""

    accelerator: str  # cpu, cuda, mps …
    devices: int  # of one node
    num_nodes: int = 1
    precision: str = "32-true"
    is_this_one: bool = False  # then its disks can be checked

    @property
    def world_size(self) -> int:
        return self.devices * self.num_nodes


@dataclass(frozen=True)
class Configured:
    """A training before its start: the arguments of `limits.violations`."""

    machine: Hardware
    trainer: Mapping[str, Any]
    module: L.LightningModule
    data: Any
    model_config: Any  # transformers' configuration
    trains: bool
    saves_asynchronously: bool = False

    def setting(self, path: str) -> object:
        """Returns `model.<path>`; None if the module has no such setting."""
        value: object = self.module
        for name in path.split("."):
            value = getattr(value, name, None)
        return value

    @property
    def optimizer(self) -> Mapping[str, str]:
        """--optimizer: class_path and init_args; {} for the default."""
        given = self.setting("optim.optimizer")
        return given if isinstance(given, Mapping) else {}

    @property
    def text_config(self) -> Any:
        """The language model's part of `model_config`; None if there is none, or not yet."""
        is_known = self.model_config not in (NOT_READ_YET, None)
        return self.model_config.get_text_config() if is_known else None


class BlockRun(NamedTuple):
    """How a rank runs a block: weights in 16 bits, or cast to them by autocast, and the number of
    ranks that share each matrix."""

    is_half: bool
    casts: bool
    shared_by: int


@dataclass(frozen=True)
class Facts:
    """The figures of a model and its training on which memory and messages depend.

    Args:
        world_size: Processes.
        parameters: Of the model; then those that are trained, in 4 bits, in the embedding, in
            experts, and those that the tensor-parallel plan leaves on every rank.
        block: Parameters of the largest block, and of the experts in it. 0: not known.
        tp_widths: Elements of a token that tensor parallelism all-reduces in forward or backward,
            in `tp_calls` collectives.
        heads: Attention heads, those of keys, and the width of one.
        is_tied: Whether the embedding is the output layer too.
        tensors: Number of parameter tensors.
        loss_chunk: Tokens whose logits exist at a time. None: all.
        on_host: Devices are CPUs, so that offloading frees nothing.
        pipeline: Its stages. None: a rank has all layers.
        traced: Measures on the meta device what blocks keep for backward, and the most that exists
            in backward, in bytes. None: `Plain.activations` counts tensors.
    """

    world_size: int
    parameters: int
    trainable: int
    in_4_bits: int = 0
    embedding: int = 0
    experts: int = 0
    tp_replicates: int = 0
    block: int = 0
    block_experts: int = 0
    layers: int = 1
    width: int = 0
    vocab_size: int = 0
    moe_layers: int = 0
    experts_per_token: int = 0
    tp_widths: int = 0
    tp_calls: int = 0
    heads: tuple[int, int, int] = (1, 1, 0)
    is_tied: bool = False
    tensors: int = 0
    precision: str = "32-true"
    checkpointing: str = "none"
    micro_batch_size: int = 1
    seq_len: int = 0
    global_batch_size: int = 0
    loss_chunk: int | None = None
    on_host: bool = False
    pipeline: StageFacts | None = None
    traced: Callable[[BlockRun], tuple[float, float]] | None = None

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
    """One kind of collective of a rank in an optimizer step.

    In rings: of a tensor of S bytes over n ranks, each rank sends S (n-1)/n in n-1 messages when it
    is gathered or scattered, and both twice when it is all-reduced; an all-to-all sends as much as a gather.

    Args:
        kind: As torch names it.
        elements: Of the unsharded tensors of all calls.
        size: Bytes of an element.
        ranks: That take part.
        calls: The mean over ranks, which differ in a pipeline.
        span: Neighbouring ranks that the messages reach; within a node they are faster.
        waits: Whether computation waits for it.
    """

    kind: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
    elements: float
    size: float
    ranks: int
    calls: float
    span: int
    waits: bool = False

    @property
    def sent(self) -> float:
        """Bytes that a rank sends."""
        if self.kind == "send":
            return self.elements * self.size
        times = 2 if self.kind == "all_reduce" else 1
        return times * self.elements * self.size * (self.ranks - 1) / self.ranks

    @property
    def messages(self) -> float:
        return (2 if self.kind == "all_reduce" else 1) * (self.ranks - 1) * self.calls


class Saving(NamedTuple):
    """A change of the strategy with which a rank needs less memory.

    Args:
        sentence: What it does, and costs.
        changes: Key of the configuration: its value now, and the proposed one.
        is_on_host: Whether host memory is used in place of the device's.
    """

    sentence: str
    changes: Mapping[str, tuple[object, object]]
    is_on_host: bool = False


@dataclass(frozen=True)
class Small:
    """A strategy on a few processes: its `init_args`, ranks, and those with batches of their own;
    stages of a pipeline; a sentence for each difference from production."""

    arguments: dict[str, Any]
    processes: int
    data_parallel: int
    stages: int = 1
    notes: list[str] = field(default_factory=list)
