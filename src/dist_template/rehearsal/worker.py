"""Runs one command as one rank; `workers.py` starts it. Importing this module hides GPUs from the process."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import multiprocessing
import os
import sys
import threading
import time
import traceback
import warnings
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from typing import Any

# Before torch and DeepSpeed are imported: no GPU, one thread per rank, no compiled kernels.
os.environ.update(CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # as cli/main.py does
os.environ["TORCH_WARM_POOL"] = "0"  # no compiler processes: this process is forked

import lightning as L  # noqa: E402
import torch  # noqa: E402

from ..cli.fit import CLI  # noqa: E402
from ..cli.main import LIBRARY, VERBS  # noqa: E402
from ..cluster import signals  # noqa: E402
from ..cluster.messages import MESSAGES  # noqa: E402
from ..cluster.watchdog import WATCHDOG  # noqa: E402
from ..errors import InputError, first_line  # noqa: E402
from . import code_locations  # noqa: E402
from .job import Idle, Job  # noqa: E402
from .recorder import Recorder  # noqa: E402

# Modules that most trainings import lazily.
for _slow in (
    "deepspeed",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # imported by every engine; imports torch's compiler, two seconds
    "torch.distributed.fsdp",
    "torch.profiler",
    "torch.utils.tensorboard",
    "transformers.distributed",
    "transformers.generation.utils",
    "transformers.models.deepseek_v3.modeling_deepseek_v3",
    "transformers.models.llama.modeling_llama",
    "transformers.optimization",
):
    with warnings.catch_warnings(), contextlib.suppress(ImportError):  # deepspeed need not be installed
        warnings.simplefilter("ignore")
        importlib.import_module(_slow)


def serve(connection: Connection, job: Job) -> None:
    """Runs `job`; sends "done", "refused: …" (bad input) or its error; waits for the other ranks; exits."""
    os.environ.update(job.environment)
    # The platform's default, so that loader workers are children of this rank and exit with it.
    multiprocessing.set_start_method(None, force=True)
    rank = int(os.environ["RANK"])
    with (job.record / f"rank{rank}.log").open("a", encoding="utf-8", buffering=1) as log:
        os.dup2(log.fileno(), 1)  # for the output of C++ libraries
        os.dup2(log.fileno(), 2)
        sys.stdout = sys.stderr = log
        signals.listen()
        threading.Thread(target=_end_with_parent, daemon=True).start()
        faulthandler.enable(log, all_threads=False)  # logs the Python stack of a crash in C
        if job.timeout_s is not None:
            _dump_stacks_after(max(1.0, job.timeout_s - 3), log)
        if job.idle_s:
            WATCHDOG.beat()
            threading.Thread(target=_report_idleness, args=(connection, job.idle_s, log), daemon=True).start()
        answer = _attempt(job, rank)
        connection.send(answer)
        if answer == "done":  # after an error, the other ranks notice the closed sockets
            with contextlib.suppress(EOFError, OSError):
                connection.recv()  # rank 0 hosts the store that the others still need
    os._exit(0)  # exit handlers of libraries could wait for ranks that have exited


def _dump_stacks_after(seconds: float, log: Any) -> None:
    timer = threading.Timer(seconds, faulthandler.dump_traceback, (log,))  # the watchdog uses faulthandler's own timer
    timer.daemon = True
    timer.start()


def _report_idleness(connection: Connection, idle_s: float, log: Any) -> None:
    """Sends the status of the main thread when it makes no progress; the parent then ends all ranks."""
    while WATCHDOG.idle_s < idle_s:
        time.sleep(idle_s / 100)
    main_thread = sys._current_frames().get(threading.main_thread().ident or 0)
    word, own = WATCHDOG.status(), code_locations.of_stack(reversed([*traceback.walk_stack(main_thread)]))
    if own and own.rpartition(":")[0].rpartition("/")[2] not in word["line"]:
        word["line"] += f", called from {own}"
    faulthandler.dump_traceback(log, all_threads=True)
    connection.send(Idle(word))


def _attempt(job: Job, rank: int) -> str:
    try:
        torch.set_num_threads(1)
        job.project.start()
        if job.prelude:
            job.prelude()
        if job.argv[0] in ("fit", "validate", "test", "predict"):
            _RecordedCLI(job, rank)
        else:
            importlib.import_module(f"{LIBRARY}.{VERBS[job.argv[0]][0]}").main(job.argv, job.project)
        return "done"
    except SystemExit as stop:  # the parser has printed the reason
        return "done" if stop.code in (0, None) else f"refused: {_last_line(job, rank)}"
    except BaseException as error:
        traceback.print_exc()
        kind = "refused" if isinstance(error, InputError) else type(error).__name__
        line = code_locations.of_stack(traceback.walk_tb(error.__traceback__))
        where = [f"({line})"] if line and kind != "refused" else []
        return " ".join([f"{kind}: {first_line(error)}", *where, *getattr(error, "__notes__", [])])
    finally:
        WATCHDOG.stop()
        MESSAGES.flush()


def _last_line(job: Job, rank: int) -> str:
    lines = (job.record / f"rank{rank}.log").read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line for line in reversed(lines) if line.strip()), "it printed nothing")


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


class _RecordedCLI(CLI):
    """The command line, with the recorder and the job's callbacks after all other callbacks."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank = job, rank
        super().__init__(job.project, job.argv, run=True)

    def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
        trainer = super().instantiate_trainer(**kwargs)
        recorder = Recorder(self.job.record, self.rank, self.run)
        trainer.callbacks += [recorder, *self.job.callbacks]  # ty: ignore[missing-attribute]
        return trainer
