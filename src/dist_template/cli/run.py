"""Run folders: names, placeholders, the newest run and its checkpoints.

<root>/<name>/<run id>/   config.yaml environment.json facts.json metrics.jsonl checkpoints/ …"""

import errno
import json
import os
import re
import secrets
import shutil
import tempfile
import time
from dataclasses import dataclass, fields, is_dataclass, make_dataclass
from pathlib import Path
from typing import Any

import psutil

from ..checkpoint import manifest
from ..checkpoint.formats import format_of
from ..cluster.launch import Variable
from ..errors import InputError
from ..foreign import refuse_links
from ..observe.history.run import PLACEHOLDER, replaced
from ..plugins import PluginError, contained, note, registered
from ..progress import running
from ..ranges import Folder

__all__ = ["verified_checkpoint"]

RUN_KEYS = "dist_template.run_keys"  # dataclasses, whose fields are further keys of `run`
CONTROL = re.compile("[\0-\x1f\x7f]")  # in a folder's name it would end a script's line


@dataclass
class RunConfig:
    """Where run folders are.

    Args:
        name: Name of the experiment; `last` is the newest run of this name.
        root: Folder of all runs."""

    name: str = "default"
    root: Folder = "runs"

    def check(self, writes: bool) -> None:
        """Checks the name, and if the verb `writes`, that the folder can be made; leaves nothing on
        the disk. Raises InputError if the name leaves the root, or the folder cannot be made or
        written."""
        name, has_control = Path(self.name), CONTROL.search(self.root + self.name)
        if not name.parts or name.is_absolute() or ".." in name.parts or has_control:
            raise InputError(
                f"run.name {self.name!r} is not a folder below run.root {self.root!r}: give a name"
                " such as `baseline` or `sweep/lr-3e-4`, and the folder of all runs as run.root"
            )
        for key, text in (("run.name", self.name), ("run.root", self.root)):
            if PLACEHOLDER in text:  # in paths it would be replaced by itself
                raise InputError(
                    f"{key} {text!r} has {PLACEHOLDER}, which stands for the run's own folder in"
                    " other keys; give a name without it"
                )
        if writes:
            check_writable("run.root", self.root, self.parent)

    @property
    def parent(self) -> Path:
        return Path(self.root) / self.name


def run_of(settings: Any) -> RunConfig:
    """Returns the name and the root of a configuration's run."""
    return RunConfig(settings.run.name, settings.run.root)


def run_section() -> type:
    """Returns RunConfig with the keys that entry points of RUN_KEYS add. A package's that is no
    dataclass, has a key without a default, or has one that is taken, is skipped with a line."""
    bases: list[Any] = [RunConfig]
    for plugin in registered(RUN_KEYS).values():
        try:
            kind = plugin.load()
            with contained(plugin, "cannot be configured"):
                _check_keys(kind, taken={each.name for base in bases for each in fields(base)})
        except PluginError as error:
            note(f"{error}; it is skipped")
            continue
        bases.append(kind)
    # dataclasses collect fields from the last base to the first
    title = str(RunConfig.__doc__).partition("\n")[0]
    return make_dataclass(
        "RunConfig", [], bases=tuple(reversed(bases)), namespace={"__doc__": title}
    )


def _check_keys(kind: Any, taken: set[str]) -> None:
    """Raises TypeError if `kind` is no dataclass that can be a base class of the section."""
    if not (isinstance(kind, type) and is_dataclass(kind)):
        raise TypeError(f"{kind!r:.100} is no dataclass")
    kind()  # each key needs a default
    if both := taken & {each.name for each in fields(kind)}:
        raise TypeError(f"run.{min(both)} is a key already")


def check_writable(key: str, given: str, folder: Path) -> None:
    """Makes and removes a temporary folder in `folder`, or in its nearest existing parent. Raises
    InputError if it cannot be made: no permission, a file in its place, no space, no inode."""
    existing = next(one for one in (folder, *folder.absolute().parents) if os.path.lexists(one))
    try:
        for name in folder.parts:
            (existing / name).exists()  # raises if it is too long
        tempfile.TemporaryDirectory(prefix=".writable-", dir=existing).cleanup()
        if not shutil.disk_usage(existing).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        raise InputError(
            f"{key} {given!r} cannot be written: {existing}: {error.strerror}; give another folder"
        ) from error


