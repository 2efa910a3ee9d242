"""Values that change with the consumed tokens: the batch size, the learning rate, the weight of a loss.

    weight: 0.3                                              one value
    weight: [{value: 0.3, until: 10.0e+12}, {value: 0.1}]    0.3 for 10 T tokens, then 0.1

An optimizer step has the value at the tokens consumed before it: rows x `data.seq_len`, over all ranks and restarts,
also of rows that are padded or have masked labels."""

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

from .errors import InputError


@dataclass
class Phase:
    """A value until a number of consumed tokens.

    Args:
        value: The value, at the end of the phase if `shape` is not constant.
        until: Consumed tokens at which the phase ends. null: the last phase, which has no end.
        shape: constant, or how the value of the phase before becomes `value`: linear or cosine. A first phase with
            `until: 0` only sets the value from which the second one starts.
        multiple: Values in between are rounded down to a multiple of it. null: a batch size to the greatest common
            divisor of all its values, so that each number of ranks that divides these divides every batch; others are
            not rounded."""

    value: float
    until: float | None = None
    shape: Literal["constant", "linear", "cosine"] = "constant"
    multiple: int | None = None


ByTokens = float | list[Phase]


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
    value = before + (phase.value - before) * share
    return value // phase.multiple * phase.multiple if phase.multiple else value


def values_of(given: ByTokens) -> list[float]:
    """Returns the values of all phases; those in between are between them."""
    return [phase.value for phase in given] if isinstance(given, list) else [given]


def check_phases(key: str, given: ByTokens) -> None:
    """Raises InputError if the phases of the key are not in the order of their tokens, with an end each but the last,
    or a first or last one changes gradually."""
    if not isinstance(given, list):
        return
    ends = [phase.until for phase in given]
    wrong = None
    if not ends or ends[-1] is not None or None in ends[:-1]:
        wrong = "every phase needs `until` but the last, which must have none"
    elif any(not 0 <= (a or 0.0) < (math.inf if b is None else b) for a, b in pairwise(ends)):
        wrong = "`until` must be 0 or more, and grow from phase to phase"
    elif not given[0].shape == given[-1].shape == "constant":
        wrong = "the first and the last phase must be constant: begin with {value: START, until: 0}"
    elif any(b.multiple and (a.value % b.multiple or b.value % b.multiple) for a, b in pairwise(given)):
        wrong = "`multiple` must divide the values at both ends of its phase"
    if wrong:
        raise InputError(f"{key} has phases until {ends} tokens: {wrong}")


@dataclass(frozen=True, eq=False)
class BatchSizes:
    """Samples per optimizer step by the samples consumed before it.

    The sizes do not depend on the number of ranks: a step takes the same samples on any.

    Args:
        given: Sequences per optimizer step, or phases of them.
        seq_len: Tokens of a sequence."""

    given: int | list[Phase]
    seq_len: int

    @property
    def grows(self) -> bool:
        return isinstance(self.given, list)

    @property
    def all(self) -> list[int]:
        """The sizes of the phases; those in between are between them."""
        return [int(value) for value in values_of(self.given)]

    @property
    def divisor(self) -> int:
        """The greatest number that divides every size."""
        multiples = [phase.multiple or 0 for phase in self.given] if isinstance(self.given, list) else []
        return math.gcd(*self.all, *multiples)

    def at(self, samples: int) -> int:
        """Returns the size of the step before which `samples` were consumed."""
        if not isinstance(self.given, list):
            return self.given
        return int(value_at(self._rounded, samples * self.seq_len))

    @cached_property
    def _rounded(self) -> list[Phase]:
        assert isinstance(self.given, list)
        common = math.gcd(*self.all)
        return [replace(phase, multiple=phase.multiple or common) for phase in self.given]

    @cached_property
    def changes(self) -> list[tuple[int, int, int]]:
        """Steps and samples that come before a change of the size, and the size after it; first (0, 0, size)."""
        found, steps, samples = [(0, 0, self.at(0))], 0, 0
        for phase in self._rounded if self.grows else ():
            end = math.inf if phase.until is None else phase.until / self.seq_len
            while samples < end < math.inf:
                size = self.at(samples)
                if size != found[-1][2]:
                    found.append((steps, samples, size))
                left = range(1, math.ceil((end - samples) / size))
                # within a phase the sizes are monotone
                differs = bisect_left(left, True, key=lambda n: self.at(samples + n * size) != size)  # noqa: B023
                steps, samples = steps + differs + 1, samples + (differs + 1) * size
        if (size := self.at(samples)) != found[-1][2]:
            found.append((steps, samples, size))
        return found

    def samples(self, steps: float) -> float:
        """Returns the samples that the first `steps` optimizer steps consume."""
        first, consumed, size = self.changes[bisect_right(self.changes, steps, key=lambda change: change[0]) - 1]
        return consumed + (steps - first) * size

    def steps(self, tokens: float) -> int:
        """Returns the optimizer steps after which at least `tokens` are consumed."""
        samples = tokens / self.seq_len
        first, consumed, size = self.changes[bisect_right(self.changes, samples, key=lambda change: change[1]) - 1]
        return first + math.ceil((samples - consumed) / size)


def described(given: list[Phase], sizes: BatchSizes) -> str:
    """Returns the phases as a sentence: "0.3 until 10 T tokens (step 1,000), then 0.1"."""
    parts = []
    for phase in given:
        text = f"{phase.value:,g}" if phase.shape == "constant" else f"{phase.shape} to {phase.value:,g}"
        if phase.until:
            unit = min(math.log10(phase.until) // 3, 4)
            tokens = f"{phase.until / 1000**unit:,.4g} {' kMBT'[int(unit)]}".strip()
            text += f" until {tokens} tokens (step {sizes.steps(phase.until):,})"
        parts.append(text)
    return ", then ".join(parts)


def phases_in(sections: dict[str, object], sizes: BatchSizes) -> dict[str, str]:
    """Returns each key that has phases below the configurations `sections`, and a sentence."""
    found = {}
    for section, config in sections.items():
        for key, value in vars(config).items() if config else ():
            if isinstance(value, list) and value and isinstance(value[0], Phase):
                found[f"{section}.{key}"] = described(value, sizes)
    return found


def sizes_of(data: Any) -> BatchSizes:
    """Returns the batch sizes of a data module that has them."""
    return BatchSizes(data.global_batch_size, getattr(data, "seq_len", 1))
