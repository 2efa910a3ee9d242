"""Routers are balanced, and their loads counted, the same way however the batch is distributed."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from dist_template import BalanceConfig
from dist_template.model import balance
from dist_template.model.balance import Balancer
from dist_template.wings.rehearse.record import RunRecord
from tests.support.modules import DEEPSEEK, SPARSE, TINY
from tests.support.parity import Trainings, assert_close
from tests.support.tiers import tiers

ROWS, TOKENS, EXPERTS, CHOSEN = 2, 32, 8, 2


def balancer(architecture: dict[str, Any], **config: Any) -> Balancer:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**architecture)).train()
    balancer = Balancer(model, BalanceConfig(**config))
    balancer.model = model  # ty: ignore[missing-attribute]
    balancer.attach(torch.device("cpu"))
    return balancer


def forward(balancer: Any) -> dict[str, Tensor]:
    batch = {"input_ids": torch.randint(0, TINY["vocab_size"], (ROWS, TOKENS))}
    balancer.counts_now = True
    balancer.model(**batch, use_cache=False)
    balancer.counts_now = False
    return batch


@pytest.mark.parametrize("name", SPARSE)
def test_what_is_kept_of_a_router_are_the_logits_that_it_chooses_by(name: str) -> None:
    each = balancer(SPARSE[name], z_loss_coef=0.1)
    forward(each)
    for i, layer in enumerate(each.layers):
        assert layer.logits is not None
        chosen = balance.probabilities(layer, layer.logits).topk(CHOSEN, dim=-1).indices
        counts = chosen.flatten().bincount(minlength=EXPERTS).tolist()
        assert each.loads[i, :EXPERTS].tolist() == counts


def test_the_load_balancing_loss_is_transformers_own_but_for_its_scale() -> None:
    """transformers' is over one micro-batch, and not divided by the experts per token."""
    each = balancer(SPARSE["qwen3_moe"] | {"num_hidden_layers": 1}, aux_loss_coef=0.01)
    forward(each)
    each.begin_reduction()
    each.finish_step(None)  # this batch's shares are the next one's
    logits: Any = each.layers[0].logits
    ((name, weight, value),) = each.losses({})
    expected = load_balancing_loss_func((logits,), EXPERTS, CHOSEN) / CHOSEN
    assert (name, weight) == ("moe/aux_loss", 0.01)
    assert value.item() == pytest.approx(torch.as_tensor(expected).item(), rel=1e-6)
    assert value.item() > 1


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_moe"])
def test_sequence_wise_loss_and_z_loss_equal_their_equations(name: str) -> None:
    each = balancer(SPARSE[name], aux_loss_coef=0, sequence_loss_coef=0.5, z_loss_coef=0.25)
    batch = forward(each)
    kept: Any = [layer.logits for layer in each.layers]
    (sequence, z) = each.losses(batch)
    assert sequence[:2] == ("moe/sequence_loss", 0.5 * len(kept))
    assert z[:2] == ("moe/z_loss", 0.25 * len(kept))
    expected, squares = [], []
    for logits in kept:
        scores = logits.sigmoid() if name == "deepseek_v3" else logits.softmax(-1)
        for row in scores.split(TOKENS):  # arXiv:2412.19437, equations 17 to 20
            chosen = [set(each.topk(CHOSEN).indices.tolist()) for each in row]
            f = [EXPERTS / (CHOSEN * TOKENS) * sum(i in c for c in chosen) for i in range(EXPERTS)]
            p = (row / row.sum(-1, keepdim=True)).mean(0)
            expected.append(sum(f[i] * p[i].item() for i in range(EXPERTS)))
        squares += [token.exp().sum().log().item() ** 2 for token in logits]
    assert sequence[2].item() == pytest.approx(sum(expected) / len(expected), rel=1e-5)
    assert z[2].item() == pytest.approx(sum(squares) / len(squares), rel=1e-5)


def test_the_bias_moves_against_the_load_and_not_in_a_skipped_step() -> None:
    each: Any = balancer(DEEPSEEK, bias_update_speed=0.01)
    forward(each)
    loads = each.loads[:, :EXPERTS].clone()
    biases = [getattr(layer.bias_owner, balance.BIAS) for layer in each.layers]
    each.begin_reduction()
    each.finish_step(torch.tensor(1.0))
    assert all((bias == 0).all() for bias in biases)
    each.begin_reduction()
    each.finish_step(torch.tensor(0.0))
    expected = 0.01 * (loads.mean(1, keepdim=True) - loads).sign()
    assert [bias.tolist() for bias in biases] == expected.tolist()


