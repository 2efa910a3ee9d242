"""A killed and resumed run equals the uninterrupted run: bit for bit on as many ranks, else nearly.

An epoch has 8 steps and a few rows more, with a checkpoint at every second step, and a validation
after step 6. Each run of CELLS is killed three times: inside a save, at an epoch's end, and in
epoch 1, where its newest checkpoint is damaged too."""

import random
from functools import cache, partial
from itertools import product
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import Callback
from torch import nn
from trainer_dev.module import LanguageModule

from dist_template.callbacks import RandomState, global_order
from dist_template.callbacks.random_state import KEY
from dist_template.checkpoint import identity, manifest
from dist_template.checkpoint.formats import read_full
from dist_template.compat import epochs
from dist_template.wings.rehearse.compare import first_difference, trace_resumed
from dist_template.wings.rehearse.interventions import KillAt
from dist_template.wings.rehearse.record import RunRecord
from dist_template.wings.ship.export import command as export
from tests.support import saves
from tests.support.faults import random_state_not_saved
from tests.support.injury import corrupt
from tests.support.parity import FLAGS, MODELS
from tests.support.runs import OURS, SMALL_LLAMA, logged, newest, only_run, refused, run, small
from tests.support.strategies import flags_of
from tests.support.tiers import tiers

STRATEGIES = ["ddp", "fsdp2", "fsdp2_ep", "zero1", "zero2", "zero3"]
PREDICTING = {"fsdp2", "zero2"}  # with modules that predict later tokens
VARIED = {"fsdp2_ep", "zero2"}  # with accumulation over 2, dropout and 2 loader workers
STEPS, EPOCH, EVERY = 15, 8, 2  # optimizer steps: of the run, of an epoch, between two checkpoints
GLOBAL_BATCH, SEQ_LEN = 8, 64
DAMAGED = 12  # the checkpoint that is
CELLS = {"inside a save": 7, "epoch's end": EPOCH + 1, "damaged": DAMAGED - 1}  # resumes at step
DAILY = [*product(["fsdp2_ep"], CELLS)]  # zero3 is killed below, with other numbers of ranks


class Trainings(saves.Trainings):
    def __call__(self, name: str, strategy: str, *extra: str, **options: Any) -> RunRecord:
        is_varied, processes = strategy in VARIED, options.get("processes", 2)
        micro_batch = GLOBAL_BATCH // processes // (2 if is_varied else 1)
        flags = [f"--data.micro_batch_size={micro_batch}"]
        flags += [f"--data.num_workers={2 if is_varied else 0}"]
        model, dropout = "mtp" if strategy in PREDICTING else "deepseek_v3", 0.1 * is_varied
        architecture = MODELS[model].removesuffix("}") + f", attention_dropout: {dropout}}}"
        flags += [f"--model.architecture={architecture}", *FLAGS.get(model, [])]
        flags += [f"--data.global_batch_size={GLOBAL_BATCH}"]  # without phases: EPOCH counts steps
        return super().__call__(name, strategy, *flags, *extra, **options)

    @cache  # noqa: B019
    def whole(self, strategy: str) -> RunRecord:
        """The run that is never stopped."""
        return self(f"{strategy}-whole", strategy).check()

    @cache  # noqa: B019
    def resumed(self, strategy: str) -> dict[str, RunRecord]:
        """Cell -> what the run did after it had been killed there; the last one ends."""
        rank, half = int(strategy != "ddp"), 2  # under DDP rank 0 writes
        inside = partial(saves.crash, rank, half, EPOCH, "save")
        kills: list[dict] = [{"prelude": inside}]
        kills += [{"callbacks": [KillAt(step)]} for step in (EPOCH, DAMAGED + 1)]
        records = []
        for kill in kills:
            records.append(self(f"{strategy}-killed", strategy, **kill))
            assert "killed: exit code -9" in records[-1].answers.values(), records[-1].error
        newest = records[-1].run / "checkpoints" / manifest.name(DAMAGED)
        corrupt(newest, random.Random(0))
        records.append(self(f"{strategy}-killed", strategy).check())
        return dict(zip(CELLS, records[1:], strict=True))

    def kept(self, strategy: str, step: int) -> str:
        """The flag that goes on from a checkpoint of the run that is never stopped."""
        return f"--ckpt_path={self.whole(strategy).run / 'checkpoints' / manifest.name(step)}"


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Trainings:
    folder = tmp_path_factory.mktemp("resume")
    flags = [
        *small(corpus, folder / "cache", folder),
        "--data.validation_share=0.3",
        f"--data.source.paths=[{corpus}/0*.txt,{corpus}/1*.txt]",
        f"--data.seq_len={SEQ_LEN}",
        "--data.test_share=0",
        "--model.optim.learning_rate=0.01",
        "--model.optim.warmup=4",
        f"--trainer.max_steps={STEPS}",
        "--trainer.val_check_interval=6",
        "--trainer.logger=false",
        f"--last_checkpoint.every_n_steps={EVERY}",
        "--last_checkpoint.keep=99",
    ]
    return Trainings(folder, flags)


