"""The trainings of a rehearsal. Each runs once, when a check first needs it.

    one            one process, with gradient accumulation
    other_hash     the same as one, in a process with another PYTHONHASHSEED
    big            one process, each global batch as one micro-batch
    ddp            two processes, DDP
    strategy       the chosen strategy
    uninterrupted  the chosen strategy, with dropout if the model has any
    killed         the same, killed
    resumed        the same, resumed from the last checkpoint of killed
    fewer          the chosen strategy on half of the processes, from a checkpoint of `strategy`

Dropout is off except in uninterrupted, killed and resumed, because random masks differ between
ranks. Each training has a folder with its `config.yaml`, with which `fit` repeats it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import yaml
from lightning.pytorch import Callback

from ...checkpoint.manifest import SavedCheckpoint
from ...parallel.shrunk import shrunk
from ...project import Project
from .first_step import FirstStep
from .interventions import KillAt, LeakageTest, RaggedLabels, StepProbe
from .record import RunRecord
from .shrink_config import Config, Small, checkpoint_step
from .workers import Workers

HASH_SEED = "1"  # one that a process draws for itself is this once in 2**32


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
    idle_s: float = 60.0  # seconds without progress after which a training counts as hung
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
        folder = self.folder / "one"
        return self._run("one", 1, self._single(), [LeakageTest(folder), StepProbe(folder)])

    @property
    def other_hash(self) -> RunRecord:
        return self._run("other_hash", 1, self._single(), hash_seed=HASH_SEED)

    def _single(self) -> Config:
        """Returns the training of one process, whose loss has all logits at once, for its probe."""
        config = self.small.variant(1, "auto")
        if config["model"].get("loss_chunk"):
            config["model"]["loss_chunk"] = None
        return config

    @property
    def big(self) -> RunRecord:
        return self._run("big", 1, self.small.variant(1, "auto", is_big=True))

    @property
    def ddp(self) -> RunRecord:
        if str(self.small.strategy).startswith("ddp") and self.small.processes == 2:
            return self.strategy  # ddp, or ddp_find_unused_parameters_true
        return self._run("ddp", 2, self.small.variant(2, "ddp"))

    @property
    def strategy(self) -> RunRecord:
        return self._run("strategy", self.small.processes, self.small.config)

    @property
    def uninterrupted(self) -> RunRecord:
        if not (self.small.dropouts or self.strategy.tensors("draws")):
            return self.strategy
        return self._run_with_dropout("uninterrupted")

    @property
    def killed(self) -> RunRecord:
        before_next_checkpoint = 2 * self.kept_step - 1
        return self._run_with_dropout("killed", [KillAt(before_next_checkpoint)])

    @property
    def resumed(self) -> RunRecord:
        assert self.killed.was_killed
        return self._run_with_dropout("resumed", checkpoint="last")

    @property
    def fewer(self) -> RunRecord:
        saved = SavedCheckpoint.all_in(self.strategy.run / "checkpoints")
        checkpoint = next(each.path for each in saved if each.step == self.kept_step)
        small = self.small
        spec, half = small.strategy, shrunk(small.strategy, small.processes // 2)
        num, data_parallel = half.processes, half.data_parallel
        if isinstance(spec, dict):
            spec = spec | {"init_args": half.arguments}
        config = small.variant(num, spec, data_parallel)
        return self._run("fewer", num, config, checkpoint=str(checkpoint))

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
        with Workers(1, self.project) as workers:
            argv = [verb, *flags]
            record = workers.run(argv, self.folder / verb, prelude=self.prelude, timeout_s=None)
        if not record.ok:
            raise RunFailed(verb, record)

    def _run_with_dropout(
        self, name: str, callbacks: Sequence[Callback] = (), checkpoint: str | None = None
    ) -> RunRecord:
        config = self.small.with_dropout()
        return self._run(name, self.small.processes, config, callbacks, checkpoint, True)

    def _run(
        self,
        name: str,
        num: int,
        config: Config,
        callbacks: Sequence[Callback] = (),
        checkpoint: str | None = None,
        has_dropout: bool = False,
        hash_seed: str | None = None,
    ) -> RunRecord:
        if name not in self.known:
            # `last` is searched among the runs of one name.
            config["run"]["name"] = "killed" if checkpoint == "last" else name
            argv = ["fit", f"--config={self._write(name, config)}"]
            argv += [f"--ckpt_path={checkpoint}"] if checkpoint else []
            folder = self.folder / name
            callbacks = [RaggedLabels(), *callbacks, FirstStep(folder, not has_dropout)]
            with Workers(num, self.project, hash_seed) as workers:
                run = partial(workers.run, callbacks=callbacks, prelude=self.prelude)
                self.known[name] = run(argv, folder, timeout_s=None, idle_s=self.idle_s)
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
