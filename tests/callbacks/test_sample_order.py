"""SampleOrder: which loaders get an exact order, and what the others keep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset

from dist_template import InputError
from dist_template.callbacks import LastCheckpoint, SampleOrder
from tests.support.runs import Workers
from tests.support.streams import STREAMS
from tests.support.wings import RunRecord

NUM = 22


class Numbers(Dataset):
    def __len__(self) -> int:
        return NUM

    def __getitem__(self, index: int) -> int:
        return index


class Module(L.LightningModule):
    """Records the samples of each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.batches: list[list[int]] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.batches.append(batch.tolist())
        return self.layer(batch[:, None].float()).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1e-6)


class Data(L.LightningDataModule):
    def __init__(self, loader: Any) -> None:
        super().__init__()
        self.loader = loader

    def train_dataloader(self) -> Any:
        return self.loader


def fit(folder: Path, loader: Any, max_steps: int, **options: Any) -> list[list[int]]:
    """The samples of each batch, with checkpoints in `folder`."""
    module, resumes = Module(), options.pop("ckpt_path", None)
    callbacks = [SampleOrder(), *options.pop("callbacks", [])]
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_steps=max_steps, logger=False, enable_progress_bar=False,
        enable_checkpointing=len(callbacks) > 1, enable_model_summary=False, callbacks=callbacks, **options,
    )  # fmt: skip
    trainer.fit(module, datamodule=Data(loader), ckpt_path=resumes)
    trainer.save_checkpoint(folder / "last.ckpt")
    return module.batches


@pytest.mark.parametrize("stop", [3, 5, 7])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_resume_reads_the_next_samples_of_each_epoch(
    tmp_path: Path, stop: int, workers: int
) -> None:
    loader = DataLoader(Numbers(), 4, shuffle=True, num_workers=workers)
    uninterrupted = fit(tmp_path, loader, 12)
    samples = sum(uninterrupted, [])
    assert sorted(samples[:20]) != samples[:20], "shuffled"
    assert len({*samples[:NUM]}) == NUM and len({*samples[NUM : 2 * NUM]}) == NUM, "two full epochs"
    assert fit(tmp_path, loader, stop) == uninterrupted[:stop]
    assert fit(tmp_path, loader, 12, ckpt_path=tmp_path / "last.ckpt") == uninterrupted[stop:]


def test_a_resume_with_other_samples_is_refused_and_can_be_accepted(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    fit(tmp_path, DataLoader(Numbers(), 4, shuffle=True), 3)
    last = tmp_path / "last.ckpt"
    with pytest.raises(
        InputError, match=r"was trained with samples 22, now 18: .*accept_changes '\[samples\]'"
    ):
        fit(tmp_path, DataLoader(Subset(Numbers(), range(18)), 4, shuffle=True), 5, ckpt_path=last)
    with pytest.raises(InputError, match=r"was trained with seed 0, now 5: "):
        fit(
            tmp_path, DataLoader(Numbers(), 4, shuffle=True, generator=generator), 5, ckpt_path=last
        )
    with pytest.raises(InputError, match=r"was trained with seed 0, now None: "):
        fit(tmp_path, DataLoader(Numbers(), 4), 5, ckpt_path=last)
    accepts = LastCheckpoint(dirpath=str(tmp_path), accept_changes=["samples"])
    loader = DataLoader(Subset(Numbers(), range(18)), 4, shuffle=True)
    assert len(fit(tmp_path, loader, 5, ckpt_path=last, callbacks=[accepts])) == 2


def test_a_training_set_below_one_step_is_refused(tmp_path: Path) -> None:
    sentence = r"has 22 samples, and an optimizer step takes 24: batch_size 8 x data_parallel 1 x .*batches 3"
    with pytest.raises(InputError, match=sentence):
        fit(tmp_path, DataLoader(Numbers(), 8), 1, accumulate_grad_batches=3)


def fit_streams(folder: Path, ranks: int, *flags: str, warns: str = "") -> RunRecord:
    given = [
        "fit", f"--run.root={folder / 'runs'}", "--run.report=false", "--trainer.accelerator=cpu",
        f"--trainer.devices={ranks}", "--trainer.max_steps=6", "--best_checkpoint.monitor=val_loss", *flags,
    ]  # fmt: skip
    with Workers(ranks, STREAMS) as workers:
        record = workers.run(given, folder / f"{ranks}{flags[-1]}")
    assert warns in record.log(0)
    return record


@pytest.mark.slow
@pytest.mark.parametrize("rows", [30, 36])
def test_an_evaluation_counts_each_row_once_also_where_the_last_batch_is_smaller(
    tmp_path: Path, rows: int
) -> None:
    one, two = (
        fit_streams(tmp_path, n, "--data.kind=constant", f"--data.num_held_out={rows}")
        for n in (1, 2)
    )
    assert two.check().eval("sanity_check")[0] == pytest.approx(
        one.check().eval("sanity_check")[0], rel=1e-6
    )
