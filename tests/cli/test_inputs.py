"""Wrong inputs that were taken silently, or ended in a traceback: one sentence each."""

import os
import re
from pathlib import Path
from typing import Any

import pytest

from dist_template.cli import config_file
from tests.support.line import command
from tests.support.runs import refused

ENVIRONMENTS = {
    "WORLD_SIZE=x": "the environment variable WORLD_SIZE is 'x'; a launcher sets it to a number",
    "WORLD_SIZE=-1": "WORLD_SIZE is '-1'",
    "RANK=1.5": "RANK is '1.5'",
    "LOCAL_RANK=a": "LOCAL_RANK is 'a'",
    "LOCAL_WORLD_SIZE=0": "LOCAL_WORLD_SIZE is '0'; a launcher sets it to a number from 1",
    "LOCAL_SIZE=no": "LOCAL_SIZE is 'no'",
    "NODE_RANK=-3": "NODE_RANK is '-3'",
    "MASTER_PORT=99999": "MASTER_PORT is '99999'",
    "SLURM_LOCALID=x": "SLURM_LOCALID is 'x'",
    "SLURM_PROCID=": "",
    "DIST_JOB_STARTED=yesterday": "DIST_JOB_STARTED is 'yesterday'",
    "DIST_JOB_STARTED=nan": "DIST_JOB_STARTED is 'nan'",
    "SLURM_STEP_NUM_TASKS=2(x3)": "SLURM_STEP_NUM_TASKS is '2(x3)'",
    "RANK=2 WORLD_SIZE=2": "RANK is 2, and WORLD_SIZE is 2",
    "LOCAL_RANK=4 LOCAL_WORLD_SIZE=2": "LOCAL_RANK is 4, and LOCAL_WORLD_SIZE is 2",
    "WORLD_SIZE=3 LOCAL_WORLD_SIZE=2": "WORLD_SIZE is 3, which is no multiple of 2",
}


@pytest.mark.parametrize("given", [each for each in ENVIRONMENTS if ENVIRONMENTS[each]])
def test_a_wrong_environment_variable_is_one_sentence(
    given: str, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    for word in given.split():
        monkeypatch.setenv(*word.split("=", 1))
    assert command(["fit"]) == 2
    said = capfd.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1 and ENVIRONMENTS[given] in said


FLAGS = {
    "--run.store=": "run.store is not an address",
    "--run.store=file://relative": "'file://relative' is no absolute path: give file:///relative",
    "--run.store=ftp://host/x": "run.store 'ftp://host/x' cannot be used: ftp needs host",
    "--run.store=zip://x.zip": "run.store 'zip://x.zip.*' cannot be used: ",
    "--run.store=nowhere://x": "run.store 'nowhere://x.*' cannot be used: ",
    "--store.folder=/etc": "store.folder is '/etc': it is the run's folder; remove the key",
    "--config={here}/empty_section.yaml": "empty_section.yaml: .*model.nothing_here is not a key",
    "--config={here}/empty_below.yaml": "run.names is not a key .* mean run.name?",
    "--config={here}/empty.yaml": "empty.yaml is empty; give keys",
    "--config={here}/pipe": "it is a pipe or a device",
    "--config=/dev/zero": "it is a pipe or a device",
    "--deepspeed={here}/pipe": "--deepspeed .*/pipe is a pipe or a device",
    "--run.root=": "run.root is ''; give a folder",
    "--data.cache_dir=": "data.cache_dir is ''; give a folder",
    "--ckpt_path=": "--ckpt_path is empty: give a checkpoint",
    "--trainer.accumulate_grad_batches=0": "accumulate_grad_batches is 0; give 1 or more",
    "--model={here}/pipe": "--model .*/pipe is a pipe or a device",
    "--trainer=/dev/zero": "--trainer /dev/zero is a pipe or a device",
    "--config={here}/loop.yaml": "contains itself, by an alias",
    "--data.seq_len=010": "data.seq_len is 010, which YAML reads as octal, 8: write 10",
    "--trainer.max_steps=1:30": "max_steps is 1:30, which YAML reads as 90: write the number",
    "--config={here}/octal.yaml": "has 032, which YAML reads as octal, 26: write 32 in line 3",
    "--config={here}/sixty.yaml": "has 1:30, which YAML reads as 90: write the number in line 1",
    "--run.name=a{{run}}": "run.name 'a{{run}}' has {{run}}, which stands for",
    "--run.root=x/{{run}}": "run.root 'x/{{run}}' has {{run}}, which stands for",
    "--model.architecture.num_mtp_layers=-1": "num_mtp_layers is -1; give 0 or more",
}


@pytest.mark.parametrize("given", FLAGS)
def test_an_unusual_value_of_a_flag_or_file_is_refused_with_its_key(
    given: str, flags: list[str], tmp_path: Path, capfd: Any
) -> None:
    (tmp_path / "empty_section.yaml").write_text("model: {nothing_here: {}}")
    (tmp_path / "empty_below.yaml").write_text("run: {names: {}}")
    (tmp_path / "empty.yaml").touch()
    (tmp_path / "octal.yaml").write_text("data:\n  seq_len: 32\n  micro_batch_size: 032\n")
    (tmp_path / "sixty.yaml").write_text("trainer: {max_steps: 1:30}")
    (tmp_path / "loop.yaml").write_text("trainer: &a {max_steps: *a}")
    os.mkfifo(tmp_path / "pipe")
    said = refused("fit", [*flags, given.format(here=tmp_path)], capfd)
    pattern = FLAGS[given].replace("?", "\\?").replace("{{run}}", "{run}")
    assert re.search(pattern, said), said
    assert not list(tmp_path.glob("runs/*/*"))


def test_a_time_may_have_colons(tmp_path: Path) -> None:
    """As Slurm writes it; YAML reads 30:00 as 1,800, which is its number of seconds."""
    file = tmp_path / "a.yaml"
    file.write_text("cluster: {time_limit: 30:00}\ntrainer: {max_time: 1:00:00:00}\n")
    read = config_file.read(str(file))
    assert read["cluster"] == {"time_limit": 1800} and read["trainer"] == {"max_time": 216_000}


@pytest.mark.parametrize("run_id", ["{run}", " ", "a\tb"])
def test_a_runs_id_that_is_no_name_is_refused(
    run_id: str, flags: list[str], monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setenv("DIST_RUN_ID", run_id)
    assert command(["fit", *flags]) == 2
    assert f"DIST_RUN_ID is {run_id!r}; give the name" in capfd.readouterr().err


def test_an_empty_variable_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some launchers set it so."""
    monkeypatch.setenv("WORLD_SIZE", "")
    assert command(["evaluate", str(tmp_path)]) == 2


@pytest.mark.parametrize("words", ["fit --config=quickstart", "launch status x", "serve x/y/z"])
def test_a_current_folder_that_is_gone_is_one_sentence(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert command(words.split()) == 2
    assert "the current folder is gone or cannot be read" in capfd.readouterr().err
