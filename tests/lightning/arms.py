"""Trains one habit by plain Lightning or by the command line, on N processes, and reads what each
rank saw.

Plain Lightning is the oracle: an uninterrupted training of it has the rates, rows, metrics, hooks
and weights that this library's must have, uninterrupted, and killed and resumed."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from pydoc import locate
from typing import Any

import lightning as L
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from lightning.pytorch.trainer.connectors import data_connector
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from dist_template.project import Project
from dist_template.wings.rehearse.interventions import KillAt
from dist_template.wings.rehearse.record import RunRecord
from tests.support.runs import Workers
from tests.support.strategies import flags_of

PACKAGE = "tests.lightning"
RANKS = {"one": 1, "ddp": 2, "fsdp2": 2, "zero2": 2, "ddp3": 3}  # of each way to train
HOOKS = """on_fit_start on_train_start on_train_epoch_start on_train_epoch_end on_train_end
    on_validation_epoch_start on_validation_epoch_end on_fit_end on_before_zero_grad
    on_train_batch_start on_train_batch_end""".split()


@dataclass(frozen=True)
class Habit:
    """A way in which people write a module and its data.

    Attributes:
        module: The class of the LightningModule in habits.py.
        data: The class of its LightningDataModule there.
        trainer: Arguments of the Trainer, for both arms.
        callbacks: Callbacks of the Trainer, for both arms, as a configuration has them: mappings of
            `class_path` and `init_args`; "{out}" in a text is a folder of the training.
        flags: Flags that only the command line has.
        refused: Way to train, "several" for all ways of two ranks, or "all": a part of the sentence
            with which the command line refuses the habit there.
        why: The reason of a difference that is on purpose, with the upstream report if it has one.
        differs: The ways to train that `why` is about; (): all.
        tolerance: By how much weights and metrics may differ, where the last bit of a sum that is
            added in another order is amplified, or a low precision rounds it.
        oracle: Lightning's strategy of plain training on two ranks; "one": it trains on one
            process, with the batches of both.
        without: Metrics that are compared with nothing: each rank has its own.
        impossible: A part of the error with which plain Lightning refuses the habit on several
            ranks, where the command line's training is compared with itself.
        rows_differ: The habit draws its rows at random: their order is compared with nothing."""

    module: str = "Regression"
    data: str = "Rows"
    trainer: dict[str, Any] = field(default_factory=dict)
    callbacks: tuple[dict[str, Any], ...] = ()
    flags: tuple[str, ...] = ()
    refused: dict[str, str] = field(default_factory=dict)
    why: str = ""
    differs: tuple[str, ...] = ()
    tolerance: float = 0.0
    oracle: str = "ddp"
    without: tuple[str, ...] = ()
    impossible: str = ""
    rows_differ: bool = False

    def ranks_of_oracle(self, way: str) -> int:
        """Returns the number of processes of plain Lightning's training."""
        return 1 if self.oracle == "one" else RANKS[way]

    def refusal(self, way: str) -> str:
        """Returns a part of the sentence that refuses the habit; "" where it trains."""
        of_several = self.refused.get("several", "") if RANKS[way] > 1 else ""
        return self.refused.get(way) or of_several or self.refused.get("all", "")

    def is_different(self, way: str) -> bool:
        """Returns whether the training differs from plain Lightning's on purpose."""
        return bool(self.why) and (not self.differs or way in self.differs)

    def callbacks_in(self, folder: Path) -> list[dict[str, Any]]:
        """Returns the callbacks with a folder in place of "{out}"."""
        return _placed(self.callbacks, folder)

    def trainer_in(self, folder: Path) -> dict[str, Any]:
        """Returns the Trainer's arguments, likewise; loggers are as a configuration has them."""
        return _placed(self.trainer, folder)


def _placed(given: Any, folder: Path) -> Any:
    return json.loads(json.dumps(given).replace("{out}", str(folder / "out")))


