"""The commands that a finished run can be continued with: printed at its end, and in its report.

Each is typed with the run's own folder and needs only what the run has written."""

import shlex
from pathlib import Path

from ...metric_names import parts_of
from ...project import program
from ..history import History
from . import expected

EXPORTED = Path("export", "model")  # in a run's folder
TEXT = "data.tokenizer"  # a key of runs of language models, which can be served


def next_commands(history: History) -> dict[str, str]:
    """Returns what each command does, and the command."""
    found: dict[str, str] = {}
    run = _typed(history.folder)
    file = _typed(history.folder / "config.yaml")
    exported = _typed(history.folder / EXPORTED)
    if any(history.folder.glob("events.out.tfevents.*")):
        found["TensorBoard"] = f"tensorboard --logdir {_typed(history.folder.parent)}"
    if not _has_checkpoint(history):
        return found
    config = f"--config {file} --ckpt_path last"
    if history.key(TEXT) is not None:
        found["evaluate"] = f"{program('evaluate')} {run} --baseline start"
        found["generate"] = f"{program('predict')} {config}"
        found["export"] = f"{program('export')} {run} --output {exported}"
        found["serve"] = f"{program('serve')} {run}"
    elif any(parts_of(name).stage == "validation" for name in history.metrics.names):
        found["evaluate"] = f"{program('evaluate')} {run} --baseline start"
    last = expected.last_step(history)
    max_steps = history.key("trainer.max_steps")
    max_epochs = history.key("trainer.max_epochs")
    if last and max_steps is not None and max_steps > 0:
        more = f"--trainer.max_steps {2 * last}"
    else:
        more = f"--trainer.max_epochs {2 * int(max_epochs if max_epochs else 1)}"
    found["continue training"] = f"{program('fit')} {config} {more}"
    return found


def _typed(folder: Path) -> str:
    """Returns the folder as a user in the current one types it, quoted for a shell."""
    here = Path.cwd()
    if folder.is_relative_to(here):
        folder = folder.relative_to(here)
    text = str(folder)
    if text.startswith("-"):  # else a flag
        text = f"./{text}"
    return shlex.quote(text)


def _has_checkpoint(history: History) -> bool:
    given = history.key("last_checkpoint.dirpath")
    if not given:
        given = "{run}/checkpoints"
    folder = Path(str(given).replace("{run}", str(history.folder)))
    return any(folder.glob("*.ckpt"))
