"""A strategy's answers on a rank of a training, whatever its class."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from .mesh.pipeline.stages import StageFacts

if TYPE_CHECKING:
    import torch.distributed as dist
    from lightning.pytorch.strategies import Strategy
    from torch import Tensor, nn

    from .starting import Start

T = TypeVar("T")


class DataRank(NamedTuple):
    """Which part of the batches a process reads."""

    rank: int
    size: int


class LocalModel:
    """The model's layers on this rank: all of them. A pipeline has another class."""

    group: dist.ProcessGroup | None = None  # of the ranks that have the other layers
    batch_group: dist.ProcessGroup | None = (
        None  # of the ranks that have the same layers; None: all
    )
    facts: StageFacts | None = None

    def __str__(self) -> str:
        """Describes them in a message, with a comma at the end."""
        return ""

    def norm(self, parameters: list[nn.Parameter]) -> Tensor | None:
        """Returns () the joint 2-norm of the gradients of all ranks; None if there are none here,
        because the engine keeps and clips them. Collective."""
        from ..layout import joint_norm

        return joint_norm(parameters)

    def from_last(self, compute: Callable[[], T]) -> T:
        """Returns on every rank what the ranks that have the model's output compute. Collective."""
        return compute()

    def training_step(self, step: Callable[..., T], args: tuple[object, ...]) -> T | Tensor:
        """Runs the module's `training_step` on a micro-batch; returns () the loss, and what else it
        returns."""
        return step(*args)

    def forward_only(self, step: Callable[..., T], args: tuple[object, ...]) -> T | None:
        """Runs the module's `training_step`, which no backward pass of the engine follows; None on
        the ranks without the model's output. Collective."""
        return step(*args)

    def evaluate(self, step: Callable[..., T], args: tuple[object, ...]) -> T | None:
        """Runs the module's validation or test step. Collective."""
        return step(*args)

    def all_names(self, names: list[str]) -> list[str]:
        """Returns the names that any rank has, in one order on every rank. Collective."""
        return names

    def micro_batch_of_pass(self, newest: int) -> int | None:
        """Returns the number of the micro-batch that runs, of which Lightning has handed over
        `newest` + 1; None in a module of another rank's layers."""
        return newest

    def first_block_of_pass(self) -> int | None:
        """Returns the number of the first block of the stage that runs, 0 without a pipeline; None
        in a module of another stage, which is passed over."""
        return 0


class RankView:
    """The answers of DDP, one device and other strategies of Lightning's."""

    layers = LocalModel()  # the model's layers on this rank
    sequence_group: dist.ProcessGroup | None = None  # of the ranks that share this rank's sequences
    replica_tolerance = (
        0.0  # by how much of their norm replicas may differ on a GPU, by rounding alone
    )
    has_replicas = True  # whether tensors of the same place on two ranks are comparable

    @property
    def lightning(self) -> Any:
        """Lightning's strategy."""
        return self

    @property
    def data_rank(self) -> DataRank:
        given = getattr(self.lightning, "distributed_sampler_kwargs", None) or {}
        return DataRank(given.get("rank", 0), given.get("num_replicas", 1))

    @property
    def random_rank(self) -> int:
        """The number of this rank's random stream; ranks that repeat computations share one."""
        return self.data_rank.rank

    def shard(self, start: Start) -> nn.Module:
        """Returns the model of `start` with this rank's weights. Collective."""
        from . import scatter

        scatter.allocate(start.model, self.lightning.root_device)
        start.fill(start.model)
        return start.model

    @property
    def keeps_trainable(self) -> bool:
        """Whether the strategy keeps which parameters were trainable when it prepared the model."""
        return False

    def change_trainable(self, changed: Mapping[str, bool]) -> None:
        """Prepares the model for parameters whose `requires_grad` has changed, by name; all ranks
        call it at the same step. Raises InputError if that is not possible."""

    def sum_of_batches(self, sums: Tensor) -> Tensor:
        """Returns sums over all ranks that read different batches. Collective."""
        return self.lightning.reduce(sums, self.layers.batch_group, reduce_op="sum")


class PlainStrategy(RankView):
    """A strategy of Lightning's own."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        # Lightning's FSDP has flat shards
        self.has_replicas = "FSDPStrategy" not in [kind.__name__ for kind in type(strategy).__mro__]

    @property
    def lightning(self) -> Any:
        return self._strategy

    @property
    def keeps_trainable(self) -> bool:
        """DDP reduces the gradients of the parameters that were trainable when it was made."""
        from torch.nn.parallel import DistributedDataParallel

        return isinstance(self._strategy.model, DistributedDataParallel)

    def change_trainable(self, changed: Mapping[str, bool]) -> None:
        from ..compat.lightning import wrap_again

        wrap_again(self.lightning)


def rank_view(strategy: Strategy | RankView) -> RankView:
    """Returns the answers of `trainer.strategy`."""
    return strategy if isinstance(strategy, RankView) else PlainStrategy(strategy)


def is_strategy(value: object) -> bool:
    """a subclass of Lightning's Strategy; its NAMES are names with arguments"""
    from lightning.pytorch.strategies import Strategy

    return (
        isinstance(value, type)
        and issubclass(value, Strategy)
        and isinstance(names := getattr(value, "NAMES", {}), dict)
        and all(isinstance(name, str) and isinstance(names[name], dict) for name in names)
    )