def difference(whole: RunRecord, leg: RunRecord, first: int) -> str:
    """What of a leg is not, to the bit, what the run that was never stopped did; "" for nothing."""
    steps = sorted(leg.loss)
    if not steps or steps[0] != first or steps != list(range(first, steps[-1] + 1)):
        return f"it continued with the steps {steps} and not from {first}"
    for rank in range(whole.size):
        for kind, keys in (("rows", ("rows", "random")), ("step", ("metrics", "tensors"))):
            want = {(e["step"], e.get("micro_batch")): e for e in whole.events(kind, rank)}
            for event in (e for e in leg.events(kind, rank) if e["step"] >= first):
                expected = want[event["step"], event.get("micro_batch")]
                differing = [key for key in keys if _exact(event[key]) != _exact(expected[key])]
                if differing:
                    where = f"rank {rank}, step {event['step']}: other {' and '.join(differing)}"
                    return f"{where} ({trace_resumed(whole, leg)})"
    owed = {step: found for step, found in whole.eval().items() if first <= step + 1 <= steps[-1]}
    return "" if owed.items() <= leg.eval().items() else f"validations {leg.eval()} and not {owed}"


def _exact(value: Any) -> Any:
    """Without what is measured of the machine, and what is judged a step later."""
    exact = ("train/", "data/", "moe/")
    is_metrics = isinstance(value, dict)
    return {k: v for k, v in value.items() if k.startswith(exact)} if is_metrics else value


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "cell"), tiers(product(STRATEGIES, CELLS), DAILY))
def test_a_killed_run_resumes_bit_identically(train: Trainings, strategy: str, cell: str) -> None:
    """Losses, norms, learning rates, rows, random state of every rank, weights after each step."""
    whole, resumed = train.whole(strategy), train.resumed(strategy)[cell]
    assert list(whole.loss) == list(range(1, STEPS + 1))
    found = difference(whole, resumed, CELLS[cell])
    assert not found, f"{strategy}, {cell}: {found}"
    if cell == "damaged":
        assert f"are skipped: {manifest.name(DAMAGED)} (" in resumed.log(0)
        assert not first_difference(whole.end, resumed.end)
        assert not list((resumed.run / "checkpoints").glob(".*")), "nothing of a killed save"


def position_forgotten() -> None:
    """As with a loader that keeps no state: from the epoch's start."""
    global_order.ConsumedSamples.value = lambda self, trainer: 0


def epoch_draws() -> None:
    """Without what keeps a loader's draws, at an epoch's start, from training's random state."""
    del RandomState.on_train_epoch_start


def validation_skipped() -> None:
    load = epochs.ResumableEpochLoop.on_load_checkpoint
    loop: Any = epochs.ResumableEpochLoop
    after = {epochs.KEY: epochs.Point.AFTER_VALIDATION}
    loop.on_load_checkpoint = lambda self, state: load(self, state | after)


FAULTS = [
    (random_state_not_saved, "other random"),
    (position_forgotten, "other rows"),
    (epoch_draws, f"step {EPOCH + 1}: other random"),
    (validation_skipped, "validations"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "sign"), tiers(FAULTS, daily=FAULTS[:1]))
def test_without_its_guard_a_resumed_run_differs(train: Trainings, fault: Any, sign: str) -> None:
    resumed = train(fault.__name__, "zero3", train.kept("zero3", 6), prelude=fault).check()
    assert sign in difference(train.whole("zero3"), resumed, 7)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", tiers(["fsdp2", "zero3"], daily=["zero3"]))
