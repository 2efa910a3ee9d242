"""Every configuration can run, and the main ones train for their first steps."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from dist_template.testing import check_config, first_steps, this_project

PROJECT = this_project(__file__)
CONFIGS = Path(__file__).parents[1] / "configs"
OTHERS = {"evaluate", "sweep"}  # files of these verbs
FIT = [path for path in sorted(CONFIGS.rglob("*.yaml")) if not {path.stem, path.parent.name} & OTHERS]
MAIN = [path for path in FIT if path.parent == CONFIGS and path.stem != "cluster"]  # what is trained
ADDED = [path for path in FIT if path not in MAIN]  # given after one of those


@pytest.mark.parametrize("config", MAIN, ids=lambda path: path.stem)
def test_a_main_configuration_can_run(config: Path) -> None:
    assert check_config(PROJECT, f"--config={config}", gpus=4) == []


@pytest.mark.parametrize("config", ADDED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_configuration_can_be_added(config: Path) -> None:
    machine = ["--trainer.accelerator=gpu", "--trainer.devices=8", "--trainer.num_nodes=2"]
    flags = [*machine, "--model.optim.warmup=0"]  # a preset may end before a warm-up would
    base = f"--config={CONFIGS}/pretrain.yaml"
    assert check_config(PROJECT, base, *flags, f"--config={config}") == []


@pytest.mark.parametrize("name", ["quickstart", "pretrain"])
def test_the_first_steps_run(name: str, tmp_path: Path) -> None:
    losses = first_steps(PROJECT, f"--config={CONFIGS}/{name}.yaml", folder=tmp_path)
    assert len(losses) == 6 and all(math.isfinite(loss) for loss in losses.values()), losses
