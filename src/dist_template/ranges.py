"""Types of arguments that accept only some numbers or texts.

    keep: PositiveInt = 2
    rank: Annotated[int, Range(ge=1, le=65_536)] = 8

For Python they are int, float and str. `fit` checks the values of its keys against them before
anything is built (cli/ranges.py), and `--help` shows them. A class that a script creates checks
what it needs itself."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

__all__ = [
    "Folder",
    "NonNegativeFloat",
    "NonNegativeInt",
    "PositiveFloat",
    "PositiveInt",
    "Range",
    "Seed",
    "Share",
]

BOUNDS = ("ge", "gt", "le", "lt")


@dataclass(frozen=True, repr=False)
class Range:
    """The numbers that an argument accepts: all finite ones within the bounds.

    Args:
        ge: The least one.
        gt: Accepted numbers are greater than this.
        le: The greatest one.
        lt: Accepted numbers are less than this.
        allowed: The range in words, after "give". "": made of the bounds."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    allowed: str = ""

    def accepts(self, value: float) -> bool:
        return (  # each comparison with nan is false
            (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
            and (self.lt is None or value < self.lt)
            and -math.inf < value < math.inf
        )

    def __str__(self) -> str:
        if self.allowed:
            return self.allowed
        if self.ge is not None and self.le is not None:
            return f"{self.ge:,} to {self.le:,}"
        words = [
            "" if self.ge is None else f"{self.ge:,} or more",
            "" if self.gt is None else f"more than {self.gt:,}",
            "" if self.le is None else f"{self.le:,} or less",
            "" if self.lt is None else f"below {self.lt:,}",
        ]
        return ", ".join(filter(None, words))

    __repr__ = __str__  # in the types that --help shows


@dataclass(frozen=True, repr=False)
class NotZero(Range):
    """Accepts any number but 0."""

    def accepts(self, value: float) -> bool:
        return value != 0


@dataclass(frozen=True, repr=False)
class NotBlank:
    """The texts that an argument accepts: those with a character that is no blank.

    Args:
        allowed: What they name, after "give"."""

    allowed: str

    def accepts(self, value: str) -> bool:
        return bool(value.strip())

    def __str__(self) -> str:
        return self.allowed

    __repr__ = __str__


PositiveInt = Annotated[int, Range(ge=1)]
NonNegativeInt = Annotated[int, Range(ge=0)]
PositiveFloat = Annotated[float, Range(gt=0)]
NonNegativeFloat = Annotated[float, Range(ge=0)]
Share = Annotated[float, Range(ge=0, le=1, allowed="a share from 0 to 1")]
ShareBelowOne = Annotated[float, Range(ge=0, lt=1)]
# More than these would exhaust a timer, or processes.
Timeout = Annotated[float, Range(ge=0, le=1e8, allowed="0 to 100,000,000 seconds")]
NumNodes = Annotated[int, Range(ge=1, le=100_000)]
Seed = Annotated[int, Range(ge=0, le=2**32 - 1)]  # of NumPy's generators
# An empty text would be the folder in which the process was started.
Folder = Annotated[str, NotBlank("a folder")]


def checks_of(metadata: Iterable[object]) -> list[Range | NotBlank]:
    """Returns what the metadata of an `Annotated` require, those of the package annotated_types
    (`Ge(1)`, `Interval(ge=1, le=9)`) as a Range."""
    found: list[Range | NotBlank] = []
    bounds: dict[str, Any] = {}
    for each in metadata:
        if isinstance(each, Range | NotBlank):
            found.append(each)
            continue
        for name in BOUNDS:
            bound = getattr(each, name, None)
            if isinstance(bound, int | float):
                bounds[name] = bound
    if bounds:
        found.append(Range(**bounds))
    return found
