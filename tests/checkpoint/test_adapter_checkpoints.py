"""Checkpoints of adapters hold what is trained, and are resumed by every strategy."""

from typing import Any

import pytest

from tests.support.adapters import MODEL, TARGETS, flags, with_random_b
from tests.support.library import manifest, read_full
from tests.support.parity import PauseAfter, Trainings
from tests.support.runs import newest
from tests.support.tiers import tiers


def trained(train: Trainings, strategy: str, *extra: str, kind: str, **more: Any) -> Any:
    keys = ["--trainer.max_steps=6", "--model.optim.warmup=2", *flags(TARGETS[kind]), *extra]
    return train.run("fit", MODEL[kind], strategy, *keys, prelude=with_random_b, **more)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", tiers(["ddp", "fsdp2_ep", "tp", "zero3"], ["fsdp2_ep"]))
def test_a_resumed_training_equals_the_uninterrupted_one(train: Trainings, strategy: str) -> None:
    """Bit for bit; and the checkpoint has trained parameters and buffers only."""
    saves = ["--last_checkpoint.every_n_steps=3", "--last_checkpoint.keep=2"]
    whole = trained(train, strategy, *saves, kind="experts")
    checkpoint = whole.run / "checkpoints" / manifest.name(3)
    resumed = trained(train, strategy, f"--ckpt_path={checkpoint}", kind="experts")
    assert resumed.loss == {step: whole.loss[step] for step in (4, 5, 6)}
    saved = read_full(checkpoint)
    assert all(".lora_" in n or "e_score_correction_bias" in n for n in saved["state_dict"])
    assert len(saved["frozen_base"]["sha256"]) == 64


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "num"), tiers([("llama", 3), ("experts", 6)], daily=[]))
def test_adapters_continue_from_strategy_to_strategy(train: Trainings, kind: str, num: int) -> None:
    """Over other numbers of ranks too: each leg has the losses of an uninterrupted training."""
    expected = trained(train, "one", kind=kind).loss
    checkpoint: list[str] = []
    for number, strategy in enumerate(["fsdp2", "zero3", "tp", "hsdp", "zero2", "one"][:num]):
        leg = trained(train, strategy, *checkpoint, kind=kind, callbacks=[PauseAfter(number + 1)])
        assert leg.loss == pytest.approx({number + 1: expected[number + 1]}, rel=1e-5), strategy
        checkpoint = [f"--ckpt_path={newest(leg.run)}"]
