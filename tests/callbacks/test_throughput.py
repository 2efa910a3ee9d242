"""Speed is of training alone, the slow rank is named, facts.json and goodput are right."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from trainer_dev.data import DataModule

from dist_template.callbacks import goodput
from dist_template.checkpoint import commit
from dist_template.observe.history.goodput import describe, read, share
from dist_template.observe.history.run import RunFile, read_lines
from dist_template.text.batches.rows import PackedRows
from dist_template.wings.history import read_run
from tests.support.fault_runs import changes
from tests.support.modules import on_meta
from tests.support.parity import MODELS, Trainings
from tests.support.runs import logged, only_run, run
from tests.support.tiers import tiers

SAVE_S = 1000.0  # by a clock of the test's own: longer than steps take on any machine


@pytest.mark.slow
def test_a_slow_checkpoint_is_no_training(flags: Any, tmp_path: Path, monkeypatch: Any) -> None:
    save, slept = commit.save, [0.0]

    def slowly(*args: Any, **options: Any) -> Any:
        save(*args, **options)
        slept[0] += SAVE_S

    monkeypatch.setattr(commit, "save", slowly)
    wall, counter = time.time, time.perf_counter
    monkeypatch.setattr(time, "time", lambda: wall() + slept[0])
    monkeypatch.setattr(time, "perf_counter", lambda: counter() + slept[0])
    steps = ["--trainer.max_steps=9", "--trainer.log_every_n_steps=3", "--model.optim.warmup=1"]
    steps += ["--last_checkpoint.every_n_steps=3", "--trainer.val_check_interval=6"]
    assert run("fit", *flags, *steps) == 0
    folder = only_run(tmp_path)
    seconds = read(folder)
    assert seconds["checkpoint"] > 3 * SAVE_S and 0 < seconds["validation"] < SAVE_S
    assert 3 * logged(folder, "perf/step_s")[6] < SAVE_S


@pytest.mark.slow
def test_a_steps_time_and_speed_are_the_clocks(
    flags: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    """Each of four micro-batches takes as long by a clock of the test's own."""
    transfer, counter, slept = DataModule.on_before_batch_transfer, time.perf_counter, [0.0]

    def slowly(*given: Any) -> Any:
        slept[0] += SAVE_S
        return transfer(*given)

    monkeypatch.setattr(DataModule, "on_before_batch_transfer", slowly)
    monkeypatch.setattr(time, "perf_counter", lambda: counter() + slept[0])
    steps = ["--trainer.max_steps=6", "--trainer.log_every_n_steps=3", "--model.optim.warmup=1"]
    assert run("fit", *flags, *steps, "--trainer.limit_val_batches=0") == 0
    folder = only_run(tmp_path)
    assert logged(folder, "perf/step_s")[6] == pytest.approx(4 * SAVE_S, rel=0.05)
    speed = 8 * 32 / (4 * SAVE_S)
    assert logged(folder, "perf/tokens_per_s")[6] == pytest.approx(speed, rel=0.05)


@pytest.mark.slow
def test_the_slow_rank_is_named(train: Trainings) -> None:
    steps = "--trainer.log_every_n_steps=3"
    metrics = read_run(train.run("fit", "llama", "ddp", steps, prelude=slow_loader).run).metrics
    assert metrics["rank/slowest"].values.tolist() == [1, 1]
    assert metrics["rank/slowest_over_median"].last > 1.5


def slow_loader() -> None:
    """In each worker: the loader of rank 1 is slow, by a clock of the test's own."""
    if os.environ["RANK"] != "1":
        return
    counter, slept = time.perf_counter, [0.0]

    def slowly(rows: Any, batch: Any) -> Any:
        slept[0] += SAVE_S
        return batch

    clock: Any = lambda: counter() + slept[0]  # noqa: E731
    time.perf_counter = clock
    changes("__getitems__", PackedRows)(slowly)()


