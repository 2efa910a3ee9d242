"""The numerics guard under every strategy: a bad step changes no weight, on any rank, and is told with its samples."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from trainer_dev.module import LanguageModule

from dist_template.callbacks.incidents import read_jumps
from dist_template.callbacks.numerics import Numerics
from dist_template.checkpoint import commit
from dist_template.checkpoint.manifest import step_of
from dist_template.errors import Ended, Exit
from dist_template.observe.history.run import read_incidents
from dist_template.rehearsal.record import RunRecord
from dist_template.text.order import permutation
from tests.parallel.test_parity import MODELS, PROCESSES, assert_close
from tests.support.runs import Workers
from tests.support.strategies import flags_of
from tests.support.tiers import tiers

BAD_STEP = 5
STRATEGIES = ["ddp", "fsdp2", "fsdp2_ep", "zero1", "zero2", "zero3"]


def spoil_loss(step: int, rank: int, micro_batch: int, factor: float = math.nan) -> None:
    """In each worker: one rank's loss in one micro-batch of one step, times `factor`."""
    original = LanguageModule.training_step

    def training_step(self: Any, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = original(self, batch, batch_idx)
        hit = (self.global_step + 1, self.global_rank, batch_idx % 2) == (step, rank, micro_batch)
        return loss * factor if hit else loss

    LanguageModule.training_step = training_step
    _tell_exit_codes()


def spoil_gradient(step: int, rank: int) -> None:
    """In each worker: one rank's gradient in one step is infinite somewhere, its loss is not."""
    original = LanguageModule.loss

    def loss(self: Any, logits: Tensor, labels: Tensor, cross_entropy: Tensor) -> Tensor:
        if self.training and (self.global_step + 1, self.global_rank) == (step, rank):
            logits.register_hook(lambda gradient: torch.full_like(gradient, math.inf))
        return original(self, logits, labels, cross_entropy)

    LanguageModule.loss = loss
    _tell_exit_codes()


def _tell_exit_codes() -> None:
    original = Ended.__init__

    def told(self: Any, code: Exit, sentence: str, local_rank: int = 0) -> None:
        original(self, code, sentence, local_rank)
        self.add_note(f"exit code {int(code)}")

    Ended.__init__ = told


def leave_out_by_hand(step: int) -> None:
    """In each worker: no guard, and the one step is not taken, as one would write it in a loop of one's own."""
    _without_guard()

    def on_before_optimizer_step(self: Any, optimizer: Any) -> None:
        if self.global_step + 1 == step:
            for parameter in self.parameters():
                parameter.grad = None
            self.balancer._arriving = None  # nor do the routers' biases move

    LanguageModule.on_before_optimizer_step = on_before_optimizer_step


def _without_guard() -> None:
    for hook in ("on_before_backward", "on_train_start", "on_before_optimizer_step", "on_save_checkpoint"):
        setattr(Numerics, hook, lambda *_: None)


class Train:
    """Short trainings of two ranks, with two micro-batches a step."""

    def __init__(self, folder: Path, corpus: Path, cache: Path) -> None:
        self.folder = folder
        self._by_hand: dict[tuple[str, int], dict[str, Tensor]] = {}
        self.flags = [
            f"--run.root={folder / 'runs'}", "--data.source=TextFiles", f"--data.source.paths=[{corpus}/*.txt]",
            "--data.tokenizer=Bytes", f"--data.cache_dir={cache}", "--data.seq_len=32", "--data.validation_share=0.15",
            "--data.test_share=0.15", "--data.global_batch_size=8", "--trainer.accelerator=cpu",
            "--trainer.max_steps=8", "--trainer.log_every_n_steps=1", "--trainer.limit_val_batches=0",
            "--trainer.logger=false", "--model.optim.warmup=2", "--model.optim.learning_rate=0.01",
            "--last_checkpoint.every_n_steps=4",
        ]  # fmt: skip
        with Workers(1) as workers:
            workers.run(["prepare", *self.flags], folder / "prepare").check()

    def __call__(self, strategy: str, name: str, prelude: Callable[[], None] | None, *extra: str) -> RunRecord:
        num = PROCESSES.get(strategy, 1)
        model = MODELS["deepseek_v3" if strategy == "fsdp2_ep" else "llama"]
        flags = flags_of(strategy) if strategy in PROCESSES else []
        if strategy == "zero3":
            flags += ["--trainer.strategy.init_args.param_persistence_threshold=16"]
        flags += [f"--trainer.devices={num}", f"--data.micro_batch_size={4 // num}", f"--model.architecture={model}"]
        record = self.folder / f"{strategy}-{name}"
        number = len(list(self.folder.glob(f"{record.name}*")))
        argv = ["fit", *self.flags, *flags, *extra]
        with Workers(num) as workers:
            return workers.run(argv, record.with_name(f"{record.name}.{number}"), prelude=prelude, run_id=record.name)

    def by_hand(self, strategy: str, step: int) -> dict[str, Tensor]:
        """The weights of a training, done once, in which `step` is left out as one would write it oneself."""
        if (strategy, step) not in self._by_hand:
            run = self(strategy, f"by-hand-{step}", partial(leave_out_by_hand, step)).check()
            self._by_hand[strategy, step] = run.end
        return self._by_hand[strategy, step]

    def run_folder(self, strategy: str, name: str) -> Path:
        return self.folder / "runs" / "default" / f"{strategy}-{name}"


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory, corpus: Path, cache: Path) -> Train:
    return Train(tmp_path_factory.mktemp("numerics"), corpus, cache)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", tiers(STRATEGIES, daily=["ddp", "fsdp2_ep", "zero3"]))
