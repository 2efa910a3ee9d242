"""SampleOrder: which loaders get an exact order, and what the others keep."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, Subset, WeightedRandomSampler

from dist_template import InputError
from dist_template.callbacks import LastCheckpoint, SampleOrder
from dist_template.callbacks.sample_order import even_batch_size
from tests.support.streams import STREAMS
from tests.support.wings import RunRecord, Workers

NUM = 22


class Numbers(Dataset):
    def __len__(self) -> int:
        return NUM

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(NUM))


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
def test_a_resume_reads_the_next_samples_of_each_epoch(tmp_path: Path, stop: int, workers: int) -> None:
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
    with pytest.raises(InputError, match=r"was trained with samples 22, now 18: .*accept_changes '\[samples\]'"):
        fit(tmp_path, DataLoader(Subset(Numbers(), range(18)), 4, shuffle=True), 5, ckpt_path=last)
    with pytest.raises(InputError, match=r"was trained with seed 0, now 5: "):
        fit(tmp_path, DataLoader(Numbers(), 4, shuffle=True, generator=generator), 5, ckpt_path=last)
    with pytest.raises(InputError, match=r"was trained with seed 0, now None: "):
        fit(tmp_path, DataLoader(Numbers(), 4), 5, ckpt_path=last)
    accepts = LastCheckpoint(dirpath=str(tmp_path), accept_changes=["samples"])
    loader = DataLoader(Subset(Numbers(), range(18)), 4, shuffle=True)
    assert len(fit(tmp_path, loader, 5, ckpt_path=last, callbacks=[accepts])) == 2


def test_samples_with_costs_are_balanced_within_a_step(tmp_path: Path) -> None:
    """Each step keeps its samples; its micro-batches take the most expensive ones first."""
    even = Numbers()
    even.costs = [abs(number - 11) for number in range(NUM)]  # ty: ignore[missing-attribute]
    batches = fit(tmp_path, DataLoader(even, 2), 4, accumulate_grad_batches=2)
    expected = [sorted(range(at, at + 4), key=lambda number: -abs(number - 11)) for at in range(0, 16, 4)]
    assert [sum(batches[at : at + 2], []) for at in range(0, 8, 2)] == expected


def test_a_loader_that_does_not_shuffle_keeps_its_order(tmp_path: Path) -> None:
    assert fit(tmp_path, DataLoader(Numbers(), 4), 5) == [list(range(i, i + 4)) for i in range(0, 20, 4)]


OTHERS = {
    "a sampler of its own": lambda: DataLoader(Numbers(), 4, sampler=WeightedRandomSampler([1.0] * NUM, NUM)),
    "a random sampler with replacement of fewer": lambda: DataLoader(
        Numbers(), 4, sampler=RandomSampler(Numbers(), num_samples=8)
    ),
    "an iterable dataset": lambda: DataLoader(Stream(), 4),
    "no DataLoader": lambda: [torch.arange(4), torch.arange(4)],
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_loader_is_not_changed_and_a_warning_is_printed(name: str) -> None:
    order, loader = SampleOrder(), OTHERS[name]()
    order._trainer, order._num_ranks = SimpleNamespace(overfit_batches=0.0, accumulate_grad_batches=1), 1
    with pytest.warns(UserWarning, match="a resumed epoch starts again at its first batch"):
        assert order._train(loader) is loader


def test_a_training_set_below_one_step_is_refused(tmp_path: Path) -> None:
    sentence = r"has 22 samples, and an optimizer step takes 24: batch_size 8 x data_parallel 1 x .*batches 3"
    with pytest.raises(InputError, match=sentence):
        fit(tmp_path, DataLoader(Numbers(), 8), 1, accumulate_grad_batches=3)


def test_the_datamodule_is_restored(tmp_path: Path) -> None:
    data, module = Data(DataLoader(Numbers(), 4)), Module()
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_steps=1, logger=False, enable_progress_bar=False, enable_checkpointing=False,
        enable_model_summary=False, callbacks=[SampleOrder()],
    )  # fmt: skip
    trainer.fit(module, datamodule=data)
    assert "train_dataloader" not in vars(data)


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
@pytest.mark.parametrize("kind", ["same", "sampler"])
def test_ranks_that_read_the_same_samples_are_refused(tmp_path: Path, kind: str) -> None:
    refusal = fit_streams(tmp_path, 2, f"--data.kind={kind}").refusal
    assert "all 2 ranks train on the same samples" in refusal and "get_rank() in the dataset's __iter__" in refusal


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sharded", "constant"])
def test_ranks_with_samples_of_their_own_or_constant_ones_train(tmp_path: Path, kind: str) -> None:
    fit_streams(tmp_path, 2, f"--data.kind={kind}").check()


@pytest.mark.slow
def test_rows_that_must_count_twice_are_reported(tmp_path: Path) -> None:
    warning = "1 of 1 rows of an evaluation count twice"
    fit_streams(tmp_path, 2, "--data.kind=constant", "--data.num_held_out=1", warns=warning).check()


def test_a_batch_size_is_found_with_which_ranks_have_equally_many_batches() -> None:
    for rows in range(1, 70):
        for size in range(1, 9):
            for ranks in range(1, 5):
                found = even_batch_size(rows, size, ranks)
                numbers = {-(-len(range(rank, rows, ranks)) // (found or size)) for rank in range(ranks)}
                assert found is None or (len(numbers) == 1 and min(numbers) > 0 and size / 2 < found <= size)
                assert found == size or rows < ranks or -(-rows // (ranks * size)) * ranks * size - rows >= 1
