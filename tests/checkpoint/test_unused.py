"""A trainable parameter that gets no gradient: training resumes under every strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pytest import CaptureFixture, MonkeyPatch
from torch import nn
from trainer_dev.module import LanguageModule

from tests.support.runs import CONFIGS, logged, newest, only_run, run

STEPS, HALF = 4, 2
STRATEGIES = {
    name: [f"--config={CONFIGS}/strategy/{name}.yaml"] for name in ("fsdp2", "zero2", "zero3")
} | {"auto": []}


@pytest.fixture
def with_pooler(monkeypatch: MonkeyPatch) -> None:
    """The model has a pooler that nothing calls; its parameters are in both of the optimizer's groups."""
    build = LanguageModule.build_model

    def build_model(self: Any, data: Any) -> nn.Module:
        model: Any = build(self, data)
        model.pooler = nn.Linear(4, 4)
        return model

    monkeypatch.setattr(LanguageModule, "build_model", build_model)


def fit(flags: list[str], strategy: str, name: str, steps: int, *more: str) -> int:
    argv = [*STRATEGIES[strategy], *flags, "--trainer.devices=1", "--trainer.limit_val_batches=0"]
    sizes = [
        f"--trainer.max_steps={steps}",
        "--model.optim.schedule=constant",
        "--model.optim.warmup=0",
    ]
    return run("fit", *argv, f"--run.name={name}", *sizes, *more)


@pytest.mark.usefixtures("with_pooler")
@pytest.mark.parametrize(
    ("wrote", "resumes"),
    [
        ("fsdp2", "fsdp2"),
        ("auto", "fsdp2"),
        ("fsdp2", "auto"),
        pytest.param("fsdp2", "zero2", marks=pytest.mark.slow),
        pytest.param("fsdp2", "zero3", marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_without_its_moments_is_resumed(
    flags: list[str], tmp_path: Path, capsys: CaptureFixture, wrote: str, resumes: str
) -> None:
    assert fit(flags, "auto", "whole", STEPS) == 0
    assert fit(flags, wrote, "half", HALF) == 0
    last = newest(only_run(tmp_path, "half"))
    assert fit(flags, resumes, "resumed", STEPS, f"--ckpt_path={last}") == 0
    printed = capsys.readouterr().out
    assert "moments start from zero" not in printed
    whole, resumed = (
        logged(only_run(tmp_path, name), "train/loss") for name in ("whole", "resumed")
    )
    assert resumed == pytest.approx({step: whole[step] for step in resumed}, rel=1e-5)
    assert set(resumed) == {3, 4}
