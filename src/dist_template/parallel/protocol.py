"""What every strategy answers; no other file knows an axis of a mesh, or a key or class of a
strategy. `sharding_of` and `run_strategy` return the answers of `trainer.strategy`. No torch.

Sharding      of a configuration, before a start: plain.py, mesh_sharding.py, zero_sharding.py
RunDefaults   on a rank of a training: run_strategy.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol

from .facts import Configured, Facts, Saving, Sent, Small

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Sharding(Protocol):
    """A strategy's configuration."""

    @property
    def name(self) -> str: ...
    @property
    def is_replicated(self) -> bool:
        """Whether each rank has the full model."""
        ...

    def data_parallel(self, world_size: int) -> int:
        """Returns the number of ranks that read different batches.

        Raises:
            InputError: the sizes do not fit `world_size`.
        """
        ...

    def axes(self, world_size: int) -> list[str]:
        """Returns the dimensions of the sharding that are above one, as proof.json names them."""
        ...

    def refusals(self, setup: Configured) -> Iterator[str]:
        """Yields a sentence for each thing of `setup` that cannot work."""
        ...

    def trials(self, setup: Configured) -> Iterator[tuple[str, Callable[[PreTrainedModel], None]]]:
        """Yields, by key and size, what runs a rank's part of a model on the meta device."""
        ...

    def memory(self, facts: Facts) -> dict[str, float]:
        """Returns bytes of one rank by part: STATE, buffers, then "activations" that are kept for
        backward, "logits" and "backward"; the last two do not exist at the same time."""
        ...

    def savings(self, facts: Facts) -> Iterator[Saving]:
        """Yields changes of the strategy that need less memory, the cheapest first."""
        ...

    def traffic(self, facts: Facts) -> Iterator[Sent]:
        """Yields what a rank sends in an optimizer step."""
        ...

    def shrunk(self, processes: int | None) -> Small:
        """Returns the reduced form on `processes`; None: the minimum.

        Raises:
            InputError: the number does not fit.
        """
        ...

    def halved(self, processes: int) -> Small:
        """Returns the strategy on half of `processes`, with less data parallelism first."""
        ...


class DataRank(NamedTuple):
    """Which part of the batches a process reads."""

    rank: int
    size: int
