"""The checks of a rehearsal, in the order in which they are printed.

A check compares trainings (runs.py); if they differ, it names the first difference (compare.py)."""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from . import compare
from .forward_hooks import with_location
from .record import RunRecord
from .report import NotEqual, NotOffered, Result, Verdict
from .runs import RunFailed, Runs
from .shrink_config import SAVED_STEP

LOSS, GRAD_NORM, EVALUATION = 1e-5, 1e-4, 1e-5  # relative differences, in fp32
OFF = {  # what a training turns off, by FirstStep, in the words of a result
    "dropout": "dropout off",
    "norms": "BatchNorm by running statistics",
    "samples": "augmentations repeated",
    "draws": "random numbers repeated",
}
SHOWN = {  # what a token must not see, by LeakageTest, in the words of a result
    "documents": "another document",
    "future": "a later token",
    "place": "where in its row its document is",
}


class Check(NamedTuple):
    """One line of the report. `compare` returns what was found; raises NotEqual or RunFailed."""

    name: str
    expected: str
    compare: Callable[[Runs], str]


def run_checks(runs: Runs, checks: Iterable[Check]) -> Iterator[Result]:
    """Runs the trainings that each check needs and no earlier one has run; stops when one of them
    fails."""
    for check in checks:
        start = time.perf_counter()
        has_failed = False
        verdict: Verdict = "pass"
        where = cause = ""
        try:
            got = check.compare(runs)
        except NotEqual as error:
            got, where, cause, verdict = error.got, error.where, error.cause, error.verdict
        except RunFailed as error:
            has_failed = True
            got, verdict = "a training failed", "FAIL"
            cause = f"{error}; the checks that follow are not run"
        time_s = time.perf_counter() - start
        yield Result(check.name, check.expected, got, verdict, where, time_s, cause)
        if has_failed:
            return


# ---- one process: what its step reads and trains -----------------------------------------------


def no_leakage(runs: Runs) -> str:
    first_changes, places = runs.one.tensors("leakage"), runs.one.places
    for tested, key in first_changes.items():
        if key:
            forward = f"forward ({places.get('forward', '?')}) shows a token {SHOWN[tested]}"
            cause = f"the first change is in {with_location(key, places)}; {forward}"
            raise NotEqual("outputs change", cause)
    if not first_changes:
        raise NotOffered("forward does not return one row of logits for each token")
    return f"{' and '.join(first_changes)}: no output changes"


def every_gradient(runs: Runs) -> str:
    one, missing = runs.one, runs.one.tensors("missing")
    frozen = "if intended, freeze it with requires_grad_(False)"
    unreached = [name for name, has_run in missing.items() if has_run]
    if unreached:
        first = f"{unreached[0]} gets no gradient though the forward of its module runs"
        reason = f"({one.owner(unreached[0])}): its output is detached, or the loss does not use it"
        raise NotEqual(f"{len(unreached)} parameters get none", f"{first} {reason}; {frozen}")
    if missing:
        reason = f"their modules are never called, first {next(iter(missing))}"
        raise NotOffered(reason, f"{len(missing)} get none")
    gradients = one.tensors("gradients")
    for name, gradient in gradients.items():
        if name not in one.start or not gradient.any():
            continue
        if one.start[name].equal(one.end[name]):
            optimizer = f"configure_optimizers, {one.places.get('configure_optimizers', '?')}"
            unchanged = f"{name} gets gradients ({one.owner(name)}), and no step changes it"
            cause = f"{unchanged}: give it to the optimizer ({optimizer}); {frozen}"
            raise NotEqual("a parameter never changes", cause)
    return f"{len(gradients)} parameters"


# ---- the same training on several processes --------------------------------------------------


def starting_weights(runs: Runs) -> str:
    first = compare.first_difference(runs.one.start, runs.strategy.start)
    if first:
        cause = f"first in {first}; {runs.strategy.owner(first)}"
        raise NotEqual("strategy differs from one process", cause)
    return f"{len(runs.one.start)} tensors, bit-identical"


def refuse_other_batches(runs: Runs) -> None:
    """Raises NotOffered if one process cannot train on the batches of several."""
    if runs.small.is_manual and not runs.small.has_batch_size:
        raise NotOffered(
            "Lightning accumulates nothing under manual optimization, and the datamodule has no"
            " argument batch_size: one process has no batch like that of several"
        )


