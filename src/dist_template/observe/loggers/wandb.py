"""WandB without ever keeping training waiting: metrics.jsonl has them too, so nothing here is worth a run."""

from __future__ import annotations

import atexit
import html
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn

from ...errors import Ended, Exit, first_line, reason
from .artifacts import Uploads
from .run_log import Resumable, logged

Kinds = Literal["none", "best", "last", "all"]
STEP = "trainer/global_step"  # Lightning's name for it


class WandB(Resumable, WandbLogger):
    """One WandB run per run folder: resuming the folder resumes the run.

    WandB numbers what it is told, and drops what comes under a lower number. Lightning therefore leaves the numbers to
    WandB, which counts on after a restart, and logs the optimizer step as `trainer/global_step`, the x axis of all
    charts. What is logged twice stands twice, so a step that is done again is told only where it came out otherwise.
    What a killed attempt could not pass on any more is told by the next, from metrics.jsonl.

    Args:
        project: WandB project.
        save_dir: The run's folder; its name is the WandB run's id.
        name: Display name. null takes the id.
        group: Group of runs to file this one under. null is none.
        tags: Labels. null is none.
        notes: Free text. null is none.
        offline: true keeps all on disk, for `wandb sync` later. null decides by whether there is an API key.
        artifacts: Which committed checkpoints to upload while training goes on: none, best (of `best_checkpoint`), last
            (of `last_checkpoint`, each as a new version), all (both). None is uploaded offline.
        alerts: Have WandB notify you of findings of level "error", of a crash, and of the end.
        init_timeout_s: Seconds to wait for the service before going offline.
        finish_timeout_s: Seconds to wait at the end for what is not uploaded yet; `wandb sync` uploads the rest.
    """

    def __init__(
        self,
        project: str,
        save_dir: str = "{run}",
        name: str | None = None,
        group: str | None = None,
        tags: list[str] | None = None,
        notes: str | None = None,
        offline: bool | None = None,
        artifacts: Kinds = "none",
        alerts: bool = False,
        init_timeout_s: float = 30.0,
        finish_timeout_s: float = 20.0,
    ) -> None:
        run_id = Path(save_dir).name
        offline = not _has_api_key() if offline is None else offline
        # Not Lightning's own `offline`: it sets a variable, which wandb 0.31 has read before.
        super().__init__(
            project=project, save_dir=save_dir, name=name or run_id, id=run_id, resume="allow",
            mode="offline" if offline else "online", group=group, tags=tags, notes=notes,
        )  # fmt: skip
        self.artifacts: Kinds = artifacts
        self.alerts = alerts
        self.finish_timeout_s = finish_timeout_s
        self._init_timeout_s = init_timeout_s
        self._failed = self._trains = False
        self._newest = -1  # step
        self._uploads: Uploads | None = None

    @property
    @rank_zero_only
    def experiment(self) -> Any:  # pyright: ignore
        if self._experiment is None:
            import wandb

            Path(self._wandb_init["dir"]).mkdir(parents=True, exist_ok=True)
            self._wandb_init["settings"] = wandb.Settings(
                init_timeout=self._init_timeout_s, finish_timeout=self.finish_timeout_s, silent=True
            )
            atexit.register(self._finish)
            try:
                return super().experiment
            except wandb.errors.Error as error:
                rank_zero_warn(f"WandB is not to be reached ({error}): logging offline, `wandb sync` it later")
                wandb.teardown()  # or its service says that the run's id is in use
                self._wandb_init["mode"] = "offline"
        return super().experiment

    @rank_zero_only
    def resume(self, run: Path, step: int) -> None:
        done, told = logged(run), self._told()
        for at in [at for at in done if told < at <= step]:
            self._attempt(partial(super().log_metrics, done[at], at))
        known = [(at, name) for at in done if step <= at <= max(told, step) for name in done[at]]
        self._known = {(at, name): done[at][name] for at, name in known}

    def _told(self) -> int:
        """The last step that WandB has; -1 where nothing is sure.

        Its process writes in blocks of 32 KiB and ends at once when this one is killed: only after `_finish` is all
        of an offline run on the disk.
        """
        if self._wandb_init["mode"] == "online":
            experiment: Any = self.experiment
            return int(experiment.summary.get(STEP, -1)) if experiment.resumed else -1
        return int(self._marker.read_text("utf-8")) if self._marker.exists() else -1

    @property
    def _marker(self) -> Path:
        return Path(self._wandb_init["dir"]) / "wandb" / "told"

    def _finish(self) -> None:
        """Close the run, in `finish_timeout_s` at most; also at the process's end, before wandb itself does."""
        atexit.unregister(self._finish)
        if self._experiment is not None and not self._failed:
            import wandb

            self._attempt(self._experiment.finish)
            self._attempt(wandb.teardown)  # waits for its process, which may still write the file (0.31)
            if self._wandb_init["mode"] == "offline" and not self._failed:
                self._marker.write_text(str(self._newest), "utf-8")

    # ---- what is told ----------------------------------------------------------------------------------------------

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self._trains, self._newest = True, max(step or 0, self._newest)
        if new := self.new(metrics, step):
            self._attempt(lambda: super(WandB, self).log_metrics(new, step))

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self._attempt(lambda: super(WandB, self).log_hyperparams(params))

    @rank_zero_only
    def log_sample(self, text: str, step: int) -> None:
        import wandb

        page = wandb.Html(f"<pre>{html.escape(text)}</pre>")
        self._attempt(lambda: super(WandB, self).log_metrics({"eval/sample": page}, step))  # ty: ignore[invalid-argument-type]

    @rank_zero_only
    def alert(self, title: str, text: str, level: Literal["INFO", "WARN", "ERROR"] = "ERROR") -> None:
        """Notify whom WandB is set up to notify, if this is wanted."""
        if self.alerts:
            run: Any = self.experiment
            self._attempt(lambda: run.alert(title[:63], text, level))  # its limit

    @rank_zero_only
    def on_checkpoint(self, path: Path) -> None:
        """A checkpoint has been committed: begin to upload it."""
        kind = "best" if path.name.startswith("best") else "last"
        if self.artifacts not in (kind, "all"):
            return
        if self._wandb_init["mode"] == "offline":
            rank_zero_warn("WandB takes no checkpoints offline; `wandb artifact put` uploads one by hand")
            self.artifacts = "none"
            return
        self._uploads = self._uploads or Uploads(path.parent / ".uploads")
        self._uploads.begin(self.experiment, path, kind)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Lightning is done; after a success a validation may follow, and the process's end closes the run."""
        error = sys.exc_info()[1] if status != "success" else None
        if self._trains or error:
            self._alert_of_end(error)
        self._trains = False
        if self._uploads is not None:
            self._uploads.wait(self.finish_timeout_s)
        if status != "success":
            self._finish()

    def _alert_of_end(self, error: BaseException | None) -> None:
        if error is None:
            self.alert("training is done", f"{self._name} has ended as configured", "INFO")
        elif isinstance(error, Ended) and error.code == Exit.REQUEUE:
            self.alert("training was interrupted", f"{self._name}: {first_line(error)}", "WARN")
        else:
            self.alert("training has failed", f"{self._name}: {type(error).__name__}: {first_line(error)}")

    def _attempt(self, tell: Callable[[], object]) -> None:
        """WandB's service process may have been killed, or its disk be full: training does not stand or fall by it."""
        if self._failed:
            return
        try:
            tell()
        except Exception as error:
            self._failed = True
            rank_zero_warn(f"WandB has failed ({reason(error)}): training goes on without it; metrics.jsonl has all")


def _has_api_key() -> bool:
    if os.environ.get("WANDB_MODE"):
        return os.environ["WANDB_MODE"] == "online"
    import wandb

    return wandb.login(prompt=False, verify=False)  # looks for a key; asks neither the person nor the service
