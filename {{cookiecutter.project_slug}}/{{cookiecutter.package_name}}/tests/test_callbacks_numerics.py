"""The numerics guard: bad steps change no weight, under any strategy; they are told, and no checkpoint holds NaN."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ..callbacks import numerics
from ..callbacks.incidents import Seen, read_incidents, read_jumps
from ..callbacks.numerics import Numerics
from ..checkpoint import commit
from ..checkpoint.formats import read_full
from ..checkpoint.manifest import step_of
from ..errors import Ended, Exit
from ..module import LanguageModule
from ..rehearsal.record import RunRecord
from ..rehearsal.workers import Workers
from ..text.order import permutation
from ..tools.audit import audit, read_attempts
from .conftest import CONFIGS, only_run, run
from .test_parallel_parity import MODELS, PROCESSES, assert_close

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

    def loss(self: Any, logits: Tensor, labels: Tensor) -> Tensor:
        if self.training and (self.global_step + 1, self.global_rank) == (step, rank):
            logits.register_hook(lambda gradient: torch.full_like(gradient, math.inf))
        return original(self, logits, labels)

    LanguageModule.loss = loss
    _tell_exit_codes()


def _tell_exit_codes() -> None:
    original = Ended.__init__

    def told(self: Any, code: Exit, sentence: str) -> None:
        original(self, code, sentence)
        self.add_note(f"exit code {int(code)}")

    Ended.__init__ = told


def leave_out_by_hand(step: int) -> None:
    """In each worker: no guard, and the one step is not taken, as one would write it in a loop of one's own."""
    _without_guard()

    def on_before_optimizer_step(self: Any, optimizer: Any) -> None:
        if self.global_step + 1 == step:
            for parameter in self.parameters():
                parameter.grad = None

    LanguageModule.on_before_optimizer_step = on_before_optimizer_step


def _without_guard() -> None:
    for hook in ("on_before_backward", "on_train_start", "on_before_optimizer_step", "on_save_checkpoint"):
        setattr(Numerics, hook, lambda *_: None)


