"""Wrong inputs that were taken silently, or ended in a traceback: one sentence each."""

import os
import re
from pathlib import Path
from typing import Any

import pytest

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
    "RANK=2 WORLD_SIZE=2": "RANK is 2, and WORLD_SIZE is 2",
    "LOCAL_RANK=4 LOCAL_WORLD_SIZE=2": "LOCAL_RANK is 4, and LOCAL_WORLD_SIZE is 2",
    "WORLD_SIZE=3 LOCAL_WORLD_SIZE=2": "WORLD_SIZE is 3, which is no multiple of 2",
}


@pytest.mark.parametrize("given", [each for each in ENVIRONMENTS if ENVIRONMENTS[each]])
def test_of_the_environment(given: str, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    for word in given.split():
        monkeypatch.setenv(*word.split("=", 1))
    assert command(["fit"]) == 2
    said = capfd.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1 and ENVIRONMENTS[given] in said


FLAGS = {
    "--run.store=": "run.store is not an address",
    "--run.store=file://relative": "'file://relative' is no absolute path: give file:///relative",
    "--run.store=ftp://host/x": "run.store 'ftp://host/x.*' cannot be used: ",
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
    "--model.architecture.num_mtp_layers=-1": "num_mtp_layers is -1; give 0 or more",
}


@pytest.mark.parametrize("given", FLAGS)
def test_of_flags(given: str, flags: list[str], tmp_path: Path, capfd: Any) -> None:
    (tmp_path / "empty_section.yaml").write_text("model: {nothing_here: {}}")
    (tmp_path / "empty_below.yaml").write_text("run: {names: {}}")
    (tmp_path / "empty.yaml").touch()
    (tmp_path / "loop.yaml").write_text("trainer: &a {max_steps: *a}")
    os.mkfifo(tmp_path / "pipe")
    said = refused("fit", [*flags, given.format(here=tmp_path)], capfd)
    assert re.search(FLAGS[given].replace("?", "\\?"), said), said
    assert not list(tmp_path.glob("runs/*/*"))