def test_a_run_resumes_with_1_process_then_4_then_2(train: Trainings, strategy: str) -> None:
    """The same rows in the same global order, and rounding in another order."""
    whole, name, start = train.whole(strategy), f"{strategy}-resized", [train.kept(strategy, 4)]
    loss = {step: value for step, value in whole.loss.items() if step <= 4}
    for processes, first, stop in ((1, 5, 7), (4, 7, 11), (2, 11, 0)):
        acts = [KillAt(stop)] if stop else []
        leg = train(name, strategy, *start, processes=processes, callbacks=acts)
        assert leg.was_killed if stop else leg.check(), leg.error
        assert min(leg.loss) == first
        for step in leg.loss:
            rows = [run.rows()[step] for run in (leg, whole)]
            assert rows[0] == rows[1], f"{processes} ranks, step {step}"
        loss |= leg.loss
        start = []  # it resumes from its newest
    assert loss.keys() == whole.loss.keys()
    assert fmean(loss.values()) == pytest.approx(fmean(whole.loss.values()), abs=1e-6)


WITH_DROPOUT = "{model_type: gpt2, n_embd: 32, n_layer: 2, n_head: 2, resid_pdrop: 0.3}"
SHORT = ["--trainer.max_steps=8", f"--model.architecture={WITH_DROPOUT}"]


@pytest.mark.slow
def test_validation_does_not_change_what_training_draws(flags: list[str], tmp_path: Path) -> None:
    losses = []
    for interval in (4, 8):
        more = [f"--run.name=every{interval}", f"--trainer.val_check_interval={interval}"]
        assert run("fit", *flags, *SHORT, *more) == 0
        losses.append(logged(only_run(tmp_path, f"every{interval}"), "train/loss"))
    assert losses[0] == losses[1]


def trainer(rank: int, world_size: int) -> Any:
    sampler = {"num_replicas": world_size, "rank": rank}
    strategy = SimpleNamespace(distributed_sampler_kwargs=sampler)
    return SimpleNamespace(global_rank=rank, world_size=world_size, strategy=strategy)


def test_another_number_of_ranks_starts_new_streams_with_a_warning() -> None:
    checkpoint: dict[str, Any] = {"global_step": 7}
    RandomState().on_save_checkpoint(trainer(0, 1), None, checkpoint)
    assert len(checkpoint[KEY]) == 1
    found = []
    for rank in (0, 1, 0):
        torch.manual_seed(0)
        callback, given = RandomState(), (trainer(rank, 2), None)
        callback.setup(*given, "fit")
        with pytest.warns(UserWarning, match="random state of 1 ranks and there are 2 now"):
            callback.on_load_checkpoint(*given, checkpoint)
        torch.rand(1)  # as loaders do before the first batch
        callback.on_train_batch_start(*given, None, 0)
        found.append(torch.rand(1).item())
    assert found[0] != found[1] and found[0] == found[2]


@pytest.fixture
def with_pooler(monkeypatch: Any) -> None:
    """The model has a pooler that nothing calls, with parameters in both optimizer groups."""
    build = LanguageModule.build_model

    def build_model(self: Any, data: Any) -> nn.Module:
        model: Any = build(self, data)
        model.pooler = nn.Linear(4, 4)
        return model

    monkeypatch.setattr(LanguageModule, "build_model", build_model)


@pytest.mark.slow
@pytest.mark.usefixtures("with_pooler")
def test_a_checkpoint_without_moments_is_resumed(flags: Any, tmp_path: Path, capsys: Any) -> None:
    """By the strategy that wrote it and by others, a step each."""
    legs = ["auto", "fsdp2", "fsdp2", "auto", "fsdp2", "zero3"]
    flags = [*flags, "--trainer.limit_val_batches=0", "--model.optim.schedule=constant"]
    flags += ["--model.optim.warmup=0", f"--trainer.max_steps={len(legs)}"]
    assert run("fit", *flags, "--run.name=whole") == 0
    expected = logged(only_run(tmp_path, "whole"), "train/loss")
    checkpoint: list[str] = []
    for step, strategy in enumerate(legs, 1):
        name, chosen = f"leg{step}", [] if strategy == "auto" else flags_of(strategy)
        more = [f"--run.name={name}", f"--trainer.max_steps={step}", "--trainer.devices=1"]
        assert run("fit", *chosen, *flags, *more, *checkpoint) == 0
        losses = logged(only_run(tmp_path, name), "train/loss")
        assert losses == pytest.approx({step: expected[step]}, rel=1e-5), strategy
        checkpoint = [f"--ckpt_path={newest(only_run(tmp_path, name))}"]
    assert "moments start from zero" not in capsys.readouterr().out


