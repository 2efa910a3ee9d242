"""Bytes that a strategy sends in a step: the library's formula (`Estimate.traffic`) equals the
collectives of real trainings, and the numbers on the pages of the strategies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dist_template.parallel.estimates import estimate_of
from dist_template.parallel.estimates.facts import Sent
from dist_template.text.model.facts import facts_of
from tests.support.collectives import CountCollectives, read_sent, summed
from tests.support.runs import Workers, run
from tests.support.strategies import NAMES, flags_of
from tests.support.tiers import tiers

ARGS = "--trainer.strategy.init_args"
LLAMA: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "model_type": "deepseek_v3", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
    "moe_intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2,
    "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "first_k_dense_replace": 1, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "num_mtp_layers": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Setting:
    ranks: int
    tokens: int  # of a micro-batch on one rank
    accumulation: int = 1
    node: int = 8  # ranks that hold a replica under HSDP, and share matrices, experts or sequences
    half: bool = True  # bf16-mixed in place of 32-true
    reduces_each: bool = True  # FSDP2's `reduce_each_micro_batch`

    @property
    def shared(self) -> int:
        return min(self.ranks, self.node)


# Sizes of a mesh, or ZeRO's stage.
STRATEGIES: dict[str, Callable[[Setting], dict[str, Any] | int | None]] = {
    "ddp": lambda at: None,
    "fsdp2": lambda at: {},
    "hsdp": lambda at: {"dp_replicate_size": at.ranks // at.shared},
    "tp": lambda at: {"fsdp_size": 1, "tp_size": at.ranks},
    "fsdp2_tp": lambda at: {"tp_size": at.shared},
    "fsdp2_ep": lambda at: {"ep_size": at.shared},
    "fsdp2_tp_ep": lambda at: {"tp_size": at.shared, "ep_size": at.shared},
    "cp": lambda at: {"cp_size": at.shared},
    "pp": lambda at: {"pp_size": 2, "fsdp_size": 1, "dp_replicate_size": "auto"},
    "pp_fsdp2": lambda at: {"pp_size": 2},
    "pp_ep": lambda at: {"pp_size": 2, "ep_size": min(at.ranks // 2, at.node)},
    "zero1": lambda at: 1,
    "zero2": lambda at: 2,
    "zero3": lambda at: 3,
}
CASES = {  # (processes, ranks of a node, architecture)
    "ddp": (2, 2, LLAMA),
    "fsdp2": (2, 2, LLAMA | {"tie_word_embeddings": True}),
    "hsdp": (4, 2, LLAMA),
    "tp": (2, 2, LLAMA),
    "fsdp2_tp": (4, 2, LLAMA),
    "fsdp2_ep": (2, 2, EXPERTS),
    "fsdp2_tp_ep": (4, 2, EXPERTS),
    "cp": (2, 2, LLAMA | {"num_key_value_heads": 2}),
    "pp": (2, 2, LLAMA | {"tie_word_embeddings": True}),
    "pp_fsdp2": (4, 2, LLAMA),
    "pp_ep": (4, 2, EXPERTS | {"first_k_dense_replace": 0}),  # every stage has experts
    "zero1": (2, 2, LLAMA),
    "zero2": (2, 2, LLAMA),
    "zero3": (2, 2, LLAMA),
}
SETTINGS = [*((name, {}) for name in CASES), ("fsdp2", {"reduces_each": False})]
DAILY = [("ddp", {}), ("fsdp2", {}), ("tp", {}), ("fsdp2_ep", {}), ("pp", {}), ("zero3", {})]
MICRO_BATCH, SEQ_LEN = 2, 32


def traffic(name: str, model: Any, at: Setting) -> list[Sent]:
    given = STRATEGIES[name](at)
    strategy: Any = "ddp"
    if isinstance(given, int):
        strategy = {"class_path": "ZeroStrategy", "init_args": {"stage": given}}
    elif given is not None:
        sizes = {"reduce_each_micro_batch": at.reduces_each, **given}
        strategy = {"class_path": "MeshStrategy", "init_args": sizes}
    sharding = estimate_of(strategy)
    facts = replace(
        facts_of(model, model)[1],
        world_size=at.ranks,
        precision="bf16-mixed" if at.half else "32-true",
        seq_len=at.tokens * (at.shared if name == "cp" else 1),
        global_batch_size=at.accumulation * sharding.data_parallel(at.ranks),
        pipeline=sharding.stage_facts(model, at.ranks),
    )
    return list(sharding.traffic(facts))


def build(architecture: dict[str, Any], vocab_size: int) -> Any:
    with torch.device("meta"):
        config = AutoConfig.for_model(**architecture, vocab_size=vocab_size)
        return AutoModelForCausalLM.from_config(config)


def test_every_strategy_that_sends_differently_is_in_the_model_and_in_the_cases() -> None:
    same = {name for name in NAMES if name.endswith(("_offload", "_nvme"))}  # as without
    assert STRATEGIES.keys() == CASES.keys() == set(NAMES) - same


def test_seven_billion_parameters_send_what_the_pages_of_the_strategies_say() -> None:
    model = build({"model_type": "llama"}, 32000)  # Llama's defaults: 7 B
    size = sum(p.numel() for p in model.parameters())

    def sent(strategy: str, ranks: int = 8, **setting: Any) -> float:
        at = Setting(ranks, 4096, **setting)
        return sum(one.sent for one in traffic(strategy, model, at)) / size / (7 / 8)

    assert sent("ddp") == sent("ddp", accumulation=4) == pytest.approx(8, rel=1e-3)
    assert sent("zero1") == sent("zero1", accumulation=4) == pytest.approx(6, rel=1e-3)
    assert sent("zero2", accumulation=4) == pytest.approx(4 * 4 + 2, rel=1e-3)
    assert sent("zero3", accumulation=2) == pytest.approx(2 * 6, rel=1e-3)
    # norm and head, 0.13 B, are gathered once
    once = 2 * 32000 * 4096 / size
    assert sent("fsdp2", accumulation=2) == pytest.approx(2 * (8 - once), rel=1e-3)
    assert sent("fsdp2", half=False) == pytest.approx(12 - 2 * once, rel=1e-3)
    between = 7 / 8 * 4 * 2 / 8 / (7 / 8)  # 8 copies of 8: each shard's gradients all-reduced
    assert sent("hsdp", ranks=64) == pytest.approx(sent("fsdp2") + between, rel=1e-3)
    moved = 2 * 226 * 4096 * 4096 * 2 + 4096 * 32000 * 2  # 226 all-reduces of hidden states; logits
    assert sent("tp") * size == pytest.approx(moved, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "setting"), tiers(SETTINGS, daily=DAILY))
def test_a_training_sends_what_the_model_says(
    strategy: str, setting: dict[str, Any], flags: list[str], tmp_path: Path
) -> None:
    """Elements of each kind of collective, in a step of two micro-batches."""
    processes, node, architecture = CASES[strategy]
    is_shared = strategy[:2] in ("tp", "cp", "pp") or "_tp" in strategy
    data_parallel = processes // (shared := node if is_shared else 1)
    argv = ["fit", *flags, *flags_of(strategy), f"--model.architecture={architecture}"]
    argv += [f"{ARGS}.reduce_each_micro_batch={each}" for each in setting.values()]
    argv += [f"--trainer.devices={processes}", f"--data.micro_batch_size={MICRO_BATCH}"]
    argv += [f"--data.global_batch_size={2 * MICRO_BATCH * data_parallel}", "--data.prompts=[]"]
    argv += ["--trainer.max_steps=4", "--trainer.limit_val_batches=0"]
    argv += ["--trainer.log_every_n_steps=100", "--last_checkpoint.every_n_steps=100"]
    if strategy == "zero3":
        argv += [f"{ARGS}.param_persistence_threshold=16", f"{ARGS}.prefetch_bucket_size=0"]
    assert run("prepare", *flags) == 0
    counted = tmp_path / "counted"
    with Workers(processes) as workers:
        workers.run(argv, counted, callbacks=[CountCollectives(counted)]).check()
    tokens = MICRO_BATCH * SEQ_LEN // (shared if "cp" in strategy else 1)
    at = Setting(processes, tokens, 2, node, half=False, **setting)
    expected, found = summed(traffic(strategy, build(architecture, 257), at)), read_sent(counted)
    assert found.keys() == expected.keys()
    for kind, elements in expected.items():
        assert found[kind] == pytest.approx(elements, rel=5e-3), (
            kind
        )  # 257 rows: shards differ by one
