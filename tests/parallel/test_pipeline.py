"""A pipeline trains to the numbers of one process, under every schedule, whatever a stage has.

test_parity.py has the files pp.yaml, pp_fsdp2.yaml and pp_ep.yaml among the other strategies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dist_template import InputError
from dist_template.parallel.pipeline import partition
from dist_template.parallel.pipeline.division import Division
from tests.support.parity import MODELS, SHORT, PauseAfter, Trainings, assert_close
from tests.support.runs import newest
from tests.support.strategies import ARGS
from tests.support.tiers import tiers

EXPERTS = (  # with an auxiliary loss
    "hidden_size: 36, intermediate_size: 20, num_hidden_layers: 4, num_attention_heads: 6,"
    " num_key_value_heads: 2, num_experts_per_tok: 2, router_aux_loss_coef: 0.01"
)
MODELS |= {
    "mixtral_of_4": f"{{model_type: mixtral, num_local_experts: 4, {EXPERTS}}}",
    "qwen2_moe_of_4": f"{{model_type: qwen2_moe, num_experts: 4, {EXPERTS},"
    " moe_intermediate_size: 20, shared_expert_intermediate_size: 12, decoder_sparse_step: 1}",
}
INTERLEAVED = f"{ARGS}.pp_schedule=Interleaved1F1B"
CASES = {
    "qwen3": ("qwen3_of_4", "pp", 2, []),
    "4 stages": ("llama_of_4", "pp", 4, [f"{ARGS}.pp_size=4"]),
    "Interleaved1F1B": ("llama_of_4", "pp", 2, [INTERLEAVED]),
    "tensor parallelism": ("llama_of_4", "pp", 4, [f"{ARGS}.tp_size=2"]),
    "HSDP": ("llama_of_4", "pp", 4, []),
    "interleaved and FSDP2": ("llama_of_4", "pp_fsdp2", 4, [INTERLEAVED]),
    "uneven stages": ("llama_of_4", "pp", 2, [f"{ARGS}.pp_layers=[3, 1]"]),
    "checkpointing": ("llama_of_4", "pp", 2, [INTERLEAVED, "--model.blocks.checkpointing=full"]),
    "interleaved and routers": ("mixtral_of_4", "pp", 2, [INTERLEAVED]),
    "other routers": ("qwen2_moe_of_4", "pp", 2, []),
}  # fmt: skip
NIGHTLY = {"HSDP", "tensor parallelism", "interleaved and FSDP2", "uneven stages", "other routers"}
DAILY = CASES.keys() - NIGHTLY


@pytest.mark.slow
@pytest.mark.parametrize("case", tiers(CASES, DAILY))
def test_a_pipeline_trains_to_the_numbers_of_one_process(train: Trainings, case: str) -> None:
    model, strategy, processes, flags = CASES[case]
    one = train(model, "one", SHORT, accumulation=4)
    many = train(model, strategy, SHORT, *flags, accumulation=4, processes=processes)
    assert many.loss == pytest.approx(one.loss, rel=1e-6)
    assert many.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)
    for step, metrics in one.eval().items():
        assert many.eval()[step] == pytest.approx(metrics, rel=1e-5)
    assert_close(many.start, one.start, 0.0)
    assert_close(many.end, one.end, 1e-5)


ROUTERS = [f"--model.balance.{name}_coef=0.01" for name in ("aux_loss", "sequence_loss", "z_loss")]
FEATURES = {  # model, flags, tolerance of the loss
    "losses of routers": ("deepseek_v3", ROUTERS, 1e-6),
    "adapters": ("llama_of_4", ["--model.adapter={rank: 4}"], 1e-6),
    "chunks": ("llama_of_4", ["--model.loss_chunk=16"], 1e-6),
    "compile": ("llama_of_4", ["--model.blocks.compile=true"], 1e-5),
    "selective": ("llama_of_4", ["--model.blocks.checkpointing=selective"], 1e-6),
    "bf16-mixed": ("llama_of_4", ["--trainer.precision=bf16-mixed"], 3e-2),
    "bf16-true": ("llama_of_4", ["--trainer.precision=bf16-true"], 3e-2),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("feature", tiers(FEATURES, ["losses of routers", "adapters"]))
def test_what_a_training_step_can_have_works_in_stages(train: Trainings, feature: str) -> None:
    model, flags, tolerance = FEATURES[feature]
    one, many = (train(model, each, SHORT, *flags, accumulation=4) for each in ("one", "pp"))
    assert many.loss == pytest.approx(one.loss, rel=tolerance)
    assert many.grad_norm == pytest.approx(one.grad_norm, rel=10 * tolerance)


@pytest.mark.slow
def test_a_checkpoint_is_resumed_exactly_and_on_other_numbers_of_stages(train: Trainings) -> None:
    model, four = "llama_of_4", [f"{ARGS}.pp_size=4"]
    whole = train(model, "pp", SHORT, accumulation=4, processes=2)
    legs: Any = [("pp", 2, []), ("pp", 2, []), ("fsdp2", 2, []), ("pp", 4, four)]
    checkpoint: list[str] = []
    for number, (strategy, processes, flags) in enumerate(legs):
        options: Any = {"callbacks": [PauseAfter(number + 1)], "processes": processes}
        options["accumulation"] = 4
        leg = train.run("fit", model, strategy, SHORT, *flags, *checkpoint, **options)
        if number < 2:
            assert leg.loss[number + 1] == whole.loss[number + 1], "the same stages: the same bits"
        assert leg.loss == {number + 1: pytest.approx(whole.loss[number + 1], rel=1e-6)}, strategy
        checkpoint = [f"--ckpt_path={newest(leg.run)}"]


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
