"""Every metric of docs/metrics.md is in metrics.jsonl, TensorBoard's and WandB's files."""

import re
import shutil
from pathlib import Path

import pytest

from tests.support import read_back

from .conftest import ROOT, copied_project, fit

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
    for section in (ROOT / "docs" / "metrics.md").read_text("utf-8").split("\n## "):
        if not section.startswith(NOT_HERE):
            for cell in re.findall(r"^\| (`[^|]+) \|", section, re.MULTILINE):
                names += re.findall(r"`([a-z]+/[\w/<>]+)`", cell)
    return [name for name in names if not name.startswith("test/")]  # of the verb `test`


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts on two processes, which crashes in step 7 and resumes from step 4."""
    folder = tmp_path_factory.mktemp("metrics")
    copied_project(folder)
    shutil.rmtree(folder / "tests")  # the callback below is of this repository's tests
    (folder / "loggers.yaml").write_text(LOGGERS, "utf-8")
    stop = "{class_path: tests.support.runs.StopAfter, init_args: {step: 7}}"
    flags = """--config loggers.yaml --config strategy/ddp --run.name r --trainer.max_steps 10
        --last_checkpoint.every_n_steps 4 """
    fit(folder, f"{flags} --trainer.callbacks+ '{stop}'", code=1, DIST_RUN_ID="one")
    fit(folder, flags, DIST_RUN_ID="one")
    return folder / "runs" / "r" / "one"


def test_the_tables_are_read() -> None:
    names = documented()
    assert len(names) == len(set(names)) > 25
    assert {"train/loss", "eval/bits_per_byte", "moe/unused_experts"} <= set(names)
    assert not any(name.startswith("test/") for name in names)


@pytest.mark.nightly  # a minute
@pytest.mark.parametrize("logger", ["tensorboard", "wandb"])
def test_every_documented_metric_is_logged_at_its_steps_also_after_a_restart(
    run: Path, logger: str
) -> None:
    points = getattr(read_back, f"{logger}_points")(run)
    expected: dict[str, dict[int, float]] = {}
    for step, metrics in read_back.metrics(run).items():
        for name, value in metrics.items():
            expected.setdefault(name, {})[step] = value
    # <n>: the last layer
    known = {re.sub(r"layer_\d+", "layer_<n>", name): name for name in expected}
    assert not set(documented()) - set(known), "documented, and in no metrics.jsonl"
    assert not set(known) - set(documented()) - {"epoch"}, "logged, and not documented"
    assert set(expected["train/loss"]) == set(range(1, 11)), "a step is missing"
    for name in (known[each] for each in documented()):
        shown = {step: points[name][step][-1] for step in expected[name]}
        assert shown == pytest.approx(expected[name], rel=1e-6, nan_ok=True), name
    for name in ("train/loss", "train/tokens", "eval/loss", "moe/unused_experts"):
        # 4: its validation; W&B keeps steps done again
        again = {4, *(range(5, 8) if logger == "wandb" else ())}
        for step, values in points[name].items():
            assert len(set(values)) == 1, name
            assert len(values) == 1 or step in again, f"{name} is logged twice"
