"""The checks of a rehearsal, in the order in which they are printed.

A check compares trainings (runs.py); if they differ, it names the first difference (root_cause.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...errors import InputError
from . import compare
from .forward_hooks import with_location
from .interventions import NEXT
from .record import RunRecord
from .report import NOT_POSSIBLE, NotEqual, NotOffered, Result, Verdict
from .runs import HASH_SEED, RunFailed, Runs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOSS, GRAD_NORM, LOGITS, EVALUATION = 1e-5, 1e-4, 1e-5, 1e-4  # relative differences, in fp32


@dataclass(frozen=True)
class Check:
    """One line of the report. `compare` returns what was found; raises NotEqual or RunFailed."""

    name: str
    expected: str
    compare: Callable[[Runs], str]

    def run(self, runs: Runs) -> Result:
        """Runs the trainings that no earlier check has run, compares, and returns the result."""
        started = time.perf_counter()
        verdict: Verdict = "pass"
        got = where = cause = ""
        try:
            if runs.hung:
                raise NotEqual(f"{runs.hung!r} hung, see above", "", verdict="not run")
            got = self.compare(runs)
        except NotEqual as found:
            got, where, cause, verdict = found.got, found.where, found.cause, found.verdict
        except RunFailed as failure:
            if failure.refusal and failure.name in ("fewer", "export"):
                got, where, verdict = NOT_POSSIBLE, failure.refusal, "limit"
            elif failure.is_known:
                got, verdict = f"{failure.name!r} failed, see above", "not run"
            else:
                got, cause, verdict = "a training failed", str(failure), "FAIL"
        seconds = time.perf_counter() - started
        return Result(self.name, self.expected, got, verdict, where, seconds, cause)


# ---- one process: what its step reads, predicts, trains and draws ------------------------------


def no_other_document(runs: Runs) -> str:
    why = "no row of the first batches has two documents, or data.cross_document_attention is true"
    return _no_leakage(runs, "documents", why, "passes the document boundaries")


def no_later_token(runs: Runs) -> str:
    why = "forward does not return one row of logits for each token"
    return _no_leakage(runs, "future", why, "shows a token what comes after it")


def _no_leakage(runs: Runs, name: str, why_not: str, what: str) -> str:
    key, places = runs.one.tensors("leakage").get(name), runs.one.places
    if key is None:
        raise NotOffered(why_not)
    if key:
        forward = f"forward ({places.get('forward', '?')}) {what}"
        cause = f"the first change is in {with_location(key, places)}; {forward}"
        raise NotEqual("outputs change", cause)
    return "no output changes"


def labels_are_next(runs: Runs) -> str:
    shifts, places = runs.one.tensors("shifts"), runs.one.places
    step = f"training_step, {places.get('training_step', '?')}"
    if shifts.get("loss", NEXT) == NEXT and (masked := shifts.get("masked")):
        what = f"the loss counts {masked} tokens of the first micro-batch whose label is -100"
        raise NotEqual("masked labels count", f"{what}: exclude them ({step})")
    if "loss" not in shifts:
        raise NotOffered("no module returns logits of whole rows, or they predict no next token")
    shift = shifts["loss"]
    if shift == NEXT:
        return "its loss predicts token t+1"
    where = f"batch['labels'] hold it already (transform, {places.get('transform', '?')})"
    if shifts.get("batch") != shift:
        more = shift - shifts.get("batch", 0)
        where = f"the loss ({step}) shifts what batch['labels'] hold by {more} more: shift once"
    raise NotEqual(f"it predicts token t{shift:+d}", where)


def every_gradient(runs: Runs) -> str:
    one, missing = runs.one, runs.one.tensors("missing")
    frozen = "if intended, freeze it with requires_grad_(False)"
    unreached = [name for name, has_run in missing.items() if has_run]
    if unreached:
        what = f"{unreached[0]} gets no gradient though the forward of its module runs"
        why = "its output is detached, or the loss does not use it"
        cause = f"{what} ({one.owner(unreached[0])}): {why}; {frozen}"
        raise NotEqual(f"{len(unreached)} parameters get none", cause)
    if missing:
        why = f"their modules are never called, first {next(iter(missing))}"
        raise NotOffered(why, f"{len(missing)} get none")
    found = one.tensors("gradients")
    for name, gradient in found.items():
        before, after = one.start.get(name), one.end.get(name)
        if before is not None and after is not None and gradient.any() and before.equal(after):
            optimizer = f"configure_optimizers, {one.places.get('configure_optimizers', '?')}"
            what = f"{name} gets gradients ({one.owner(name)}), and no step changes it"
            cause = f"{what}: give it to the optimizer ({optimizer}); {frozen}"
            raise NotEqual("a parameter never changes", cause)
    return f"{len(found)} parameters"


def tied_weights(runs: Runs) -> str:
    for run in (runs.one, runs.strategy):
        if untied := run.tensors("untied"):
            what = f"{untied} of {run.folder.name!r} are two tensors after training"
            builders = ("build_model", "configure_model")
            code = "; ".join(f"{name}, {run.places.get(name, '?')}" for name in builders)
            why = f"look for code that replaces one of them ({code})"
            raise NotEqual("two tensors", f"tie_word_embeddings is true, and {what}: {why}")
    return "in one process and under the strategy"


def no_seed_in_a_step(runs: Runs) -> str:
    for function, where in runs.one.tensors("seeds").items():
        what = f"{where} calls {function} in the training step, so that dropout and everything else"
        cure = "seed once, with seed_everything, or use a torch.Generator"
        cause = f"{what} that is random repeats: {cure}"
        raise NotEqual("every step draws the same numbers", cause)
    return "none does"


def other_hash_seed(runs: Runs) -> str:
    one, other = runs.one, runs.other_hash
    first = compare.first_difference(one.start, other.start) or compare.samples(one, other)
    if first or one.loss != other.loss:
        what = f"with PYTHONHASHSEED {HASH_SEED}, which ranks do not share, "
        what += compare.trace(one, other)
        why = "something is ordered by hash() or a set (sort it), or reads a pid or a time"
        raise NotEqual("another training", f"{what}: {why}")
    return f"{len(other.loss)} losses bit-identical"


# ---- the same training on several processes --------------------------------------------------


def starting_weights(runs: Runs) -> str:
    for other in (runs.ddp, runs.strategy):
        if name := compare.first_difference(runs.one.start, other.start):
            cause = f"the starting weights differ first in {name}; {other.owner(name)}"
            raise NotEqual(f"{other.folder.name} differs from one", cause)
    return f"{len(runs.one.start)} tensors, bit-identical"


def each_sample_once(runs: Runs) -> str:
    trained = runs.strategy
    order = f"; the order comes from {trained.places.get('order', 'the loader')}"
    seen: dict[str, str] = {}
    for step, rows in sorted(trained.rows().items()):
        for row, rank in rows:
            where = f"step {step} of rank {rank}"
            if row in seen and runs.small.is_text:  # the generated text has no row twice
                raise NotEqual("a sample twice", f"{where} repeats a sample of {seen[row]}{order}")
            seen[row] = where
    if where := compare.samples(runs.one, trained):
        raise NotEqual("other samples than one process", where + order)
    return f"{len(seen)} samples, {'none twice' if runs.small.is_text else 'in the same order'}"


def accumulation(runs: Runs) -> str:
    if not runs.small.is_text and "batch_size" not in runs.small.config["data"]:
        raise NotOffered("the datamodule has no argument batch_size")
    got = _same_curve(runs.big, runs.one, "loss", LOSS)
    _same_curve(runs.big, runs.one, "grad_norm", GRAD_NORM)
    return got


def loss_curve(runs: Runs) -> str:
    return _same_curve(runs.one, runs.strategy, "loss", LOSS)


def gradient_norm(runs: Runs) -> str:
    return _same_curve(runs.one, runs.strategy, "grad_norm", GRAD_NORM)


def _same_curve(expected: RunRecord, got: RunRecord, series: str, tolerance: float) -> str:
    want, have = getattr(expected, series), getattr(got, series)
    if not have:
        raise NotEqual("nothing is logged", f"the module tracks no train/{series}")
    difference, each = compare.relative_difference(want, have)
    if difference > tolerance:
        _refuse_draws(expected)
        step = _first_above(each, tolerance)
        instead = want.get(step, float("nan"))
        where = f"from step {step} on ({have[step]:.6g} instead of {instead:.6g})"
        raise NotEqual(f"{difference:.1e}", compare.trace(expected, got), where)
    note = ", dropout off" if expected.tensors("draws") else ""
    return f"{difference:.1e} over {len(each)} steps{note}"


def _first_above(differences: dict[int, float], tolerance: float) -> int:
    return next(step for step, value in differences.items() if value > tolerance)


def _refuse_draws(record: RunRecord) -> None:
    """Raises NotOffered if forward draws random numbers other than dropout, which is off."""
    for name, what in record.tensors("draws").items():
        if what != "dropout":
            forward = f"the forward of {name or 'the module'} ({record.places.get(name, '?')})"
            why = "draws random numbers other than torch's dropout, which differ between ranks"
            raise NotOffered(f"{forward} {why}: turn that off to compare")


def each_gradient(runs: Runs) -> str:
    differing, total = (
        compare.gradients(runs.one, runs.strategy),
        len(runs.one.tensors("gradients")),
    )
    if differing:
        _refuse_draws(runs.one)
        got = f"{len(differing)} of {total} parameters differ"
        raise NotEqual(got, compare.trace(runs.one, runs.strategy), "in step 1")
    return f"{total} parameters"


def shared_tensors(runs: Runs) -> str:
    if found := compare.replicas(runs.strategy):
        raise NotEqual("ranks differ", compare.disagreement(runs.strategy, found))
    return f"{runs.small.processes} ranks agree after each step"


def evaluation(runs: Runs) -> str:
    """The same rows in larger batches and over ranks: a mean of means differs."""
    want, num = runs.one.eval(), 0
    place = runs.one.places.get("validation_step", "?")
    if where := runs.one.tensors("dropout"):
        cause = f"an evaluation drops out ({where}): leave model.train() to Lightning, and give"
        raise NotEqual("dropout", f"{cause} training=self.training to functions that drop out")
    for other, means in ((runs.big, "batches"), (runs.strategy, "ranks")):
        if not compare.relative_difference(runs.one.loss, other.loss)[0] <= LOSS:
            raise NotOffered("the weights that it evaluates differ, see above")
        for step, metrics in sorted(other.eval().items()):
            for name, value in want.get(step, {}).items():
                num += 1
                have = metrics.get(name, float("nan"))
                if compare.relative_difference({step: value}, {step: have})[0] <= EVALUATION:
                    continue
                run = other.folder.name
                where = f"step {step} of {run!r} has {name} {have:.6g}, not {value:.6g}"
                cause = f"the same rows in other {means} have another result: add up values and"
                cause += f" counts over all {means} and divide once, at the end"
                raise NotEqual(f"{name} differs", f"{cause} (validation_step, {place})", where)
    if not num:
        raise NotOffered("no metric is logged in validation")
    return f"{num} values"


# ---- checkpoints -----------------------------------------------------------------------------


def kill_and_resume(runs: Runs) -> str:
    last = max(runs.killed.loss, default=0)
    first = min(runs.resumed.loss, default=0)
    if first != runs.kept_step + 1:
        killed = f"killed after step {last} with a checkpoint of step {runs.kept_step}"
        raise NotEqual("another step", f"{killed}, it resumed with step {first}")
    difference, each = compare.relative_difference(runs.uninterrupted.loss, runs.resumed.loss)
    if difference > 0:
        cause = compare.trace_resumed(runs.uninterrupted, runs.resumed)
        where = f"from step {_first_above(each, 0)} on"
        raise NotEqual(f"losses differ by {difference:.1e}", cause, where)
    if lost := compare.lost_at_the_end(runs.uninterrupted, runs.resumed):
        raise NotEqual("losses agree, other state does not", lost)
    return f"steps {first}-{max(each)} bit-identical"


def resume_on_fewer(runs: Runs) -> str:
    try:
        fewer = runs.fewer
    except InputError as error:
        raise NotOffered(str(error)) from error
    difference, each = compare.relative_difference(runs.strategy.loss, fewer.loss)
    if difference > LOSS:
        _refuse_draws(runs.strategy)
        where = f"from step {_first_above(each, LOSS)} on"
        raise NotEqual(f"{difference:.1e}", compare.trace_resumed(runs.strategy, fewer), where)
    return f"{difference:.1e}, {runs.small.processes} to {fewer.size} processes"


def exported_logits(runs: Runs) -> str:
    trained, folder = runs.strategy, runs.export()
    exported, model = _read_exported(folder)
    for name, tensor in trained.end.items():
        key = name.removeprefix("model.")  # other state of the module is not exported
        if key != name and key in exported and not torch.equal(exported[key], tensor):
            raise NotEqual("other weights", f"first in {key}; {trained.owner(name)}")
    batch, want = trained.tensors("logits") or ({}, None)
    if want is None or model is None:
        return "weights equal; logits not compared: it is not a transformers model"
    inputs = {name: batch[name] for name in {"input_ids", "position_ids"} & batch.keys()}
    with torch.no_grad():
        got = model(**inputs, use_cache=False).logits
    difference = ((got - want).abs().max() / want.abs().max()).item()
    if not difference <= LOGITS:
        forward = trained.places.get("forward", "?")
        cause = f"weights are equal: forward ({forward}) computes what the exported model does not"
        raise NotEqual(f"logits differ by {difference:.1e}", cause)
    return f"weights equal, logits within {difference:.1e}"


def _read_exported(folder: Path) -> tuple[dict[str, Tensor], PreTrainedModel | None]:
    """Returns the exported weights, and the model if it is transformers'."""
    if not (folder / "config.json").exists():
        from safetensors.torch import load_file

        return load_file(folder / "model.safetensors"), None
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # it would be printed between the results
    options = {"dtype": torch.float32, "trust_remote_code": False}
    model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    return model.state_dict(), model


CHECKS = (
    Check("a document sees itself alone", "other documents change nothing", no_other_document),
    Check("no token sees a later one", "later tokens change nothing", no_later_token),
    Check("the label of a token is the next", "its loss predicts token t+1", labels_are_next),
    Check("every parameter gets a gradient", "all that are trained", every_gradient),
    Check("tied weights are one tensor", "as the architecture says", tied_weights),
    Check("no generator starts again", "no step seeds one", no_seed_in_a_step),
    Check("a hash seed has no effect", "bit-identical", other_hash_seed),
    Check("starting weights over strategies", "one process = ddp = strategy", starting_weights),
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
    Check("resume on fewer processes", f"loss within {LOSS:.0e}", resume_on_fewer),
    Check("checkpoint -> exported model", f"same logits within {LOGITS:.0e}", exported_logits),
)
