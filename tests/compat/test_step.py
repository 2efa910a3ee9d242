"""A step costs little beside what the model needs, and training is the same as by Lightning's own loop."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path
from trainer_dev.module import LanguageModule

from dist_template import OptimConfig
from dist_template.callbacks import garbage
from dist_template.cli import trainer as cli
from dist_template.compat.epochs import make_resumable
from dist_template.observe.loggers import run_log
from tests.support.library import PackedRows, optim, read_full, tensorboard
from tests.support.operations import Ops
from tests.support.runs import logged, newest, only_run, run
from tests.support.tiers import tiers

OFF = [
    "--trainer.limit_val_batches=0",
    "--trainer.logger=false",
    "--last_checkpoint.every_n_steps=1000",
]
OFF += ["--data.micro_batch_size=8", "--trainer.log_every_n_steps=10", "--trainer.max_steps=40"]
FIRST, LAST = (
    11,
    31,
)  # batches that are counted, from the start of one to the start of the other: two log steps
SHIPPED = ["--trainer.logger=TensorBoard", "--trainer.logger.save_dir={run}"]
CALLS = 540  # of Python's functions in a null step


class Vector(nn.Module):
    """A model of one parameter: what a step does is the loop's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def loss(self) -> Tensor:
        return self.weight.sum() * 0.01 + 1.0


def training_step(self: Any, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
    loss = self.model.loss()
    self.track("train/loss", loss)
    self.track("train/token_accuracy", loss.detach())
    return loss


@pytest.fixture
def vector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LanguageModule, "build_model", lambda self, data: Vector())
    monkeypatch.setattr(LanguageModule, "training_step", training_step)


