"""How long a save keeps training waiting, beside torch's own library, on the same disk and in the
same run.

Two processes, a Llama of 40M parameters with AdamW's moments (480 MB). A hand-written loop calls
`dcp.save` of the weights and moments, under ZeRO-2 of each rank's partitions. The project's saves
are verified: each byte is hashed and flushed, and one rename commits all. In the background,
training waits until its tensors are copied in host memory. Each save is followed by a training
step. Wall time is what training waits for, on the slower rank, until the call returns. CPU time is
what both ranks' threads take in this wait, and from the optimizer's step until all is committed.

Targets: with `last_checkpoint.asynchronous` training waits at most 0.15 of what `dcp.save` makes it
wait; without, it does not wait longer.
"""

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
from .loops.task import Task, data_flags, prepare
from .record import Figure, Options, Result

NAME = "checkpoint"
RANKS = 2
BY_HAND, WAITS, IN_BACKGROUND = (
    "dcp.save",
    "project, asynchronous false",
    "project, asynchronous true",
)
MODEL = {
    "model_type": "llama",
    "hidden_size": 640,
    "intermediate_size": 1728,
    "num_hidden_layers": 8,
}
SMALL = MODEL | {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}


def run(options: Options) -> Result:
    result = Result(NAME)
    with tempfile.TemporaryDirectory(
        dir=ROOT / "build"
    ) as name:  # on a disk, where /tmp may be memory
        task = Task(Path(name), SMALL if options.quick else MODEL, batch_size=1, seq_len=16)
        prepare(task)
        for strategy in ("ddp", "fsdp2", "zero2"):
            title = (
                f"{strategy}, {RANKS} processes; CPU time until it is committed, wall time that"
                " training waits"
            )
            comparison = Comparison(
                title, "save", BY_HAND, _measure(strategy, task, options.rounds)
            )
            result.comparisons.append(comparison)
            for how, arm, most in (
                ("asynchronous", IN_BACKGROUND, 0.15),
                ("otherwise", WAITS, 1.0),
            ):
                title = f"{strategy}: training waits, {how}, over dcp.save"
                result.figures.append(Figure(title, comparison.wall_ratios(arm), at_most=most))
            cpu = comparison.cpu_ratios(IN_BACKGROUND)
            result.figures.append(
                Figure(f"{strategy}: CPU time of a whole save, asynchronous, over dcp.save", cpu)
            )
    return result


def _measure(strategy: str, task: Task, rounds: int) -> dict[str, list[Sample]]:
    record = task.folder / strategy
    argv = [
        "fit",
        f"--config={ROOT}/build/dev/configs/strategy/{strategy}.yaml",
        *data_flags(task, RANKS),
    ]
    argv += [
        f"--run.root={task.folder / 'runs'}",
        "--run.report=false",
        "--trainer.accelerator=cpu",
    ]
    argv += [f"--model.architecture={json.dumps(task.architecture)}", f"--trainer.devices={RANKS}"]
    # no checkpoint but the measured ones
    argv += [f"--trainer.fast_dev_run={3 * (rounds + 1) + 1}"]
    Workers(RANKS).run(argv, record, callbacks=[Saves(record, rounds)], timeout_s=900).check()
    ranks = [json.loads((record / f"saves{rank}.json").read_text("utf-8")) for rank in range(RANKS)]
    print(f"  {strategy}: {rounds} rounds", flush=True)
    samples: dict[str, list[Sample]] = {}
    for arm in ranks[0]:
        pairs = zip(*(each[arm] for each in ranks), strict=True)
        samples[arm] = [
            Sample(sum(cpu for cpu, _ in pair), max(wall for _, wall in pair)) for pair in pairs
        ]
    return samples


@dataclass
class Saves(Callback):
    """At the end of each training step an arm saves, in an order that all ranks know; in each round
    every arm once."""

    folder: Path  # of the checkpoints and the times
    rounds: int  # one more warms up: the copy's memory is then there

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.saver, self.clock = BackgroundSaver(trainer.strategy), Clock()
        self.arms: dict[str, Callable[[Path], None]] = {
            BY_HAND: partial(dcp_save, trainer),
            WAITS: partial(commit.save, trainer),
            IN_BACKGROUND: partial(self.saver.start, trainer),
        }
        self.times: dict[str, list[tuple[float, float]]] = {arm: [] for arm in self.arms}
        orders = (
            random.Random(n).sample(sorted(self.arms), len(self.arms))
            for n in range(self.rounds + 1)
        )
        self.left, self.arm = [arm for order in orders for arm in order], ""

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        if self.left:
            self.arm = self.left.pop(0)
            # manifest.damage compares the two
            self.path = self.folder / manifest.name(trainer.global_step)
            trainer.strategy.barrier()
            self.clock.start()
            self.arms[self.arm](self.path)
            self.sample = self.clock.stop()

    def on_before_optimizer_step(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        if not self.arm:
            return
        self.clock.start()
        self.saver.wait()
        self.times[self.arm].append(
            (self.sample.cpu_s + self.clock.stop().cpu_s, self.sample.wall_s)
        )
        trainer.strategy.barrier()
        if trainer.is_global_zero:
            assert self.arm == BY_HAND or manifest.damage(self.path) is None
            shutil.rmtree(self.path)
            os.sync()  # no arm pays for what another has not flushed
        self.arm = ""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.saver.close()
        measured = {arm: times[1:] for arm, times in self.times.items()}
        (self.folder / f"saves{trainer.global_rank}.json").write_text(
            json.dumps(measured), encoding="utf-8"
        )


def dcp_save(trainer: Any, path: Path) -> None:
    module = trainer.lightning_module
    if engine := getattr(trainer.strategy, "deepspeed_engine", None):
        zero, rank = engine.optimizer, trainer.global_rank
        parts = [
            (flat, zero.optimizer.state[flat]) for flat in zero.single_partition_of_fp32_groups
        ]
        state = {
            "model": module.state_dict(),
            f"parts of {rank}": {str(n): part for n, part in enumerate(parts)},
        }
    else:
        (optimizer,) = trainer.optimizers
        flat = StateDictOptions(flatten_optimizer_state_dict=True)
        state = {"model": get_model_state_dict(module), "optimizer": None}
        state["optimizer"] = get_optimizer_state_dict(
            module, getattr(optimizer, "_optimizer", optimizer), options=flat
        )
    dcp.save(state, checkpoint_id=path)
