"""The replica guard: a tensor that differs between ranks ends training, and is never saved."""

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
from tests.support.numerics import Train
from tests.support.runs import Workers
from tests.support.strategies import flags_of
from tests.support.tiers import tiers

NORM = "model.layers.1.post_attention_layernorm.weight"  # every strategy but FSDP2 has replicas
SHARDED = "model.layers.0.mlp.up_proj.weight"


def flip_a_bit(step: int, name: str, rank: int = 1) -> None:
    """In each worker: at the end of `step`, the lowest bit of a number differs on one rank."""
    original = LanguageModule.optimizer_step

    def optimizer_step(self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        if (self.global_step + 1, self.global_rank) == (step, rank):  # it is counted later
            shard = local_shard(dict(self.model.named_parameters())[name].detach())
            shard.view(-1)[:1].view(torch.int32).bitwise_xor_(1)

    LanguageModule.optimizer_step = optimizer_step


def step_with_own_gradients() -> None:
    """In each worker: one parameter's gradient is not reduced, as by a plan with a gap."""

    def on_before_optimizer_step(self: Any, optimizer: Any) -> None:
        gradient = local_shard(self.model.get_parameter(NORM).grad)
        gradient.view(-1)[self.global_rank :: 2] *= -1

    LanguageModule.on_before_optimizer_step = on_before_optimizer_step


PLANTS = {"gradient": step_with_own_gradients, "later": partial(flip_a_bit, 4, NORM)}
PLANTS["bit"] = partial(flip_a_bit, 2, NORM)  # ZeRO overwrites it in the next step
PLANTS["shard"] = partial(flip_a_bit, 2, SHARDED, rank=3)
# DeepSpeed reduces gradients after the hook, and a step overwrites what was changed before it.
CASES = [("tp", "gradient"), ("hsdp", "shard"), ("ddp", "bit"), ("tp", "bit"), ("zero1", "bit")]


def assert_refused(guarded: Train, strategy: str, plant: str, step: int) -> None:
    # with "shard", rank 1 has the other shard: rank 3 holds the same as it
    tensor, rank, first = (SHARDED, 3, 1) if plant == "shard" else (NORM, 1, 0)
    run = guarded(strategy, plant, PLANTS[plant], "--last_checkpoint.every_n_steps=4")
    assert len(run.answers) == run.size
    for answer in run.answers.values():
        assert answer.startswith(f"Ended: training stopped: replicas differ after step {step}: ")
        assert "exit code 65" in answer and "replicas.ignore" in answer
        assert f"model.{tensor} of rank {rank} differs from rank {first}" in answer
    assert manifest.newest(guarded.run_folder(strategy, plant) / "checkpoints") is None


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "plant"), tiers(CASES, daily=CASES[:2]))
def test_a_difference_is_found_at_once(guarded: Train, strategy: str, plant: str) -> None:
    assert_refused(guarded, strategy, plant, 2)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", tiers(["ddp", "tp", "zero2"], daily=["zero2"]))
def test_what_changes_later_is_found_before_it_is_saved(guarded: Train, strategy: str) -> None:
    assert_refused(guarded, strategy, "later", 4)


class WithOwnState(PlainClassifier):
    """Ranks have their own statistics, counter, random state, temporary buffer and dropout."""

    drawn: Tensor
    random: Tensor
    longest: Tensor
    own_loss: Tensor

    def __init__(self) -> None:
        super().__init__(dropout=0.3)
        self.norm = nn.BatchNorm2d(3)
        self.register_buffer("drawn", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("random", torch.get_rng_state())
        self.register_buffer("longest", torch.ones(3), persistent=False)
        self.register_buffer("own_loss", torch.zeros(()))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.drawn += 1 + self.global_rank
        self.random.copy_(torch.get_rng_state())
        self.longest *= 1.5 + self.global_rank
        loss = super().training_step([self.norm(batch[0]), batch[1]], batch_idx)
        self.own_loss.copy_(loss.detach() + self.global_rank)
        return loss


OWN_STATE = Project("tests.support", f"{__name__}:WithOwnState", ".classifier:Images")
LISTED = [("ddp", "[]"), *((each, "[own_*]") for each in ("ddp", "zero2", "zero3", "fsdp2"))]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "ignore"), tiers(LISTED, daily=LISTED[:2]))
def test_a_saved_buffer_that_differs_is_listed(tmp_path: Path, strategy: str, ignore: str) -> None:
    argv = [
        "fit", f"--run.root={tmp_path / 'runs'}", "--run.report=false", "--trainer.accelerator=cpu",
        "--trainer.devices=2", "--trainer.max_steps=6", "--trainer.log_every_n_steps=1",
        "--data.batch_size=4", "--best_checkpoint.monitor=val_loss",
        "--last_checkpoint.every_n_steps=3", *flags_of(strategy), f"--replicas.ignore={ignore}",
    ]  # fmt: skip
    run = Workers(2, OWN_STATE).run(argv, tmp_path / "record")
    if ignore == "[]":
        sentence = "own_loss of rank 1 differs from rank 0"
        assert all(sentence in answer for answer in run.answers.values()), run.answers
    else:
        assert manifest.newest(run.check().run / "checkpoints") is not None


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
