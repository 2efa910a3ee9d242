"""A hang is detected in any phase, the stalled rank is named, and all ranks exit."""

from __future__ import annotations

import functools
import os
import re
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch import Callback

from dist_template.errors import Exit
from tests.support.runs import Workers, run
from tests.support.strategies import flags_of
from tests.support.tiers import tiers
from tests.support.wings import RunRecord

LIMIT_S = 3.0
BUSY_S = 20.0  # for a slow machine; a collective's own limit would be 60 s more than LIMIT_S


class HangAt(Callback):
    """Hangs in a hook, at its `call`-th call on this rank.

    Args:
        rank: The rank that hangs; the others continue until they need it.
        hook: A callback's or the module's, by name.
        folder: Where the time is written down.
    """

    def __init__(self, rank: int, hook: str, folder: Path, call: int = 1) -> None:
        self.rank, self.hook, self.folder, self.call = rank, hook, folder, call

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        if trainer.global_rank != self.rank:
            return
        if self.hook == "setup":
            self._hang()
        is_modules = hasattr(type(pl_module), self.hook) and "step" in self.hook
        owner: Any = pl_module if is_modules else self
        before, count = getattr(owner, self.hook), iter(range(1, 10**9))

        def hook(*args: Any, **kwargs: Any) -> Any:
            if next(count) == self.call:
                self._hang()
            return before(*args, **kwargs)

        setattr(owner, self.hook, hook)

    def _hang(self) -> None:
        hang(self.folder)


def hang(folder: Path) -> None:
    (folder / "hangs_since").write_text(str(time.time()))
    time.sleep(600)


def hang_in_data(rank: int, call: int, folder: Path) -> None:
    """A prelude: the rank's data set never answers the `call`-th request."""
    from tests.support.library import Rows

    read, count = Rows.__getitems__, iter(range(1, 10**9))

    def stuck(self: Rows, rows: list[int]) -> Any:
        if os.environ["RANK"] == str(rank) and next(count) == call:
            hang(folder)
        return read(self, rows)

    Rows.__getitems__ = stuck


def train(
    flags: list[str], folder: Path, *extra: str, strategy: str = "ddp", num: int = 2, **options: Any
) -> RunRecord:
    flags = [*flags, f"--trainer.devices={num}"] + (flags_of(strategy) if num > 1 else [])
    flags += ["--data.global_batch_size=8", "--data.micro_batch_size=1"]
    flags += ["--trainer.limit_val_batches=0", "--trainer.num_sanity_val_steps=0"]
    limits = [f"--watchdog.timeout_s={LIMIT_S}", f"--watchdog.start_timeout_s={10 * LIMIT_S}"]
    folder.mkdir(parents=True, exist_ok=True)
    with Workers(num) as workers:
        argv = ["fit", *flags, *limits, *extra]
        return workers.run(argv, folder / "record", **{"timeout_s": 60.0} | options)


def check_all_ended(record: RunRecord, folder: Path, limit_s: float = LIMIT_S) -> str:
    """The sentence that the log ends with, when each rank ended in time and wrote its stacks."""
    took_s = time.time() - float((folder / "hangs_since").read_text())
    for rank, answer in record.answers.items():
        assert answer == f"killed: exit code {int(Exit.HUNG)}", record.log(rank)[-3000:]
        assert "most recent call first" in record.log(rank), "in the log"
    printed = "".join(record.log(rank) for rank in record.answers)
    print(f"noticed and ended after {took_s:.2f} s")
    assert limit_s <= took_s + 0.5 and took_s <= limit_s + BUSY_S
    (sentence,) = set(re.findall(r"^no progress for [\d.]+ s: .*", printed, re.MULTILINE))
    return sentence


@pytest.fixture
def prepared(flags: list[str]) -> list[str]:
    assert run("prepare", *flags) == 0
    return flags


STEP, LOADER, START = "training_step", "loader", "setup"
STAGE = "stage"  # in the schedule of the second step, which runs all of its 8 micro-batches
CASES = [
    ("ddp", 2, 1, LOADER), ("ddp", 2, 0, STEP), ("fsdp2", 2, 1, STEP), ("fsdp2", 2, 0, LOADER),
    ("fsdp2_tp", 4, 2, STEP), ("zero2", 2, 1, STEP), ("zero2", 2, 0, START), ("zero3", 2, 0, STEP),
    ("pp", 2, 1, STAGE),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "num", "rank", "where"),
    tiers(CASES, daily=[("fsdp2", 2, 1, STEP), ("ddp", 2, 1, LOADER)]),
)
def test_a_rank_that_hangs_is_named_and_all_end(
    strategy: str, num: int, rank: int, where: str, prepared: list[str], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"callbacks": [HangAt(rank, where, tmp_path, 6)]}
    limits = []
    if where == LOADER:
        options = {"prelude": functools.partial(hang_in_data, rank, 10, tmp_path)}
    if where == STAGE:
        options = {"callbacks": [HangAt(rank, STEP, tmp_path, 14)]}
    if where == START:
        limits = [f"--watchdog.start_timeout_s={LIMIT_S}"]
    record = train(prepared, tmp_path, *limits, strategy=strategy, num=num, **options)
    sentence = check_all_ended(record, tmp_path)
    print(sentence)
    named, waiting = re.split("; ", sentence, maxsplit=1)
    place = {
        STEP: "step 2, micro-batch 2, forward, .*test_hangs.py:",
        LOADER: "step 2, micro-batch 1, in its data loader, .*test_hangs.py:",
        START: "start-up, in a callback, .*test_hangs.py:",
        STAGE: "step 2, pipeline stage 2 of 2, micro-batch 8, forward, .*test_hangs.py:",
    }
    assert re.search(f": rank {rank} .*{place[where]}", named)
    others = ", ".join(str(other) for other in range(num) if other != rank)
    assert all(other in waiting for other in others) and "wait" in waiting


@pytest.mark.slow
def test_without_the_watchdog_a_hang_stays(prepared: list[str], tmp_path: Path) -> None:
    off = ["--watchdog.timeout_s=0", "--watchdog.start_timeout_s=0"]
    options: Any = {"callbacks": [HangAt(1, STEP, tmp_path, 6)], "timeout_s": LIMIT_S + 8}
    record = train(prepared, tmp_path, *off, **options)
    assert (tmp_path / "hangs_since").exists()
    assert all(answer.startswith("hung:") for answer in record.answers.values()), record.answers


class SlowValidation(Callback):
    """Each batch takes a while, all of them more than the limit."""

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(0.6)


@pytest.mark.slow
def test_a_long_validation_that_lives_is_let_live(prepared: list[str], tmp_path: Path) -> None:
    flags = ["--watchdog.timeout_s=3", "--watchdog.start_timeout_s=3", "--trainer.max_steps=2"]
    flags += ["--trainer.limit_val_batches=8", "--trainer.val_check_interval=2"]
    train(prepared, tmp_path, *flags, num=1, callbacks=[SlowValidation()]).check()
