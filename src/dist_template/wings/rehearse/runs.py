"""The trainings of a rehearsal. Each runs once, when a check first needs it.

    one            one process, with gradient accumulation big            one process, each global
    batch as one micro-batch strategy       the chosen strategy uninterrupted  the chosen strategy,
    with the model's dropout; `strategy` if it has none killed         the same, killed resumed
    the same, resumed from the last checkpoint of killed cpu            the chosen strategy, with
    steps that log nothing gpu            the same on fake GPUs gpu_resumed    the same, resumed
    from gpu's first checkpoint, with a NaN step; gpu_prediction continues prompts

Dropout is off except in uninterrupted, killed and resumed, because random masks differ between
ranks. Each training has a folder with its `config.yaml`, with which `fit` repeats it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from lightning.pytorch import Callback

from ...project import Project
from .first_step import FirstStep
from .gpu.devices import run_on_devices
from .interventions import KillAt, LeakageTest, NotANumber, RaggedLabels
from .record import RunRecord
from .shrink_config import NAN_STEP, SAVED_STEP, Config, Small
from .workers import run_ranks


class RunFailed(Exception):
    """The training or tool `name` did not end as expected."""

    def __init__(self, name: str, record: RunRecord) -> None:
        super().__init__(
            f"run {name!r}, {record.error}; see {record.folder}/rank{record.failed_rank}.log"
        )
        self.refusal = record.refusal


@dataclass(eq=False)
class Runs:
    """Runs trainings on demand and keeps their records."""

    small: Small
    folder: Path  # each training gets a folder in it
    project: Project
    prelude: Callable[[], None] | None = None  # called in each process before anything else
    known: dict[str, RunRecord] = field(default_factory=dict)  # trainings that have run

    def prepare(self) -> None:
        """Tokenizes the text; raises RunFailed."""
        self._tool("prepare", f"--config={self._write('prepare', self.small.config)}")

    @property
    def one(self) -> RunRecord:
        return self._run("one", self.small.on_one_process(), LeakageTest(self.folder / "one"))

    @property
    def big(self) -> RunRecord:
        return self._run("big", self.small.on_one_process(is_big=True))

    @property
    def strategy(self) -> RunRecord:
        return self._run("strategy", self.small.config)

    @property
    def uninterrupted(self) -> RunRecord:
        trained = self.strategy
        if trained.tensors("dropout").keys() - {"seeded", "validation"} or trained.draws:
            return self._run("uninterrupted", self.small.config, has_dropout=True)
        return trained

    @property
    def killed(self) -> RunRecord:
        before_next_checkpoint = 2 * SAVED_STEP - 1
        return self._run(
            "killed", self.small.config, KillAt(before_next_checkpoint), has_dropout=True
        )

    @property
    def resumed(self) -> RunRecord:
        assert self.killed.was_killed
        return self._run("resumed", self.small.config, checkpoint="last", has_dropout=True)

    @property
    def cpu(self) -> RunRecord:
        return self._run("cpu", self.small.with_plain_steps("cpu"))

    @property
    def gpu(self) -> RunRecord:
        return self._run("gpu", self.small.with_plain_steps("gpu"))

    @property
    def gpu_resumed(self) -> RunRecord:
        config = self.small.with_plain_steps("gpu")
        return self._run(
            "gpu_resumed", config, NotANumber(NAN_STEP), checkpoint=self._first_saved()
        )

    @property
    def gpu_prediction(self) -> RunRecord:
        config = self.small.with_plain_steps("gpu")
        return self._run("gpu_prediction", config, checkpoint=self._first_saved(), verb="predict")

    def trained(self, name: str, config: Config) -> RunRecord:
        """Runs another training of this configuration."""
        return self._run(name, config)

    def _first_saved(self) -> str:
        return str(min((self.gpu.run / "checkpoints").glob("step*")))

    def export(self) -> str:
        """Exports the trained model; returns how it differs from the trained one; raises
        RunFailed."""
        trained = self.strategy
        flags = [
            f"--config={trained.folder / 'config.yaml'}",
            f"--checkpoint={trained.run / 'checkpoints'}",
        ]
        if self.small.config["model"].get("adapter"):
            flags.append("--adapter=merged")
        if self.small.is_plain:
            flags.append("--to=onnx")
        record = self._tool("export", *flags, f"--output={self.folder / 'exported'}")
        return record.last_line(0).rpartition("onnx, " if self.small.is_plain else "float32, ")[2]

    def _tool(self, verb: str, *flags: str) -> RunRecord:
        """Runs a verb other than training on one process."""
        argv, folder = [verb, *flags], self.folder / verb
        record = run_ranks(1, self.project, argv, folder, prelude=self.prelude, timeout_s=None)
        if not record.ok:
            raise RunFailed(verb, record)
        return record

    def _run(
        self,
        name: str,
        config: Config,
        *more: Callback,
        checkpoint: str = "",
        has_dropout: bool = False,
        verb: str = "fit",
    ) -> RunRecord:
        if name not in self.known:
            # `last` is searched among the runs of one name.
            run = config["run"] | {"name": "killed" if checkpoint == "last" else name}
            argv = [verb, f"--config={self._write(name, config | {'run': run})}"]
            argv += [f"--ckpt_path={checkpoint}"] if checkpoint else []
            folder, num = self.folder / name, config["trainer"]["devices"]
            callbacks = [RaggedLabels(), *more, FirstStep(folder, not has_dropout)]
            run_on = run_on_devices if config["trainer"]["accelerator"] == "gpu" else run_ranks
            self.known[name] = run_on(
                num,
                self.project,
                argv,
                folder,
                callbacks=callbacks,
                prelude=self.prelude,
                timeout_s=None,
            )
        record = self.known[name]
        if not (record.was_killed if name == "killed" else record.ok):
            raise RunFailed(name, record)
        return record

    def _write(self, name: str, config: Config) -> Path:
        path = self.folder / name / "config.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = {key: value for key, value in config.items() if value != {}}
        path.write_text(yaml.safe_dump(kept, sort_keys=False), encoding="utf-8")
        return path
