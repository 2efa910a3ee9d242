"""What `plan` prints."""

from __future__ import annotations

from ...project import program
from ...table import Table
from .estimate import COLUMNS, RECOMPUTED, STATE, Machine, Planned
from .planner import Planner

GB, BEST = 1e9, 3  # strategies whose flags are shown
HEAD = ["devices", "strategy", "micro-batch", "checkpointing", "state", *COLUMNS[3:], "total",
        "fits", "sent", "step s", "MFU"]  # fmt: skip
NOTE = """
GB are 10^9 bytes of one device, of which it needs the larger of logits and backward.
Not calibrated on a GPU: state is right within 5 % and activations within 15 % on CPU processes;
times assume the speeds of --tflops and --bandwidth."""


def show(planner: Planner, machines: list[Machine]) -> None:
    """Prints all strategies on one machine, or the best on each of several, and their flags."""
    shown = [planner.options(machine) for machine in machines]
    options = shown[0] if len(shown) == 1 else [each[0] for each in shown]
    size, data = planner.traced.size, planner.data
    title = f"{size.total / 1e9:.2f} B parameters ({size.trainable / 1e9:.3f} B trained), a step of"
    title += f" {data.global_batch_size} sequences of {data.seq_len} tokens\n"
    print(Table(title, HEAD, [_cells(option) for option in options], NOTE).as_text())
    fitting = [option for option in options if option.fits]
    for option in fitting[:BEST]:
        flags = f"{option.candidate.flags} --data.micro_batch_size {option.micro_batch_size}"
        flags += f" --model.blocks.checkpointing {option.checkpointing}"
        print(f"\n{_where(option)}: {program('fit')} --config … {flags}")
    if not fitting:
        print("\nNothing fits: more devices, more memory or a shorter data.seq_len are needed.")
    best = (fitting or options)[0]
    candidate, machine, rows = best.candidate, best.machine, best.micro_batch_size
    modes = [planner.option(candidate, machine, rows, mode) for mode in RECOMPUTED]
    parts = [mode.parts() | {"total": mode.total()} for mode in modes]
    lines = [[name, *(f"{each[name] / GB:.2f}" for each in parts)] for name in parts[0]]
    head = [f"GB of {_where(best)}", *(f"checkpointing {mode}" for mode in RECOMPUTED)]
    print("\n" + Table("", head, lines).as_text())


def _where(option: Planned) -> str:
    return f"{option.candidate.name} on {option.machine.nodes} x {option.machine.devices}"


def _cells(option: Planned) -> list[str]:
    parts, machine = option.parts(), option.machine
    sizes = [sum(parts[name] for name in STATE), *(parts[name] for name in COLUMNS[3:])]
    start = [f"{machine.nodes} x {machine.devices}", option.candidate.name]
    start += [str(option.micro_batch_size), option.checkpointing]
    sent = sum(size for size, *_ in option.sent())
    end = ["yes" if option.fits else "no", f"{sent / GB:.1f}"]
    end += [f"{option.seconds():.2f}", f"{option.mfu():.2f}"]
    return [*start, *(f"{size / GB:.1f}" for size in [*sizes, option.total()]), *end]
