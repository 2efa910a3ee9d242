"""Lightning's WandbLogger; here an error of W&B neither stops nor delays training."""

import html
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.loggers.logger import rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn

from ...cluster.redaction import redacted_command
from ...compat.lightning import has_wandb_run, wandb_options
from ...errors import reason, require
from ...ranges import Folder, Timeout
from ...run_callback import RunLogger


class WandB(RunLogger, WandbLogger):
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
        alerts: Whether W&B notifies you of findings of level "error". Its user settings have
            notifications of the end and of a crash.
        init_timeout_s: Seconds to wait for the service before logging offline.
        finish_timeout_s: Seconds to wait at the end for uploads; `wandb sync` uploads the rest."""

    def __init__(
        self,
        project: str,
        save_dir: Folder = "{run}",
        name: str | None = None,
        group: str | None = None,
        tags: list[str] | None = None,
        notes: str | None = None,
        offline: bool | None = None,
        alerts: bool = False,
        init_timeout_s: Timeout = 30.0,
        finish_timeout_s: Timeout = 20.0,
    ) -> None:
        require("wandb", "the logger WandB")
        run_id = Path(save_dir).name
        offline = not _has_api_key() if offline is None else offline
        settings: dict[str, Any] = {
            "init_timeout": init_timeout_s,
            "finish_timeout": finish_timeout_s,
            "silent": True,
        }
        if redacted_command(sys.argv) != sys.argv:  # wandb records it, and what is printed
            settings |= {"x_disable_meta": True, "console": "off"}
        # `mode`, because Lightning's `offline` sets a variable that wandb 0.31 has read before.
        super().__init__(
            project=project,
            save_dir=save_dir,
            name=name or run_id,
            id=run_id,
            resume="allow",
            mode="offline" if offline else "online",
            group=group,
            tags=tags,
            notes=notes,
            settings=settings,
        )
        self.alerts = alerts
        self._failed = False

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:  # pyright: ignore
        if not has_wandb_run(self):
            import wandb

            Path(wandb_options(self)["dir"]).mkdir(parents=True, exist_ok=True)
            try:
                run: Any = super().experiment
            except Exception as error:  # wandb.errors.Error is not the base of all that it raises
                rank_zero_warn(f"W&B is not reachable ({error}): logging offline, for `wandb sync`")
                wandb.teardown()  # or its service reports that the run's id is in use
                wandb_options(self)["mode"] = "offline"
                run = super().experiment
            if getattr(run, "offline", False):
                folder = shlex.quote(str(Path(run.dir).parent))  # wandb's are in its folder files
                print(f"W&B is offline; to upload this run later: wandb sync {folder}", flush=True)
        return super().experiment

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
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
    def finalize(self, status: str) -> None:
        """Ends a failed run. After success a validation may follow; wandb ends that run at exit."""
        if status != "success" and has_wandb_run(self):
            self._attempt(lambda: self.experiment.finish(exit_code=1))

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
