"""`rehearse`: the small configuration, the checks on an unmodified project, and the report."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from lightning.pytorch import Callback

from dist_template import InputError
from dist_template.wings.rehearse.checks import Check, run_checks
from dist_template.wings.rehearse.compare import gradients, relative_difference
from dist_template.wings.rehearse.report import Report
from dist_template.wings.rehearse.runs import RunFailed
from tests.support.runs import CONFIGS, OURS, Workers
from tests.support.strategies import flags_of
from tests.support.wings import Result, RunRecord, Runs
from tests.support.wings import rehearse_main as main


def rehearse(*flags: str) -> int:
    try:
        main(["rehearse", *flags], OURS)
    except SystemExit as stopped:
        return int(stopped.code or 0)
    return 0


@pytest.mark.slow
def test_the_default_project_passes_under_ddp(tmp_path: Path, capsys: Any) -> None:
    files = [f"--config={CONFIGS}/pretrain.yaml", f"--config={CONFIGS}/strategy/ddp.yaml"]
    code = rehearse(*files, "--nodes=8", "--devices=8", f"--output={tmp_path / 'out'}")
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert "all checks hold" in printed
    found = json.loads((tmp_path / "out" / "rehearsal.json").read_text())
    assert found["ok"]
    assert [check["verdict"] for check in found["checks"]] == ["pass"] * 13
    assert found["checks"][0]["got"] == "64 ranks"


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(
    "strategy", ["cp", "fsdp2_tp_ep", "hsdp", "pp", "pp_ep", "pp_fsdp2", "zero2_offload", "zero3"]
)
def test_the_default_project_passes(strategy: str, tmp_path: Path, capsys: Any) -> None:
    files = [f"--config={CONFIGS}/pretrain.yaml", *flags_of(strategy)]
    code = rehearse(*files, "--nodes=8", "--devices=8", f"--output={tmp_path / 'out'}")
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert "resume = uninterrupted" in printed


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("quantize", ["null", "nf4"])
@pytest.mark.parametrize("strategy", ["fsdp2_tp", "zero3"])
def test_a_fine_tuning_with_adapters_passes(
    strategy: str, quantize: str, tmp_path: Path, capsys: Any
) -> None:
    if strategy == "fsdp2_tp" and quantize == "nf4":
        pytest.skip("tensor parallelism refuses 4-bit weights")
    files = [
        f"--config={CONFIGS}/pretrain.yaml",
        f"--config={CONFIGS}/model/llama.yaml",
        *flags_of(strategy),
    ]
    adapter = [
        "--model.adapter.rank=16",
        "--model.adapter.dropout=0.05",
        f"--model.adapter.quantize={quantize}",
    ]
    code = rehearse(*files, *adapter, "--nodes=8", "--devices=8", f"--output={tmp_path / 'out'}")
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert "largest difference to the trained model's logits" in printed


@pytest.mark.slow
@pytest.mark.nightly
def test_a_gradient_that_tensor_parallelism_sums_is_summed_once(tmp_path: Path) -> None:
    """Qwen3's query and key norms, which transformers 5.23 sums again in each micro-batch:
    compat/parallel_styles.py."""
    files = [
        f"--config={CONFIGS}/{name}.yaml" for name in ("quickstart", "model/llama", "strategy/tp")
    ]
    files += [
        "--model.architecture.model_type=qwen3",
        "--model.architecture.head_dim=32",
        "--devices=2",
    ]
    assert rehearse(*files, "--only=each gradient", f"--output={tmp_path / 'out'}") == 0


def test_sizes_that_do_not_fit_are_reported_without_a_training(tmp_path: Path, capsys: Any) -> None:
    files = [f"--config={CONFIGS}/pretrain.yaml", f"--config={CONFIGS}/strategy/tp.yaml"]
    heads = (
        "{model_type: llama, hidden_size: 768, num_attention_heads: 12, num_key_value_heads: 12}"
    )
    flags = [
        f"--model.architecture={heads}",
        "--trainer.strategy.tp_size=8",
        "--nodes=1",
        "--devices=8",
        "--only=sizes",
        f"--output={tmp_path / 'out'}",
    ]
    assert rehearse(*files, *flags) == 1
    printed = capsys.readouterr().out
    assert "FAIL" in printed
    assert "12" in printed and "tp_size" in printed
    assert not list((tmp_path / "out").glob("*/rank0.log"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--processes=0"], "--processes: '0' is not allowed, give a whole number from 1"),
        (["--only=nothing"], "--only 'nothing' matches no check"),
        (
            ["--processes=3", "--trainer.strategy=MeshStrategy", "--trainer.strategy.fsdp_size=4"],
            "does not make 3",
        ),
    ],
)
def test_bad_input_is_refused(flags: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        main(
            [
                "rehearse",
                f"--config={CONFIGS}/quickstart.yaml",
                *flags,
                f"--output={tmp_path / 'out'}",
            ],
            OURS,
        )


# ---- workers -------------------------------------------------------------------------------------------------------


class FailOnRankOne(Callback):
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.global_rank == 1:
            raise ValueError("rank 1 has no data")


class HangOnRankOne(Callback):
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.global_rank == 1:
            time.sleep(600)


@pytest.fixture
def two(flags: list[str], tmp_path: Path) -> list[str]:
    """`fit` on two processes; each test breaks one of them."""
    with Workers(1) as workers:
        workers.run(["prepare", *flags], tmp_path / "prepare").check()
    return ["fit", *flags, "--trainer.devices=2", "--trainer.strategy=ddp", "--trainer.max_steps=2"]


def test_the_rank_that_failed_is_named_and_not_the_one_that_waited(
    two: list[str], tmp_path: Path
) -> None:
    with Workers(2) as workers:
        record = workers.run(two, tmp_path / "failed", callbacks=[FailOnRankOne()])
    assert re.fullmatch(
        r"rank 1: ValueError: rank 1 has no data \(.*test_rehearsal.py:\d+\)", record.error
    )
    with pytest.raises(RuntimeError, match="rank1.log(.|\n)*rank 1 has no data"):
        record.check()


@pytest.mark.slow
def test_a_hang_ends_with_the_time_limit(two: list[str], tmp_path: Path) -> None:
    with Workers(2) as workers:
        record = workers.run(two, tmp_path / "hung", callbacks=[HangOnRankOne()], timeout_s=18)
    assert record.hung and record.error == "no end after 18 s"


# ---- report --------------------------------------------------------------------------------------------------------


def test_the_report_is_a_line_per_check_and_json(tmp_path: Path, capsys: Any) -> None:
    report = Report("rehearsal of nothing")
    report.add(Result("loss curve", "within 1e-05", "1.0e-07", "pass", time_s=1.5))
    report.add(
        Result("gradient norm", "within 1e-04", "0.5", "FAIL", "from step 3 on: layer & more", 2.0)
    )
    report.add(
        Result("resume on fewer", "within 1e-05", "not possible", "limit", "the format refuses")
    )
    report.end(tmp_path)
    printed = capsys.readouterr().out
    assert "-> from step 3 on: layer & more" in printed
    assert "1 of 3 checks FAILED, 1 not possible here" in printed
    assert json.loads((tmp_path / "rehearsal.json").read_text())["ok"] is False


def test_a_cause_that_several_checks_find_is_printed_once(capsys: pytest.CaptureFixture) -> None:
    report = Report("rehearsal of nothing")
    report.add(
        Result(
            "loss curve", "1e-5", "0.5", "FAIL", "from step 3 on", cause="the output of model.gate"
        )
    )
    report.add(
        Result(
            "gradient norm",
            "1e-4",
            "0.7",
            "FAIL",
            "from step 1 on",
            cause="the output of model.gate",
        )
    )
    printed = capsys.readouterr().out
    assert printed.count("model.gate") == 1
    assert "from step 1 on: see 'loss curve'" in printed


def test_after_a_training_has_failed_no_other_check_runs(tmp_path: Path) -> None:
    (tmp_path / "rank1.log").write_text("reading shard 7\n", encoding="utf-8")
    record = RunRecord(
        tmp_path, {0: "RuntimeError: Connection closed by peer", 1: "killed: exit code -9"}
    )

    def compare(runs: Any) -> str:
        raise RunFailed("strategy", record)

    both = [Check("loss curve", "1e-5", compare), Check("norms", "1e-5", compare)]
    (failed,) = run_checks(cast(Runs, None), both)
    assert failed.verdict == "FAIL"
    assert "rank 1: killed: exit code -9; the last line of its log: reading shard 7" in failed.cause


def test_a_gradient_that_is_only_noise_is_not_compared_with_itself(tmp_path: Path) -> None:
    for name, noise, large in (("one", 1e-9, 1.0), ("same", -2e-9, 1.0), ("other", 1e-9, 1.001)):
        (tmp_path / name).mkdir()
        tensors = {"noise": torch.full((3,), noise), "large": torch.full((3,), large)}
        torch.save(tensors, tmp_path / name / "gradients.pt")
    one, same, other = (
        RunRecord(tmp_path / name, {0: "done"}) for name in ("one", "same", "other")
    )
    assert gradients(one, same) == {}
    assert gradients(one, other) == {"large": "max |difference| 1.0e-03"}


def test_a_missing_step_and_nan_count_as_different() -> None:
    assert relative_difference({1: 2.0, 2: 2.0}, {1: 2.0, 2: 2.0})[0] == 0
    assert relative_difference({1: 2.0}, {1: 2.0, 2: 2.0})[0] == float("inf")
    assert relative_difference({1: 2.0}, {1: float("nan")})[0] == float("inf")
    assert relative_difference({1: 2.0}, {})[0] == float("inf")
