"""Guards of numbers and replicas: reactions to what is anomalous, under every strategy."""

import json
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from trainer_dev.module import LanguageModule

from dist_template import Ended, Project
from dist_template.callbacks import Numerics, numerics
from dist_template.callbacks.numerics import StepCheck
from dist_template.callbacks.replicas import checksum
from dist_template.checkpoint import manifest
from dist_template.checkpoint.formats import read_full
from dist_template.errors import Exit
from dist_template.layout import local_shard
from dist_template.wings.rehearse.record import RunRecord
from tests.support.classifier import PlainClassifier
from tests.support.numerics import (
    Train,
    is_finite,
    newest_step,
    spoil_gradient,
    spoil_loss,
    spoil_reduced_gradient,
)
from tests.support.parity import PROCESSES, assert_close
from tests.support.runs import Workers, newest, only_run, read_incidents, run
from tests.support.strategies import flags_of
from tests.support.tiers import tiers

QUICK = ["--trainer.max_steps=8", "--trainer.limit_val_batches=0", "--trainer.logger=false"]
QUICK += ["--model.optim.warmup=2"]


def saved_weights(root: Path, name: str = "default") -> dict[str, Tensor]:
    return read_full(newest(only_run(root, name)))["state_dict"]


@pytest.mark.parametrize("last", [4, 8])
def test_stopping_returns_its_exit_code_and_keeps_the_checkpoint_from_before(
    flags: list[str], tmp_path: Path, monkeypatch: Any, capsys: Any, last: int
) -> None:
    """Also at the last step, after which there is no step in which the host could check it."""
    spoil_loss([last], replace=monkeypatch.setattr)
    assert run("fit", *flags, *QUICK, "--last_checkpoint.every_n_steps=1") == Exit.NON_FINITE
    shown = capsys.readouterr()
    assert f"training stopped: step {last} was not applied: loss nan" in shown.err
    assert "diagnosis: error: the loss or the gradient is not finite" in shown.out
    assert newest_step(only_run(tmp_path)) == last - 1
    assert is_finite(saved_weights(tmp_path))


def test_skip_has_patience(flags: list[str], tmp_path: Path, monkeypatch: Any) -> None:
    spoil_loss(range(3, 9), replace=monkeypatch.setattr)
    skip = ["--numerics.on_non_finite=skip", "--numerics.patience=3"]
    assert run("fit", *flags, *QUICK, *skip) == Exit.NON_FINITE
    found = [(each["step"], each["decision"]) for each in read_incidents(only_run(tmp_path))]
    assert found == [(3, "skip"), (4, "skip"), (5, "stop")]


@pytest.mark.slow
def test_no_checkpoint_has_non_finite_weights(flags: Any, tmp_path: Path, monkeypatch: Any) -> None:
    step = LanguageModule.optimizer_step

    def then_plant(self: Any, *args: Any, **options: Any) -> None:
        step(self, *args, **options)
        if self.global_step == 3:  # it is counted later
            next(iter(self.parameters())).data.view(-1)[7] = math.nan

    monkeypatch.setattr(LanguageModule, "optimizer_step", then_plant)
    assert run("fit", *flags, *QUICK, "--last_checkpoint.every_n_steps=2") == Exit.NON_FINITE
    assert newest_step(only_run(tmp_path)) == 2

    monkeypatch.setattr(numerics, "_weights_are_finite", lambda *_: True)
    run("fit", *flags, *QUICK, "--trainer.max_steps=4", "--run.name=red")
    assert not is_finite(saved_weights(tmp_path, "red"))


def test_an_optimizer_that_is_not_fused_skips_the_step_too(
    flags: list[str], tmp_path: Path, monkeypatch: Any
) -> None:
    spoil_loss([4], replace=monkeypatch.setattr)
    sgd = lambda self: torch.optim.SGD(self.parameters(), lr=0.1)  # noqa: E731
    monkeypatch.setattr(LanguageModule, "configure_optimizers", sgd)
    assert run("fit", *flags, *QUICK, "--numerics.on_non_finite=skip") == 0
    assert is_finite(saved_weights(tmp_path)) and len(read_incidents(only_run(tmp_path))) == 1


