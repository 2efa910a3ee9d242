"""Interrupted anywhere in an epoch, once or twice, in every way: a training stays the same."""

import itertools
import shutil
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Checkpoint
from torch.utils.data import DataLoader
from trainer_dev.data import DataModule

from dist_template import Ended
from dist_template.callbacks import BestCheckpoint, LastCheckpoint, Preemption
from dist_template.callbacks.preemption import TIME_IS_UP
from dist_template.checkpoint import formats, manifest
from dist_template.compat.epochs import ends_epoch
from dist_template.compat.loop import lighten
from dist_template.text import Bytes, TextFiles
from tests.support.tiers import tiers

FILTERS = ("ignore:Checkpoint directory", "ignore:.*your dataloader is not resumable")
pytestmark = [pytest.mark.slow, *map(pytest.mark.filterwarnings, FILTERS)]

EPOCH, EPOCHS = 3, 3  # optimizer steps of an epoch; epochs
STEPS = EPOCH * EPOCHS
GLOBAL, MICRO, SEQ_LEN = 4, 2, 16
KINDS = ("kill", "sigterm", "max_time", "max_steps", "sigterm_in_validation")
TWICE = ("kill", "sigterm", "max_steps", "sigterm_in_validation")

Stop = tuple[str, int]  # how, after which optimizer step
Chain = tuple[Stop, ...]
Done = tuple["Recorder", dict[str, Any]]


