"""`plan`: which strategies fit a machine, what each needs and sends, and the flags for it."""

from __future__ import annotations

import argparse
import copy
import re
from typing import Any

from ...errors import InputError
from ...project import Project, program

GPU = "NVIDIA H100 80GB HBM3"
PEAK_SHARE = 0.6  # of a datasheet's peak that matrix products reach, where it was not measured


def main(argv: list[str], project: Project) -> None:
    """Prints the plan of a configuration for machines that need not exist.

    Raises:
        InputError: a flag cannot be read, or the configuration cannot be planned.
    """
    given, flags = _parser().parse_known_args(argv[1:])
    counts = [_counts(name, getattr(given, name)) for name in ("nodes", "devices")]
    memory, bandwidth = _bytes(given.memory), _bandwidth(given.bandwidth)
    from ...cli.fit import parse

    cli = parse([argv[0], *flags], project)
    from ...cli.limits.machine import Machine as Described
    from .estimate import Machine
    from .planner import Planner, largest
    from .tables import show, show_machines

    trainer = {**cli.config_init.trainer}
    described = Described.described(trainer, default=0)
    flops, peak = _speed(given, described)
    nodes, devices = counts[0] or [described.num_nodes], counts[1] or [described.devices]
    if not devices[0]:
        raise InputError("trainer.devices is auto: give the devices of a node, as --devices 8")
    machines = [Machine(n, d, memory, flops, peak, *bandwidth) for n in nodes for d in devices]

    def planner(seq_len: int = 0, layers: int = 0) -> Planner:
        module, data = cli.model, cli.datamodule
        if seq_len:
            data = copy.copy(data)
            data.seq_len = seq_len
        if layers:
            module.architecture = module.architecture | {"num_hidden_layers": layers}
        return Planner(module, data, trainer, described.precision, described.accelerator != "cpu")

    if given.largest == "sequence":
        longest = largest(lambda n: planner(seq_len=n), machines[-1], step=1024)
        print(f"largest data.seq_len that fits: {longest:,}")
        show(planner(seq_len=longest or 1024), machines[-1])
    elif given.largest == "model":
        deepest = largest(lambda n: planner(layers=n), machines[-1], step=1)
        print(f"largest model.architecture.num_hidden_layers that fits: {deepest}")
        show(planner(layers=deepest or 1), machines[-1])
    elif len(machines) > 1:
        show_machines(planner(), machines)
    else:
        show(planner(), machines[0])


def _parser() -> argparse.ArgumentParser:
    usage = f"{program('plan')} --config FILE [--config FILE]… [--KEY VALUE]… [flags below]"
    end = f"Every other key is fit's: see `{program('fit')} --help`."
    made = argparse.ArgumentParser(
        prog=program("plan"), usage=usage, description=__doc__, epilog=end, allow_abbrev=False
    )
    several = "a number, or a range such as 1:16, whose powers of two are compared"
    made.add_argument("--nodes", help=f"nodes (default: trainer.num_nodes): {several}")
    made.add_argument("--devices", help=f"devices of a node (default: trainer.devices): {several}")
    made.add_argument("--memory", help="memory of a device, such as 80GB (10^9) or 80GiB (2^30)")
    made.add_argument("--gpu", default=GPU, help="its name, for its peak (default: %(default)s)")
    speed = f"TFLOP/s that its matrix products reach (default: {PEAK_SHARE} of its peak)"
    made.add_argument("--tflops", type=float, help=speed)
    rates = "GB/s that a device sends within a node, and to other nodes (default: %(default)s)"
    made.add_argument("--bandwidth", default="300,40", help=rates)
    question = "search the longest sequence, or the deepest model of this architecture, that fits"
    made.add_argument("--largest", choices=("sequence", "model"), help=question)
    return made


def _speed(given: argparse.Namespace, described: Any) -> tuple[float, float]:
    """Returns operations per second that a device reaches, and its peak; 0 if they are not known.

    Raises:
        InputError: the GPU is not known in this precision, and no speed is given.
    """
    from ...model.flops import peak

    found = peak(given.gpu, described.precision)
    is_half = described.precision[:2] in ("16", "bf")
    if is_half and not found and not given.tflops:
        raise InputError(
            f"--gpu {given.gpu!r} is not in the table of model/flops.py for trainer.precision"
            f" {described.precision}: give a name as torch.cuda.get_device_name has it, or --tflops"
        )
    if given.tflops is not None and given.tflops <= 0:
        raise InputError(f"--tflops is {given.tflops}: give more than 0")
    highest = found[0] if found else given.tflops or 0.0
    return 1e12 * (given.tflops or PEAK_SHARE * highest), 1e12 * highest


def _counts(name: str, text: str | None) -> list[int]:
    """Returns the numbers that --nodes or --devices asks for: [] if it is not given."""
    if text is None:
        return []
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    low, high = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 0 < low <= high:
        raise InputError(
            f"--{name} is {text!r}: give a number from 1, or a range from the lower to the higher,"
            " such as 1:16"
        )
    powers = [2**n for n in range(high.bit_length()) if low < 2**n < high]
    return sorted({low, *powers, high})


def _bytes(text: str | None) -> float:
    """Returns the bytes of "80GB" or "80GiB"."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([MGT])(i?)B", text or "")
    if not found or not float(found[1]):
        raise InputError(
            f"--memory is {text!r}: give the memory of a device with its unit, such as 80GB or"
            " 80GiB"
        )
    return float(found[1]) * (1024 if found[3] else 1000) ** ("MGT".index(found[2]) + 2)


def _bandwidth(text: str) -> tuple[float, float]:
    try:
        within, between = (float(one) * 1e9 for one in text.split(","))
    except ValueError:
        within = between = 0.0
    if min(within, between) <= 0:
        raise InputError(f"--bandwidth is {text!r}: give two numbers in GB/s, such as 300,40")
    return within, between