@pytest.mark.parametrize(("own", "everywhere"), [(1.0, math.nan), (math.nan, math.nan), (1.0, 1.0)])
def test_the_loss_scale_falls_where_the_gradient_is_finite(own: float, everywhere: float) -> None:
    """Else the ranks' scales differ, and the next steps' sums of gradients are wrong."""
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer, scaler = torch.optim.AdamW([weight]), torch.amp.GradScaler("cpu", init_scale=256.0)
    scaler.scale(weight.sum() * own).backward()
    scaler.unscale_(optimizer)
    non_finite = torch.tensor(float(not math.isfinite(everywhere)))
    numerics._skip_step(optimizer, torch.tensor(1.0), non_finite, scaler)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == (256.0 if everywhere == 1.0 else 128.0)
    assert weight.tolist() == [1.0] * 3


def judged(guard: Numerics, norm: float, scaler: Any) -> str:
    """Returns how the guard reacts to a step with a finite loss and this norm."""
    trainer = SimpleNamespace(is_global_zero=True, datamodule=SimpleNamespace(rank=0))
    trainer.precision_plugin = SimpleNamespace(precision="16-mixed", scaler=scaler)
    guard._uses_deepspeed = False
    values = torch.tensor([2.0, norm, math.inf, float(not math.isfinite(norm))])
    try:
        guard._act_on(trainer, None, StepCheck(values, step=3))
    except Ended as ended:
        return ended.code.name
    return "continues"


def test_an_overflow_of_the_loss_scaler_is_an_incident_only_after_patience(tmp_path: Path) -> None:
    guard = Numerics(folder=str(tmp_path), patience=3)
    norms = [math.inf, math.inf, 1.0, math.inf, math.inf]
    assert [judged(guard, norm, scaler=object()) for norm in norms] == ["continues"] * 5
    assert judged(guard, math.inf, scaler=object()) == "NON_FINITE"
    assert judged(Numerics(folder=str(tmp_path)), math.inf, scaler=None) == "NON_FINITE"


def test_the_spike_limit_is_robust_and_inactive_for_half_a_window() -> None:
    guard = Numerics(on_spike="skip", spike_window=8, spike_sigmas=6)
    losses = [2.0, 2.1, 1.9, 90.0, 2.05, 1.95]  # a spike in the window
    limits = []
    for step, loss in enumerate(losses):
        limits.append(guard._limit().item())
        guard._recent[step] = loss
        guard._steps += 1
    assert limits[:4] == [math.inf] * 4
    # median of 1.9 2.0 2.1 90: 2.0 (the lower middle); of deviations 0 0.1 0.1 88: 0.1
    assert limits[4] == pytest.approx(2.0 + 6 * 1.4826 * 0.1, rel=1e-4)
    resumed = Numerics(on_spike="skip", spike_window=8, spike_sigmas=6)
    resumed.load_state_dict(guard.state_dict())
    assert resumed._limit() == guard._limit() < 4, "a resumed run has the window"


STRATEGIES = ["ddp", "fsdp2", "fsdp2_ep", "zero1", "zero2", "zero3"]
BAD_STEP = 7
SKIP = "--numerics.on_non_finite=skip"
SPIKES = ["--numerics.on_spike=skip", "--numerics.spike_window=8", "--numerics.spike_sigmas=6"]
SPIKE = partial(spoil_loss, [BAD_STEP], rank=1, micro_batch=1, factor=50.0)


def assert_replicas_are_equal(run: RunRecord) -> None:
    """Ranks that hold the same part of a tensor hold the same."""
    for name in run.end:
        parts = [run.events("step", rank)[-1]["tensors"].get(name) for rank in range(run.size)]
        held = {tuple(part) for part in parts if part}
        assert len(held) == len({place for place, _ in held}), name


def skipped(run: RunRecord, kind: str = "non_finite") -> dict[str, Any]:
    """The one incident of a training that completed; the bad step was skipped on all ranks."""
    (incident,) = read_incidents(run.check().run)
    found = [incident[key] for key in ("step", "kind", "decision")]
    assert found == [BAD_STEP, kind, "skip"]
    assert_replicas_are_equal(run)
    return incident