class Counting(Callback):
    """Operations of torch, and calls of Python's functions, from one batch's start to another's."""

    counted: Any = None

    def __init__(self) -> None:
        self.ops, self.calls = Ops(), Counter[str]()
        Counting.counted = self

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == FIRST:
            self.ops.__enter__()
            sys.setprofile(self._called)
        elif batch_idx == LAST:
            sys.setprofile(None)
            self.ops.__exit__(None, None, None)

    def _called(self, frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename != __file__:
            self.calls[frame.f_code.co_filename.rpartition("site-packages/")[2]] += 1


class Calls(Counting):
    """Without the operations, whose count takes calls too."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Any = nullcontext()


def counted(flags: list[str], counter: str = "Counting", *more: str) -> Counting:
    assert run("fit", *flags, *OFF, *more, f"--trainer.callbacks+={__name__}.{counter}") == 0
    return Counting.counted


def manual() -> Ops:
    """The operations of as many steps of a hand-written loop with the same metrics."""
    model = Vector()
    optimizer = optim.build_optimizer(model, OptimConfig())
    scheduler = optim.build_schedule(optimizer, OptimConfig(), 40)["scheduler"]
    rows, sums = PackedRows(np.zeros(2000, dtype=np.uint16), 32, 256), torch.zeros(4)
    with Ops() as ops:
        for step in range(FIRST, LAST):
            rows.__getitems__(list(range(8)))
            loss = model.loss()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            sums += torch.stack([loss.detach(), loss.detach(), norm, (norm > 1.0).float()])
            if step % 10 == 0:
                (sums / 10).tolist()
                sums.zero_()
    return ops


def test_a_step_does_at_most_eight_operations_more_than_a_hand_written_one(
    flags: list[str], vector: None
) -> None:
    """Kernels, views and profiler ranges. The numerics guard, the metrics and the count of tokens are in it."""
    ours, hand, steps = counted(flags).ops.seen, manual().seen, LAST - FIRST
    more = {
        name: (ours[name] - hand[name]) / steps for name in ours | hand if ours[name] != hand[name]
    }
    assert sum(more.values()) <= 8, "\n".join(
        map(str, sorted(more.items(), key=lambda item: -item[1]))
    )


def test_a_step_makes_no_more_calls_than_when_it_was_last_made_fast(
    flags: list[str], vector: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As shipped, with TensorBoard. The figure does not depend on the machine, as a time would; it has three percent
    of room. Who needs more calls in each step measures `make bench PART=step`, and says so with the new figure."""
    for logger in (run_log, tensorboard):
        monkeypatch.setattr(
            logger, "WRITE_S", 1000.0
        )  # whether the window has a second's writing in it is chance
    calls, steps = counted(flags, "Calls", *SHIPPED).calls, LAST - FIRST
    assert calls.total() <= CALLS * steps, [
        (file, count / steps) for file, count in calls.most_common(20)
    ]


class Gradients(Callback):
    """Whether there are any, where they are cleared."""

    cleared: Any = []  # noqa: RUF012  (a test gives its own)

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        Gradients.cleared.append(has_gradients(pl_module))


def has_gradients(module: nn.Module) -> bool:
    return any(parameter.grad is not None for parameter in module.parameters())


@pytest.mark.parametrize("looks", [False, True])
def test_a_forward_pass_has_the_memory_of_the_gradients_before_it(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, looks: bool
) -> None:
    """Unless a callback looks at them where Lightning clears them. What a step's own backward leaves is cleared too."""
    as_shipped, forward = LanguageModule.training_step, []

    def step(self: Any, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        forward.append(has_gradients(self))
        if batch_idx % 2 == 0:
            (as_shipped(self, batch, batch_idx) * 1e6).backward()
        return as_shipped(self, batch, batch_idx)

    flags = [
        *flags,
        *OFF,
        "--data.micro_batch_size=4",
        "--trainer.max_steps=3",
    ]  # two micro-batches a step
    flags += [f"--trainer.callbacks+={__name__}.Gradients"] if looks else []
    assert run("fit", *flags, "--run.name=expected") == 0
    monkeypatch.setattr(LanguageModule, "training_step", step)
    monkeypatch.setattr(Gradients, "cleared", [])
    assert run("fit", *flags, "--run.name=got") == 0
    # The second micro-batch meets the gradients of the first.
    assert forward == ([False, True, True, True, True, True] if looks else [False, True] * 3)
    assert Gradients.cleared == ([True] * 3 if looks else [])
    got, expected = (
        logged(only_run(tmp_path, name), "train/grad_norm") for name in ("got", "expected")
    )
    assert got == expected and got


class Diary(Callback):
    """Which hooks were called, at which step."""

    pages: Any = None

    def __init__(self) -> None:
        pages = Diary.pages = []

        def note(name: str) -> Any:
            return lambda trainer, *args: pages.append((name, trainer.global_step, len(args)))

        for name in (
            "on_train_epoch_start on_train_batch_start on_before_zero_grad on_before_backward on_after_backward"
            " on_before_optimizer_step on_train_batch_end on_validation_start on_validation_batch_end on_validation_end"
            " on_train_epoch_end on_train_end"
        ).split():
            setattr(self, name, note(name))


VARIANTS = {
    "accumulation": [],
    "epochs": ["--data.micro_batch_size=8", "--data.seq_len=128", "--trainer.max_steps=24"],
    "plateau": ["--model.optim.schedule=reduce_on_plateau", "--trainer.precision=bf16-mixed"],
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", tiers(VARIANTS, daily=["accumulation"]))
def test_training_is_as_by_lightnings_own_loop(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    """Hooks and their order, losses, and all that a checkpoint holds, with a resume in the midst of an epoch."""
    flags = [
        *flags, *VARIANTS[variant], "--last_checkpoint.every_n_steps=7",
        "--trainer.val_check_interval=5",
    ]  # fmt: skip
    flags += ["--data.prompts=[]", "--trainer.logger=false", "--trainer.limit_val_batches=1"]
    flags.append(f"--trainer.callbacks+={__name__}.Diary")
    pages = {}
    for name in ("ours", "lightnings"):
        if name == "lightnings":
            monkeypatch.setattr(cli, "lighten", make_resumable)
        assert (
            run(
                "fit",
                *flags,
                f"--run.name={name}",
                "--trainer.max_steps=7",
                "--model.optim.warmup=2",
            )
            == 0
        )
        first = Diary.pages
        assert (
            run("fit", *flags, f"--run.name={name}", "--model.optim.warmup=2", "--ckpt_path=last")
            == 0
        )
        pages[name] = first + Diary.pages
    assert pages["ours"] == pages["lightnings"]
    ours, lightnings = (only_run(tmp_path, name) for name in pages)
    for metric in ("train/loss", "train/grad_norm", "train/learning_rate", "eval/loss"):
        assert logged(ours, metric) == logged(lightnings, metric) and logged(ours, metric)
    kept, expected = plain(read_full(newest(ours))), plain(read_full(newest(lightnings)))
    assert kept.keys() == expected.keys()
    assert not [path for path in kept if kept[path] != expected[path]]


def plain(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Path -> value, of tensors their bytes."""
    found, _ = tree_flatten_with_path(checkpoint)
    return {keystr(path): v.numpy().tobytes() if isinstance(v, Tensor) else v for path, v in found}


@pytest.mark.slow
def test_the_collector_passes_over_what_was_there_before(
    flags: list[str], vector: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen = []
    monkeypatch.setattr(garbage, "AFTER_STEPS", 5)
    monkeypatch.setattr(
        Counting, "on_train_batch_start", lambda *_: frozen.append(gc.get_freeze_count() > 100_000)
    )
    counted(flags)
    assert frozen == [False] * 5 + [True] * 35
    assert not gc.get_freeze_count()
