"""One NVIDIA GPU: does there hold what the tests prove on CPU processes?

    parity   the losses of each strategy that one device can run, over the CPU's; bf16-mixed over 32-true
    syncs    how often the host waits for the device in a step: a plain one, a logged one, one with a checkpoint
    nan      a gradient that is not finite is skipped, with the optimizer on the device and on the host
    zero3    ZeRO-3 ends well after a step that is no validation, with its state on the device and on the host
    verbs    validate, evaluate, export, report, diagnose and plan after a run
    saves    how long training waits for a checkpoint, written in the background and otherwise

Each takes less than nine minutes and is chosen with `--arms parity,nan`; a result is written after each figure. A
command that fails is a row with its last line. `--quick` runs every line on a CPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch import Callback

from dist_template.compat.lightning import accumulates
from dist_template.observe.history import goodput
from dist_template.wings.history import read_metrics

from . import ROOT
from .gpu import chosen, put
from .record import Figure, Options, Result, write

NAME = "gpu-check"
PROJECT = ROOT / "build" / "dev"
LIMIT_S = 180  # of one command
LLAMA = "--model.architecture={model_type: llama, hidden_size: 96, intermediate_size: 160, num_hidden_layers: 3,"
LLAMA += " num_attention_heads: 3, num_key_value_heads: 3}"
MODELS = {"llama": [LLAMA], "deepseek_v3": []}
MESH = "--trainer.strategy.init_args."
STRATEGIES = {
    "auto": [],
    "ddp": ["--config=configs/strategy/ddp.yaml"],
    "fsdp2": ["--config=configs/strategy/fsdp2.yaml"],
    "fsdp2, offload": ["--config=configs/strategy/fsdp2.yaml", f"{MESH}cpu_offload=true"],
    "zero2": ["--config=configs/strategy/zero2.yaml"],
    "zero3": ["--config=configs/strategy/zero3.yaml"],
    "zero3, offload": [
        "--config=configs/strategy/zero3.yaml", f"{MESH}offload_optimizer=true", f"{MESH}offload_parameters=true",
    ],
}  # fmt: skip
PARITY, HALF = 1e-4, 2e-2  # relative, of the loss of eight steps: other sums in fp32; bf16's rounding
STEPS = 8


@dataclass
class Bench:
    """Runs the project's commands and keeps what they show."""

    options: Options
    folder: Path
    result: Result
    device: str

    def fit(self, name: str, flags: list[str], device: str = "", **environment: str) -> Path | None:
        """Trains `STEPS` steps; the run's folder, or None and a row if it failed."""
        given = ["--config=configs/quickstart.yaml", "--trainer.devices=1", f"--trainer.max_steps={STEPS}"]
        given += [f"--trainer.accelerator={device or self.device}", "--trainer.log_every_n_steps=1"]
        given += ["--data.source=TextFiles", f"--data.source.paths=[{ROOT}/docs/*.md]", "--data.source.separator=\n"]
        given += ["--data.test_share=0.1", "--data.validation_share=0.1", "--data.prompts=[]", "--data.seq_len=128"]
        given += [f"--data.cache_dir={self.folder}/cache", f"--run.root={self.folder}/runs", "--run.report=false"]
        given += ["--run.name=check", f"--trainer.val_check_interval={STEPS // 2}", "--model.optim.warmup=2"]
        run_id = f"r{len(list(self.folder.glob('runs/check/*')))}"
        if not self.says(name, "fit", *given, *flags, DIST_RUN_ID=run_id, **environment):
            return None
        return self.folder / "runs" / "check" / run_id

    def says(self, name: str, *argv: str, **environment: str) -> bool:
        """Whether a command ended well; if not, its last line stands in a row."""
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if "--trainer.accelerator=cpu" in argv else {}
        path = os.pathsep.join(filter(None, (str(PROJECT), str(ROOT), os.environ.get("PYTHONPATH", ""))))
        env = os.environ | {"PYTHONPATH": path} | hidden | environment
        command = [sys.executable, "-m", "trainer_dev", *argv]
        try:
            done = subprocess.run(command, cwd=PROJECT, env=env, capture_output=True, text=True, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            self.put(Figure(name, [], instead=f"no end within {LIMIT_S} s"))
            return False
        if done.returncode:
            lines = (done.stderr.strip() or done.stdout.strip()).splitlines() or ["nothing was printed"]
            sys.stderr.write("\n".join(lines[-40:]) + "\n")
            self.put(Figure(name, [], instead=f"exit {done.returncode}: {lines[-1][:200].replace('|', '/')}"))
        return done.returncode == 0

    def put(self, *figures: Figure) -> None:
        """Prints and writes them."""
        put(self.result, [*figures])
        write(self.result, self.options)
        for each in figures:
            shown = each.instead or f"{each.median:.3g} {each.unit}"
            print(f"  {each.what}: {shown}", flush=True)


def run(options: Options) -> Result:
    """Raises SystemExit where there is no GPU, unless every line is only to be run."""
    cuda = torch.cuda.is_available()
    if not cuda and not options.quick:
        raise SystemExit(f"{NAME}: there is no NVIDIA GPU here; --quick runs every line on a CPU, and checks nothing")
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(options, Path(folder), Result(NAME), "gpu" if cuda else "cpu")
        for check in chosen(CHECKS, options.arms, "--arms").values():
            check(bench)
    return bench.result


# ---- the checks ----------------------------------------------------------------------------------------------------


def parity(bench: Bench) -> None:
    few = ("auto", "fsdp2") if bench.options.quick else tuple(STRATEGIES)
    for model, flags in MODELS.items():
        want = bench.fit(f"parity: {model} on the CPU", flags, "cpu")
        if want is None:
            continue
        for strategy in few:
            name = f"parity: {model}, {strategy}, largest difference of a loss from the CPU's"
            if got := bench.fit(name, [*flags, *STRATEGIES[strategy]]):
                bench.put(Figure(name, [_difference(want, got)], at_most=PARITY))
        name = f"parity: {model}, bf16-mixed, largest difference of a loss from 32-true"
        if got := bench.fit(name, [*flags, "--trainer.precision=bf16-mixed"]):
            bench.put(Figure(name, [_difference(want, got)], at_most=HALF))


def syncs(bench: Bench) -> None:
    few = ("auto",) if bench.options.quick else ("auto", "ddp", "fsdp2", "zero2", "zero3")
    for strategy in few:
        found = bench.folder / f"syncs_{strategy}.json"
        name = f"syncs: {strategy}"
        more = ["--trainer.callbacks+=benchmarks.gpu_check.Syncs", f"--trainer.callbacks.path={found}"]
        more += ["--trainer.log_every_n_steps=3", "--last_checkpoint.every_n_steps=5"]
        if bench.fit(name, [*STRATEGIES[strategy], *more]):
            waits = json.loads(found.read_text("utf-8"))
            at_most = None if strategy.startswith("zero") else 0
            for kind, lines in waits.items():
                where = f", first {next(iter(lines))}" if lines else ""
                limit = at_most if kind == "plain" else None
                bench.put(Figure(f"{name}: waits of a {kind} step{where}", [sum(lines.values())], at_most=limit))


def nan(bench: Bench) -> None:
    for strategy in ("auto", "fsdp2", "fsdp2, offload")[: 1 if bench.options.quick else 3]:
        name = f"nan: {strategy}: the weights stay finite, the step is skipped"
        more = ["--trainer.callbacks+=benchmarks.gpu_check.Poison", "--numerics.on_non_finite=skip"]
        if run := bench.fit(name, [*STRATEGIES[strategy], *more]):
            losses = list(_losses(run).values())
            is_right = len(losses) >= STEPS - 1 and all(loss == loss for loss in losses[-2:])
            bench.put(Figure(name, [float(is_right)], at_least=1))


def zero3(bench: Bench) -> None:
    for strategy in ("zero3", "zero3, offload")[: 1 if bench.options.quick else 2]:
        name = f"zero3: {strategy}: a fit whose last step is no validation ends well"
        if bench.fit(name, [*STRATEGIES[strategy], f"--trainer.val_check_interval={STEPS - 3}"]):
            bench.put(Figure(name, [1.0], at_least=1))


def verbs(bench: Bench) -> None:
    run = bench.fit("verbs: fit", ["--trainer.precision=bf16-mixed"])
    if run is None:
        return
    checkpoint, config = run / "checkpoints", f"--config={run / 'config.yaml'}"
    exported = bench.folder / "exported"
    for verb, flags in {
        "validate": [config, f"--ckpt_path={checkpoint}"],
        "export": [config, f"--checkpoint={checkpoint}", f"--output={exported}"],
        "evaluate": [str(run)],
        "report": [str(run)],
        "diagnose": [str(run)],
        "plan": ["--config=configs/quickstart.yaml", "--nodes=1", "--devices=1", "--memory=80GB"],
    }.items():
        name = f"verbs: {verb} ends well"
        if bench.says(name, verb, *flags):
            bench.put(Figure(name, [1.0], at_least=1))


def saves(bench: Bench) -> None:
    """Of 200M parameters, 2.4 GB with the optimizer's state; `--quick` has fewer."""
    width, layers = (64, 1) if bench.options.quick else (1024, 12)
    large = f"--model.architecture={{model_type: llama, hidden_size: {width}, intermediate_size: {4 * width},"
    large += f" num_hidden_layers: {layers}, num_attention_heads: 8, num_key_value_heads: 8}}"
    for strategy in ("auto",) if bench.options.quick else ("auto", "ddp", "fsdp2"):
        for way in ("true", "false"):
            more = ["--last_checkpoint.every_n_steps=2", f"--last_checkpoint.asynchronous={way}"]
            name = f"saves: {strategy}, asynchronous {way}: training waits"
            began = time.perf_counter()
            if run := bench.fit(name, [large, *STRATEGIES[strategy], *more]):
                waits = [goodput.read(run)["checkpoint"]]
                took = f"saves: {strategy}, asynchronous {way}: the whole command"
                bench.put(Figure(name, waits, unit="s"), Figure(took, [time.perf_counter() - began], unit="s"))


CHECKS: dict[str, Callable[[Bench], None]] = {
    "parity": parity, "syncs": syncs, "nan": nan, "zero3": zero3, "verbs": verbs, "saves": saves,
}  # fmt: skip


def _losses(run: Path) -> dict[int, float]:
    series = read_metrics(run)["train/loss"]
    return dict(zip(series.steps.tolist(), series.values.tolist(), strict=True))


def _difference(want: Path, got: Path) -> float:
    """Relative; infinite where a step is missing."""
    expected, found = _losses(want), _losses(got)
    if expected.keys() != found.keys():
        return float("inf")
    return max(abs(found[step] - loss) / abs(loss) for step, loss in expected.items())


# ---- callbacks of the commands -------------------------------------------------------------------------------------


class Syncs(Callback):
    """Counts torch's warnings of calls that wait for the device, by the line that waits, in steps 3 and later.

    Args:
        path: JSON: {"plain" | "log" | "checkpoint": {line: waits of the newest such step}}.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self._found: dict[str, Counter[str]] = {}
        self._now: Counter[str] = Counter()

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        show = warnings.showwarning

        def count(message: Any, category: Any, filename: str, lineno: int, *rest: Any) -> None:
            if "synchroniz" in str(message):
                self._now[f"{'/'.join(Path(filename).parts[-2:])}:{lineno}"] += 1
            else:
                show(message, category, filename, lineno, *rest)

        warnings.showwarning = count
        warnings.filterwarnings("always", message=".*synchroniz")
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("warn")

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any, **__: Any) -> None:
        if accumulates(trainer):
            return
        step, every = trainer.global_step, trainer.log_every_n_steps  # ty: ignore[unresolved-attribute]
        kind = "log" if step % every == 0 else "checkpoint" if step % 5 == 0 else "plain"
        if step > 2:
            self._found[kind] = self._now
        self._now = Counter()

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("default")
        self.path.write_text(json.dumps(self._found), encoding="utf-8")


class Poison(Callback):
    """One gradient of the fourth step is not finite."""

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: Any) -> None:
        if trainer.global_step == 3:
            gradient = next(p.grad for p in pl_module.parameters() if p.grad is not None)
            with torch.no_grad():
                gradient.mul_(float("nan"))
