"""The numerics guard: bad steps change no weight, under any strategy; they are told, and no checkpoint holds NaN."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ..callbacks.incidents import read_incidents
from ..callbacks.numerics import Numerics
from ..errors import Ended, Exit
from ..module import LanguageModule
from ..rehearsal.record import RunRecord
from ..rehearsal.workers import Workers
from .conftest import CONFIGS
from .test_parallel_parity import MODELS, PROCESSES, assert_close

BAD_STEP = 5
STRATEGIES = ["ddp", "fsdp2", "fsdp2_ep", "zero1", "zero2", "zero3"]


def spoil_loss(step: int, rank: int, micro_batch: int, factor: float = math.nan) -> None:
    """In each worker: one rank's loss in one micro-batch of one step, times `factor`."""
    original = LanguageModule.training_step

    def training_step(self: Any, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = original(self, batch, batch_idx)
        hit = (self.global_step + 1, self.global_rank, batch_idx % 2) == (step, rank, micro_batch)
        return loss * factor if hit else loss

    LanguageModule.training_step = training_step
    _tell_exit_codes()


def spoil_gradient(step: int, rank: int) -> None:
    """In each worker: one rank's gradient in one step is infinite somewhere, its loss is not."""
    original = LanguageModule.loss

    def loss(self: Any, logits: Tensor, labels: Tensor) -> Tensor:
        if self.training and (self.global_step + 1, self.global_rank) == (step, rank):
            logits.register_hook(lambda gradient: torch.full_like(gradient, math.inf))
        return original(self, logits, labels)

    LanguageModule.loss = loss
    _tell_exit_codes()


def _tell_exit_codes() -> None:
    original = Ended.__init__

    def told(self: Any, code: Exit, sentence: str) -> None:
        original(self, code, sentence)
        self.add_note(f"exit code {int(code)}")

    Ended.__init__ = told


def leave_out_by_hand(step: int) -> None:
    """In each worker: no guard, and the one step is not taken, as one would write it in a loop of one's own."""
    _without_guard()

    def on_before_optimizer_step(self: Any, optimizer: Any) -> None:
        if self.global_step + 1 == step:
            for parameter in self.parameters():
                parameter.grad = None

    LanguageModule.on_before_optimizer_step = on_before_optimizer_step


def _without_guard() -> None:
    for hook in ("on_before_backward", "on_train_start", "on_before_optimizer_step", "on_save_checkpoint"):
        setattr(Numerics, hook, lambda *_: None)


class Train:
    """Short trainings of two ranks, with two micro-batches a step."""

    def __init__(self, folder: Path, corpus: Path, cache: Path) -> None:
        self.folder = folder
        self.flags = [
            f"--run.root={folder / 'runs'}", "--data.source=TextFiles", f"--data.source.paths=[{corpus}/*.txt]",
            "--data.tokenizer=Bytes", f"--data.cache_dir={cache}", "--data.seq_len=32", "--data.validation_share=0.15",
            "--data.test_share=0.15", "--data.global_batch_size=8", "--trainer.accelerator=cpu",
            "--trainer.max_steps=8", "--trainer.log_every_n_steps=1", "--trainer.limit_val_batches=0",
            "--trainer.logger=false", "--model.optim.warmup=2", "--model.optim.learning_rate=0.01",
            "--last_checkpoint.every_n_steps=1",
        ]  # fmt: skip
        with Workers(1) as workers:
            workers.run(["prepare", *self.flags], folder / "prepare").check()

    def __call__(self, strategy: str, name: str, prelude: Callable[[], None] | None, *extra: str) -> RunRecord:
        num = PROCESSES.get(strategy, 1)
        model = MODELS["deepseek_v3" if strategy == "fsdp2_ep" else "llama"]
        flags = [f"--config={CONFIGS}/strategy/{strategy}.yaml"] if strategy in PROCESSES else []
        if strategy == "zero3":
            flags += ["--trainer.strategy.init_args.param_persistence_threshold=16"]
        flags += [f"--trainer.devices={num}", f"--data.micro_batch_size={4 // num}", f"--model.architecture={model}"]
        record = self.folder / f"{strategy}-{name}"
        number = len(list(self.folder.glob(f"{record.name}*")))
        argv = ["fit", *self.flags, *flags, *extra]
        with Workers(num) as workers:
            return workers.run(argv, record.with_name(f"{record.name}.{number}"), prelude=prelude, run_id=record.name)

    def run_folder(self, strategy: str, name: str) -> Path:
        return self.folder / "runs" / "default" / f"{strategy}-{name}"


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory, corpus: Path, cache: Path) -> Train:
    return Train(tmp_path_factory.mktemp("numerics"), corpus, cache)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_with_nan_on_one_rank_is_left_out_and_told(train: Train, strategy: str) -> None:
    spoil = partial(spoil_loss, BAD_STEP, rank=1, micro_batch=0)
    run = train(strategy, "skip", spoil, "--numerics.on_non_finite=skip").check()
    (incident,) = read_incidents(run.run)
    assert (incident["step"], incident["kind"], incident["decision"]) == (BAD_STEP, "non_finite", "skip")
    assert incident["suspects"] == [1]
    assert [math.isnan(rank["loss"]) for rank in incident["ranks"]] == [False, True]
    assert all(len(rank["rows"]) == 2 and all(len(micro) == 2 for micro in rank["rows"]) for rank in incident["ranks"])
    assert all(bool(tensor.isfinite().all()) for tensor in run.end.values())
    assert f"step {BAD_STEP} was left out: loss nan" in run.log(0)
    assert "from rank 1" in run.log(0)
    for name in run.end:  # the last step's hashes: what lies on several ranks is the same there
        hashes = {tuple(run.events("step", rank)[-1]["tensors"].get(name, ())) for rank in range(run.size)}
        assert len({h for part, h in (x for x in hashes if x and not x[0])}) <= 1, name
    by_hand = train("ddp" if strategy.startswith("zero") else strategy, "by-hand", partial(leave_out_by_hand, BAD_STEP))
    expected = by_hand.check().end
    if strategy.startswith("zero"):
        assert_close(run.end, expected, 1e-5)
    else:
        assert all(torch.equal(run.end[name], expected[name]) for name in expected)