class Recorder(L.LightningModule):
    """One weight; records what it trains on and which hooks are called, after what is `before`."""

    def __init__(self, before: "Recorder | None" = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.window: list[int] = []
        self.events: list[tuple[Any, ...]] = [*before.events] if before else []
        self.ended_epochs: set[int] = {*before.ended_epochs} if before else set()
        self.starts: list[tuple[str, int]] = []  # of this process

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.window += batch["input_ids"][:, 0].tolist()  # a row's first byte is its name
        return self.weight * batch["input_ids"].float().mean()

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.events.append(("step", self.trainer.current_epoch, tuple(self.window)))
        self.window = []

    def on_train_epoch_start(self) -> None:
        """A resumed process calls it for the epoch that it continues, as the first process did."""
        event = ("epoch", self.trainer.current_epoch)
        self.starts.append(event)
        if event not in self.events:
            self.events.append(event)

    def on_train_epoch_end(self) -> None:
        self.ended_epochs.add(self.trainer.current_epoch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("eval/loss", self.weight)

    def on_validation_epoch_end(self) -> None:
        counted: Any = self.trainer.fit_loop.epoch_loop.val_loop.batch_progress  # of this epoch
        weight, number = round(self.weight.item(), 4), counted.total.completed
        self.events.append(("validation", self.trainer.global_step, weight, number))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class StopAt(Checkpoint):
    """Interrupts training after an optimizer step, as `kind` does; called last."""

    def __init__(self, kind: str, step: int) -> None:
        self.kind, self.step = kind, step

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step != self.step or trainer.fit_loop._should_accumulate():
            return
        if self.kind == "kill" and not ends_epoch(trainer):
            raise KeyError("killed")
        if self.kind in ("sigterm", "max_time"):
            self._preempt(trainer)

    def after_epoch(self, trainer: Any) -> None:
        """An epoch's last checkpoint is written now."""
        if (self.kind, self.step) == ("kill", trainer.global_step):
            raise KeyError("killed")

    def on_validation_batch_end(self, trainer: Any, *batch: Any, **more: Any) -> None:
        is_here = (trainer.global_step, batch[3]) == (self.step, 1)
        if self.kind == "sigterm_in_validation" and is_here:
            self._preempt(trainer)

    def _preempt(self, trainer: Any) -> None:
        preemption = next(each for each in trainer.callbacks if isinstance(each, Preemption))
        preemption._end(trainer, TIME_IS_UP if self.kind == "max_time" else signal.SIGTERM)


class Trainings:
    """Trainings and their interruptions, each done once; `options` are the Trainer's."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder = folder
        self.options = options
        # 14 rows, each with its own first byte: two stay for the next epoch
        rows = "".join(chr(32 + row) + "." * (SEQ_LEN - 1) for row in range(14)) + "!"
        (folder / "rows.txt").write_text(rows, encoding="utf-8")
        source, sizes = TextFiles([f"{folder}/rows.txt"]), (SEQ_LEN, GLOBAL, MICRO)
        given: Any = {"validation_share": 0.0, "test_share": 0.0, "cache_dir": f"{folder}/cache"}
        self.data = lambda: DataModule(source, Bytes(), *sizes, **given)
        self.data().prepare(report=lambda _: None)
        self.interrupted = cache(self._interrupted)

    def _interrupted(self, *stops: Stop) -> tuple[Recorder, Path]:
        """What was done up to the last of `stops`, and the folder with its checkpoint."""
        folder = self.folder / "-".join(f"{kind}{step}" for kind, step in stops)
        kind, step = stops[-1]
        limit = {"max_steps": step} if kind == "max_steps" else {}
        module = self.copied(folder, *stops[:-1])
        assert self.fit(module, folder, StopAt(kind, step), **limit).global_step == step
        return module, folder

    def copied(self, folder: Path, *stops: Stop) -> Recorder:
        """A module that was stopped so, and its checkpoint in `folder`."""
        if not stops:
            return Recorder()
        before, source = self.interrupted(*stops)
        shutil.copytree(source, folder)
        return Recorder(before)

    def resumed(self, *stops: Stop) -> Done:
        """What was done in all, and the loops' counters at the end."""
        folder = self.folder / "resumed"
        module = self.copied(folder, *stops)
        trainer = self.fit(module, folder)
        shutil.rmtree(folder)
        return module, trainer.fit_loop.state_dict()

    def fit(self, module: Recorder, folder: Path, *stop: StopAt, **limit: int) -> L.Trainer:
        every = 1 if stop and stop[0].kind == "kill" else 2 * STEPS
        best = BestCheckpoint(mode="max", keep=0 if stop else 1, dirpath=str(folder))
        last = LastCheckpoint(every, dirpath=str(folder))
        off = "logger enable_progress_bar enable_model_summary use_distributed_sampler"
        options: Any = dict.fromkeys(off.split(), False) | {"num_sanity_val_steps": 0, "devices": 1}
        options |= {"max_epochs": EPOCHS} | self.options | limit
        callbacks = [last, best, Preemption(), *stop]
        trainer = L.Trainer(accelerator="cpu", callbacks=callbacks, **options)
        trainer.strategy.checkpoint_io = formats.PlainFormat(trainer.strategy)
        lighten(trainer)
        data = self.data()
        batches: Any = [{"labels": label} for label in range(3)]
        data.val_dataloader = lambda: DataLoader(batches)
        try:
            trainer.fit(module, data, ckpt_path=manifest.newest(folder), weights_only=True)
        except (KeyError, Ended):
            assert stop, "nothing should have ended this"
        return trainer


def difference(found: Done, whole: Done) -> str:
    """What one of an interrupted training and the other one did alone; "" for nothing."""
    for pair in itertools.zip_longest(found[0].events, whole[0].events):
        if pair[0] != pair[1]:
            return "{} and not {}".format(*pair)
    if found[0].ended_epochs != whole[0].ended_epochs:
        return f"ended epochs {found[0].ended_epochs} and not {whole[0].ended_epochs}"
    trained = {event[1] for event in found[0].events if event[0] == "step"}
    if [epoch for _, epoch in found[0].starts] != sorted(trained)[-len(found[0].starts) :]:
        return f"starts of epochs {found[0].starts}"
    keys = [key for key in whole[1] if found[1][key] != whole[1][key] and key != VALIDATED]
    return "".join(f"{key} is {found[1][key]} and not {whole[1][key]}" for key in keys)


BY_STEPS = {"max_epochs": EPOCHS, "val_check_interval": 2, "check_val_every_n_epoch": None}
BY_EPOCHS = {"max_epochs": EPOCHS, "val_check_interval": 1.0, "check_val_every_n_epoch": 2}
IN_STEPS = BY_STEPS | {"max_epochs": -1, "max_steps": STEPS, "val_check_interval": 1}
VALIDATED = "epoch_loop.val_loop.batch_progress"


def differences(folder: Path, limits: dict[str, Any], wanted: Callable[[list[Stop]], Any]) -> Any:
    """A chain of interruptions -> what it changed, of those that `wanted` chooses."""
    trainings = Trainings(folder, **limits)
    whole = trainings.resumed()
    events = whole[0].events
    trained = [epoch for kind, epoch, *_ in events if kind == "step"]
    assert trained == [step // EPOCH for step in range(STEPS)]
    validated = {event[1] for event in events if event[0] == "validation"}
    once = itertools.product(KINDS, range(1, STEPS))
    stops = [stop for stop in once if stop[0] != "sigterm_in_validation" or stop[1] in validated]
    found = {chain: difference(trainings.resumed(*chain), whole) for chain in wanted(stops)}
    return {chain: what for chain, what in found.items() if what}


def test_no_single_interruption_changes_anything(tmp_path: Path) -> None:
    assert not differences(tmp_path, BY_STEPS, lambda once: [(stop,) for stop in once])


@pytest.mark.parametrize("limits", tiers([BY_STEPS, BY_EPOCHS, IN_STEPS], daily=[BY_EPOCHS]))
def test_no_two_interruptions_change_anything(limits: dict[str, Any], tmp_path: Path) -> None:
    def wanted(once: list[Stop]) -> list[Chain]:
        few = [stop for stop in once if stop[0] in TWICE and abs(stop[1] - EPOCH) <= 1]
        twice = [(one, two) for one in few for two in few if one[1] < two[1]]
        return [(stop,) for stop in few] + twice

    assert not differences(tmp_path, limits, wanted)


class Collects(Recorder):
    """Keeps a list in each epoch, and reads it at its end."""

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        self.kept: list[torch.Tensor] = []

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.kept.append(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        torch.stack(self.kept)


def test_an_epochs_last_checkpoint_is_written_after_its_hooks(tmp_path: Path) -> None:
    """A killed run does not repeat them with nothing; a preempted one may, and says what to do."""
    trainings = Trainings(tmp_path, max_epochs=EPOCHS)
    trainings.fit(Collects(), tmp_path / "killed", StopAt("kill", EPOCH))
    again = trainings.fit(Collects(), tmp_path / "killed")
    assert again.global_step == STEPS
    trainings.fit(Collects(), tmp_path / "preempted", StopAt("sigterm", EPOCH))
    with pytest.raises(RuntimeError, match="non-empty") as raised:
        trainings.fit(Collects(), tmp_path / "preempted")
    assert "resumed after the last batch of the epoch" in raised.value.__notes__[0]