def new_run(settings: Any) -> Path:
    """Returns a new run folder, the same on every rank; it is created at the first write.

    A launcher or scheduler sets the run's id, so that the folder stays the same after a restart;
    the ranks that torchrun, accelerate or deepspeed starts on one node take their launcher's start,
    on several nodes rank 0's.

    Raises InputError if the variable DIST_RUN_ID is not the name of a folder."""
    run_id = os.environ.get(Variable.RUN_ID) or os.environ.get("SLURM_JOB_ID")
    if not run_id:
        run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        size = os.environ.get("WORLD_SIZE", "1")
        if "RANK" in os.environ and size != "1":
            if size == (os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or size):
                launcher = psutil.Process(os.getppid())
                started = time.localtime(launcher.create_time())
                run_id = f"{time.strftime('%Y%m%d-%H%M%S', started)}-{launcher.pid}"
            else:
                run_id = _agreed(run_id, settings)
    is_too_long = len(os.fsencode(run_id)) > 255  # bytes, in the file systems of Linux and macOS
    has_codes = CONTROL.search(run_id) or PLACEHOLDER in run_id or not run_id.strip()
    if Path(run_id).name != run_id or run_id == ".." or is_too_long or has_codes:
        raise InputError(
            f"{Variable.RUN_ID} is {run_id!r}; give the name of one folder, as baseline-1"
        )
    os.environ[Variable.RUN_ID] = run_id
    return run_of(settings).parent / run_id


def _agreed(run_id: str, settings: Any) -> str:
    """Returns rank 0's id on all nodes of a launcher that sets none, such as the deepspeed
    launcher's hostfile. Collective."""
    from ..cluster.rendezvous import agreed  # imports torch

    if not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        raise InputError(
            f"several nodes need {Variable.RUN_ID}: give it the same new name on every node"
        )
    return agreed("run id", run_id, settings.watchdog.start_timeout_s)


def choose_run(settings: Any, verb: str | None) -> tuple[Path, str | None, str]:
    """Returns the run folder, the checkpoint to load or None, and a sentence for the user, which
    may be empty.

    `verb` is one of Lightning's; None: a tool. `last`, and an evaluation of a run's weights, use an
    existing folder. As in Lightning, a training with `last` and without a checkpoint starts anew:
    one command starts a training and continues it.

    Raises InputError if there is no such checkpoint, or all of the run are damaged."""
    given, evaluates = settings.get("ckpt_path"), verb not in (None, "fit")
    if evaluates and given == "start":
        settings.ckpt_path = None
        return new_run(settings), None, f"{verb}: the weights are the initial weights of training"
    if (
        evaluates
        and not given
        and (not _of_model(settings, "pretrained") or _last_writes(settings))
    ):
        given = "best or last"
    if given is not None and not given.strip():
        raise InputError("--ckpt_path is empty: give a checkpoint, `last` or `best`, or null")
    checkpoint, message, run = given, "", None
    if (
        given == "last"
        and not evaluates
        and not any(manifest.found(folder) for _, folder in _folders(settings))
    ):
        parent = run_of(settings).parent
        message = f"there is no checkpoint under {parent}/*/checkpoints: training starts at step 0"
        settings.ckpt_path = checkpoint = given = None
    if given in ("last", "best", "best or last"):
        newest, path = newest_checkpoint(given, settings)
        checkpoint = str(path)
        if evaluates or given == "last":
            run = newest
        if not evaluates and given == "last":
            os.environ[Variable.RUN_ID] = newest.name  # for the sentence of preemption.py
        if given != "last":
            message = f"{verb}: the weights come from {checkpoint}"
    elif evaluates and not given:
        message = f"{verb}: the weights come from model.pretrained; run.name has no checkpoint"
    if run is None:
        run = new_run(settings)
    if run.is_dir():
        refuse_links(run)  # what this run writes would change other files
    folder = Path(replaced(settings.last_checkpoint.dirpath, PLACEHOLDER, str(run)))
    if verb == "fit" and given != "last" and manifest.found(folder):
        if manifest.newest(folder) is None:  # starting again would hide it
            raise InputError(
                f"the checkpoints of this run, in {folder}, are all damaged: {_damages(folder)};"
                " move the folder away, or set another run.name"
            )
        start = f", not from {checkpoint}, with which it started" if given else ""
        message = f"{run} has checkpoints: the run resumes from its newest{start}"
        message += " (another run.name starts a new run)"
        checkpoint = str(folder)
    return run, checkpoint, message


