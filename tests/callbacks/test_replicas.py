"""The replica guard: a tensor that differs between ranks ends training, and is never saved."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from trainer_dev.module import LanguageModule

from dist_template import Project
from dist_template.callbacks.replicas import checksum
from dist_template.layout import local_shard
from tests.support.classifier import PlainClassifier
from tests.support.library import manifest
from tests.support.numerics import Train, report_exit_codes
from tests.support.runs import Workers
from tests.support.strategies import flags_of
from tests.support.tiers import tiers
from tests.support.wings import RunRecord

NORM = "model.layers.1.post_attention_layernorm.weight"  # every strategy but FSDP2 has replicas
EVERY = "--last_checkpoint.every_n_steps=4"


def flip_a_bit(step: int, name: str, rank: int = 1) -> None:
    """In each worker: at the end of `step`, the lowest bit of a number differs on one rank."""
    original = LanguageModule.optimizer_step

    def optimizer_step(self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        if (self.global_step + 1, self.global_rank) == (step, rank):  # it is counted later
            shard = local_shard(dict(self.model.named_parameters())[name].detach())
            shard.view(-1)[:1].view(torch.int32).bitwise_xor_(1)

    LanguageModule.optimizer_step = optimizer_step
    report_exit_codes()


def step_with_own_gradients() -> None:
    """In each worker: one parameter's gradient is not reduced, as by a plan with a gap."""

    def on_before_optimizer_step(self: Any, optimizer: Any) -> None:
        gradient = local_shard(self.model.get_parameter(NORM).grad)
        gradient.view(-1)[self.global_rank :: 2] *= -1

    LanguageModule.on_before_optimizer_step = on_before_optimizer_step
    report_exit_codes()


def change_on_rank_0() -> None:
    """In each worker: code that depends on the rank."""
    original = LanguageModule.training_step

    def training_step(self: Any, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if self.global_rank == 0 and self.global_step == 0:
            with torch.no_grad():
                local_shard(self.model.get_parameter(NORM)).add_(1e-3)
        return original(self, batch, batch_idx)

    LanguageModule.training_step = training_step
    report_exit_codes()


def assert_refused(
    guarded: Train, run: RunRecord, strategy: str, name: str, step: int, tensor: str = NORM
) -> None:
    assert len(run.answers) == run.size
    for answer in run.answers.values():
        assert answer.startswith(f"Ended: training stopped: replicas differ after step {step}: ")
        assert "exit code 65" in answer and "replicas.ignore" in answer
        assert tensor in answer and "of rank 1 differs from rank 0" in answer
    assert manifest.newest(guarded.run_folder(strategy, name) / "checkpoints") is None


PLANTS = {
    "bit": partial(flip_a_bit, 2, NORM),  # ZeRO overwrites it in the next step
    "gradient": step_with_own_gradients,
    "rank_0": change_on_rank_0,
}
# DeepSpeed reduces gradients after the hook, and a step overwrites what was changed before it.
DAILY = [("tp", "gradient"), ("zero2", "bit")]
CASES = [*DAILY, ("ddp", "rank_0"), ("ddp", "bit"), ("tp", "bit"), ("zero1", "bit")]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "plant"), tiers(CASES, daily=DAILY))
def test_a_difference_is_found_at_once(guarded: Train, strategy: str, plant: str) -> None:
    run = guarded(strategy, plant, PLANTS[plant], EVERY)
    assert_refused(guarded, run, strategy, plant, 2)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", tiers(["ddp", "tp"], daily=["ddp"]))
def test_what_changes_later_is_found_before_it_is_saved(guarded: Train, strategy: str) -> None:
    run = guarded(strategy, "later", partial(flip_a_bit, 4, NORM), EVERY)
    assert_refused(guarded, run, strategy, "later", 4)


@pytest.mark.slow
def test_shards_of_hsdp_are_compared_between_replicas(guarded: Train) -> None:
    """Rank 1 has the other shard: rank 3 holds the same as it."""
    name = "model.layers.0.mlp.up_proj.weight"
    run = guarded("hsdp", name, partial(flip_a_bit, 2, name, rank=3), EVERY)
    for answer in run.answers.values():
        assert f"after step 2: model.{name} of rank 3 differs from rank 1" in answer, answer[:500]


class WithOwnState(PlainClassifier):
    """Ranks have their own statistics, counter, random state, temporary buffer and dropout."""

    drawn: Tensor
    random: Tensor
    longest: Tensor
    own_loss: Tensor

    def __init__(self, named: bool = False) -> None:
        super().__init__(dropout=0.3)
        self.norm = nn.BatchNorm2d(3)
        self.register_buffer("drawn", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("random", torch.get_rng_state())
        self.register_buffer("longest", torch.ones(3), persistent=False)
        self.register_buffer("own_loss", torch.zeros(()), persistent=named)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.drawn += 1 + self.global_rank
        self.random.copy_(torch.get_rng_state())
        self.longest *= 1.5 + self.global_rank
        loss = super().training_step([self.norm(batch[0]), batch[1]], batch_idx)
        self.own_loss.copy_(loss.detach() + self.global_rank)
        return loss


OWN_STATE = Project("tests.support", f"{__name__}:WithOwnState", ".classifier:Images")


def train(tmp_path: Path, strategy: str, *more: str) -> RunRecord:
    argv = [
        "fit", f"--run.root={tmp_path / 'runs'}", "--run.report=false", "--trainer.accelerator=cpu",
        "--trainer.devices=2", "--trainer.max_steps=6", "--trainer.log_every_n_steps=1",
        "--data.batch_size=4", "--best_checkpoint.monitor=val_loss",
        "--last_checkpoint.every_n_steps=3", *flags_of(strategy), *more,
    ]  # fmt: skip
    with Workers(2, OWN_STATE) as workers:
        return workers.run(argv, tmp_path / "record", prelude=report_exit_codes)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", tiers(["ddp", "zero2", "zero3", "fsdp2"], daily=["ddp"]))
def test_what_ranks_hold_differently_is_not_compared(tmp_path: Path, strategy: str) -> None:
    run = train(tmp_path, strategy).check()
    assert manifest.newest(run.run / "checkpoints") is not None


@pytest.mark.slow
@pytest.mark.parametrize("ignore", ["[]", "[own_*]"])
def test_a_buffer_of_the_checkpoint_is_named_and_may_be_listed(tmp_path: Path, ignore: str) -> None:
    run = train(tmp_path, "ddp", "--model.named=true", f"--replicas.ignore={ignore}")
    sentence = "own_loss of rank 1 differs from rank 0"
    assert run.ok or all(sentence in answer for answer in run.answers.values())
    assert run.ok == (ignore != "[]"), run.answers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.bool])
@pytest.mark.parametrize("size", [1, 63, 64, 4099])
def test_the_checksum_depends_on_each_bit_and_each_place(dtype: torch.dtype, size: int) -> None:
    tensor = torch.randint(0, 2, (size,)).to(dtype)
    expected = checksum(tensor)
    assert checksum(tensor.clone()) == expected
    assert checksum(torch.cat([tensor[:1], tensor])[1:]) == expected, "at an odd address"
    for place in {0, size // 2, size - 1}:
        other = tensor.clone()
        other.view(torch.uint8)[place] ^= 1
        assert checksum(other) != expected
