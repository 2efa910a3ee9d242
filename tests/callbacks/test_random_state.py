"""Dropout continues after an interruption, and after a validation, as if there had been none."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from dist_template.callbacks import RandomState
from dist_template.callbacks.random_state import KEY

from tests.support.runs import logged, only_run, run

WITH_DROPOUT = (
    "{model_type: gpt2, n_embd: 32, n_layer: 2, n_head: 2, resid_pdrop: 0.3, embd_pdrop: 0.3}"
)


@pytest.mark.slow
def test_validation_does_not_change_what_training_draws(flags: list[str], tmp_path: Path) -> None:
    flags = [*flags, f"--model.architecture={WITH_DROPOUT}"]
    for interval in (4, 20):
        assert (
            run(
                "fit",
                *flags,
                f"--run.name=every{interval}",
                f"--trainer.val_check_interval={interval}",
            )
            == 0
        )
    losses = [logged(only_run(tmp_path, f"every{interval}"), "train/loss") for interval in (4, 20)]
    assert losses[0] == losses[1]


def trainer(rank: int, world_size: int) -> Any:
    strategy = SimpleNamespace(
        distributed_sampler_kwargs={"num_replicas": world_size, "rank": rank}
    )
    return SimpleNamespace(global_rank=rank, world_size=world_size, strategy=strategy)


def draws() -> tuple[float, float, float]:
    return torch.rand(1).item(), random.random(), float(np.random.rand())


def resume(checkpoint: dict[str, Any], rank: int, world_size: int) -> tuple[float, float, float]:
    """Returns what training draws first on a rank of a run that resumes from `checkpoint`."""
    callback = RandomState()
    callback.setup(trainer(rank, world_size), None, "fit")
    callback.on_load_checkpoint(trainer(rank, world_size), None, checkpoint)
    draws()  # what loaders do before the first batch
    callback.on_train_batch_start(trainer(rank, world_size), None, None, 0)
    return draws()


def test_another_number_of_ranks_starts_new_streams_with_a_warning() -> None:
    checkpoint: dict[str, Any] = {"global_step": 7}
    RandomState().on_save_checkpoint(trainer(0, 1), None, checkpoint)
    assert len(checkpoint[KEY]) == 1
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="random state of 1 ranks and there are 2 now"):
        first = resume(checkpoint, rank=0, world_size=2)
    torch.manual_seed(0)
    with pytest.warns(UserWarning):
        second = resume(checkpoint, rank=1, world_size=2)
    torch.manual_seed(0)
    with pytest.warns(UserWarning):
        again = resume(checkpoint, rank=0, world_size=2)
    assert first[0] != second[0]
    assert first[0] == again[0]
