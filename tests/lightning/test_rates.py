"""A learning rate that a hook has set beside a schedule is the resumed training's."""

from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch import Callback

from dist_template.checkpoint.optimizer import ParameterNames
from tests.lightning.habits.reported import ChangesRateWithin
from tests.lightning.habits.rows import Rows


class Rates(Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        self.seen.append(trainer.optimizers[0].param_groups[0]["lr"])


def rates_of(max_steps: int, path: Path, resumes: bool = False) -> list[float]:
    rates = Rates()
    options: Any = {"logger": False, "enable_checkpointing": False, "accelerator": "cpu"}
    options |= {"enable_progress_bar": False, "enable_model_summary": False, "devices": 1}
    trainer = L.Trainer(max_steps=max_steps, callbacks=[ParameterNames(), rates], **options)
    ckpt_path = path if resumes else None
    trainer.fit(ChangesRateWithin(), datamodule=Rows(), ckpt_path=ckpt_path, weights_only=False)
    trainer.save_checkpoint(path)
    return rates.seen


def test_a_rate_that_a_hook_has_set_stays_after_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "of_step_4.ckpt"
    assert rates_of(4, path) == [0.05, 0.05, 0.025, 0.025]
    assert rates_of(6, path, resumes=True)[-2:] == [0.025, 0.025]