AVERAGES = ["--trainer.callbacks+=EMAWeightAveraging", "--trainer.callbacks.decay=0.8"]
FORGETS = ["--trainer.callbacks+=tests.checkpoint.test_exact_resume.Forgets"]
PAUSES = ["--trainer.callbacks+=tests.support.parity.PauseAfter", "--trainer.callbacks.step=7"]


class Forgets(Callback):
    """Replaces the weights when training ends, as a callback may that exports a model."""

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for parameter in pl_module.parameters():
            torch.nn.init.zeros_(parameter)


@pytest.mark.slow
@pytest.mark.parametrize("own", [AVERAGES, FORGETS], ids=["averages", "forgets"])
@pytest.mark.parametrize("asynchronous", tiers(["false", "true"], daily=["false"]))
def test_a_run_that_stopped_regularly_resumes_with_trainings_weights(
    flags: list[str], tmp_path: Path, own: list[str], asynchronous: str
) -> None:
    """Nearly: the average of rotary frequencies, which no checkpoint has, is rounded each time."""
    flags = [*flags, *own, f"--last_checkpoint.asynchronous={asynchronous}"]
    flags += ["--model.optim.learning_rate=0.01", "--trainer.max_steps=10"]
    flags += ["--trainer.val_check_interval=5"]
    assert run("fit", *flags, "--run.name=whole") == 0
    assert run("fit", *flags, *PAUSES, "--run.name=paused") == 0
    assert run("fit", *flags, "--run.name=paused", "--ckpt_path=last") == 0
    whole, paused = only_run(tmp_path, "whole"), only_run(tmp_path, "paused")
    assert logged(paused, "train/loss") == logged(whole, "train/loss")
    expected, results = (logged(each, "eval/loss") for each in (whole, paused))
    assert {step: results[step] for step in expected} == pytest.approx(expected, rel=1e-6)


ON = ["--ckpt_path=last", "--trainer.max_steps=4"]
FIXED = {  # each change, and what is said of it
    "data.seq_len=16": "data.seq_len 32, now 16",
    "data.seed=3": "data.seed 0, now 3",
    "data.cross_document_attention=true": "data.cross_document_attention False, now True",
    "data.validation_share=0.3": "data.source",
    "model.architecture.num_attention_heads=4": "model.architecture.num_attention_heads 2, now 4",
    "model.adapter.alpha=16": "model.adapter.alpha 8.0, now 16.0",
}


@pytest.fixture
def steps(flags: list[str]) -> list[str]:
    more = ["--trainer.max_steps=2", "--trainer.logger=false", "--model.optim.warmup=1"]
    return [*flags, *more, "--model.sample_tokens=1", "--trainer.val_check_interval=2"]


@pytest.mark.slow
def test_a_changed_setting_is_refused_or_accepted(steps: Any, tmp_path: Path, capfd: Any) -> None:
    flags = [*steps, "--model.adapter.alpha=8", "--model.adapter.targets=[q_proj]"]
    assert run("fit", *flags) == 0
    before = sorted(path.name for path in only_run(tmp_path).iterdir())
    for change, said in FIXED.items():
        assert run("prepare", *flags, f"--{change}") == 0
        error = refused("fit", [*flags, *ON, f"--{change}"], capfd)
        assert f"was trained with {said}" in error
        assert f"--last_checkpoint.accept_changes '[{said.split()[0]}" in error
    assert sorted(path.name for path in only_run(tmp_path).iterdir()) == before
    capfd.readouterr()
    accepted = "--last_checkpoint.accept_changes=[data.seq_len,data.seed]"
    assert run("fit", *flags, *ON, "--data.seq_len=16", "--data.seed=3", accepted) == 0
    shown = capfd.readouterr().out
    assert "data.seq_len 32 -> 16\n" in shown and "data.seed 0 -> 3\n" in shown
    assert manifest.read(newest(only_run(tmp_path)))[identity.KEY]["data.seq_len"] == 16


