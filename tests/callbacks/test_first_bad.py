"""The guard names the first non-finite number of a skipped step, and changes no bit of training."""

import json
import math
import random
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import DataLoader
from trainer_dev.module import LanguageModule
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.llama import modeling_llama as llama

from dist_template.callbacks import Numerics, numerics
from dist_template.layout import local_shard
from tests.support.numerics import Train
from tests.support.runs import read_incidents
from tests.support.tiers import tiers

BAD_STEP = 5
SKIP = "--numerics.on_non_finite=skip"


class Series(L.LightningModule):
    """A plain module with all that a second pass could change: statistics, dropout, counters, a
    torchmetrics metric, draws of Python and NumPy, and logged values.

    Args:
        fault: What is not finite in step BAD_STEP: output, loss, gradient, data, weight. error: the
            loss, and the second forward pass raises."""

    drawn: Tensor

    def __init__(self, fault: str = "output") -> None:
        super().__init__()
        self.fault, self.calls, self.seen = fault, 0, []
        self.inner = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.GELU())
        self.head = nn.Linear(8, 1)
        self.metric = torchmetrics.MeanMetric()
        self.register_buffer("drawn", torch.zeros(3))
        self.inner[3].register_forward_hook(self._spoil)

    def _spoil(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        marked = bool((self.newest[:, 1] == 7).all())
        if self.fault == "gradient" and marked:
            # finite in the forward pass; the derivative of a square root at 0 is not
            return output + (output.detach() - output).clamp(min=0).sqrt() * 0
        return output * math.nan if self.fault == "output" and marked else output

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.calls += 1
        self.seen.append(batch_idx)
        self.newest = batch
        numbers = [random.random(), np.random.rand(), float(torch.rand(()))]
        self.drawn.add_(torch.tensor(numbers))
        loss = F.mse_loss(self.head(self.inner(batch)), batch[:, :1])
        marked = bool((batch[:, 1] == 7).all())
        if self.fault == "error" and marked and self.calls > BAD_STEP + 1:
            raise KeyError("only in the search")
        if self.fault in ("loss", "error") and marked:
            loss = loss * math.nan
        self.metric.update(loss.detach().nan_to_num())
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("metric", self.metric, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01, fused=True)


def rows(fault: str) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    found = list(torch.randn(10 * 4, 3, generator=draw))
    for row in found[4 * (BAD_STEP - 1) : 4 * BAD_STEP]:
        row[1] = 7
        if fault == "data":
            row[2] = math.nan
    return found


def trained(fault: str, folder: Path, monkeypatch: Any, searches: bool = True) -> Any:
    """Returns the module, the incidents, and all that ten steps left."""
    L.seed_everything(3)
    module = Series(fault)
    if not searches:
        monkeypatch.setattr(numerics, "MOST_SEARCHES", 0)
    if fault == "weight":

        def plant(trainer: Any, pl_module: Any, *_: Any) -> None:
            if trainer.global_step == BAD_STEP - 1:
                pl_module.head.weight.data[0, 2] = math.nan

        monkeypatch.setattr(Series, "on_train_batch_start", lambda s, *_: plant(s.trainer, s))
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=[Numerics(on_non_finite="skip", folder=str(folder))],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(rows(fault), batch_size=4))  # ty: ignore[invalid-argument-type]
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    optimizer = trainer.optimizers[0].state_dict()["state"]
    state |= {f"{i}.{k}": v for i, each in optimizer.items() for k, v in each.items()}
    state |= {name: value.clone() for name, value in trainer.callback_metrics.items()}
    state["random"] = torch.get_rng_state()
    state["others"] = torch.tensor([random.random(), np.random.rand(), module.calls])
    state["metric"] = module.metric.compute()
    lines = (folder / "incidents.jsonl").read_text().splitlines()
    return module, [json.loads(line) for line in lines], state


FAULTS = {
    "output": {"what": "output", "module": "inner.3", "ranks": [0]},
    "loss": {"what": "output", "module": "the loss", "ranks": [0]},
    "gradient": {"what": "gradient", "module": "inner.2", "ranks": [0]},
    "data": {"what": "data", "module": "batch", "ranks": [0]},
    "error": None,
}


