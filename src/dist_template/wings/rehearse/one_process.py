"""Checks of one process: what its training step reads, predicts, trains and draws."""

from __future__ import annotations

from .compare import first_difference, samples
from .forward_hooks import describe
from .report import NotEqual, NotOffered
from .root_cause import trace
from .runs import HASH_SEED, Runs
from .step_probes import NEXT


def no_other_document(runs: Runs) -> str:
    why = "no row of the first batches has two documents, or data.cross_document_attention is true"
    return _no_leakage(runs, "documents", why, "passes the document boundaries")


def no_later_token(runs: Runs) -> str:
    why = "forward does not return one row of logits for each token"
    return _no_leakage(runs, "future", why, "shows a token what comes after it")


def _no_leakage(runs: Runs, name: str, why_not: str, what: str) -> str:
    key, places = (runs.one.tensors("leakage") or {}).get(name), runs.one.places
    if key is None:
        raise NotOffered(why_not)
    if key:
        cause = (
            f"the first change is in {describe(key, places)}; forward"
            f" ({places.get('forward', '?')}) {what}"
        )
        raise NotEqual("outputs change", cause)
    return "no output changes"


def labels_are_next_tokens(runs: Runs) -> str:
    shifts, places = runs.one.tensors("shifts") or {}, runs.one.places
    place = places.get("training_step", "?")
    if shifts.get("loss", NEXT) == NEXT and (masked := shifts.get("masked")):
        what = f"the loss counts {masked} tokens of the first micro-batch whose label is -100"
        raise NotEqual("masked labels count", f"{what}: leave them out (training_step, {place})")
    if "loss" not in shifts:
        raise NotOffered("no module returns logits of whole rows, or they predict no next token")
    if (shift := shifts["loss"]) == NEXT:
        return "its loss predicts token t+1"
    if shifts.get("batch") == shift:
        where = f"batch['labels'] hold it already (transform, {places.get('transform', '?')})"
    else:
        where = f"training_step ({place}) shifts what"
        where += f" batch['labels'] hold by {shift - shifts.get('batch', 0)} more: shift once"
    raise NotEqual(f"it predicts token t{shift:+d}", where)


def every_gradient(runs: Runs) -> str:
    missing = runs.one.tensors("missing") or {}
    used = [name for name, has_run in missing.items() if has_run]
    if used:
        raise NotEqual(
            f"{len(used)} parameters get none",
            f"{used[0]} gets no gradient though the forward of its module runs"
            f" ({runs.one.owner(used[0])}): its output is detached, or the loss does not use it;"
            " if intended, freeze it with requires_grad_(False)",
        )
    if missing:
        why = f"their modules are never called, first {next(iter(missing))}"
        raise NotOffered(why, f"{len(missing)} get none")
    one = runs.one
    for name, gradient in one.gradients.items():
        before, after = (weights.get(name) for weights in (one.start, one.end))
        if before is not None and after is not None and gradient.any() and before.equal(after):
            raise NotEqual(
                "a parameter never changes",
                f"{name} gets gradients ({one.owner(name)}), and no step changes it: give it to the"
                f" optimizer (configure_optimizers, {one.places.get('configure_optimizers', '?')});"
                " if intended, freeze it with requires_grad_(False)",
            )
    return f"{len(one.gradients)} parameters"


def tied_weights(runs: Runs) -> str:
    for run in (runs.one, runs.strategy):
        if untied := (run.tensors("untied") or ""):
            raise NotEqual(
                "two tensors",
                f"tie_word_embeddings is true, and {untied} of {run.folder.name!r} are two tensors"
                f" after training: look for code that replaces one of them (build_model,"
                f" {run.places.get('build_model', '?')}; configure_model,"
                f" {run.places.get('configure_model', '?')})",
            )
    return "in one process and under the strategy"


def no_seed_in_a_step(runs: Runs) -> str:
    for function, where in (runs.one.tensors("seeds") or {}).items():
        raise NotEqual(
            "every step draws the same numbers",
            f"{where} calls {function} in the training step, so that dropout and everything else"
            " that is random repeats: seed once, with seed_everything, or use a torch.Generator",
        )
    return "none does"


def other_hash_seed(runs: Runs) -> str:
    one, other = runs.one, runs.other_hash
    first = first_difference(one.start, other.start) or samples(one, other)
    if first or one.loss != other.loss:
        raise NotEqual(
            "another training",
            f"with PYTHONHASHSEED {HASH_SEED}, which ranks do not share, {trace(one, other)}:"
            " something is ordered by hash() or a set (sort it), or reads a pid or a time",
        )
    return f"{len(other.loss)} losses bit-identical"