def _of_model(settings: Any, key: str) -> Any:
    """Returns an argument of the module; None if its class has none."""
    return (settings.get("model") or {}).get(key)


def _last_writes(settings: Any) -> dict[Path, float]:
    """Returns {run: time of its newest checkpoint} of the runs of run.name that have one."""
    found: dict[Path, float] = {}
    for run, folder in _folders(settings):
        if path := manifest.newest(folder):
            found[run] = manifest.read(path)["time"]
    return found


def _folders(settings: Any) -> list[tuple[Path, Path]]:
    """Returns the runs of run.name, each with its folder of checkpoints."""
    runs = sorted(run_of(settings).parent.glob("*"))
    path = settings.last_checkpoint.dirpath
    return [(run, Path(replaced(path, PLACEHOLDER, str(run)))) for run in runs]


def newest_checkpoint(which: str, settings: Any) -> tuple[Path, Path]:
    """Returns the run of run.name with the newest checkpoint, and its best or the folder of all.

    `which` is `best`, `last` or `best or last`.

    Raises InputError if no run has a valid checkpoint, or the newest has no best one."""
    written = _last_writes(settings)
    if not written:
        parent = run_of(settings).parent
        where = "or set run.name and run.root to where the run is"
        raise InputError(
            f"there is no checkpoint under {parent}/*/checkpoints; train first, {where}"
        )
    run = max(written, key=lambda run: written[run])
    last, best = settings.last_checkpoint, settings.best_checkpoint
    ranked = manifest.ranked(Path(replaced(best.dirpath, PLACEHOLDER, str(run))), best.mode)
    if which == "best" and not ranked:
        raise InputError(
            f"{run} has no best-*.ckpt: give `last`, or train with best_checkpoint.keep 1 and"
            " validations"
        )
    if ranked and which != "last":
        return run, ranked[0]
    return run, Path(replaced(last.dirpath, PLACEHOLDER, str(run)))


def check_checkpoint(path: Path, key: str = "--ckpt_path") -> None:
    """Checks that `path` can be a checkpoint; its content is verified when it is loaded. Raises
    InputError if it does not exist, is damaged, or holds no checkpoint."""
    given = f"{key} {str(path)!r}"
    if not os.path.exists(path):  # Path.exists raises for a name that is too long
        raise InputError(
            f"{given} does not exist; give a checkpoint, or `last` or `best` of the newest run"
        )
    if (found := manifest.found(path)) and all(manifest.torn(one) for one in found):
        raise InputError(f"{given} holds damaged checkpoints only: {_damages(path)}; give another")
    if not found and manifest.is_ours(path) and (why := manifest.torn(path)):
        raise InputError(
            f"{given} is damaged: {why}; give another, or `last` for the newest valid one"
        )
    if (
        not found and format_of(path) is None and not manifest.is_ours(path)
    ):  # its files may be in a store
        inside = path / "checkpoints"
        hint = inside if manifest.found(inside) else "another"
        raise InputError(f"{given} is not a checkpoint, or is incomplete; give {hint}, or `last`")


def verified_checkpoint(given: str | Path, key: str, settings: Any = None) -> Path:
    """Returns the checkpoint at `given`, the newest valid one of a folder, with verified files.
    With `settings`, it may be `last` or `best` of the newest run. Raises InputError if it does not
    exist or is damaged."""
    path = Path(given)
    if settings is not None and given in ("last", "best"):
        path = newest_checkpoint(str(given), settings)[1]
    check_checkpoint(path, key)
    with running(f"verifying {path}"):
        return manifest.agreed(path)


def _damages(folder: Path) -> str:
    return ", ".join(f"{path.name} ({manifest.torn(path)})" for path in manifest.found(folder))


def write_predictions(predictions: list[Any], path: Path) -> None:
    """Writes one JSON value per line; prints generated texts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for prediction in predictions:  # tensors and arrays have `tolist`
            file.write(
                json.dumps(prediction, ensure_ascii=False, default=lambda value: value.tolist())
                + "\n"
            )
            if isinstance(prediction, dict) and {"prompt", "continuation"} <= prediction.keys():
                prompt = prediction["prompt"]
                print(f"--- {prompt}\n{prompt}{prediction['continuation']}\n")
    print(f"written to {path}")
