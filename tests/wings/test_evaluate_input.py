"""`evaluate`: what it refuses, and what its figures are of, without a training."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from dist_template import InputError
from dist_template.wings.ship.evaluate import tasks
from dist_template.wings.ship.evaluate.documents import DocumentScores
from dist_template.wings.ship.evaluate.evaluation import figures_of


def test_a_run_on_preferences_is_refused() -> None:
    data = SimpleNamespace(documents=None, source=SimpleNamespace(pairs=True))
    module: Any = SimpleNamespace(sums=None)
    trainer: Any = SimpleNamespace(datamodule=data)
    with pytest.raises(
        InputError, match=r"preferences cannot be evaluated or promoted yet: `export` and `serve`"
    ):
        DocumentScores("").setup(trainer, module, "test")


def test_bits_per_byte_are_those_of_text_alone() -> None:
    """Of conversations only some tokens count, and their bytes are not known."""
    table = pd.DataFrame({"nats": [6.0, 2.0], "tokens": [3, 1], "bytes": [12, 4]})
    assert figures_of(table, is_whole=True) == {"loss": 2.0}
    assert figures_of(table, is_whole=False) == pytest.approx(
        {"loss": 2.0, "bits_per_byte": 0.5 / math.log(2)}
    )


@pytest.mark.parametrize(
    "line",
    [
        "tasks: 5",
        "tasks: [1, {}]",
        "limit: 0",
        "task: [x]",
        "chat_template: maybe",
        "limit: 1.5",
        "tasks: ['']",
    ],
)
def test_a_key_of_another_type_is_one_sentence(line: str, tmp_path: Path) -> None:
    (tmp_path / "evaluate.yaml").write_text(line)
    with pytest.raises(InputError, match=rf"evaluate.yaml: .*{line.partition(':')[0]}") as refused:
        tasks.read(str(tmp_path / "evaluate.yaml"))
    assert "\n" not in str(refused.value)
    (tmp_path / "evaluate.yaml").write_text("tasks: []\nlimit: 3")
    assert tasks.read(str(tmp_path / "evaluate.yaml"))["limit"] == 3
