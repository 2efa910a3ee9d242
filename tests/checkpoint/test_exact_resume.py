"""A run that is killed and resumed equals, bit for bit, the uninterrupted run; on other numbers of
ranks, nearly.

    plain     killed in mid-epoch 0 and at the epoch's boundary, each time after the step
    varied    accumulation 2, dropout and 2 loader workers, killed in mid-epoch 1

An epoch has 8 steps and a few rows more. A checkpoint is written every second step; later steps are
repeated. After step 6 there is a validation, after the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from dist_template.callbacks import RandomState
from dist_template.compat import epochs
from dist_template.wings.rehearse.compare import trace_resumed
from tests.support.faults import random_state_not_saved
from tests.support.library import global_order, manifest
from tests.support.parity import MODELS
from tests.support.runs import Workers
from tests.support.strategies import flags_of
from tests.support.tiers import tiers
from tests.support.wings import KillAt, RunRecord, first_difference

STRATEGIES = ["ddp", "fsdp2", "fsdp2_ep", "zero1", "zero2", "zero3"]
STEPS, EPOCH, EVERY = 15, 8, 2  # optimizer steps: of the run, of an epoch, between two checkpoints
GLOBAL_BATCH, SEQ_LEN, LAST = 8, 64, "--ckpt_path=last"
MODEL = MODELS["deepseek_v3"].removesuffix("}") + ", attention_dropout: DROPOUT}"
VARIED = "mid-epoch 1, accumulation 2, dropout, 2 workers"
CELLS = {"mid-epoch 0": 7, "epoch boundary": EPOCH, VARIED: 11}  # killed after this step
PLAIN = ["mid-epoch 0", "epoch boundary"]
DAILY = [*product(["ddp", "fsdp2", "zero3"], PLAIN), ("fsdp2", VARIED)]


class Trainings:
    """Trainings by name, each done once."""

    def __init__(self, folder: Path, flags: list[str]) -> None:
        self.folder = folder
        self.flags = flags
        self._whole: dict[tuple[str, bool], RunRecord] = {}
        self._legs: dict[tuple[str, bool], dict[str, RunRecord]] = {}

    def whole(self, strategy: str, varied: bool = False) -> RunRecord:
        """The run that is never stopped."""
        key = (strategy, varied)
        if key not in self._whole:
            name = f"{strategy}-{varied}"
            self._whole[key] = self.run(name, f"{name}-whole", strategy, varied=varied).check()
        return self._whole[key]

    def legs(self, strategy: str, varied: bool = False) -> dict[str, RunRecord]:
        """Cell -> what the run did after it had been killed there; the last one ends."""
        key, name = (strategy, varied), f"{strategy}-{varied}-cut"
        if key not in self._legs:
            cells = [cell for cell in CELLS if (cell == VARIED) == varied]
            records, more = [], []
            for number, acts in enumerate([*([KillAt(CELLS[cell])] for cell in cells), []]):
                options: Any = {"varied": varied, "callbacks": acts}
                record = self.run(name, f"{name}-{number}", strategy, *more, **options)
                assert record.was_killed if acts else record.check(), record.error
                records.append(record)
                more = ["--ckpt_path=last"]
            self._legs[key] = dict(zip(cells, records[1:], strict=True))
        return self._legs[key]

    def kept(self, strategy: str, step: int) -> str:
        """The flag that goes on from a checkpoint of the plain run that is never stopped."""
        return f"--ckpt_path={self.whole(strategy).run / 'checkpoints' / manifest.name(step)}"

    def run(
        self, name: str, record: str, strategy: str, *extra: str, processes: int = 2,
        varied: bool = False, **options: Any,
    ) -> RunRecord:  # fmt: skip
        """One `fit` into the run's folder `name`."""
        flags = [*flags_of(strategy), f"--trainer.devices={processes}"]
        if strategy == "zero3":  # or so small a model would stay whole on every rank
            flags += ["--trainer.strategy.init_args.param_persistence_threshold=16"]
        flags += [f"--model.architecture={MODEL.replace('DROPOUT', '0.1' if varied else '0.0')}"]
        flags += [f"--data.micro_batch_size={GLOBAL_BATCH // processes // (2 if varied else 1)}"]
        flags += [f"--data.num_workers={2 if varied else 0}"]
        argv = ["fit", *self.flags, f"--run.name={name}", *flags, *extra]
        with Workers(processes) as workers:
            return workers.run(argv, self.folder / record, run_id=name, **options)


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Iterator[Trainings]:
    folder = tmp_path_factory.mktemp("resume")
    flags = [
        f"--run.root={folder / 'runs'}", "--data.source=TextFiles", "--data.tokenizer=Bytes",
        f"--data.source.paths=[{corpus}/0*.txt,{corpus}/1*.txt]", "--data.validation_share=0.3",
        f"--data.cache_dir={folder / 'cache'}", f"--data.seq_len={SEQ_LEN}", "--data.test_share=0",
        f"--data.global_batch_size={GLOBAL_BATCH}", "--model.optim.learning_rate=0.01",
        "--model.optim.warmup=4", "--model.sample_tokens=2", "--trainer.accelerator=cpu",
        f"--trainer.max_steps={STEPS}", "--trainer.log_every_n_steps=1", "--trainer.logger=false",
        "--trainer.val_check_interval=6", f"--last_checkpoint.every_n_steps={EVERY}",
        "--last_checkpoint.keep=99",
    ]  # fmt: skip
    with Workers(1) as workers:
        workers.run(["prepare", *flags], folder / "prepare").check()
    yield Trainings(folder, flags)


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
@pytest.mark.parametrize(("strategy", "cell"), tiers(product(STRATEGIES, CELLS), daily=DAILY))
def test_a_killed_run_resumes_bit_identically(train: Trainings, strategy: str, cell: str) -> None:
    """Losses, norms, learning rates, rows, random state of every rank, weights after each step."""
    whole, leg = train.whole(strategy, cell == VARIED), train.legs(strategy, cell == VARIED)[cell]
    assert list(whole.loss) == list(range(1, STEPS + 1))
    found = difference(whole, leg, CELLS[cell] // EVERY * EVERY + 1)
    assert not found, f"{strategy}, {cell}: {found}"
    if leg is [*train.legs(strategy, cell == VARIED).values()][-1]:
        assert not first_difference(whole.end, leg.end)


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


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "sign"), tiers(FAULTS, daily=FAULTS[:1]))
def test_without_its_guard_a_resumed_run_is_another(
    train: Trainings, fault: Callable[[], None], sign: str
) -> None:
    name = f"ddp-{sign.replace(' ', '-')}"
    resumed = train.run(name, name, "ddp", train.kept("ddp", 6), prelude=fault).check()
    assert sign in difference(train.whole("ddp"), resumed, 7)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", tiers(["fsdp2", "zero3"], daily=["zero3"]))
def test_a_run_resumes_with_1_process_then_4_then_2(train: Trainings, strategy: str) -> None:
    """The same rows in the same global order, and rounding in another order."""
    whole, name = train.whole(strategy), f"{strategy}-resized"
    legs = [(1, 7, train.kept(strategy, 4)), (4, 11, LAST), (2, 0, LAST)]
    loss = {step: value for step, value in whole.loss.items() if step <= 4}
    for processes, stop, where in legs:
        acts = [KillAt(stop)] if stop else []
        options: Any = {"processes": processes, "callbacks": acts}
        leg = train.run(name, f"{name}-{processes}", strategy, where, **options)
        assert leg.was_killed if stop else leg.check(), leg.error
        assert min(leg.loss) == {1: 5, 4: 7, 2: 11}[processes]
        for step in leg.loss:
            rows = [[row for row, _ in run.rows()[step]] for run in (leg, whole)]
            assert rows[0] == rows[1], f"{processes} ranks, step {step}"
        loss |= leg.loss
    assert loss.keys() == whole.loss.keys()
    assert fmean(loss.values()) == pytest.approx(fmean(whole.loss.values()), abs=1e-6)
