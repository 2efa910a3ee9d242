"""The guard names the first non-finite weight or output: on one process and under strategies."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.distributed.tensor import DTensor
from trainer_dev.module import LanguageModule
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.llama import modeling_llama as llama

from dist_template.errors import Exit
from tests.support.library import numerics, read_incidents
from tests.support.numerics import STRATEGIES, Train
from tests.support.runs import only_run, run
from tests.support.tiers import tiers

QUICK = ["--trainer.max_steps=8", "--trainer.limit_val_batches=0", "--trainer.logger=false", "--model.optim.warmup=2"]
BAD_STEP = 5


def break_norms(only_rank: int) -> None:
    """From BAD_STEP on the first layer's second norm returns NaN on one rank."""
    state = {"bad": False, "calls": 0}
    original = LanguageModule.training_step

    def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        state["bad"] = self.global_step + 1 >= BAD_STEP and self.global_rank == only_rank
        state["calls"] = 0
        return original(self, batch, batch_idx)

    LanguageModule.training_step = training_step
    for norm in (llama.LlamaRMSNorm, deepseek.DeepseekV3RMSNorm):
        norm.forward = _broken(norm.forward, state)


def _broken(original: Any, state: dict[str, Any]) -> Any:
    def forward(self: Any, hidden: Tensor) -> Tensor:
        out = original(self, hidden)
        is_broken = state["bad"] and getattr(self, "broken", None) is True
        return out * math.nan if is_broken else out

    return forward


def mark(self: Any, data: Any, original: Any) -> Any:
    model = original(self, data)
    model.model.layers[0].post_attention_layernorm.broken = True
    return model


def plant(only_rank: int) -> None:
    """Runs in each worker."""
    original = LanguageModule.build_model
    LanguageModule.build_model = lambda self, data: mark(self, data, original)
    break_norms(only_rank)


NORM = "model.model.layers.0.post_attention_layernorm"


@pytest.mark.slow
@pytest.mark.parametrize("strategy", tiers(STRATEGIES, daily=["fsdp2", "zero3"]))
def test_every_strategy_names_the_first_module_with_nan(guarded: Train, strategy: str) -> None:
    name = "first-output"
    got = guarded(strategy, name, partial(plant, 1))
    assert read_incidents(guarded.run_folder(strategy, name)), got.log(0)[-2000:]
    (incident,) = read_incidents(guarded.run_folder(strategy, name))
    assert incident["step"] == BAD_STEP
    assert incident["first_bad"]["what"] == "output" and 1 in incident["first_bad"]["ranks"]
    assert incident["first_bad"]["module"].endswith(NORM.removeprefix("model."))


def spoil_a_shard(only_rank: int) -> None:
    """In each worker: from BAD_STEP on, one rank's shard of a weight holds a NaN."""
    original = LanguageModule.training_step

    def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        if self.global_step + 1 == BAD_STEP and self.global_rank == only_rank:
            weight = self.model.get_parameter(WEIGHT)
            shard = weight.to_local() if isinstance(weight, DTensor) else weight.ds_tensor
            shard.data.view(-1)[0] = math.nan
        return original(self, batch, batch_idx)

    LanguageModule.training_step = training_step


WEIGHT = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.slow
@pytest.mark.parametrize("strategy", tiers(["fsdp2", "tp", "zero3"], daily=["fsdp2", "zero3"]))
def test_a_non_finite_shard_of_one_rank_is_found(strategy: str, guarded: Train) -> None:
    """No rank runs the forward, in which the others would wait for that rank."""
    record = guarded(strategy, "shard", partial(spoil_a_shard, 1))
    assert all(answer.startswith("Ended: training stopped") for answer in record.answers.values()), record.answers
    (incident,) = read_incidents(guarded.run_folder(strategy, "shard"))
    assert incident["step"] == BAD_STEP
    assert incident["first_bad"] == {"what": "weight", "module": f"model.{WEIGHT}", "ranks": [1]}


def test_the_incident_is_written_before_the_search(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = LanguageModule.training_step

    def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        return original(self, batch, batch_idx) * (math.nan if self.global_step + 1 == BAD_STEP else 1.0)

    def search(*args: Any) -> None:
        raise KeyError(read_incidents(only_run(tmp_path))[0]["step"])

    monkeypatch.setattr(LanguageModule, "training_step", training_step)
    monkeypatch.setattr(numerics, "first_bad", search)
    with pytest.raises(KeyError, match=str(BAD_STEP)):
        run("fit", *flags, *QUICK)


COMPILED = pytest.param("output", ["--model.blocks.compile=true"], marks=pytest.mark.slow)
CHECKPOINTED = ("output", ["--model.blocks.checkpointing=full"])


@pytest.mark.parametrize(("what", "more"), [("weight", []), CHECKPOINTED, COMPILED])
def test_one_process_names_the_first_non_finite_tensor(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, more: list[str]
) -> None:
    original = LanguageModule.training_step

    def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        if self.global_step + 1 == BAD_STEP and batch_idx % 4 == 0 and not hasattr(self, "hurt"):
            self.hurt = True
            mlp = self.model.model.layers[1].mlp
            if what == "weight":
                mlp.down_proj.weight.data[3, 3] = math.nan
            else:
                down = mlp.down_proj.forward
                mlp.down_proj.forward = lambda x: down(x) * math.nan
        return original(self, batch, batch_idx)

    monkeypatch.setattr(LanguageModule, "training_step", training_step)
    assert run("fit", *flags, *QUICK, *more) == Exit.NON_FINITE
    (incident,) = read_incidents(only_run(tmp_path))
    found = incident["first_bad"]
    assert found["what"] == what
    assert found["module"] == "model.model.layers.1.mlp.down_proj" + ".weight" * (what == "weight")


def test_nothing_is_named_if_all_is_finite_in_the_second_run(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = LanguageModule.training_step

    def training_step(self: Any, batch: Any, batch_idx: int) -> Tensor:
        return original(self, batch, batch_idx) * (math.nan if self.global_step + 1 == BAD_STEP else 1.0)

    monkeypatch.setattr(LanguageModule, "training_step", training_step)
    assert run("fit", *flags, *QUICK) == Exit.NON_FINITE
    assert read_incidents(only_run(tmp_path))[0]["first_bad"] is None
