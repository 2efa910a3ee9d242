"""python -m benchmarks.walks: through how many files does a value go?

Each walk is one piece of work in a real training on CPU processes, traced call by call. Of the
library's own files it counts how many are entered, how many functions run, and how often somebody
who follows it changes the file (`stays`); `returns` are the stays in a file that was left before.

    micro-batch            an iteration of the training loop that accumulates
    last micro-batch       the one that ends with an optimizer step
    YAML to Trainer        from the command line to Trainer.fit
    optimizer and rate     configure_optimizers
    save                   a checkpoint of LastCheckpoint
    published weights      configure_model of a training that starts from files
    plan                   the verb

The counts follow from the code alone, so one run is enough; a worktree of an older commit, with
this file and its own .venv, has those to compare with. Frames of other libraries, of a module's
import and of the worker that records are not counted."""

import json
import os
import sys
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

LIBRARY = str(Path(import_module("dist_template").__file__ or "").parent)
RECORDERS = ("wings/rehearse/recorder.py", "wings/rehearse/same_draws.py")
ITERATION = 3  # of the training loop, from 0: what is made at the first use exists


class Walk:
    """Counts between `start` and `stop`."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.functions: set[Any] = set()
        self.stays, self._now, self._stack = 0, "", []
        self._importing = 0  # depth; what runs when a module is imported is no part of a walk

    def _enter(self, file: str) -> None:
        if file != self._now:
            self._now, self.stays = file, self.stays + 1

    def __call__(self, frame: Any, event: str, arg: object) -> None:
        if event not in ("call", "return") or not frame.f_code.co_filename.startswith(LIBRARY):
            return
        # The recorder of a rehearsal's worker, which also writes this file, is none either.
        name = frame.f_code.co_filename
        is_import = frame.f_code.co_name == "<module>" or name.endswith(RECORDERS)
        self._importing += is_import if event == "call" else -is_import
        if self._importing or is_import:
            return
        file = frame.f_code.co_filename.removeprefix(LIBRARY)
        if event == "call":
            self._stack.append(file)
            self.files.add(file)
            self.functions.add(frame.f_code)
            self._enter(file)
        elif self._stack:
            self._stack.pop()
            if self._stack:
                self._enter(self._stack[-1])

    def figures(self) -> dict[str, int]:
        return {
            "files": len(self.files),
            "functions": len(self.functions),
            "stays": self.stays,
            "returns": self.stays - len(self.files),
        }


def traced(owner: Any, name: str, walk: Walk, is_wanted: Callable[[int], bool]) -> None:
    """Lets each wanted call of `owner.name`, by its number, be counted in `walk`."""
    original, count = getattr(owner, name), [0]

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        number = count[0]
        count[0] += 1
        if not is_wanted(number):
            return original(*args, **kwargs)
        before = sys.getprofile()
        sys.setprofile(walk)
        try:
            return original(*args, **kwargs)
        finally:
            sys.setprofile(before)

    setattr(owner, name, call)


def of_micro_batch(number: int = ITERATION - 1) -> None:
    from dist_template.compat.loop import EpochLoop

    walk = Walk()
    traced(EpochLoop, "advance", walk, lambda now: now == number)
    _written(walk, "micro")


def of_step() -> None:
    of_micro_batch(ITERATION)


def _written(walk: Walk, name: str) -> None:
    """Writes the figures when the training ends; a worker may leave by os._exit."""
    from lightning.pytorch import Trainer

    fit = Trainer.fit

    @wraps(fit)  # Lightning's parser takes its name
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return fit(*args, **kwargs)
        finally:
            path = Path(os.environ["WALKS"]) / f"{name}.{os.environ.get('RANK', '0')}.json"
            path.write_text(json.dumps(walk.figures()))

    Trainer.fit = run  # ty: ignore[invalid-assignment]


def of_start() -> None:
    """From the command line to Trainer.fit, in this process."""
    from lightning.pytorch import Trainer

    walk, fit = Walk(), Trainer.fit

    @wraps(fit)
    def run(*args: Any, **kwargs: Any) -> Any:
        sys.setprofile(None)
        _dump(walk, "start")
        return fit(*args, **kwargs)

    Trainer.fit = run  # ty: ignore[invalid-assignment]
    sys.setprofile(walk)


def _dump(walk: Walk, name: str) -> None:
    path = Path(os.environ["WALKS"]) / f"{name}.{os.environ.get('RANK', '0')}.json"
    path.write_text(json.dumps(walk.figures()))


def of_rate() -> None:
    from dist_template.model.training_module import TrainingModule

    walk = Walk()
    traced(TrainingModule, "configure_optimizers", walk, lambda number: True)
    _written(walk, "rate")


def of_save() -> None:
    from dist_template.callbacks.checkpoint import LastCheckpoint

    walk = Walk()
    traced(LastCheckpoint, "_save", walk, lambda number: number == 0)
    _written(walk, "save")


def of_place() -> None:
    from dist_template.model.training_module import TrainingModule

    walk = Walk()
    traced(TrainingModule, "configure_model", walk, lambda number: number == 0)
    _written(walk, "place")


def main() -> None:
    from tests.support.parity import MODELS
    from tests.support.runs import Workers, run, small
    from tests.support.strategies import flags_of

    with TemporaryDirectory() as folder:
        here = Path(folder)
        os.environ["WALKS"] = folder
        (here / "corpus").mkdir()
        for number in range(60):
            (here / "corpus" / f"{number:02}.txt").write_text(
                f"document {number}: " + "the quick brown fox " * 30
            )
        flags = small(here / "corpus", here / "cache", here)
        flags += ["--trainer.max_steps=3", "--trainer.log_every_n_steps=100"]
        flags += ["--trainer.limit_val_batches=0", "--data.global_batch_size=8"]
        run("prepare", *flags)
        found = {}
        deep = [f"--model.architecture={MODELS['deepseek_v3']}"]

        def walk(title: str, ranks: int, prelude: Any, *more: str) -> None:
            for old in here.glob("*.json"):
                old.unlink()
            argv = ["fit", *flags, *more, f"--trainer.devices={ranks}"]
            Workers(ranks).run(argv, here / title.replace(" ", "-"), prelude=prelude).check()
            (file,) = sorted(here.glob(f"*.{ranks - 1}.json"))
            found[title] = json.loads(file.read_text())

        walk("micro-batch, one device", 1, of_micro_batch, *deep)
        walk("the step's last micro-batch, one device", 1, of_step, *deep)
        shards = [*deep, *flags_of("fsdp2"), "--data.micro_batch_size=1"]
        walk("micro-batch, fsdp2", 2, of_micro_batch, *shards)
        walk("the step's last micro-batch, fsdp2", 2, of_step, *shards)
        pipeline = [*deep, *flags_of("pp"), "--data.micro_batch_size=2"]
        walk("micro-batch, pp, queued, last stage", 2, of_micro_batch, *pipeline)
        walk("the step's last micro-batch, pp, last stage", 2, of_step, *pipeline)
        walk("YAML to Trainer", 1, of_start, *deep)
        walk("optimizer and rate", 1, of_rate, *deep)
        walk("save", 1, of_save, *deep)
        import yaml
        from transformers import AutoConfig, AutoModelForCausalLM

        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**yaml.safe_load(MODELS["llama"]), vocab_size=257)
        )
        model.save_pretrained(here / "model")
        published = [f"--model.pretrained={here / 'model'}"]
        walk("published weights, fsdp2", 2, of_place, *published, *flags_of("fsdp2"))
        plan = Walk()
        sys.setprofile(plan)
        run("plan", *flags, *deep, "--memory=1GiB")
        sys.setprofile(None)
        found["plan"] = plan.figures()
    for title, figures in found.items():
        print(f"| {title} | " + " | ".join(f"{each:,}" for each in figures.values()) + " |")
    print(json.dumps(found), file=sys.stderr)


if __name__ == "__main__":
    main()
