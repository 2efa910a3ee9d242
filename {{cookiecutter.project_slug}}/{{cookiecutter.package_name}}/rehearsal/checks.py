"""What a rehearsal proves, check by check, in the order in which it is printed.

Every check compares runs (runs.py) and, where they differ, says where that begins (compare.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from ..errors import InputError
from .compare import GRADIENT, first_difference, gradients, relative_difference, replicas, samples, trace, trace_resumed
from .record import RunRecord
from .report import Result
from .runs import RunFailed, Runs

LOSS, GRAD_NORM, LOGITS = 1e-5, 1e-4, 1e-5  # largest relative differences, in fp32


class NotEqual(Exception):
    """A check does not hold."""

    def __init__(self, got: str, where: str) -> None:
        super().__init__(got)
        self.got = got
        self.where = where


class NotOffered(Exception):
    """The strategy, or the model, does not do this."""


@dataclass(frozen=True)
class Check:
    """One line of the table.

    Args:
        name: What is looked at.
        expected: What must hold.
        look: Says what it got; raises where that is not what was expected.
    """

    name: str
    expected: str
    look: Callable[[Runs], str]

    def run(self, runs: Runs) -> Result:
        """The verdict, after the trainings that it needs and that no check before it has asked for."""
        started = time.perf_counter()
        verdict: Literal["pass", "FAIL", "limit"] = "pass"
        where = ""
        try:
            got = self.look(runs)
        except NotEqual as difference:
            got, where, verdict = difference.got, difference.where, "FAIL"
        except NotOffered as limit:
            got, where, verdict = "not possible here", str(limit), "limit"
        except RunFailed as failure:
            got, where, verdict = "a training failed", str(failure), "FAIL"
        return Result(self.name, self.expected, got, verdict, where, time.perf_counter() - started)


def starting_weights(runs: Runs) -> str:
    for other in (runs.ddp, runs.strategy):
        if name := first_difference(runs.one.start, other.start):
            raise NotEqual(f"{other.folder.name} differs from one", f"first in {name}")
    return f"{len(runs.one.start)} tensors, bit-identical"


def shared_tensors(runs: Runs) -> str:
    found = replicas(runs.strategy)
    if found:
        step, name, rank, other = found
        when = f"after step {step}" if step else "before the first step"
        hint = "its gradient is not reduced over these ranks" if step else "it is not what rank 0 built"
        raise NotEqual("ranks differ", f"{name} on rank {rank} differs from rank {other}'s {when}: {hint}")
    return f"{runs.small.processes} ranks agree after each step"


def each_sample_once(runs: Runs) -> str:
    seen: dict[str, tuple[int, int]] = {}
    for step, dealt in sorted(runs.strategy.rows().items()):
        for row, rank in dealt:
            if row in seen:
                first_step, first_rank = seen[row]
                where = f"step {step} of rank {rank} repeats a sample of step {first_step} of rank {first_rank}"
                raise NotEqual("a sample came twice", where)
            seen[row] = (step, rank)
    if where := samples(runs.one, runs.strategy):
        raise NotEqual("other samples than one process", where)
    return f"{len(seen)} samples, none twice"


def accumulation(runs: Runs) -> str:
    got = _compare(runs.big, runs.one, "loss", LOSS)
    _compare(runs.big, runs.one, "grad_norm", GRAD_NORM)
    return got


def loss_curve(runs: Runs) -> str:
    return _compare(runs.one, runs.strategy, "loss", LOSS)


def gradient_norm(runs: Runs) -> str:
    return _compare(runs.one, runs.strategy, "grad_norm", GRAD_NORM)


def each_gradient(runs: Runs) -> str:
    differing = gradients(runs.one, runs.strategy)
    total = len(runs.one.tensors("gradients") or {})
    if differing:
        raise NotEqual(f"{len(differing)} of {total} parameters differ", f"in the first step, first in {differing[0]}")
    return f"{total} parameters"


def _compare(expected: RunRecord, got: RunRecord, series: str, tolerance: float) -> str:
    want, have = getattr(expected, series), getattr(got, series)
    if not have:
        raise NotEqual("nothing is logged", f"the module tracks no train/{series}")
    difference, each = relative_difference(want, have)
    if difference > tolerance:
        step = next(step for step, value in each.items() if value > tolerance)
        where = f"from step {step} on ({have[step]:.6g} instead of {want.get(step, float('nan')):.6g}): "
        raise NotEqual(f"{difference:.1e}", where + trace(expected, got))
    return f"{difference:.1e} over {len(each)} steps"


def kill_and_resume(runs: Runs) -> str:
    last = max(runs.killed.loss, default=0)
    first = min(runs.resumed.loss, default=0)
    if first != runs.kept_step + 1:
        where = f"killed after step {last} with a checkpoint of step {runs.kept_step}, it went on with step {first}"
        raise NotEqual("another step", where)
    difference, each = relative_difference(runs.whole.loss, runs.resumed.loss)
    if difference > 0:
        step = next(step for step, value in each.items() if value > 0)
        where = f"from step {step} on: {trace_resumed(runs.whole, runs.resumed)}"
        raise NotEqual(f"losses differ by {difference:.1e}", where)
    return f"steps {first}-{max(each)} bit-identical"


def resume_on_fewer(runs: Runs) -> str:
    assert runs.strategy.ok
    try:
        fewer = runs.fewer
    except InputError as error:
        raise NotOffered(str(error)) from error
    except RunFailed as failure:
        if failure.refusal:
            raise NotOffered(failure.refusal) from failure
        raise
    difference, each = relative_difference(runs.strategy.loss, fewer.loss)
    if difference > LOSS:
        step = next(step for step, value in each.items() if value > LOSS)
        raise NotEqual(f"{difference:.1e}", f"from step {step} on: {trace_resumed(runs.strategy, fewer)}")
    return f"{difference:.1e}, {runs.small.processes} to {fewer.size} processes"


def exported_model(runs: Runs) -> str:
    trained = runs.strategy
    try:
        folder = runs.export()
    except RunFailed as failure:
        if failure.refusal:
            raise NotOffered(failure.refusal) from failure
        raise
    weights = _weights(folder)
    trained_weights = {name.removeprefix("model."): tensor for name, tensor in trained.end.items()}
    if name := first_difference(trained_weights, {name: weights[name] for name in trained_weights if name in weights}):
        raise NotEqual("other weights", f"first in {name}")
    batch, logits = trained.tensors("logits") or ({}, None)
    if logits is None or not (folder / "config.json").exists():
        return "weights equal; logits are not a transformers model's"
    difference = ((_logits(folder, batch) - logits).abs().max() / logits.abs().max()).item()
    if not difference <= LOGITS:
        raise NotEqual(f"logits differ by {difference:.1e}", f"the weights are the same: what differs is in {folder}")
    return f"weights equal, logits within {difference:.1e}"


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    """Of an exported model, by the names that it has in memory."""
    if (folder / "config.json").exists():
        return _load(folder).state_dict()
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


@torch.no_grad()
def _logits(folder: Path, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    inputs = {name: batch[name] for name in ("input_ids", "position_ids") if name in batch}
    return _load(folder)(**inputs, use_cache=False).logits


def _load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # in the middle of the table
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).eval()


CHECKS = (
    Check("starting weights over strategies", "one process = ddp = strategy", starting_weights),
    Check("every rank sees its samples once", "those of one process", each_sample_once),
    Check("accumulation = one big batch", f"loss within {LOSS:.0e}", accumulation),
    Check("loss curve = one process", f"within {LOSS:.0e}", loss_curve),
    Check("gradient norm = one process", f"within {GRAD_NORM:.0e}", gradient_norm),
    Check("each gradient = one process", f"within {GRADIENT:.0e} of its largest value", each_gradient),
    Check("ranks agree on what they share", "equal parameters and buffers", shared_tensors),
    Check("kill and resume = never stopping", "bit-identical losses", kill_and_resume),
    Check("resume on fewer processes", f"loss within {LOSS:.0e}", resume_on_fewer),
    Check("checkpoint -> exported model", f"same logits within {LOGITS:.0e}", exported_model),
)
