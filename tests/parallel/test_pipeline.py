"""A pipeline trains to the numbers of one process; its bubble is what torch's schedules wait."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from dist_template import InputError
from dist_template.checkpoint import manifest
from dist_template.parallel.mesh.pipeline import partition
from dist_template.parallel.mesh.pipeline.division import BlockProxy, Division, StagePass
from dist_template.parallel.mesh.pipeline.schedule import SCHEDULES
from dist_template.parallel.mesh.pipeline.stages import (
    needed_micro_batches,
    stage_facts,
    stages_of_rank,
    stages_per_rank,
)
from dist_template.wings.rehearse.record import RunRecord
from tests.support.parity import MODELS, PauseAfter, Trainings, assert_close, assert_trains_alike
from tests.support.runs import newest
from tests.support.strategies import ARGS
from tests.support.tiers import tiers

# four blocks, for up to four stages; tied weights, so that the first and the last stage share one
MODELS["llama_of_4"] = MODELS["llama"].replace("hidden_layers: 2", "hidden_layers: 4")
MODELS["llama_of_8"] = MODELS["llama"].replace("hidden_layers: 2", "hidden_layers: 8")
EXPERTS = (  # with an auxiliary loss
    "hidden_size: 36, intermediate_size: 20, num_hidden_layers: 4, num_attention_heads: 6,"
    " num_key_value_heads: 2, num_experts_per_tok: 2, router_aux_loss_coef: 0.01"
)
MODELS |= {
    "qwen3_of_4": MODELS["llama_of_4"].replace("llama", "qwen3"),
    "mixtral_of_4": f"{{model_type: mixtral, num_local_experts: 4, {EXPERTS}}}",
    "qwen2_moe_of_4": f"{{model_type: qwen2_moe, num_experts: 4, {EXPERTS},"
    " moe_intermediate_size: 20, shared_expert_intermediate_size: 12, decoder_sparse_step: 1}",
    "qwen3_moe_of_4": f"{{model_type: qwen3_moe, num_experts: 4, {EXPERTS},"
    " moe_intermediate_size: 20, head_dim: 6}",
}
for name in ("deepseek_v3", "mtp"):
    MODELS[f"{name}_of_4"] = MODELS[name].replace("hidden_layers: 2", "hidden_layers: 4")


def by(schedule: str) -> str:
    return f"{ARGS}.pp_schedule={schedule}"


INTERLEAVED, ZBV, DUAL = by("Interleaved1F1B"), by("ZBVZeroBubble"), by("DualPipeV")
ZERO_BUBBLE = by("InterleavedZeroBubble")
FULL, CHUNKS = "--model.blocks.checkpointing=full", "--model.loss_chunk=16"
ROUTERS = [f"--model.balance.{name}_coef=0.01" for name in ("aux_loss", "sequence_loss", "z_loss")]
AUX = ROUTERS[0]
MTP = [*ROUTERS, "--model.mtp.weight=0.3"]  # two modules that predict, with routers of their own
CASES = {  # model, strategy, processes, flags
    "qwen3": ("qwen3_of_4", "pp", 2, []),
    "4 stages": ("llama_of_4", "pp", 4, [f"{ARGS}.pp_size=4"]),
    "interleaved": ("llama_of_4", "pp", 2, [INTERLEAVED]),
    "tensor parallelism": ("llama_of_4", "pp", 4, [f"{ARGS}.tp_size=2"]),
    "HSDP": ("llama_of_4", "pp", 4, []),
    "interleaved and FSDP2": ("llama_of_4", "pp_fsdp2", 4, [INTERLEAVED]),
    "uneven stages": ("llama_of_4", "pp", 2, [f"{ARGS}.pp_layers=[3, 1]"]),
    "interleaved, routers, checkpointing": ("mixtral_of_4", "pp", 2, [INTERLEAVED, FULL]),
    "other routers": ("qwen2_moe_of_4", "pp", 2, []),
    "GPipe": ("llama_of_4", "pp", 2, [by("GPipe"), FULL]),
    "GPipe, MTP": ("mtp_of_4", "pp", 2, [by("GPipe"), *MTP]),
    "GPipe and FSDP2": ("llama_of_4", "pp_fsdp2", 4, [by("GPipe")]),
    "zero bubble, routers, checkpointing": ("qwen3_moe_of_4", "pp", 2, [ZERO_BUBBLE, AUX, FULL]),
    "ZBV, MTP, chunks": ("mtp_of_4", "pp", 2, [ZBV, *MTP, CHUNKS]),
    "DualPipeV": ("llama_of_4", "pp", 2, [DUAL]),
    "DualPipeV, checkpointing": ("llama_of_4", "pp", 2, [DUAL, FULL]),
    "DualPipeV, 4 ranks": ("llama_of_8", "pp", 4, [DUAL, f"{ARGS}.pp_size=4"]),
    "ZBV, 4 ranks": ("llama_of_8", "pp", 4, [ZBV, f"{ARGS}.pp_size=4"]),
    "DualPipeV, uneven": ("llama_of_8", "pp", 2, [DUAL, f"{ARGS}.pp_layers=[1, 3, 2, 2]"]),
}
SPLITTING = {"zero bubble": ZERO_BUBBLE, "ZBV": ZBV, "DualPipeV": DUAL}
for name, schedule in SPLITTING.items():
    CASES |= {
        f"{name}, MTP": ("mtp_of_4", "pp", 2, [schedule, *MTP]),
        f"{name}, MTP, checkpointing": ("mtp_of_4", "pp", 2, [schedule, *MTP, FULL]),
        f"{name}, routers": ("qwen3_moe_of_4", "pp", 2, [schedule, AUX]),
        f"{name}, chunks": ("llama_of_4", "pp", 2, [schedule, CHUNKS]),
        f"{name}, adapters": ("llama_of_4", "pp", 2, [schedule, "--model.adapter={rank: 4}"]),
        f"{name}, tensor parallelism": ("qwen3_of_4", "pp", 4, [schedule, f"{ARGS}.tp_size=2"]),
        f"{name} and FSDP2": ("llama_of_4", "pp_fsdp2", 4, [schedule]),
        f"{name}, expert parallelism": ("deepseek_v3_of_4", "pp_ep", 4, [schedule, *ROUTERS]),
        f"{name}, sequences": ("llama_of_4", "pp_fsdp2", 4, [schedule, f"{ARGS}.cp_size=2"]),
    }
DAILY = ["4 stages", "interleaved, routers, checkpointing", "GPipe", "DualPipeV"]
DAILY += ["zero bubble, routers, checkpointing", "ZBV, MTP, chunks"]


@pytest.mark.slow
@pytest.mark.parametrize("case", tiers(CASES, DAILY))
def test_a_pipeline_trains_to_the_numbers_of_one_process(train: Trainings, case: str) -> None:
    model, strategy, processes, flags = CASES[case]
    of_one = [flag for flag in flags if not flag.startswith(ARGS)]
    one = train(model, "one", *of_one, accumulation=4)
    many = train(model, strategy, *flags, accumulation=4, processes=processes)
    assert_close(many.start, one.start, 0.0)
    assert_trains_alike(many, one)


@pytest.mark.slow
def test_a_pipeline_trains_with_the_users_list_of_layers(train: Trainings) -> None:
    one = train("llama_of_4", "one", accumulation=4)
    many = train("llama_of_4", "pp", f"{ARGS}.pp_layers=[1, 3]", accumulation=4)
    assert json.loads((many.run / "facts.json").read_text())["pipeline"]["blocks"] == [1, 3]
    assert_close(many.start, one.start, 0.0)
    assert_trains_alike(many, one)


FEATURES = {  # model, flags, tolerance of the loss
    "losses of routers": ("deepseek_v3", ROUTERS, 1e-6),
    "adapters and chunks": ("llama_of_4", ["--model.adapter={rank: 4}", CHUNKS], 1e-6),
    "compile": ("llama_of_4", ["--model.blocks.compile=true"], 1e-5),
    "selective": ("llama_of_4", ["--model.blocks.checkpointing=selective"], 1e-6),
    "bf16-mixed": ("llama_of_4", ["--trainer.precision=bf16-mixed"], 3e-2),
    "bf16-true": ("llama_of_4", ["--trainer.precision=bf16-true"], 3e-2),
}


@pytest.mark.slow
@pytest.mark.parametrize("feature", tiers(FEATURES, ["losses of routers", "adapters and chunks"]))
def test_what_a_training_step_can_have_works_in_stages(train: Trainings, feature: str) -> None:
    model, flags, tolerance = FEATURES[feature]
    one, many = (train(model, each, *flags, accumulation=4) for each in ("one", "pp"))
    assert many.loss == pytest.approx(one.loss, rel=tolerance)
    assert many.grad_norm == pytest.approx(one.grad_norm, rel=10 * tolerance)


@pytest.mark.slow
def test_a_checkpoint_is_resumed_exactly_and_on_other_numbers_of_stages(train: Trainings) -> None:
    def fit(strategy: str, *flags: str, **options: Any) -> RunRecord:
        return train.run("fit", "llama_of_4", strategy, *flags, accumulation=4, **options)

    whole = fit("pp", "--last_checkpoint.every_n_steps=3", "--last_checkpoint.keep=2")
    middle = f"--ckpt_path={whole.run / 'checkpoints' / manifest.name(3)}"
    rest = {step: whole.loss[step] for step in (4, 5, 6)}
    assert fit("pp", middle).loss == rest, "the same stages: the same bits"
    fsdp2 = fit("fsdp2", middle, callbacks=[PauseAfter(4)])
    four = fit("pp", f"{ARGS}.pp_size=4", f"--ckpt_path={newest(fsdp2.run)}", processes=4)
    assert fsdp2.loss | four.loss == pytest.approx(rest, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", tiers(["DualPipeV", "ZBVZeroBubble"], ["DualPipeV"]))
def test_a_checkpoint_of_a_v_is_resumed_exactly_and_by_one_process(
    train: Trainings, schedule: str
) -> None:
    def fit(strategy: str, *flags: str) -> RunRecord:
        return train.run("fit", "llama_of_4", strategy, *flags, accumulation=4)

    whole = fit("pp", by(schedule), "--last_checkpoint.every_n_steps=3", "--last_checkpoint.keep=2")
    middle = f"--ckpt_path={whole.run / 'checkpoints' / manifest.name(3)}"
    rest = {step: whole.loss[step] for step in (4, 5, 6)}
    assert fit("pp", by(schedule), middle).loss == rest, "the same stages: the same bits"
    assert fit("one", middle).loss == pytest.approx(rest, rel=1e-6)


class Passes(Callback):
    """Writes of the first step how often a rank ran its blocks, and the most message buffers that
    it had at once."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls, self.most = folder, 0, 0

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        pipeline: Any = trainer.strategy.layers  # ty: ignore[missing-attribute]

        def count(*_: Any) -> None:
            stages = [stage for _, own in pipeline._schedules.values() for stage in own]
            found = [*(s.args_recv_info for s in stages), *(s.grad_recv_info for s in stages)]
            infos = [info for each in found for infos in each.values() for info in infos]
            buffers = [getattr(info, "buffer", None) for info in infos]
            self.calls += bool(stages)  # not in the forward pass that finds the messages' sizes
            exist = [each is not None and not each.is_meta for each in buffers]
            self.most = max(self.most, sum(exist))

        for name, module in pl_module.model.named_modules():
            if name.endswith("self_attn"):
                module.register_forward_pre_hook(count)

    def on_before_optimizer_step(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        path = self.folder / f"passes-{trainer.global_rank}.json"
        path.write_text(json.dumps([self.calls, self.most]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "passes"), tiers([("1F1B", 2), ("ZBVZeroBubble", 3)], [("ZBVZeroBubble", 3)])
)
def test_a_stage_recomputes_its_blocks_once_a_pass_and_keeps_buffers_of_messages_on_their_way(
    train: Trainings, tmp_path: Path, schedule: str, passes: int
) -> None:
    callbacks = [PauseAfter(1), Passes(tmp_path)]
    options: Any = {"accumulation": 8, "callbacks": callbacks}
    train.run("fit", "llama_of_4", "pp", by(schedule), FULL, **options)
    for rank in (0, 1):
        calls, most = json.loads((tmp_path / f"passes-{rank}.json").read_text())
        assert 2 * 16 <= calls <= passes * 16, "a rank has two of four blocks, and 8 micro-batches"
        assert 0 < most <= 4


class Sequence(nn.Module):
    """A model of one's own: an embedding, blocks, an output layer."""

    def __init__(self, sizes: tuple[int, ...] = (8, 8, 8, 8)) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        blocks = [nn.Sequential(nn.Linear(8, n), nn.Linear(n, 8)) for n in sizes]
        self.layers = nn.ModuleList(blocks)
        self.head = nn.Linear(8, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def test_stages_get_blocks_by_their_cost() -> None:
    assert partition.blocks_of_stages(Sequence(), 2, "even") == [2, 2]
    assert partition.blocks_of_stages(Sequence((8,) * 8), 3, "even") == [3, 2, 3]
    assert partition.blocks_of_stages(Sequence(), 2, "cost") == [2, 2], "the head is half a block"
    big_head = Sequence()
    big_head.head = nn.Linear(8, 60)
    assert partition.blocks_of_stages(big_head, 2, "cost") == [3, 1]
    assert partition.blocks_of_stages(Sequence(), 2, [1, 3]) == [1, 3]
    wrong: list[tuple[int, Any, str]] = [
        (2, [1, 2], r"pp_layers \[1, 2\] sums to 3: give 2 numbers .* sum to the model's 4 blocks"),
        (2, [4, 0], "gives a stage 0 blocks: give 2 numbers of 1 or more"),
        (3, [2, 2], "has 2 numbers: give 3 numbers"),
        (5, "even", "4 blocks cannot be divided into 5 stages .*: set .*init_args.pp_size lower"),
    ]
    for stages, layers, words in wrong:
        with pytest.raises(InputError, match=words):
            partition.blocks_of_stages(Sequence(), stages, layers)


def test_each_stage_of_a_users_own_model_computes_its_part() -> None:
    torch.manual_seed(0)
    whole, tokens = Sequence(), torch.tensor([[1, 2, 3]])
    expected, hidden = whole(tokens), None
    for stage, bounds in enumerate([(0, 1), (1, 3), (3, 4)]):
        torch.manual_seed(0)
        part = Sequence()
        division = Division(part, [(0, 1), (1, 3), (3, 4)], [stage], torch.device("cpu"))
        division.gate(part)
        with division.stage.running(bounds, hidden, ends_step=False):
            output = part(tokens)
        hidden = division.stage.sent
        if stage > 0:  # Llama-4 reads it on every rank
            assert part.embedding.weight.device.type == "cpu", "of this rank, not of a parameter"
        here = sum(parameter.numel() for parameter in part.parameters())
        assert here < sum(parameter.numel() for parameter in whole.parameters()) / 2
    assert hidden is None and torch.equal(output, expected)


def test_a_block_that_returns_more_than_hidden_states_is_refused() -> None:
    class Pair(nn.Linear):
        def forward(self, input: Tensor) -> Any:
            return super().forward(input), None

    stage = StagePass(2)
    with (
        stage.running((0, 1), None, True),
        pytest.raises(InputError, match="and Pair returns a tuple: set .*pp_size to 1"),
    ):
        BlockProxy(Pair(2, 2), 0, stage)(torch.zeros(1, 2))


# of time: forward, gradients of inputs, of weights, of both
UNITS = {"F": 1, "I": 1, "W": 1, "B": 2}
Pass = tuple[int, str, int]  # stage, kind, micro-batch


def orders(name: Any, ranks: int, per_rank: int, micro_batches: int) -> list[list[Pass]]:
    """Returns each rank's passes in torch's order."""
    num = ranks * per_rank
    rest: Any = {"num_stages": num, "group_size": ranks, "group_rank": 0}
    rest |= {"is_last": False, "submod": None}
    indices = stages_of_rank(name, 0, ranks, per_rank)
    stages: Any = [SimpleNamespace(stage_index=i, is_first=i == 0, **rest) for i in indices]
    given = stages if per_rank > 1 else stages[0]
    schedule = SCHEDULES[name](given, micro_batches, lambda loss, _: loss, scale_grads=False)
    found: list[list[Pass]] = []
    for rank, actions in schedule.pipeline_order.items():
        passes = [part for each in actions if each for part in each.sub_actions or [each]]
        forwards: dict[int, int] = {}
        found.append([])
        for stage, computation, number, *_ in passes:
            kind = computation.value
            if kind == "F":  # torch's table of 1F1B misnumbers the last rank's
                number = forwards[stage] = forwards.get(stage, -1) + 1
            if kind in UNITS:
                assert stage in stages_of_rank(name, rank, ranks, per_rank)
                found[-1].append((stage, kind, number))
    return found


def waiting(name: str, ranks: int, per_rank: int, micro_batches: int) -> float:
    """Returns the time of a step above the time of its passes, in parts of the latter."""
    last, todo = ranks * per_rank - 1, orders(name, ranks, per_rank, micro_batches)
    done: dict[Pass, int] = {}
    clocks = [0] * ranks
    for _ in range(2 * sum(map(len, todo))):
        for rank, passes in enumerate(todo):
            if not passes:
                continue
            stage, kind, number = passes[0]
            needs = [(stage - 1, "F", number)] * (stage > 0)
            if kind == "W":
                needs = [(stage, "I", number)]
            elif kind != "F":  # gradients of inputs, alone or with the weights'
                needs = [(stage, "F", number)] + [(stage + 1, "I", number)] * (stage < last)
                kind = "I"
            if all(need in done for need in needs):
                start = max([clocks[rank], *(done[need] for need in needs)])
                clocks[rank] = done[stage, kind, number] = start + UNITS[passes.pop(0)[1]]
    assert not any(todo), "an order that cannot run"
    busy = 3 * micro_batches * per_rank
    return (max(clocks) - busy) / busy


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_bubble_is_what_a_schedule_waits(name: str) -> None:
    for per_rank in {stages_per_rank(name, 2), stages_per_rank(name, 3)}:
        for ranks in (2, 4, 8):
            for micro_batches in (2 * ranks, 3 * ranks, 8 * ranks):
                bubble = stage_facts(name, ranks, per_rank, [], [])["bubble"] / micro_batches
                found = waiting(name, ranks, per_rank, micro_batches)
                assert found == pytest.approx(bubble), (ranks, per_rank)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_runs_with_the_micro_batches_that_it_is_said_to_need(name: str) -> None:
    for ranks in (2, 3, 4, 8):
        per_rank = stages_per_rank(name, 2)
        least, multiple = needed_micro_batches(name, ranks)
        for micro_batches in (least, least + multiple, least + 3 * multiple):
            assert waiting(name, ranks, per_rank, micro_batches) >= 0
        if least > multiple:
            with pytest.raises(ValueError, match="icrobatches"):
                orders(name, ranks, per_rank, least - 1)


def test_a_rank_has_the_stages_of_its_schedule() -> None:
    assert [stages_of_rank("1F1B", rank, 2, 1) for rank in (0, 1)] == [[0], [1]]
    assert [stages_of_rank("Interleaved1F1B", rank, 2, 2) for rank in (0, 1)] == [[0, 2], [1, 3]]
    assert [stages_of_rank("DualPipeV", rank, 2, 2) for rank in (0, 1)] == [[0, 3], [1, 2]]
