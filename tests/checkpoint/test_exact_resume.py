"""A run that is killed and resumed equals, bit for bit, the uninterrupted run; on other numbers of ranks, nearly.

    plain     killed in mid-epoch 0 and at the epoch's boundary, each time after the step, by SIGKILL
    varied    accumulation 2, dropout and 2 loader workers, killed in mid-epoch 1

An epoch has 8 steps and a few rows more. A checkpoint is written every second step, what was done since is done again;
after step 6 there is a validation too, which it comes before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from lightning.pytorch import Callback

from dist_template.callbacks import RandomState
from dist_template.compat import epochs
from dist_template.wings.rehearse.compare import trace_resumed
from tests.support.faults import random_state_not_saved
from tests.support.library import global_order, manifest
from tests.support.runs import Workers
from tests.support.strategies import flags_of
from tests.support.tiers import tiers
from tests.support.wings import KillAt, RunRecord, first_difference

STRATEGIES = ["ddp", "fsdp2", "fsdp2_ep", "zero1", "zero2", "zero3"]
STEPS, EPOCH, EVERY = 15, 8, 2  # optimizer steps: of the run, of an epoch, between two checkpoints
GLOBAL_BATCH, SEQ_LEN = 8, 64
MODEL = (
    "{model_type: deepseek_v3, hidden_size: 32, intermediate_size: 64, moe_intermediate_size: 16,"
    " num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 2, q_lora_rank: 16, kv_lora_rank: 16,"
    " qk_nope_head_dim: 16, qk_rope_head_dim: 8, v_head_dim: 16, first_k_dense_replace: 1, n_routed_experts: 4,"
    " num_experts_per_tok: 2, n_group: 1, topk_group: 1, num_mtp_layers: 0, attention_dropout: DROPOUT}"
)
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
        if (strategy, varied) not in self._whole:
            name = f"{strategy}-{'varied' if varied else 'plain'}"
            self._whole[strategy, varied] = self.run(
                name, f"{name}-whole", strategy, varied=varied
            ).check()
        return self._whole[strategy, varied]

    def legs(self, strategy: str, varied: bool = False) -> dict[str, RunRecord]:
        """Cell -> what the run did after it had been killed there; the last one ends."""
        key = (strategy, varied)
        if key not in self._legs:
            name = f"{strategy}-{'varied' if varied else 'plain'}-cut"
            cells = [cell for cell in CELLS if (cell == VARIED) == varied]
            callbacks = [[KillAt(CELLS[cell])] for cell in cells] + [[]]
            records = []
            for number, acts in enumerate(callbacks):
                more = ["--ckpt_path=last"] if number else []
                record = self.run(
                    name, f"{name}-{number}", strategy, *more, varied=varied, callbacks=acts
                )
                assert record.was_killed if acts else record.check(), (
                    f"{strategy}, leg {number}: {record.error}"
                )
                records.append(record)
            self._legs[key] = dict(zip(cells, records[1:], strict=True))
        return self._legs[key]

    def kept(self, strategy: str, step: int) -> str:
        """The flag that goes on from a checkpoint of the plain run that is never stopped."""
        return f"--ckpt_path={self.whole(strategy).run / 'checkpoints' / manifest.name(step)}"

    def run(
        self,
        name: str,
        record: str,
        strategy: str,
        *extra: str,
        processes: int = 2,
        varied: bool = False,
        callbacks: Sequence[Callback] = (),
        prelude: Callable[[], None] | None = None,
    ) -> RunRecord:
        """One `fit` into the run's folder `name`."""
        flags = [*flags_of(strategy), f"--trainer.devices={processes}"]
        if strategy == "zero3":  # or so small a model would stay whole on every rank
            flags += ["--trainer.strategy.init_args.param_persistence_threshold=16"]
        flags += [f"--model.architecture={MODEL.replace('DROPOUT', '0.1' if varied else '0.0')}"]
        flags += [f"--data.micro_batch_size={GLOBAL_BATCH // processes // (2 if varied else 1)}"]
        flags += [f"--data.num_workers={2 if varied else 0}"]
        argv = ["fit", *self.flags, f"--run.name={name}", *flags, *extra]
        with Workers(processes) as workers:
            return workers.run(
                argv, self.folder / record, run_id=name, callbacks=callbacks, prelude=prelude
            )


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Iterator[Trainings]:
    folder = tmp_path_factory.mktemp("resume")
    flags = [
        f"--run.root={folder / 'runs'}", "--data.source=TextFiles",
        f"--data.source.paths=[{corpus}/0*.txt,{corpus}/1*.txt]", "--data.tokenizer=Bytes",
        f"--data.cache_dir={folder / 'cache'}",
        f"--data.seq_len={SEQ_LEN}", f"--data.global_batch_size={GLOBAL_BATCH}", "--data.validation_share=0.3",
        "--data.test_share=0", "--model.sample_tokens=2", "--model.optim.learning_rate=0.01", "--model.optim.warmup=4",
        "--trainer.accelerator=cpu", f"--trainer.max_steps={STEPS}", "--trainer.log_every_n_steps=1",
        "--trainer.val_check_interval=6", "--trainer.logger=false", f"--last_checkpoint.every_n_steps={EVERY}",
        "--last_checkpoint.keep=99",
    ]  # fmt: skip
    with Workers(1) as workers:
        workers.run(["prepare", *flags], folder / "prepare").check()
    yield Trainings(folder, flags)


