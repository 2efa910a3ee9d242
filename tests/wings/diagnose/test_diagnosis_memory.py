"""The estimate of memory against the tensors of trainings, and the remedies that it leads to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_dev.module import LanguageModule

from dist_template.wings.diagnose import Change, History, read_run
from dist_template.wings.diagnose.memory import figures_of
from dist_template.wings.diagnose.remedies import memory_use, remedies
from dist_template.wings.values import GIB
from tests.support.histories import nested
from tests.support.memory import State
from tests.support.runs import Workers, only_run, run
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
FACTS = {"parameters.total": LLAMA_7B, "parameters.embedding": 131_072_000, "model.layers": 32}
FACTS |= {"model.width": 4096, "model.heads": 32, "model.vocab_size": 32000}
GPU = {"machine.device": "NVIDIA H100", "machine.supports_bf16": True}
CONFIG: dict[str, Any] = {
    "data.seq_len": 4096,
    "data.micro_batch_size": 8,
    "data.global_batch_size": 64,
}
CONFIG |= {"trainer.precision": "bf16-mixed", "model.architecture": {"intermediate_size": 11008}}


class Estimate:
    """A run's strategy, and the figures that its memory is computed from."""

    def __init__(self, history: History) -> None:
        self.sharding, self.facts = figures_of(history)

    def state(self) -> dict[str, float]:
        return self.sharding.state(self.facts)


STATE = ("weights", "gradients", "optimizer state")
LORA = "--model.adapter.rank=8"
FOUR_BITS = f"{LORA} --model.adapter.quantize=nf4"
WHOLE = {"ddp": "32-true bf16-true", "fsdp2": "bf16-mixed bf16-true", "tp": "32-true"}
WHOLE |= {f"zero{stage}": "bf16-mixed 32-true" for stage in (1, 2, 3)}
TRAINED = [(name, each, "") for name, precisions in WHOLE.items() for each in precisions.split()]
ADAPTERS = (LORA, FOUR_BITS)
TRAINED += [(name, "32-true", each) for name in ("ddp", "fsdp2", "zero3") for each in ADAPTERS]
DAILY = [("fsdp2", "bf16-mixed", ""), ("zero3", "32-true", ""), ("fsdp2", "32-true", FOUR_BITS)]
INTERLEAVED = "--trainer.strategy.init_args.pp_schedule=Interleaved1F1B"
STAGED = [("pp", 2, ""), ("pp_fsdp2", 4, ""), ("pp", 2, INTERLEAVED), ("cp", 2, "")]


