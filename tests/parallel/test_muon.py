"""Muon beside AdamW: which parameters each updates, torch's arithmetic, and parity over strategies."""

import pytest

from tests.support import parity
from tests.support.parity import PROCESSES, Trainings
from tests.support.tiers import tiers

MUON = ["--model.optim.optimizer=muon"]
MESHES = [name for name in PROCESSES if not name.startswith("zero")]
CASES = [("deepseek_v3", name) for name in MESHES]
CASES += [("llama", name) for name in ("fsdp2", "fsdp2_tp", "pp", "cp")]
DAILY = [("deepseek_v3", name) for name in ("ddp", "fsdp2_tp_ep")]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "strategy"), tiers(CASES, DAILY))
def test_a_strategy_trains_by_muon_to_the_numbers_of_one_process(
    train: Trainings, model: str, strategy: str
) -> None:
    parity.assert_trains_alike(train(model, strategy, *MUON), train(model, "one", *MUON))