class Train:
    """Short trainings of two ranks, with two micro-batches a step."""

    def __init__(self, folder: Path, corpus: Path, cache: Path) -> None:
        self.folder = folder
        self.flags = [
            f"--run.root={folder / 'runs'}", "--data.source=TextFiles", f"--data.source.paths=[{corpus}/*.txt]",
            "--data.tokenizer=Bytes", f"--data.cache_dir={cache}", "--data.seq_len=32", "--data.validation_share=0.15",
            "--data.test_share=0.15", "--data.global_batch_size=8", "--trainer.accelerator=cpu",
            "--trainer.max_steps=8", "--trainer.log_every_n_steps=1", "--trainer.limit_val_batches=0",
            "--trainer.logger=false", "--model.optim.warmup=2", "--model.optim.learning_rate=0.01",
            "--last_checkpoint.every_n_steps=1",
        ]  # fmt: skip
        with Workers(1) as workers:
            workers.run(["prepare", *self.flags], folder / "prepare").check()

    def __call__(self, strategy: str, name: str, prelude: Callable[[], None] | None, *extra: str) -> RunRecord:
        num = PROCESSES.get(strategy, 1)
        model = MODELS["deepseek_v3" if strategy == "fsdp2_ep" else "llama"]
        flags = [f"--config={CONFIGS}/strategy/{strategy}.yaml"] if strategy in PROCESSES else []
        if strategy == "zero3":
            flags += ["--trainer.strategy.init_args.param_persistence_threshold=16"]
        flags += [f"--trainer.devices={num}", f"--data.micro_batch_size={4 // num}", f"--model.architecture={model}"]
        record = self.folder / f"{strategy}-{name}"
        number = len(list(self.folder.glob(f"{record.name}*")))
        argv = ["fit", *self.flags, *flags, *extra]
        with Workers(num) as workers:
            return workers.run(argv, record.with_name(f"{record.name}.{number}"), prelude=prelude, run_id=record.name)

    def run_folder(self, strategy: str, name: str) -> Path:
        return self.folder / "runs" / "default" / f"{strategy}-{name}"


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory, corpus: Path, cache: Path) -> Train:
    return Train(tmp_path_factory.mktemp("numerics"), corpus, cache)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_with_nan_on_one_rank_is_left_out_and_told(train: Train, strategy: str) -> None:
    spoil = partial(spoil_loss, BAD_STEP, rank=1, micro_batch=0)
    run = train(strategy, "skip", spoil, "--numerics.on_non_finite=skip").check()
    (incident,) = read_incidents(run.run)
    assert (incident["step"], incident["kind"], incident["decision"]) == (BAD_STEP, "non_finite", "skip")
    assert incident["suspects"] == [1]
    assert [math.isnan(rank["loss"]) for rank in incident["ranks"]] == [False, True]
    assert all(len(rank["rows"]) == 2 and all(len(micro) == 2 for micro in rank["rows"]) for rank in incident["ranks"])
    assert all(bool(tensor.isfinite().all()) for tensor in run.end.values())
    assert f"step {BAD_STEP} was left out: loss nan" in run.log(0)
    assert "from rank 1" in run.log(0)
    for name in run.end:  # the last step's hashes: what lies on several ranks is the same there
        hashes = {tuple(run.events("step", rank)[-1]["tensors"].get(name, ())) for rank in range(run.size)}
        assert len({h for part, h in (x for x in hashes if x and not x[0])}) <= 1, name
    by_hand = train("ddp" if strategy.startswith("zero") else strategy, "by-hand", partial(leave_out_by_hand, BAD_STEP))
    expected = by_hand.check().end
    if strategy.startswith("zero"):
        assert_close(run.end, expected, 1e-5)
    else:
        assert all(torch.equal(run.end[name], expected[name]) for name in expected)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_infinite_gradient_with_a_finite_loss_stops_all_ranks(train: Train, strategy: str) -> None:
    run = train(strategy, "stop", partial(spoil_gradient, BAD_STEP, rank=0))
    assert len(run.answers) == PROCESSES[strategy]
    for answer in run.answers.values():
        assert answer.startswith(f"Ended: training stopped: step {BAD_STEP} was left out") and "exit code 65" in answer
    (incident,) = read_incidents(train.run_folder(strategy, "stop"))
    assert math.isfinite(incident["loss"]) and not math.isfinite(incident["gradient_norm"])
    assert incident["suspects"] == []
    assert newest_step(train.run_folder(strategy, "stop")) < BAD_STEP


SPIKES = ["--numerics.spike_window=8", "--numerics.spike_sigmas=6"]  # it looks from the 5th step on
SPIKE_STEP = 7


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_a_spike_is_skipped_and_its_samples_are_told(train: Train, strategy: str) -> None:
    spoil = partial(spoil_loss, SPIKE_STEP, rank=1, micro_batch=1, factor=50.0)
    run = train(strategy, "spike", spoil, "--numerics.on_spike=skip", *SPIKES).check()
    (incident,) = read_incidents(run.run)
    assert (incident["step"], incident["kind"], incident["suspects"]) == (SPIKE_STEP, "spike", [1])
    assert incident["loss"] > incident["limit"] > 0
    by_hand = train("ddp", "spike-by-hand", partial(leave_out_by_hand, SPIKE_STEP)).check()
    assert_close(run.end, by_hand.end, 0.0 if strategy == "ddp" else 1e-5)


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
    flags = ["--numerics.on_spike=roll_back", "--last_checkpoint.every_n_steps=2", "--sample_ledger.enabled=true"]
    first = train(strategy, "roll-back", spoil, *flags, *SPIKES)
    assert len(first.answers) == 2
    for answer in first.answers.values():
        assert answer.startswith("Ended: rolling back") and "exit code 71" in answer
    folder = train.run_folder(strategy, "roll-back")
    (incident,) = read_incidents(folder)
    assert newest_step(folder) == SPIKE_STEP - 1

    again = train(strategy, "roll-back", spoil, *flags, *SPIKES).check()
    assert (min(again.loss), max(again.loss)) == (SPIKE_STEP, 8)
    assert len(read_incidents(folder)) == 1
    attempts = read_attempts(folder / "ledger")
    told, wrong = audit(attempts)
    assert not wrong and any("samples 48 to 55 of the stream" in sentence for sentence in told)
    bad = {row for rank in incident["ranks"] for micro_batch in rank["rows"] for row in micro_batch}
    read = {row for ranks in attempts[1].steps.values() for micros in ranks.values() for rows in micros for row in rows}
    assert len(bad) == 8 and not bad & read


