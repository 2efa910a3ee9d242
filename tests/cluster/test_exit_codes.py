"""Exit codes of launchers, what launch/slurm.sh does by them, child processes, their warnings."""

import logging
import os
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.distributed import _suggested_max_num_threads
from lightning.pytorch import Callback
from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from dist_template.cluster import signals, torchrun
from dist_template.compat import torchrun as names
from dist_template.errors import Exit
from tests.support.runs import PACKAGE, PROJECT, clean_environment, logged, only_run, run, small
from tests.support.tiers import tiers
from tests.support.waiting import LIMIT_S, until

CODES = [
    ([0, 0], Exit.DONE),
    ([75, 75], Exit.REQUEUE),
    ([1, 65], Exit.NON_FINITE),
    ([75, -6], Exit.REQUEUE),  # the peer was aborted because this one had exited
    ([75, 2], Exit.BAD_INPUT),
    ([1, -6], Exit.FAILED),
    ([-15], Exit.REQUEUE),
    ([3], Exit.FAILED),
    ([1, 69, -6], Exit.OUT_OF_MEMORY),  # the peers' errors are about the one without memory
    ([-9, 1], Exit.REQUEUE),
    ([1, 71], Exit.REQUEUE),  # or about the killed or stalled one
]


def test_one_code_is_made_of_all_processes() -> None:
    assert [Exit.of_all(codes) for codes, _ in CODES] == [code for _, code in CODES]


class Launched:
    """torchrun in this process; its workers are shell commands that count their starts."""

    def __init__(self, folder: Path, capfd: pytest.CaptureFixture) -> None:
        self.folder, self.capfd = folder, capfd

    def run(self, *by_rank: str) -> int:
        cases = "".join(f"{rank}) {command};; " for rank, command in enumerate(by_rank))
        script = f"echo >> {self.folder}/starts.$RANK; case $RANK in {cases}esac"
        flags = [f"--nproc-per-node={len(by_rank)}", "--max-restarts=1"]
        flags += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
        flags += ["--monitor-interval=0.05", "--signals-to-handle=SIGTERM,SIGUSR1"]
        flags += ["--shutdown-timeout=5", "--no-python", "sh", "-c", script]
        return torchrun.main(flags)

    @property
    def starts(self) -> int:
        return len((self.folder / "starts.0").read_text().splitlines())

    @property
    def printed(self) -> str:
        return self.capfd.readouterr().err


@pytest.fixture
def launched(tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launched]:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    monkeypatch.setattr(names, "PEERS_S", 0.5)
    monkeypatch.setattr(torchrun.Agent, "instances", [])
    replaced = {"LocalElasticAgent": names.launcher, "Popen": names.subprocess_handler}
    for name, module in (replaced | {"_terminate_process_handler": names.processes}).items():
        monkeypatch.setattr(module, name, getattr(module, name))  # puts it back after the test
    handled = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in handled}
    yield Launched(tmp_path, capfd)
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.slow
@pytest.mark.parametrize("code", [Exit.BAD_INPUT, Exit.NON_FINITE, Exit.MISMATCH])
def test_a_process_that_exits_by_decision_is_not_restarted(launched: Launched, code: Exit) -> None:
    assert launched.run(f"exit {code:d}", f"exit {code:d}") == code
    assert launched.starts == 1 and launched.printed == "", "rank 0 has printed why"


