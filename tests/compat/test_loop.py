"""The loop is Lightning's own to a user, and trains as it; a step costs little beside the model."""

import pickle
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import lightning as L
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loops.optimization.automatic import Closure
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import keystr, tree_flatten_with_path
from torch.utils.data import DataLoader
from trainer_dev.module import LanguageModule

from dist_template.checkpoint.formats import read_full
from dist_template.cli import trainer as cli
from dist_template.compat import randomness
from dist_template.compat.epochs import make_resumable
from dist_template.compat.loop import EpochLoop, MixedPrecision, lighten
from dist_template.compat.torch import step_of
from dist_template.observe.loggers import run_log
from tests.support.runs import logged, newest, only_run, run
from tests.support.tiers import tiers


def trainer_in(folder: Path, is_lightnings: bool = False, **options: Any) -> L.Trainer:
    off = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    given: Any = {"max_steps": 2, "limit_val_batches": 0} | dict.fromkeys(off, False) | options
    trainer = L.Trainer(accelerator="cpu", default_root_dir=folder, **given)
    if not is_lightnings:
        lighten(trainer)
    return trainer


def test_a_trainer_can_be_pickled(tmp_path: Path) -> None:
    trainer = trainer_in(tmp_path, precision="bf16-mixed")
    trainer.fit(BoringModel())
    restored = pickle.loads(pickle.dumps(trainer))
    assert type(restored.fit_loop.epoch_loop) is EpochLoop
    assert type(restored.strategy.precision_plugin) is MixedPrecision
    assert restored.max_steps == 2 and restored.global_step == 2


class Asks(BoringModel):
    """Ends in the middle of its first epoch, and asks at its end whether that was resumed."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and not self.trainer.fit_loop.restarting:
            raise RuntimeError("stopped by the test")

    def on_train_epoch_end(self) -> None:
        self.found = self.trainer.fit_loop.restarting


@pytest.mark.parametrize("is_lightnings", [True, False])
def test_hooks_of_a_resumed_epochs_end_see_that_it_was_resumed(
    tmp_path: Path, is_lightnings: bool
) -> None:
    options: Any = {"limit_train_batches": 4, "max_epochs": 1, "max_steps": -1}
    options |= {"enable_checkpointing": True, "callbacks": OnExceptionCheckpoint(tmp_path)}
    with pytest.raises(RuntimeError, match="stopped by the test"):
        trainer_in(tmp_path, is_lightnings, **options).fit(Asks())
    module = Asks()
    path = tmp_path / "on_exception.ckpt"
    trainer_in(tmp_path, is_lightnings, **options).fit(module, ckpt_path=path)
    assert module.found


class Unusual(BoringModel):
    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        assert isinstance(optimizer_closure, Closure)
        optimizer.step(optimizer_closure)


def test_the_closure_of_an_optimizer_step_is_lightnings(tmp_path: Path) -> None:
    trainer_in(tmp_path).fit(Unusual())


class Gaps(BoringModel):
    """Its loader yields None for each second batch, as for samples that cannot be read."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Any] = []

    def train_dataloader(self) -> Any:
        rows: Any = range(8)
        return DataLoader(rows, batch_size=2, collate_fn=lambda some: self.batch_of(some[0]))

    def batch_of(self, row: int) -> Tensor | None:
        return torch.ones(2, 32) if row % 4 else None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.outputs.append(outputs is not None)


@pytest.mark.parametrize("is_lightnings", [False, True])
def test_a_batch_that_is_none_is_skipped(tmp_path: Path, is_lightnings: bool) -> None:
    trainer = trainer_in(tmp_path, is_lightnings, max_epochs=1, max_steps=-1)
    module = Gaps()
    trainer.fit(module)
    assert module.outputs == [False, True, False, True]
    assert trainer.global_step == 2


def test_a_profile_names_the_loop_as_lightnings(tmp_path: Path) -> None:
    trainer: Any = trainer_in(tmp_path, profiler="simple")
    trainer.fit(BoringModel())
    found = trainer.profiler.recorded_durations
    assert len(found["[_TrainingEpochLoop].train_dataloader_next"]) == 2


