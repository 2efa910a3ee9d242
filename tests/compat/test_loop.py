"""What a user sees of the loop is Lightning's own: closures, counts, hooks; dropout turned off."""

import pickle
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loops.optimization.automatic import Closure
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from dist_template.compat import randomness
from dist_template.compat.loop import EpochLoop, MixedPrecision
from dist_template.compat.torch import step_of
from tests.support.library import lighten


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


class Unusual(BoringModel):
    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        assert isinstance(optimizer_closure, Closure)
        optimizer.step(optimizer_closure)


def test_the_closure_of_an_optimizer_step_is_lightnings(tmp_path: Path) -> None:
    trainer_in(tmp_path).fit(Unusual())


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
