"""The commands by which a guide starts a training, with `-m <package> fit` for its script."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT
from tests.support.injury import OF_A_LAUNCHER
from tests.support.launched import ENVIRONMENT, STEPS, one_machine
from tests.support.runs import PACKAGE, PROJECT, logged, only_run, small
from tests.support.tiers import tiers

BIN = Path(sys.executable).parent
# As in docs/launch.md, with two processes; a CPU needs --cpu, and one machine no ssh.
COMMANDS = {
    "one device": "python -m {package} fit {flags} --trainer.devices=1",
    "accelerate": "accelerate launch --cpu --num_processes 2 -m {package} fit {flags}",
    "deepspeed": (
        "deepspeed --num_gpus 2 --module {package} fit {flags} --deepspeed {folder}/ds_config.json"
    ),
    "all devices": "python -m {package} fit {flags} --trainer.devices=2",
    "hostfile": (
        "deepspeed --hostfile {folder}/hostfile.txt --master_addr 127.0.0.1 --module {package} fit"
        " {flags} --deepspeed {folder}/ds_config.json"
    ),
    "torchrun": "python -m torch.distributed.run --nproc_per_node 2 -m {package} fit {flags}",
    "torchrun c10d": (
        "python -m torch.distributed.run --rdzv-backend c10d --rdzv-endpoint localhost:0"
        " --nproc_per_node 2 -m {package} fit {flags}"
    ),
}
ZERO_2 = {"zero_optimization": {"stage": 2}, "train_batch_size": "auto"}
ZERO_2 |= dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
# What the deepspeed launcher calls for several hosts. The hosts are this machine: each gets the
# command with its number in place of %n, at the same time.
PDSH = """#!/bin/bash
while [ $# -gt 0 ]; do
    case $1 in
        -S) shift;;
        -f) shift 2;;
        -w) IFS=, read -ra hosts <<<"$2"; shift 2;;
        *) break;;
    esac
done
code=0
for number in "${!hosts[@]}"; do
    bash -c "${*//%n/$number}" & processes+=($!)
done
for process in "${processes[@]}"; do wait "$process" || code=$?; done
exit $code
"""
SSH = '#!/bin/sh\nshift 3\nexec sh -c "$*"\n'  # -o OPTION HOST COMMAND
DAILY = ["accelerate", "hostfile"]  # the latter by the deepspeed launcher


@pytest.fixture(scope="module")
def losses(corpus: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Of four steps on two processes of this machine."""
    folder = tmp_path_factory.mktemp("losses")
    return one_machine([*small(corpus, cache, folder), *STEPS], folder)


def program(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


@pytest.mark.slow
@pytest.mark.parametrize("name", tiers(COMMANDS, daily=DAILY))
def test_each_command_of_the_guide_trains(
    name: str, flags: list[str], losses: Any, tmp_path: Path
) -> None:
    """To the losses of `fit` on two processes; nobody names the run: the ranks agree on it."""
    (tmp_path / "hostfile.txt").write_text("127.0.0.1 slots=1\nlocalhost slots=1\n")
    (tmp_path / "ds_config.json").write_text(json.dumps(ZERO_2))
    program(tmp_path, "pdsh", PDSH)
    program(tmp_path, "ssh", SSH)
    given = [*flags, *STEPS, "--trainer.devices=auto"]
    words: list[str] = []
    for word in COMMANDS[name].split():
        filled = word.format(package=PACKAGE, folder=tmp_path, flags="{flags}")
        words += given if filled == "{flags}" else [filled]
    words[0] = sys.executable if words[0] == "python" else str(BIN / words[0])
    kept = {k: v for k, v in os.environ.items() if not k.startswith(OF_A_LAUNCHER)}
    kept["PATH"] = f"{tmp_path}:{BIN}:{kept['PATH']}"
    options: Any = {"capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run(words, cwd=PROJECT, env=kept | ENVIRONMENT, **options)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    found = logged(only_run(tmp_path), "train/loss")
    assert found == pytest.approx(losses, abs=1e-5 if "deepspeed" in COMMANDS[name] else 1e-6)


def test_the_page_has_the_guides_commands() -> None:
    page = (ROOT / "docs" / "launch.md").read_text("utf-8")
    for words in (
        "python -m my_trainer fit --config configs/finetune.yaml",
        "accelerate launch --num_processes 4 -m my_trainer fit",
        "deepspeed --num_gpus 4 --module my_trainer fit",
        "deepspeed --num_gpus 8 --module my_trainer fit",
        "deepspeed --hostfile hostfile.txt --module my_trainer fit",
    ):
        assert words in page, words
