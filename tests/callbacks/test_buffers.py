"""Buffers that a forward pass writes, in a step that is skipped, and in what is saved."""

import copy
import math
from collections.abc import Container
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from trainer_dev.module import LanguageModule

from dist_template import Project
from dist_template.callbacks.buffers import StepBuffers
from dist_template.checkpoint.formats import read_full
from dist_template.cli.main import run
from dist_template.errors import Exit
from dist_template.layout import local_shard
from tests.support.classifier import PlainClassifier
from tests.support.numerics import Train, is_finite, newest_step
from tests.support.runs import Workers, newest, only_run, read_incidents
from tests.support.strategies import flags_of
from tests.support.tiers import tiers

BAD_STEP, STEPS = 4, 7
LATE = 3  # the step from which on a buffer is written


class Normalized(PlainClassifier):
    """Its buffers are written in each way that modules have. A batch of `BAD_STEP` has a NaN."""

    mean_loss: Tensor
    num_images: Tensor
    batches: list[list[Tensor]] = []  # noqa: RUF012  (of the newest training in this process)
    start: dict[str, Tensor] = {}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.late = nn.BatchNorm2d(3)
        self.register_buffer("mean_loss", torch.zeros(()))  # replaced by another tensor
        self.register_buffer("num_images", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.tensor([0.0, -math.inf]))

    def on_train_start(self) -> None:
        Normalized.batches, Normalized.start = [], copy.deepcopy(self.state_dict())

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.batches.append(copy.deepcopy(batch))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        if self.trainer.global_step + 1 == BAD_STEP:
            images = images.clone()
            images[0, 0, 0, 0] = math.nan
        return self.objective(images, labels, self.trainer.global_step + 1)

    def objective(self, images: Tensor, labels: Tensor, step: int) -> Tensor:
        self.late.train(step >= LATE)
        self.num_images += len(images)
        loss = F.cross_entropy(self(self.late(self.norm(images))), labels)
        self.mean_loss = 0.9 * self.mean_loss + 0.1 * loss.detach()
        return loss


NORMALIZED = Project("tests.support", f"{__name__}:Normalized", ".classifier:Images")
SKIP = "--numerics.on_non_finite=skip"


def flags(folder: Path, *more: str) -> list[str]:
    given = f"""--run.root={folder}/runs --run.report=false --trainer.accelerator=cpu
        --trainer.max_steps={STEPS} --trainer.log_every_n_steps=1 --data.batch_size=4
        --trainer.limit_val_batches=0 --best_checkpoint.keep=0 --replicas.ignore=['*']
        --trainer.gradient_clip_val=null"""
    return ["fit", *given.split(), *more]


def by_hand(accumulate: int) -> dict[str, Tensor]:
    """A loop of plain torch that leaves the bad step out, and copies the model back after it."""
    module = Normalized()
    module.load_state_dict(Normalized.start)
    optimizer = torch.optim.Adam(module.parameters(), module.learning_rate)
    steps = [
        Normalized.batches[first : first + accumulate]
        for first in range(0, len(Normalized.batches), accumulate)
    ]
    for step, batches in enumerate(steps, start=1):
        if step == BAD_STEP:
            continue
        optimizer.zero_grad()
        for images, labels in batches:
            (module.objective(images, labels, step) / accumulate).backward()
        optimizer.step()
    return module.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_skipped_step_leaves_the_buffers_as_a_loop_without_it(
    accumulate: int, tmp_path: Path
) -> None:
    given = flags(tmp_path, SKIP, f"--trainer.accumulate_grad_batches={accumulate}")
    assert run([*given, "--trainer.devices=1"], NORMALIZED) == Exit.DONE
    (incident,) = read_incidents(only_run(tmp_path))
    assert (incident["step"], incident["decision"]) == (BAD_STEP, "skip")
    found = read_full(newest(only_run(tmp_path)))["state_dict"]
    expected = by_hand(accumulate)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    assert found["late.num_batches_tracked"] == accumulate * (STEPS - LATE)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", tiers(["ddp", "fsdp2", "zero2"], daily=["fsdp2"]))
def test_each_strategy_saves_finite_buffers_after_a_skipped_step(
    strategy: str, tmp_path: Path
) -> None:
    given = flags(tmp_path, SKIP, "--trainer.devices=2", *flags_of(strategy))
    record = Workers(2, NORMALIZED).run(given, tmp_path / "record").check()
    assert len(read_incidents(record.run)) == 1
    weights = read_full(newest(record.run))["state_dict"]
    del weights["mask"]
    assert is_finite(weights)


def spoil_buffer(step: int, value: float) -> Any:
    """Something writes into a buffer that the loss does not show."""
    original = PlainClassifier.optimizer_step

    def optimizer_step(self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        if self.global_step + 1 == step:
            self.mean_loss.fill_(value)

    return optimizer_step


class Finite(Normalized):
    """Without the bad batch."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.objective(*batch, step=1)


FINITE = Project("tests.support", f"{__name__}:Finite", ".classifier:Images")


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_buffer_that_is_not_finite_is_not_saved(
    policy: str, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    """A mask with minus infinities is."""
    monkeypatch.setattr(Finite, "optimizer_step", spoil_buffer(4, math.inf))
    given = flags(tmp_path, "--last_checkpoint.every_n_steps=2", "--trainer.devices=1")
    code = run([*given, f"--numerics.on_non_finite={policy}"], FINITE)
    assert code == Exit.NON_FINITE
    said = capsys.readouterr().err
    assert "training stopped: after step 4 the buffer mean_loss is not finite: no anomalous" in said
    assert newest_step(only_run(tmp_path)) == 2


def spoil_shards(step: int, rank: int, names: Container[str]) -> None:
    """In each worker: one rank's shards of these parameters hold a NaN after `step`."""
    original = LanguageModule.optimizer_step

    def optimizer_step(self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        if (self.global_step + 1, self.global_rank) == (step, rank):
            for name, parameter in self.named_parameters():
                if name in names:
                    local_shard(parameter).detach().view(-1)[-1] = math.nan

    LanguageModule.optimizer_step = optimizer_step


@pytest.mark.slow
@pytest.mark.parametrize("strategy", tiers(["fsdp2", "zero3"], daily=["fsdp2"]))
def test_the_sentence_names_the_tensor_and_the_rank(guarded: Train, strategy: str) -> None:
    name = "model.model.layers.1.mlp.up_proj.weight"
    spoiled = [name, "model.model.norm.weight"]
    run = guarded(strategy, "weights", partial(spoil_shards, 4, 1, spoiled))
    said = f"after step 4 the weight {name} of rank 1 is not finite, and so is 1 more tensor: "
    for answer in run.answers.values():
        assert said in answer and "exit code 65" in answer, answer


def test_a_buffer_that_is_first_written_after_a_step_without_writes_is_restored() -> None:
    """As of a network that is trained after its frozen part."""
    module = nn.BatchNorm1d(2).eval()
    buffers = StepBuffers(module)
    for trains in (False, True):  # it is known as written after the second step
        buffers.keep()
        module.train(trains)(torch.ones(3, 2))
        buffers.restore_where(torch.zeros(()))
    before = copy.deepcopy(module.state_dict())
    buffers.keep()
    module(torch.full((3, 2), math.nan))
    buffers.restore_where(torch.ones(()))
    for name, tensor in before.items():
        assert torch.equal(module.state_dict()[name], tensor), name