STRATEGIES = ["ddp", "fsdp2_ep", "fsdp2_tp_ep", "tp", "zero3"]
STEPS, LOAD, UNUSED = 8, "moe/expert_load_max_over_mean", "moe/unused_experts"
BOTH = [  # DeepSeek-V3's bias and every loss term
    "--model.balance.aux_loss_coef=0.05",
    "--model.balance.sequence_loss_coef=0.01",
    "--model.balance.z_loss_coef=0.001",
    f"--trainer.max_steps={STEPS}",
    "--trainer.val_check_interval=8",
]


class Routing(Callback):
    """Counts each expert's tokens in training: {(optimizer step, router): counts} as a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.loads: dict[tuple[int, str], Tensor] = {}
        for name, module in pl_module.named_modules():
            if type(module).__name__ == "DeepseekV3TopkRouter":
                module.register_forward_hook(partial(self.note, trainer, name))

    def note(self, trainer: Any, name: str, router: Any, _: Any, out: Any) -> None:
        if router.training:
            key, counts = (trainer.global_step + 1, name), out[2].flatten().bincount(minlength=4)
            self.loads[key] = self.loads.get(key, 0) + counts

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        torch.save(self.loads, self.file)


@pytest.fixture(scope="module")
def routing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("routing") / "loads.pt"


@pytest.fixture(scope="module")
def one(train: Trainings, routing: Path) -> RunRecord:
    return train("deepseek_v3", "one", *BOTH, callbacks=[Routing(routing)])


@pytest.mark.slow
def test_loads_equal_a_count_of_choices(one: RunRecord, routing: Path) -> None:
    """Of one process; the other strategies have the same loads."""
    counted, worst = torch.load(routing), []
    for step in range(1, STEPS + 1):
        loads = torch.stack([counts for (at, _), counts in counted.items() if at == step]).double()
        worst.append((loads.amax(1) / loads.mean(1)).max().item())
        assert one.metric(UNUSED)[step] == (loads == 0).sum()
    assert [*one.metric(LOAD).values()] == pytest.approx(worst, rel=1e-6)
    assert max(worst) > 1.05


def biases(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in weights.items() if name.endswith(balance.BIAS)}


def assert_same_balance(got: RunRecord, expected: RunRecord) -> None:
    assert got.loss == pytest.approx(expected.loss, rel=1e-5)
    for term in ("moe/aux_loss", "moe/sequence_loss", "moe/z_loss"):
        assert got.metric(term) == pytest.approx(expected.metric(term), rel=1e-6), term
    for count in (LOAD, UNUSED):
        assert got.metric(count) == expected.metric(count)
    assert_close(got.end, expected.end, 1e-5)
    for name, bias in biases(expected.end).items():
        assert torch.equal(got.end[name], bias), name
    events = [event for rank in got.ranks for event in rank if event["event"] == "step"]
    for step in range(STEPS + 1):
        hashes = {str(biases(each["tensors"])) for each in events if each["step"] == step}
        assert len(hashes) == 1, f"ranks differ in a router's bias after step {step}"


@pytest.mark.slow
@pytest.mark.parametrize("strategy", tiers([*STRATEGIES, "cp"], daily=["fsdp2_ep", "zero3", "cp"]))
def test_a_strategy_balances_as_one(train: Trainings, one: RunRecord, strategy: str) -> None:
    assert_same_balance(train("deepseek_v3", strategy, *BOTH), one)


@pytest.mark.slow
def test_the_size_of_a_micro_batch_does_not_matter(train: Trainings, one: RunRecord) -> None:
    moved = [tensor.abs().max().item() for tensor in biases(one.end).values()]
    assert moved and min(moved) > 0.002, "the bias must have moved"
    assert len(set(one.metric("moe/aux_loss").values())) > 3 and one.metric("moe/aux_loss")[2] > 1
    again = "--model.blocks.checkpointing=full"  # what is recomputed in backward counts once
    assert_same_balance(train("deepseek_v3", "one", *BOTH, again, accumulation=4), one)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", tiers(["fsdp2", "zero3"], daily=["fsdp2"]))
def test_the_bias_stays_float32_in_half_precision(train: Trainings, strategy: str) -> None:
    run = train("deepseek_v3", strategy, "--trainer.precision=bf16-true")
    for bias in biases(run.end).values():
        assert bias.dtype == torch.float32
        moves = bias / 0.001
        assert bias.any() and torch.allclose(moves, moves.round(), atol=1e-3)
