"""The estimate of memory, compared with the tensors of trainings, and the remedies that it leads to."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dist_template.parallel.estimates.plain import FILES
from dist_template.parallel.pipeline.stages import stages_per_rank
from dist_template.wings.diagnose import Change, History, read_run
from dist_template.wings.diagnose.memory import figures_of, parts_of
from dist_template.wings.diagnose.remedies import memory_use, remedies
from dist_template.wings.values import GIB
from tests.support.histories import nested
from tests.support.library import SCHEDULES
from tests.support.memory import State
from tests.support.runs import Workers, only_run, run
from tests.support.strategies import flags_of, settings_of
from tests.support.tiers import tiers

WIDTH, LAYERS, MLP, VOCAB, HEADS = 256, 4, 512, 257, 4
ARCHITECTURE = (
    f"{{model_type: llama, hidden_size: {WIDTH}, intermediate_size: {MLP}, num_hidden_layers: {LAYERS},"
    f" num_attention_heads: {HEADS}, num_key_value_heads: {HEADS}}}"
)
PARAMETERS = LAYERS * (4 * WIDTH**2 + 3 * WIDTH * MLP + 2 * WIDTH) + 2 * VOCAB * WIDTH + WIDTH
LLAMA_7B = 6_738_415_616
FACTS = {
    "parameters.total": LLAMA_7B,
    "parameters.embedding": 131_072_000,
    "model.layers": 32,
    "model.width": 4096,
    "model.heads": 32,
    "model.vocab_size": 32000,
    "machine.world_size": 8,
    "machine.device": "NVIDIA H100",
    "machine.supports_bf16": True,
}
CONFIG = {
    "data.seq_len": 4096,
    "data.micro_batch_size": 8,
    "data.global_batch_size": 64,
    "trainer.precision": "bf16-mixed",
    "model.architecture": {"intermediate_size": 11008},
}


class Estimate:
    """A run's strategy, and the figures that its memory is computed from."""

    def __init__(self, history: History) -> None:
        self.sharding, self.facts = figures_of(history)

    def state(self) -> dict[str, float]:
        return self.sharding.state(self.facts)


ADAPTERS = ["--model.adapter.rank=8"]
FOUR_BITS = [*ADAPTERS, "--model.adapter.quantize=nf4"]
STATE = ("weights", "gradients", "optimizer state")
PIPELINES: list[Any] = [
    ("pp", 2, []), ("pp_fsdp2", 4, []), ("pp", 2, ["--trainer.strategy.init_args.pp_schedule=Interleaved1F1B"]),
    ("cp", 2, []),
]  # fmt: skip
QUICKEST = [
    ("ddp", "32-true"),
    ("fsdp2", "bf16-mixed"),
    ("zero2", "bf16-mixed"),
    ("zero3", "32-true"),
]
OTHERS = [
    ("ddp", "bf16-true"), ("fsdp2", "bf16-true"), ("tp", "32-true"), ("zero1", "32-true"), ("zero1", "bf16-mixed"),
    ("zero2", "32-true"), ("zero3", "bf16-mixed"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "precision"),
    [*QUICKEST, *(pytest.param(*each, marks=pytest.mark.nightly) for each in OTHERS)],
)
def test_the_estimate_of_weights_gradients_and_optimizer_state_is_exact(
    flags: list[str], tmp_path: Path, strategy: str, precision: str
) -> None:
    run("prepare", *flags)
    flags = [
        *flags,
        *flags_of(strategy),
        "--trainer.devices=2",
        f"--model.architecture={ARCHITECTURE}",
    ]
    flags += [
        "--trainer.max_steps=2",
        "--trainer.limit_val_batches=0",
        f"--trainer.precision={precision}",
    ]
    with Workers(2) as workers:
        record = workers.run(
            ["fit", *flags], tmp_path / "record", callbacks=[State(tmp_path)]
        ).check()
    estimate = Estimate(read_run(record.run))
    adapted = sum(8 * (WIDTH + out) for out in (WIDTH,) * 4 + (MLP,) * 3) * LAYERS
    adapted *= any(flag.startswith("--model.adapter") for flag in flags)
    assert estimate.facts.parameters == PARAMETERS + adapted
    assert estimate.facts.trainable == (adapted or PARAMETERS)
    counted = estimate.state()
    expected = sum(counted[part] for part in ("weights", "gradients", "optimizer state"))
    for rank in range(2):
        measured = json.loads((tmp_path / f"state{rank}.json").read_text())
        assert measured == pytest.approx(expected, rel=0.02), {
            k: v / PARAMETERS for k, v in counted.items()
        }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "processes", "more"),
    tiers(PIPELINES, PIPELINES[:1]),
    ids=["pp", "pp_fsdp2", "interleaved", "cp"],
)
def test_the_estimate_of_a_stage_is_within_5_percent(
    flags: list[str], tmp_path: Path, strategy: str, processes: int, more: list[str]
) -> None:
    """The rank with most parameters counts."""
    run("prepare", *flags)
    flags = [
        *flags,
        *flags_of(strategy),
        f"--trainer.devices={processes}",
        "--data.global_batch_size=16",
    ]
    flags += ["--data.micro_batch_size=1", "--trainer.max_steps=2", "--trainer.limit_val_batches=0"]
    flags.append(f"--model.architecture={ARCHITECTURE}")
    with Workers(processes) as workers:
        options: Any = {"callbacks": [State(tmp_path)]}
        record = workers.run(["fit", *flags, *more], tmp_path / "record", **options).check()
    counted = Estimate(read_run(record.run)).state()
    measured = max(
        json.loads((tmp_path / f"state{rank}.json").read_text()) for rank in range(processes)
    )
    assert sum(counted[part] for part in STATE) == pytest.approx(measured, rel=0.05)
    in_ranks = processes > 2 and strategy != "cp"
    assert ("unsharded gradients" in counted) == in_ranks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "adapter"),
    tiers(
        [(s, a) for s in ("ddp", "fsdp2", "zero3") for a in (ADAPTERS, FOUR_BITS)],
        [("fsdp2", FOUR_BITS)],
    ),
)
def test_the_estimate_knows_frozen_and_4_bit_weights(
    flags: list[str], tmp_path: Path, strategy: str, adapter: list[str]
) -> None:
    test_the_estimate_of_weights_gradients_and_optimizer_state_is_exact(
        [*flags, *adapter], tmp_path, strategy, "32-true"
    )