class Trace(Callback):
    """Records, on each rank, what a training did; writes it when training ends or is killed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        self.rates: list[list[float]] = []
        self.rows: list[list[int]] = []
        self.hooks: list[str] = []
        self.metrics: dict[str, float] = {}
        for name in HOOKS:
            if is_overridden(name, pl_module, L.LightningModule):
                setattr(pl_module, name, self._counted(name, getattr(pl_module, name)))

    def _counted(self, name: str, hook: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            self.hooks.append(name)
            return hook(*args, **kwargs)

        return called

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        groups = [group for one in trainer.optimizers for group in one.param_groups]
        self.rates.append([number for group in groups for number in numbers_of(group)])
        self.rows.append(rows_of(batch))

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        logged = trainer.callback_metrics.items()
        self.metrics = {name: float(value) for name, value in logged}
        weights = {name: full(value) for name, value in pl_module.state_dict().items()}
        torch.save(
            {
                "rates": self.rates,
                "rows": self.rows,
                "hooks": getattr(pl_module, "hook_calls", self.hooks),
                "metrics": self.metrics,
                "weights": weights,
                "epoch": trainer.current_epoch,
                "step": trainer.global_step,
            },
            self.folder / f"trace{trainer.global_rank}.pt",
        )

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Adds what other callbacks did at the end of training."""
        path = self.folder / f"trace{trainer.global_rank}.pt"
        seen = torch.load(path, weights_only=False)
        seen["weights"] = {name: full(value) for name, value in pl_module.state_dict().items()}
        seen["callbacks"] = {
            callback.state_key: callback.state_dict()
            for callback in trainer.callbacks
            if not type(callback).__module__.startswith("dist_template.")
        }
        torch.save(seen, path)


def numbers_of(group: dict[str, Any]) -> list[float]:
    """Returns what a schedule may change of a group: its rate, and its momentum or betas."""
    return [
        float(group["lr"]),
        float(group.get("momentum", 0.0)),
        *map(float, group.get("betas", ())),
        float(group.get("weight_decay", 0.0)),
    ]


def full(value: Any) -> Any:
    gathered = value.full_tensor() if hasattr(value, "full_tensor") else value
    return gathered.detach().clone() if isinstance(gathered, Tensor) else gathered


def rows_of(batch: Any) -> list[int]:
    """Returns the numbers of the rows in a batch of any nesting."""
    if isinstance(batch, dict):
        if "row" in batch:
            return batch["row"].flatten().tolist()
        return [row for each in batch.values() for row in rows_of(each)]
    if isinstance(batch, list | tuple):
        return [row for each in batch for row in rows_of(each)]
    return []


@dataclass(frozen=True)
class Trained:
    """What a training did, by rank."""

    traces: list[dict[str, Any]]
    files: list[str] = field(default_factory=list)  # that its callbacks wrote

    @property
    def weights(self) -> dict[str, Tensor]:
        return self.traces[0]["weights"]

    def __getattr__(self, name: str) -> Any:
        """`rates`, `rows`, `hooks`, `metrics` of every rank."""
        return [trace[name] for trace in self.traces]


def _keep_the_order() -> None:
    """On several ranks Lightning shuffles training rows whatever the loader says; this library
    leaves them in the loader's order, and so does the oracle."""
    create = data_connector._get_distributed_sampler

    def in_order(dataloader: Any, shuffle: bool, **options: Any) -> Any:
        return create(dataloader, shuffle=False, **options)

    connector: Any = data_connector
    connector._get_distributed_sampler = in_order


