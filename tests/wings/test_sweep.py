"""`sweep`: values, pruning, ends of trials, resume, and what is written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import yaml

from dist_template.cluster.run_lock import RunLock
from dist_template.wings.sweep import study
from tests import PROJECT
from tests.support.line import PACKAGE, command
from tests.support.runs import Workers, logged, newest, run
from tests.support.strategies import flags_of
from tests.support.tiers import tiers

SPACE = "model.optim.learning_rate: {log: [1.0e-3, 1.0e-1]}\nmodel.optim.warmup: {choice: [0, 2]}\n"
NAME = "default-lr"


class Trials:
    """Runs each trial in this process, which is quicker than a new one; `codes` replaces the ends of some."""

    def __init__(self) -> None:
        self.started: list[list[str]] = []
        self.codes: dict[int, int] = {}

    def __call__(self, argv: list[str], folder: Path) -> int:
        self.started.append(argv[3:])
        os.environ["DIST_RUN_ID"] = folder.name
        with (
            (folder / "output.txt").open("a") as output,
            redirect_stdout(output),
            redirect_stderr(output),
        ):
            code = command(argv[3:])
        return self.codes.get(len(self.started), code)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Trials:
    trials = Trials()
    monkeypatch.setattr(study, "start", trials)
    return trials


@pytest.fixture
def space(tmp_path: Path) -> str:
    (tmp_path / "lr.yaml").write_text(SPACE)
    return f"--space={tmp_path / 'lr.yaml'}"


def sweep_in(tmp_path: Path) -> study.Sweep:
    return study.Sweep(tmp_path / "runs" / NAME)


def trials_in(tmp_path: Path) -> list[Any]:
    return sweep_in(tmp_path).study().trials


@pytest.mark.slow
def test_trials_are_fits_and_the_best_configuration_trains_again(
    here: Trials, flags: list[str], space: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["sweep", *flags, space, "--pruner=none"]
    assert run(*argv, "--trials=3") == 0
    printed, trials = capsys.readouterr().out, trials_in(tmp_path)
    assert [one.number for one in trials] == [0, 1, 2] and len(here.started) == 3
    for one in trials:
        folder = sweep_in(tmp_path).run(one.number)
        config = yaml.safe_load((folder / "config.yaml").read_text())
        assert config["model"]["optim"]["learning_rate"] == one.params["model.optim.learning_rate"]
        assert (
            one.value == logged(folder, "eval/loss")[20]
            and f"trial {one.number}: eval/loss {one.value:.4f}" in printed
        )
        assert not (folder / "worker").exists(), "no process works on it"
    best = min(trials, key=lambda one: one.value)
    assert f"best           trial {best.number}: eval/loss" in printed
    file = tmp_path / "runs" / NAME / "best.yaml"
    config = yaml.safe_load(file.read_text())
    assert config["trainer"]["callbacks"] == [] and config["run"]["name"] == "default"
    assert run("fit", f"--config={file}", "--trainer.max_steps=20") == 0
    (again,) = (tmp_path / "runs" / "default").iterdir()
    assert logged(again, "eval/loss")[20] == best.value

    assert run(*argv, "--trials=3") == 0 and len(here.started) == 3, (
        "finished trials are not repeated"
    )
    assert run(*argv, "--trials=3", "--trainer.max_steps=30") == 2
    assert "has trials of another space or flags; set --name" in capsys.readouterr().err


@pytest.mark.slow
def test_a_killed_trial_resumes_its_checkpoint_and_values_do_not_depend_on_it(
    here: Trials, flags: list[str], space: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trial 1 is killed between step 10 and its end; the sweep is started again with the same command."""
    argv = [
        "sweep",
        *flags,
        space,
        "--trials=3",
        "--sampler=random",
        "--last_checkpoint.every_n_steps=10",
    ]
    assert run(*argv, "--name=whole") == 0
    expected = [
        (one.params, one.value) for one in study.Sweep(tmp_path / "runs" / "whole").study().trials
    ]

    here.started, here.codes = [], {2: -9}
    assert run(*argv, f"--name={NAME}") == 75
    assert "trial 1 was stopped; the same command resumes the sweep" in capsys.readouterr().err
    assert [one.state.name for one in trials_in(tmp_path)] == ["COMPLETE", "RUNNING"]
    newest(sweep_in(tmp_path).run(1)).rename(tmp_path / "lost.ckpt")
    for best in (sweep_in(tmp_path).run(1) / "checkpoints").glob("best-step00000020.ckpt"):
        best.rename(tmp_path / "lost-best.ckpt")
    assert run(*argv, f"--name={NAME}") == 0
    assert [(one.params, one.value) for one in trials_in(tmp_path)] == expected
    assert len(here.started) == 4
    output = (sweep_in(tmp_path).run(1) / "output.txt").read_text()
    assert "has checkpoints: the run resumes from its newest" in output


