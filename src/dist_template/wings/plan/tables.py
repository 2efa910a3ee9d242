"""What `plan` prints."""

from __future__ import annotations

from ...parallel.facts import STATE
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
    shown = [planner.options(machine) for machine in machines]
    options = shown[0] if len(shown) == 1 else [each[0] for each in shown]
    size, data = planner.traced.size, planner.data
    total, trained = (f"{number / 1e6:,.1f} M" for number in (size.total, size.trainable))
    title = f"{total} parameters, {trained} of them trained, a step of"
    title += f" {data.global_batch_size} sequences of {data.seq_len} tokens\n"
    print(Table(title, HEAD, [_cells(option) for option in options], NOTE).as_text())
    for why, names in planner.failed.items():
        print(f"\nNot planned, as the trace of a block fails: {', '.join(names)} ({why})")
    fitting = [option for option in options if option.fits]
    for option in fitting[:BEST]:
        flags = f"{option.candidate.flags} --data.micro_batch_size {option.facts.micro_batch_size}"
        flags += f" --model.blocks.checkpointing {option.facts.checkpointing}"
        print(f"\n{_where(option)}: {program('fit')} --config … {flags}")
    if not fitting:
        print("\nNothing fits: more devices, more memory or a shorter data.seq_len are needed.")
    best = (fitting or options)[0]
    candidate, machine, rows = best.candidate, best.machine, best.facts.micro_batch_size
    modes = [o for mode in RECOMPUTED for o in planner.ranked(candidate, machine, [rows], [mode])]
    parts = [mode.parts() | {"total": mode.total()} for mode in modes]
    lines = [[name, *(f"{each[name] / GB:.2f}" for each in parts)] for name in parts[0]]
    head = [
        f"GB of {_where(best)}",
        *(f"checkpointing {mode.facts.checkpointing}" for mode in modes),
    ]
    print("\n" + Table("", head, lines).as_text())


def _where(option: Planned) -> str:
    return f"{option.candidate} on {option.machine.nodes} x {option.machine.devices}"


def _cells(option: Planned) -> list[str]:
    parts, machine, total = option.parts(), option.machine, option.total()
    state, sent = sum(parts[name] for name in STATE), option.sent()
    sizes = [state, parts["activations"], total - state - parts["activations"], total]
    return [
        f"{machine.nodes} x {machine.devices}",
        str(option.candidate),
        str(option.facts.micro_batch_size),
        option.facts.checkpointing,
        *(f"{size / GB:.1f}" for size in sizes),
        "yes" if option.fits else "no",
        f"{sent / GB:.1f}",
        *(f"{value:.2f}" if value else "?" for value in (option.seconds(), option.mfu())),
    ]
