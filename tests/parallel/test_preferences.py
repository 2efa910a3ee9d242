"""DPO trains to the numbers of trl, and to the same numbers under every strategy."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from dist_template import weights
from dist_template.checkpoint.formats import read_full
from dist_template.checkpoint.frozen import REFERENCE
from dist_template.wings.rehearse.record import RunRecord
from tests import ROOT
from tests.support import adapters, chats, pairs
from tests.support.parity import PauseAfter, Trainings, run_folder
from tests.support.runs import Workers, newest
from tests.support.tiers import tiers

pytestmark = pytest.mark.slow
RUN = ["--trainer.accelerator=cpu", "--trainer.logger=false", "--trainer.log_every_n_steps=1"]
RUN += ["--run.report=false", "--trainer.max_steps=4", "--model.optim.warmup=0"]


@pytest.mark.parametrize("loss", tiers([*pairs.OF_TRL], daily=[]))
def test_the_losses_of_four_steps_are_those_of_trl(loss: str, tmp_path: Path) -> None:
    """The first alone would prove nothing: DPO's is ln 2."""
    pairs.save_llama(tmp_path / "model", 260, has_reward_head=loss == "reward")
    source = "Ratings" if loss == "kto" else "Preferences"
    argv = ["fit", *pairs.flags(tmp_path, pairs.OF_TRL[loss], source), *RUN, "--data.seq_len=1024"]
    argv += [f"--model.preference.loss={loss}"]
    if loss == "simpo":
        argv += ["--model.preference.margin=0.7"]
    argv += ["--data.global_batch_size=1", "--data.micro_batch_size=1", "--trainer.devices=1"]
    argv += ["--optimizer=torch.optim.SGD", "--optimizer.weight_decay=0"]
    argv += [f"--optimizer.lr={pairs.RATES[loss]}"]
    argv += ["--model.optim.schedule=constant", "--trainer.gradient_clip_val=1e9"]
    argv += [f"--run.root={tmp_path / 'runs'}", f"--model.pretrained={tmp_path / 'model'}"]
    ours = Workers(1).run(argv, tmp_path / "ours").check()
    folders = [str(tmp_path / name) for name in ("model", "tokenizer", "trl")]
    argv = [sys.executable, "-m", "tests.support.pairs", loss, *folders]
    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    theirs = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert theirs.returncode == 0, theirs.stderr
    expected = json.loads(theirs.stdout.splitlines()[-1])
    assert expected[3] < 0.9 * expected[0], "it learns"
    assert list(ours.loss.values()) == pytest.approx(expected, abs=5e-6, rel=5e-6)


class ReferenceWeights(Callback):
    """Saves the reference's full weights at the start and at the end, into the run folder."""

    def __repr__(self) -> str:
        return "ReferenceWeights()"  # the same training, for `Trainings`

    def on_train_start(self, trainer: Any, pl_module: Any, name: str = "start.pt") -> None:
        if pl_module.reference is None:
            return
        full = weights.gather(pl_module.reference)  # empty on ranks other than 0
        if full:
            torch.save(full, run_folder(trainer) / name)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.on_train_start(trainer, pl_module, "end.pt")


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    """4 steps of 8 rows with several pairs each."""
    folder = tmp_path_factory.mktemp("preferences")
    flags = [*pairs.flags(folder, pairs.LENGTHS), *RUN, f"--run.root={folder / 'runs'}"]
    flags += ["--data.seq_len=64", "--data.validation_share=0.2", "--trainer.val_check_interval=4"]
    rated = chats.write(folder / "rated.jsonl", pairs.RATED_LENGTHS)
    KINDS["kto"] += ["--data.source=Ratings", f"--data.source.paths=[{rated}]"]
    for kind in ("copy", "kto"):
        argv = ["prepare", *flags, *KINDS[kind]]
        Workers(1).run(argv, folder / "prepare" / kind).check()
    return Trainings(folder, flags)


KINDS = {kind: [f"--model.preference.loss={kind}"] for kind in pairs.KINDS}
KINDS |= {"copy": [], "adapters": adapters.flags(adapters.TARGETS["llama"])}
KINDS["reward-adapters"] = KINDS["reward"] + KINDS["adapters"]


def every_label() -> None:
    """In each worker: the labels are the data's."""


def trained(
    train: Trainings, kind: str, strategy: str, *more: str, model: str = "llama", **options: Any
) -> RunRecord:
    options = {"callbacks": [ReferenceWeights()]} | options
    prelude = adapters.with_random_b if "adapters" in kind else every_label
    keys = ["--model.optim.warmup=0", *KINDS[kind], *more]
    return train(model, strategy, *keys, prelude=prelude, **options)


