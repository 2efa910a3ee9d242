"""`bench`: how fast a module trains on this device, what the training loop costs, and which flags make it faster.

Trains with one process on one device, one micro-batch per optimizer step, on the configured data. Each training
alternates between `fit` with all callbacks and a bare loop over the same module, optimizer and batch. Each changed flag
is measured in trainings of its own, in random order. Saves no checkpoint and keeps no run folder.
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
import time
from collections import defaultdict
from typing import Any, NamedTuple

import psutil
import torch
from lightning.pytorch import Callback

from ..callbacks.checkpoint import BestCheckpoint, LastCheckpoint
from ..callbacks.throughput import peak_of
from ..cli.fit import CLI, parse
from ..cluster.launch import RUN_ID
from ..errors import InputError, is_out_of_memory
from ..model.any_module import require
from ..model.flops import Size
from ..project import Project
from . import sizes

WINDOWS = 3  # measured windows of each loop; one more before them warms up
UNCHANGED = "as configured"
ONE_DEVICE = {"trainer.devices": 1, "trainer.num_nodes": 1, "trainer.strategy": "auto", "trainer.limit_val_batches": 0}


class Measured(NamedTuple):
    """What one training measured.

    Args:
        fit_s: Seconds per step of `fit`, one value per window.
        bare_s: Seconds per step of the bare loop, likewise.
        wait_share: Share of the time of `fit` in which it waited for the data loader.
        peak_gib: Peak memory: allocated on the GPU, or of the process where there is no GPU.
        tflops: 10^12 operations per token; None if the model's are unknown.
        peak_tflops: The device's peak; None if unknown.
    """

    fit_s: list[float]
    bare_s: list[float]
    wait_share: float
    peak_gib: float
    tflops: float | None
    peak_tflops: float | None


def main(argv: list[str], project: Project) -> None:
    """Measures, and prints a table.

    Raises:
        InputError: the configuration cannot be run, or the training is too short.
    """
    own, flags = own_flags().parse_known_args(argv[1:])
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError("bench measures one device: start it without a launcher")
    if min(own.steps, own.rounds) < 1:
        raise InputError(f"--steps {own.steps} --rounds {own.rounds}: give 1 or more of each")
    cli = parse(["bench", *flags], project)
    require(cli.datamodule, "bench", "micro_batch_size", "seq_len")
    cli.datamodule.prepare()
    trials = {name: flags for name, flags in _trials(cli).items() if name == UNCHANGED or own.only in name}
    found: dict[str, list[Measured]] = defaultdict(list)
    for number in range(own.rounds):
        for name in random.sample(sorted(trials), len(trials)):
            print(f"round {number + 1} of {own.rounds}: {name}", flush=True)
            found[name] += _train(project, [*flags, *trials[name]], own.steps)
    _print_table(found, cli.datamodule)


def own_flags() -> argparse.ArgumentParser:
    what, exit_codes = str(__doc__).partition("\n\n")[2], " Exit code: 0, or 2 for bad input."
    parser = sizes.parser("bench", what, exit_codes, sizes=False)
    parser.add_argument("--steps", type=int, default=10, help="steps per window; 4 windows per training (default: 10)")
    parser.add_argument("--rounds", type=int, default=2, help="trainings of each kind (default: 2)")
    parser.add_argument("--only", default="", help="only the changes that have this in their name (default: all)")
    return parser


def _trials(cli: Any) -> dict[str, list[str]]:
    """Returns {name: further flags}. The name of a change is the flag to type."""
    size = cli.datamodule.micro_batch_size
    changes: list[tuple[str, Any]] = [("data.micro_batch_size", 2 * size)]
    if blocks := getattr(cli.model, "blocks", None):
        changes.append(("model.blocks.compile", str(not blocks.compile).lower()))
        changes.append(("model.blocks.checkpointing", "full" if blocks.checkpointing == "none" else "none"))
    trials = {UNCHANGED: [f"--data.global_batch_size={size}"]}
    for key, value in changes:
        rows = 2 * size if "micro_batch_size" in key else size
        trials[f"--{key}={value}"] = [f"--{key}={value}", f"--data.global_batch_size={rows}"]
    return trials


def _train(project: Project, flags: list[str], steps: int) -> list[Measured]:
    """Runs one training; returns [] if memory ran out."""
    windows = Windows(steps)

    class Benched(CLI):
        def instantiate_trainer(self, **kwargs: Any) -> Any:
            trainer: Any = super().instantiate_trainer(**kwargs)
            savers = (LastCheckpoint, BestCheckpoint)
            trainer.callbacks = [each for each in trainer.callbacks if not isinstance(each, savers)] + [windows]
            return trainer

    given, output = os.environ.pop(RUN_ID, None), io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        fixed = [f"--{key}={value}" for key, value in ONE_DEVICE.items()]
        fixed += [f"--run.root={folder}", "--run.report=false"]
        try:
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                Benched(project, ["fit", *flags, *fixed], run=True)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return []
        finally:
            os.environ.pop(RUN_ID, None)
            os.environ |= {RUN_ID: given} if given else {}
            gc.collect()
    return [windows.measured]


class Windows(Callback):
    """Times windows of `fit` and of the bare loop in turn, and ends training when all are measured.

    Args:
        steps: Optimizer steps per window.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self._fit_s: list[float] = []
        self._bare_s: list[float] = []
        self._count = self._peak = 0
        self._began = self._ended = self._waited = 0.0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._fit_s:  # the first window warms up
            self._waited += max(0.0, getattr(trainer.datamodule, "fetched_s", 0.0) - self._ended)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._count += 1
        if self._count % self.steps == 0:
            device = pl_module.device
            self._fit_s.append((_now(device) - self._began) / self.steps)
            cuda = device.type == "cuda"
            self._peak = torch.cuda.max_memory_allocated(device) if cuda else psutil.Process().memory_info().rss
            self._bare_s.append(self._bare_loop(trainer, pl_module, batch))
            trainer.should_stop = len(self._fit_s) == 1 + WINDOWS
            self._began = _now(device)
        self._ended = time.perf_counter()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if len(self._fit_s) < 1 + WINDOWS:
            needed = (1 + WINDOWS) * self.steps
            raise InputError(
                f"training ended after {self._count} steps, bench needs {needed}: lower --steps, or raise"
                " trainer.max_steps"
            )
        flops = Size.of(getattr(pl_module, "model", pl_module)).flops_per_token(trainer.datamodule.seq_len)
        self.measured = Measured(
            self._fit_s[1:],
            self._bare_s[1:],
            self._waited / (sum(self._fit_s[1:]) * self.steps),
            self._peak / 2**30,
            flops and flops / 1e12,
            peak_of(pl_module.device, str(trainer.precision)),
        )

    def _bare_loop(self, trainer: Any, module: Any, batch: Any) -> float:
        """Returns the seconds per step of forward, backward, clipping and optimizer step alone, on one batch."""
        (optimizer,), precision = trainer.optimizers, trainer.precision_plugin
        scaler = getattr(precision, "scaler", None) or torch.amp.GradScaler(enabled=False)
        limit = trainer.gradient_clip_val or float("inf")
        began = _now(module.device)
        for number in range(self.steps):
            with precision.train_step_context():
                loss = module.training_step(batch, number)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(module.parameters(), limit)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return (_now(module.device) - began) / self.steps