class Validations(BoringModel):
    """Records after which steps it was validated, and how many batches of the epoch are counted."""

    def on_train_start(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def on_validation_epoch_end(self) -> None:
        loop: Any = self.trainer.fit_loop.epoch_loop.val_loop
        self.seen.append((self.trainer.global_step, loop.batch_progress.total.completed))


@pytest.mark.parametrize("is_lightnings", [False, True])
def test_a_resume_at_an_epochs_end_is_lightnings(tmp_path: Path, is_lightnings: bool) -> None:
    """With `max_steps`, by either loop's checkpoint. Epochs have 3 steps, validations 2 batches."""
    options: Any = {"limit_train_batches": 3, "limit_val_batches": 2, "num_sanity_val_steps": 0}
    saver = ModelCheckpoint(tmp_path, "{epoch}", save_on_train_epoch_end=True)
    saving = options | {"max_steps": 3, "enable_checkpointing": True, "callbacks": [saver]}
    trainer_in(tmp_path, is_lightnings, **saving).fit(Validations())
    module = Validations()
    trainer = trainer_in(tmp_path, max_steps=9, **options)
    trainer.fit(module, ckpt_path=saver.best_model_path, weights_only=True)
    assert module.seen == [(6, 2), (9, 2)]


def test_hooks_are_called() -> None:
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    optimizer, calls = torch.optim.AdamW([parameter], lr=0.1), list[Any]()
    optimizer.register_step_pre_hook(lambda *call: calls.append(call))
    optimizer.register_step_post_hook(lambda *call: calls.append(call))
    handle = register_optimizer_step_post_hook(lambda *call: calls.append(call))
    step_of(optimizer)()
    handle.remove()
    assert len(calls) == 3


def test_a_step_that_is_replaced_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a mock, which has every attribute but __wrapped__."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1)
    step = Mock()
    monkeypatch.setattr(torch.optim.SGD, "step", step)
    step_of(optimizer)()
    assert step.call_count == 1


def test_dropout_is_the_identity_and_noted_where_it_would_act(monkeypatch: Any) -> None:
    for name in (*randomness.DROPOUTS, "scaled_dot_product_attention"):
        monkeypatch.setattr(nn.functional, name, getattr(nn.functional, name))  # restored
    noted: list[str] = []
    randomness.turn_dropout_off(lambda: noted.append("dropout"))
    ones = torch.ones(2, 3, 4, 4)
    for kind in (nn.Dropout, nn.Dropout2d, nn.AlphaDropout, nn.FeatureAlphaDropout):
        assert torch.equal(kind(0.5)(ones), ones)
    assert len(noted) == 4
    attended = nn.functional.scaled_dot_product_attention(ones, ones, ones, dropout_p=0.9)
    assert torch.allclose(attended, ones) and len(noted) == 5
    nn.Dropout(0.5).eval()(ones)
    nn.functional.dropout(ones, 0.0)
    assert len(noted) == 5


OFF = ["--trainer.limit_val_batches=0", "--last_checkpoint.every_n_steps=1000"]
OFF += ["--data.micro_batch_size=8", "--trainer.log_every_n_steps=10", "--trainer.max_steps=40"]
FIRST, LAST = 11, 31  # batches that are counted, from start to start: two log steps
SHIPPED = ["--trainer.logger=TensorBoard", "--trainer.logger.save_dir={run}"]
CALLS = 540  # of Python's functions in a null step


def training_step(self: Any, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
    """Of a model of one parameter: what a step does is the loop's."""
    loss = self.model.weight.sum() * 0.01 + 1.0
    self.track("train/loss", loss)
    self.track("train/token_accuracy", loss.detach())
    return loss


class Calls(Callback):
    """Counts calls of Python's functions, from one batch's start to another's."""

    counted: Counter[str] = Counter()  # noqa: RUF012  (of the newest training)

    def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
        batch_idx = args[3]
        if batch_idx == FIRST:
            Calls.counted = Counter()
            sys.setprofile(self._called)
        elif batch_idx == LAST:
            sys.setprofile(None)

    def _called(self, frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename != __file__:
            self.counted[frame.f_code.co_filename.rpartition("site-packages/")[2]] += 1


def test_a_step_makes_no_more_calls_than_it_did(flags: list[str], monkeypatch: Any) -> None:
    """As shipped, with TensorBoard; the figure does not depend on the machine, and has 3 % of room.

    Who needs more calls in each step measures `make bench PART=step`, and says so with the figure.
    """
    monkeypatch.setattr(LanguageModule, "build_model", lambda *_: nn.Linear(8, 1, bias=False))
    monkeypatch.setattr(LanguageModule, "training_step", training_step)
    monkeypatch.setattr(run_log, "WRITE_S", 1000.0)  # a second's writing in the window is chance
    assert run("fit", *flags, *OFF, *SHIPPED, f"--trainer.callbacks+={__name__}.Calls") == 0
    steps = LAST - FIRST
    figures = [(file, count / steps) for file, count in Calls.counted.most_common(20)]
    assert 0 < Calls.counted.total() <= CALLS * steps, figures


HOOKS = "train_epoch_start train_batch_start before_zero_grad before_backward after_backward"
HOOKS += " before_optimizer_step train_batch_end validation_start validation_batch_end"
HOOKS += " validation_end train_epoch_end train_end"


class Diary(Callback):
    """Which hooks were called, at which step."""

    pages: Any = None

    def __init__(self) -> None:
        pages = Diary.pages = []

        def note(name: str) -> Any:
            return lambda trainer, *args: pages.append((name, trainer.global_step, len(args)))

        for name in HOOKS.split():
            setattr(self, f"on_{name}", note(name))


PLATEAU = ["--lr_scheduler=ReduceLROnPlateau", "--lr_scheduler.monitor=eval/loss"]
VARIANTS = {
    "accumulation": [],
    "epochs": ["--data.micro_batch_size=8", "--data.seq_len=128", "--trainer.max_steps=24"],
    "plateau": [*PLATEAU, "--trainer.precision=bf16-mixed"],
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", tiers(VARIANTS, daily=["accumulation"]))
def test_training_is_lightnings(flags: Any, tmp_path: Path, monkeypatch: Any, variant: str) -> None:
    """Hooks and their order, losses, and all that a checkpoint holds, with a resume in an epoch."""
    flags += [*VARIANTS[variant], "--last_checkpoint.every_n_steps=7", "--model.optim.warmup=2"]
    flags += ["--data.prompts=[]", "--trainer.logger=false", "--trainer.limit_val_batches=1"]
    flags += ["--trainer.val_check_interval=5", f"--trainer.callbacks+={__name__}.Diary"]
    pages = {}
    for name in ("ours", "lightnings"):
        if name == "lightnings":
            monkeypatch.setattr(cli, "lighten", make_resumable)
        assert run("fit", *flags, f"--run.name={name}", "--trainer.max_steps=7") == 0
        first = Diary.pages
        assert run("fit", *flags, f"--run.name={name}", "--ckpt_path=last") == 0
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
