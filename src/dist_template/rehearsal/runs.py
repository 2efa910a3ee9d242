"""The trainings of a rehearsal, each run once, when a check first asks for it.

    one        one process, accumulating
    big        one process, each global batch in one micro-batch
    ddp        two processes, DDP
    strategy   the chosen strategy
    whole      the chosen strategy, with dropout where the model has any
    killed     the same, killed
    resumed    the same, going on from killed's last checkpoint
    fewer      the chosen strategy on half of the processes, going on from a checkpoint of `strategy`

Dropout is off in all of them but whole, killed and resumed: other ranks draw it differently.
Each has a folder with its `config.yaml`, with which `fit` runs it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import Callback

from ..project import Project
from .acts import KeepCheckpoint, KillAt, RaggedLabels
from .details import Details
from .probe import Probe
from .record import RunRecord
from .shrink import Small, checkpoint_step, fewer
from .stages import GradientStages
from .workers import Workers


class RunFailed(Exception):
    """A training did not end as it should.

    Args:
        name: Of the training.
        record: What is left of it.
        is_known: A check before this one has reported it.
    """

    def __init__(self, name: str, record: RunRecord, is_known: bool = False) -> None:
        super().__init__(f"run {name!r}, {record.error}; see {record.log_path(record.failed_rank)}")
        self.name = name
        self.refusal = record.refusal
        self.is_known = is_known


class Runs:
    """Runs what is asked for, and keeps the records.

    Args:
        small: What is trained.
        strategy: The chosen strategy's object, to ask for its sizes.
        folder: Each run gets a folder here, its configuration in it.
        project: Whose module and data are trained.
        prelude: Called in each process before anything else.
        idle_s: Seconds without progress after which a training counts as hung.
        source: The user's data source, where it is read; None: made-up text is.
        known: Trainings that need not run again.
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
        self.hung = ""  # the training that did
        self._records: dict[str, RunRecord] = known or {}
        self._failed: set[str] = set()

    def prepare(self) -> None:
        """Tokenize, once.

        Raises:
            RunFailed: it could not.
        """
        self._tool("prepare", "prepare", f"--config={self._write('prepare', self.small.config)}")

    @property
    def one(self) -> RunRecord:
        probe = Probe((self.folder / "one").absolute())
        return self._run("one", 1, self.small.variant(1, "auto"), [probe])

    @property
    def big(self) -> RunRecord:
        return self._run("big", 1, self.small.variant(1, "auto", self.small.config["data"]["global_batch_size"]))

    @property
    def ddp(self) -> RunRecord:
        if str(self.small.strategy).startswith("ddp") and self.small.processes == 2:  # ddp_find_unused_parameters_true
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
    def whole(self) -> RunRecord:
        if not (self.small.dropouts or self.strategy.tensors("draws")):
            return self.strategy
        return self._run("whole", self.small.processes, self.small.with_dropout(), has_dropout=True)

    @property
    def killed(self) -> RunRecord:
        kill = KillAt(2 * self.kept_step - 1)  # just before the next checkpoint would be written
        return self._run(
            "killed", self.small.processes, self.small.with_dropout(), [kill], is_killed=True, has_dropout=True
        )

    @property
    def resumed(self) -> RunRecord:
        config = self.small.with_dropout()
        config["run"]["name"] = self.killed.folder.name  # among whose runs `last` looks
        return self._run("resumed", self.small.processes, config, checkpoint="last", has_dropout=True)

    @property
    def fewer(self) -> RunRecord:
        assert self.strategy.ok  # its checkpoint is there
        spec, num = fewer(self.small, self.strategy_object)
        return self._run("fewer", num, self.small.variant(num, spec), checkpoint=str(self.kept_checkpoint))

    def export(self) -> Path:
        """The folder of the exported model.

        Raises:
            RunFailed: there is no such export.
        """
        checkpoint, output = self.strategy.run / "checkpoints", self.folder / "exported"
        config = self.strategy.folder / "config.yaml"
        self._tool("export", "export", f"--config={config}", f"--checkpoint={checkpoint}", f"--output={output}")
        return output

    def _tool(self, name: str, *flags: str) -> None:
        """Run a verb that is no training, on one process."""
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
            record_all = [Details(folder.absolute(), not has_dropout), GradientStages(folder.absolute())]
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
