"""`bench`: how fast your module trains on this device, what the loop around it costs, and what would make it faster.

One process, one device, one micro-batch per optimizer step, your data. A training alternates between `fit` as it is,
every callback on, and a bare loop over the same module, optimizer and batch. Each change is tried in trainings of its
own, in a new order each round. Nothing is saved, and no folder of a run is left.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import os
import random
import statistics
import tempfile
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from ..errors import InputError, is_out_of_memory
from ..project import Project
from . import sizes

if TYPE_CHECKING:
    from .windows import Measured

AS_IT_IS = "as configured"
ALONE = {"trainer.devices": 1, "trainer.num_nodes": 1, "trainer.strategy": "auto", "trainer.limit_val_batches": 0}


def main(argv: list[str], project: Project) -> None:
    """Measure, and print a table.

    Raises:
        InputError: the configuration cannot be run, or its training is too short.
    """
    own, flags = _own_flags().parse_known_args(argv[1:])
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError("bench measures one device: start it without a launcher; --nodes and --devices tell the rest")
    if min(own.steps, own.rounds) < 1:
        raise InputError(f"--steps {own.steps} --rounds {own.rounds}: give 1 or more of each")
    from ..cli.fit import parse

    cli = parse(["bench", *flags], project)
    cli.datamodule.prepare()
    trials = {name: flags for name, flags in _trials(cli).items() if name == AS_IT_IS or own.only in name}
    found: dict[str, list[Measured | None]] = defaultdict(list)
    ranks = (own.nodes or 1) * (own.devices or 1)
    for number in range(own.rounds):
        for name in random.sample(sorted(trials), len(trials)):
            print(f"round {number + 1} of {own.rounds}: {name}", flush=True)
            found[name].append(_train(project, [*flags, *trials[name]], own.steps, ranks))
    _show(found, cli.datamodule, ranks)


def _own_flags() -> argparse.ArgumentParser:
    parser = sizes.parser("bench", str(__doc__).partition("\n\n")[2], " Exit code: 0, or 2 for bad input.")
    parser.add_argument(
        "--steps", type=int, default=10, help="of a window; a training has 4 of each loop (default: 10)"
    )
    parser.add_argument("--rounds", type=int, default=2, help="trainings of each kind (default: 2)")
    parser.add_argument("--only", default="", help="try the changes with this in their name (default: all)")
    return parser


def _trials(cli: Any) -> dict[str, list[str]]:
    """Name -> further flags. A change's name is what to type."""
    size = cli.datamodule.micro_batch_size
    changes: list[tuple[str, Any]] = [("data.micro_batch_size", 2 * size)]
    if blocks := getattr(cli.model, "blocks", None):
        changes.append(("model.blocks.compile", str(not blocks.compile).lower()))
        changes.append(("model.blocks.checkpointing", "full" if blocks.checkpointing == "none" else "none"))
    trials = {f"--{key}={value}": [f"--{key}={value}"] for key, value in changes}
    rows = {name: 2 * size if "micro_batch_size" in name else size for name in [AS_IT_IS, *trials]}
    return {name: [*trials.get(name, []), f"--data.global_batch_size={rows[name]}"] for name in rows}


def _train(project: Project, flags: list[str], steps: int, ranks: int) -> Measured | None:
    """None: memory ran out."""
    from ..callbacks.checkpoint import BestCheckpoint, LastCheckpoint
    from ..cli.fit import CLI
    from ..cluster.launch import RUN_ID
    from .windows import Windows

    windows = Windows(steps, ranks)

    class Benched(CLI):
        def instantiate_trainer(self, **kwargs: Any) -> Any:
            trainer: Any = super().instantiate_trainer(**kwargs)
            saves = (LastCheckpoint, BestCheckpoint)
            trainer.callbacks = [each for each in trainer.callbacks if not isinstance(each, saves)] + [windows]
            return trainer

    given = os.environ.pop(RUN_ID, None)
    kept = io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        fixed = [f"--{key}={value}" for key, value in ALONE.items()] + [f"--run.root={folder}", "--run.report=false"]
        try:
            with contextlib.redirect_stdout(kept), contextlib.redirect_stderr(kept):
                Benched(project, ["fit", *flags, *fixed], run=True)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return None
        finally:
            os.environ.pop(RUN_ID, None)
            os.environ |= {RUN_ID: given} if given else {}
            gc.collect()
    return windows.measured


def _show(found: dict[str, list[Measured | None]], data: Any, ranks: int) -> None:
    tokens = data.micro_batch_size * data.seq_len
    base = [m for m in found[AS_IT_IS] if m]
    if not base:
        raise InputError(f"memory ran out as configured: lower data.micro_batch_size, {data.micro_batch_size} now")
    step_s = statistics.median(s for m in base for s in m.fit_s)
    costs = [fit / bare for m in base for fit, bare in zip(m.fit_s, m.bare_s, strict=True)]
    print(f"\none device, micro-batches of {data.micro_batch_size} x {data.seq_len} tokens, {AS_IT_IS}")
    print(f"  step                 {step_s:.4g} s")
    print(f"  over the bare loop   {_told(costs)}: forward, backward, clipping, step, on one batch")
    print(f"  tokens per second    {tokens / step_s:.4g}")
    for line in _of_the_model(base[0], tokens / step_s):
        print(line)
    print(f"  waiting for data     {statistics.median(m.wait_share for m in base):.2%} of the time")
    print(f"  peak memory          {max(m.peak_gib for m in base):.3g} GiB")
    print("\nwith one change, tokens per second over those as configured, and peak memory")
    for name, all_ in found.items():
        if name == AS_IT_IS:
            continue
        measured = [m for m in all_ if m]
        rows = 2 if "micro_batch_size" in name else 1
        ratios = [rows * step_s / s for m in measured for s in m.fit_s]
        told = f"{_told(ratios)}, {max(m.peak_gib for m in measured):.3g} GiB" if measured else "memory ran out"
        print(f"  {name:<38} {told}")
    if ranks > 1:
        print(f"\non {ranks} ranks, by the formulas of parallel/traffic.py: sent by each in a step of one micro-batch")
        for name, (sent, messages) in base[0].sent.items():
            print(f"  {name:<10} {sent / 1e9:>10.4g} GB in {messages} messages: {sent / step_s / 1e9:.3g} GB/s")


def _of_the_model(measured: Measured, tokens_per_s: float) -> list[str]:
    if not measured.tflops:
        return []
    reached = tokens_per_s * measured.tflops
    share = f", {reached / measured.peak_tflops:.1%} of the device's peak (MFU)" if measured.peak_tflops else ""
    return [f"  model's operations   {reached:.4g} TFLOP/s{share}"]


def _told(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
