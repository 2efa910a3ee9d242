"""Start-up time: until help, until a configuration error, until training begins.

Each is a process of its own; CPU and wall time from its start. `imports` is a Python that imports torch, lightning and
the model's class, and ends. `fit` imports them too, and ends where the module is given the first batch: token
cache, process group, model and optimizer are ready. `misspelt` is a key that does not exist; `misspelt, by the parser`
is the same without the look at the keys that the command takes before it imports torch.

Targets: help takes at most 0.3 s of CPU and imports no torch; a configuration error is reported within 1 s;
training begins at most 1 s of CPU after the imports. Figures are shares of these, because an absolute time depends on
the machine.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial

from . import ROOT
from .arms import Clock, Comparison, Sample, compare
from .record import Figure, Options, Result

NAME = "startup"
HELP_S, MISTAKE_S, ABOVE_IMPORTS_S = 0.3, 1.0, 1.0  # targets
CONFIG = ["--config", "configs/quickstart.yaml", "--trainer.devices=1", "--run.report=false"]
CONFIG += ["--data.validation_share=0", "--data.test_share=0"]  # a whole validation comes before the first step
HEAVY = ("torch", "lightning", "transformers", "jsonargparse", "numpy")
MISTAKE = ["--model.optim.learning_rats=3"]
IMPORTS = "import os, torch, lightning; from transformers import DeepseekV3ForCausalLM; os._exit(0)"
FIT = """
import os, sys
import dist_template.cli.fit as cli
from lightning.pytorch import Callback
from tests.support.line import OURS

class Ends(Callback):
    def on_train_batch_start(self, *_):
        os._exit(0)

class CLI(cli.CLI):
    def instantiate_trainer(self, **kwargs):
        trainer = super().instantiate_trainer(**kwargs)
        trainer.callbacks.append(Ends())
        return trainer

CLI(OURS, ["fit", *sys.argv[1:]], run=True)
"""
LOADED = "import json, sys; from tests.support.line import main; main({}); print(json.dumps(sorted(sys.modules)))"


def run(options: Options) -> Result:
    result = Result(NAME)
    with tempfile.TemporaryDirectory() as folder:
        flags = [*CONFIG, f"--data.cache_dir={folder}/cache", f"--run.root={folder}/runs"]
        if options.quick:
            flags += [
                "--data.source=TextFiles",
                f"--data.source.paths=[{ROOT}/benchmarks/*.py]",
                "--data.tokenizer=Bytes",
            ]
        _take([sys.executable, "-m", "trainer_dev", "prepare", *flags])
        python = [sys.executable, "-c"]
        arms: dict[str, Callable[[], Sample]] = {
            "imports": partial(_take, [*python, IMPORTS]),
            "help": partial(_take, [sys.executable, "-m", "trainer_dev", "--help"]),
            "misspelt": partial(_take, [sys.executable, "-m", "trainer_dev", "fit", *flags, *MISTAKE], code=2),
            "misspelt, by the parser": partial(_take, [*python, FIT, *flags, *MISTAKE], code=2),
            "fit": partial(_take, [*python, FIT, *flags]),
        }
        comparison = compare(Comparison("Start", "process", "imports"), arms, options.rounds, warm=not options.quick)
    result.comparisons = [comparison]
    samples = comparison.samples
    added = [seconds / ABOVE_IMPORTS_S for seconds in comparison.cpu_added("fit")]
    result.figures = [
        Figure("help: CPU time over 0.3 s", [s.cpu_s / HELP_S for s in samples["help"]], at_most=1),
        Figure(f"help: modules of {', '.join(HEAVY)}", [_loaded(["--help"])], at_most=0),
        Figure("a misspelt key: wall time over 1 s", [s.wall_s / MISTAKE_S for s in samples["misspelt"]], at_most=1),
        Figure("until the first step: CPU time above the imports, over 1 s", added, at_most=1),
    ]  # fmt: skip
    return result


def _take(command: list[str], code: int = 0) -> Sample:
    """CPU seconds of a process and of those that it started, and its wall seconds."""
    clock, before = Clock(), resource.getrusage(resource.RUSAGE_CHILDREN)
    clock.start()
    done = subprocess.run(command, cwd=ROOT / "build" / "dev", capture_output=True, text=True, check=False)
    wall = clock.stop().wall_s
    if done.returncode != code:
        raise RuntimeError(f"{command} ended with {done.returncode}, not {code}:\n{done.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Sample(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall)


def _loaded(argv: list[str]) -> float:
    """How many modules of the heavy packages a command imports."""
    command = [sys.executable, "-c", LOADED.format(argv)]
    done = subprocess.run(command, cwd=ROOT / "build" / "dev", capture_output=True, text=True, check=True)
    modules = json.loads(done.stdout.splitlines()[-1])
    return sum(name.partition(".")[0] in HEAVY for name in modules)
