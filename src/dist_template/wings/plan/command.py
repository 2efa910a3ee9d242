"""`plan`: which strategies fit a machine, what each needs and sends, and the flags for it."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable
from typing import Any

from ...errors import InputError
from ...project import Flags, Project
from .. import sizes
from ..ranges import in_range

SHARE = 0.6  # of a datasheet's peak that matrix products reach, where it was not measured
GPU = "NVIDIA H100 80GB HBM3"
STEPS = {"sequence": ("data.seq_len", 1024), "model": ("num_hidden_layers", 1)}  # of --largest


def main(argv: list[str], project: Project) -> None:
    """Prints the plan of a configuration for machines that need not exist.

    Raises:
        InputError: a flag cannot be read, or the configuration cannot be planned.
    """
    own, flags = _parser().parse_known_args(argv[1:])
    nodes, devices = _counts("nodes", own.nodes), _counts("devices", own.devices)
    if own.memory:
        flags.append(f"--cluster.device_memory={own.memory}")
    from ...cli.fit import parse
    from ...cli.limits.machine import Machine as Described
    from .estimate import Machine
    from .planner import Planner
    from .tables import show

    cli = parse([argv[0], *flags], project)
    trainer, site = {**cli.config_init.trainer}, cli.config_init.cluster
    described = Described.described(trainer, default=1)
    nodes = nodes or [site.nodes or described.num_nodes]
    devices = devices or [site.devices_per_node or trainer["devices"]]
    if site.memory_bytes is None:
        raise InputError("plan needs the memory of a device: give it, as --memory 80GB")
    if not str(devices[0]).isdigit():
        raise InputError(f"trainer.devices is {devices[0]}: give a node's devices, as --devices 8")
    flops, highest = _speeds(own, described.precision)
    within, between = own.bandwidth
    machines = []
    for num, each in itertools.product(nodes, devices):
        memory = site.memory_bytes
        machines.append(Machine(num, int(each), memory, flops, highest, within * 1e9, between * 1e9))

    def planner(size: int = 0) -> Planner:
        module, data = cli.model, copy.copy(cli.datamodule)
        if own.largest == "sequence":
            data.seq_len = size
        elif own.largest == "model":
            module.architecture = module.architecture | {"num_hidden_layers": size}
        return Planner(module, data, trainer, described)

    size = 0
    if own.largest == "model" and getattr(cli.model, "pretrained", None):
        raise InputError("--largest model changes model.architecture: set model.pretrained to null")
    if own.largest:
        key, step = STEPS[own.largest]
        size = _largest(lambda size: planner(size).fits(machines[-1]), step)
        print(f"the largest {key} that fits, within a sixteenth: {size or 'none'}\n")
        size = size or step
    show(planner(size), machines)


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
    made.add_argument("--largest", choices=STEPS, help="longest sequence, or most layers")
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


def _speeds(own: Any, precision: str) -> tuple[float, float]:
    """Returns operations per second that a device reaches, and its peak; 0 if not known."""
    from ...model.flops import PEAKS, peak

    found, is_half = peak(own.gpu, precision), precision[:2] in ("16", "bf")
    if not own.tflops and not peak(own.gpu, precision if is_half else "16-mixed"):
        known = ", ".join(PEAKS)
        why = f"has no known peak for {precision}: give --tflops, or one of {known}"
        raise InputError(f"--gpu {own.gpu!r} {why}")
    highest = found or own.tflops or 0.0
    return 1e12 * (own.tflops or SHARE * highest), 1e12 * highest


def _largest(fits: Callable[[int], bool], step: int) -> int:
    """Returns the largest multiple of `step` that fits, within a sixteenth; at most 1024 of them,
    0 if none does."""
    low, high = 0, 1
    while high <= 1024 and fits(high * step):
        low, high = high, 2 * high
    while high <= 1024 and high - low > max(1, low // 16):
        middle = (low + high) // 2
        if fits(middle * step):
            low = middle
        else:
            high = middle
    return low * step