class PlainTraining:
    """Trains a habit by Lightning alone, in place of the command that the rank would run."""

    def __init__(self, habit: Habit, way: str, folder: Path) -> None:
        self.habit, self.way, self.folder = habit, way, folder

    def __call__(self) -> None:
        from tests.lightning import habits

        _keep_the_order()
        L.seed_everything(0)
        ranks = self.habit.ranks_of_oracle(self.way)
        callbacks = [created(each) for each in self.habit.callbacks_in(self.folder)]
        defaults = {
            "accelerator": "cpu",
            "devices": ranks,
            "strategy": "auto" if ranks == 1 else self.habit.oracle,
            "enable_progress_bar": any(isinstance(each, ProgressBar) for each in callbacks),
            "enable_model_summary": False,
            "logger": False,
            "default_root_dir": self.folder,
            "enable_checkpointing": any(isinstance(each, Checkpoint) for each in callbacks),
        }
        options: Any = defaults | self.habit.trainer_in(self.folder)
        if isinstance(options["logger"], list):
            options["logger"] = [created(each) for each in options["logger"]]
        trainer = L.Trainer(callbacks=[*callbacks, Trace(self.folder)], **options)
        module = getattr(habits, self.habit.module)()
        data = getattr(habits, self.habit.data)(batch_size=2 * RANKS[self.way] // ranks)
        trainer.fit(module, datamodule=data)
        raise SystemExit(0)  # the command does not run


def created(given: dict[str, Any]) -> Any:
    """Returns the object that a configuration describes."""
    kind: Any = locate(given["class_path"])
    arguments = dict(given.get("init_args", {}))
    if arguments.get("train_time_interval"):
        arguments["train_time_interval"] = timedelta()
    for name in ("batch_size_fn", "on_train_epoch_start"):
        if name in arguments:
            arguments[name] = locate(arguments[name])
    return kind(**arguments)


def plain(habit: Habit, way: str, folder: Path) -> Trained:
    """Trains by plain Lightning: on one process, or under DDP."""
    plain_record(habit, way, folder).check()
    return Trained(read(folder), written(folder))


def plain_record(habit: Habit, way: str, folder: Path) -> RunRecord:
    project = Project(PACKAGE, f".habits:{habit.module}", f".habits:{habit.data}")
    workers = Workers(habit.ranks_of_oracle(way), project)
    return workers.run(["fit"], folder, prelude=PlainTraining(habit, way, folder))


def ours(
    habit: Habit, way: str, folder: Path, *, kill_at: int = 0, resumes: bool = False
) -> RunRecord:
    """Trains by the command line; ends without a word at optimizer step `kill_at`.

    A training that is to be killed saves after each step."""
    project = Project(PACKAGE, f".habits:{habit.module}", f".habits:{habit.data}")
    ranks = RANKS[way]
    argv = ["fit", f"--run.root={folder / 'runs'}", "--run.name=run", "--run.report=false"]
    argv += ["--trainer.accelerator=cpu", f"--trainer.devices={ranks}"]
    argv.append(f"--trainer.default_root_dir={folder}")  # of `logger: true`, and checkpoints
    argv.append("--same_environment.ignore=[git_diff]")  # seen.json changes while the table is made
    argv.append(f"--last_checkpoint.every_n_steps={1 if kill_at else 12 // ranks}")
    argv += flags_of(way.rstrip("3")) if way != "one" else []
    if habit.callbacks:
        argv.append(f"--trainer.callbacks={json.dumps(habit.callbacks_in(folder))}")
    for key, value in habit.trainer_in(folder).items():
        argv.append(f"--trainer.{key}={value if isinstance(value, str) else json.dumps(value)}")
    argv += habit.flags
    if resumes:
        argv.append("--ckpt_path=last")
    name = f"killed{kill_at}" if kill_at else "resumed" if resumes else "whole"
    out = folder / name
    out.mkdir(parents=True, exist_ok=True)
    callbacks: list[Callback] = [Trace(out), *([KillAt(kill_at)] if kill_at else [])]
    return Workers(ranks, project).run(argv, out, callbacks=callbacks, run_id="run")


def written(folder: Path) -> list[str]:
    """Returns the files, and the folders that are checkpoints, which callbacks wrote."""
    out = folder / "out"
    found = [path for path in out.rglob("*") if path.suffix == ".ckpt" or path.is_file()]
    names = [str(path.relative_to(out)) for path in found]
    return sorted(name for name in names if ".ckpt/" not in name)


def read(folder: Path) -> list[dict[str, Any]]:
    return [torch.load(path, weights_only=False) for path in sorted(folder.glob("trace*.pt"))]
