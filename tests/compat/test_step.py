"""A step costs little beside what the model needs, and trains as by Lightning's own loop."""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path
from trainer_dev.module import LanguageModule

from dist_template.cli import trainer as cli
from dist_template.compat.epochs import make_resumable
from dist_template.observe.loggers import run_log
from tests.support.library import read_full
from tests.support.runs import logged, newest, only_run, run
from tests.support.tiers import tiers

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