def _now(device: torch.device) -> float:
    """Returns the time when the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _print_table(found: dict[str, list[Measured]], data: Any) -> None:
    base, tokens = found.pop(UNCHANGED), data.micro_batch_size * data.seq_len
    if not base:
        raise InputError(f"memory ran out as configured: lower data.micro_batch_size, {data.micro_batch_size} now")
    step_s = statistics.median(s for m in base for s in m.fit_s)
    ratios = [fit / bare for m in base for fit, bare in zip(m.fit_s, m.bare_s, strict=True)]
    print(f"\none device, micro-batches of {data.micro_batch_size} x {data.seq_len} tokens, {UNCHANGED}")
    print(f"  step                 {step_s:.4g} s")
    print(f"  over the bare loop   {_spread(ratios)}: forward, backward, clipping, step, on one batch")
    print(f"  tokens per second    {tokens / step_s:.4g}")
    if base[0].tflops:
        reached = tokens / step_s * base[0].tflops
        share = f", {reached / base[0].peak_tflops:.1%} of the device's peak (MFU)" if base[0].peak_tflops else ""
        print(f"  model's operations   {reached:.4g} TFLOP/s{share}")
    print(f"  waiting for data     {statistics.median(m.wait_share for m in base):.2%} of the time")
    print(f"  peak memory          {max(m.peak_gib for m in base):.3g} GiB")
    print("\nwith one change: tokens per second relative to the above, and peak memory")
    for name, measured in found.items():
        rows = 2 if "micro_batch_size" in name else 1
        ratios = [rows * step_s / s for m in measured for s in m.fit_s]
        peak = f"{max(m.peak_gib for m in measured):.3g} GiB" if measured else ""
        print(f"  {name:<38} {f'{_spread(ratios)}, {peak}' if measured else 'memory ran out'}")


def _spread(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