STRATEGIES = ["ddp", "fsdp2", "tp", "zero2", "zero3"]
DAILY = [("copy", "fsdp2"), ("adapters", "fsdp2")]
CASES = [(kind, strategy) for kind in ("copy", "adapters") for strategy in STRATEGIES]
CASES += [("orpo", "fsdp2")]
CASES += [(kind, name) for kind in ("ipo", "simpo") for name in ("fsdp2", "tp", "zero3")]
CASES += [(kind, name) for kind in ("kto", "reward") for name in ("fsdp2", "tp", "zero3")]
CASES += [("reward", "fsdp2_ep"), ("reward-adapters", "tp"), ("reward-adapters", "zero3")]


@pytest.mark.parametrize(("kind", "strategy"), tiers(CASES, DAILY))
def test_losses_and_rewards_are_one_processs(train: Trainings, kind: str, strategy: str) -> None:
    model = "deepseek_v3" if "ep" in strategy else "llama"
    one = trained(train, kind, "one", model=model)
    many = trained(train, kind, strategy, model=model)
    assert list(one.loss) == [1, 2, 3, 4] and one.loss[4] < 0.97 * one.loss[1]
    # with adapters the reference differs from the start: B is not zero
    assert (one.loss[1] == pytest.approx(0.693147, abs=1e-6)) == (kind == "copy")
    assert (one.loss[1] == pytest.approx(25, abs=1e-4)) == (kind == "ipo"), "(1 / (2 beta))²"
    assert (one.loss[1] == pytest.approx(0.5, abs=1e-6)) == (kind == "kto")
    tolerance = 1e-5 if kind in ("orpo", "ipo", "simpo") else 1e-6
    assert many.loss == pytest.approx(one.loss, rel=tolerance)
    assert many.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)
    (expected,), (got,) = one.eval().values(), many.eval().values()
    if kind != "kto":
        margin = expected["eval/rewards/chosen"] - expected["eval/rewards/rejected"]
        assert expected["eval/rewards/margin"] == pytest.approx(margin, abs=1e-6)
    assert 0 <= expected["eval/rewards/accuracy"] <= 1 and "eval/perplexity" not in expected
    assert got == pytest.approx(expected, abs=1e-5)


def test_ktos_losses_do_not_depend_on_micro_batches(train: Trainings) -> None:
    """Nor on a resume: its distance from the reference is of the step before."""
    whole = trained(train, "kto", "one", "--data.micro_batch_size=8")
    assert whole.loss[4] < 0.97 * whole.loss[1]
    cells = [("one", "1"), ("one", "2"), ("ddp", "1"), ("fsdp2", "2")]
    for strategy, size in cells:
        got = trained(train, "kto", strategy, f"--data.micro_batch_size={size}")
        assert got.loss == pytest.approx(whole.loss, rel=1e-5)
    first = trained(train, "kto", "fsdp2", callbacks=[PauseAfter(2)])
    resumed = trained(train, "kto", "fsdp2", f"--ckpt_path={newest(first.run)}")
    assert resumed.loss == pytest.approx({s: whole.loss[s] for s in (3, 4)}, rel=1e-5)


@pytest.mark.parametrize("strategy", tiers(STRATEGIES, daily=["fsdp2"]))
def test_the_reference_stays_as_it_was_and_is_not_saved(train: Trainings, strategy: str) -> None:
    run = trained(train, "copy", strategy).run
    start, end = torch.load(run / "start.pt"), torch.load(run / "end.pt")
    assert start and all(torch.equal(start[name], end[name]) for name in start)
    saved = read_full(newest(run))
    after = {name.removeprefix("model."): tensor for name, tensor in saved["state_dict"].items()}
    assert after.keys() == start.keys()
    assert not torch.equal(after["model.norm.weight"], start["model.norm.weight"])
    (state,) = saved["optimizer_states"]
    assert not [name for name in state["state"] if "reference" in name]
    assert saved[REFERENCE]["sha256"] and "frozen_base" not in saved


@pytest.mark.parametrize("strategy", tiers(["one", "ddp", "fsdp2", "zero3"], daily=[]))
def test_a_resumed_training_has_exactly_the_same_losses(train: Trainings, strategy: str) -> None:
    first = trained(train, "copy", strategy, callbacks=[PauseAfter(2)])
    checkpoint = f"--ckpt_path={newest(first.run)}"
    resumed = trained(train, "copy", strategy, checkpoint)
    whole = trained(train, "copy", strategy).loss
    assert resumed.loss == {step: loss for step, loss in whole.items() if step > 2}
    with pytest.raises(RuntimeError, match="reference model.*or its seed if only model.archit"):
        trained(train, "copy", strategy, checkpoint, "--seed_everything=1")
