"""Runs one command as one rank. Importing this module hides GPUs from the process."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import multiprocessing
import os
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TextIO

# Before torch and DeepSpeed are imported: no GPU, one thread per rank, no compiled kernels.
os.environ.update(CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu")
os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # as cli/main.py does
os.environ["TORCH_WARM_POOL"] = "0"  # no compiler processes: this process is forked

import lightning as L  # noqa: E402
import torch  # noqa: E402

from ...cli.defaults import always_on  # noqa: E402
from ...cli.fit import CLI  # noqa: E402
from ...cli.verbs import verbs  # noqa: E402
from ...cluster.messages import MESSAGES  # noqa: E402
from ...cluster.signals import listen  # noqa: E402
from ...cluster.watchdog import WATCHDOG  # noqa: E402
from ...errors import InputError, first_line  # noqa: E402
from . import code_locations  # noqa: E402
from .record import Job, RunRecord  # noqa: E402
from .recorder import Recorder  # noqa: E402

# Modules that most trainings import lazily.
for _slow in (
    "deepspeed",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # imports torch's compiler: two seconds
    "torch.distributed.fsdp",
    "torch.profiler",
    "torch.utils.tensorboard",
    "transformers.distributed",
    "transformers.generation.utils",
    "transformers.models.deepseek_v3.modeling_deepseek_v3",
    "transformers.models.llama.modeling_llama",
    "transformers.optimization",
    "dist_template.text.datamodule",
    "dist_template.text.module",
    *(callback.module for callback in always_on().values()),
):
    with warnings.catch_warnings(), contextlib.suppress(ImportError):  # deepspeed is an extra
        warnings.simplefilter("ignore")
        importlib.import_module(_slow)
gc.freeze()  # a forked rank's collections do not visit, and so copy, what all ranks share


def serve(connection: Connection, job: Job) -> None:
    """Runs `job`, sends how it ended, waits for the other ranks, and exits.

    It sends "done", "refused: …" (bad input) or an error; before that, if the main thread makes no
    progress, its status (a dictionary for `cluster/hang.py`).
    """
    os.environ.update(job.environment)
    # The platform's default, so that loader workers are children of this rank and exit with it.
    multiprocessing.set_start_method(None, force=True)
    rank = int(os.environ["RANK"])
    with (job.record / f"rank{rank}.log").open("a", encoding="utf-8", buffering=1) as log:
        os.dup2(log.fileno(), 1)  # for the output of C++ libraries
        os.dup2(log.fileno(), 2)
        sys.stdout = sys.stderr = log
        listen()
        _in_background(_exit_with_parent)
        faulthandler.enable(log, all_threads=False)  # logs the Python stack of a crash in C
        if job.timeout_s is not None:  # the watchdog uses faulthandler's own timer
            timer = threading.Timer(job.timeout_s - 3, faulthandler.dump_traceback, [log])
            timer.daemon = True
            timer.start()
        if job.idle_s:
            WATCHDOG.beat()
            _in_background(_report_idleness, connection, job.idle_s, log)
        answer = _attempt(job, rank)
        connection.send(answer)
        if answer == "done":  # after an error, the other ranks notice the closed sockets
            with contextlib.suppress(EOFError, OSError):
                connection.recv()  # rank 0 hosts the store that the others still need
    os._exit(0)  # exit handlers of libraries could wait for ranks that have exited


def _in_background(function: Callable[..., None], *args: object) -> None:
    threading.Thread(target=function, args=args, daemon=True).start()


def _exit_with_parent() -> None:
    if (parent := parent_process()) is not None:
        parent.join()
        os._exit(1)


def _report_idleness(connection: Connection, idle_s: float, log: TextIO) -> None:
    """Sends the main thread's status when it makes no progress; the parent then ends all ranks."""
    while WATCHDOG.idle_s < idle_s:
        time.sleep(idle_s / 100)
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    status, users = WATCHDOG.status(), code_locations.of_caller(frame)
    if users and Path(users.rpartition(":")[0]).name not in status["line"]:
        status["line"] += f", called from {users}"
    faulthandler.dump_traceback(log)
    connection.send(status)


def _attempt(job: Job, rank: int) -> str:
    try:
        torch.set_num_threads(1)
        job.project.start()
        if job.prelude:
            job.prelude()
        if job.argv[0] in ("fit", "validate", "test", "predict"):
            _RecordedCLI(job, rank)
        else:
            verbs()[job.argv[0]].load()(job.argv, job.project)
        return "done"
    except SystemExit as stop:  # the parser has printed the reason
        refusal = f"refused: {RunRecord(job.record, {}).last_line(rank)}"
        return refusal if stop.code else "done"
    except BaseException as error:
        traceback.print_exc()
        if isinstance(error, InputError):
            return f"refused: {first_line(error)}"
        line = code_locations.of_stack(traceback.walk_tb(error.__traceback__))
        where = f" ({line})" if line else ""
        notes = " ".join(["", *getattr(error, "__notes__", ())])
        return f"{type(error).__name__}: {first_line(error)}{where}{notes}"
    finally:
        WATCHDOG.stop()
        MESSAGES.flush()


class _RecordedCLI(CLI):
    """The command line, with the recorder and the job's callbacks as the last callbacks."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank = job, rank
        super().__init__(job.project, job.argv, run=True)

    def instantiate_trainer(self, **kwargs: object) -> L.Trainer:
        trainer = super().instantiate_trainer(**kwargs)
        recorder = Recorder(self.job.record, self.rank, self.run)
        trainer.callbacks += [recorder, *self.job.callbacks]  # ty: ignore[missing-attribute]
        return trainer