@pytest.mark.parametrize(
    ("model", "precision"),
    [("llama", "32-true"), ("llama", "bf16-mixed"), ("deepseek_v3", "32-true")],
)
def test_the_estimate_of_activations_is_within_a_factor_of_two(
    flags: list[str], tmp_path: Path, model: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ratio is printed with -s. Routing and latent attention are not estimated."""
    from trainer_dev.module import LanguageModule

    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter) and tensor.data_ptr() not in weights:
            storage = tensor.untyped_storage()
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    step = LanguageModule.training_step
    weights: set[int] = set()

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        weights.update(p.data_ptr() for p in self.parameters())
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            return step(self, batch, batch_idx)

    monkeypatch.setattr(LanguageModule, "training_step", training_step)
    architecture = [f"--model.architecture={ARCHITECTURE}"] if model == "llama" else []
    flags = [flag for flag in flags if "architecture" not in flag] + architecture
    flags += ["--trainer.max_steps=1", "--trainer.limit_val_batches=0", "--data.seq_len=64"]
    flags += [f"--trainer.precision={precision}"]
    assert run("fit", *flags) == 0
    estimate = Estimate(read_run(only_run(tmp_path)))
    parts = estimate.sharding.memory(estimate.facts)
    # of three tensors, forward keeps the log-probabilities
    ratio = sum(kept.values()) / (parts["activations"] + parts["logits"] / 3)
    print(
        f"{model} {precision}: autograd keeps {sum(kept.values()) / 2**20:.2f} MiB, {ratio:.2f} of what is counted"
    )
    assert 0.5 < ratio < 2.0


def llama_7b(strategy: dict[str, Any] | str = "ddp", world_size: int = 8, **keys: Any) -> History:
    """A run on GPUs; `keys` with "__" for dots."""
    config = (
        CONFIG
        | {"trainer.strategy": strategy}
        | {key.replace("__", "."): value for key, value in keys.items()}
    )
    return History(
        Path("run"), config=nested(config), facts=nested(FACTS | {"machine.world_size": world_size})
    )


def mesh(**arguments: Any) -> dict[str, Any]:
    return {"class_path": "MeshStrategy", "init_args": arguments}


def zero(**arguments: Any) -> dict[str, Any]:
    return {"class_path": "ZeroStrategy", "init_args": arguments}


def changes(
    history: History, memory: dict[str, Any] | None = None, **options: Any
) -> dict[str, Change]:
    causes = remedies(memory_use(history, memory or {}, **options))
    return {change.key: change for cause in causes for change in cause.changes}


def freed_gib(change: Change) -> float:
    return float(change.note.split()[1])


def test_the_proposed_micro_batch_divides_and_fits() -> None:
    history = llama_7b(mesh(), data__micro_batch_size=12)
    memory = {"used_gib": 79.0, "total_gib": 80.0, "asked_gib": 2.0}
    change = changes(history, memory, phase="backward")["data.micro_batch_size"]
    # 79 - 12.6 of state - 1.5 gathered + 2 requested = 67 grow with it; 5 must go, and 6/12 of 67 is the first to do
    assert (change.now, change.to) == (12, 6) and change.note.endswith(", enough by itself")
    assert freed_gib(change) == pytest.approx(33.5, abs=1.5)
    assert (
        changes(history, memory | {"used_gib": 79.9, "asked_gib": 60.0})["data.micro_batch_size"].to
        == 4
    )


def test_remedies_in_effect_or_impossible_are_not_proposed() -> None:
    replicated = changes(llama_7b())
    assert {"data.micro_batch_size", "model.blocks.checkpointing"} < replicated.keys()
    assert "trainer.precision" not in replicated
    assert "trainer.precision" in changes(llama_7b(trainer__precision="32-true"))
    slim = llama_7b(
        world_size=1, data__micro_batch_size=1, data__seq_len=64, data__global_batch_size=1,
        model__blocks__checkpointing="full",
    )  # fmt: skip
    slim.facts["machine"]["device"] = "cpu"
    assert changes(slim) == {}
    files = [
        c.to
        for cause in remedies(memory_use(llama_7b(), {}))
        for c in cause.changes
        if c.key == "config"
    ]
    assert files == ["configs/strategy/fsdp2.yaml", "configs/strategy/zero2.yaml"]
    third = changes(llama_7b(zero(stage=3, offload_optimizer=True), data__micro_batch_size=1))
    assert "trainer.strategy.init_args.stage" not in third
    fp16 = remedies(memory_use(llama_7b(trainer__precision="16-mixed"), {}))
    assert "configs/strategy/fsdp2.yaml" not in {c.to for cause in fp16 for c in cause.changes}, (
        "limits/ refuses it"
    )


def test_savings_follow_from_the_formulas() -> None:
    found = changes(llama_7b(zero(stage=2)))
    gib = LLAMA_7B / GIB
    # stage 3: 7/8 of the 2 bytes of weights, one bucket of 0.4 GB less, and gathered weights, 1e9 x 2 bytes, more
    assert freed_gib(found["trainer.strategy.init_args.stage"]) == pytest.approx(
        gib * 2 * 7 / 8 + (0.4 - 2) / 1.0737, 0.01
    )
    # offload: 4 bytes of gradients and 12 of optimizer state of an eighth
    assert freed_gib(found["trainer.strategy.init_args.offload_optimizer"]) == pytest.approx(
        gib * 16 / 8, 0.01
    )


def test_a_stage_keeps_what_its_schedule_has_in_flight() -> None:
    """32 blocks on 4 ranks and 16 micro-batches: the figures of the schedules' papers, in blocks of a micro-batch."""
    kept = {}
    for schedule, per_rank in (("1F1B", 1), ("Interleaved1F1B", 2)):
        history = llama_7b(mesh(pp_size=4, pp_schedule=schedule), 4, data__global_batch_size=128)
        stages = [[rank, rank + 4][:per_rank] for rank in range(4)]
        number = 4 * per_rank
        pipeline = {"schedule": schedule, "stages": stages, "blocks": [32 // number] * number}
        history.facts["pipeline"] = pipeline | {"parameters": [LLAMA_7B / number] * number}
        estimate = Estimate(history)
        kept[schedule] = estimate.sharding.layers_kept(estimate.facts)
    assert kept == {"1F1B": 8 * 4, "Interleaved1F1B": 8 * 5.5}
    replicated = llama_7b(mesh(pp_size=4), 8, data__global_batch_size=128)
    stages = {
        "stages": [[0], [1], [2], [3]],
        "blocks": [8] * 4,
        "parameters": [10**9, 10**9, 10**9, 2 * 10**9],
    }
    replicated.facts["pipeline"] = {"schedule": "1F1B"} | stages
    stage = Estimate(replicated).state()
    assert stage["weights"] == 4 * 10**9 and stage["unsharded gradients"] == 8 * 10**9, (
        "of the largest, on two ranks"
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_micro_batches_in_flight_match_torchs_orders(schedule: Any) -> None:
    moves = {"F": 1, "B": -1}
    for ranks, micro_batches in ((2, 4), (4, 8), (4, 16), (8, 32)):
        v = stages_per_rank(schedule, 3)
        stages: Any = [
            SimpleNamespace(stage_index=n, num_stages=ranks * v, group_size=ranks, group_rank=0, is_first=n == 0,
                            is_last=False, submod=None) for n in range(0, ranks * v, ranks)
        ]  # fmt: skip
        made = SCHEDULES[schedule](
            stages if v > 1 else stages[0], micro_batches, print, scale_grads=False
        )
        most, facts = (
            {},
            {"schedule": schedule, "blocks": [1] * ranks * v, "parameters": [1] * ranks * v},
        )
        for rank, actions in made.pipeline_order.items():
            sizes = [moves.get(action.computation_type.value, 0) for action in actions if action]
            most[rank] = max(accumulate(sizes)) / v
        history = llama_7b(mesh(pp_size=ranks), ranks, data__global_batch_size=8 * micro_batches)
        own = [[*range(rank, ranks * v, ranks)] for rank in range(ranks)]
        history.facts["pipeline"] = facts | {"stages": own}
        made, last = (
            Estimate(history),
            next(n for n, each in enumerate(own) if ranks * v - 1 in each),
        )
        sharding: Any = made.sharding
        found = sharding.stages(made.facts)
        assert (found.kept, found.kept_at_end) == pytest.approx((max(most.values()), most[last]))
        owner = {stage: rank for rank, each in enumerate(own) for stage in each}
        assert found.crossings == sum(owner[n] != owner[n + 1] for n in range(len(owner) - 1))


def test_gradients_of_an_accumulation_are_counted_where_they_are_kept() -> None:
    """4 bytes a parameter, and none without an accumulation (docs/strategies/ddp.md and fsdp2.md)."""
    accumulating: Any = {"data__global_batch_size": 512}
    assert Estimate(llama_7b(**accumulating)).state()["communication buffers"] == 4 * LLAMA_7B
    assert "communication buffers" not in Estimate(llama_7b()).state()
    strategy = mesh(reduce_each_micro_batch=False)
    assert (
        Estimate(llama_7b(strategy, **accumulating)).state()["unsharded gradients"] == 4 * LLAMA_7B
    )
    key, gib = "trainer.strategy.init_args.reduce_each_micro_batch", LLAMA_7B / GIB
    assert freed_gib(changes(llama_7b(strategy, **accumulating))[key]) == pytest.approx(
        4 * gib, 0.01
    )
    assert key not in changes(llama_7b(strategy)), "nothing to save"


@pytest.mark.parametrize(
    ("name", "world_size", "axes", "data_parallel"),
    [
        ("ddp", 4, ["ddp"], 4),
        ("fsdp2", 4, ["fsdp"], 4),
        ("hsdp", 8, ["fsdp"], 8),
        ("fsdp2_tp", 8, ["fsdp", "tp"], 4),
        ("cp", 8, ["fsdp", "cp"], 4),
        ("pp_ep", 16, ["fsdp", "ep", "pp"], 8),
        ("zero3_offload", 2, ["zero3"], 2),
    ],
)
def test_shipped_strategies_are_understood(
    name: str, world_size: int, axes: list[str], data_parallel: int
) -> None:
    estimate = Estimate(llama_7b(settings_of(name), world_size))
    assert estimate.sharding.axes(world_size) == axes
    assert estimate.sharding.data_parallel(world_size) == data_parallel
    assert (estimate.sharding.on_host(estimate.facts) != (0, 0)) == ("offload" in name)


@pytest.mark.parametrize("file", FILES)
def test_a_proposed_strategy_is_estimated_as_its_file(file: str) -> None:
    strategy = settings_of(Path(file).stem)
    assert parts_of(llama_7b(), {"config": file}) == parts_of(llama_7b(strategy))
