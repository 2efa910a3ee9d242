"""Functions for a project's tests: build its module, check its configurations, rehearse them. Public interface.

PROJECT = this_project(__file__)
module, data = build(PROJECT, "--config=configs/quickstart.yaml", "--data.seq_len=64")
loss = module.training_step(batches(data, 1)[0], 0)
"""

from __future__ import annotations

import os
from contextlib import redirect_stdout
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor

from .cli.fit import WithoutTrainer
from .cli.limits import Machine, violations
from .project import Project
from .wings.rehearse.checks import CHECKS, run_checks
from .wings.rehearse.command import make_small, rehearse_flags
from .wings.rehearse.runs import Runs

__all__ = ["batches", "build", "check_config", "first_steps", "rehearse", "this_project"]


def this_project(file: str) -> Project:
    """Returns the project of the nearest folder above `file` that has a package with a
    `__main__.py`; raises FileNotFoundError without one."""
    for folder in Path(file).absolute().parents:
        if packages := sorted(folder.glob("*/__main__.py")):
            return Project(packages[0].parent.name)
    raise FileNotFoundError(f"no folder above {file} has a package with a __main__.py")


def check_config(project: Project, *flags: str, gpus: int = 8) -> list[str]:
    """Returns a sentence for each thing in a configuration that cannot work on its machine: the configured devices and
    nodes; where it says auto, one node with `gpus`. Raises InputError or SystemExit if a file or value is wrong."""
    cli = WithoutTrainer.of(["fit", *flags], project)
    trainer = vars(cli.config_init.trainer)
    machine = Machine.described(trainer, default=gpus)
    return violations(machine, trainer, cli.model, cli.datamodule)


def build(project: Project, *flags: str) -> tuple[Any, Any]:
    """Returns the project's module with its network built on this CPU, in training mode, and its
    prepared data; raises InputError if the configuration or the data are wrong."""
    cli = WithoutTrainer.of(["fit", *flags], project)
    module, data = cli.model, cli.datamodule
    torch.manual_seed(0)
    trainer: Any = L.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    with redirect_stdout(StringIO()):
        getattr(data, "prepare", data.prepare_data)()
    trainer.training = True
    trainer.datamodule, data.trainer, module.trainer = data, trainer, trainer
    trainer.strategy.connect(module)
    data.setup("fit")
    module.configure_model()
    return module, data


def batches(data: Any, num: int, after: int = 0) -> list[dict[str, Tensor]]:
    """Returns `num` micro-batches of `build`'s data as `training_step` gets them, the first ones
    or, as after a resume, those that follow `after` global batches."""
    data.load_state_dict(data.state_dict() | {"consumed_samples": after * data.global_batch_size})
    for callback in data.trainer.callbacks:
        if hasattr(callback, "as_state"):  # the counter of samples
            callback.on_train_start(data.trainer, None)
    found: list[dict[str, Tensor]] = []
    for batch in islice(data.train_dataloader(), num):
        found.append(data.on_after_batch_transfer(data.on_before_batch_transfer(batch, 0), 0))
    return found


def first_steps(project: Project, *flags: str, folder: Path) -> dict[int, float]:
    """Trains six steps of a configuration made small, on one process; returns {step: loss}. Raises InputError if it
    cannot be read or made small, and RunFailed if training fails."""
    return _small(project, flags, folder).one.loss


def rehearse(project: Project, *flags: str, folder: Path, only: str = "") -> dict[str, str]:
    """Runs the checks of the verb `rehearse` with `only` in their name; returns those that failed,
    with the cause. Raises InputError if the configuration cannot be read or made small."""
    runs, failed = _small(project, flags, folder), {}
    for result in run_checks(runs, [check for check in CHECKS if only in check.name]):
        if result.verdict == "FAIL":
            failed[result.check] = f"{result.got}: {result.sentence}"
    return failed


def _small(project: Project, flags: tuple[str, ...], folder: Path) -> Runs:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    options, rest = rehearse_flags().parse_known_args(flags)
    _, _, runs = make_small(options, rest, folder, project)
    runs.prepare()
    return runs