# ---- on one process, in this one ------------------------------------------------------------------------------------


def spoil(monkeypatch: pytest.MonkeyPatch, is_bad: Callable[[int], bool], factor: float = math.nan) -> None:
    """The loss of each step that `is_bad`, times `factor`, in its first micro-batch."""
    original = LanguageModule.training_step

    def training_step(self: Any, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        hit = batch_idx % 4 == 0 and is_bad(self.global_step + 1)
        return original(self, batch, batch_idx) * (factor if hit else 1.0)

    monkeypatch.setattr(LanguageModule, "training_step", training_step)


LAST = ["--ckpt_path=last"]
QUICK = ["--trainer.max_steps=8", "--trainer.limit_val_batches=0", "--trainer.logger=false", "--model.optim.warmup=2"]


def saved_weights(root: Path, name: str = "default") -> dict[str, Tensor]:
    return read_full(newest(only_run(root, name)))["state_dict"]


def is_finite(weights: dict[str, Tensor]) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in weights.values())


@pytest.mark.parametrize("last", [4, 8])
def test_stopping_returns_its_exit_code_and_keeps_the_checkpoint_from_before(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], last: int
) -> None:
    """Also when it is the last step, which has no next one for the host to look at it in."""
    spoil(monkeypatch, lambda step: step == last)
    assert run("fit", *flags, *QUICK, "--last_checkpoint.every_n_steps=1") == Exit.NON_FINITE
    assert f"training stopped: step {last} was left out: loss nan" in capsys.readouterr().err
    assert newest_step(only_run(tmp_path)) == last - 1
    assert is_finite(saved_weights(tmp_path))


def test_without_the_guard_nan_weights_are_saved_and_nothing_is_said(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, lambda step: step == 4)
    for hook in ("on_before_backward", "on_train_start", "on_before_optimizer_step", "on_save_checkpoint"):
        monkeypatch.setattr(Numerics, hook, lambda *_: None)
    assert run("fit", *flags, *QUICK) == 0
    assert not is_finite(saved_weights(tmp_path))


def test_skipping_for_too_long_ends_in_stopping(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, lambda step: step >= 3)
    skip = ["--numerics.on_non_finite=skip", "--numerics.patience=3"]
    assert run("fit", *flags, *QUICK, *skip) == Exit.NON_FINITE
    assert [(i["step"], i["decision"]) for i in read_incidents(only_run(tmp_path))] == [
        (3, "skip"),
        (4, "skip"),
        (5, "stop"),
    ]


def test_rolling_back_to_one_checkpoint_again_and_again_ends_in_stopping(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, lambda step: step >= 4)
    flags = [*flags, *QUICK, "--numerics.on_non_finite=roll_back", "--numerics.max_roll_backs=2"]
    codes = [run("fit", *flags, "--last_checkpoint.every_n_steps=1", *resume) for resume in ([], *[LAST] * 3)]
    assert codes == [Exit.HUNG, Exit.HUNG, Exit.HUNG, Exit.NON_FINITE]
    jumps = [(each["start"], each["end"]) for each in read_jumps(only_run(tmp_path))]
    assert jumps == [(24, 32), (32, 40), (40, 48)], "each the samples of the fourth step; 8 a step"


