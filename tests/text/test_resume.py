"""An interrupted run resumes with the rows that it has not read, in Lightning's own loops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from trainer_dev.data import DataModule

from dist_template import InputError
from dist_template.text import Bytes, TextFiles

pytestmark = [
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),
    pytest.mark.filterwarnings("ignore:Total length of `list`"),  # validation is off
    pytest.mark.filterwarnings("ignore:.*your dataloader is not resumable"),
]

STEPS, GLOBAL = 26, 8  # of 10 steps an epoch, see `texts`


class Watched(L.LightningModule):
    """One weight; writes down which rows each optimizer step was made of."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.window: list[int] = []
        self.steps: list[list[int]] = []

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.window += batch["input_ids"][:, 0].tolist()  # a row's first byte is its name
        return self.weight * batch["input_ids"].float().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.steps.append(self.window)
        self.window = []

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # This has the loader made before the checkpoint is loaded, as most schedules do.
        assert self.trainer.estimated_stepping_batches == STEPS
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Stop(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step == self.step:
            raise KeyError("stopped")


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """87 rows of 16 bytes, each with its own first byte: 10 steps of 8, and 7 rows for the next epoch."""
    path = tmp_path / "rows.txt"
    path.write_text("".join(chr(32 + row) + "." * 15 for row in range(87)) + "!", encoding="utf-8")
    return path


def train(
    texts: Path,
    folder: Path,
    stop: int | None = None,
    ckpt: Path | None = None,
    micro: int = 2,
    workers: int = 0,
) -> list[list[int]]:
    """The rows of each optimizer step made."""
    data = DataModule(
        TextFiles([str(texts)]),
        Bytes(),
        16,
        GLOBAL,
        micro,
        validation_share=0.0,
        test_share=0.0,
        cache_dir=str(folder),
        num_workers=workers,
    )
    data.prepare(report=lambda _: None)
    module = Watched()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=STEPS,
        max_epochs=99,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[
            ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1, enable_version_counter=False),
            *([Stop(stop)] if stop else []),
        ],
    )
    if stop:
        with pytest.raises(KeyError):
            trainer.fit(module, data)
    else:
        trainer.fit(module, data, ckpt_path=ckpt, weights_only=True)
        assert data.consumed_samples == STEPS * GLOBAL
    return module.steps


@pytest.fixture
def uninterrupted(texts: Path, tmp_path: Path) -> list[list[int]]:
    steps = train(texts, tmp_path / "uninterrupted")
    assert len(steps) == STEPS and all(len(step) == GLOBAL for step in steps)
    assert sorted(sum(steps, [])[:87]) == [32 + row for row in range(87)]
    return steps


# In the first epoch, at its end, at the start of the second, inside it, at its end, in the third.
@pytest.mark.parametrize("stop", [3, 10, 11, 14, 20, 23])
@pytest.mark.parametrize(("micro", "workers"), [(2, 0), pytest.param(2, 2, marks=pytest.mark.slow), (8, 0), (1, 0)])
def test_a_resumed_run_reads_exactly_the_remaining_rows(
    texts: Path, tmp_path: Path, uninterrupted: list[list[int]], stop: int, micro: int, workers: int
) -> None:
    """Also with workers, which read ahead, and with a micro-batch other than the interrupted run's 2."""
    first = train(texts, tmp_path / "run", stop=stop)
    rest = train(texts, tmp_path / "run", ckpt=tmp_path / "run" / f"step={stop}.ckpt", micro=micro, workers=workers)
    assert [sorted(step) for step in first + rest] == [sorted(step) for step in uninterrupted]


def test_batches_that_do_not_divide_are_refused_with_all_numbers() -> None:
    data = DataModule(global_batch_size=100, micro_batch_size=8)
    with pytest.raises(InputError) as caught:
        data.check(world_size=4)
    assert str(caught.value).startswith(
        "global_batch_size 100 is not a multiple of micro_batch_size 8 x data_parallel 4 = 32; edit data."
    )
    data.global_batch_size = 96
    data.check(world_size=4)


def test_shares_that_leave_no_training_text_are_refused() -> None:
    with pytest.raises(InputError, match="nothing to train on"):
        DataModule(validation_share=0.5, test_share=0.5).check(world_size=1)
