"""`sweep`: values, pruning, ends of trials, resume, and what is written."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from dist_template.cluster.run_lock import RunLock
from dist_template.wings.sweep import study
from tests import PROJECT, ROOT
from tests.support.line import PACKAGE, command
from tests.support.runs import Workers, logged, newest, refused, run
from tests.support.strategies import flags_of
from tests.support.tiers import tiers

RATE, NAME = "model.optim.learning_rate", "default-lr"
SPACE = f"{RATE}: {{log: [1.0e-3, 1.0e-1]}}\nmodel.optim.warmup: {{choice: [0, 2]}}\n"
Flags = list[str]


class Trials:
    """Runs each trial in this process, which is quicker; `codes` replaces the ends of some."""

    def __init__(self) -> None:
        self.started: list[Flags] = []
        self.codes: dict[int, int] = {}

    def __call__(self, argv: Flags, folder: Path) -> int:
        self.started.append(argv[3:])
        os.environ["DIST_RUN_ID"] = folder.name
        with (folder / "output.txt").open("a") as out, redirect_stdout(out), redirect_stderr(out):
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
def test_trials_are_fits(here: Any, flags: Any, space: str, tmp_path: Path, capsys: Any) -> None:
    argv = ["sweep", *flags, space, "--pruner=none", "--trials=3"]
    assert run(*argv) == 0
    printed, trials = capsys.readouterr().out, trials_in(tmp_path)
    assert [one.number for one in trials] == [0, 1, 2] and len(here.started) == 3
    for one in trials:
        folder = sweep_in(tmp_path).run(one.number)
        config = yaml.safe_load((folder / "config.yaml").read_text())
        assert config["model"]["optim"]["learning_rate"] == one.params[RATE]
        assert one.value == logged(folder, "eval/loss")[20]
        assert f"trial {one.number}: eval/loss {one.value:.4f}" in printed
        assert not (folder / "worker").exists(), "no process works on it"
    best = min(trials, key=lambda one: one.value)
    assert f"best           trial {best.number}: eval/loss" in printed
    file = tmp_path / "runs" / NAME / "best.yaml"
    assert run("fit", f"--config={file}", "--trainer.max_steps=20") == 0
    (again,) = (tmp_path / "runs" / "default").iterdir()
    assert logged(again, "eval/loss")[20] == best.value
    assert run(*argv) == 0 and len(here.started) == 3, "finished trials are not repeated"
    assert run(*argv, "--trainer.max_steps=30") == 2
    assert "has trials of another space or flags; set --name" in capsys.readouterr().err


@pytest.mark.slow
def test_a_trial_that_dies_fails(flags: Any, space: str, tmp_path: Path, monkeypatch: Any) -> None:
    def killed(argv: Flags, folder: Path) -> int:
        (folder / "output.txt").write_text("Killed")
        return -9

    monkeypatch.setattr(study, "start", killed)
    argv = ["sweep", *flags, space, "--trials=1", f"--name={NAME}"]
    assert [run(*argv) for _ in range(3)] == [75, 75, 1]
    (one,) = trials_in(tmp_path)
    assert (one.state.name, one.user_attrs["end"]) == ("FAIL", "failed with code -9: Killed")


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


DEFINITION: dict[str, Any] = {"space": {RATE: {"log": [1e-4, 1e-1]}}, "flags": []}
DEFINITION |= {"metric": "eval/loss", "mode": "min", "sampler": "tpe", "pruner": "median"}
DEFINITION |= {"prune_after": 10, "name": "x", "of": "x"}
PRUNED = [("fsdp2", "median", 0.5), ("ddp", "hyperband", 0.5), ("fsdp2", "median", 99.0)]
PRUNED += [("tp", "median", 0.5), ("zero3", "median", 0.5)]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "pruner", "loss"), tiers(PRUNED, daily=PRUNED[:1]))
def test_all_ranks_end_at_the_pruned_step(
    strategy: str, pruner: str, loss: float, flags: Any, tmp_path: Path
) -> None:
    last, folder = 10 if loss < 1 else 20, tmp_path / "runs" / "default"
    folder.mkdir(parents=True)
    sweep = study.Sweep(folder, DEFINITION | {"pruner": pruner})
    plant(sweep, 8, loss)
    callback = {"class_path": f"{study.__name__}.Pruning", "init_args": {"run": "{run}"}}
    argv = ["fit", *flags, *flags_of(strategy), "--trainer.devices=2"]
    argv += [f"--trainer.callbacks+={json.dumps(callback)}"]
    run("prepare", *flags)
    record = Workers(2).run(argv, tmp_path / "record", run_id="trial-0008").check()
    assert max(record.loss) == last and newest(sweep.run(8)).name == f"step{last:08}.ckpt"
    ended = sweep.study().trials[8]
    assert ended.user_attrs == ({"pruned": 10} if last == 10 else {})
    assert [*ended.intermediate_values] == [10, 20][: last // 10]


@pytest.mark.slow
def test_a_stopped_trial_resumes(here: Any, flags: Any, space: str, tmp_path: Path) -> None:
    """It is stopped in processes as a user starts them, and resumes in this one."""
    more = "--trials=1 --trainer.max_steps=150 --trainer.val_check_interval=50"
    more += " --trainer.logger=false --last_checkpoint.every_n_steps=10"
    argv = ["sweep", *flags, space, *more.split()]
    trial, log = tmp_path / "runs" / NAME / "trial-0000", tmp_path / "log"
    with log.open("w") as output:
        options: Any = {"stdout": output, "stderr": output, "start_new_session": True}
        process = subprocess.Popen([sys.executable, "-m", PACKAGE, *argv], cwd=PROJECT, **options)
    while not [*(trial / "checkpoints").glob("step*")] and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 75, log.read_text()
    saved = int(newest(trial).stem.removeprefix("step"))
    assert run(*argv) == 0
    assert [one.state.name for one in trials_in(tmp_path)] == ["COMPLETE"]
    first = (trial / "output.txt").read_text().split("the run resumes from its newest")
    assert len(first) == 2 and f"step {saved}" in first[0], "it has not begun again"


BAD = {
    "{}": "is empty; give keys of fit, each with one of {float: [low, high]}",
    f"{RATE}: {{log: 1}}": 'is {"log": 1} (',
    f"{RATE}: {{normal: [0, 1]}}": "give one of {float: [low, high]}",
    f"{RATE}: 0.1": f"{RATE} is 0.1 (",
    "run.name: {choice: [a, b]}": "run.name is set by the sweep",
    "best_checkpoint.monitor: {choice: [a, b]}": "monitor is set by the sweep, or compares its",
    f"{RATE}: {{float: [1, 0]}}": "low=1.0, high=0.0",
    "model.optim.warmup: {choice: []}": "The `choices` must contain one or more elements",
    "model.optim.rate: {log: [1.0e-3, 1]}": "model.optim.rate is not a key of this program",
    "trainer.max_steps: {choice: [10, many]}": "max_steps is 'many': expected an integer",
    f"{RATE}: {{float: [-1, 0.1]}}": f"{RATE} is -1.0; give more than 0",
    f"{RATE}: {{log: [0.1, 1]}} # --sampler=grid": "a grid needs {choice",
}


@pytest.mark.parametrize("text", BAD)
def test_a_bad_space_is_named(text: str, here: Any, flags: Any, tmp_path: Path, capfd: Any) -> None:
    (tmp_path / "lr.yaml").write_text(text)
    given = [*flags, *text.split("# ")[1:], f"--space={tmp_path / 'lr.yaml'}"]
    assert BAD[text] in refused("sweep", given, capfd)
    assert not (tmp_path / "runs").exists() and not here.started


def test_the_docs_program_finds_a_power_law(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """Losses are a parabola around 0.3 / width^0.75, and high where a training would diverge."""
    page = (ROOT / "docs" / "sweep.md").read_text()
    (program,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    widths = {64: tmp_path / "64", 128: tmp_path / "128", 256: tmp_path / "256"}
    for width, folder in widths.items():
        folder.mkdir()
        sweep, best = study.Sweep(folder, DEFINITION), 0.3 / width**0.75
        known = {RATE: study.distribution(DEFINITION["space"][RATE])}
        for number, r in enumerate(np.geomspace(best / 9, best * 7, 12).tolist()):
            sweep.study().enqueue_trial({RATE: r})
            sweep.study().ask(known)
            loss = 2 + 0.1 * math.log(r / best) ** 2 + 5 * (r > 4 * best)
            sweep.study().tell(number, loss)
            sweep.run(number).mkdir()
            facts = {"model": {"width": width}}
            (sweep.run(number) / "facts.json").write_text(json.dumps(facts))
    monkeypatch.setattr(sys, "argv", ["lr_transfer.py", "4096", *map(str, widths.values())])
    exec(compile(program, "lr_transfer.py", "exec"), {})
    printed = capsys.readouterr().out
    assert "width^-0.75, at most x1.00 off" in printed
    assert f"width 4096: {0.3 / 4096**0.75:.2e}" in printed
