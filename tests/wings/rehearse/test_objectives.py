"""Rehearsals of what is learned from rated answers, pairs and a teacher: as such, on two ranks."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from dist_template.errors import InputError
from dist_template.testing import rehearse
from dist_template.wings.history import read_run
from tests.support import pairs
from tests.support.runs import OURS

RATINGS = ("Ratings", pairs.RATED_LENGTHS, "--model.preference.loss=kto")
REWARDS = ("Preferences", pairs.LENGTHS, "--model.preference.loss=reward")
CASES = {  # of a metric that only this objective logs: source, records, flag
    "train/rewards/margin kto": RATINGS,
    "train/rewards/margin reward": REWARDS,
}
DDP = ("--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.strategy=ddp")
LIKE = "loss curve"  # the check of one process and two ranks


def flags_of(folder: Path, source: str, records: list[Any]) -> list[str]:
    model = folder / "model"
    given = [*DDP, *pairs.flags(folder, records, source), f"--model.pretrained={model}"]
    pairs.save_llama(model, 259)
    return [*given, "--data.seq_len=64", "--data.micro_batch_size=2", "--data.global_batch_size=8"]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_an_objective_of_answers_is_rehearsed_as_such(case: str, tmp_path: Path) -> None:
    source, records, flag = CASES[case]
    flags = [*flags_of(tmp_path, source, records), flag]
    assert rehearse(OURS, *flags, folder=tmp_path / "out", only=LIKE) == {}
    run = tmp_path / "out" / "runs" / "strategy" / "strategy"
    assert len(read_run(run).metrics[case.split()[0]])
    model = yaml.safe_load((run / "config.yaml").read_text())["model"]
    assert model["preference"]["loss"] == case.split()[1]


def with_teacher(folder: Path, corpus: Path, teacher: Path) -> list[str]:
    flags = flags_of(folder, "Preferences", pairs.RECORDS)
    flags = [flag for flag in flags if not flag.startswith("--data.source")]
    flags += ["--data.source=TextFiles", f"--data.source.paths=[{corpus}/*.txt]"]
    return [*flags, f"--model.distillation.teacher={teacher}"]


@pytest.mark.slow
@pytest.mark.parametrize("keeps", [False, True])
def test_a_teacher_is_rehearsed_by_a_small_one(keeps: bool, tmp_path: Path, corpus: Path) -> None:
    """Its vocabulary is the generated text's, or that of the data that are kept."""
    flags = [*with_teacher(tmp_path, corpus, tmp_path / "model"), *["--keep_data"] * keeps]
    assert rehearse(OURS, *flags, folder=tmp_path / "out", only=LIKE) == {}
    run = tmp_path / "out" / "runs" / "strategy" / "strategy"
    assert len(read_run(run).metrics["train/divergence"])
    teacher = json.loads((tmp_path / "out" / "teacher" / "config.json").read_text())
    assert (teacher["hidden_size"], teacher["vocab_size"]) == (32, 259 if keeps else 257)


def test_a_teacher_that_is_nowhere_is_refused(tmp_path: Path, corpus: Path) -> None:
    flags = with_teacher(tmp_path, corpus, Path("/nowhere"))
    with pytest.raises(InputError, match="model.distillation.teacher '/nowhere' cannot be loaded"):
        rehearse(OURS, *flags, folder=tmp_path / "out")