SENTENCES = {
    "output": "; first non-finite output: inner.3; see",
    "loss": "; first non-finite output: the loss; see",
    "gradient": "non-finite gradient, in the backward pass: that of the output of inner.2; see",
    "data": "; first non-finite data: batch; see",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_plain_module_is_searched_and_continues_with_the_same_bits(
    fault: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    """Statistics, dropout, counters, logged means and moments are those without a search."""
    module, incidents, state = trained(fault, tmp_path / "with", monkeypatch)
    said = capsys.readouterr().out
    assert [each["step"] for each in incidents] == [BAD_STEP]
    assert incidents[0]["first_bad"] == FAULTS[fault]
    assert SENTENCES.get(fault, "a second forward pass of its batch was finite") in said
    assert module.calls == 10 and module.seen == [*range(10)]
    assert "log" not in vars(module) and not module.head._forward_hooks
    _, (other,), expected = trained(fault, tmp_path / "without", monkeypatch, searches=False)
    assert other["first_bad"] is None
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(state[name].nan_to_num(), value.nan_to_num()), name


def test_a_weight_is_named_before_any_pass_and_searches_are_few(
    tmp_path: Path, monkeypatch: Any
) -> None:
    _, incidents, _ = trained("weight", tmp_path, monkeypatch)
    expected = {"what": "weight", "module": "head.weight", "ranks": [0]}
    assert [each["first_bad"] for each in incidents] == [expected] * 3 + [None] * 3


NORM = "layers.0.post_attention_layernorm"
WEIGHT = "model.layers.1.mlp.down_proj.weight"


def break_norms(only_rank: int) -> None:
    """In each worker: on one rank NORM returns NaN in step BAD_STEP, and in its batch's second
    pass, but not in the step after it."""
    state: dict[str, Any] = {"bad": None, "now": False}
    original, build = LanguageModule.training_step, LanguageModule.build_model

    def training_step(self: Any, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        ids = batch["input_ids"]
        is_first = state["bad"] is None and self.global_step + 1 == BAD_STEP
        if is_first and self.global_rank == only_rank:
            state["bad"] = batch_idx, ids.clone()
        # by content too: other micro-batches of the step may hold the same row
        index, bad = state["bad"] or (None, torch.empty(0))
        state["now"] = index == batch_idx and torch.equal(ids, bad)
        return original(self, batch, batch_idx)

    def build_model(self: Any, data: Any) -> nn.Module:
        model = build(self, data)
        norm: Any = model.get_submodule(f"model.{NORM}")
        norm.broken = True
        return model

    def broken(forward: Any) -> Any:
        def with_nan(self: Any, hidden: Tensor) -> Tensor:
            out = forward(self, hidden)
            return out * math.nan if state["now"] and hasattr(self, "broken") else out

        return with_nan

    LanguageModule.training_step = training_step
    LanguageModule.build_model = build_model
    for norm in (llama.LlamaRMSNorm, deepseek.DeepseekV3RMSNorm):
        norm.forward = broken(norm.forward)


STRATEGIES = ["ddp", "fsdp2", "hsdp", "tp", "fsdp2_tp", "pp", "fsdp2_ep", "zero2", "zero3"]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", tiers(STRATEGIES, daily=["fsdp2"]))
def test_every_strategy_names_the_module_and_trains_with_the_same_bits(
    strategy: str, guarded: Train
) -> None:
    """Rank 1's output alone is not finite; the collectives of a forward pass are all ranks'."""
    only_rank = 0 if strategy == "pp" else 1  # that has the first layer
    run = guarded(strategy, "first-bad", partial(break_norms, only_rank), SKIP).check()
    (incident,) = read_incidents(run.run)
    assert incident["step"] == BAD_STEP
    found = incident["first_bad"]
    assert found is not None, run.log(0)[-3000:]
    assert found["what"] == "output" and found["module"].endswith(NORM), found
    assert found["ranks"] == [only_rank]
    assert f"first non-finite output: {found['module']}; see" in run.log(0)
    without = guarded(strategy, "no-search", partial(never_search, only_rank), SKIP).check()
    assert read_incidents(without.run)[0]["first_bad"] is None
    assert [*map(str, run.loss.values())] == [*map(str, without.loss.values())], "nan is not nan"
    for name, weight in without.end.items():
        assert torch.equal(run.end[name], weight), name


def never_search(only_rank: int) -> None:
    module: Any = numerics
    module.MOST_SEARCHES = 0
    break_norms(only_rank)


def spoil_a_shard(only_rank: int) -> None:
    """In each worker: in BAD_STEP one rank's shard of a weight holds a NaN."""
    original = LanguageModule.training_step

    def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        if self.global_step + 1 == BAD_STEP and self.global_rank == only_rank:
            weight = self.model.get_parameter(WEIGHT)
            shard = local_shard(getattr(weight, "ds_tensor", weight)).data
            shard.view(-1)[0] = math.nan
        return original(self, batch, batch_idx)

    LanguageModule.training_step = training_step


@pytest.mark.slow
@pytest.mark.parametrize("strategy", tiers(["fsdp2", "tp", "zero3"], daily=[]))
def test_a_non_finite_shard_of_one_rank_is_named(strategy: str, guarded: Train) -> None:
    """No rank runs the forward pass, in which the others would wait for that rank."""
    run = guarded(strategy, "shard", partial(spoil_a_shard, 1))
    answers = run.answers.values()
    assert all(answer.startswith("Ended: training stopped") for answer in answers), run.answers
    (incident,) = read_incidents(guarded.run_folder(strategy, "shard"))
    assert incident["first_bad"] == {"what": "weight", "module": f"model.{WEIGHT}", "ranks": [1]}
