"""Start-up time: until help, until a configuration error, until training begins.

Each is a process of its own; CPU and wall time from its start. `imports` is a Python that imports
torch, lightning and the model's class, and ends. `fit` imports them too, and ends where the module
is given the first batch: token cache, process group, model and optimizer are ready. `misspelt` is a
key that does not exist.

Targets: help takes at most 0.3 s of CPU; a configuration error is reported within 1 s; training
begins at most 1 s of CPU after the imports. Figures are shares of these, because an absolute time
depends on the machine.
"""

import os
import resource
import subprocess
import sys
import tempfile
from functools import partial
from typing import Any

from lightning.pytorch import Callback

from . import ROOT
from .arms import Arm, Clock, Comparison, Sample, compare
from .record import Figure, Options, Result

NAME = "startup"
HELP_S, MISTAKE_S, ABOVE_IMPORTS_S = 0.3, 1.0, 1.0  # targets
CONFIG = ["--config", "configs/quickstart.yaml", "--trainer.devices=1", "--run.report=false"]
# a whole validation comes before the first step
CONFIG += ["--data.validation_share=0", "--data.test_share=0"]
IMPORTS = "import os, torch, lightning; from transformers import DeepseekV3ForCausalLM; os._exit(0)"


class Ends(Callback):
    def on_train_batch_start(self, *_: Any) -> None:
        os._exit(0)


def run(options: Options) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        flags = [*CONFIG, f"--data.cache_dir={folder}/cache", f"--run.root={folder}/runs"]
        if options.quick:
            flags += [
                "--data.source=TextFiles",
                f"--data.source.paths=[{ROOT}/docs/*.md]",
                "--data.tokenizer=Bytes",
            ]
        _take("-m", "trainer_dev", "prepare", *flags)
        fit = ["-m", "trainer_dev", "fit", *flags]
        arms: dict[str, Arm] = {
            "imports": partial(_take, "-c", IMPORTS),
            "help": partial(_take, "-m", "trainer_dev", "--help"),
            "misspelt": partial(_take, *fit, "--model.optim.learning_rats=3", code=2),
            "fit": partial(_take, *fit, "--trainer.callbacks+=benchmarks.startup.Ends"),
        }
        comparison = compare(
            Comparison("Start", "process", "imports"), arms, options.rounds, warm=not options.quick
        )
    samples, added = (
        comparison.samples,
        [seconds / ABOVE_IMPORTS_S for seconds in comparison.cpu_added("fit")],
    )
    figures = [
        Figure("help: CPU time over 0.3 s", [s.cpu_s / HELP_S for s in samples["help"]], at_most=1),
        Figure(
            "a misspelt key: wall time over 1 s",
            [s.wall_s / MISTAKE_S for s in samples["misspelt"]],
            at_most=1,
        ),
        Figure("until the first step: CPU time above the imports, over 1 s", added, at_most=1),
    ]
    return Result(NAME, [comparison], figures)


def _take(*argv: str, code: int = 0) -> Sample:
    """Returns CPU seconds of a Python and of the processes that it started, and its wall
    seconds."""
    clock, before = Clock(), resource.getrusage(resource.RUSAGE_CHILDREN)
    clock.start()
    done = subprocess.run(
        [sys.executable, *argv], cwd=ROOT / "build" / "dev", capture_output=True, text=True
    )
    wall = clock.stop().wall_s
    if done.returncode != code:
        raise RuntimeError(f"{argv} ended with {done.returncode}, not {code}:\n{done.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Sample(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall)
