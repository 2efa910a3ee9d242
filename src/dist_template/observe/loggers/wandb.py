"""Lightning's WandbLogger; here an error of W&B neither stops nor delays training."""

import html
import os
import shutil
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.loggers.logger import rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn

from ...cluster.redaction import redacted_command
from ...compat.lightning import has_wandb_run, wandb_options
from ...errors import Ended, Exit, first_line, reason, require

UPLOAD_S = 6 * 3600  # the longest time that one upload of a checkpoint may take


class WandB(WandbLogger):
    """One W&B run per run folder: a resumed folder continues the same W&B run.

    The x axis of all charts is the optimizer step, logged as `trainer/global_step`. W&B only adds
    to a run: a step that is done again after a restart is logged again.

    Args:
        project: W&B project.
        save_dir: The run's folder; its name is the id of the W&B run.
        name: Display name. null uses the id.
        group: Group of runs that this run belongs to. null: no group.
        tags: Labels. null: no labels.
        notes: Free text. null: no text.
        offline: true keeps all on disk for `wandb sync`. null: offline if there is no API key.
        artifacts: Committed checkpoints to upload in the background: none, best (of `best_checkpoint`), last (of
            `last_checkpoint`, each one as a new version), all (both). None are uploaded offline.
        alerts: Whether W&B notifies you of findings of level "error", of a crash, and of the end.
        init_timeout_s: Seconds to wait for the service before logging offline.
        finish_timeout_s: Seconds to wait at the end for uploads; `wandb sync` uploads the rest.
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
        artifacts: Literal["none", "best", "last", "all"] = "none",
        alerts: bool = False,
        init_timeout_s: float = 30.0,
        finish_timeout_s: float = 20.0,
    ) -> None:
        require("wandb", "the logger WandB")
        run_id = Path(save_dir).name
        offline = not _has_api_key() if offline is None else offline
        settings: dict[str, Any] = {"init_timeout": init_timeout_s, "finish_timeout": finish_timeout_s, "silent": True}
        if redacted_command(sys.argv) != sys.argv:  # wandb records it, and what is printed
            settings |= {"x_disable_meta": True, "console": "off"}
        # `mode`, because Lightning's `offline` sets a variable that wandb 0.31 has read before.
        super().__init__(
            project=project, save_dir=save_dir, name=name or run_id, id=run_id, resume="allow",
            mode="offline" if offline else "online", group=group, tags=tags, notes=notes,
            settings=settings,
        )  # fmt: skip
        self.run_name = name or run_id
        self.artifacts, self.alerts, self.finish_timeout_s = artifacts, alerts, finish_timeout_s
        self._failed = self._trains = False
        self._uploads = Uploads()

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:  # pyright: ignore
        if not has_wandb_run(self):
            import wandb

            Path(wandb_options(self)["dir"]).mkdir(parents=True, exist_ok=True)
            try:
                return super().experiment
            except Exception as error:  # wandb.errors.Error is not the base of all that it raises
                rank_zero_warn(f"W&B is not reachable ({error}): logging offline, for `wandb sync`")
                wandb.teardown()  # or its service reports that the run's id is in use
                wandb_options(self)["mode"] = "offline"
        return super().experiment

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self._trains = True
        self._attempt(lambda: super(WandB, self).log_metrics(metrics, step))

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self._attempt(lambda: super(WandB, self).log_hyperparams(params))

    @rank_zero_only
    def log_sample(self, text: str, step: int) -> None:
        """Logs a page: the table of Lightning's `log_text` waits for the service (wandb 0.31)."""
        import wandb

        page: Any = wandb.Html(f"<pre>{html.escape(text)}</pre>")
        self.log_metrics({"eval/sample": page}, step)

    @rank_zero_only
    def alert(self, title: str, text: str, level: Literal["INFO", "WARN", "ERROR"]) -> None:
        """Sends a notification, if `alerts` is true."""
        if self.alerts:  # W&B allows titles of 63 characters
            self._attempt(lambda: self.experiment.alert(title[:63], text, level))

    @rank_zero_only
    def on_checkpoint(self, path: Path) -> None:
        """Uploads a committed checkpoint, if `artifacts` includes it."""
        kind = "best" if path.name.startswith("best") else "last"
        if self.artifacts not in (kind, "all"):
            return
        if wandb_options(self)["mode"] == "offline":
            rank_zero_warn("W&B accepts no checkpoints offline; later: `wandb artifact put`")
            self.artifacts = "none"
        else:
            self._attempt(lambda: self._uploads.add(self.experiment, path, kind))

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Ends a failed run. After success a validation may follow; wandb ends that run at exit."""
        error = sys.exc_info()[1] if status != "success" else None
        if self._trains or error:
            self._alert_of_end(error)
        self._trains = False
        self._uploads.wait(self.finish_timeout_s)
        if status != "success" and has_wandb_run(self):
            self._attempt(lambda: self.experiment.finish(exit_code=1))

    def _alert_of_end(self, error: BaseException | None) -> None:
        if error is None:
            self.alert("training has finished", self.run_name, "INFO")
        elif isinstance(error, Ended) and error.code == Exit.REQUEUE:
            self.alert("training was interrupted", f"{self.run_name}: {first_line(error)}", "WARN")
        else:
            cause = f"{type(error).__name__}: {first_line(error)}"
            self.alert("training has failed", f"{self.run_name}: {cause}", "ERROR")

    def _attempt(self, call: Callable[[], object]) -> None:
        """Calls wandb; if that fails (a killed process, a full disk), training continues."""
        if self._failed:
            return
        try:
            call()
        except Exception as error:
            self._failed = True
            rank_zero_warn(f"W&B has failed ({reason(error)}): training continues without it")


def _has_api_key() -> bool:
    if os.environ.get("WANDB_MODE"):
        return os.environ["WANDB_MODE"] == "online"
    import wandb

    return wandb.login(prompt=False, verify=False)  # asks neither the user nor the service


class Uploads:
    """Uploads one checkpoint at a time in a daemon thread; only the newest of each kind waits."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[Any, Path]] = {}  # kind -> W&B run, checkpoint
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def add(self, run: Any, path: Path, kind: str) -> None:
        """Queues the checkpoint folder `path` as a version of the artifact `<kind>-<run id>`."""
        with self._lock:
            self._waiting[kind] = (run, path)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="uploads", daemon=True)
                self._thread.start()

    def wait(self, seconds: float) -> None:
        if (thread := self._thread) is not None:
            thread.join(seconds)
            if thread.is_alive():
                rank_zero_warn(f"W&B has not received all checkpoints within {seconds:g} s; they stay on disk")

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return
                kind, (run, path) = self._waiting.popitem()
            try:
                _upload(run, path, kind)
            except Exception as error:  # the checkpoint itself is safe
                rank_zero_warn(f"{path.name} was not uploaded to W&B: {reason(error)}")


def _upload(run: Any, path: Path, kind: str) -> None:
    """Uploads hard links, so that the checkpoint may be deleted during the upload."""
    import wandb

    links = path.parent / ".uploads"
    shutil.rmtree(links, ignore_errors=True)  # of a killed run
    shutil.copytree(path, links, copy_function=os.link)
    artifact = wandb.Artifact(f"{kind}-{run.id}", type="model", metadata={"checkpoint": path.name})
    artifact.add_dir(str(links), policy="immutable", skip_cache=True)  # without a copy
    run.log_artifact(artifact, aliases=["latest", path.name.removesuffix(".ckpt")])
    artifact.wait(UPLOAD_S)
    shutil.rmtree(links, ignore_errors=True)
