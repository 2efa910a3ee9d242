"""The trainings of a rehearsal. Each runs once, when a check first needs it.

    one            one process, with gradient accumulation
    big            one process, each global batch as one micro-batch
    ddp            two processes, DDP
    strategy       the chosen strategy
    uninterrupted  the chosen strategy, with dropout if the model has any
    killed         the same, killed
    resumed        the same, resumed from the last checkpoint of killed
    fewer          the chosen strategy on half of the processes, resumed from a checkpoint of `strategy`

Dropout is off except in uninterrupted, killed and resumed, because random masks differ between ranks. Each training has
a folder with its `config.yaml`, with which `fit` repeats it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import Callback

from ..project import Project
from .first_step import Details
from .gradient_hooks import GradientHooks
from .interventions import KeepCheckpoint, KillAt, RaggedLabels
from .leakage import LeakageTest
from .record import RunRecord
from .shrink_config import Small, checkpoint_step, fewer
from .workers import Workers


class RunFailed(Exception):
    """A training did not end as expected.

    Args:
        name: The training.
        record: Its record.
        is_known: An earlier check has reported the failure.
    """

    def __init__(self, name: str, record: RunRecord, is_known: bool = False) -> None:
        super().__init__(f"run {name!r}, {record.error}; see {record.log_path(record.failed_rank)}")
        self.name = name
        self.refusal = record.refusal
        self.is_known = is_known


class Runs:
    """Runs trainings on demand and keeps their records.

    Args:
        small: The small configuration.
        strategy: The chosen strategy object, which computes mesh sizes.
        folder: Each training gets a folder in it.
        project: Its module and data are trained.
        prelude: Called in each process before anything else.
        idle_s: Seconds without progress after which a training counts as hung.
        source: The user's data source; None if generated text is used.
        known: Records of trainings that need not run again.
    """

    def __init__(
        self,
        small: Small,
        strategy: Any,
        folder: Path,
        project: Project,
        prelude: Callable[[], None] | None = None,
        idle_s: float = 60.0,
        source: Any = None,
        known: dict[str, RunRecord] | None = None,
    ) -> None:
        self.small = small
        self.strategy_object = strategy
        self.folder = folder
        self.project = project
        self.prelude = prelude
        self.idle_s = idle_s
        self.source = source
        self.kept_step = checkpoint_step(small.steps)
        self.hung = ""  # name of the training that hung
        self._records: dict[str, RunRecord] = known or {}
        self._failed: set[str] = set()

    def prepare(self) -> None:
        """Tokenizes the text.

        Raises:
            RunFailed: it failed.
        """
        self._tool("prepare", "prepare", f"--config={self._write('prepare', self.small.config)}")

    @property
    def one(self) -> RunRecord:
        test = LeakageTest((self.folder / "one").absolute())
        return self._run("one", 1, self.small.variant(1, "auto"), [test])

    @property
    def big(self) -> RunRecord:
        return self._run("big", 1, self.small.variant(1, "auto", is_big=True))

    @property
    def ddp(self) -> RunRecord:
        if str(self.small.strategy).startswith("ddp") and self.small.processes == 2:  # ddp, or ddp_find_unused_…
            return self.strategy
        return self._run("ddp", 2, self.small.variant(2, "ddp"))

    @property
    def strategy(self) -> RunRecord:
        keep = KeepCheckpoint(self.kept_step, self.kept_checkpoint)
        return self._run("strategy", self.small.processes, self.small.config, [keep])

    @property
    def kept_checkpoint(self) -> Path:
        return (self.folder / "strategy" / f"step{self.kept_step}.ckpt").absolute()

    @property
    def uninterrupted(self) -> RunRecord:
        if not (self.small.dropouts or self.strategy.tensors("draws")):
            return self.strategy
        return self._run("uninterrupted", self.small.processes, self.small.with_dropout(), has_dropout=True)

    @property
    def killed(self) -> RunRecord:
        kill = KillAt(2 * self.kept_step - 1)  # one step before the next checkpoint
        return self._run(
            "killed", self.small.processes, self.small.with_dropout(), [kill], is_killed=True, has_dropout=True
        )

    @property
    def resumed(self) -> RunRecord:
        config = self.small.with_dropout()
        config["run"]["name"] = self.killed.folder.name  # `last` searches the runs of this name
        return self._run("resumed", self.small.processes, config, checkpoint="last", has_dropout=True)

    @property
    def fewer(self) -> RunRecord:
        assert self.strategy.ok  # it has written the checkpoint
        spec, num, data_parallel = fewer(self.small, self.strategy_object)
        config = self.small.variant(num, spec, data_parallel)
        return self._run("fewer", num, config, checkpoint=str(self.kept_checkpoint))

    def export(self) -> Path:
        """Exports the trained model and returns its folder.

        Raises:
            RunFailed: the export failed or is not supported.
        """
        checkpoint, output = self.strategy.run / "checkpoints", self.folder / "exported"
        config = self.strategy.folder / "config.yaml"
        self._tool("export", "export", f"--config={config}", f"--checkpoint={checkpoint}", f"--output={output}")
        return output

    def _tool(self, name: str, *flags: str) -> None:
        """Runs a verb other than training on one process."""
        with Workers(1, self.project) as workers:
            record = workers.run(flags, self.folder / name, prelude=self.prelude, timeout_s=None)
        if not record.ok:
            raise RunFailed(name, record)

    def _run(
        self,
        name: str,
        num: int,
        config: dict[str, Any],
        callbacks: Sequence[Callback] = (),
        checkpoint: str | None = None,
        is_killed: bool = False,
        has_dropout: bool = False,
    ) -> RunRecord:
        if name not in self._records:
            if checkpoint != "last":
                config["run"]["name"] = name
            flags = ["fit", f"--config={self._write(name, config)}"]
            flags += [f"--ckpt_path={checkpoint}"] if checkpoint else []
            folder = self.folder / name
            record_all = [Details(folder.absolute(), not has_dropout), GradientHooks(folder.absolute())]
            options: dict[str, Any] = {"prelude": self.prelude, "timeout_s": None, "idle_s": self.idle_s}
            with Workers(num, self.project) as workers:
                self._records[name] = workers.run(
                    flags, folder, callbacks=[RaggedLabels(), *callbacks, *record_all], **options
                )
        record = self._records[name]
        if not (record.was_killed if is_killed else record.ok):
            self.hung = name if record.hung else self.hung
            is_known = name in self._failed
            self._failed.add(name)
            raise RunFailed(name, record, is_known)
        return record

    def _write(self, name: str, config: dict[str, Any]) -> Path:
        path = self.folder / name / "config.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        return path.absolute()
