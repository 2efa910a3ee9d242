"""The estimate of memory against the tensors of trainings, and the remedies that it leads to."""

import json
from pathlib import Path
from typing import Any

import pytest

from dist_template.parallel.estimates.facts import STATE
from dist_template.wings.diagnose import Change, History, read_run
from dist_template.wings.diagnose.memory import figures_of
from dist_template.wings.diagnose.remedies import memory_use, remedies
from tests.support.histories import nested
from tests.support.memory import Allocated, State
from tests.support.parity import PROCESSES
from tests.support.runs import Workers, run
from tests.support.strategies import flags_of
from tests.support.tiers import tiers

WIDTH, LAYERS, MLP, VOCAB = 256, 4, 512, 257
ARCHITECTURE = (
    f"--model.architecture={{model_type: llama, hidden_size: {WIDTH}, intermediate_size: {MLP},"
    f" num_hidden_layers: {LAYERS}, num_attention_heads: 4, num_key_value_heads: 4}}"
)
PARAMETERS = LAYERS * (4 * WIDTH**2 + 3 * WIDTH * MLP + 2 * WIDTH) + 2 * VOCAB * WIDTH + WIDTH
ADAPTED = sum(8 * (WIDTH + out) for out in (WIDTH,) * 4 + (MLP,) * 3) * LAYERS
LLAMA_7B = 6_738_415_616
FACTS: dict[str, Any] = {"parameters.total": LLAMA_7B, "parameters.embedding": 131_072_000}
FACTS |= {"model.layers": 32, "model.width": 4096, "model.heads": 32, "model.vocab_size": 32000}
FACTS |= {"machine.device": "NVIDIA H100", "machine.supports_bf16": True}
SIZES = {"data.seq_len": 4096, "data.micro_batch_size": 8, "data.global_batch_size": 64}
CONFIG: dict[str, Any] = SIZES | {"trainer.precision": "bf16-mixed"}
CONFIG["model.architecture"] = {"intermediate_size": 11008}
LORA = "--model.adapter.rank=8"
FOUR_BITS = f"{LORA} --model.adapter.quantize=nf4"
PIPELINE = "--data.global_batch_size=16 --data.micro_batch_size=1"
INTERLEAVED = f"{PIPELINE} --trainer.strategy.init_args.pp_schedule=Interleaved1F1B"
# strategy, precision, flags; without adapters, tests/wings/test_plan.py has more of them
TRAINED = [("fsdp2", "32-true", FOUR_BITS), ("pp", "32-true", PIPELINE)]
TRAINED += [("fsdp2", "bf16-true", ""), ("zero3", "bf16-mixed", ""), ("zero3", "32-true", LORA)]
TRAINED += [("ddp", "32-true", LORA), ("zero3", "32-true", FOUR_BITS), ("cp", "32-true", PIPELINE)]
TRAINED += [("pp_fsdp2", "32-true", PIPELINE), ("pp", "32-true", INTERLEAVED)]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "precision", "more"), tiers(TRAINED, TRAINED[:2]))
def test_the_estimate_of_a_runs_memory_is_that_of_its_training(
    flags: Any, tmp_path: Path, strategy: str, precision: str, more: str
) -> None:
    """State within 2 %, in pipelines 5 %; activations within a factor of two."""
    ranks, is_staged = PROCESSES[strategy], PIPELINE in more
    run("prepare", *flags)
    given = [*flags, *flags_of(strategy), *more.split(), ARCHITECTURE, "--data.seq_len=64"]
    given += [f"--trainer.precision={precision}", f"--trainer.devices={ranks}"]
    given += ["--trainer.max_steps=3", "--trainer.limit_val_batches=0"]
    callbacks = [State(tmp_path), *([] if is_staged else [Allocated(tmp_path)])]
    record = Workers(ranks).run(["fit", *given], tmp_path / "record", callbacks=callbacks).check()
    sharding, facts = figures_of(read_run(record.run))
    parts = sharding.memory(facts)
    measured = [json.loads(file.read_text()) for file in tmp_path.glob("state[0-9].json")]
    counted = [sum(parts[part] for part in STATE)] * ranks
    if is_staged:
        assert counted[0] == pytest.approx(max(measured), rel=0.05)
        assert ("unsharded gradients" in parts) == (ranks > 2)
        return
    adapted = ADAPTED * (LORA in more)
    assert facts.parameters == PARAMETERS + adapted and facts.trainable == (adapted or PARAMETERS)
    assert measured == pytest.approx(counted, rel=0.02), parts
    allocated = json.loads((tmp_path / "allocated0.json").read_text())
    ratio = allocated / (parts["activations"] + max(parts["logits"], parts["backward"]))
    assert 0.5 < ratio < 2.0, "UNDERCOUNTED in remedies.py is 1.6"


def llama_7b(strategy: dict[str, Any] | str = "ddp", world_size: int = 8, **keys: Any) -> History:
    """A run on GPUs; `keys` with "__" for dots."""
    config = CONFIG | {"trainer.strategy": strategy}
    config |= {key.replace("__", "."): value for key, value in keys.items()}
    facts = FACTS | {"machine.world_size": world_size}
    return History(Path("run"), config=nested(config), facts=nested(facts))


def a_strategy(name: str, **arguments: Any) -> dict[str, Any]:
    return {"class_path": f"{name}Strategy", "init_args": arguments}


def changes(history: History, memory: Any = None, **options: Any) -> dict[str, Change]:
    causes = remedies(memory_use(history, memory or {}, **options))
    return {change.key: change for cause in causes for change in cause.changes}


BATCH = "data.micro_batch_size"


def test_the_proposed_micro_batch_divides_and_fits() -> None:
    history = llama_7b(a_strategy("Mesh"), data__micro_batch_size=12)
    memory = {"used_gib": 79.0, "total_gib": 80.0, "asked_gib": 2.0}
    change = changes(history, memory, phase="backward")[BATCH]
    # 79 - 12.6 of state - 1.5 gathered + 2 requested = 67 grow with it; 5 must go: 6/12 of 67
    assert (change.now, change.to) == (12, 6) and change.note.endswith(", enough by itself")
    freed_gib = float(change.note.split()[1])
    assert freed_gib == pytest.approx(33.5, abs=1.5)
    assert changes(history, memory | {"used_gib": 79.9, "asked_gib": 60.0})[BATCH].to == 4


def test_remedies_in_effect_or_impossible_are_not_proposed() -> None:
    replicated = changes(llama_7b())
    assert {BATCH, "model.blocks.checkpointing", "config"} < replicated.keys()
    assert "trainer.precision" not in replicated
    assert "trainer.precision" in changes(llama_7b(trainer__precision="32-true"))
    small: Any = {"data__micro_batch_size": 1, "data__seq_len": 64, "data__global_batch_size": 1}
    slim = llama_7b(world_size=1, model__blocks__checkpointing="full", **small)
    slim.facts["machine"]["device"] = "cpu"
    assert changes(slim) == {}
    third = a_strategy("Zero", stage=3, offload_optimizer=True)
    replaced = changes(llama_7b(third, data__micro_batch_size=1))
    assert "trainer.strategy.init_args.stage" not in replaced
    fp16 = remedies(memory_use(llama_7b(trainer__precision="16-mixed"), {}))
    files = {change.to for cause in fp16 for change in cause.changes}
    assert "strategy/fsdp2" not in files, "limits/ refuses it"
