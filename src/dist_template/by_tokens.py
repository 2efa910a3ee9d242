"""Values that change with the consumed tokens: the batch size, the learning rate, the weight of a
loss.

    weight: 0.3                                              one value
    weight: [{value: 0.3, until: 10.0e+12}, {value: 0.1}]    0.3 for 10 T tokens, then 0.1

An optimizer step has the value at the tokens consumed before it: rows x `data.seq_len`, over all
ranks and restarts, also of rows that are padded or have masked labels. A resume with another
`data.seq_len` counts all rows with it."""

import math
from dataclasses import dataclass
from typing import Any, Final, Literal

from .errors import InputError
from .ranges import NonNegativeFloat, PositiveFloat, PositiveInt

__all__ = ["AUTO"]

AUTO: Final = "auto"  # a value that `fit` chooses when the data are known: text/auto.py
Auto = Literal["auto"]


@dataclass
class Phase:
    """A value until a number of consumed tokens.

    Args:
        value: The value, at the end of the phase if `shape` is not constant.
        until: Consumed tokens at which the phase ends. null: the last phase, which has no end.
        shape: constant, or how the value of the phase before becomes `value`: linear or cosine. A
            first phase with `until: 0` only sets the value from which the second one starts.
        multiple: Batch sizes in between are rounded down to a multiple of the greatest common
            divisor of all values and `multiple`s, so that each number of ranks that divides it
            divides every batch. Others are not rounded."""

    value: NonNegativeFloat
    until: NonNegativeFloat | None = None
    shape: Literal["constant", "linear", "cosine"] = "constant"
    multiple: PositiveInt | None = None

    def __str__(self) -> str:
        """Returns what is not the default, as a resume prints it that has other phases."""
        return " ".join(
            f"{key} {value}" for key, value in vars(self).items() if value not in (None, "constant")
        )


ByTokens = float | list[Phase]
NonNegativeByTokens = NonNegativeFloat | list[Phase]
PositiveByTokens = PositiveFloat | list[Phase]  # of a phase, 0 is allowed


def value_at(given: ByTokens, tokens: float) -> float:
    """Returns the value of an optimizer step before which `tokens` were consumed."""
    if not isinstance(given, list):
        return given
    start, before, phase = 0.0, given[0].value, given[0]
    for phase in given:
        if phase.until is None or tokens < phase.until:
            break
        start, before = phase.until, phase.value
    if phase.shape == "constant" or phase.until is None:
        return phase.value
    share = (tokens - start) / (phase.until - start)
    if phase.shape == "cosine":
        share = (1 - math.cos(math.pi * share)) / 2
    return before + (phase.value - before) * share


def batch_at(given: int | list[Phase], tokens: float) -> int:
    """Returns the samples of an optimizer step, which do not depend on the number of ranks."""
    divisor = divisor_of(given)
    return int(value_at(given, tokens) // divisor * divisor)


def divisor_of(given: int | list[Phase]) -> int:
    """Returns the number that divides every batch size."""
    divisor = math.gcd(*map(int, values_of(given)))
    if isinstance(given, list):
        for phase in given:
            divisor = math.gcd(divisor, phase.multiple or 0)
    return divisor


def values_of(given: ByTokens) -> list[float]:
    """Returns the values of all phases; those in between are between them."""
    if not isinstance(given, list):
        return [given]
    return [phase.value for phase in given]


def check_phases(key: str, given: ByTokens) -> None:
    """Raises InputError if the phases of the key are not in the order of their tokens, with an end
    each but the last, if a first or last one changes gradually, or if a value is negative."""
    if not isinstance(given, list):
        return
    ends: list[Any] = [phase.until for phase in given]
    inner, wrong = ends[:-1], None
    if not ends or ends[-1] is not None or None in inner:
        wrong = "every phase needs `until` but the last, which must have none"
    elif min([0, *inner]) < 0 or inner != sorted(set(inner)):
        wrong = "`until` must be 0 or more, and grow from phase to phase"
    elif not given[0].shape == given[-1].shape == "constant":
        wrong = "the first and the last phase must be constant: begin with {value: START, until: 0}"
    elif not min(values_of(given)) >= 0:
        wrong = "`value` must be 0 or more"
    if wrong:
        raise InputError(f"{key} has phases until {ends} tokens: {wrong}")
