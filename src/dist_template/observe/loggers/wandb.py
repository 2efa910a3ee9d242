"""Lightning's WandbLogger; here an error of W&B neither stops nor delays training."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities import rank_zero_only, rank_zero_warn

from ...cluster.redaction import redacted_command
from ...compat.lightning import has_wandb_run
from ...errors import reason, require

INIT_TIMEOUT_S = 30.0  # for the service at the start; then training continues without W&B
FINISH_TIMEOUT_S = 20.0  # for uploads at the end; `wandb sync` uploads the rest


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
    ) -> None:
        require("wandb", "the logger WandB")
        run_id = Path(save_dir).name
        offline = not _has_api_key() if offline is None else offline
        settings: dict[str, Any] = {"init_timeout": INIT_TIMEOUT_S, "finish_timeout": FINISH_TIMEOUT_S, "silent": True}
        if redacted_command(sys.argv) != sys.argv:  # wandb records it, and what is printed
            settings |= {"x_disable_meta": True, "console": "off"}
        # `mode`, because Lightning's `offline` sets a variable that wandb 0.31 has read before.
        super().__init__(
            project=project, save_dir=save_dir, name=name or run_id, id=run_id, resume="allow",
            mode="offline" if offline else "online", group=group, tags=tags, notes=notes,
            settings=settings,
        )  # fmt: skip
        self._folder, self._failed = Path(save_dir), False

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self._attempt(lambda: super(WandB, self).log_metrics(metrics, step))

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self._attempt(lambda: super(WandB, self).log_hyperparams(params))

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Ends a failed run. After success a validation may follow; wandb ends that run at exit."""
        if status != "success" and has_wandb_run(self):
            self._attempt(lambda: self.experiment.finish(exit_code=1))

    def _attempt(self, call: Callable[[], object]) -> None:
        """Calls wandb; if that fails (no service, a killed process, a full disk), training continues."""
        if self._failed:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)  # wandb would write elsewhere
            call()
        except Exception as error:
            self._failed = True
            rank_zero_warn(f"W&B has failed ({reason(error)}): training continues without it")


def _has_api_key() -> bool:
    if os.environ.get("WANDB_MODE"):
        return os.environ["WANDB_MODE"] == "online"
    import wandb

    return wandb.login(prompt=False, verify=False)  # asks neither the user nor the service
