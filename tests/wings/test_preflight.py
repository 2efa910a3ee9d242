"""`preflight` names a slow rank and leaves training the same; the interval loses least."""

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dist_template.cluster.watchdog import WATCHDOG
from dist_template.errors import Ended, Exit
from dist_template.wings.diagnose import read_run
from dist_template.wings.diagnose.engine import diagnose
from dist_template.wings.preflight import callback, interval
from dist_template.wings.preflight.callback import Preflight
from tests.support.histories import a_run
from tests.support.runs import Workers, run

EQUAL = {"device": "H100", "matmul": 700.0, "world": 330.0}
CASES: dict[str, tuple[dict[str, Any], str]] = {  # what rank 3 differs in, a sentence
    "equal": ({"matmul": 600.0}, ""),
    "slow": ({"matmul": 350.0}, "rank 3 on node1 (H100): matrix products at 350 TFLOP/s, 0.50 of"),
    "another device": ({"matmul": 70.0, "device": "A10"}, ""),
    "network": ({"world": 90.0}, "all ranks (H100) reach 90 GB/s; expected is 330"),
    "unknown": ({"error": "CUDA out of memory"}, "rank 3 on node1 was not measured: CUDA out of"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_slow_machine_is_named(case: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    change, sentence = CASES[case]
    ranks = [{"rank": rank, "host": f"node{rank // 2}", **EQUAL} for rank in range(4)]
    for each in ranks if "world" in change else ranks[3:]:
        each |= change
    monkeypatch.setattr(callback, "measure", lambda *_: ranks)
    trainer: Any = SimpleNamespace(num_nodes=2, fast_dev_run=False, is_global_zero=True)
    trainer.strategy = SimpleNamespace(root_device=torch.device("cpu"))
    Preflight(folder=str(tmp_path)).setup(trainer, Any, "fit")
    printed = capsys.readouterr().out
    assert sentence in printed and printed.count("preflight:") == bool(sentence)
    found = [each.evidence for each in diagnose(a_run(folder=tmp_path)) if "slow_m" in each.rule]
    assert bool(found) == bool(sentence) and all(sentence in each for each in found)
    if sentence:
        with pytest.raises(Ended, match="preflight.refuse") as ended:
            Preflight(refuse=True, folder=str(tmp_path)).setup(trainer, Any, "fit")
        assert ended.value.code == Exit.MISMATCH


def test_a_measurement_draws_nothing_is_progress_and_may_fail(monkeypatch: Any) -> None:
    alive, state = list[int](), torch.random.get_rng_state()
    monkeypatch.setattr(WATCHDOG, "keep_alive", lambda: alive.append(1))
    (found,) = callback.measure(torch.device("cpu"), 1)
    assert found["matmul"] > 0 and found["copy"] > 0 and len(alive) >= 8
    assert torch.equal(state, torch.random.get_rng_state())
    monkeypatch.setattr(torch, "mm", lambda *_: 1 / 0)
    assert "division" in callback.measure(torch.device("cpu"), 1)[0]["error"]


def two_nodes() -> None:
    """Of two ranks each; rank 3 multiplies slowly."""
    node, local = divmod(int(os.environ["RANK"]), 2)
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": f"{local}", "GROUP_RANK": f"{node}"}
    if node == local == 1:
        mm: Any = torch.mm
        torch.mm = lambda *matrices: time.sleep(0.02) or mm(*matrices)  # ty: ignore


@pytest.mark.slow
def test_training_is_the_same_and_the_slow_rank_is_named(flags: list[str], tmp_path: Path) -> None:
    run("prepare", *flags)
    argv = ["fit", *flags, "--trainer.max_steps=3", "--trainer.strategy=ddp"]
    on = Workers(4).run(argv, tmp_path / "on", prelude=two_nodes).check()
    argv.append("--preflight.enabled=false")
    off = Workers(4).run(argv, tmp_path / "off", prelude=two_nodes).check()
    assert on.loss == off.loss and on.random(3) == off.random(3)
    found = json.loads((on.run / "preflight.json").read_text())
    assert ["node" in each for each in found["ranks"]] == [True, False, True, False]
    assert found["ranks"][0]["world"] > 0 and "rank 3 on" in on.log()
    assert any(each.rule == "slow_machine" for each in diagnose(read_run(on.run)))
    assert not (off.run / "preflight.json").exists()


@pytest.mark.parametrize("save_s, mtbf_h", [(1, 1e4), (10, 3), (60, 1), (600, 1)])
def test_no_other_interval_loses_less(save_s: float, mtbf_h: float) -> None:
    best = interval.Interval(save_s, 3600 * mtbf_h)
    others = [best.lost(best.best_s * factor / 100) for factor in range(10, 1000)]
    assert 0 < best.lost(best.best_s) < min(others) + 1e-4 and best.lost(1e9) > 0.9


def test_a_finished_run_is_compared_with_the_best_interval() -> None:
    assert interval.DEVICE_MTBF_H == pytest.approx(54 * 24 * 16_384 / 419, rel=0.01)
    history = a_run(config={"preflight.device_mtbf_h": 80.0})  # 8 devices, steps of 0.5 s
    found = interval.of_run(history)  # saves of 2 s; Young: the root of 2 x 2 s x 10 h, less 2 s
    assert found and found.best_s == pytest.approx(378, rel=0.01)
    assert interval.compared(history).startswith("every 1,000 steps, 8.3 min: 1.1 % lost; best")
