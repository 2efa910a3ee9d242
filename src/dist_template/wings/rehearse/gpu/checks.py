"""What `rehearse --gpu` checks, on what devices reported (events.py) and the curves of CPU
processes, in the order in which it is printed."""

import math
from collections import Counter
from collections.abc import Iterable

from ..checks import EVALUATION, GRAD_NORM, LOSS, Check, refuse_draws
from ..compare import relative_difference
from ..record import RunRecord
from ..report import NotEqual
from ..runs import Runs
from ..shrink_config import NAN_STEP, STEPS

WAITS = ("SYNC", "EVENT_WAIT")  # kinds of events
WAIT_MS = 0.1  # order of magnitude: until the host has launched what follows
MEANING = {  # kind or operation: how users write it, or what to do
    "aten::_local_scalar_dense": "reads a value: .item(), float(), if, print",
    "D2H blocking copy": "copies to the host: .cpu(), .tolist(), print",
    "H2D blocking copy": "copies from the host: torch.tensor(..., device=...), .to() of a host "
    "tensor",
    "H2D_PAGEABLE": "copies from memory that is not pinned",
    "aten::nonzero": "needs a size from the device: nonzero, a mask as an index",
    "nccl barrier": "waits for all ranks",
    "EARLY_READ": "reads pinned memory before its copy has arrived: wait for an event, or copy "
    "without non_blocking",
    "RACE_H2D": "overwrites pinned memory while its copy to the device is under way",
    "NCCL_MIXED_GROUP": "sends messages and collectives by one group, where NCCL orders them: use "
    "two",
}


def trains(runs: Runs) -> str:
    return (
        f"{STEPS} steps on {runs.gpu.size} fake GPUs; not shown: kernels, speed, compilation,"
        " memory, NCCL's timing"
    )


def curves(runs: Runs) -> str:
    for series, tolerance in (("loss", LOSS), ("grad_norm", GRAD_NORM)):
        want, have = getattr(runs.cpu, series), getattr(runs.gpu, series)
        difference, _ = relative_difference(want, have)
        if difference > tolerance:
            refuse_draws(runs.strategy)
            cause = "it depends on memory that nothing has written (torch.empty), an early copy, or"
            cause += " a branch on is_cuda"
            where = f"{have} instead of {want}"
            raise NotEqual(f"{series} differs by {difference:.1e}", cause, where)
    return f"{len(runs.gpu.loss)} log steps"


def waiting(runs: Runs) -> dict[str, float]:
    """Returns the user's lines that wait in plain steps, and how often in a micro-batch."""
    return _lines(runs, WAITS, "plain", "user")


def waits(runs: Runs) -> str:
    found = waiting(runs)
    if found:
        num = runs.small.micro_batches
        step_ms = sum(found.values()) * num * WAIT_MS
        cost = f"some {WAIT_MS} ms each, {step_ms:.2g} ms a step of {num} micro-batches"
        raise NotEqual(f"{len(found)} lines wait", f"{_text(found)}; {cost}")
    of_strategy = sum(_lines(runs, WAITS, "plain", "library").values())
    return f"none; {of_strategy:.2g} a micro-batch are the strategy's"


def copies(runs: Runs) -> str:
    meanwhile = _lines(runs, ("EARLY_READ", "RACE_H2D", "NCCL_MIXED_GROUP"))
    if meanwhile:
        raise NotEqual("memory or a group is used meanwhile", _text(meanwhile))
    of_batches = _lines(runs, ("SYNC", "H2D_PAGEABLE"), "batch")
    of_users = _lines(runs, ("H2D_PAGEABLE",), "plain", "user")
    not_pinned = of_batches | of_users
    if not_pinned:
        hooks = runs.gpu.places.get("batches")
        where = f"set pin_memory of loaders, and pin what hooks make ({hooks})"
        raise NotEqual("not from pinned memory", f"{_text(not_pinned)}: {where}")
    return "nothing waits"


def around(runs: Runs) -> str:
    predicts = ""
    if runs.small.config["data"].get("prompts") and runs.gpu_prediction.ok:
        predicts = ", prediction"
    _compare_evaluations(runs.cpu, runs.gpu, STEPS + 1)
    _compare_evaluations(runs.gpu, runs.gpu_resumed, NAN_STEP)
    if any(math.isnan(loss) for loss in runs.gpu_resumed.loss.values()):
        cause = f"the gradients of step {NAN_STEP} were not, and it was not skipped"
        raise NotEqual("the loss is not a number", cause)
    return f"validation, checkpoint, resume, NaN step{predicts}, end"


def _compare_evaluations(expected: RunRecord, got: RunRecord, end: int) -> None:
    """Raises NotEqual if a validation before step `end` has other metrics."""
    for step, metrics in got.eval().items():
        difference, _ = relative_difference(expected.eval().get(step, metrics), metrics)
        if step < end and difference > EVALUATION:
            where = f"step {step} of {got.folder.name!r}"
            raise NotEqual(f"evaluation differs by {difference:.1e}", where)


def _lines(runs: Runs, kinds: Iterable[str], phase: str = "", owner: str = "") -> dict[str, float]:
    """Returns {line and what it does: times in a micro-batch}."""
    device = runs.gpu.device
    counts = Counter[str]()
    for event in device.events:
        if event.kind not in kinds or phase not in ("", event.phase):
            continue
        if owner not in ("", event.owner):
            continue
        # The innermost line that is known, and the most precise meaning.
        place = event.place or event.inner or "backward"
        meaning = MEANING.get(event.operation) or MEANING.get(event.kind) or event.operation
        counts[f"{place} {meaning}"] += event.count
    return {line: count / device.plain for line, count in counts.items()}


def _text(lines: dict[str, float]) -> str:
    return "; ".join(f"{line}, {times:.2g} times a micro-batch" for line, times in lines.items())


CHECKS = (
    Check("gpu: it trains", "no refusal of a GPU", trains),
    Check("gpu: losses and norms = CPU", f"within {LOSS:.0e} and {GRAD_NORM:.0e}", curves),
    Check("gpu: no plain step waits", "no line of yours", waits),
    Check("gpu: copies and groups", "pinned, read after they arrive", copies),
    Check("gpu: around the step", "as on CPUs", around),
)
