"""Run folders, loggers and the verbs after training, of one run."""

import json
import shutil
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml

from tests.support.runs import logged, only_run, run, small

pytestmark = pytest.mark.slow


class Trained(NamedTuple):
    folder: Path
    flags: list[str]
    printed: str


@pytest.fixture(scope="module")
def trained(corpus: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("trained")
    flags = small(corpus, cache, folder)
    with redirect_stdout(StringIO()) as printed:
        assert run("fit", *flags) == 0
    return Trained(only_run(folder), flags, printed.getvalue())


def test_a_run_records_what_ran_and_where(trained: Trained) -> None:
    folder, _, printed = trained
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["data"]["seq_len"] == 32
    assert config["last_checkpoint"]["dirpath"] == "{run}/checkpoints"
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["packages"]["torch"] == torch.__version__ and environment["command"]
    assert (folder / "samples.txt").read_text().startswith("--- step 10")
    assert list(folder.glob("events.*")), "TensorBoard names it by this folder"
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == ["best-step00000020.ckpt", "step00000020.ckpt"]
    assert str(folder) in printed and "unigram" in printed
    assert "\r" not in printed, "a log file gets lines"
    learned = logged(folder, "eval/bits_per_byte")
    assert learned[20] < learned[0]


def test_test_and_predict_use_the_checkpoint(trained: Trained, capfd: Any) -> None:
    assert run("test", *trained.flags, "--ckpt_path=last") == 0
    assert "bits_per_byte" in capfd.readouterr().out
    assert run("predict", *trained.flags, "--ckpt_path=last", "--data.prompts=[the quick]") == 0
    (line,) = (trained.folder / "predictions.jsonl").read_text().splitlines()
    assert json.loads(line)["prompt"] == "the quick" and json.loads(line)["continuation"]


def test_an_evaluation_takes_the_newest_runs_best(trained: Trained, capfd: Any) -> None:
    best = trained.folder / "checkpoints" / "best-step00000020.ckpt"
    loss = f"loss {logged(trained.folder, 'eval/loss')[20]:.4f}"
    for given, is_kept in (["--ckpt_path=best"], True), ([], True), ([], False):
        if not is_kept:
            shutil.rmtree(best)
        assert run("validate", *trained.flags, *given) == 0
        shown = capfd.readouterr().out
        place = best if is_kept else best.parent
        assert f"validate: the weights come from {place}\n" in shown and loss in shown
    assert run("validate", *trained.flags, "--ckpt_path=best") == 2
    assert "has no best-*.ckpt: give `last`" in capfd.readouterr().err
