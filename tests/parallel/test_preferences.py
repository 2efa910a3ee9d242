"""DPO trains to the numbers of trl, and to the same numbers under every strategy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from dist_template.checkpoint.frozen import REFERENCE
from tests import ROOT
from tests.support import adapters, pairs
from tests.support.library import read_full, weights
from tests.support.parity import MODELS, PauseAfter
from tests.support.runs import Workers, newest
from tests.support.strategies import flags_of
from tests.support.tiers import tiers
from tests.support.wings import RunRecord

CPU = ["--trainer.accelerator=cpu", "--trainer.logger=false", "--trainer.log_every_n_steps=1"]


@pytest.mark.slow
def test_the_losses_of_four_steps_are_those_of_trl(tmp_path: Path) -> None:
    """The first alone would prove nothing: it is ln 2."""
    pairs.save_llama(tmp_path / "model", 260)
    data = pairs.flags(tmp_path, pairs.RECORDS)
    one_step = ["--data.seq_len=256", "--data.global_batch_size=1", "--data.micro_batch_size=1"]
    sgd = ["--optimizer=torch.optim.SGD", "--optimizer.lr=0.5", "--optimizer.weight_decay=0"]
    sgd += ["--model.optim.schedule=constant", "--model.optim.warmup=0"]
    run = [f"--run.root={tmp_path / 'runs'}", "--trainer.max_steps=4", "--trainer.devices=1"]
    run += [f"--model.pretrained={tmp_path / 'model'}", "--trainer.gradient_clip_val=1e9"]
    with Workers(1) as workers:
        argv = ["fit", *data, *one_step, *sgd, *run, *CPU]
        ours = workers.run(argv, tmp_path / "ours").check()
    folders = [str(tmp_path / name) for name in ("model", "tokenizer", "trl")]
    argv = [sys.executable, "-m", "tests.support.pairs", *folders]
    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    theirs = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert theirs.returncode == 0, theirs.stderr
    expected = json.loads(theirs.stdout.splitlines()[-1])
    assert expected[0] == pytest.approx(0.693147, abs=1e-6) and expected[3] < 0.6
    assert list(ours.loss.values()) == pytest.approx(expected, abs=5e-6)


class ReferenceWeights(Callback):
    """Saves the reference's full weights at the start and at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _save(self, module: Any, name: str) -> None:
        if full := weights.gather(module.reference):
            self.folder.mkdir(exist_ok=True)
            torch.save(full, self.folder / f"{name}.pt")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._save(pl_module, "start")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._save(pl_module, "end")


