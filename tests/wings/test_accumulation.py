"""`launch` and `plan` accumulate as `fit` does; the help of `export` has its RUN."""

from typing import Any

import pytest

from dist_template.wings.launch.job import describe
from tests.support.runs import OURS, command


def test_a_job_has_the_batch_that_fit_derives(flags: list[str]) -> None:
    """2 nodes x 2 processes x 3 micro-batches of 2 sequences; the configured batch is another."""
    sizes = ["--trainer.num_nodes=2", "--trainer.devices=2", "--trainer.strategy=ddp"]
    sizes += ["--trainer.accumulate_grad_batches=3", "--data.micro_batch_size=2"]
    job = describe(OURS, "fit", [*flags, *sizes], on_hosts=False)
    data: Any = job.data
    assert data.global_batch_size == 2 * 2 * 3 * 2


def test_a_plan_is_of_the_batch_that_fit_derives(flags: list[str], capsys: Any) -> None:
    sizes = ["--devices=4", "--memory=80GB", "--data.micro_batch_size=2"]
    assert command(["plan", *flags, *sizes, "--trainer.accumulate_grad_batches=3"]) == 0
    assert "a step of 24 sequences" in capsys.readouterr().out


def test_the_help_of_export_names_its_run(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        command(["export", "--help"])
    shown = capsys.readouterr().out
    assert "export RUN --output FOLDER" in shown and "RUN: a run's folder" in shown