def each_sample_once(runs: Runs) -> str:
    refuse_other_batches(runs)
    cause = compare.samples(runs.one, runs.strategy)
    if cause:
        raise NotEqual("other samples than one process", cause)
    num_samples = sum(len(rows) for rows in runs.strategy.rows().values())
    return f"{num_samples} samples"


def accumulation(runs: Runs) -> str:
    if runs.small.is_manual:
        raise NotOffered("a module with manual optimization accumulates by itself, if at all")
    if not runs.small.is_text and not runs.small.has_batch_size:
        raise NotOffered("the datamodule has no argument batch_size")
    if runs.one.tensors("dropout").get("seeded"):
        refuse_draws(runs.one)
    got = _same_curve(runs.big, runs.one, "loss", LOSS)
    _same_curve(runs.big, runs.one, "grad_norm", GRAD_NORM)
    return got


def _same_curve(
    expected: RunRecord, got: RunRecord, series: str, tolerance: float, is_manual: bool = False
) -> str:
    """Returns the largest difference of two trainings in `series`, a property of RunRecord, in
    words. Raises NotEqual with its cause if it is above `tolerance`."""
    want, have = getattr(expected, series), getattr(got, series)
    if not have and is_manual:
        raise NotOffered(f"train/{series} is not measured under manual optimization")
    if not have:
        raise NotEqual("nothing is logged", f"the module tracks no train/{series}")
    difference, of_steps = compare.relative_difference(want, have)
    if difference > tolerance:
        if is_manual or not expected.tensors("dropout").get("seeded"):
            refuse_draws(expected)  # of other batches; those of equal ones are equal
        step = _first_above(of_steps, tolerance)
        instead = want.get(step, float("nan"))
        where = f"from step {step} on ({have[step]:.6g} instead of {instead:.6g})"
        raise NotEqual(f"{difference:.1e}", compare.trace(expected, got), where)
    text = f"{difference:.1e} over {len(of_steps)} steps"
    for name in expected.tensors("dropout"):
        if name in OFF:
            text += f", {OFF[name]}"
    return text


def loss_curve(runs: Runs) -> str:
    refuse_other_batches(runs)
    return _same_curve(runs.one, runs.strategy, "loss", LOSS, runs.small.is_manual)


def gradient_norm(runs: Runs) -> str:
    refuse_other_batches(runs)
    return _same_curve(runs.one, runs.strategy, "grad_norm", GRAD_NORM, runs.small.is_manual)


def _first_above(differences: dict[compare.K, float], tolerance: float) -> compare.K:
    return next(key for key, value in differences.items() if value > tolerance)


def refuse_draws(record: RunRecord) -> None:
    """Raises NotOffered if a step draws random numbers other than dropout's, which is off."""
    if not record.draws:
        return
    draws = "draws random numbers other than torch's dropout, which differ between ranks"
    if record.tensors("dropout").get("seeded"):
        draws = "draws random numbers, which are others for a batch of other rows"
    step = record.places.get("training_step")
    raise NotOffered(f"training_step ({step}) or a module {draws}: turn that off")


def each_gradient(runs: Runs) -> str:
    refuse_other_batches(runs)
    differing = compare.gradients(runs.one, runs.strategy)
    total = len(runs.one.tensors("gradients"))
    if differing:
        if runs.small.is_manual or not runs.one.tensors("dropout").get("seeded"):
            refuse_draws(runs.one)
        got = f"{len(differing)} of {total} parameters differ"
        raise NotEqual(got, compare.trace(runs.one, runs.strategy), "in step 1")
    return f"{total} parameters"


def shared_tensors(runs: Runs) -> str:
    differing = compare.replicas(runs.strategy)
    if differing:
        raise NotEqual("ranks differ", compare.disagreement(runs.strategy, differing))
    return f"{runs.small.processes} ranks agree after each step"


