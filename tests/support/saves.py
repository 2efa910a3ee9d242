"""Short trainings that save after each step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.support.library import read_full
from tests.support.runs import SMALL_LLAMA, Workers
from tests.support.strategies import flags_of
from tests.support.wings import RunRecord

STEPS = 4


class Trainings:
    """Short trainings of one tiny model on two processes, a checkpoint after each step."""

    def __init__(self, folder: Path, corpus: Path, cache: Path) -> None:
        self.folder = folder
        flags = f"""--run.root={folder / "runs"} --run.report=false --data.source=TextFiles
            --data.source.paths=[{corpus}/*.txt] --data.tokenizer=Bytes --data.cache_dir={cache}
            --data.seq_len=32 --data.global_batch_size=4 --data.micro_batch_size=2
            --data.validation_share=0.15 --data.test_share=0.15 --data.prompts=[]
            --trainer.accelerator=cpu --trainer.devices=2 --trainer.max_steps={STEPS}
            --trainer.limit_val_batches=0 --trainer.logger=false
            --last_checkpoint.every_n_steps=1"""
        self.flags = [*flags.split(), f"--model.architecture={SMALL_LLAMA}"]
        with Workers(1) as workers:
            workers.run(["prepare", *self.flags], folder / "prepare").check()
        self._uninterrupted: dict[str, Path] = {}

    def run(self, strategy: str, run_id: str, *flags: str, **options: Any) -> RunRecord:
        """A command on two processes; one of the same `run_id` as before is a relaunch of that
        run."""
        number = len(list(self.folder.glob(f"{run_id}-*")))
        chosen = [*flags_of(strategy), *flags]
        if strategy == "zero3":  # or so small a model would stay whole on every rank
            chosen.append("--trainer.strategy.init_args.param_persistence_threshold=16")
        with Workers(2) as workers:
            record = self.folder / f"{run_id}-{number}"
            return workers.run(
                ["fit", *self.flags, *chosen], record, run_id=run_id, timeout_s=60, **options
            )

    def uninterrupted(self, strategy: str) -> Path:
        """Returns the checkpoints of every step of a training that is not killed."""
        if strategy not in self._uninterrupted:
            record = self.run(
                strategy, f"uninterrupted-{strategy}", f"--last_checkpoint.keep={STEPS}"
            ).check()
            self._uninterrupted[strategy] = record.run / "checkpoints"
        return self._uninterrupted[strategy]


def assert_same(path: Path, other: Path) -> None:
    """Weights, moments, counters and the data's position of two checkpoints, bit for bit."""
    one, two = read_full(path), read_full(other)
    keys = "state_dict optimizer_states DataModule global_step lr_schedulers random_state"
    for key in keys.split():
        assert equal(one[key], two[key]), key


def equal(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, two)
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(equal(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(equal, one, two))
    return one == two
