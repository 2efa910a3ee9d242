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


NF4 = LanguageModule(adapter=AdapterConfig(quantize="nf4"))
PAIRS = {"source": Preferences(paths=["pairs.jsonl"])}
ROUNDS = {"pp_schedule": "Interleaved1F1B"}
CASES: list[tuple[dict[str, Any], str]] = [
    ({"rows": 4}, "has 1 micro-batches .* 1F1B needs 2 or more, one for each stage: edit"),
    ({"rows": 20, **ROUNDS}, "has 5 micro-batches .* Interleaved1F1B needs a multiple of 2: edit"),
    ({"config": SMALL, **ROUNDS}, "3 blocks cannot be divided into 4 stages: lower .*pp_size, or"),
    ({"cpu_offload": True}, "cpu_offload true does not work in a pipeline: set it to false"),
    ({"module": NF4}, "adapter.quantize does not work in a pipeline: set it to null, or pp_size"),
    ({"given": PAIRS}, "Preferences runs the model twice in a step, .* set .*pp_size to 1"),
]


@pytest.mark.parametrize(("given", "words"), CASES, ids=[words for _, words in CASES])
def test_what_a_pipeline_cannot_do_is_refused_in_one_sentence(given: Any, words: str) -> None:
    (found,) = violations_of(**given)
    assert re.search(words, found), found


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
def test_what_it_can_do_is_not(schedule: str) -> None:
    assert violations_of(rows=16, pp_schedule=schedule) == []