SHARDED = ["ddp", "fsdp2_ep", "fsdp2_tp_ep", "zero2", "zero3"]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", tiers(SHARDED, daily=["fsdp2_ep"]))
def test_facts_do_not_depend_on_the_strategy(train: Trainings, strategy: str) -> None:
    runs = [train("deepseek_v3", each).run for each in ("one", strategy)]
    one, many = (json.loads((run / "facts.json").read_text()) for run in runs)
    model = on_meta(**yaml.safe_load(MODELS["deepseek_v3"]), vocab_size=257)
    assert one["parameters"]["total"] == sum(p.numel() for p in model.parameters())
    assert one["parameters"]["active"] < one["parameters"]["total"]
    assert many["parameters"] == one["parameters"] and many["model"] == one["model"]
    assert many["training"]["flops_per_token"] == one["training"]["flops_per_token"] > 0
    assert many["data"]["tokens_per_step"] == one["data"]["tokens_per_step"] == 8 * 32
    assert len(many["machine"]["hosts"]) == many["machine"]["world_size"] > 1
    assert many["machine"]["peak_tflops"] is None, "of a CPU no peak is known"


def attempt(began: float, end: float, first: int, last: int, **seconds: float) -> dict[str, float]:
    return {"attempt": began, "time": end, "from_step": first, "step": last, **seconds}


def total_of(folder: Path, *attempts: dict[str, float]) -> dict[str, float]:
    (folder / RunFile.GOODPUT).write_text("\n".join(map(json.dumps, attempts)) + "\n")
    return read(folder)


def test_repeated_steps_are_lost_time_and_the_gap_is_restart(tmp_path: Path) -> None:
    killed = attempt(100, 130, 0, 20, start=6, productive=20, data_wait=4)
    early = killed | {"time": 110.0, "step": 3, "productive": 2, "data_wait": 2}
    second = attempt(137, 160, 15, 25, start=5, productive=10, checkpoint=3, validation=5)
    again = attempt(161, 170, 10, 12, start=5, productive=4)
    total = total_of(tmp_path, early, killed, second)
    # 5 of 20 steps were done again: a quarter of 20 s. From 130 to 137 no process lived; then 5 s.
    expected = {"productive": 25, "start": 6, "restart": 12, "checkpoint": 3, "data_wait": 4}
    assert total == expected | {"validation": 5, "lost": 5}
    assert sum(total.values()) == 160 - 100 and share(total) == pytest.approx(25 / 60)
    assert describe(total).startswith("42% of 60 s productive, start 6 s, restart 12 s")
    # From step 10: all that the second attempt did is lost, and 10 of the first's 20 steps.
    both = total_of(tmp_path, killed, second, again)
    assert (both["productive"], both["lost"]) == (pytest.approx(10 + 4), pytest.approx(10 + 10))


@pytest.mark.slow
def test_kinds_add_to_wall_time(flags: Any, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(goodput, "LINE_S", 0.0)
    transfer = DataModule.on_before_batch_transfer

    slow = lambda *given: time.sleep(0.01) or transfer(*given)  # noqa: E731
    monkeypatch.setattr(DataModule, "on_before_batch_transfer", slow)
    steps = "--trainer.max_steps=10 --last_checkpoint.every_n_steps=4 --model.optim.warmup=0"
    flags += steps.split()
    goodput._have_trained.add(os.getpid())  # or the tests before this one would be its start
    stop = ["--trainer.callbacks+=tests.support.runs.StopAfter", "--trainer.callbacks.step=6"]
    with pytest.raises(RuntimeError, match="stopped by the test"):
        run("fit", *flags, *stop)
    time.sleep(0.5)
    assert run("fit", *flags, "--ckpt_path=last") == 0
    seconds = read(only_run(tmp_path))
    wall = sum(seconds.values())
    events = read_lines(only_run(tmp_path) / RunFile.GOODPUT)
    assert wall == pytest.approx(events[-1]["time"] - events[0]["attempt"], abs=0.01)
    assert seconds["restart"] >= 0.5
    # 40 micro-batches of 10 steps, 8 of steps 5 and 6 again; the first of an attempt is its start
    assert seconds["data_wait"] >= (40 + 8 - 2) * 0.01 * 0.9
    assert seconds["lost"] > 0 and seconds["checkpoint"] > 0 and seconds["validation"] > 0
    assert "goodput  " in capsys.readouterr().out
