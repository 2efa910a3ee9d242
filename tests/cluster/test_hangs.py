"""Hangs are named and end all ranks; killed ranks, nodes and links resume with equal weights."""

import functools
import itertools
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import psutil
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback

from dist_template.checkpoint.formats import read_full
from dist_template.cluster.hang import find_stalled
from dist_template.cluster.watchdog import WatchdogThread
from dist_template.errors import Exit
from dist_template.wings.rehearse.record import RunRecord
from dist_template.wings.values import free_port
from tests.support.injury import Step, Training, TwoHosts, kill
from tests.support.runs import Workers, newest, run
from tests.support.strategies import flags_of
from tests.support.tiers import tiers
from tests.support.waiting import LIMIT_S as LIMIT_OF_A_WAIT_S
from tests.support.waiting import until

LIMIT_S = 3.0
BUSY_S = 50.0  # for a slow machine; a collective's own limit would be 60 s more than LIMIT_S


def hang(folder: Path) -> None:
    (folder / "hangs_since").write_text(str(time.time()))
    time.sleep(600)


class HangAt(Callback):
    """Hangs on `rank`, in the `call`-th call of training_step, or in `setup` if `call` is 0."""

    def __init__(self, rank: int, call: int, folder: Path) -> None:
        self.rank, self.call, self.folder = rank, call, folder

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        if trainer.global_rank != self.rank:
            return
        if self.call == 0:
            hang(self.folder)
        before, calls = pl_module.training_step, itertools.count(1)

        def training_step(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == self.call:
                hang(self.folder)
            return before(*args, **kwargs)

        pl_module.training_step = training_step


def hang_in_data(rank: int, call: int, folder: Path) -> None:
    """A prelude: the rank's data set never answers the `call`-th request."""
    from dist_template.text.batches.rows import Rows

    read, calls = Rows.__getitems__, itertools.count(1)

    def stuck(self: Rows, rows: list[int]) -> Any:
        if os.environ["RANK"] == str(rank) and next(calls) == call:
            hang(folder)
        return read(self, rows)

    Rows.__getitems__ = stuck


def train(
    flags: list[str], folder: Path, *extra: str, strategy: str = "ddp", num: int = 2, **options: Any
) -> RunRecord:
    assert run("prepare", *flags) == 0
    flags = ["fit", *flags, f"--trainer.devices={num}", *(flags_of(strategy) if num > 1 else [])]
    flags += ["--data.global_batch_size=8", "--data.micro_batch_size=1"]
    flags += ["--trainer.limit_val_batches=0", "--trainer.num_sanity_val_steps=0"]
    flags += [f"--watchdog.timeout_s={LIMIT_S}", f"--watchdog.start_timeout_s={10 * LIMIT_S}"]
    return Workers(num).run([*flags, *extra], folder / "record", **{"timeout_s": 60.0} | options)


CASES = [("ddp", 2, 1, "loader"), ("ddp", 2, 0, "step"), ("fsdp2", 2, 1, "step")]
CASES += [("fsdp2", 2, 0, "loader"), ("fsdp2_tp", 4, 2, "step"), ("zero2", 2, 1, "step")]
CASES += [("zero2", 2, 0, "start"), ("zero3", 2, 0, "step"), ("pp", 2, 1, "stage")]
PLACES = {  # the call that hangs, and how the sentence names the place
    "step": (6, "step 2, micro-batch 2, forward"),
    "loader": (10, "step 2, micro-batch 1, in its data loader"),
    "start": (0, "start-up, in a callback"),
    # in the schedule of the second step, which runs all of its 8 micro-batches
    "stage": (14, "step 2, pipeline stage 2 of 2, micro-batch 8, forward"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "num", "rank", "where"), tiers(CASES, [CASES[0], CASES[2]]))
def test_a_rank_that_hangs_is_named_and_all_end(
    strategy: str, num: int, rank: int, where: str, flags: list[str], tmp_path: Path
) -> None:
    call, place = PLACES[where]
    options: dict[str, Any] = {"callbacks": [HangAt(rank, call, tmp_path)]}
    if where == "loader":
        options = {"prelude": functools.partial(hang_in_data, rank, call, tmp_path)}
    limits = [f"--watchdog.start_timeout_s={LIMIT_S}"] if where == "start" else []
    record = train(flags, tmp_path, *limits, strategy=strategy, num=num, **options)
    assert time.time() - float((tmp_path / "hangs_since").read_text()) >= LIMIT_S - 0.5
    for of_rank, answer in record.answers.items():
        assert answer == f"killed: exit code {int(Exit.HUNG)}", record.log(of_rank)[-3000:]
        assert "most recent call first" in record.log(of_rank)
    printed = "".join(map(record.log, record.answers))
    (sentence,) = set(re.findall(r"^no progress for [\d.]+ s: .*", printed, re.MULTILINE))
    named, waiting = sentence.split("; ", maxsplit=1)
    assert re.search(f": rank {rank} .*{place}, .*test_hangs.py:", named)
    others = {str(other) for other in range(num)} - {str(rank)}
    assert others <= {*re.findall(r"\d+", waiting)} and "wait" in waiting


@pytest.mark.slow
def test_without_the_watchdog_a_hang_stays(flags: list[str], tmp_path: Path) -> None:
    off = ["--watchdog.timeout_s=0", "--watchdog.start_timeout_s=0"]
    options: Any = {"callbacks": [HangAt(1, 6, tmp_path)], "timeout_s": LIMIT_S + 8}
    record = train(flags, tmp_path, *off, **options)
    assert (tmp_path / "hangs_since").exists()
    assert all(answer.startswith("hung:") for answer in record.answers.values()), record.answers


class SlowValidation(Callback):
    """Each batch takes a while, all of them more than the limit."""

    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        time.sleep(0.6)


@pytest.mark.slow
def test_a_long_validation_that_lives_is_let_live(flags: list[str], tmp_path: Path) -> None:
    more = [f"--watchdog.start_timeout_s={LIMIT_S}", "--trainer.max_steps=2"]
    more += ["--trainer.limit_val_batches=8", "--trainer.val_check_interval=2"]
    train(flags, tmp_path, *more, num=1, callbacks=[SlowValidation()]).check()


@pytest.mark.slow
def test_a_start_that_hangs_in_an_import_is_ended() -> None:
    hangs = """
import sys, time
import dist_template.cli.main as command
from tests.support.line import OURS

class Slow:
    def find_spec(self, name, *_):
        if name == "dist_template.cli.fit":
            time.sleep(60)

sys.meta_path.insert(0, Slow())
command.START_TIMEOUT_S = 1.0
command.run(["fit"], OURS)
"""
    command = [sys.executable, "-c", hangs]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == Exit.HUNG, ended.stderr
    assert "most recent call first" in ended.stderr
    said = r"^no progress for 1 s: rank 0 is stalled: start-up, importing, .*:9$"
    assert re.search(said, ended.stderr, re.MULTILINE), ended.stderr


A, B, A_WAITS = (7, "a", False), (5, "b", True), (7, "a", True)
STALLED = [
    ({0: A, 1: B, 2: A_WAITS}, "rank 1 is stalled: b, f:1; ranks 0, 2 are waiting for it in a"),
    ({0: A, 1: A_WAITS}, "rank 0 is stalled: a, f:1; rank 1 is waiting for it in a"),
    (
        {0: A_WAITS, 2: A_WAITS},
        "rank 1 is unresponsive: the process is stopped or its node is lost; ranks 0, 2 are"
        " waiting for it in a",
    ),
    (
        {0: A_WAITS, 1: (7, "b", True)},
        "no rank is behind the others; rank 0 is stalled: a, f:1; rank 1 is stalled: b, f:1",
    ),
]


@pytest.mark.parametrize(("words", "sentence"), STALLED)
def test_the_stalled_rank_is_named(words: dict[int, tuple[int, str, bool]], sentence: str) -> None:
    """Rank: (progress, place, whether it waits); a rank that is missing does not answer."""
    names = ("beats", "place", "waits")
    more = {"line": "f:1", "is_finished": False}
    statuses = {r: dict(zip(names, of, strict=True)) | more for r, of in words.items()}
    assert find_stalled(statuses, [r for r in range(max(words)) if r not in words]) == sentence


def test_a_rank_whose_data_have_ended_is_not_stalled() -> None:
    """Rank 1 has fewer batches, and waits in a collective of the epoch's end."""
    training = {"beats": 40, "place": "step 9, backward", "line": "f:1", "waits": True}
    training |= {"is_finished": False, "batches": 9, "has_ended": False}
    ended = training | {"beats": 35, "batches": 8, "has_ended": True}
    said = find_stalled({0: training, 1: ended}, [])
    assert said.startswith("the data of rank 1 ended after batch 8 of the epoch, and rank 0 is in")
    assert "no rank is stalled; all ranks need equally many batches" in said
    last = training | {"batches": 8}  # in its last batch, as rank 1 was
    assert "rank 1 is stalled" in find_stalled({0: last, 1: ended}, [])


def test_a_rank_that_has_finished_is_not_behind() -> None:
    stalled = {"beats": 9, "place": "a", "line": "f:1", "waits": True, "is_finished": False}
    done = stalled | {"beats": 8, "is_finished": True}
    said = "rank 0 is stalled: a, f:1; ranks 1-2 have finished"
    assert find_stalled({0: stalled, 1: done}, [], [2]) == said
    said = "rank 0 is unresponsive: the process is stopped or its node is lost; rank 1 has finished"
    assert find_stalled({1: done}, [0]) == said


class Ends:
    """Ranks at the end of a run: processes with a store and the watchdog, without a training.

    Each is given what it does after its last step; then it exits as `fit` does."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()

    def run(self, *last: Callable[[], None]) -> list[int | None]:
        """Returns the ranks' exit codes; None: it is stopped, and the others have ended."""
        context = multiprocessing.get_context("fork")
        ranks = [context.Process(target=self._rank, args=(r, last)) for r in range(len(last))]
        for rank in ranks:
            rank.start()
        try:
            for rank, does in zip(ranks, last, strict=True):
                if does is not freeze:
                    rank.join(BUSY_S)
            return [rank.exitcode for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()

    def _rank(self, rank: int, last: tuple[Callable[[], None], ...]) -> None:
        log = os.open(self.folder / f"{rank}.log", os.O_CREAT | os.O_WRONLY)
        os.dup2(log, 1)
        os.dup2(log, 2)
        watchdog, num = WORKING, len(last)
        timeout = timedelta(seconds=BUSY_S)
        store = dist.TCPStore("127.0.0.1", self.port, num, rank == 0, timeout)
        watchdog.start(END_LIMIT_S)
        watchdog.connect(store, rank, num)
        try:
            last[rank]()
            watchdog.finish()
        finally:
            watchdog.stop()
        os._exit(0)

    def sentences(self) -> set[str]:
        logs = "".join(path.read_text() for path in self.folder.glob("*.log"))
        return set(re.findall(r"^no progress for [\d.]+ s: .*", logs, re.MULTILINE))


END_LIMIT_S = 1.0
WORKING = WatchdogThread()  # of a forked rank; this process starts none


def freeze() -> None:
    """Stops every thread of this process, and so a store that it hosts."""
    os.kill(os.getpid(), signal.SIGSTOP)


def sleep_long() -> None:
    time.sleep(600)


def work_alive() -> None:
    """Works three times as long as the limit, as an upload does, and says so."""
    for _ in range(12):
        time.sleep(END_LIMIT_S / 4)
        WORKING.keep_alive()


def raise_an_error() -> None:
    raise ValueError("at the very end")


def nothing() -> None:
    pass


HUNG: Any = int(Exit.HUNG)
FINISHED = "rank 1 has finished"
AT_THE_END = {  # what the ranks do last: their exit codes, what is said
    "rank 0 hangs": ((sleep_long, nothing), [HUNG, HUNG], f"rank 0 is stalled: .*; {FINISHED}"),
    "rank 1 hangs": ((nothing, sleep_long), [HUNG, HUNG], "rank 1 is stalled: .*; rank 0 has fini"),
    "rank 0 is frozen": ((freeze, nothing), [None, HUNG], f"rank 0 is unresponsive.*; {FINISHED}"),
    "rank 1 is frozen": ((nothing, freeze), [HUNG, None], "rank 1 is unresponsive.*; rank 0 has f"),
    "rank 0 fails": ((raise_an_error, nothing), [1, 0], ""),
    "rank 1 fails": ((nothing, raise_an_error), [0, 1], ""),
    "rank 0 works on": ((work_alive, nothing, nothing), [0, 0, 0], ""),
    "none hangs": ((nothing, nothing, nothing), [0, 0, 0], ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", AT_THE_END)
def test_a_hang_at_the_very_end_is_that_of_the_rank_that_has_not_finished(
    case: str, tmp_path: Path
) -> None:
    last, codes, said = AT_THE_END[case]
    ends = Ends(tmp_path)
    assert ends.run(*last) == codes
    sentences = ends.sentences()
    assert len(sentences) == bool(said) and all(re.search(said, each) for each in sentences)


KILLS = int(os.environ.get("KILLS", "20"))
EVERY = 10  # steps between two checkpoints


def lives(training: Training) -> list[list[Step]]:
    """Rank 0's steps, by process."""
    found: dict[Any, list[Step]] = {}
    for step in training.steps():
        found.setdefault(step.life, []).append(step)
    return [*found.values()]


def newest_of(root: Path, run_id: str) -> Path:
    return newest(root / "runs" / "default" / run_id)


@pytest.mark.nightly  # minutes; test_exact_resume.py kills ranks in `make test`
def test_a_kill_at_any_time_costs_at_most_one_interval(flags: list[str], tmp_path: Path) -> None:
    """`KILLS=50 pytest …` for more; the times are printed (`-s`)."""
    run("prepare", *flags)
    argv = ["fit", *flags, "--trainer.strategy=ddp", f"--trainer.max_steps={30 * KILLS}"]
    argv += ["--trainer.val_check_interval=500", "--trainer.log_every_n_steps=50"]
    argv += [f"--last_checkpoint.every_n_steps={EVERY}"]
    with Training(tmp_path / "reference", argv, NPROC="2") as reference:
        assert reference.end() == Exit.DONE, reference.log.read_text()[-3000:]
    chance = random.Random(KILLS)
    waits, lost = [], []
    with Training(tmp_path / "hurt", argv, NPROC="2", MAX_RESTARTS=str(KILLS)) as hurt:
        for trial in range(KILLS):
            hurt.wait(lambda trial=trial: len(lives(hurt)) > trial)
            begun = lives(hurt)[-1][0].step
            hurt.reach(begun + chance.randint(EVERY + 1, 2 * EVERY))
            at = time.time()
            kill(hurt.ranks()[chance.randrange(2)])
            hurt.wait(lambda trial=trial: len(lives(hurt)) > trial + 1)
            waits.append(lives(hurt)[-1][0].at - at)
            lost.append(lives(hurt)[-2][-1].step - lives(hurt)[-1][0].step)
        assert hurt.end(300) == Exit.DONE, hurt.log.read_text()[-3000:]
    print(f"first batch after {min(waits):.1f} to {max(waits):.1f} s, {max(lost)} steps lost")
    assert max(lost) <= EVERY
    one, other = (newest_of(tmp_path, name) for name in ("hurt", "reference"))
    one, other = (read_full(path)["state_dict"] for path in (one, other))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_a_signal_to_the_launcher_or_its_death_saves(flags: list[str], tmp_path: Path) -> None:
    run("prepare", *flags)
    argv = ["fit", *flags, "--trainer.strategy=ddp", "--trainer.max_steps=200"]
    argv += ["--last_checkpoint.every_n_steps=100"]
    last = 0
    with Training(tmp_path / "run", argv, NPROC="2") as training:
        for number, code in ((signal.SIGTERM, Exit.REQUEUE), (signal.SIGKILL, -signal.SIGKILL)):
            training.reach(last + 20, timeout_s=180)
            assert lives(training)[-1][0].step == last, "it has resumed there"
            ranks = [psutil.Process(pid) for pid in training.ranks().values()]
            kill(training.launcher.pid, number)
            assert training.end(LIMIT_OF_A_WAIT_S) == code
            assert psutil.wait_procs(ranks, timeout=LIMIT_OF_A_WAIT_S)[1] == []
            last = training.steps()[-1].step
            assert newest_of(tmp_path, "run").name == f"step{last:08}.ckpt", "no step is lost"
            if code == Exit.REQUEUE:
                training.start()


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    if not shutil.which("ip"):
        pytest.skip("needs `ip` (iproute2)")
    try:
        with TwoHosts() as two:
            yield two
    except subprocess.CalledProcessError as error:
        pytest.skip(f"`ip netns add` is not allowed: {error.stderr}")


def seconds(what: str, condition: Callable[[], bool]) -> None:
    """Wait, and print how long it took (`pytest -s`)."""
    begun = time.monotonic()
    until(condition, what, poll_s=0.02)
    print(f"{what}: {time.monotonic() - begun:.1f} s")


@pytest.mark.netns
@pytest.mark.nightly  # minutes; test_exit_codes.py is in `make test`
def test_what_is_left_goes_on(hosts: TwoHosts, flags: list[str], tmp_path: Path) -> None:
    run("prepare", *flags)
    argv = ["fit", *flags, "--trainer.strategy=ddp", "--trainer.max_steps=100000"]
    argv += ["--trainer.val_check_interval=5000", "--last_checkpoint.every_n_steps=20"]
    argv += ["--watchdog.timeout_s=10", "--trainer.log_every_n_steps=50"]
    options = {"NNODES": "1:2", "MAX_RESTARTS": "10", "DIST_RUN_ID": "hosts"}
    options["SHUTDOWN_TIMEOUT"] = "10"
    a, b = (hosts.training(host, tmp_path / "steps", argv, **options) for host in (0, 1))

    def restarts(what: str, act: Callable[..., Any], *arguments: Any) -> None:
        """Waits until rank 0 has a first batch after `act`."""
        lives = len({step.life for step in a.steps()})
        act(*arguments)
        seconds(what, lambda: len({step.life for step in a.steps()}) > lives)

    def has_ended() -> bool:
        return b.launcher.poll() is not None

    with a, b:
        a.reach(10)
        restarts("a worker killed, to the first batch on both", kill, *b.ranks().values())
        assert len(a.ranks()) == len(b.ranks()) == 1
        a.reach(a.steps()[-1].step + 25)
        restarts("the link cut (watchdog 10 s), to the first batch on one node", hosts.cut)
        seconds("  and to the other's exit", has_ended)
        assert b.launcher.returncode == Exit.REQUEUE
        hosts.cut(whole=True)
        restarts("the link mended and the node relaunched, to the first batch on both", b.start)
        a.reach(a.steps()[-1].step + 25)
        restarts("a node killed, to the first batch on the other", hosts.kill, 1)
        restarts("the node relaunched, to the first batch on both", b.start)
        a.reach(a.steps()[-1].step + 25)
        hosts.kill(0)
        seconds("the rendezvous's host killed, to the other's exit", has_ended)
        assert b.launcher.returncode == Exit.REQUEUE
        assert "the rendezvous is lost" in b.log.read_text()
