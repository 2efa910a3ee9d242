"""The trainings of a rehearsal. Each runs once, when a check first needs it.

    one            one process, with gradient accumulation
    big            one process, each global batch as one micro-batch
    strategy       the chosen strategy
    uninterrupted  the chosen strategy, with dropout if the model has any
    killed         the same, killed
    resumed        the same, resumed from the last checkpoint of killed
    fewer          the chosen strategy on half of the processes, from a checkpoint of `strategy`

Dropout is off except in uninterrupted, killed and resumed, because random masks differ between
ranks. Each training has a folder with its `config.yaml`, with which `fit` repeats it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from lightning.pytorch import Callback

from ...checkpoint.manifest import SavedCheckpoint
from ...parallel import sharding_of
from ...project import Project
from .first_step import FirstStep
from .interventions import KillAt, LeakageTest, RaggedLabels
from .record import RunRecord
from .shrink_config import Config, Small, checkpoint_step
from .workers import run_ranks


class RunFailed(Exception):
    """The training `name` did not end as expected; `is_known`: an earlier check reported it."""

    def __init__(self, name: str, record: RunRecord, is_known: bool = False) -> None:
        log = record.log_path(record.failed_rank)
        super().__init__(f"run {name!r}, {record.error}; see {log}")
        self.name = name
        self.refusal = record.refusal
        self.is_known = is_known


@dataclass(eq=False)
class Runs:
    """Runs trainings on demand and keeps their records."""

    small: Small
    folder: Path  # each training gets a folder in it
    project: Project
    prelude: Callable[[], None] | None = None  # called in each process before anything else
    known: dict[str, RunRecord] = field(default_factory=dict)  # trainings that have run
    hung: str = ""  # name of the training that hung
    failed: set[str] = field(default_factory=set)  # trainings that a check has reported

    def __post_init__(self) -> None:
        self.folder = self.folder.absolute()
        self.kept_step = checkpoint_step(self.small.steps)

    def prepare(self) -> None:
        """Tokenizes the text; raises RunFailed."""
        self._tool("prepare", f"--config={self._write('prepare', self.small.config)}")

    @property
    def one(self) -> RunRecord:
        return self._run("one", 1, self.small.variant(1, "auto"), LeakageTest(self.folder / "one"))

    @property
    def big(self) -> RunRecord:
        return self._run("big", 1, self.small.variant(1, "auto", is_big=True))

    @property
    def strategy(self) -> RunRecord:
        return self._run("strategy", self.small.processes, self.small.config)

    @property
    def uninterrupted(self) -> RunRecord:
        trained = self.strategy
        if self.small.dropouts or trained.tensors("dropout") or trained.draws:
            return self._run_with_dropout("uninterrupted")
        return trained

    @property
    def killed(self) -> RunRecord:
        before_next_checkpoint = 2 * self.kept_step - 1
        return self._run_with_dropout("killed", KillAt(before_next_checkpoint))

    @property
    def resumed(self) -> RunRecord:
        assert self.killed.was_killed
        return self._run_with_dropout("resumed", checkpoint="last")

    @property
    def fewer(self) -> RunRecord:
        saved = SavedCheckpoint.all_in(self.strategy.run / "checkpoints")
        checkpoint = next(each.path for each in saved if each.step == self.kept_step)
        spec = self.small.strategy
        half = sharding_of(spec).halved(self.small.processes)
        if isinstance(spec, dict):
            spec = spec | {"init_args": half.arguments}
        config = self.small.variant(half.processes, spec, half.data_parallel)
        return self._run("fewer", half.processes, config, checkpoint=str(checkpoint))

    def export(self) -> Path:
        """Exports the trained model and returns its folder; raises RunFailed."""
        trained, output = self.strategy, self.folder / "exported"
        flags = [f"--config={trained.folder / 'config.yaml'}", f"--output={output}"]
        if self.small.config["model"].get("adapter"):
            flags.append("--adapter=merged")
        self._tool("export", *flags, f"--checkpoint={trained.run / 'checkpoints'}")
        return output

    def _tool(self, verb: str, *flags: str) -> None:
        """Runs a verb other than training on one process."""
        argv, folder = [verb, *flags], self.folder / verb
        record = run_ranks(1, self.project, argv, folder, prelude=self.prelude, timeout_s=None)
        if not record.ok:
            raise RunFailed(verb, record)

    def _run_with_dropout(self, name: str, *callbacks: Callback, checkpoint: str = "") -> RunRecord:
        config = self.small.with_dropout()
        return self._run(name, self.small.processes, config, *callbacks, checkpoint=checkpoint, has_dropout=True)

    def _run(
        self, name: str, num: int, config: Config, *more: Callback, checkpoint: str = "", has_dropout: bool = False
    ) -> RunRecord:
        if name not in self.known:
            # `last` is searched among the runs of one name.
            config["run"]["name"] = "killed" if checkpoint == "last" else name
            argv = ["fit", f"--config={self._write(name, config)}"]
            argv += [f"--ckpt_path={checkpoint}"] if checkpoint else []
            folder = self.folder / name
            callbacks = [RaggedLabels(), *more, FirstStep(folder, not has_dropout)]
            self.known[name] = run_ranks(
                num, self.project, argv, folder, callbacks=callbacks, prelude=self.prelude, timeout_s=None
            )
        record = self.known[name]
        if not (record.was_killed if name == "killed" else record.ok):
            self.hung = name if record.hung else self.hung
            is_known = name in self.failed
            self.failed.add(name)
            raise RunFailed(name, record, is_known)
        return record

    def _write(self, name: str, config: Config) -> Path:
        path = self.folder / name / "config.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        return path
