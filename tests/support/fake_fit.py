"""A verb of the linked project on the fake device: `python -m tests.support.fake_cuda.fit VERB …`.

FAKE_GPUS: number of devices. FAKE_REPORT: file of the counts, of rank N with `.N` at the end.
FAKE_PRELUDE: module:function to call first. FAKE_NCCL: 1 for several ranks."""

import gc
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.fake_cuda import torch_cuda  # noqa: F401, I001  (first)

if os.environ.get("FAKE_NCCL"):
    from tests.support.fake_cuda import backend  # noqa: F401

from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop

from dist_template.callbacks.samples import Samples
from dist_template.callbacks.training_log import logs
from dist_template.checkpoint import commit
from dist_template.checkpoint.commit import BackgroundSaver
from dist_template.compat.loop import EpochLoop
from tests.support.fake_cuda.counts import COUNTS
from tests.support.fake_cuda.streams import Event
from tests.support.line import command

WARM_UP = 3  # steps: buckets, traces and buffers are made


def phase_of_step(loop: Any) -> str:
    """The kind of micro-batch, the last of a log step apart."""
    trainer = loop.trainer
    if trainer.global_step < WARM_UP:
        return "warm-up"
    is_last = (loop.batch_idx + 2) % trainer.accumulate_grad_batches == 0
    return "log" if is_last and logs(trainer, trainer.global_step + 1) else "plain"


def _mark(owner: Any, name: str, phase: Callable[[Any], str]) -> None:
    original = getattr(owner, name)

    def marked(self: Any, *args: Any, **options: Any) -> Any:
        before, COUNTS.phase = COUNTS.phase, phase(self)
        try:
            return original(self, *args, **options)
        finally:
            COUNTS.phase = before

    setattr(owner, name, marked)


def main() -> int:
    _mark(EpochLoop, "advance", phase_of_step)
    _mark(commit, "save", lambda _: "checkpoint")
    _mark(BackgroundSaver, "start", lambda _: "checkpoint")
    _mark(_EvaluationLoop, "run", lambda _: "validation")
    _mark(Samples, "on_validation_end", lambda _: "sample")
    if prelude := os.environ.get("FAKE_PRELUDE"):
        module, _, name = prelude.partition(":")
        getattr(importlib.import_module(module), name)()
    try:
        return command(sys.argv[1:])
    finally:
        gc.collect()  # events that nothing refers to
        rank = os.environ.get("LOCAL_RANK", "0")
        COUNTS.write(Path(f"{os.environ['FAKE_REPORT']}.{rank}"), Event.alive)


if __name__ == "__main__":
    sys.exit(main())