def evaluation(runs: Runs) -> str:
    """The same rows in larger batches and over ranks: a mean of means differs."""
    refuse_other_batches(runs)
    num = 0
    others = [(runs.big, "batches"), (runs.strategy, "ranks")]
    seeded = runs.one.tensors("dropout").get("seeded")
    if seeded and runs.one.draws:  # which a larger batch does otherwise
        others = others[1:]
    for other, parts in others:
        difference, _ = compare.relative_difference(runs.one.loss, other.loss)
        if difference > LOSS:
            raise NotOffered("the weights that it evaluates differ, see above")
        for step, metrics in sorted(other.eval().items()):
            num += len(metrics)
            _compare_metrics(runs.one, other, step, parts)
    if not num:
        raise NotOffered("no metric is logged in validation")
    return f"{num} values"


def _compare_metrics(one: RunRecord, other: RunRecord, step: int, parts: str) -> None:
    """Raises NotEqual if the validation after `step` has other metrics than in the training on one
    process. `parts`: into which `other` divides the same rows otherwise, batches or ranks."""
    metrics = other.eval()[step]
    want = one.eval().get(step, metrics)
    difference, of_metrics = compare.relative_difference(want, metrics)
    if not metrics or not difference > EVALUATION:
        return
    place = one.places.get("validation_step")
    if one.tensors("dropout").get("validation"):
        raise NotOffered(
            f"validation_step ({place}) draws random numbers, which differ between batches of other"
            " rows"
        )
    name = _first_above(of_metrics, EVALUATION)
    where = f"step {step} of {other.folder.name!r} has {name} {metrics[name]:.6g}"
    where += f", not {want.get(name)}"
    cause = f"the same rows in other {parts} have another result: add up values and counts over"
    cause += f" all {parts} and divide once, at the end (validation_step, {place})"
    raise NotEqual(f"{name} differs", cause, where)


# ---- checkpoints -----------------------------------------------------------------------------


def kill_and_resume(runs: Runs) -> str:
    last = max(runs.killed.loss, default=0)
    first = min(runs.resumed.loss, default=0)
    saved = SAVED_STEP
    if runs.small.is_manual:  # Lightning counts the steps of each optimizer: 2, 4, 6
        saved = runs.resumed.events("step")[0]["step"]
    later = [step for step in runs.uninterrupted.loss if step > saved]
    if not saved or first != min(later, default=0):
        killed = f"killed after step {last} with a checkpoint of step {saved}"
        raise NotEqual("another step", f"{killed}, it resumed with step {first}")
    difference, of_steps = compare.relative_difference(runs.uninterrupted.loss, runs.resumed.loss)
    if difference > 0:
        cause = compare.trace_resumed(runs.uninterrupted, runs.resumed)
        where = f"from step {_first_above(of_steps, 0)} on"
        raise NotEqual(f"losses differ by {difference:.1e}", cause, where)
    cause = compare.lost_at_the_end(runs.uninterrupted, runs.resumed)
    if cause:
        raise NotEqual("losses agree, other state does not", cause)
    return f"steps {first}-{max(of_steps)} bit-identical"


def exported(runs: Runs) -> str:
    try:
        return runs.export()
    except RunFailed as failure:
        if failure.refusal and "not what was trained" not in failure.refusal:
            raise NotOffered(failure.refusal) from failure
        raise


CHECKS = (
    Check("no token sees what it must not", "other documents, later tokens", no_leakage),
    Check("every parameter gets a gradient", "all that are trained", every_gradient),
    Check("starting weights = one process", "bit-identical", starting_weights),
    Check("every rank sees its samples once", "the samples of one process", each_sample_once),
    Check("accumulation = one big batch", f"loss within {LOSS:.0e}", accumulation),
    Check("loss curve = one process", f"within {LOSS:.0e}", loss_curve),
    Check("gradient norm = one process", f"within {GRAD_NORM:.0e}", gradient_norm),
    Check(
        "each gradient = one process",
        f"within {compare.GRADIENT:.0e} of the largest",
        each_gradient,
    ),
    Check("ranks agree on what they share", "equal parameters, buffers", shared_tensors),
    Check("evaluation = one big batch", f"within {EVALUATION:.0e}", evaluation),
    Check("kill and resume = uninterrupted", "bit-identical losses", kill_and_resume),
    Check("checkpoint -> exported model", "the trained model's logits", exported),
)
