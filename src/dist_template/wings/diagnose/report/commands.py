"""The command that resumes a run."""

from __future__ import annotations

import shlex
from pathlib import Path

from ....checkpoint import manifest
from ....cluster.launch import RUN_ID
from ....observe.history.run import History
from ....project import without
from .results import steps


def checkpoints(history: History) -> list[Path]:
    """Returns the run's checkpoints, the newest first and the best ones last, damaged ones too."""
    own = history.folder / "checkpoints"  # also if the run's folder was moved
    if own.exists():
        return manifest.found(own)
    configured = str(history.key("last_checkpoint.dirpath", ""))
    return manifest.found(Path(configured.replace("{run}", str(history.folder))))


def resume(history: History) -> tuple[str, str]:
    """Returns what the command does, and the command with the run's name; ("", "") if unknown."""
    words = history.environment.get("command") or []
    if "fit" not in words:  # a worker of a rehearsal, or nothing
        return "", ""
    done, last = steps(history), history.key("trainer.max_steps", -1)
    words = without(words, "--ckpt_path")
    if not any(manifest.torn(path) is None for path in checkpoints(history)):
        return "There is no checkpoint to resume from; this starts the run again", shlex.join(words)
    sentence = "This resumes from the newest valid checkpoint, in the same folder"
    if isinstance(last, int) and 0 < last <= done:
        words = [*without(words, "--trainer.max_steps"), "--trainer.max_steps", str(2 * done)]
        sentence = "The run has done all its steps; this trains as many again"
    return sentence, f"{RUN_ID}={shlex.quote(history.folder.name)} {shlex.join(words)}"
