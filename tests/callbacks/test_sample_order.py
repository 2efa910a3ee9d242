"""SampleOrder: which loaders get an exact order, and what the others keep."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

from dist_template import InputError, Project
from dist_template.callbacks import LastCheckpoint, SampleOrder
from tests.support.classifier import Images
from tests.support.runs import Workers

NUM = 22
NUMBERS: Any = range(NUM)  # a data set: it has a length and items


class Module(L.LightningModule):
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
    loader: Any

    def train_dataloader(self) -> Any:
        return self.loader


def fit(folder: Path, loader: Any, max_steps: int, **options: Any) -> list[list[int]]:
    module, resumes = Module(), options.pop("ckpt_path", None)
    callbacks = [SampleOrder(), *options.pop("callbacks", [])]
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=max_steps,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=len(callbacks) > 1,
        enable_model_summary=False,
        callbacks=callbacks,
        **options,
    )
    data = Data()
    data.loader = loader
    trainer.fit(module, datamodule=data, ckpt_path=resumes)
    trainer.save_checkpoint(folder / "last.ckpt")
    return module.batches


@pytest.mark.parametrize(("stop", "workers"), [(3, 0), (5, 1), (7, 0)])
def test_a_resume_reads_the_next_samples(tmp_path: Path, stop: int, workers: int) -> None:
    loader = DataLoader(NUMBERS, 4, shuffle=True, num_workers=workers)
    uninterrupted = fit(tmp_path, loader, 12)
    samples = sum(uninterrupted, [])
    assert sorted(samples[:20]) != samples[:20], "shuffled"
    assert len({*samples[:NUM]}) == NUM and len({*samples[NUM : 2 * NUM]}) == NUM, "two full epochs"
    assert fit(tmp_path, loader, stop) == uninterrupted[:stop]
    assert fit(tmp_path, loader, 12, ckpt_path=tmp_path / "last.ckpt") == uninterrupted[stop:]


def test_a_resume_with_other_samples_is_refused_and_can_be_accepted(tmp_path: Path) -> None:
    fit(tmp_path, DataLoader(NUMBERS, 4, shuffle=True), 3)
    last, fewer = tmp_path / "last.ckpt", Subset(NUMBERS, range(18))
    seeded = DataLoader(NUMBERS, 4, shuffle=True, generator=torch.Generator().manual_seed(5))
    for loader, said in (
        (DataLoader(fewer, 4, shuffle=True), r"samples 22, now 18: .*accept_changes '\[samples\]'"),
        (seeded, "seed 0, now 5: "),
        (DataLoader(NUMBERS, 4), "seed 0, now None: "),
    ):
        with pytest.raises(InputError, match=f"was trained with {said}"):
            fit(tmp_path, loader, 5, ckpt_path=last)
    accepts = LastCheckpoint(dirpath=str(tmp_path), accept_changes=["samples"])
    loader = DataLoader(fewer, 4, shuffle=True)
    assert len(fit(tmp_path, loader, 5, ckpt_path=last, callbacks=[accepts])) == 2


def test_a_training_set_below_one_step_is_refused(tmp_path: Path) -> None:
    sentence = "has 22 samples, and an optimizer step takes 24: batch_size 8 x data_parallel 1 x "
    with pytest.raises(InputError, match=sentence):
        fit(tmp_path, DataLoader(NUMBERS, 8), 1, accumulate_grad_batches=3)


class Uneven(Images):
    """30 rows to evaluate: in batches of 4, the last one has 2."""

    def val_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(*(each[:30] for each in self.held_out.tensors)), 4)


UNEVEN = Project("tests.support", ".classifier:PlainClassifier", f"{__name__}:Uneven")


@pytest.mark.slow
def test_an_evaluation_counts_each_row_of_a_smaller_last_batch_once(tmp_path: Path) -> None:
    losses = []
    for ranks in (1, 2):
        given = f"""fit --run.root={tmp_path / "runs"} --run.report=false --trainer.accelerator=cpu
            --trainer.devices={ranks} --trainer.max_steps=1 --trainer.num_sanity_val_steps=-1"""
        record = Workers(ranks, UNEVEN).run(given.split(), tmp_path / f"{ranks}").check()
        losses.append(record.eval("sanity_check")[0])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