def test_a_step_with_nan_on_one_rank_is_left_out_and_told(train: Train, strategy: str) -> None:
    spoil = partial(spoil_loss, BAD_STEP, rank=1, micro_batch=0)
    run = train(strategy, "skip", spoil, "--numerics.on_non_finite=skip").check()
    (incident,) = read_incidents(run.run)
    assert (incident["step"], incident["kind"], incident["decision"]) == (BAD_STEP, "non_finite", "skip")
    assert incident["suspects"] == [1]
    assert [math.isnan(rank["loss"]) for rank in incident["ranks"]] == [False, True]
    assert all(len(rank["rows"]) == 2 and all(len(micro) == 2 for micro in rank["rows"]) for rank in incident["ranks"])
    assert is_finite(run.end)
    assert f"step {BAD_STEP} was skipped: loss nan" in run.log(0)
    assert "from rank 1" in run.log(0)
    for name in run.end:  # ranks that hold the same part of a tensor hold the same
        parts = [run.events("step", rank)[-1]["tensors"].get(name) for rank in range(run.size)]
        held = {tuple(part) for part in parts if part}
        assert len(held) == len({place for place, _ in held}), name
    is_zero = strategy.startswith("zero")
    expected = train.by_hand("ddp" if is_zero else strategy, BAD_STEP)
    assert_close(run.end, expected, 1e-5 if is_zero else 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", tiers(["ddp", "fsdp2_ep", "zero1", "zero2", "zero3"], daily=["fsdp2_ep", "zero2"]))
def test_an_infinite_gradient_with_a_finite_loss_stops_all_ranks(train: Train, strategy: str) -> None:
    run = train(strategy, "stop", partial(spoil_gradient, BAD_STEP, rank=0))
    assert len(run.answers) == PROCESSES[strategy]
    for answer in run.answers.values():
        assert answer.startswith(f"Ended: training stopped: step {BAD_STEP} was skipped") and "exit code 65" in answer
    (incident,) = read_incidents(train.run_folder(strategy, "stop"))
    assert math.isfinite(incident["loss"]) and not math.isfinite(incident["gradient_norm"])
    assert incident["suspects"] == []
    assert newest_step(train.run_folder(strategy, "stop")) < BAD_STEP


SPIKES = ["--numerics.spike_window=8", "--numerics.spike_sigmas=6"]  # it looks from the 5th step on
SPIKE_STEP = 7


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_a_spike_is_skipped_and_its_samples_are_told(train: Train, strategy: str) -> None:
    spoil = partial(spoil_loss, SPIKE_STEP, rank=1, micro_batch=1, factor=50.0)
    run = train(strategy, "spike", spoil, "--numerics.on_spike=skip", *SPIKES).check()
    (incident,) = read_incidents(run.run)
    assert (incident["step"], incident["kind"], incident["suspects"]) == (SPIKE_STEP, "spike", [1])
    assert incident["loss"] > incident["limit"] > 0
    assert_close(run.end, train.by_hand("ddp", SPIKE_STEP), 0.0 if strategy == "ddp" else 1e-5)


BF16 = "--trainer.precision=bf16-mixed"
ADDS_IN_FP32 = (
    '{"zero_optimization": {"stage": 1}, "bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp32"}}'
)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["spike", "non_finite"])
@pytest.mark.parametrize(("strategy", "config"), [("zero2_offload", ""), ("zero1", ADDS_IN_FP32)])
def test_deepspeeds_other_optimizers_leave_out_one_step_and_no_more(
    train: Train, strategy: str, config: str, fault: str, tmp_path: Path
) -> None:
    (tmp_path / "deepspeed.json").write_text(config)
    flags = [BF16, "--numerics.on_spike=skip", "--numerics.on_non_finite=skip", *SPIKES]
    flags += [f"--trainer.strategy.init_args.config={tmp_path}/deepspeed.json"] if config else []
    loss = partial(spoil_loss, SPIKE_STEP, rank=1, micro_batch=1, factor=50.0)
    run = train(strategy, f"{fault}-bf16", loss if fault == "spike" else partial(spoil_gradient, SPIKE_STEP, 0), *flags)
    assert [(i["step"], i["kind"]) for i in read_incidents(run.check().run)] == [(SPIKE_STEP, fault)]
    assert is_finite(run.end)