@pytest.mark.slow
def test_another_model_is_refused(steps: Any, tmp_path: Path, capfd: Any) -> None:
    """The weights of llama, mistral and granite have the same names and shapes."""
    assert run("fit", *steps) == 0
    for kind in ("mistral", "granite"):
        architecture = SMALL_LLAMA.replace("llama", kind).replace("}", ", attention_dropout: 0.1}")
        error = refused("fit", [*steps, *ON, f"--model.architecture={architecture}"], capfd)
        assert f"was trained with model.architecture.model_type llama, now {kind}: restore" in error
    extra = SMALL_LLAMA.replace("}", ", extra: {scale: 2}}")
    error = refused("fit", [*steps, *ON, f"--model.architecture={extra}"], capfd)
    assert "model.architecture.scale None, now 2" in error
    ours = [flag for flag in steps if not flag.startswith("--trainer.")]
    export.main(["export", *ours, "--checkpoint=last", f"--output={tmp_path}/out"], OURS)
    pretrained = [*steps, f"--model.pretrained={tmp_path}/out"]
    config = tmp_path / "out" / "config.json"
    original = config.read_text()
    config.write_text(original.replace("10000.0", "500.0"))
    error = refused("fit", [*pretrained, *ON], capfd)
    assert "model.pretrained.rope_parameters.rope_theta 10000.0, now 500.0" in error
    config.write_text(original)
    assert run("fit", *pretrained, *ON) == 0


KEPT = " (no effect: a resume keeps the checkpoint's)"
PRINTED = {
    "--model.optim.learning_rate=0.01": f"model.optim.learning_rate 0.0003 -> 0.01{KEPT}",
    "--model.optim.weight_decay=0.5": f"model.optim.weight_decay 0.1 -> 0.5{KEPT}",
    "--model.optim.betas=[0.5,0.6]": f"model.optim.betas [0.9, 0.95] -> [0.5, 0.6]{KEPT}",
    "--model.optim.schedule=constant": "model.optim.schedule cosine -> constant",
    "--trainer.gradient_clip_val=0.5": "trainer.gradient_clip_val 1.0 -> 0.5",
    "--trainer.precision=bf16-mixed": "trainer.precision 32-true -> bf16-mixed",
    "--data.balance=true": "data.balance False -> True",
}


@pytest.mark.slow
def test_what_changes_the_updates_is_printed(steps: Any, tmp_path: Path, capfd: Any) -> None:
    def resumed(*change: str) -> list[str]:
        capfd.readouterr()
        assert run("fit", *steps, "--ckpt_path=last", *change) == 0
        lines = capfd.readouterr().out.splitlines()
        return [line for line in lines if " -> " in line and not line.startswith(" ")]

    def group() -> dict[str, Any]:
        return read_full(newest(only_run(tmp_path)))["optimizer_states"][0]["param_groups"][0]

    assert run("fit", *steps) == 0
    before = group()
    assert resumed("--trainer.max_steps=3") == []
    assert sorted(resumed("--trainer.max_steps=4", *PRINTED)) == sorted(PRINTED.values())
    assert group()["betas"] == before["betas"] and group()["weight_decay"] == before["weight_decay"]
    settings = manifest.read(newest(only_run(tmp_path)))[identity.KEY]
    assert settings["model.optim.betas"] == [0.9, 0.95]
    sgd = ["--optimizer=torch.optim.SGD", "--optimizer.momentum=0.9"]
    error = refused("fit", [*steps, *ON, *sgd], capfd)
    assert "was trained with optimizer AdamW, now SGD: restore" in error
    assert "accept_changes '[optimizer]'" in error
    sgd += ["--last_checkpoint.accept_changes=[optimizer]"]
    assert "optimizer AdamW -> SGD" in resumed("--trainer.max_steps=9", *sgd)
    assert group()["momentum"] == 0.9
    assert manifest.read(newest(only_run(tmp_path)))[identity.KEY]["optimizer"] == "SGD"
    muon = ["--model.optim.optimizer=muon"]
    assert "optimizer SGD, now Muon: restore" in refused("fit", [*steps, *ON, *muon], capfd)
    muon.append(sgd[-1])
    assert "optimizer SGD -> Muon" in resumed("--trainer.max_steps=11", *muon)
    assert group()["ns_steps"] == 5 and group()["initial_lr"] == before["initial_lr"]
