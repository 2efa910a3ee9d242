"""A pipeline trains to the numbers of one process; its bubble is what torch's schedules wait."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dist_template import InputError
from dist_template.parallel.pipeline import partition
from dist_template.parallel.pipeline.division import BlockProxy, Division, StagePass
from dist_template.parallel.pipeline.stages import stage_facts, stages_per_rank
from tests.support.library import SCHEDULES, manifest
from tests.support.parity import MODELS, PauseAfter, Trainings, assert_close, assert_trains_alike
from tests.support.runs import newest
from tests.support.strategies import ARGS
from tests.support.tiers import tiers
from tests.support.wings import RunRecord

# four blocks, for up to four stages; tied weights, so that the first and the last stage share one
MODELS["llama_of_4"] = MODELS["llama"].replace("hidden_layers: 2", "hidden_layers: 4")
EXPERTS = (  # with an auxiliary loss
    "hidden_size: 36, intermediate_size: 20, num_hidden_layers: 4, num_attention_heads: 6,"
    " num_key_value_heads: 2, num_experts_per_tok: 2, router_aux_loss_coef: 0.01"
)
MODELS |= {
    "qwen3_of_4": MODELS["llama_of_4"].replace("llama", "qwen3"),
    "mixtral_of_4": f"{{model_type: mixtral, num_local_experts: 4, {EXPERTS}}}",
    "qwen2_moe_of_4": f"{{model_type: qwen2_moe, num_experts: 4, {EXPERTS},"
    " moe_intermediate_size: 20, shared_expert_intermediate_size: 12, decoder_sparse_step: 1}",
}
INTERLEAVED = f"{ARGS}.pp_schedule=Interleaved1F1B"
FULL, CHUNKS = "--model.blocks.checkpointing=full", "--model.loss_chunk=16"
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
}
DAILY = ["4 stages", "interleaved, routers, checkpointing"]


@pytest.mark.slow
@pytest.mark.parametrize("case", tiers(CASES, DAILY))
def test_a_pipeline_trains_to_the_numbers_of_one_process(train: Trainings, case: str) -> None:
    model, strategy, processes, flags = CASES[case]
    one = train(model, "one", accumulation=4)
    many = train(model, strategy, *flags, accumulation=4, processes=processes)
    assert_close(many.start, one.start, 0.0)
    assert_trains_alike(many, one)


ROUTERS = [f"--model.balance.{name}_coef=0.01" for name in ("aux_loss", "sequence_loss", "z_loss")]
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
    for stages, layers in ((2, [1, 2]), (5, "even")):
        with pytest.raises(InputError, match=f"cannot divide 4 blocks into {stages}"):
            partition.blocks_of_stages(Sequence(), stages, layers)


def test_each_stage_of_a_users_own_model_computes_its_part() -> None:
    torch.manual_seed(0)
    whole, tokens = Sequence(), torch.tensor([[1, 2, 3]])
    expected, hidden = whole(tokens), None
    for stage, bounds in enumerate([(0, 1), (1, 3), (3, 4)]):
        torch.manual_seed(0)
        part = Sequence()
        division = Division(part, [(0, 1), (1, 3), (3, 4)], [stage])
        division.gate(part)
        with division.stage.running(bounds, hidden, ends_step=False):
            output = part(tokens)
        hidden = division.stage.sent
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
        pytest.raises(InputError, match="not as Pair: set pp_size 1"),
    ):
        BlockProxy(Pair(2, 2), 0, stage)(torch.zeros(1, 2))


UNITS = {"F": 1, "B": 2}  # of time: forward, backward
Pass = tuple[int, str, int]  # stage, kind, micro-batch


def orders(name: Any, ranks: int, per_rank: int, micro_batches: int) -> list[list[Pass]]:
    num = ranks * per_rank
    rest: Any = {"num_stages": num, "group_size": ranks, "group_rank": 0}
    rest |= {"is_last": False, "submod": None}
    indices = range(0, num, ranks)
    stages: Any = [SimpleNamespace(stage_index=i, is_first=i == 0, **rest) for i in indices]
    given = stages if per_rank > 1 else stages[0]
    schedule = SCHEDULES[name](given, micro_batches, lambda loss, _: loss, scale_grads=False)
    found: list[list[Pass]] = []
    for actions in schedule.pipeline_order.values():
        forwards: dict[int, int] = {}
        found.append([])
        for stage, computation, number, *_ in filter(None, actions):
            if computation.value == "F":  # torch's table of 1F1B misnumbers the last rank's
                number = forwards[stage] = forwards.get(stage, -1) + 1
            if computation.value in UNITS:
                found[-1].append((stage, computation.value, number))
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
            if kind == "B":
                needs = [(stage, "F", number)] + [(stage + 1, "B", number)] * (stage < last)
            if all(need in done for need in needs):
                start = max([clocks[rank], *(done[need] for need in needs)])
                clocks[rank] = done[stage, kind, number] = start + UNITS[kind]
                passes.pop(0)
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