def trained(
    flags: Any, folder: Path, strategy: str, ranks: int, more: str
) -> tuple[Any, list[float]]:
    """The estimate of a run, and the bytes of each rank."""
    run("prepare", *flags)
    flags = [*flags, *flags_of(strategy), *more.split(), ARCHITECTURE, f"--trainer.devices={ranks}"]
    flags += ["--trainer.max_steps=2", "--trainer.limit_val_batches=0"]
    with Workers(ranks) as workers:
        own: Any = {"callbacks": [State(folder)]}
        record = workers.run(["fit", *flags], folder / "record", **own).check()
    measured = [json.loads(file.read_text()) for file in folder.glob("state[0-9].json")]
    assert len(measured) == ranks
    return Estimate(read_run(record.run)), measured


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "precision", "adapter"), tiers(TRAINED, DAILY))
def test_the_estimate_of_weights_gradients_and_optimizer_state_is_exact(
    flags: Any, tmp_path: Path, strategy: str, precision: str, adapter: str
) -> None:
    more = f"{adapter} --trainer.precision={precision}"
    estimate, measured = trained(flags, tmp_path, strategy, 2, more)
    assert estimate.facts.parameters == PARAMETERS + ADAPTED * bool(adapter)
    assert estimate.facts.trainable == (ADAPTED if adapter else PARAMETERS)
    counted = estimate.state()
    expected = sum(counted[part] for part in STATE)
    assert measured == pytest.approx([expected] * 2, rel=0.02), counted


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "processes", "more"), tiers(STAGED, STAGED[:1]))
def test_the_estimate_of_a_stage_is_within_5_percent(
    flags: Any, tmp_path: Path, strategy: str, processes: int, more: str
) -> None:
    more += " --data.global_batch_size=16 --data.micro_batch_size=1"
    estimate, measured = trained(flags, tmp_path, strategy, processes, more)
    counted = estimate.state()
    assert sum(counted[part] for part in STATE) == pytest.approx(max(measured), rel=0.05)
    assert ("unsharded gradients" in counted) == (processes > 2)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_the_estimate_of_activations_is_within_a_factor_of_two(
    flags: Any, tmp_path: Path, precision: str, monkeypatch: Any
) -> None:
    """The ratio is printed with -s."""
    kept: dict[int, int] = {}
    weights: set[int] = set()

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter) and tensor.data_ptr() not in weights:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    step = LanguageModule.training_step

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        weights.update(p.data_ptr() for p in self.parameters())
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            return step(self, batch, batch_idx)

    monkeypatch.setattr(LanguageModule, "training_step", training_step)
    own = [ARCHITECTURE, f"--trainer.precision={precision}", "--data.seq_len=64"]
    assert run("fit", *flags, *own, "--trainer.max_steps=1", "--trainer.limit_val_batches=0") == 0
    estimate = Estimate(read_run(only_run(tmp_path)))
    parts = estimate.sharding.memory(estimate.facts)
    # of three tensors, forward keeps the log-probabilities
    ratio = sum(kept.values()) / (parts["activations"] + parts["logits"] / 3)
    print(f"{precision}: autograd keeps {ratio:.2f} of what is counted")
    assert 0.5 < ratio < 2.0


def llama_7b(strategy: dict[str, Any] | str = "ddp", world_size: int = 8, **keys: Any) -> History:
    """A run on GPUs; `keys` with "__" for dots."""
    config = CONFIG | {"trainer.strategy": strategy}
    config |= {key.replace("__", "."): value for key, value in keys.items()}
    facts = FACTS | GPU | {"machine.world_size": world_size}
    return History(Path("run"), config=nested(config), facts=nested(facts))


def mesh(**arguments: Any) -> dict[str, Any]:
    return {"class_path": "MeshStrategy", "init_args": arguments}


def zero(**arguments: Any) -> dict[str, Any]:
    return {"class_path": "ZeroStrategy", "init_args": arguments}


def changes(history: History, memory: Any = None, **options: Any) -> dict[str, Change]:
    causes = remedies(memory_use(history, memory or {}, **options))
    return {change.key: change for cause in causes for change in cause.changes}


def freed_gib(change: Change) -> float:
    return float(change.note.split()[1])


BATCH, OF_MESH = "data.micro_batch_size", "trainer.strategy.init_args"
GIB_7B = LLAMA_7B / GIB


def test_the_proposed_micro_batch_divides_and_fits() -> None:
    history = llama_7b(mesh(), data__micro_batch_size=12)
    memory = {"used_gib": 79.0, "total_gib": 80.0, "asked_gib": 2.0}
    change = changes(history, memory, phase="backward")[BATCH]
    # 79 - 12.6 of state - 1.5 gathered + 2 requested = 67 grow with it; 5 must go: 6/12 of 67
    assert (change.now, change.to) == (12, 6) and change.note.endswith(", enough by itself")
    assert freed_gib(change) == pytest.approx(33.5, abs=1.5)
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
    third = changes(llama_7b(zero(stage=3, offload_optimizer=True), data__micro_batch_size=1))
    assert f"{OF_MESH}.stage" not in third
    fp16 = remedies(memory_use(llama_7b(trainer__precision="16-mixed"), {}))
    files = {change.to for cause in fp16 for change in cause.changes}
    assert "strategy/fsdp2" not in files, "limits/ refuses it"
