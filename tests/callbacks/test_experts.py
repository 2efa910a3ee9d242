"""Loads of experts equal an independent count of the routers' choices."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dist_template import BalanceConfig
from dist_template.callbacks import experts
from dist_template.parallel import blocks
from lightning.pytorch import Callback
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.library import Balancer, MetricBuffer, logs, read_metrics
from tests.support.moe import DEEPSEEK, SPARSE
from tests.support.parity import Trainings
from tests.support.tiers import tiers

OFF = BalanceConfig(bias_update_speed=0, aux_loss_coef=0)
CHOSEN = 2 * 32 * 2  # sequences x tokens x experts of a token


class Bench:
    """A model under the callback, without a Trainer."""

    def __init__(
        self, architecture: dict[str, Any], balance: BalanceConfig = OFF, **block_options: Any
    ) -> None:
        torch.manual_seed(0)
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**architecture)).train()
        blocks.wrap_blocks(model, blocks.BlockConfig(**block_options))
        self.module: Any = model
        model.metrics, model.balancer = MetricBuffer(), Balancer(model, balance)
        self.trainer: Any = SimpleNamespace(
            log_every_n_steps=3, global_step=0, estimated_stepping_batches=100,
            fit_loop=SimpleNamespace(_should_accumulate=lambda: False),
        )  # fmt: skip
        self.callback = experts.Experts()
        self.callback.on_fit_start(self.trainer, model)

    def step(self) -> Any:
        trainer, callback = self.trainer, self.callback
        callback.on_train_batch_start(trainer, self.module, {}, trainer.global_step)
        ids = torch.randint(0, 50, (2, 32))
        loss = self.module(input_ids=ids, use_cache=False).logits.sum()
        loss = sum(
            (
                weight * value
                for _, weight, value in self.module.balancer.losses({"input_ids": ids})
            ),
            start=loss,
        )
        callback.on_before_backward(trainer, self.module, loss)
        loss.backward()
        trainer.global_step += 1
        callback.on_train_batch_end(trainer, self.module, None, {}, trainer.global_step)
        if logs(trainer, trainer.global_step):
            callback.before_log_step(trainer, self.module)

    def read(self) -> dict[str, float]:
        metrics = self.module.metrics.read(lambda t: t, torch.device("cpu"))
        self.callback.on_log_step(self.trainer, self.module, metrics)
        return metrics


@pytest.mark.parametrize("name", SPARSE)
def test_every_kind_of_expert_is_counted_only_at_log_steps_without_balancing(name: str) -> None:
    bench = Bench(SPARSE[name])
    layers = bench.module.balancer.layers
    assert len(layers) == (3 if name == "deepseek_v3" else 4) and all(
        layer.num == 8 for layer in layers
    )
    counted = []
    for _ in range(2):
        bench.step()
        counted.append(bench.module.balancer.loads.sum().item() / len(layers) / CHOSEN)
    assert counted == [1, 1], "the first, for compiled blocks"
    bench.step()
    assert bench.module.balancer.loads.sum() == 0
    assert bench.read()["moe/expert_load_max_over_mean"] > 1
    assert sum(bench.module.metrics.totals[experts.LOADS]) == 2 * len(layers) * CHOSEN, (
        "and the third, which is logged"
    )


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_with_balancing_each_step_is_counted_and_a_recomputed_block_once(
    checkpointing: str,
) -> None:
    bench = Bench(DEEPSEEK, BalanceConfig(), checkpointing=checkpointing)
    for _ in range(3):
        bench.step()
    assert bench.read()["moe/expert_load_max_over_mean"] > 1
    assert sum(bench.module.metrics.totals[experts.LOADS]) == 3 * CHOSEN, "of the third step alone"
    moved = [
        layer.bias_owner.e_score_correction_bias.abs().max().item()
        for layer in bench.module.balancer.layers
    ]
    assert moved == pytest.approx([0.003] * 3)


def test_ratio_and_unused_are_of_the_sums() -> None:
    bench = Bench(DEEPSEEK)
    loads = [
        [4, 0, 4, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 1, 1, 1, 0],
        [2, 1, 1, 1, 1, 1, 1, 0, 9],
    ]  # the last: no expert
    bench.module.metrics.totals = {
        experts.LOADS: [float(load) for layer in loads for load in layer]
    }
    metrics: dict[str, float] = {}
    bench.callback.on_log_step(bench.trainer, bench.module, metrics)
    assert metrics["moe/expert_load_max_over_mean"] == 4.0 and metrics["moe/unused_experts"] == 7


class Routing(Callback):
    """Writes down what the routers choose in training, optimizer step by optimizer step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.lines: list[tuple[int, str, list[int]]] = []
        self.file = self.folder / f"routing{trainer.global_rank}.json"
        for name, module in pl_module.named_modules():
            if type(module).__name__ == "DeepseekV3TopkRouter":
                module.register_forward_hook(
                    lambda router, _, out, name=name: self.note(router, trainer, name, out[2])
                )

    def note(self, router: Any, trainer: Any, name: str, chosen: torch.Tensor) -> None:
        if router.training:
            self.lines.append((trainer.global_step + 1, name, chosen.flatten().tolist()))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.file.write_text(json.dumps(self.lines))


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", tiers(["ddp", "fsdp2_ep", "fsdp2_tp_ep", "zero3"], daily=["fsdp2_ep", "zero3"])
)
def test_loads_equal_a_count_of_what_the_routers_chose(
    train: Trainings,  # noqa: F811
    tmp_path: Path,
    strategy: str,
) -> None:
    run = train.run(
        "fit", "deepseek_v3", strategy, "--trainer.max_steps=6", callbacks=[Routing(tmp_path)]
    )
    metrics = read_metrics(run.run)
    expected = list(by_hand(tmp_path))
    assert metrics["moe/expert_load_max_over_mean"].values.tolist() == pytest.approx(
        [r for r, _ in expected], rel=1e-6
    )
    assert metrics["moe/unused_experts"].values.tolist() == [unused for _, unused in expected]
    assert len(expected) == 6 and any(ratio > 1.05 for ratio, _ in expected)


def by_hand(folder: Path, num_experts: int = 4) -> Iterator[tuple[float, int]]:
    """(largest over mean of the worst layer, experts without a token) of each step, over all ranks."""
    lines = [
        line
        for path in sorted(folder.glob("routing*.json"))
        for line in json.loads(path.read_text())
    ]
    for step in sorted({step for step, _, _ in lines}):
        layers: dict[str, list[int]] = {}
        for of, name, chosen in lines:
            layers.setdefault(name, [])
            layers[name] += chosen if of == step else []
        loads = [
            [chosen.count(expert) for expert in range(num_experts)] for chosen in layers.values()
        ]
        yield (
            max(max(each) * num_experts / sum(each) for each in loads),
            sum(each.count(0) for each in loads),
        )
