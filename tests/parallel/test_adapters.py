"""Adapters train to the same numbers under every strategy, and resume under another."""

import json
import re
from typing import Any

import pytest
from lightning.pytorch import Callback
from torch.distributed.tensor import DTensor

from dist_template.checkpoint import manifest
from dist_template.checkpoint.formats import read_full
from dist_template.wings.rehearse.record import RunRecord
from tests.support.adapters import MODEL, TARGETS, flags, with_random_b
from tests.support.parity import PauseAfter, Trainings, assert_close, run_folder
from tests.support.runs import newest
from tests.support.tiers import tiers

pytestmark = pytest.mark.slow
STRATEGIES = ["ddp", "fsdp2", "hsdp", "tp", "fsdp2_tp", "fsdp2_ep", "fsdp2_tp_ep", "zero2", "zero3"]
CASES = [(kind, strategy) for kind in TARGETS for strategy in STRATEGIES]
CASES = [case for case in CASES if case[0] != "llama" or "ep" not in case[1]]  # it has no experts
DAILY = [("llama", "tp"), ("experts", "fsdp2_ep")]


class LocalBytes(Callback):
    """Writes {name: bytes of this rank's shard} of every parameter into the run folder."""

    def __repr__(self) -> str:
        return "LocalBytes()"  # the same training, for `Trainings`

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        sizes = {}
        for name, parameter in pl_module.model.named_parameters():
            local = getattr(parameter, "ds_tensor", parameter)
            if isinstance(local, DTensor):
                local = local.to_local()
            sizes[name] = local.numel() * local.element_size()
        file = run_folder(trainer) / f"bytes{trainer.global_rank}.json"
        file.write_text(json.dumps(sizes))


def trained(train: Trainings, kind: str, strategy: str, *more: str) -> RunRecord:
    keys = ["--model.optim.warmup=2", *flags(TARGETS[kind]), "--trainer.precision=32-true", *more]
    return train(MODEL[kind], strategy, *keys, prelude=with_random_b, callbacks=[LocalBytes()])


def assert_sharded(many: RunRecord, one: RunRecord, pattern: str, shards: int) -> None:
    full = json.loads((one.run / "bytes0.json").read_text())
    ranks = [json.loads(file.read_text()) for file in many.run.glob("bytes*.json")]
    names = [name for name in full if re.search(pattern, name)]
    assert names and len(ranks) == many.size
    for rank in ranks:
        assert [rank[name] * shards for name in names] == [full[name] for name in names]


@pytest.mark.parametrize(("kind", "strategy"), tiers(CASES, DAILY))
def test_adapters_train_as_one_process(train: Trainings, kind: str, strategy: str) -> None:
    one, many = (trained(train, kind, name) for name in ("one", strategy))
    assert many.loss == pytest.approx(one.loss, rel=1e-6)
    assert many.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)
    assert_close(many.end, one.end, 1e-5)
    for name, tensor in one.start.items():
        changes = not tensor.equal(one.end[name])
        assert changes == (".lora_" in name or "e_score_correction_bias" in name), name
    if kind == "experts" and "ep" in strategy:
        assert_sharded(many, one, r"\.mlp\.experts\.", many.size)


NF4 = "--model.adapter.quantize=nf4"
WITH_NF4 = ["ddp", "fsdp2", "hsdp", "zero2", "zero3", "fsdp2_offload", "zero2_offload"]
WITH_NF4 += ["zero3_offload"]
HALF, DORA = "--trainer.precision=bf16-mixed", "--model.adapter.dora=true"
STACKED = "--model.adapter.targets=[gate_up_proj]"
VARIANTS = [
    *(("llama", strategy, NF4) for strategy in WITH_NF4),
    ("attention", "fsdp2_ep", NF4),
    ("experts", "fsdp2_ep", "--model.blocks.checkpointing=full"),
    ("llama", "fsdp2_tp", "--model.loss_chunk=16"),
    ("llama", "fsdp2", HALF),
    ("llama", "zero3", HALF),
    ("attention", "tp", "--model.adapter.rslora=true"),
    ("llama", "fsdp2", DORA),
    ("llama", "zero3", DORA),
    ("experts", "fsdp2_ep", STACKED),
    ("experts", "fsdp2_tp", STACKED),
    ("attention", "fsdp2_tp", "--model.adapter.trainable=[embed_tokens, lm_head, norm]"),
]


@pytest.mark.parametrize(("kind", "strategy", "flag"), tiers(VARIANTS, [("llama", "zero3", NF4)]))
def test_a_variant_trains_as_one(train: Trainings, kind: str, strategy: str, flag: str) -> None:
    """FSDP2 and ZeRO-3 shard 4-bit weights too, by the bytes of each rank."""
    one, many = (trained(train, kind, name, flag) for name in ("one", strategy))
    assert many.loss == pytest.approx(one.loss, rel=1e-2 if flag == HALF else 1e-6)
    if flag == NF4:
        assert one.loss != trained(train, kind, "one").loss
        is_replicated = strategy.startswith(("ddp", "zero2"))
        shards = 1 if is_replicated else 2
        assert_sharded(many, one, r"proj\.base_layer\.weight$", shards)


def run(train: Trainings, strategy: str, *extra: str, kind: str, **more: Any) -> Any:
    keys = ["--trainer.max_steps=6", "--model.optim.warmup=2", *flags(TARGETS[kind]), *extra]
    return train.run("fit", MODEL[kind], strategy, *keys, prelude=with_random_b, **more)


@pytest.mark.parametrize("strategy", tiers(["ddp", "fsdp2_ep", "tp", "zero3"], ["fsdp2_ep"]))
def test_a_resumed_training_equals_the_uninterrupted_one(train: Trainings, strategy: str) -> None:
    """Bit for bit; and the checkpoint has trained parameters and buffers only."""
    saves = ["--last_checkpoint.every_n_steps=3", "--last_checkpoint.keep=2"]
    whole = run(train, strategy, *saves, kind="experts")
    checkpoint = whole.run / "checkpoints" / manifest.name(3)
    resumed = run(train, strategy, f"--ckpt_path={checkpoint}", kind="experts")
    assert resumed.loss == {step: whole.loss[step] for step in (4, 5, 6)}
    saved = read_full(checkpoint)
    for name in saved["state_dict"]:
        assert ".lora_" in name or "e_score_correction_bias" in name
    assert len(saved["frozen_base"]["sha256"]) == 64


@pytest.mark.parametrize(("kind", "num"), tiers([("llama", 3), ("experts", 6)], daily=[]))
def test_adapters_continue_from_strategy_to_strategy(train: Trainings, kind: str, num: int) -> None:
    """Over other numbers of ranks too: each leg has the losses of an uninterrupted training."""
    expected = run(train, "one", kind=kind).loss
    checkpoint: list[str] = []
    for number, strategy in enumerate(["fsdp2", "zero3", "tp", "hsdp", "zero2", "one"][:num]):
        leg = run(train, strategy, *checkpoint, kind=kind, callbacks=[PauseAfter(number + 1)])
        assert leg.loss == pytest.approx({number + 1: expected[number + 1]}, rel=1e-5), strategy
        checkpoint = [f"--ckpt_path={newest(leg.run)}"]
