"""The trainings of a rehearsal. Each runs once, when a check first needs it.

    one             one process, with gradient accumulation
    big             one process, each global batch as one micro-batch
    strategy        the chosen strategy
    uninterrupted   the chosen strategy, with the model's dropout; `strategy` if it has none
    killed          the same, killed
    resumed         the same, resumed from the last checkpoint of killed
    cpu             the chosen strategy, with steps that log nothing
    gpu             the same on fake GPUs
    gpu_resumed     the same, resumed from gpu's first checkpoint, with a NaN step
    gpu_prediction  continues prompts with gpu's first checkpoint

Dropout is off except in uninterrupted, killed and resumed, because random masks differ between
ranks. Each training has a folder with its `config.yaml`, with which `fit` repeats it."""

from collections.abc import Callable, Sequence
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
        turned_off = trained.tensors("dropout").keys() - {"seeded", "validation"}
        if turned_off or trained.draws:
            return self._run("uninterrupted", self.small.config, has_dropout=True)
        return trained

    @property
    def killed(self) -> RunRecord:
        kill = KillAt(2 * SAVED_STEP - 1)  # one step before the second checkpoint
        return self._run("killed", self.small.config, kill, has_dropout=True)

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
        config, nan_step = self.small.with_plain_steps("gpu"), NotANumber(NAN_STEP)
        return self._run("gpu_resumed", config, nan_step, checkpoint=self._first_saved())

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
        flags = [f"--config={trained.folder / 'config.yaml'}"]
        flags.append(f"--checkpoint={trained.run / 'checkpoints'}")
        format_ = "float32"
        if self.small.config["model"].get("adapter"):
            flags.append("--adapter=merged")
        if self.small.is_plain:
            flags.append("--to=onnx")
            format_ = "onnx"
        record = self._tool("export", *flags, f"--output={self.folder / 'exported'}")
        # Of the last line, "… <format>, <how the outputs were compared>".
        return record.last_line(0).rpartition(f"{format_}, ")[2]

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
        """Returns the record of the training `name`, which runs if it has not; raises RunFailed if
        it did not end as expected."""
        if name not in self.known:
            self.known[name] = self._train(name, config, more, checkpoint, has_dropout, verb)
        record = self.known[name]
        ended = record.was_killed if name == "killed" else record.ok
        if not ended:
            raise RunFailed(name, record)
        return record

    def _train(
        self,
        name: str,
        config: Config,
        more: Sequence[Callback],
        checkpoint: str,
        has_dropout: bool,
        verb: str,
    ) -> RunRecord:
        # `last` is searched among the runs of one name.
        run_name = "killed" if checkpoint == "last" else name
        config = config | {"run": config["run"] | {"name": run_name}}
        argv = [verb, f"--config={self._write(name, config)}"]
        if checkpoint:
            argv.append(f"--ckpt_path={checkpoint}")
        folder, trainer = self.folder / name, config["trainer"]
        run_on = run_on_devices if trainer["accelerator"] == "gpu" else run_ranks
        return run_on(
            trainer["devices"],
            self.project,
            argv,
            folder,
            callbacks=[RaggedLabels(), *more, FirstStep(folder, not has_dropout)],
            prelude=self.prelude,
            timeout_s=None,
        )

    def _write(self, name: str, config: Config) -> Path:
        path = self.folder / name / "config.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = {key: value for key, value in config.items() if value != {}}
        path.write_text(yaml.safe_dump(kept, sort_keys=False), encoding="utf-8")
        return path