@pytest.mark.parametrize("cut", [3, 40])
def test_an_entry_that_a_kill_has_cut_is_done_again(
    cut: int, here: Trials, flags: list[str], space: str, tmp_path: Path
) -> None:
    """The end of trial 1, cut anywhere."""
    argv = ["sweep", *flags, space, f"--name={NAME}", "--sampler=random", "--trainer.max_steps=3"]
    assert run(*argv, "--trials=2") == 0
    before, journal = trials_in(tmp_path), sweep_in(tmp_path).folder / "journal.log"
    journal.write_bytes(journal.read_bytes()[:-cut])
    assert run(*argv, "--trials=2") == 0
    assert [(one.params, one.value) for one in trials_in(tmp_path)] == [
        (one.params, one.value) for one in before
    ]
    assert len(here.started) == 3


def test_a_trial_that_is_always_killed_fails_at_last(
    flags: list[str], space: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        study, "start", lambda argv, folder: (folder / "output.txt").write_text("Killed") and -9
    )
    argv = ["sweep", *flags, space, "--trials=1", f"--name={NAME}"]
    assert [run(*argv) for _ in range(3)] == [75, 75, 1]
    (one,) = trials_in(tmp_path)
    assert (one.state.name, one.user_attrs["end"]) == ("FAIL", "failed with code -9: Killed")


