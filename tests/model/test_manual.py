"""A module that optimizes manually trains alike under every strategy, or is refused before the start."""

from __future__ import annotations

from pathlib import Path

import pytest
from dist_template import Project

from tests.support.manual import BUILT, MANUAL
from tests.support.runs import Workers, logged
from tests.support.strategies import flags_of
from tests.support.wings import RunRecord

PROJECTS = {"two optimizers": MANUAL, "TrainingModule": BUILT}


def fit(
    folder: Path, strategy: str, ranks: int, *more: str, project: Project = MANUAL
) -> RunRecord:
    given = [
        "fit", f"--run.root={folder / 'runs'}", "--run.report=false", "--trainer.accelerator=cpu",
        f"--trainer.devices={ranks}", "--trainer.max_steps=24", "--best_checkpoint.monitor=val_loss",
        "--trainer.log_every_n_steps=1", f"--data.batch_size={8 // ranks}", f"--run.name={strategy}",
        "--last_checkpoint.every_n_steps=12", *(flags_of(strategy) if strategy != "auto" else ()), *more,
    ]  # fmt: skip
    with Workers(ranks, project) as workers:
        return workers.run(given, folder / f"{strategy}{len(more)}", run_id=strategy)


@pytest.mark.slow
@pytest.mark.parametrize("kind", PROJECTS)
def test_manual_optimization_under_ddp_has_the_losses_of_one_process(
    tmp_path: Path, kind: str
) -> None:
    one, two = (
        fit(tmp_path, *each, project=PROJECTS[kind]).check() for each in (("auto", 1), ("ddp", 2))
    )
    losses = logged(one.run, "my/loss")
    assert len(losses) >= 10
    assert logged(two.run, "my/loss") == pytest.approx(losses, rel=1e-5)
    assert two.eval() == {
        step: pytest.approx(results, rel=1e-5) for step, results in one.eval().items()
    }


@pytest.mark.parametrize("strategy", ["fsdp2", "zero3"])
def test_manual_optimization_is_refused_where_the_weights_are_sharded(
    tmp_path: Path, strategy: str
) -> None:
    refusal = fit(tmp_path, strategy, 2).refusal
    assert "Manual optimizes manually" in refusal and "configs/strategy/ddp.yaml" in refusal
