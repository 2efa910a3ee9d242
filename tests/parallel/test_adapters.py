"""Adapters train to the same numbers under every strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.adapters import MODEL, TARGETS, LocalBytes, flags, with_random_b
from tests.support.parity import SHORT, Trainings, assert_close
from tests.support.tiers import tiers
from tests.support.wings import RunRecord

STRATEGIES = ["ddp", "fsdp2", "hsdp", "tp", "fsdp2_tp", "fsdp2_ep", "fsdp2_tp_ep", "zero2", "zero3"]
OFFLOADED = ["fsdp2_offload", "zero2_offload", "zero3_offload"]
CASES = [(k, s) for k in TARGETS for s in STRATEGIES if not (k == "llama" and "ep" in s)]
DAILY = [("llama", "tp"), ("experts", "fsdp2_ep")]


def trained(train: Trainings, kind: str, strategy: str, *more: str, **options: Any) -> RunRecord:
    keys = [SHORT, "--model.optim.warmup=2", *flags(TARGETS[kind], *more)]
    keys += ["--trainer.precision=32-true"]
    return train(MODEL[kind], strategy, *keys, prelude=with_random_b, **options)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "strategy"), tiers(CASES, DAILY))
def test_adapters_train_as_one_process(train: Trainings, kind: str, strategy: str) -> None:
    one, many = trained(train, kind, "one"), trained(train, kind, strategy)
    assert many.loss == pytest.approx(one.loss, rel=1e-6)
    assert many.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)
    assert_close(many.end, one.end, 1e-5)
    for name, tensor in one.start.items():
        changes = not tensor.equal(one.end[name])
        assert changes == (".lora_" in name or "e_score_correction_bias" in name), name


QLORA = ["ddp", "fsdp2", "hsdp", "fsdp2_ep", "zero2", "zero3"]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", tiers(QLORA, daily=["zero3"]))
def test_four_bit_weights_train_as_one_process(
    train: Trainings, strategy: str, tmp_path: Path
) -> None:
    """And where they are sharded by the bytes of each rank: by FSDP2 and ZeRO-3."""
    kind = "attention" if "ep" in strategy else "llama"
    one_bytes, many_bytes = map(LocalBytes, (tmp_path / "1", tmp_path / "n"))
    one = trained(train, kind, "one", "quantize=nf4", callbacks=[one_bytes])
    many = trained(train, kind, strategy, "quantize=nf4", callbacks=[many_bytes])
    assert many.loss == pytest.approx(one.loss, rel=1e-6)
    assert one.loss != trained(train, kind, "one").loss
    (full,), ranks = one_bytes.read(), many_bytes.read()
    packed = [name for name in full if name.endswith("proj.base_layer.weight")]
    assert packed
    shards = {"ddp": 1, "zero2": 1}.get(strategy, 2)
    for rank in ranks:
        assert [rank[name] * shards for name in packed] == [full[name] for name in packed]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", tiers(["fsdp2_ep", "fsdp2_tp_ep"], daily=["fsdp2_ep"]))
def test_each_rank_holds_its_share_of_experts(
    train: Trainings, strategy: str, tmp_path: Path
) -> None:
    keys = ["--trainer.max_steps=1", "--model.optim.warmup=0", *flags(TARGETS["experts"])]
    held = [LocalBytes(tmp_path / name) for name in ("one", strategy)]
    for name, each in zip(("one", strategy), held, strict=True):
        train.run("fit", "deepseek_v3", name, *keys, callbacks=[each])
    (one,), many = (each.read() for each in held)
    experts = [name for name in one if ".mlp.experts." in name]
    assert len(experts) == 6  # two stacked parameters, each with A and B
    for rank in many:
        assert [rank[name] * len(many) for name in experts] == [one[name] for name in experts]


STACKED = "--model.adapter.targets=[gate_up_proj]"
MODULES = "--model.adapter.trainable=[embed_tokens, lm_head, norm]"
VARIANTS = {
    "recomputed experts": ("experts", "fsdp2_ep", "--model.blocks.checkpointing=full"),
    "loss in chunks": ("llama", "fsdp2_tp", "--model.loss_chunk=16"),
    "half precision": ("llama", "fsdp2", "--trainer.precision=bf16-mixed"),
    "half precision, ZeRO": ("llama", "zero3", "--trainer.precision=bf16-mixed"),
    "scaled by the root of the rank": ("attention", "tp", "--model.adapter.rslora=true"),
    "DoRA": ("llama", "fsdp2", "--model.adapter.dora=true"),
    "DoRA under ZeRO-3": ("llama", "zero3", "--model.adapter.dora=true"),
    **{f"4 bits, {name}": ("llama", name, "--model.adapter.quantize=nf4") for name in OFFLOADED},
    "stacked": ("experts", "fsdp2_ep", STACKED),
    "stacked, sharded": ("experts", "fsdp2_tp", STACKED),
    "embedding and norms too": ("attention", "fsdp2_tp", MODULES),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("variant", tiers(VARIANTS, daily=[]))
def test_a_variant_trains_to_the_numbers_of_one_process(train: Trainings, variant: str) -> None:
    kind, strategy, flag = VARIANTS[variant]
    keys = [SHORT, "--model.optim.warmup=2", *flags(TARGETS[kind]), flag]
    both = ("one", strategy)
    one, many = (train(MODEL[kind], name, *keys, prelude=with_random_b) for name in both)
    assert many.loss == pytest.approx(one.loss, rel=1e-2 if "bf16" in flag else 1e-6)
