"""An axis of MeshStrategy's mesh: one class with all that `fit`, `plan` and `rehearse` ask it.

What an axis does not say, it leaves as it is. Where two axes meet, one asks for the other's size:
`self.sizes.fsdp`. No torch."""

from collections.abc import Iterator
from typing import Any, Literal

from ...configured import Configured
from ...spec.base import Spec
from ...spec.facts import Facts, Sent

__all__ = ["Axis"]

Size = int | Literal["auto"]


class MeshSizes(dict[str, int]):
    """Ranks along each axis, by its name: `sizes.tp` is `sizes["tp"]`."""

    pp: int
    dp_replicate: int
    fsdp: int
    tp: int
    ep: int
    cp: int

    def __getattr__(self, name: str) -> int:
        return self[name]


class Axis:
    """A dimension of a mesh.

    Attributes:
        name: Of the dimension.
        key: Of its size in MeshStrategy's arguments: NAME_size.
        default: Its size where none is given.
        adds_ranks: Whether its size is a factor of the number of ranks.
        reads_own_rows: Whether ranks that differ only here read different batches.
        shares_sequences: Whether such ranks have each a part of every sequence.
        draws_own: Whether they have random streams of their own (dropout).
        is_proven: Whether proof.json has it; replicas compute what one process computes.
        allows_manual: Whether a module that optimizes manually trains right along it.
        comes_last: Whether it follows the others in proof.json's names and in refusals."""

    name = key = ""
    default: Size = 1
    adds_ranks = True
    reads_own_rows = False
    shares_sequences = False
    draws_own = True
    is_proven = True
    allows_manual = False
    comes_last = False

    def __init_subclass__(cls) -> None:
        cls.key = f"{cls.name}_size"

    def __init__(self, spec: Spec, sizes: MeshSizes) -> None:
        self.spec, self.sizes, self.size = spec, sizes, sizes[self.name]

    def argument(self, name: str, default: Any = None) -> Any:
        """Returns another argument of MeshStrategy."""
        return self.spec.arguments.get(name, default)

    def refusals(self, setup: Configured) -> Iterator[str]:
        """Yields a sentence for each thing of `setup` that cannot work."""
        return iter(())

    def least_micro_batches(self) -> int:
        """Returns how many micro-batches an optimizer step has at least."""
        return 1

    def reduced(self, notes: list[str]) -> dict[str, Any]:
        """Returns arguments for a rehearsal, in which the mesh has `sizes`, an axis that adds no
        ranks size 1, and `spec` the production's arguments. Adds differences to `notes`."""
        return {}

    # ---- memory ----------------------------------------------------------------------------------

    def share(self, facts: Facts) -> float:
        """Returns the share of the parameters that the rank with most of them stores."""
        return 1.0

    def mean_share(self, facts: Facts) -> float:
        """Returns the mean over ranks of that share."""
        return self.share(facts)

    def kept_share(self, facts: Facts) -> float:
        """Returns the share of the blocks whose activations a rank keeps, times micro-batches."""
        return 1.0

    def buffers(self, facts: Facts) -> dict[str, float]:
        """Returns bytes of a rank besides its shards, by part."""
        return {}

    def correct_traced(self, parts: dict[str, float], facts: Facts) -> None:
        """Changes the parts of `Spec.memory` where activations were traced on one rank's blocks."""

    # ---- messages and time -----------------------------------------------------------------------

    def traffic(self, facts: Facts) -> Iterator[Sent]:
        """Yields what a rank sends in an optimizer step."""
        return iter(())

    def allows(self, facts: Facts) -> bool:
        """Returns whether `fit` accepts the checkpointing and the number of micro-batches."""
        return True

    def slowdown(self, facts: Facts) -> float:
        """Returns the time of a step over that of a rank that computes its even part without a
        pause."""
        return 1.0