@pytest.mark.slow
def test_failed_trials_are_recorded_with_their_reasons_and_the_sweep_continues(
    here: Trials, flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A learning rate at which the weights are not finite."""
    (tmp_path / "lr.yaml").write_text("model.optim.learning_rate: {choice: [1.0e+30, 0.01]}\n")
    argv = ["sweep", *flags, f"--space={tmp_path / 'lr.yaml'}", "--sampler=grid", "--trials=9"]
    assert run(*argv, "--trainer.gradient_clip_val=0") == 0
    printed, trials = capsys.readouterr().out, trials_in(tmp_path)
    assert sorted(one.state.name for one in trials) == ["COMPLETE", "FAIL"], "a grid has no more"
    (failed,) = [one for one in trials if one.state.name == "FAIL"]
    assert (
        failed.user_attrs["end"].startswith("failed with code 65: ")
        and failed.user_attrs["end"] in printed
    )


def plant(sweep: study.Sweep, num: int, loss: float) -> None:
    """Completed trials with this loss after 10 and 20 steps; then one that has begun."""
    for number in range(num + 1):
        assert sweep._new(RunLock(), 99) == number
        for step in (10, 20) if number < num else ():
            one = sweep.trial(number)
            one.report(loss, step)
            one.should_prune()  # hyperband then has the trial's rung
        if number < num:
            sweep.study().tell(number, loss)


DEFINITION = {
    "space": {"model.optim.learning_rate": {"log": [1e-4, 1e-1]}}, "flags": [], "metric": "eval/loss", "mode": "min",
    "sampler": "tpe", "pruner": "median", "prune_after": 10, "name": "x", "of": "x",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy, pruner, loss, last",
    tiers(
        [
            ("fsdp2", "median", 0.5, 10),
            ("ddp", "hyperband", 0.5, 10),
            ("fsdp2", "median", 99.0, 20),
            ("tp", "median", 0.5, 10),
            ("zero3", "median", 0.5, 10),
        ],
        daily=[("fsdp2", "median", 0.5, 10), ("ddp", "hyperband", 0.5, 10)],
    ),
)
def test_all_ranks_finish_at_the_step_at_which_a_trial_is_pruned(
    strategy: str, pruner: str, loss: float, last: int, flags: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "runs" / "default"
    folder.mkdir(parents=True)
    sweep = study.Sweep(folder, DEFINITION | {"pruner": pruner})
    plant(sweep, 8, loss)
    callback = {"class_path": f"{study.__name__}.Pruning", "init_args": {"run": "{run}"}}
    argv = [
        "fit",
        *flags,
        *flags_of(strategy),
        "--trainer.devices=2",
        f"--trainer.callbacks+={json.dumps(callback)}",
    ]
    with Workers(2) as workers:
        workers.run(["prepare", *flags], tmp_path / "prepared").check()
        record = workers.run(argv, tmp_path / "record", run_id="trial-0008").check()
    assert max(record.loss) == last and newest(sweep.run(8)).name == f"step{last:08}.ckpt"
    ended = sweep.study().trials[8]
    assert ended.user_attrs == ({"pruned": 10} if last == 10 else {})
    assert [*ended.intermediate_values] == [10, 20][: last // 10]


@pytest.mark.slow
def test_a_signal_stops_the_trial_after_a_save_and_the_same_command_resumes_it(
    flags: list[str], space: str, tmp_path: Path
) -> None:
    """In processes as a user starts them."""
    more = [
        "--trials=1",
        "--trainer.max_steps=150",
        "--trainer.val_check_interval=50",
        "--trainer.logger=false",
    ]
    argv = [
        sys.executable,
        "-m",
        PACKAGE,
        "sweep",
        *flags,
        space,
        *more,
        "--last_checkpoint.every_n_steps=10",
    ]
    log, checkpoints = tmp_path / "log", tmp_path / "runs" / NAME / "trial-0000" / "checkpoints"
    with log.open("w") as output:
        process = subprocess.Popen(
            argv, cwd=PROJECT, stdout=output, stderr=output, start_new_session=True
        )
        while not [*checkpoints.glob("step*")] and process.poll() is None:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 75, log.read_text()
    assert "trial 0 was stopped; the same command resumes the sweep" in log.read_text()
    saved = int(newest(checkpoints.parent).stem.removeprefix("step"))
    done = subprocess.run(
        argv, cwd=PROJECT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [one.state.name for one in trials_in(tmp_path)] == ["COMPLETE"]
    first = (checkpoints.parent / "output.txt").read_text().split("the run resumes from its newest")
    assert len(first) == 2 and f"step {saved}" in first[0], "it has not begun again"


BAD = {
    "an empty space": (
        "{}",
        [],
        "is empty; give keys of fit, each with one of {float: [low, high]}",
    ),
    "no list": ("model.optim.learning_rate: {log: 1}", [], 'is {"log": 1} ('),
    "an unknown kind": (
        "model.optim.learning_rate: {normal: [0, 1]}",
        [],
        "give one of {float: [low, high]}",
    ),
    "no kind": ("model.optim.learning_rate: 0.1", [], "model.optim.learning_rate is 0.1 ("),
    "ends in the wrong order": (
        "model.optim.learning_rate: {float: [1, 0]}",
        [],
        "low=1.0, high=0.0",
    ),
    "a logarithm of 0": ("model.optim.learning_rate: {log: [0, 1]}", [], "`low > 0` must hold"),
    "no choice": (
        "model.optim.warmup: {choice: []}",
        [],
        "The `choices` must contain one or more elements",
    ),
    "an unknown key": (
        "model.optim.rate: {log: [1.0e-3, 1]}",
        [],
        "model.optim.rate is not a key of this program",
    ),
    "another type": (
        "trainer.max_steps: {choice: [10, many]}",
        [],
        "max_steps is 'many': expected an integer",
    ),
    "out of range": (
        "model.optim.learning_rate: {float: [-1, 0.1]}",
        [],
        "model.optim.learning_rate is -1.0; give more than 0",
    ),
    "a grid of a range": (
        "model.optim.learning_rate: {log: [0.1, 1]}",
        ["--sampler=grid"],
        "a grid needs {choice",
    ),
    "no file": (None, [], "cannot be read"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_space_is_refused_in_one_sentence_before_anything_starts(
    case: str, here: Trials, flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, more, sentence = BAD[case]
    if text is not None:
        (tmp_path / "lr.yaml").write_text(text)
    try:
        code = run("sweep", *flags, *more, f"--space={tmp_path / 'lr.yaml'}")
    except SystemExit as end:  # the parser's
        code = int(end.code or 0)
    error = capsys.readouterr().err
    assert code == 2 and sentence in error and error.count("\n") == 1, error
    assert not (tmp_path / "runs").exists() and not here.started


@pytest.mark.parametrize("variable", ["WORLD_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_a_launcher_of_several_processes_is_refused(
    variable: str,
    flags: list[str],
    space: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(variable, "2")
    assert run("sweep", *flags, space) == 2
    assert (
        "sweep starts the processes of each trial: start it as one task" in capsys.readouterr().err
    )
