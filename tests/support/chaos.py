"""Soak a training in faults, one a minute, without a person, and compare it with one that was left alone.

    make chaos MINUTES=15          python -m tests.support.chaos --minutes 15 [--strategy fsdp2] [--seed 0]
    kills only, as in the tests    python -m tests.support.chaos --kills 50

Ends with 0 when the weights are the same bit by bit; prints the goodput, every fault and what it cost.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from dist_template.errors import Exit
from dist_template.observe.history.goodput import describe, read
from tests import PROJECT
from tests.support.injury import STEP_S, Training, corrupt, kill
from tests.support.library import manifest, read_full
from tests.support.line import PACKAGE
from tests.support.strategies import flags_of

PERIOD_S = 60.0  # one fault in each
STEP = 0.1  # seconds that a step takes at least: a small model's steps stand for a large one's
HANG_S = 5  # the watchdog's limit
LLAMA = "{model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 2}"
FAULTS = ("kill", "hang", "preempt", "corrupt")


def argv(folder: Path, steps: int, strategy: str) -> list[str]:
    texts = folder / "texts"
    texts.mkdir(exist_ok=True)
    for number in range(60):
        (texts / f"{number}.txt").write_text(
            f"document {number}: " + "the quick brown fox jumps over the lazy dog. " * 5
        )
    return [
        "fit",
        *flags_of(strategy),
        f"--run.root={folder}/runs",
        "--run.report=false",
        "--data.source=TextFiles",
        f"--data.source.paths=[{texts}/*.txt]",
        "--data.tokenizer=Bytes",
        f"--data.cache_dir={folder}/cache",
        "--data.seq_len=32",
        "--data.global_batch_size=8",
        "--data.micro_batch_size=2",
        "--data.validation_share=0.15",
        "--data.test_share=0.15",
        f"--model.architecture={LLAMA}",
        "--model.sample_tokens=4",
        "--trainer.accelerator=cpu",
        f"--trainer.max_steps={steps}",
        "--trainer.val_check_interval=500",
        "--last_checkpoint.every_n_steps=20",
        f"--watchdog.timeout_s={HANG_S}",
    ]


def newest(folder: Path, run_id: str) -> Path:
    path = manifest.newest(folder / "runs" / "default" / run_id / "checkpoints")
    if path is None:
        raise SystemExit(f"{run_id} has no checkpoint")
    return path


def injure(training: Training, fault: str, folder: Path, chance: random.Random) -> str:
    """Do it; a description."""
    rank, pid = chance.choice(sorted(training.ranks().items()))
    if fault == "preempt":
        kill(training.launcher.pid, signal.SIGTERM)
        return "SIGTERM to the launcher"
    if fault == "hang":
        kill(pid, signal.SIGSTOP)
        return f"SIGSTOP to rank {rank}"
    what = f"corrupted {corrupt(newest(folder, 'hurt'), chance)}, and " if fault == "corrupt" else ""
    kill(pid)
    return f"{what}SIGKILL to rank {rank}"


def soak(training: Training, folder: Path, minutes: float, chance: random.Random) -> int:
    """Until it is done, relaunched as a scheduler would; the number of faults."""
    begun, faults, due = time.monotonic(), 0, chance.uniform(15, PERIOD_S)
    while (code := training.launcher.poll()) != Exit.DONE:
        now = time.monotonic() - begun
        if now > 120 + 120 * minutes:
            raise SystemExit(f"no end after {now:.0f} s; see {training.log}")
        if code == Exit.REQUEUE:
            training.start()
        elif code is not None:
            raise SystemExit(f"ended with code {code}; see {training.log}")
        steps = training.steps()
        # Not while it starts, which a fault would make longer and prove nothing; a late fault moves no other.
        trains = bool(steps) and time.time() - steps[-1].at < 2 and steps[-1].event == "step"
        if now > due and trains and len(training.ranks()) == 2:
            fault = FAULTS[faults % len(FAULTS)] if faults < len(FAULTS) else chance.choice(FAULTS)
            print(f"{now:6.0f} s  step {steps[-1].step}: {injure(training, fault, folder, chance)}", flush=True)
            faults += 1
            due = faults * PERIOD_S + chance.uniform(0, PERIOD_S * 0.75)
        time.sleep(0.1)
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15.0, help="about how long")
    parser.add_argument("--strategy", default="ddp", help="a file of configs/strategy")
    parser.add_argument("--seed", type=int, default=0, help="of the faults")
    parser.add_argument("--kills", type=int, default=0, help="run the tests of killed ranks with so many kills instead")
    args = parser.parse_args()
    if args.kills:
        test = Path(__file__).parents[1] / "cluster" / "test_killed.py"
        command = [sys.executable, "-m", "pytest", "-s", "-k", "killed_at_any_time", "--timeout=0", str(test)]
        return subprocess.call(command, env=os.environ | {"KILLS": str(args.kills)}, cwd=PROJECT)
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    steps = int(args.minutes * 60 * 0.75 / STEP)  # the rest is for the faults
    command = argv(folder, steps, args.strategy)
    subprocess.check_call([sys.executable, "-m", PACKAGE, "prepare", *command[1:]], cwd=PROJECT)
    print(f"{steps} steps undisturbed, then with a fault a minute; everything is in {folder}", flush=True)
    options = {"NPROC": "2", "MAX_RESTARTS": "1000"}
    with Training(folder / "whole", command, (), **options) as whole:
        if code := whole.end(3600):
            raise SystemExit(f"the undisturbed run ended with code {code}; see {whole.log}")
    with Training(folder / "hurt", command, (), **options | {STEP_S: str(STEP)}) as hurt:
        faults = soak(hurt, folder, args.minutes, random.Random(args.seed))
    print(f"{faults} faults; {describe(read(folder / 'runs' / 'default' / 'hurt'))}")
    a, b = (read_full(newest(folder, name))["state_dict"] for name in ("whole", "hurt"))
    same = a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    print("the weights are the same bit by bit" if same else "the weights DIFFER from the undisturbed run's")
    return Exit.DONE if same else Exit.FAILED


if __name__ == "__main__":
    sys.exit(main())
