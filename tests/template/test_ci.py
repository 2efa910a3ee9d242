"""A project's CI: it rehearses, trains on two processes, continues the run and evaluates it."""

import json
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from .conftest import SOURCE, copied_project, output

SMALL = """run: {name: quickstart}
data:
  source: {class_path: TextFiles, init_args: {paths: [texts/*.txt]}}
  tokenizer: Bytes
  seq_len: 32
  global_batch_size: 4
  micro_batch_size: 2
  validation_share: 0.2
  test_share: 0.5
model:
  architecture: {model_type: llama, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1,
    num_attention_heads: 2, num_key_value_heads: 1}
  optim: {learning_rate: 0.01, warmup: 0}
trainer: {accelerator: cpu, devices: 2, strategy: ddp, max_steps: 30, val_check_interval: 10}
"""


def commands() -> list[str]:
    workflow = yaml.safe_load((SOURCE / ".github/workflows/ci.yml").read_text("utf-8"))
    return [step["run"] for step in workflow["jobs"]["test"]["steps"] if "run" in step]


def test_github_and_gitlab_run_the_same_commands() -> None:
    gitlab = yaml.safe_load((SOURCE / ".gitlab-ci.yml").read_text("utf-8"))
    assert gitlab["test"]["script"] == commands()
    assert [shlex.split(each)[:2] for each in commands()[:3]] == [
        ["make", "setup"],
        ["make", "check"],
        ["make", "test"],
    ]
    assert """ARGS='-m ""'""" in commands()[2], "the rehearsals, which kill and resume, are slow"


@pytest.mark.slow
def test_the_pipeline_trains_on_two_processes_continues_and_evaluates(tmp_path: Path) -> None:
    """Its last three commands as they are, with a small configuration and this environment."""
    project = copied_project(tmp_path)
    shutil.copy(SOURCE / "Makefile", project)
    for number in range(100, 150):  # `evaluate` compares 20 documents or more
        (project / "texts" / f"{number}.txt").write_text(f"{number} is a number. " * 30, "utf-8")
    (project / "small.yaml").write_text(SMALL, "utf-8")
    python = project / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n', "utf-8")
    python.chmod(0o755)
    given = {"CONFIG": "small.yaml", "RUN": sys.executable}
    *trainings, evaluate = commands()[3:]
    printed = [output("sh", "-c", each, cwd=project, **given) for each in trainings]
    assert "training starts at step 0" in printed[0]
    (run,) = (project / "runs" / "ci").iterdir()
    lines = map(json.loads, (run / "metrics.jsonl").read_text("utf-8").splitlines())
    steps = [line["step"] for line in lines if "train/loss" in line]
    assert max(steps) == 30 and len(steps) == len({*steps}), "the second continued the first"
    facts = json.loads((run / "facts.json").read_text("utf-8"))
    assert facts["machine"]["world_size"] == 2
    assert "better with" in output("sh", "-c", evaluate, cwd=project, **given)
    assert [*(run / "evaluation").glob("*.json")]
