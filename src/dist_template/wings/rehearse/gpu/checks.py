"""What `rehearse --gpu` checks, on the events of gpu/events.py and the curves of CPU processes."""

from collections.abc import Iterable

from .. import compare
from ..checks import EVALUATION, GRAD_NORM, LOSS, Check, refuse_draws
from ..record import RunRecord
from ..report import NotEqual
from ..runs import Runs
from ..shrink_config import NAN_STEP, STEPS
from .events import Event

CANNOT = "not shown: kernels, speed, compilation, memory, NCCL's scheduling"
WAIT_MS = 0.1  # order of magnitude: the device has nothing to do until the host has launched what follows
WAITS = {  # operation: how users write it
    "aten::_local_scalar_dense": "reads a value: .item(), float(), if, print",
    "D2H blocking copy": "copies to the host: .cpu(), .tolist(), print",
    "H2D blocking copy": "copies from the host: torch.tensor(..., device=...), .to() of a host tensor",
    "H2D from pageable memory": "copies from memory that is not pinned",
    "aten::nonzero": "needs a size from the device: nonzero, a mask as an index",
    "nccl barrier": "waits for all ranks: barrier()",
}
UNSAFE = {
    "EARLY_READ": "reads pinned memory before its copy has arrived: wait for an event, or copy without non_blocking",
    "RACE_H2D": "overwrites pinned memory while its copy to the device is under way",
}
REFUSED = {
    "NCCL_MIXED_GROUP": "messages and collectives share a group, which NCCL orders behind each other: use a group of"
    " its own for either",
    "HOST_REGISTER_EMPTY": "page-locks empty memory",
}


def trains(runs: Runs) -> str:
    ranks = runs.gpu.size
    return f"{STEPS} steps on {ranks} fake GPU{'s' * (ranks > 1)}, {CANNOT}"


def curves(runs: Runs) -> str:
    """The same training on CPU processes has the same means of losses and norms between log steps."""
    worst = 0.0
    for series, tolerance in (("loss", LOSS), ("grad_norm", GRAD_NORM)):
        want, have = getattr(runs.cpu, series), getattr(runs.gpu, series)
        difference, each = compare.relative_difference(want, have)
        if difference > tolerance:
            refuse_draws(runs.strategy)
            step = next(step for step, value in each.items() if value > tolerance)
            cause = "values depend on the device: memory that nothing has written (torch.empty), a copy that is read"
            cause += f" before it arrives, or a branch on .is_cuda{_named(_of(runs.gpu, UNSAFE))}"
            where = f"{series} of step {step} is {have.get(step)} instead of {want.get(step)}"
            raise NotEqual(f"{difference:.1e}", cause, where)
        worst = max(worst, difference)
    return f"{worst:.1e} at {len(runs.gpu.loss)} log steps"


def waits(runs: Runs) -> str:
    plain, micro_batches = runs.gpu.device["plain"], runs.small.micro_batches
    if found := _of(runs.gpu, ("SYNC", "EVENT_WAIT"), "plain", "user"):
        number = sum(event.count for event in found) / plain * micro_batches
        cost = f"about {WAIT_MS} ms each, {number * WAIT_MS:.2g} ms a step of {micro_batches} micro-batches"
        raise NotEqual(f"{len({event.place for event in found})} lines wait", f"{_named(found, plain)}; {cost}")
    library = sum(event.count for event in _of(runs.gpu, ("SYNC",), "plain", "library"))
    return f"none of yours in {plain} micro-batches, {library} of the strategy"


def waiting(runs: Runs) -> list[str]:
    """Returns the user's lines that wait in plain steps."""
    found = _of(runs.gpu, ("SYNC", "EVENT_WAIT"), "plain", "user")
    return [f"{line} {what}" for line, what in _lines(found).items()]


def batches(runs: Runs) -> str:
    """Copies of batches, and of all that is copied without waiting."""
    if found := _of(runs.gpu, UNSAFE):
        raise NotEqual("memory is used while it is copied", "; ".join(f"{e.place} {UNSAFE[e.kind]}" for e in found))
    slow = _of(runs.gpu, ("SYNC", "H2D_PAGEABLE"), "batch")
    slow += _of(runs.gpu, ("H2D_PAGEABLE",), "plain", "user")
    if slow:
        loader = f"pin_memory=True of the DataLoader ({runs.strategy.places.get('train_dataloader', '?')})"
        raise NotEqual("not from pinned memory", f"{_named(slow, runs.gpu.device['plain'])}: set {loader}, and pin what"
                       " a hook makes on the host")  # fmt: skip
    return "pinned, and arrived before they are read"


def groups(runs: Runs) -> str:
    if found := _of(runs.gpu, REFUSED):
        raise NotEqual("not what NCCL expects", "; ".join(f"{e.place or e.operation} {REFUSED[e.kind]}" for e in found))
    return "of the device; nothing that NCCL refuses"


def around(runs: Runs) -> str:
    """Validation, a checkpoint, a resume, a step that is not a number, prediction, and the end."""
    done = ["checkpoint"]
    for name, other, expected in (("gpu", runs.gpu, runs.cpu), ("gpu_resumed", runs.gpu_resumed, runs.gpu)):
        for step, metrics in other.eval().items():
            difference, _ = compare.relative_difference(expected.eval().get(step, metrics), metrics)
            if difference > EVALUATION and step < (NAN_STEP if other is runs.gpu_resumed else STEPS + 1):
                raise NotEqual(f"evaluation differs by {difference:.1e}", f"step {step} of {name!r}", "")
    if bad := [step for step, loss in runs.gpu_resumed.loss.items() if loss != loss]:
        cause = f"the gradients of step {NAN_STEP} were not a number and the step was skipped"
        raise NotEqual("the loss is not a number", cause, f"step {bad[0]} of 'gpu_resumed'")
    done += ["validation"] * bool(runs.gpu.eval()) + ["resume", "NaN step"]
    return ", ".join([*done, *runs.predict_on_devices(), "end"])


def _of(record: RunRecord, kinds: Iterable[str], phase: str = "", owner: str = "") -> list[Event]:
    found = [event for event in record.device["events"] if event.kind in kinds]
    return [event for event in found if phase in ("", event.phase) and owner in ("", event.owner)]


def _lines(events: list[Event]) -> dict[str, str]:
    """Returns {line: what it does}."""
    return {e.place or e.inner or "autograd": WAITS.get(e.operation) or UNSAFE.get(e.kind) or e.operation for e in events}


def _named(events: list[Event], plain: int = 0) -> str:
    """Returns the lines, and how often they come in a micro-batch."""
    texts: list[str] = []
    for line, what in _lines(events).items():
        often = sum(event.count for event in events if line in (event.place, event.inner))
        texts.append(f"{line} {what}" + (f", {often / plain:.2g} times a micro-batch" if plain else ""))
    return "; ".join(texts)


CHECKS = tuple(
    Check(f"gpu: {name}", expected, check)
    for name, expected, check in (
        ("it trains", "no host tensor, generator or collective where a GPU refuses it", trains),
        ("losses and norms = CPU", f"within {LOSS:.0e} and {GRAD_NORM:.0e}", curves),
        ("no plain step waits", "no line of yours", waits),
        ("copies", "pinned, read after they have arrived", batches),
        ("groups and streams", "of the device", groups),
        ("around the step", "as on CPUs", around),
    )
)
