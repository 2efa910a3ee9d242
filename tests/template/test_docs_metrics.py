"""Every metric of docs/metrics.md is in metrics.jsonl, and in TensorBoard's and WandB's files, also
after a restart."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import read_back

ROOT = Path(__file__).parents[2]
PROJECT = ROOT / "{{cookiecutter.project_slug}}"
PACKAGE = "{{cookiecutter.package_name}}"
# sections
NOT_HERE = ("With hardware whose peak is known", "With several sources")
LOGGERS = """
trainer:
  logger:
    - class_path: TensorBoard
    - class_path: WandB
      init_args: {project: p, offline: true, save_dir: "{run}"}
"""


def documented() -> list[str]:
    """The names in the tables: a row begins with them, separated by commas."""
    names: list[str] = []
    for section in re.split(
        r"^## ", (ROOT / "docs" / "metrics.md").read_text("utf-8"), flags=re.MULTILINE
    ):
        if not section.startswith(NOT_HERE):
            for cell in re.findall(r"^\| (`[^|]+) \|", section, re.MULTILINE):
                names += re.findall(r"`([a-z]+/[\w/<>]+)`", cell)
    return [name for name in names if not name.startswith("test/")]  # of the verb `test`


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts on two processes, which crashes in step 7 and resumes from step 4."""
    folder = tmp_path_factory.mktemp("metrics")
    shutil.copytree(PROJECT / "configs", folder / "configs")
    shutil.copytree(
        PROJECT / PACKAGE, folder / "trainer_dev", ignore=shutil.ignore_patterns("__pycache__")
    )
    (folder / "loggers.yaml").write_text(LOGGERS, "utf-8")
    (folder / "texts").mkdir()
    for number in range(30):
        (folder / "texts" / f"{number}.txt").write_text(
            f"{number} is a number of some length. " * 30, "utf-8"
        )
    stop = "{class_path: tests.support.runs.StopAfter, init_args: {step: 7}}"
    flags = f"""--config loggers.yaml --config strategy/ddp --run.root {folder}/runs --run.name r
        --data.source TextFiles --data.source.paths [{folder}/texts/*.txt] --data.tokenizer Bytes --data.seq_len 32
        --data.validation_share 0.2 --data.test_share 0 --data.global_batch_size 8 --data.micro_batch_size 2
        --model.sample_tokens 4 --trainer.accelerator cpu --trainer.devices 2 --trainer.max_steps 10
        --trainer.val_check_interval 4 --trainer.log_every_n_steps 1 --last_checkpoint.every_n_steps 4"""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environment = kept | {"OMP_NUM_THREADS": "1", "DIST_RUN_ID": "one", "DS_ACCELERATOR": "cpu"}
    for more, code in (["--trainer.callbacks+", stop], 1), ([], 0):
        command = [sys.executable, "-m", "trainer_dev", "fit", *shlex.split(flags), *more]
        ended = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert ended.returncode == code, ended.stdout + ended.stderr
    return folder / "runs" / "r" / "one"


def test_the_tables_are_read() -> None:
    names = documented()
    assert len(names) == len(set(names)) > 25
    assert {"train/loss", "eval/bits_per_byte", "moe/unused_experts"} <= set(names)
    assert not any(name.startswith("test/") for name in names)


@pytest.mark.slow
@pytest.mark.nightly  # a minute
@pytest.mark.parametrize("logger", ["tensorboard", "wandb"])
def test_every_documented_metric_is_logged_at_its_steps_also_after_a_restart(
    run: Path, logger: str
) -> None:
    reader = read_back
    points = getattr(reader, f"{logger}_points")(run)
    expected: dict[str, dict[int, float]] = {}
    for step, metrics in reader.metrics(run).items():
        for name, value in metrics.items():
            expected.setdefault(name, {})[step] = value
    known = {
        re.sub(r"layer_\d+", "layer_<n>", name): name for name in expected
    }  # <n>: the last layer
    assert not set(documented()) - set(known), "documented, and in no metrics.jsonl"
    assert not set(known) - set(documented()) - {"epoch"}, "logged, and not documented"
    assert set(expected["train/loss"]) == set(range(1, 11)), "a step is missing"
    for name in (known[each] for each in documented()):
        shown = {step: points[name][step][-1] for step in expected[name]}
        assert shown == pytest.approx(expected[name], rel=1e-6, nan_ok=True), name
    for name in ("train/loss", "train/tokens", "eval/loss", "moe/unused_experts"):
        again = {
            4,
            *(range(5, 8) if logger == "wandb" else ()),
        }  # 4: its validation; W&B keeps steps done again
        for step, values in points[name].items():
            assert len(set(values)) == 1 and (len(values) == 1 or step in again), (
                f"{name} is logged twice"
            )
