"""A module's hooks of an optimizer step run once per step under every strategy."""

from __future__ import annotations

from pathlib import Path

import pytest

from dist_template import Project
from tests.support.runs import Workers, logged
from tests.support.strategies import flags_of
from tests.support.teacher import HOOKS, STUDENT, STUDENT_WITH_OWN_ORDER
from tests.support.tiers import tiers

STEPS = 8
ZERO = ("zero1", "zero2", "zero3")


Series = dict[str, dict[int, float]]


def values(folder: Path, strategy: str, project: Project, accumulation: int, *more: str) -> Series:
    given = [
        "fit", f"--run.root={folder / 'runs'}", "--run.report=false", "--trainer.accelerator=cpu",
        "--trainer.devices=2", f"--trainer.max_steps={STEPS}", "--trainer.log_every_n_steps=1",
        f"--trainer.accumulate_grad_batches={accumulation}", "--data.batch_size=2",
        "--data.num_train=40", f"--run.name={strategy}", "--best_checkpoint.monitor=val_loss",
        *flags_of(strategy), *more,
    ]  # fmt: skip
    with Workers(2, project) as workers:
        record = workers.run(given, folder / strategy).check()
    names = (*HOOKS, "teacher", "train/loss", "val_loss")
    return {name: logged(record.run, name) for name in names}


def assert_equal(got: Series, expected: Series) -> None:
    for name, series in expected.items():
        assert got[name] == pytest.approx(series, rel=1e-5), name


@pytest.mark.slow
@pytest.mark.parametrize("profiler", tiers(["null", "simple"], daily=["null"]))
def test_hooks_and_averages_of_a_step_are_those_of_ddp(tmp_path: Path, profiler: str) -> None:
    """With a profiler, Lightning's own loop runs."""
    expected = values(tmp_path, "ddp", STUDENT, 2, f"--trainer.profiler={profiler}")
    assert [*expected["optimizer_step"].values()] == [*range(STEPS)], "none before the first"
    assert expected["teacher"][STEPS] > 0
    for strategy in ZERO:
        got = values(tmp_path, strategy, STUDENT, 2, f"--trainer.profiler={profiler}")
        assert_equal(got, expected)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", tiers(ZERO, daily=["zero2"]))
def test_an_epochs_last_step_may_have_fewer_micro_batches(tmp_path: Path, strategy: str) -> None:
    """10 micro-batches on a rank in steps of 4: the epoch's third step has 2."""
    expected = values(tmp_path, "ddp", STUDENT_WITH_OWN_ORDER, 4)
    assert_equal(values(tmp_path, strategy, STUDENT_WITH_OWN_ORDER, 4), expected)