@pytest.mark.slow
@pytest.mark.parametrize("strategy", tiers(STRATEGIES, daily=["fsdp2_ep", "zero3"]))
def test_a_step_with_nan_on_one_rank_is_skipped_and_recorded(guarded: Train, strategy: str) -> None:
    run = guarded(strategy, "skip", partial(spoil_loss, [BAD_STEP], rank=1), SKIP)
    incident = skipped(run)
    assert incident["suspects"] == [1]
    assert [math.isnan(rank["loss"]) for rank in incident["ranks"]] == [False, True]
    rows = [[len(micro) for micro in rank["rows"]] for rank in incident["ranks"]]
    assert rows == [[2, 2]] * 2
    assert is_finite(run.end)
    assert f"step {BAD_STEP} was skipped: loss nan" in run.log(0) and "from rank 1" in run.log(0)
    is_zero = strategy.startswith("zero")
    expected = guarded.by_hand("ddp" if is_zero else strategy, BAD_STEP)
    assert_close(run.end, expected, 1e-5 if is_zero else 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", tiers(STRATEGIES, daily=["zero2"]))
def test_an_infinite_gradient_of_a_finite_loss_stops_all(guarded: Train, strategy: str) -> None:
    run = guarded(strategy, "stop", partial(spoil_gradient, BAD_STEP, rank=0))
    assert len(run.answers) == PROCESSES[strategy]
    for answer in run.answers.values():
        assert answer.startswith(f"Ended: training stopped: step {BAD_STEP} was not applied")
        assert "exit code 65" in answer
    (incident,) = read_incidents(guarded.run_folder(strategy, "stop"))
    assert math.isfinite(incident["loss"]) and not math.isfinite(incident["gradient_norm"])
    assert incident["suspects"] == []
    assert newest_step(guarded.run_folder(strategy, "stop")) < BAD_STEP


DAMAGED = [("ddp", math.nan), ("tp", math.inf), ("hsdp", math.nan)]
DAMAGED += [("fsdp2", math.inf), ("fsdp2_offload", math.nan), ("pp", math.nan), ("cp", math.inf)]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "value"), tiers(DAMAGED, daily=DAMAGED[:1]))
def test_all_ranks_skip_a_step_whose_reduced_gradient_is_damaged_on_one(
    guarded: Train, strategy: str, value: float
) -> None:
    """A corrupted kernel, or a user's hook: the other ranks' loss and norm are finite."""
    spoil = partial(spoil_reduced_gradient, BAD_STEP, rank=1, value=value)
    run = guarded(strategy, "damaged", spoil, SKIP)
    incident = skipped(run)
    assert math.isfinite(incident["loss"])
    if strategy in ("ddp", "tp"):  # elsewhere the norm is joint
        assert incident["suspects"] == [1] and "from rank 1" in run.log(0)
    assert_close(run.end, guarded.by_hand(strategy, BAD_STEP), 0.0)


BF16 = "--trainer.precision=bf16-mixed"
ADDS_IN_FP32: dict[str, Any] = {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}
ADDS_IN_FP32 |= {"data_types": {"grad_accum_dtype": "fp32"}}
OTHERS = [("zero1", json.dumps(ADDS_IN_FP32), "spike"), ("zero2_offload", "", "non_finite")]


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "config", "fault"), tiers(OTHERS, daily=OTHERS[:1]))
def test_deepspeeds_other_optimizers_skip_exactly_one_step(
    guarded: Train, strategy: str, config: str, fault: str, tmp_path: Path
) -> None:
    (tmp_path / "deepspeed.json").write_text(config)
    flags = [BF16, SKIP, *SPIKES]
    flags += [f"--trainer.strategy.init_args.config={tmp_path}/deepspeed.json"] if config else []
    plant = SPIKE if fault == "spike" else partial(spoil_gradient, BAD_STEP, 0)
    run = guarded(strategy, f"{fault}-bf16", plant, *flags)
    incident = skipped(run, fault)
    if fault == "spike":
        assert incident["suspects"] == [1] and incident["loss"] > incident["limit"] > 0
    for name, weight in guarded.by_hand("ddp", BAD_STEP).items():
        difference = run.end[name].float() - weight
        assert difference.norm() < 0.03 * weight.norm(), f"{name}: bf16 makes 0.01, that step 0.08"


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
def test_buffers_that_each_rank_writes_are_rank_zeros(
    tmp_path: Path, strategy: str, ignore: str
) -> None:
    """Or each rank keeps its own, where they are listed; a checkpoint is written either way."""
    argv = [
        "fit",
        f"--run.root={tmp_path / 'runs'}",
        "--run.report=false",
        "--trainer.accelerator=cpu",
        "--trainer.devices=2",
        "--trainer.max_steps=6",
        "--trainer.log_every_n_steps=1",
        "--data.batch_size=4",
        "--best_checkpoint.monitor=val_loss",
        "--last_checkpoint.every_n_steps=3",
        *flags_of(strategy),
        f"--replicas.ignore={ignore}",
    ]
    run = Workers(2, OWN_STATE).run(argv, tmp_path / "record").check()
    assert manifest.newest(run.run / "checkpoints") is not None


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
