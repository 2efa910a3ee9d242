"""A training step sends what its strategy must send, and two numbers besides.

Each strategy trains a small model with accumulation; what it hands to process groups is counted.
The figures are those of a loop of ten lines that trains it by the strategy's own library.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dist_template.callbacks import Preemption
from tests.support.collectives import ToGroups
from tests.support.runs import SMALL_LLAMA, Workers
from tests.support.strategies import ARGS, flags_of
from tests.support.tiers import tiers

ACCUMULATION = 2
FIRST, STEPS = 3, 2  # optimizer steps: the first that is counted, how many are; none is a log step
# For a mean over the global batch's counted tokens, and the decision whether a step is taken.
OURS = Counter({"allreduce": 1, "allgather_base": 1})


class Collectives(ToGroups):
    """Calls by name, and bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def take(self, name: str, args: Any, kwargs: Any) -> None:
        self.counts[name.strip("_")] += 1
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        self.counts["bytes"] += sum(each.nbytes for each in tensors)


class CountSteps(Callback):
    """Counts STEPS optimizer steps, from a batch's start to a batch's start."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.mode = Collectives()
        for callback in trainer.callbacks:
            if isinstance(callback, Preemption):
                callback._until_vote = 1000  # it comes once in seconds, not in steps

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        batch_idx = args[3]
        if batch_idx == (FIRST - 1) * ACCUMULATION:
            self.mode.__enter__()
        if batch_idx == (FIRST - 1 + STEPS) * ACCUMULATION:
            self.mode.__exit__(None, None, None)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        counts = {kind: count / STEPS for kind, count in self.mode.counts.items()}
        print("\nsent", json.dumps(counts), flush=True)


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Iterator[list[str]]:
    folder = tmp_path_factory.mktemp("collectives")
    flags = [
        f"--run.root={folder / 'runs'}", "--run.report=false", "--data.source=TextFiles",
        f"--data.source.paths=[{corpus}/*.txt]", "--data.tokenizer=Bytes", "--data.seq_len=32",
        f"--data.cache_dir={folder / 'cache'}", "--data.micro_batch_size=1", "--data.test_share=0",
        "--data.validation_share=0", f"--model.architecture={SMALL_LLAMA}", "--trainer.max_steps=8",
        "--trainer.accelerator=cpu", "--trainer.log_every_n_steps=8", "--trainer.logger=false",
        "--trainer.gradient_clip_val=1.0",
    ]  # fmt: skip
    with Workers(1) as workers:
        workers.run(["prepare", *flags], folder / "prepare").check()
    yield flags


REDUCED_ONCE = f"{ARGS}.reduce_each_micro_batch=false"
CHUNKED = "--model.loss_chunk=16"  # of 32 tokens; the figures are those without chunks
ALL_SHARDED = f"{ARGS}.param_persistence_threshold=0"
FSDP2 = {"allgather_base": 14, "reduce_scatter_base": 8, "allreduce": 1, "bytes": 1_238_020}
ONCE = FSDP2 | {"reduce_scatter_base": 4, "bytes": 1_015_108}
HSDP = FSDP2 | {"allreduce": 5, "bytes": 1_312_324}  # gradients between copies, and their norm
ZERO1 = {"allgather_base": 2, "allreduce": 3, "bytes": 370_888}
ZERO2 = {"allgather_base": 2, "allreduce": 4, "bytes": 519_240}
ZERO3 = {"allgather_base": 2, "reduce_scatter_base": 2, "allreduce": 2, "bytes": 890_128}
CASES = {  # strategy, ranks, flags, what a step sends besides
    "ddp": ("ddp", 2, [], {"allreduce": 1, "bytes": 148_352}),
    "fsdp2": ("fsdp2", 2, [], FSDP2),
    "fsdp2, reduced once": ("fsdp2", 2, [REDUCED_ONCE], ONCE),
    "fsdp2, chunks": ("fsdp2", 2, [CHUNKED], FSDP2),
    "hsdp": ("hsdp", 4, [], HSDP),
    "zero1": ("zero1", 2, [], ZERO1),
    "zero2": ("zero2", 2, [], ZERO2),
    "zero3": ("zero3", 2, [ALL_SHARDED], ZERO3),
    "zero3, chunks": ("zero3", 2, [ALL_SHARDED, CHUNKED], ZERO3),
}
DAILY = ["ddp", "fsdp2, reduced once", "zero2", "zero3"]


@pytest.mark.slow
@pytest.mark.parametrize("case", tiers(CASES, DAILY))
def test_a_step_sends_what_it_must(case: str, flags: list[str], tmp_path: Path) -> None:
    strategy, ranks, more, expected = CASES[case]
    argv = ["fit", *flags, *flags_of(strategy), f"--trainer.devices={ranks}", *more]
    argv += [f"--data.global_batch_size={ranks * ACCUMULATION}"]
    with Workers(ranks) as workers:
        into = tmp_path / tmp_path.name  # its name is the run's
        record = workers.run(argv, into, callbacks=[CountSteps()]).check()
    (line,) = [line for line in record.log(0).splitlines() if line.startswith("sent {")]
    # of ours, a float32, and two that become two a rank
    ours = OURS + Counter(bytes=4 + 8 + 8 * ranks)
    assert json.loads(line.removeprefix("sent ")) == Counter(expected) + ours
