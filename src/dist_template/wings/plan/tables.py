"""What `plan` prints."""

from __future__ import annotations

from ...parallel.estimates.facts import STATE
from ...project import program
from ...table import Table
from .estimate import RECOMPUTED, Machine, Planned
from .planner import Planner

GB, BEST = 1e9, 3  # strategies whose flags are shown
HEAD = ["devices", "strategy", "micro-batch", "checkpointing", "state", "activations", "other",
        "total", "fits", "sent", "step s", "MFU"]  # fmt: skip
NOTE = """
GB are 10^9 bytes of one device; it needs the larger of logits and backward.
Not calibrated on a GPU: state is right within 5 % and activations within 15 % on CPU processes;
times assume the speeds of --tflops and --bandwidth."""


def show(planner: Planner, machines: list[Machine]) -> None:
    """Prints all strategies on one machine, or the best on each of several, and their flags."""
    options = planner.options(machines[0])
    if len(machines) > 1:
        options = [planner.options(machine)[0] for machine in machines]
    size, data = planner.traced.size, planner.data
    title = (
        f"{size.total / 1e6:,.1f} M parameters, {size.trainable / 1e6:,.1f} M of them trained, a step of"
        f" {data.global_batch_size} sequences of {data.seq_len} tokens\n"
    )
    print(Table(title, HEAD, list(map(_row, options)), NOTE).as_text())
    for why, names in planner.failed.items():
        print(f"\nNot planned, as the trace of a block fails: {', '.join(names)} ({why})")
    fitting = [option for option in options if option.fits]
    for option in fitting[:BEST]:
        flags = f"{option.candidate.flags} --data.micro_batch_size {option.facts.micro_batch_size}"
        flags += f" --model.blocks.checkpointing {option.facts.checkpointing}"
        print(f"\n{_where(option)}: {program('fit')} --config … {flags}")
    if not fitting:
        print("\nNothing fits: more devices, more memory or a shorter data.seq_len are needed.")
    _show_memory(planner, (fitting or options)[0])


def _show_memory(planner: Planner, best: Planned) -> None:
    """Prints the parts of a strategy's memory by checkpointing."""
    head, lines = [f"GB of {_where(best)}"], dict[str, list[str]]()
    for mode in RECOMPUTED:
        for option in planner.ranked(best.candidate, best.machine, [best.facts.micro_batch_size], [mode]):
            head.append(f"checkpointing {mode}")
            for name, size in (option.parts() | {"total": option.total()}).items():
                lines.setdefault(name, [name]).append(f"{size / GB:.2f}")
    print("\n" + Table("", head, list(lines.values())).as_text())


def _where(option: Planned) -> str:
    return f"{option.candidate} on {option.machine.nodes} x {option.machine.devices}"


def _row(option: Planned) -> list[str]:
    parts, machine, total = option.parts(), option.machine, option.total()
    state = sum(map(parts.__getitem__, STATE))
    row = [f"{machine.nodes} x {machine.devices}", str(option.candidate)]
    row += [str(option.facts.micro_batch_size), option.facts.checkpointing]
    for size in (state, parts["activations"], total - state - parts["activations"], total):
        row.append(f"{size / GB:.1f}")
    row += ["yes" if option.fits else "no", f"{option.sent() / GB:.1f}"]
    for value in (option.seconds(), option.mfu()):
        row.append(f"{value:.2f}" if value else "?")
    return row
