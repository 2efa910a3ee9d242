"""Short trainings of two ranks with a step that is damaged on one of them."""

import math
from collections.abc import Callable, Container
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
from dist_template.layout import local_shard
from dist_template.wings.rehearse.record import RunRecord
from tests.support.parity import MODELS, PROCESSES
from tests.support.runs import newest, small
from tests.support.saves import Trainings


def spoil_loss(
    steps: Container[int],
    rank: int = 0,
    micro_batch: int = 0,
    factor: float = math.nan,
    replace: Callable[..., None] = setattr,
) -> None:
    """Multiplies one rank's loss in a micro-batch of these steps by `factor`."""
    original = LanguageModule.training_step

    def training_step(self: Any, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = original(self, batch, batch_idx)
        place = (self.global_rank, batch_idx % 2)
        is_hit = self.global_step + 1 in steps and place == (rank, micro_batch)
        return loss * factor if is_hit else loss

    replace(LanguageModule, "training_step", training_step)


def spoil_gradient(step: int, rank: int) -> None:
    """In each worker: one rank's gradient in one step is infinite somewhere, its loss is not."""
    original = LanguageModule.loss

    def loss(self: Any, logits: Tensor, labels: Tensor, cross_entropy: Tensor) -> Tensor:
        if self.training and (self.global_step + 1, self.global_rank) == (step, rank):
            logits.register_hook(lambda gradient: torch.full_like(gradient, math.inf))
        return original(self, logits, labels, cross_entropy)

    LanguageModule.loss = loss


def spoil_reduced_gradient(step: int, rank: int, value: float) -> None:
    """In each worker: one rank's reduced gradient of a replicated parameter holds `value`."""

    def on_before_optimizer_step(self: Any, optimizer: Any) -> None:
        if (self.global_step + 1, self.global_rank) == (step, rank):
            local_shard(self.model.model.norm.weight.grad).view(-1)[0] = value

    LanguageModule.on_before_optimizer_step = on_before_optimizer_step


def skip_explicitly(step: int) -> None:
    """In each worker: no guard, and the step is skipped as a hand-written loop would skip it."""
    for hook in ("before_backward", "train_start", "before_optimizer_step", "save_checkpoint"):
        setattr(Numerics, f"on_{hook}", lambda *_: None)

    def on_before_optimizer_step(self: Any, optimizer: Any) -> None:
        if self.global_step + 1 == step:
            for parameter in self.parameters():
                parameter.grad = None
            self.balancer._arriving = None  # nor do the routers' biases move

    LanguageModule.on_before_optimizer_step = on_before_optimizer_step


def with_exit_codes(prelude: Callable[[], None] | None = None) -> None:
    """In each worker: the error of a training that was ended has its exit code; then `prelude`."""
    original = Ended.__init__

    def with_code(self: Any, code: int, sentence: str, local_rank: int = 0) -> None:
        original(self, code, sentence, local_rank)
        self.add_note(f"exit code {int(code)}")

    Ended.__init__ = with_code
    if prelude:
        prelude()


class Train:
    """Trainings of eight steps, with two micro-batches a step."""

    def __init__(self, folder: Path, corpus: Path, cache: Path) -> None:
        self._by_hand: dict[tuple[str, int], dict[str, Tensor]] = {}
        more = """--trainer.max_steps=8 --trainer.limit_val_batches=0 --trainer.logger=false
            --model.optim.warmup=2 --model.optim.learning_rate=0.01
            --last_checkpoint.every_n_steps=4"""
        self._train = Trainings(folder, [*small(corpus, cache, folder), *more.split()])

    def __call__(
        self, strategy: str, name: str, prelude: Callable[[], None] | None, *extra: str
    ) -> RunRecord:
        num = PROCESSES[strategy]
        model = MODELS["deepseek_v3" if strategy == "fsdp2_ep" else "llama"]
        flags = [f"--model.architecture={model}", f"--data.micro_batch_size={4 // num}", *extra]
        options: Any = {"processes": num, "prelude": partial(with_exit_codes, prelude)}
        return self._train(f"{strategy}-{name}", strategy, *flags, **options)

    def by_hand(self, strategy: str, step: int) -> dict[str, Tensor]:
        """The weights of a training in which `step` is skipped by hand; it is done once."""
        if (strategy, step) not in self._by_hand:
            record = self(strategy, f"by-hand-{step}", partial(skip_explicitly, step)).check()
            self._by_hand[strategy, step] = record.end
        return self._by_hand[strategy, step]

    def run_folder(self, strategy: str, name: str) -> Path:
        return self._train.folder / "runs" / "default" / f"{strategy}-{name}"


@pytest.fixture(scope="session")
def guarded(tmp_path_factory: pytest.TempPathFactory, corpus: Path, cache: Path) -> Train:
    return Train(tmp_path_factory.mktemp("numerics"), corpus, cache)


def is_finite(weights: dict[str, Tensor]) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in weights.values())


def newest_step(folder: Path) -> int:
    return step_of(newest(folder))