def spoil_sample(place: int) -> None:
    """In each worker: whichever step reads the sample at `place` of the stream, its loss is 50 times too high."""
    original = LanguageModule.training_step

    def training_step(self: Any, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        row = permutation(len(self.trainer.train_dataloader.dataset), 0, 0)[place]
        return original(self, batch, batch_idx) * (50.0 if row in self.trainer.datamodule.window_rows[-1] else 1.0)

    LanguageModule.training_step = training_step
    _tell_exit_codes()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
def test_a_roll_back_goes_on_from_before_and_never_reads_those_samples_again(train: Train, strategy: str) -> None:
    spoil = partial(spoil_sample, (SPIKE_STEP - 1) * 8 + 3)
    flags = ["--numerics.on_spike=roll_back", "--last_checkpoint.every_n_steps=2"]
    first = train(strategy, "roll-back", spoil, *flags, *SPIKES)
    assert len(first.answers) == 2
    for answer in first.answers.values():
        assert answer.startswith("Ended: rolling back") and "exit code 71" in answer
    folder = train.run_folder(strategy, "roll-back")
    (incident,) = read_incidents(folder)
    assert newest_step(folder) == SPIKE_STEP - 1

    again = train(strategy, "roll-back", spoil, *flags, *SPIKES).check()
    assert (min(again.loss), max(again.loss)) == (SPIKE_STEP, 8)
    assert len(read_incidents(folder)) == 1, "the bad sample is read again"
    assert [(jump["start"], jump["end"]) for jump in read_jumps(folder)] == [(48, 56)]
    assert sum(len(rows) for rank in incident["ranks"] for rows in rank["rows"]) == 8


def is_finite(weights: dict[str, Tensor]) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in weights.values())


def newest(run: Path) -> Path:
    """The newest checkpoint."""
    path = commit.newest(run / "checkpoints")
    assert path is not None
    return path


def newest_step(run: Path) -> int:
    return step_of(newest(run))