class Trainings:
    """Trainings with 4 steps of 4 rows with several pairs each, run once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.flags = [
            *pairs.flags(folder, pairs.LENGTHS), *CPU, f"--run.root={folder / 'runs'}",
            "--data.seq_len=64", "--data.global_batch_size=4", "--trainer.max_steps=4",
            f"--model.architecture={MODELS['llama']}", "--model.optim.learning_rate=0.01",
            "--model.optim.warmup=0", "--data.validation_share=0.2",
            "--trainer.val_check_interval=4",
        ]  # fmt: skip
        self._done: dict[tuple[str, ...], RunRecord] = {}

    def __call__(self, kind: str, strategy: str) -> RunRecord:
        if (kind, strategy) not in self._done:
            watch = [ReferenceWeights(self.folder / strategy)] if kind == "copy" else []
            self._done[kind, strategy] = self.run(kind, strategy, callbacks=watch)
        return self._done[kind, strategy]

    def run(self, kind: str, strategy: str, *extra: str, callbacks: Any = ()) -> RunRecord:
        num = 1 if strategy == "one" else 2
        flags = [] if strategy == "one" else flags_of(strategy)
        if strategy.startswith("zero3"):  # else so small a model would not be sharded
            flags += ["--trainer.strategy.init_args.param_persistence_threshold=16"]
        rows = 2 if strategy in ("one", "tp") else 1
        flags += [f"--trainer.devices={num}", f"--data.micro_batch_size={rows}"]
        flags += adapters.flags(adapters.TARGETS["llama"]) if kind == "adapters" else []
        name = f"{kind}-{strategy}-{len(list(self.folder.glob('*-*')))}"
        argv = ["fit", *self.flags, f"--run.name={name}", *flags, *extra]
        prelude = adapters.with_random_b if kind == "adapters" else None
        with Workers(num) as workers:
            return workers.run(argv, self.folder / name, prelude=prelude, callbacks=callbacks)


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainings]:
    trainings = Trainings(tmp_path_factory.mktemp("preferences"))
    with Workers(1) as workers:
        workers.run(["prepare", *trainings.flags], trainings.folder / "prepare").check()
    yield trainings


STRATEGIES = ["ddp", "fsdp2", "tp", "zero2", "zero3"]
DAILY = [("copy", "fsdp2"), ("adapters", "fsdp2")]
CASES = [(kind, strategy) for kind in ("copy", "adapters") for strategy in STRATEGIES]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "strategy"), tiers(CASES, DAILY))
def test_losses_and_rewards_are_one_processs(train: Trainings, kind: str, strategy: str) -> None:
    one, many = train(kind, "one").check(), train(kind, strategy).check()
    assert list(one.loss) == [1, 2, 3, 4] and one.loss[4] < 0.67
    # with adapters the reference differs from the start: B is not zero
    assert (one.loss[1] == pytest.approx(0.693147, abs=1e-6)) == (kind == "copy")
    assert many.loss == pytest.approx(one.loss, abs=1e-6)
    assert many.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)
    (expected,), (got,) = one.eval().values(), many.eval().values()
    margin = expected["eval/rewards/chosen"] - expected["eval/rewards/rejected"]
    assert expected["eval/rewards/margin"] == pytest.approx(margin, abs=1e-6)
    assert 0 <= expected["eval/rewards/accuracy"] <= 1 and "eval/perplexity" not in expected
    assert got == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("loss", tiers(["ipo", "simpo"], daily=["simpo"]))
def test_another_loss_has_the_numbers_of_one_process(train: Trainings, loss: str) -> None:
    """ipo starts at (1 / (2 beta))²; simpo compares with no reference."""
    key = f"--model.preference.loss={loss}"
    one, many = (train.run("copy", strategy, key).check() for strategy in ("one", "fsdp2"))
    assert (one.loss[1] == pytest.approx(25, abs=1e-4)) == (loss == "ipo")
    assert one.loss[4] < one.loss[1] != pytest.approx(0.693147, abs=1e-3)
    assert many.loss == pytest.approx(one.loss, rel=1e-5)
    assert many.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", tiers(STRATEGIES, daily=["fsdp2"]))
def test_the_reference_stays_as_it_was_and_is_not_saved(train: Trainings, strategy: str) -> None:
    record = train("copy", strategy).check()
    start, end = (torch.load(train.folder / strategy / f"{name}.pt") for name in ("start", "end"))
    assert start and all(torch.equal(start[name], end[name]) for name in start)
    saved = read_full(newest(record.run))
    trained = {name.removeprefix("model."): tensor for name, tensor in saved["state_dict"].items()}
    assert trained.keys() == start.keys()
    assert not torch.equal(trained["model.norm.weight"], start["model.norm.weight"])
    (state,) = saved["optimizer_states"]
    assert not [name for name in state["state"] if "reference" in name]
    assert saved[REFERENCE]["sha256"] and "frozen_base" not in saved


@pytest.mark.slow
@pytest.mark.parametrize("strategy", tiers(["one", "ddp", "fsdp2", "zero3"], daily=["fsdp2"]))
def test_a_resumed_training_has_exactly_the_same_losses(train: Trainings, strategy: str) -> None:
    first = train.run("copy", strategy, callbacks=[PauseAfter(2)]).check()
    checkpoint = f"--ckpt_path={newest(first.run)}"
    resumed = train.run("copy", strategy, checkpoint).check()
    whole = train("copy", strategy).loss
    assert resumed.loss == {step: loss for step, loss in whole.items() if step > 2}
    error = train.run("copy", strategy, checkpoint, "--seed_everything=1").error
    assert "reference model" in error and "or its seed if only model.architecture" in error
