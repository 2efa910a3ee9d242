"""A killed and resumed run equals the uninterrupted run: bit for bit on as many ranks, else nearly.

An epoch has 8 steps and a few rows more, with a checkpoint at every second step, and a validation
after step 6. Each run of CELLS is killed three times: inside a save, at an epoch's end, and in
epoch 1, where its newest checkpoint is damaged too."""

import random
from functools import cache, partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from dist_template.callbacks import RandomState
from dist_template.compat import epochs
from dist_template.wings.rehearse.compare import trace_resumed
from tests.support import saves
from tests.support.faults import random_state_not_saved
from tests.support.injury import corrupt
from tests.support.library import global_order, manifest
from tests.support.parity import FLAGS, MODELS
from tests.support.runs import small
from tests.support.tiers import tiers
from tests.support.wings import KillAt, RunRecord, first_difference

pytestmark = pytest.mark.slow
STRATEGIES = ["ddp", "fsdp2", "fsdp2_ep", "zero1", "zero2", "zero3"]
PREDICTING = {"fsdp2", "zero2"}  # with modules that predict later tokens
VARIED = {"fsdp2_ep", "zero2"}  # with accumulation over 2, dropout and 2 loader workers
STEPS, EPOCH, EVERY = 15, 8, 2  # optimizer steps: of the run, of an epoch, between two checkpoints
GLOBAL_BATCH, SEQ_LEN = 8, 64
DAMAGED = 12  # the checkpoint that is
CELLS = {"inside a save": 7, "epoch's end": EPOCH + 1, "damaged": DAMAGED - 1}  # resumes at step
DAILY = [*product(["fsdp2_ep", "zero3"], CELLS)]


class Trainings(saves.Trainings):
    def __call__(self, name: str, strategy: str, *extra: str, **options: Any) -> RunRecord:
        is_varied, processes = strategy in VARIED, options.get("processes", 2)
        micro_batch = GLOBAL_BATCH // processes // (2 if is_varied else 1)
        flags = [f"--data.micro_batch_size={micro_batch}"]
        flags += [f"--data.num_workers={2 if is_varied else 0}"]
        model, dropout = "mtp" if strategy in PREDICTING else "deepseek_v3", 0.1 * is_varied
        architecture = MODELS[model].removesuffix("}") + f", attention_dropout: {dropout}}}"
        flags += [f"--model.architecture={architecture}", *FLAGS.get(model, [])]
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
        *small(corpus, folder / "cache", folder), "--data.validation_share=0.3",
        f"--data.source.paths=[{corpus}/0*.txt,{corpus}/1*.txt]", f"--data.seq_len={SEQ_LEN}",
        "--data.test_share=0", "--model.optim.learning_rate=0.01", "--model.optim.warmup=4",
        f"--trainer.max_steps={STEPS}", "--trainer.val_check_interval=6", "--trainer.logger=false",
        f"--last_checkpoint.every_n_steps={EVERY}", "--last_checkpoint.keep=99",
    ]  # fmt: skip
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
    (random_state_not_saved, "other random"), (position_forgotten, "other rows"),
    (epoch_draws, f"step {EPOCH + 1}: other random"), (validation_skipped, "validations"),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "sign"), tiers(FAULTS, daily=FAULTS[:1]))
def test_without_its_guard_a_resumed_run_differs(train: Trainings, fault: Any, sign: str) -> None:
    resumed = train(fault.__name__, "zero3", train.kept("zero3", 6), prelude=fault).check()
    assert sign in difference(train.whole("zero3"), resumed, 7)


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
