"""Runs one command as one rank. Importing this module hides GPUs from the process, or gives it fake
ones.

The order of the imports matters: environment variables first, then the fake GPUs, then Lightning
and DeepSpeed, which ask for GPUs when they are imported. workers.py forks each rank from a process
that has done so, and calls `serve` in it."""

import contextlib
import faulthandler
import gc
import importlib
import multiprocessing
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from pathlib import Path

from .gpu import VARIABLE

# Before torch and DeepSpeed are imported: no GPU, one thread per rank, no compiled kernels.
ON_DEVICES = VARIABLE in os.environ
if ON_DEVICES:
    os.environ.pop("DS_ACCELERATOR", None)
else:
    os.environ.update(CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu")
os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # as cli/main.py does
os.environ["TORCH_WARM_POOL"] = "0"  # no compiler processes: this process is forked

import fake_cuda  # noqa: E402

from .gpu.events import EVENTS  # noqa: E402

if ON_DEVICES:  # before Lightning and DeepSpeed ask for GPUs, when they are imported
    fake_cuda.install(kernels=False, record=EVENTS.record)

import lightning as L  # noqa: E402
import torch  # noqa: E402
from lightning.pytorch import Callback  # noqa: E402

from ...cli.defaults import always_on  # noqa: E402
from ...cli.fit import CLI  # noqa: E402
from ...cluster.signals import listen  # noqa: E402
from ...cluster.watchdog import WATCHDOG  # noqa: E402
from ...errors import InputError, first_line  # noqa: E402
from ...plugins import registered  # noqa: E402
from ...project import Project, is_users  # noqa: E402
from ..values import short  # noqa: E402
from .record import TRAINING_VERBS, RunRecord  # noqa: E402
from .recorder import Recorder  # noqa: E402

if ON_DEVICES:
    from .gpu.observer import Observer

# Modules that most trainings import lazily. Muon imports torch's compiler: two seconds.
SLOW = """deepspeed deepspeed.runtime.zero.muon.muon_optimizer torch.distributed.fsdp torch.profiler
    torch.utils.tensorboard transformers.distributed transformers.generation.utils
    transformers.optimization
    transformers.models.deepseek_v3.modeling_deepseek_v3 transformers.models.llama.modeling_llama
    dist_template.text.datamodule dist_template.text.module"""
for _slow in (*SLOW.split(), *(callback.module for callback in always_on().values())):
    with warnings.catch_warnings(), contextlib.suppress(ImportError):  # deepspeed is an extra
        warnings.simplefilter("ignore")
        importlib.import_module(_slow)
gc.freeze()  # a forked rank's collections do not visit, and so copy, what all ranks share


def serve(
    connection: Connection,
    argv: list[str],
    project: Project,
    record: Path,
    environment: dict[str, str],
    callbacks: Sequence[Callback],
    prelude: Callable[[], None] | None,
) -> None:
    """Runs a command, sends how it ended ("done", "refused: …" for bad input, or an error), and
    exits."""
    os.environ.update(environment)
    # The platform's default, so that loader workers are children of this rank and exit with it.
    multiprocessing.set_start_method(None, force=True)
    rank = int(environment["RANK"])
    if ON_DEVICES:
        gpus = int(environment["LOCAL_WORLD_SIZE"])
        fake_cuda.install(gpus, kernels=False, record=EVENTS.record)
    with (record / f"rank{rank}.log").open("a", encoding="utf-8", buffering=1) as log:
        os.dup2(log.fileno(), 1)  # for the output of C++ libraries
        os.dup2(log.fileno(), 2)
        sys.stdout = sys.stderr = log
        listen()
        threading.Thread(target=_exit_with_parent, daemon=True).start()
        faulthandler.enable(log, all_threads=False)  # logs the Python stack of a crash in C
        try:
            torch.set_num_threads(1)
            project.start()
            if prelude:
                prelude()
            if argv[0] in TRAINING_VERBS:
                _RecordedCLI(project, argv, record, rank, callbacks)
            else:
                registered("dist_template.verbs")[argv[0]].load().main(argv, project)
            WATCHDOG.finish()
            answer = "done"
        except BaseException as error:
            answer = _describe(error, record, rank)
        WATCHDOG.stop()
        connection.send(answer)
        if answer == "done":  # after an error, the other ranks notice the closed sockets
            with contextlib.suppress(EOFError, OSError):
                # until all ranks are killed: rank 0 hosts the store that the others still need
                connection.recv()
    os._exit(0)  # exit handlers of libraries could wait for ranks that have exited


def _exit_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _describe(error: BaseException, record: Path, rank: int) -> str:
    if isinstance(error, SystemExit):
        if not error.code:
            return "done"
        reason = RunRecord(record, {}).last_line(rank)  # the parser has printed it
        return f"refused: {reason}"
    traceback.print_exception(error)
    if isinstance(error, InputError):
        return f"refused: {first_line(error)}"
    where = ""  # the user's innermost line
    for frame in traceback.extract_tb(error.__traceback__):
        if is_users(frame.filename):
            where = f" ({short(frame.filename)}:{frame.lineno})"
    notes = " ".join(["", *getattr(error, "__notes__", ())])
    return f"{type(error).__name__}: {first_line(error)}{where}{notes}"


class _RecordedCLI(CLI):
    """The command line, with the recorder and the given callbacks as the last callbacks."""

    def __init__(
        self,
        project: Project,
        argv: list[str],
        record: Path,
        rank: int,
        callbacks: Sequence[Callback],
    ) -> None:
        self.record, self.rank, self.callbacks = record, rank, callbacks
        super().__init__(project, argv, run=True)

    def instantiate_trainer(self, **kwargs: object) -> L.Trainer:
        trainer = super().instantiate_trainer(**kwargs)
        kind = Observer if ON_DEVICES else Recorder
        recorder = kind(self.record, self.rank, self.run)
        trainer.callbacks += [recorder, *self.callbacks]  # ty: ignore[missing-attribute]
        return trainer
