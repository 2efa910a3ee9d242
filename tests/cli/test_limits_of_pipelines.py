"""What a pipeline cannot do is refused before anything starts, in one sentence each."""

from __future__ import annotations

import re
from typing import Any

import pytest
from trainer_dev.data import DataModule
from trainer_dev.module import LanguageModule
from transformers import AutoConfig

from dist_template import AdapterConfig
from dist_template.strategies import MeshStrategy
from dist_template.text import Preferences
from tests.support.library import Machine, violations

LLAMA = AutoConfig.for_model("llama", num_hidden_layers=32)
SMALL = AutoConfig.for_model("llama", num_hidden_layers=3)


def violations_of(
    rows: int = 1024, given: Any = None, module: Any = None, config: Any = LLAMA, **keys: Any
) -> list[str]:
    """Of a pipeline of 2 ranks and 4 data-parallel ranks, on 8 GPUs."""
    data = DataModule(global_batch_size=rows, micro_batch_size=1, **given or {})
    settings = {"strategy": MeshStrategy(pp_size=2, **keys), "max_steps": 1000}
    machine = Machine("cuda", 8, precision="bf16-mixed")
    return violations(machine, settings, module or LanguageModule(), data, config)


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "fewer micro-batches than stages":
        ({"rows": 4}, "has 1 micro-batches .* 1F1B needs 2 or more, one for each stage: edit"),
    "rounds of an interleaved schedule":
        ({"rows": 20, "pp_schedule": "Interleaved1F1B"},
        "has 5 micro-batches .* Interleaved1F1B needs a multiple of 2: edit"),
    "more stages than blocks": ({"pp_schedule": "Interleaved1F1B", "config": SMALL},
        "3 blocks cannot be divided into 4 stages: lower .*pp_size, or set another pp_schedule"),
    "offload": ({"cpu_offload": True},
        "cpu_offload true does not work in a pipeline: set it to false"),
    "4-bit weights": ({"module": LanguageModule(adapter=AdapterConfig(quantize="nf4"))},
        "adapter.quantize does not work in a pipeline: set it to null, or pp_size to 1"),
    "preferences": ({"given": {"source": Preferences(paths=["pairs.jsonl"])}},
        "Preferences runs the model twice in a step, .* set .*pp_size to 1"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_a_pipeline_cannot_do_is_refused_in_one_sentence(case: str) -> None:
    given, sentence = CASES[case]
    found = violations_of(**given)
    assert len(found) == 1, found
    assert re.search(sentence, found[0]), found[0]


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
def test_what_it_can_do_is_not(schedule: str) -> None:
    assert violations_of(rows=16, pp_schedule=schedule) == []