SLEEPS = "exec sleep 1000"  # longer than a test may take
ENDS = {  # commands of two workers, the launcher's code, how often it starts them, what it prints
    "a killed worker": (
        ["kill -9 $$$$", SLEEPS],
        Exit.REQUEUE,
        2,
        "rank 0 was killed by SIGKILL; restarting, 0 more left.*no restart is left",
    ),
    # 75 would make a scheduler start the same failure for ever
    "a failure": (["exit 1", SLEEPS], Exit.FAILED, 2, "rank 0 exited with code 1; restarting, 0"),
    "a decision": ([SLEEPS, "exit 2"], Exit.BAD_INPUT, 1, "rank 1 exited with code 2"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", ENDS)
def test_one_workers_end_ends_those_that_wait_for_it(case: str, launched: Launched) -> None:
    commands, code, starts, sentence = ENDS[case]
    assert launched.run(*commands) == code and launched.starts == starts
    printed = launched.printed
    assert re.search(sentence, printed, re.DOTALL), printed
    assert "Traceback" not in printed and "=====" not in printed


@pytest.mark.slow
def test_a_signal_is_handed_on_once_and_the_workers_code_is_the_launchers(launched: Any) -> None:
    """The workers signal their launcher, and once more while they save."""
    save = "kill -USR1 $PPID; sleep 0.5; exit 75"
    wait = f"touch {launched.folder}/trains.$RANK; while :; do sleep 0.05; done"
    both = f"[ -e {launched.folder}/trains.0 ] && [ -e {launched.folder}/trains.1 ]"
    first = f"(until {both}; do sleep 0.05; done; sleep 0.5; kill -USR1 $PPID) & {wait}"
    handled = f"trap '{save}' TERM USR1; "
    assert launched.run(handled + first, handled + wait) == Exit.REQUEUE
    assert launched.starts == 1 and torchrun.codes() == [75, 75], "they have saved"


@pytest.mark.slow
def test_a_lost_rendezvous_is_one_sentence(launched: Launched, monkeypatch: Any) -> None:
    def lost(self: Any) -> int:
        raise RendezvousConnectionError("The connection to the C10d store has failed.")

    monkeypatch.setattr(DynamicRendezvousHandler, "num_nodes_waiting", lost)
    assert launched.run("exec sleep 60") == Exit.REQUEUE
    printed = launched.printed
    assert "the rendezvous is lost" in printed and "relaunch" in printed
    assert "Traceback" not in printed


@pytest.mark.slow
@pytest.mark.parametrize("number", tiers([signal.SIGTERM, signal.SIGKILL], [signal.SIGTERM]))
def test_lightnings_own_launcher_ends_with_a_code(flags: Any, tmp_path: Path, number: int) -> None:
    """The first process is the launcher, and would be killed by Lightning."""
    run("prepare", *flags)
    more = ["--trainer.strategy=ddp", "--trainer.devices=2", "--trainer.max_steps=100000"]
    command = [sys.executable, "-m", PACKAGE, "fit", *flags, *more]
    command += ["--last_checkpoint.every_n_steps=5"]
    with (tmp_path / "log").open("w") as log:
        options: Any = {"env": clean_environment(), "stdout": log, "stderr": log}
        first = subprocess.Popen(command, cwd=PROJECT, **options)
    try:
        saved = "runs/*/*/checkpoints/step*"
        until(lambda: first.poll() is not None or [*tmp_path.glob(saved)], "no checkpoint")
        assert first.poll() is None
        (child,) = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()
        os.kill(int(child), number)
        codes = {Exit.REQUEUE} if number == signal.SIGTERM else {Exit.FAILED, Exit.REQUEUE}
        assert first.wait(LIMIT_S) in codes, (tmp_path / "log").read_text()
    finally:
        first.kill()
        first.wait()


def script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


JOBS = [  # code, earlier restarts, requeued: stopped, hung or killed, but not again and again
    (0, 0, False),
    (75, 99, True),
    (71, 0, True),
    (137, 0, True),
    (137, 10, False),
    (1, 0, False),
]


@pytest.mark.parametrize(("code", "earlier", "requeued"), JOBS)
def test_a_job_is_requeued(tmp_path: Path, code: int, earlier: int, requeued: bool) -> None:
    said = 'echo "$SRUN_CPUS_PER_TASK $DIST_RUN_ID $@"'  # which srun does not inherit by itself
    script(tmp_path / "srun", f"{said} > {tmp_path}/srun.called; exit {code}")
    script(tmp_path / "scontrol", f'echo "$@" > {tmp_path}/scontrol.called')
    slurm = {"SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(PROJECT), "SLURM_JOB_NUM_NODES": "3"}
    slurm |= {"SLURM_RESTART_COUNT": str(earlier), "SLURM_NTASKS_PER_NODE": "2"}
    slurm["SLURM_CPUS_PER_TASK"] = "6"
    others = ("SLURM_", "SRUN_", "DIST_", "MAX_")
    env = {key: value for key, value in os.environ.items() if not key.startswith(others)}
    env |= slurm | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": "python"}
    command = ["bash", str(PROJECT / "launch" / "slurm.sh"), "fit", "--config", "x.yaml"]
    assert subprocess.run(command, env=env, capture_output=True, timeout=20).returncode == code
    called = (tmp_path / "srun.called").read_text().split()
    assert called[:2] == ["6", "slurm-7"], "a requeued job resumes in its folder"
    flags = ["--trainer.devices=2", "--trainer.num_nodes=3"]
    assert called[-6:] == [PACKAGE, "fit", "--config", "x.yaml", *flags]
    asked = tmp_path / "scontrol.called"
    assert (asked.read_text().split() == ["requeue", "7"]) if requeued else not asked.exists()


LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux signals the end of a parent")

WORKERS_THAT_LOOP = """
import os, sys, time
from torch.utils.data import DataLoader, Dataset
from dist_template.cluster import signals

class Looping(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        os.write(1, f"{os.getpid()}\\n".encode())
        while True:
            pass

def load():
    workers = int(sys.argv[1])
    return iter(DataLoader(Looping(), num_workers=workers, worker_init_fn=signals.isolate_worker))
"""

# The rank exits before its two workers ask for a signal; each holds the other's pipe to the rank.
LATE = """
class Late:
    def prctl(self, *arguments):
        rank = os.getppid()
        os.write(1, f"{os.getpid()}\\n".encode())
        while os.getppid() == rank:
            time.sleep(0.01)
        return prctl(*arguments)

prctl, signals.LIBC = signals.LIBC.prctl, Late()
"""
EXITS = "batches = load(); time.sleep(2); os._exit(71)  # as the watchdog does"
LOOPS = {"1": WORKERS_THAT_LOOP + EXITS, "2": WORKERS_THAT_LOOP + LATE + EXITS}


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@LINUX
@pytest.mark.slow
@pytest.mark.parametrize("workers", LOOPS, ids=["a worker", "workers that are late"])
def test_what_a_rank_has_started_ends_with_it(workers: str) -> None:
    command = [sys.executable, "-c", LOOPS[workers], workers]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())  # no more: what was started may hold the pipe open
    try:
        assert process.wait(LIMIT_S) == Exit.HUNG
        until(lambda: not lives(pid), "it runs on")
    finally:
        if lives(pid):
            os.kill(pid, 9)


class Reports(Callback):
    """Warns, and reports torch's number of threads and the variable for child processes."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        rank, log = f"rank {trainer.global_rank}", logging.getLogger("some.library")
        warnings.warn(f"{rank} warns", stacklevel=1)
        log.warning("%s warns in a log", rank)
        found = (torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS"))
        log.error("%s has %s threads, %s for a child", rank, *found)


@pytest.fixture(scope="module")
def printed(corpus: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """On standard error. Nobody has set the number of threads."""
    folder = tmp_path_factory.mktemp("typed")
    flags = [*small(corpus, cache, folder), f"--trainer.callbacks+={__name__}.Reports"]
    flags += ["--trainer.max_steps=2", "--trainer.devices=2", "--trainer.strategy=ddp"]
    env = clean_environment()
    env.pop("OMP_NUM_THREADS", None)
    command = [sys.executable, "-m", PACKAGE, "fit", *flags]
    options: Any = {"env": env, "cwd": PROJECT, "capture_output": True, "text": True}
    result = subprocess.run(command, timeout=300, check=False, **options)
    assert result.returncode == 0, result.stderr
    assert [*logged(only_run(folder), "train/loss")] == [1, 2], "both ranks are of one run"
    return result.stderr


@pytest.mark.slow
def test_rank_0_alone_prints_warnings(printed: str) -> None:
    assert "rank 0 warns\n" in printed and "rank 0 warns in a log\n" in printed
    assert "rank 1 warns" not in printed


@pytest.mark.slow
def test_where_nobody_has_set_the_threads_each_process_has_its_share(printed: str) -> None:
    """Lightning would do so in the first alone. The errors of both ranks are printed."""
    share = _suggested_max_num_threads(2)
    for rank in range(2):
        assert f"rank {rank} has {share} threads, {share} for a child\n" in printed


class SendAt(Callback):
    """Sends a signal to this process at the end of a step."""

    def __init__(self, number: int, step: int = 5) -> None:
        self.number, self.step = number, step

    def on_train_batch_end(self, trainer: Any, *_: object, **__: object) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), self.number)


class RequestAt(SendAt):
    """Asks for a stop as SIGTERM does; tests do not listen to signals."""

    def on_train_batch_end(self, trainer: Any, *_: object, **__: object) -> None:
        if trainer.global_step >= self.step:
            signals.stop_request.number = self.number


@pytest.mark.slow
def test_ctrl_c_and_sigterm_of_a_resumed_run_have_their_codes_and_the_runs_name(
    flags: list[str], tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning exits with 1 after Ctrl-C, which a sweep takes for a failed trial."""
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(signals.stop_request, "number", 0)
    steps = ["--trainer.max_steps=400", "--last_checkpoint.every_n_steps=2"]
    callback = f"--trainer.callbacks+={__name__}"
    try:
        sends = [f"{callback}.SendAt", f"--trainer.callbacks.number={signal.SIGINT.value}"]
        assert run("fit", *flags, *steps, *sends) == Exit.INTERRUPTED
    finally:
        signal.signal(signal.SIGINT, before)
    name = only_run(tmp_path).name
    asks = [f"{callback}.RequestAt", f"--trainer.callbacks.number={signal.SIGTERM.value}"]
    again = [*steps, *asks, "--trainer.callbacks.step=7", "--ckpt_path=last"]
    assert run("fit", *flags, *again) == Exit.REQUEUE
    assert f"set DIST_RUN_ID={name}." in capfd.readouterr().err
    only_run(tmp_path)
