"""The checks of a rehearsal, in the order in which they are printed.

A check compares trainings (runs.py); if they differ, it names the first difference (root_cause.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import InputError
from . import exported_model, source_order
from .compare import GRADIENT, first_difference, gradients, relative_difference, replicas, samples
from .leakage import sentence
from .record import RunRecord
from .report import Result, Verdict
from .root_cause import disagreement, lost_at_the_end, trace, trace_resumed
from .runs import RunFailed, Runs

NOT_POSSIBLE = "not possible here"
LOSS, GRAD_NORM, LOGITS = 1e-5, 1e-4, 1e-5  # tolerated relative differences, in fp32


class NotEqual(Exception):
    """A check failed.

    Args:
        got: What was found.
        where: The step, if it is known.
        cause: The first difference and the code to inspect; several checks may have the same cause.
    """

    def __init__(self, got: str, cause: str, where: str = "") -> None:
        super().__init__(got)
        self.got = got
        self.where = where
        self.cause = cause


class NotOffered(Exception):
    """The strategy or the model does not support what the check needs."""

    def __init__(self, why: str, got: str = NOT_POSSIBLE) -> None:
        super().__init__(why)
        self.got = got


@dataclass(frozen=True)
class Check:
    """A check: one line of the report.

    Args:
        name: What is compared.
        expected: What must hold.
        compare: Returns what was found; raises NotEqual, NotOffered or RunFailed.
        reads_source: Needs `--keep_data`.
    """

    name: str
    expected: str
    compare: Callable[[Runs], str]
    reads_source: bool = False

    def run(self, runs: Runs) -> Result:
        """Runs the trainings that no earlier check has run, compares, and returns the result."""
        started = time.perf_counter()
        if runs.hung:
            return Result(self.name, self.expected, f"{runs.hung!r} hung, see above", "not run")
        verdict: Verdict = "pass"
        where = cause = ""
        try:
            got = self.compare(runs)
        except NotEqual as difference:
            got, where, cause, verdict = difference.got, difference.where, difference.cause, "FAIL"
        except NotOffered as limit:
            got, where, verdict = limit.got, str(limit), "limit"
        except RunFailed as failure:
            if failure.refusal and failure.name in ("fewer", "export"):
                got, where, verdict = NOT_POSSIBLE, failure.refusal, "limit"
            elif failure.is_known:
                got, verdict = f"{failure.name!r} failed, see above", "not run"
            else:
                got, cause, verdict = "a training failed", str(failure), "FAIL"
        return Result(self.name, self.expected, got, verdict, where, time.perf_counter() - started, cause)


def starting_weights(runs: Runs) -> str:
    for other in (runs.ddp, runs.strategy):
        if name := first_difference(runs.one.start, other.start):
            owner = other.owner(name)
            raise NotEqual(
                f"{other.folder.name} differs from one", f"the starting weights differ first in {name}; {owner}"
            )
    return f"{len(runs.one.start)} tensors, bit-identical"


def every_gradient(runs: Runs) -> str:
    missing = runs.one.tensors("missing") or {}
    used, unused = ([name for name, ran in missing.items() if ran is kind] for kind in (True, False))
    if used:
        raise NotEqual(
            f"{len(used)} parameters get none",
            f"{used[0]} gets no gradient though the forward of its module runs ({runs.one.owner(used[0])}): its"
            " output is detached, or the loss does not use it; if intended, freeze it with requires_grad_(False)",
        )
    if unused:
        raise NotOffered(f"their modules are never called, first {unused[0]}", f"{len(unused)} get none")
    return f"{len(runs.one.tensors('gradients') or {})} parameters"


def no_other_document(runs: Runs) -> str:
    if (key := _probed(runs, "documents")) is None:
        raise NotOffered("no row of the first batches has two documents, or data.cross_document_attention is true")
    if key:
        raise NotEqual("outputs change", sentence(key, runs.one.places))
    return "no output changes"


def no_later_token(runs: Runs) -> str:
    if (key := _probed(runs, "future")) is None:
        raise NotOffered("forward does not return one row of logits for each token")
    if key:
        raise NotEqual("outputs change", sentence(key, runs.one.places))
    return "no output changes"


def _probed(runs: Runs, name: str) -> str | None:
    return (runs.one.tensors("leakage") or {}).get(name)


def order_of_source(runs: Runs) -> str:
    if runs.source is None:
        raise NotOffered("the text is generated; --keep_data reads the configured source")
    try:
        num, difference = source_order.difference(runs.source)
    except RuntimeError as error:
        raise NotOffered(str(error)) from error
    if difference:
        raise NotEqual("another order", difference)
    return f"{num} documents, read twice"


def shared_tensors(runs: Runs) -> str:
    if found := replicas(runs.strategy):
        raise NotEqual("ranks differ", disagreement(runs.strategy, found))
    return f"{runs.small.processes} ranks agree after each step"


def each_sample_once(runs: Runs) -> str:
    seen: dict[str, tuple[int, int]] = {}
    order = f"; the order comes from {runs.strategy.places.get('order', 'the loader')}"
    for step, rows in sorted(runs.strategy.rows().items()):
        for row, rank in rows:
            if row in seen and runs.small.is_text:  # other training sets may be over earlier
                first_step, first_rank = seen[row]
                where = f"step {step} of rank {rank} repeats a sample of step {first_step} of rank {first_rank}"
                raise NotEqual("a sample came twice", where + order)
            seen[row] = (step, rank)
    if where := samples(runs.one, runs.strategy):
        raise NotEqual("other samples than one process", where + order)
    return f"{len(seen)} samples, {'none twice' if runs.small.is_text else 'in the same order'}"


def accumulation(runs: Runs) -> str:
    if not runs.small.is_text and "batch_size" not in runs.small.config["data"]:
        raise NotOffered("the datamodule has no argument batch_size")
    got = _compare(runs, runs.big, runs.one, "loss", LOSS)
    _compare(runs, runs.big, runs.one, "grad_norm", GRAD_NORM)
    return got


def loss_curve(runs: Runs) -> str:
    return _compare(runs, runs.one, runs.strategy, "loss", LOSS)


def gradient_norm(runs: Runs) -> str:
    return _compare(runs, runs.one, runs.strategy, "grad_norm", GRAD_NORM)


def each_gradient(runs: Runs) -> str:
    differing = gradients(runs.one, runs.strategy)
    total = len(runs.one.tensors("gradients") or {})
    if differing:
        _refuse_draws(runs.one)
        raise NotEqual(f"{len(differing)} of {total} parameters differ", trace(runs.one, runs.strategy), "in step 1")
    return f"{total} parameters"


def _compare(runs: Runs, expected: RunRecord, got: RunRecord, series: str, tolerance: float) -> str:
    want, have = getattr(expected, series), getattr(got, series)
    if not have:
        raise NotEqual("nothing is logged", f"the module tracks no train/{series}")
    difference, each = relative_difference(want, have)
    if difference > tolerance:
        _refuse_draws(runs.one)
        step = next(step for step, value in each.items() if value > tolerance)
        where = f"from step {step} on ({have[step]:.6g} instead of {want.get(step, float('nan')):.6g})"
        raise NotEqual(f"{difference:.1e}", trace(expected, got), where)
    return f"{difference:.1e} over {len(each)} steps{', dropout off' * bool(_draws(runs.one))}"


def _draws(record: RunRecord) -> dict[str, str]:
    return record.tensors("draws") or {}


def _refuse_draws(record: RunRecord) -> None:
    """Refuses a comparison if the forward pass draws random numbers other than dropout, which is off.

    Raises:
        NotOffered: it does.
    """
    for name, what in _draws(record).items():
        if what != "dropout":
            where = record.places.get(name, "?")
            raise NotOffered(
                f"the forward of {name or 'the module'} ({where}) draws random numbers other than torch's dropout;"
                " they differ between ranks: turn that off to compare"
            )


def kill_and_resume(runs: Runs) -> str:
    last = max(runs.killed.loss, default=0)
    first = min(runs.resumed.loss, default=0)
    if first != runs.kept_step + 1:
        where = f"killed after step {last} with a checkpoint of step {runs.kept_step}, it resumed with step {first}"
        raise NotEqual("another step", where)
    difference, each = relative_difference(runs.uninterrupted.loss, runs.resumed.loss)
    if difference > 0:
        step = next(step for step, value in each.items() if value > 0)
        cause = trace_resumed(runs.uninterrupted, runs.resumed)
        raise NotEqual(f"losses differ by {difference:.1e}", cause, f"from step {step} on")
    if lost := lost_at_the_end(runs.uninterrupted, runs.resumed):
        raise NotEqual("losses agree, other state does not", lost)
    return f"steps {first}-{max(each)} bit-identical"


def resume_on_fewer(runs: Runs) -> str:
    assert runs.strategy.ok
    try:
        fewer = runs.fewer
    except InputError as error:
        raise NotOffered(str(error)) from error
    difference, each = relative_difference(runs.strategy.loss, fewer.loss)
    if difference > LOSS:
        _refuse_draws(runs.strategy)
        step = next(step for step, value in each.items() if value > LOSS)
        raise NotEqual(f"{difference:.1e}", trace_resumed(runs.strategy, fewer), f"from step {step} on")
    return f"{difference:.1e}, {runs.small.processes} to {fewer.size} processes"


def exported_logits(runs: Runs) -> str:
    trained = runs.strategy
    folder = runs.export()
    weights = exported_model.weights(folder)
    trained_weights = {  # the module's other state is not exported
        name.removeprefix("model."): tensor for name, tensor in trained.end.items() if name.startswith("model.")
    }
    if name := first_difference(trained_weights, {name: weights[name] for name in trained_weights if name in weights}):
        raise NotEqual("other weights", f"first in {name}; {trained.owner('model.' + name)}")
    batch, logits = trained.tensors("logits") or ({}, None)
    if logits is None or not (folder / "config.json").exists():
        return "weights equal; logits not compared: it is not a transformers model"
    difference = ((exported_model.logits(folder, batch) - logits).abs().max() / logits.abs().max()).item()
    if not difference <= LOGITS:
        forward = trained.places.get("forward", "?")
        cause = f"the weights in {folder} are equal: forward ({forward}) computes what the exported model does not"
        raise NotEqual(f"logits differ by {difference:.1e}", cause)
    return f"weights equal, logits within {difference:.1e}"


CHECKS = (
    Check("the source keeps its order", "two readings are equal", order_of_source, reads_source=True),
    Check("a document sees itself alone", "other documents change nothing", no_other_document),
    Check("no token sees a later one", "later tokens change nothing", no_later_token),
    Check("every parameter gets a gradient", "all trainable parameters", every_gradient),
    Check("starting weights over strategies", "one process = ddp = strategy", starting_weights),
    Check("every rank sees its samples once", "the samples of one process", each_sample_once),
    Check("accumulation = one big batch", f"loss within {LOSS:.0e}", accumulation),
    Check("loss curve = one process", f"within {LOSS:.0e}", loss_curve),
    Check("gradient norm = one process", f"within {GRAD_NORM:.0e}", gradient_norm),
    Check("each gradient = one process", f"within {GRADIENT:.0e} of the largest value", each_gradient),
    Check("ranks agree on what they share", "equal parameters, buffers", shared_tensors),
    Check("kill and resume = uninterrupted", "bit-identical losses", kill_and_resume),
    Check("resume on fewer processes", f"loss within {LOSS:.0e}", resume_on_fewer),
    Check("checkpoint -> exported model", f"same logits within {LOGITS:.0e}", exported_logits),
)