def test_a_checkpoint_of_weights_that_something_else_has_spoilt_is_refused(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = LanguageModule.optimizer_step

    def then_plant(self: Any, *args: Any, **options: Any) -> None:
        step(self, *args, **options)
        if self.global_step == 3:  # it is counted later
            next(iter(self.parameters())).data.view(-1)[7] = math.nan

    monkeypatch.setattr(LanguageModule, "optimizer_step", then_plant)
    assert run("fit", *flags, *QUICK, "--last_checkpoint.every_n_steps=2") == Exit.NON_FINITE
    assert newest_step(only_run(tmp_path)) == 2

    monkeypatch.setattr(numerics, "_are_finite", lambda *_: True)
    run("fit", *flags, *QUICK, "--trainer.max_steps=4", "--run.name=red")
    assert not is_finite(saved_weights(tmp_path, "red")), "without the look at the weights they would be saved"


def test_an_optimizer_that_is_not_fused_is_kept_from_the_step_too(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, lambda step: step == 4)
    monkeypatch.setattr(LanguageModule, "configure_optimizers", lambda self: torch.optim.SGD(self.parameters(), lr=0.1))
    assert run("fit", *flags, *QUICK, "--numerics.on_non_finite=skip") == 0
    assert is_finite(saved_weights(tmp_path)) and len(read_incidents(only_run(tmp_path))) == 1


def judged(guard: Numerics, norm: float, loss: float = 2.0, **precision: Any) -> str:
    """What the guard says of a step with this loss and norm."""
    plugin = SimpleNamespace(precision="16-mixed", **precision)
    trainer = SimpleNamespace(precision_plugin=plugin, is_global_zero=True, datamodule=SimpleNamespace(rank=0))
    guard._leaves_it_to_zero, guard._rolled_back = False, []
    seen = Seen(torch.tensor([loss, norm, math.inf, float(not math.isfinite(norm))]), step=3)
    try:
        guard._act_on(trainer, seen)
    except Ended as ended:
        return ended.code.name
    return "goes on"


def test_a_loss_scalers_overflow_is_no_incident_until_it_goes_on(tmp_path: Path) -> None:
    guard = Numerics(folder=str(tmp_path), patience=3)
    assert [judged(guard, math.inf, scaler=object()) for _ in range(2)] == ["goes on"] * 2
    assert judged(guard, 1.0, scaler=object()) == "goes on"
    assert [judged(guard, math.inf, scaler=object()) for _ in range(3)] == ["goes on"] * 2 + ["NON_FINITE"]
    assert judged(Numerics(folder=str(tmp_path)), math.inf, scaler=None) == "NON_FINITE", "without a scaler, at once"


def test_the_limit_is_robust_and_waits_for_half_a_window() -> None:
    guard = Numerics(on_spike="skip", spike_window=8, spike_sigmas=6)
    losses = [2.0, 2.1, 1.9, 90.0, 2.05, 1.95]  # a spike in the window
    limits = []
    for loss in losses:
        limits.append(guard._limit(torch.tensor(loss)).item())
        guard._recent[guard._steps % 8] = loss
        guard._steps += 1
    assert limits[:4] == [math.inf] * 4
    # median of 1.9 2.0 2.1 90 (the lower middle) 2.0, deviations 0 0.1 0.1 88: 0.1 (the lower middle)
    assert limits[4] == pytest.approx(2.0 + 6 * 1.4826 * 0.1, rel=1e-4)
    resumed = Numerics(on_spike="skip", spike_window=8, spike_sigmas=6)
    resumed.load_state_dict(guard.state_dict())
    assert resumed._limit(torch.tensor(0.0)) == guard._limit(torch.tensor(0.0)) < 4, "a resumed run has the window"


def newest(run: Path) -> Path:
    """The newest checkpoint."""
    path = commit.newest(run / "checkpoints")
    assert path is not None
    return path


def newest_step(run: Path) -> int:
    return step_of(newest(run))