def difference(whole: RunRecord, leg: RunRecord, first: int) -> str:
    """What of a leg is not, to the bit, what the run that was never stopped did in the same steps; "" for nothing."""
    steps = sorted(leg.loss)
    if not steps or steps[0] != first or steps != list(range(first, steps[-1] + 1)):
        return f"it went on with the steps {steps} and not from {first}"
    for rank in range(whole.size):
        for kind, keys in (("rows", ("rows", "random")), ("step", ("metrics", "tensors"))):
            want = {(e["step"], e.get("micro_batch")): e for e in whole.events(kind, rank)}
            for event in (e for e in leg.events(kind, rank) if e["step"] >= first):
                expected = want[event["step"], event.get("micro_batch")]
                if differing := [
                    key for key in keys if _exact(event[key]) != _exact(expected[key])
                ]:
                    where = f"rank {rank}, step {event['step']}: other {' and '.join(differing)}"
                    return f"{where} ({trace_resumed(whole, leg)})"
    owed = {
        step: metrics for step, metrics in whole.eval().items() if first <= step + 1 <= steps[-1]
    }
    return "" if owed.items() <= leg.eval().items() else f"validations {leg.eval()} and not {owed}"


def _exact(value: Any) -> Any:
    """Without what is measured of the machine, which is another each time, and what is judged a step later."""
    exact = ("train/", "data/", "moe/")
    return (
        {k: v for k, v in value.items() if k.startswith(exact)}
        if isinstance(value, dict)
        else value
    )


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "cell"), tiers(product(STRATEGIES, CELLS), daily=DAILY))
def test_a_killed_run_resumes_bit_identically(train: Trainings, strategy: str, cell: str) -> None:
    """Losses, gradient norms, learning rates, rows and random state of every rank, weights after each step."""
    whole, leg = train.whole(strategy, cell == VARIED), train.legs(strategy, cell == VARIED)[cell]
    assert list(whole.loss) == list(range(1, STEPS + 1))
    found = difference(whole, leg, CELLS[cell] // EVERY * EVERY + 1)
    assert not found, f"{strategy}, {cell}: {found}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "varied"),
    tiers(
        product(STRATEGIES, [False, True]),
        daily=[(strategy, cell == VARIED) for strategy, cell in DAILY],
    ),
)
def test_it_ends_with_the_same_weights(train: Trainings, strategy: str, varied: bool) -> None:
    whole, *_, end = train.whole(strategy, varied), *train.legs(strategy, varied).values()
    found = first_difference(whole.end, end.end)
    assert not found, f"{strategy}, {'varied' if varied else 'plain'}: {found}"


def position_forgotten() -> None:
    """As with a loader that keeps no state: from the epoch's start."""
    global_order.ConsumedSamples.value = lambda self, trainer: 0


def epoch_draws() -> None:
    """Without what keeps a loader's draws, at an epoch's start, from training's random state."""
    del RandomState.on_train_epoch_start


def validation_skipped() -> None:
    load = epochs.ResumableEpochLoop.on_load_checkpoint
    loop: Any = epochs.ResumableEpochLoop
    loop.on_load_checkpoint = lambda self, state: load(
        self, state | {epochs.KEY: epochs.Point.AFTER_VALIDATION}
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "sign"),
    tiers(
        [
            (position_forgotten, "other rows"),
            (random_state_not_saved, "other random"),
            (epoch_draws, f"step {EPOCH + 1}: other random"),
            (validation_skipped, "validations"),
        ],
        daily=[(random_state_not_saved, "other random")],
    ),
)
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
    legs = [
        (1, 7, train.kept(strategy, 4)), (4, 11, "--ckpt_path=last"), (2, 0, "--ckpt_path=last"),
    ]  # fmt: skip
    loss = {step: value for step, value in whole.loss.items() if step <= 4}
    for processes, stop, where in legs:
        acts = [KillAt(stop)] if stop else []
        leg = train.run(
            name, f"{name}-{processes}", strategy, where, processes=processes, callbacks=acts
        )
        assert leg.was_killed if stop else leg.check(), leg.error
        assert min(leg.loss) == {1: 5, 4: 7, 2: 11}[processes]
        rows, expected = leg.rows(), whole.rows()
        for step in leg.loss:
            assert [row for row, _ in rows[step]] == [row for row, _ in expected[step]], (
                f"{processes} ranks, step {step}"
            )
        loss |= leg.loss
    assert loss.keys() == whole.loss.keys()
    assert fmean(loss.values()) == pytest.approx(fmean(whole.loss.values()), abs=1e-6)
