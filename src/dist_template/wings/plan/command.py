"""`plan`: which strategies fit a machine, what each needs and sends, and the flags for it."""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING

from ...errors import InputError
from ...project import Flags, Project, program
from ...table import Table
from .. import sizes
from ..ranges import in_range

if TYPE_CHECKING:
    from .estimate import Planned
    from .planner import Planner

SHARE = 0.6  # of a datasheet's peak that matrix products reach, where it was not measured
GPU = "NVIDIA H100 80GB HBM3"
GB, BEST = 1e9, 3  # strategies whose flags are shown
HEAD = ["devices", "strategy", "micro-batch", "checkpointing", "state", "activations", "other",
        "total", "fits", "sent", "step s"]  # fmt: skip
NOTE = """
GB are 10^9 bytes of one device; it needs the larger of logits and backward.
Not calibrated on a GPU: state is right within 5 % and activations within 15 % on CPU processes;
times assume the speeds of --tflops and --bandwidth; ? is a device without a known speed."""


def main(argv: list[str], project: Project) -> None:
    """Prints all strategies on one machine, or the best on each of several, and their flags.

    Raises:
        InputError: a flag cannot be read, or the configuration cannot be planned.
    """
    own, flags = _parser().parse_known_args(argv[1:])
    nodes, devices = _counts("nodes", own.nodes), _counts("devices", own.devices)
    if own.memory:
        flags.append(f"--cluster.device_memory={own.memory}")
    from ...cli.fit import parse
    from ...cli.limits.machine import Machine as Described
    from ...model.flops import peak
    from .estimate import Machine
    from .planner import Planner

    cli = parse([argv[0], *flags], project)
    trainer, site = {**cli.config_init.trainer}, cli.config_init.cluster
    described = Described.described(trainer, default=1)
    devices = devices or [site.devices_per_node or trainer["devices"]]
    if site.memory_bytes is None:
        raise InputError("plan needs the memory of a device: give it, as --memory 80GB")
    if not str(devices[0]).isdigit():
        raise InputError(f"trainer.devices is {devices[0]}: give a node's devices, as --devices 8")
    tflops, known = own.tflops or 0.0, peak(own.gpu, described.precision)
    if known and not own.tflops:
        tflops = SHARE * known
    within, between = own.bandwidth
    planner, machines = Planner(cli.model, cli.datamodule, trainer, described), []
    for num, each in itertools.product(nodes or [site.nodes or described.num_nodes], devices):
        machines.append(Machine(num, int(each), site.memory_bytes, 1e12 * tflops, 1e9 * within, 1e9 * between))
    options = planner.options(machines[0])
    if len(machines) > 1:
        options = [planner.options(machine)[0] for machine in machines]
    show(planner, options)


def _parser() -> Flags:
    several = " --nodes and --devices may be ranges such as 1:16: powers of two are compared."
    made = sizes.parser("plan", str(__doc__), several, kind=str)
    made.add_argument("--memory", help="of a device, as 80GB (10^9) or 80GiB (2^30)")
    made.add_argument("--gpu", default=GPU, help="its name, for its peak (default: %(default)s)")
    reached = f"TFLOP/s that matrix products reach (default: {SHARE} of the peak)"
    speed = in_range(float, 0.001)
    made.add_argument("--tflops", type=speed, help=reached)
    rates = "GB/s that a device sends within a node, and to others (default: 300 40)"
    made.add_argument("--bandwidth", type=speed, nargs=2, default=[300.0, 40.0], help=rates)
    return made


def _counts(name: str, text: str | None) -> list[int]:
    """Returns the numbers that --nodes or --devices asks for; [] if it is not given."""
    if text is None:
        return []
    low = high = 0
    if found := re.fullmatch(r"(\d{1,5})(?::(\d{1,5}))?", text):
        low, high = int(found[1]), int(found[2] or found[1])
    if not 0 < low <= high:
        raise InputError(f"--{name} is {text!r}: give 1 to 99,999, or a range such as 1:16")
    return sorted({low, high, *(2**n for n in range(high.bit_length()) if low < 2**n < high)})


def show(planner: Planner, options: list[Planned]) -> None:
    """Prints strategies, the flags of the first that fit, and the parts of the best one's memory."""
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
    best = (fitting or options)[0]
    head, lines = [f"GB of {_where(best)}"], dict[str, list[str]]()
    for option in planner.by_checkpointing(best.candidate, best.machine, best.facts.micro_batch_size):
        head.append(f"checkpointing {option.facts.checkpointing}")
        for name, bytes_ in (option.parts() | {"total": option.total()}).items():
            lines.setdefault(name, [name]).append(f"{bytes_ / GB:.2f}")
    print("\n" + Table("", head, list(lines.values())).as_text())


def _where(option: Planned) -> str:
    return f"{option.candidate} on {option.machine.nodes} x {option.machine.devices}"


def _row(option: Planned) -> list[str]:
    parts, machine, total, facts = option.parts(), option.machine, option.total(), option.facts
    row = [f"{machine.nodes} x {machine.devices}", str(option.candidate)]
    row += [str(facts.micro_batch_size), facts.checkpointing]
    kept = parts["activations"]
    for size in (option.state, kept, total - option.state - kept, total):
        row.append(f"{size / GB:.1f}")
    row += ["yes" if option.fits else "no", f"{option.sent() / GB:.1f}"]
    return [*row, f"{seconds:.2f}" if (seconds := option.seconds()) else "?"]
