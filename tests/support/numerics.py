"""Trainings with a non-finite or anomalous step, planted on one rank, and how they would end
without it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from trainer_dev.module import LanguageModule

from dist_template import Ended
from dist_template.callbacks import Numerics
from dist_template.checkpoint.manifest import step_of
from dist_template.errors import Exit
from dist_template.layout import local_shard
from tests.support.library import manifest
from tests.support.parity import MODELS, PROCESSES
from tests.support.runs import Workers
from tests.support.strategies import flags_of
from tests.support.wings import RunRecord

STRATEGIES = ["ddp", "fsdp2", "fsdp2_ep", "zero1", "zero2", "zero3"]


def spoil_loss(step: int, rank: int, micro_batch: int, factor: float = math.nan) -> None:
    """In each worker: one rank's loss in one micro-batch of one step, times `factor`."""
    original = LanguageModule.training_step

    def training_step(self: Any, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = original(self, batch, batch_idx)
        hit = (self.global_step + 1, self.global_rank, batch_idx % 2) == (step, rank, micro_batch)
        return loss * factor if hit else loss

    LanguageModule.training_step = training_step
    report_exit_codes()


def spoil_gradient(step: int, rank: int) -> None:
    """In each worker: one rank's gradient in one step is infinite somewhere, its loss is not."""
    original = LanguageModule.loss

    def loss(self: Any, logits: Tensor, labels: Tensor, cross_entropy: Tensor) -> Tensor:
        if self.training and (self.global_step + 1, self.global_rank) == (step, rank):
            logits.register_hook(lambda gradient: torch.full_like(gradient, math.inf))
        return original(self, logits, labels, cross_entropy)

    LanguageModule.loss = loss
    report_exit_codes()


def spoil_reduced_gradient(step: int, rank: int, value: float) -> None:
    """In each worker: after the reduction, one rank's gradient of a parameter that others have too
    holds `value`."""

    def on_before_optimizer_step(self: Any, optimizer: Any) -> None:
        if (self.global_step + 1, self.global_rank) == (step, rank):
            local_shard(self.model.model.norm.weight.grad).view(-1)[0] = value

    LanguageModule.on_before_optimizer_step = on_before_optimizer_step
    report_exit_codes()


def report_exit_codes() -> None:
    original = Ended.__init__

    def with_code(self: Any, code: Exit, sentence: str, local_rank: int = 0) -> None:
        original(self, code, sentence, local_rank)
        self.add_note(f"exit code {int(code)}")

    Ended.__init__ = with_code


def skip_explicitly(step: int) -> None:
    """In each worker: no guard, and the one step is not taken, as one would write it in a loop of
    one's own."""
    _without_guard()

    def on_before_optimizer_step(self: Any, optimizer: Any) -> None:
        if self.global_step + 1 == step:
            for parameter in self.parameters():
                parameter.grad = None
            self.balancer._arriving = None  # nor do the routers' biases move

    LanguageModule.on_before_optimizer_step = on_before_optimizer_step


def _without_guard() -> None:
    for hook in (
        "on_before_backward",
        "on_train_start",
        "on_before_optimizer_step",
        "on_save_checkpoint",
    ):
        setattr(Numerics, hook, lambda *_: None)


class Train:
    """Short trainings of two ranks, with two micro-batches a step."""

    def __init__(self, folder: Path, corpus: Path, cache: Path) -> None:
        self.folder = folder
        self._by_hand: dict[tuple[str, int], dict[str, Tensor]] = {}
        self.flags = [
            f"--run.root={folder / 'runs'}", "--data.source=TextFiles",
            f"--data.source.paths=[{corpus}/*.txt]",
            "--data.tokenizer=Bytes", f"--data.cache_dir={cache}", "--data.seq_len=32",
            "--data.validation_share=0.15",
            "--data.test_share=0.15", "--data.global_batch_size=8", "--trainer.accelerator=cpu",
            "--trainer.max_steps=8", "--trainer.log_every_n_steps=1",
            "--trainer.limit_val_batches=0",
            "--trainer.logger=false", "--model.optim.warmup=2", "--model.optim.learning_rate=0.01",
            "--last_checkpoint.every_n_steps=4",
        ]  # fmt: skip
        with Workers(1) as workers:
            workers.run(["prepare", *self.flags], folder / "prepare").check()

    def __call__(
        self, strategy: str, name: str, prelude: Callable[[], None] | None, *extra: str
    ) -> RunRecord:
        num = PROCESSES.get(strategy, 1)
        model = MODELS["deepseek_v3" if strategy == "fsdp2_ep" else "llama"]
        flags = flags_of(strategy) if strategy in PROCESSES else []
        if strategy == "zero3":
            flags += ["--trainer.strategy.init_args.param_persistence_threshold=16"]
        flags += [
            f"--trainer.devices={num}",
            f"--data.micro_batch_size={4 // num}",
            f"--model.architecture={model}",
        ]
        record = self.folder / f"{strategy}-{name}"
        number = len(list(self.folder.glob(f"{record.name}*")))
        argv = ["fit", *self.flags, *flags, *extra]
        with Workers(num) as workers:
            return workers.run(
                argv,
                record.with_name(f"{record.name}.{number}"),
                prelude=prelude,
                run_id=record.name,
            )

    def by_hand(self, strategy: str, step: int) -> dict[str, Tensor]:
        """The weights of a training, done once, in which `step` is left out as one would write it
        oneself."""
        if (strategy, step) not in self._by_hand:
            run = self(strategy, f"by-hand-{step}", partial(skip_explicitly, step)).check()
            self._by_hand[strategy, step] = run.end
        return self._by_hand[strategy, step]

    def run_folder(self, strategy: str, name: str) -> Path:
        return self.folder / "runs" / "default" / f"{strategy}-{name}"


@pytest.fixture(scope="session")
def guarded(tmp_path_factory: pytest.TempPathFactory, corpus: Path, cache: Path) -> Train:
    return Train(tmp_path_factory.mktemp("numerics"), corpus, cache)


def spoil(
    monkeypatch: pytest.MonkeyPatch, is_bad: Callable[[int], bool], factor: float = math.nan
) -> None:
    """The loss of each step that `is_bad`, times `factor`, in its first micro-batch."""
    original = LanguageModule.training_step

    def training_step(self: Any, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        hit = batch_idx % 4 == 0 and is_bad(self.global_step + 1)
        return original(self, batch, batch_idx) * (factor if hit else 1.0)

    monkeypatch.setattr(LanguageModule, "training_step", training_step)


def is_finite(weights: dict[str, Tensor]) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in weights.values())


def newest(run: Path) -> Path:
    """The newest checkpoint."""
    path = manifest.newest(run / "checkpoints")
    assert path is not None
    return path


def newest_step(run: Path) -> int:
    return step_of(newest(run))
