"""How long a save keeps training waiting, beside the strategy's own library, on the same disk and in the same run.

Two processes, a Llama of 40M parameters with AdamW's moments (480 MB). A hand-written loop calls `dcp.save` of the
weights and moments, under ZeRO-2 of each rank's partitions. Under ZeRO-2, DeepSpeed's own `engine.save_checkpoint` is
an arm too, without a target: it flushes nothing to the disk. The project's saves are verified: each byte is hashed and
flushed, and one rename commits all.

Each save is followed by a training step. Wall time is what training waits for, on the slower rank, until the call
returns. CPU time is what both ranks' threads take in this wait, and from the optimizer's step until all is committed.
Where no core is idle, training pays for both in its next steps.

Targets: with `last_checkpoint.asynchronous` training waits at most 0.15 of what `dcp.save` makes it wait; without, it
does not wait longer.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from lightning.pytorch import Callback
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

from dist_template.checkpoint import commit, manifest
from dist_template.checkpoint.commit import BackgroundSaver
from tests.support.runs import Workers

from . import ROOT
from .arms import Clock, Comparison, Sample
from .record import Figure, Options, Result

NAME = "checkpoint"
RANKS = 2
BY_HAND = {"ddp": ["dcp.save"], "fsdp2": ["dcp.save"], "zero2": ["dcp.save", "save_checkpoint"]}
WAITS, GOES_ON = "project, asynchronous false", "project, asynchronous true"
MODEL = {"model_type": "llama", "hidden_size": 640, "intermediate_size": 1728, "num_hidden_layers": 8}
SMALL = MODEL | {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}


def run(options: Options) -> Result:
    result = Result(NAME)
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as name:  # on a disk, where /tmp may be memory
        folder = Path(name)
        flags = _flags(folder, SMALL if options.quick else MODEL)
        with Workers(1) as workers:
            workers.run(["prepare", *flags], folder / "prepare").check()
        for strategy, by_hand in BY_HAND.items():
            title = f"{strategy}, {RANKS} processes; CPU time until it is committed, wall time that training waits"
            comparison = Comparison(title, "save", by_hand[0], _measure(strategy, flags, folder, options.rounds))
            result.comparisons.append(comparison)
            for other in by_hand:
                has_target = other == "dcp.save"
                baseline = other if has_target else f"{other}, no target"
                for how, arm, most in (("asynchronous", GOES_ON, 0.15), ("otherwise", WAITS, 1.0)):
                    ratios = comparison.wall_ratios(arm, other)
                    title = f"{strategy}: training waits, {how}, over {baseline}"
                    result.figures.append(Figure(title, ratios, at_most=most if has_target else None))
            cpu = comparison.cpu_ratios(GOES_ON)
            result.figures.append(Figure(f"{strategy}: CPU time of a whole save, asynchronous, over {by_hand[0]}", cpu))
    result.notes += [
        "hashing and the commit are in the project's saves and in none of the others; dcp.save flushes too",
        "asynchronous, training waits until its tensors are copied in host memory; they are written beside it",
    ]
    return result


def _flags(folder: Path, model: dict[str, Any]) -> list[str]:
    (folder / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 400, encoding="utf-8")
    return [
        f"--run.root={folder / 'runs'}", "--run.report=false", "--data.source=TextFiles",
        f"--data.source.paths=[{folder / 'text.txt'}]", "--data.tokenizer=Bytes",
        f"--data.cache_dir={folder / 'cache'}", "--data.seq_len=16",
        f"--data.global_batch_size={RANKS}", "--data.micro_batch_size=1",
        "--data.validation_share=0", "--data.test_share=0", f"--model.architecture={json.dumps(model)}",
        "--trainer.accelerator=cpu", f"--trainer.devices={RANKS}",
        "--same_environment.ignore=[git_commit, git_diff]",  # whoever measures may go on editing
    ]  # fmt: skip


def _measure(strategy: str, flags: list[str], folder: Path, rounds: int) -> dict[str, list[Sample]]:
    steps = (rounds + 1) * (len(BY_HAND[strategy]) + 2) + 1
    argv = ["fit", *flags, f"--config={ROOT}/build/dev/configs/strategy/{strategy}.yaml"]
    argv += [f"--trainer.fast_dev_run={steps}"]  # no checkpoint but the measured ones
    record = folder / strategy
    with Workers(RANKS) as workers:
        workers.run(argv, record, callbacks=[Saves(BY_HAND[strategy], record, rounds)], timeout_s=900).check()
    of_ranks = [json.loads((record / f"saves{rank}.json").read_text("utf-8")) for rank in range(RANKS)]
    print(f"  {strategy}: {rounds} rounds", flush=True)
    return {
        arm: [
            Sample(sum(cpu for cpu, _ in ranks), max(wall for _, wall in ranks))
            for ranks in zip(*(each[arm] for each in of_ranks), strict=True)
        ]
        for arm in of_ranks[0]
    }


@dataclass
class Saves(Callback):
    """At the end of each training step an arm saves, in an order that all ranks know; in each round every arm once.

    Args:
        by_hand: The arms beside the project's.
        folder: Where the checkpoints go, and the times.
        rounds: One more warms up: the copy's memory is then there.
    """

    by_hand: list[str]
    folder: Path
    rounds: int

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.saver = BackgroundSaver(trainer.strategy)
        self.clock = Clock()
        self.arms: dict[str, Callable[[Path], None]] = {
            **{name: partial(BY_HAND_ARMS[name], trainer) for name in self.by_hand},
            WAITS: partial(commit.save, trainer),
            GOES_ON: partial(self.saver.start, trainer),
        }
        self.times: dict[str, list[tuple[float, float]]] = {arm: [] for arm in self.arms}
        orders = (random.Random(n).sample(sorted(self.arms), len(self.arms)) for n in range(self.rounds + 1))
        self.left, self.arm = [arm for order in orders for arm in order], ""

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        if self.left:
            self.arm = self.left.pop(0)
            self.path = self.folder / manifest.name(trainer.global_step)  # manifest.damage compares the two
            trainer.strategy.barrier()
            self.clock.start()
            self.arms[self.arm](self.path)
            self.sample = self.clock.stop()

    def on_before_optimizer_step(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        if not self.arm:
            return
        self.clock.start()
        self.saver.wait()
        self.times[self.arm].append((self.sample.cpu_s + self.clock.stop().cpu_s, self.sample.wall_s))
        trainer.strategy.barrier()
        if trainer.is_global_zero:
            assert self.arm in self.by_hand or manifest.damage(self.path) is None
            shutil.rmtree(self.path)
            os.sync()  # no arm pays for what another has not flushed
        self.arm = ""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.saver.close()
        measured = {arm: times[1:] for arm, times in self.times.items()}
        (self.folder / f"saves{trainer.global_rank}.json").write_text(json.dumps(measured), encoding="utf-8")


def dcp_save(trainer: Any, path: Path) -> None:
    module = trainer.lightning_module
    if engine := getattr(trainer.strategy, "deepspeed_engine", None):
        zero, rank = engine.optimizer, trainer.global_rank
        parts = [(flat, zero.optimizer.state[flat]) for flat in zero.single_partition_of_fp32_groups]
        state = {"model": module.state_dict(), f"parts of {rank}": {str(n): part for n, part in enumerate(parts)}}
    else:
        (optimizer,) = trainer.optimizers
        flat = StateDictOptions(flatten_optimizer_state_dict=True)
        state = {"model": get_model_state_dict(module), "optimizer": None}
        state["optimizer"] = get_optimizer_state_dict(module, getattr(optimizer, "_optimizer", optimizer), options=flat)
    dcp.save(state, checkpoint_id=path)


def save_checkpoint(trainer: Any, path: Path) -> None:
    trainer.strategy.deepspeed_engine.save_checkpoint(path, "step")


BY_HAND_ARMS: dict[str, Callable[[Any, Path], None]] = {"dcp.save": dcp_save, "save_checkpoint": save_checkpoint}
