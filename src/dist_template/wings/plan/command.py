"""`plan`: which strategies fit a machine, what each needs and sends, and the flags for it."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING

from ...by_tokens import AUTO
from ...errors import InputError
from ...project import Flags, Project, program
from ...table import Table
from .. import sizes
from ..ranges import in_range

if TYPE_CHECKING:
    from .estimate import Planned
    from .planner import Planner

GB = 1e9
BEST = 3  # strategies whose flags are shown
HEAD = [
    "devices",
    "strategy",
    "micro-batch",
    "checkpointing",
    "state",
    "activations",
    "other",
    "total",
    "fits",
    "sent",
    "step s",
]
NOTE = """
GB are 10^9 bytes of one device; it needs the larger of logits and backward.
Not calibrated on a GPU: state is right within 5 % and activations within 15 % on CPU processes;
times assume the speeds of --tflops and --bandwidth."""


def main(argv: list[str], project: Project) -> None:
    """Prints all strategies on a machine, their memory and traffic, and the flags of the best.

    It reads the configuration, takes the sizes of the machine from flags or from keys, chooses the
    global batch as `fit` does, estimates every strategy, and prints."""
    own, flags = _parser().parse_known_args(argv[1:])
    if own.memory:
        flags.append(f"--cluster.device_memory={own.memory}")
    # Here, because they import torch, and `--help` does without.
    from ...cli.fit import WithoutTrainer
    from ...cli.limits import Machine as Described
    from ...cli.limits import accumulated_batch, least_batch
    from ...text.auto import batch_for
    from ..preflight.interval import estimated
    from .estimate import Machine
    from .planner import Planner

    cli = WithoutTrainer.of([argv[0], *flags], project)
    trainer, site = vars(cli.config_init.trainer), cli.config_init.cluster
    described = Described.described(trainer, default=1)
    nodes = own.nodes or site.nodes or described.num_nodes
    devices = own.devices or site.devices_per_node or trainer["devices"]
    if site.memory_bytes is None:
        raise InputError("plan needs the memory of a device: give it, as --memory 80GB")
    if not str(devices).isdigit():
        raise InputError(f"trainer.devices is {devices}: give a node's devices, as --devices 8")
    within, between = own.bandwidth
    machine = Machine(
        nodes, int(devices), site.memory_bytes, 1e12 * own.tflops, 1e9 * within, 1e9 * between
    )
    of_job = Described.described(trainer | {"devices": int(devices), "num_nodes": nodes})
    given = of_job, trainer, cli.model, cli.datamodule
    size = accumulated_batch(*given)
    if size:
        cli.datamodule.global_batch_size = size
    elif getattr(cli.datamodule, "global_batch_size", None) == AUTO:  # the data are not read here
        size = batch_for(sys.maxsize, 1, math.lcm(least_batch(*given), of_job.world_size))
        cli.datamodule.global_batch_size = size
        print(f"data.global_batch_size auto: planned with {size}, which fit chooses for many rows")
    planner = Planner(cli.model, cli.datamodule, trainer, described)
    options = planner.options(machine)
    show(planner, options)
    trained, seconds = planner.traced.size.trainable, options[0].seconds()
    print(f"\nCheckpoints: {estimated(trained, cli.config_init, nodes, int(devices), seconds)}.")


def _parser() -> Flags:
    """Returns the parser of the flags that are not keys of `fit`."""
    parser = sizes.parser("plan", str(__doc__))
    parser.add_argument("--memory", help="memory per device, as 80GB (10^9) or 80GiB (2^30)")
    speed = in_range(float, 0.001)
    reached = "TFLOP/s that matrix products reach (default: 600, an H100 in 16 bits)"
    parser.add_argument("--tflops", type=speed, default=600.0, help=reached)
    rates = "GB/s that a device sends within a node, and to others (default: 300 40)"
    parser.add_argument("--bandwidth", type=speed, nargs=2, default=[300.0, 40.0], help=rates)
    return parser


def show(planner: Planner, options: list[Planned]) -> None:
    """Prints strategies, the flags of the first that fit, and the parts of the best one's
    memory."""
    size, data = planner.traced.size, planner.data
    title = (
        f"{size.total / 1e6:,.1f} M parameters, {size.trainable / 1e6:,.1f} M of them trained, a"
        f" step of {options[0].facts.global_batch_size} sequences of {data.seq_len} tokens\n"
    )
    print(Table(title, HEAD, [_row(option) for option in options], NOTE).as_text())
    for name, error in planner.failed.items():
        print(f"\nNot planned, as the trace of a block fails: {name} ({error})")
    fitting = [option for option in options if option.fits]
    for option in fitting[:BEST]:
        flags = f"{option.candidate.flags} --data.micro_batch_size {option.facts.micro_batch_size}"
        flags += f" --model.blocks.checkpointing {option.facts.checkpointing}"
        print(f"\n{_where(option)}: {program('fit')} --config … {flags}")
    best = options[0]  # those that fit come first
    if not fitting:
        print("\nNothing fits: more devices, more memory or a shorter data.seq_len are needed.")
    _show_parts(planner, best)


def _show_parts(planner: Planner, best: Planned) -> None:
    """Prints the parts of a strategy's memory: a column for each kind of checkpointing."""
    head = [f"GB of {_where(best)}"]
    lines: dict[str, list[str]] = {}  # part: its name and its cells
    rows = best.facts.micro_batch_size
    for option in planner.by_checkpointing(best.candidate, best.machine, rows):
        head.append(f"checkpointing {option.facts.checkpointing}")
        parts = option.parts() | {"total": option.total()}
        for name, bytes_ in parts.items():
            lines.setdefault(name, [name]).append(f"{bytes_ / GB:.2f}")
    print("\n" + Table("", head, list(lines.values())).as_text())


def _where(option: Planned) -> str:
    return f"{option.candidate} on {option.machine.nodes} x {option.machine.devices}"


def _row(option: Planned) -> list[str]:
    """Returns the cells of a strategy, in the order of HEAD."""
    machine, facts = option.machine, option.facts
    row = [f"{machine.nodes} x {machine.devices}", str(option.candidate)]
    row += [str(facts.micro_batch_size), facts.checkpointing]
    parts, total = option.parts(), option.total()
    state = sum(parts[name] for name in option.spec.STATE)
    activations = parts["activations"]
    for size in (state, activations, total - state - activations, total):
        row.append(f"{size / GB:.1f}")
    row.append("yes" if option.fits else "no")
    row.append(f"{option.sent() / GB:.1f}")
    row.append(f"{option.seconds():.2f}")
    return row
