"""`promote`: evaluates a run, exports its model, and registers the export as a new version."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from ....errors import Ended, Exit, InputError, reason, require
from ....project import Flags, Project, program
from ...diagnose.command import newest
from ..evaluate.models import run_verb
from .registry import Registry

AGAINST_START = "eval/loss better"
AGAINST_LATEST = "eval/loss not worse by 0.01"  # nats per token


def main(argv: list[str], project: Project) -> None:
    """Promotes the run in `argv`, or rolls back.

    Raises:
        InputError: the run, the registry or a flag cannot be used.
        Ended: a requirement does not hold, or the export differs from the trained model.
    """
    given = parser().parse_args(argv[1:])
    if "" in (given.registry, given.wandb):
        raise InputError("--registry or --wandb is empty: give a name, or omit the flag")
    registry = Registry(Path(given.registry))
    if given.roll_back:
        withdrawn, latest = registry.roll_back()
        print(f"{withdrawn.name} is withdrawn; {registry.folder / 'latest'} is {latest.name}")
        return
    if not given.run:
        raise InputError("promote needs a run: give runs/<name>/<id>, or --roll_back")
    if given.wandb:
        require("wandb", "--wandb")
    run, latest = newest(Path(given.run)), registry.latest
    baseline = given.baseline or str(latest or "start")
    required = given.require or [AGAINST_LATEST if latest else AGAINST_START]
    exported = registry.folder / f".{run.name}.{os.getpid()}"
    try:
        registry.folder.mkdir(parents=True, exist_ok=True)
        flags = ["--baseline", baseline, "--split", given.split, "--name", "promotion"]
        flags += [f"--require={each}" for each in required]
        flags += ["--config", given.config] if given.config else []
        _start(project, "evaluate", str(run), *flags)
        _start(project, "export", str(run), "--to", given.to, "--output", str(exported))
        figures = json.loads((run / "evaluation" / "promotion.json").read_text(encoding="utf-8"))
        for texts in "best", "worst":
            figures.pop(texts, None)
        known = {"run": str(run), "baseline": baseline, "required": required, "figures": figures}
        version = registry.add(exported, known)
    except OSError as error:
        raise InputError(f"--registry {given.registry!r}: {reason(error)}; give another") from error
    finally:
        shutil.rmtree(exported, ignore_errors=True)
    print(f"{version} is the latest version of {registry.folder}")
    if given.wandb:
        print(_upload(version, registry.folder.name, given.wandb))


def parser() -> Flags:
    made = Flags("promote", description=__doc__)
    made.add_argument("run", nargs="?", help="a run's folder, runs/<name>/<id>")
    made.add_argument("--registry", default="registry", help="folder of the versions")
    default = "default: the latest version, or the run's weights before training"
    made.add_argument("--baseline", help=f"as in evaluate; {default}")
    default = f"{AGAINST_LATEST!r}; without an earlier version {AGAINST_START!r}"
    made.add_argument("--require", action="append", help=f"as in evaluate; default: {default}")
    made.add_argument("--split", choices=("validation", "test"), default="test")
    made.add_argument("--config", help="of evaluate: YAML with tasks and your own metric")
    made.add_argument("--to", choices=("hf", "onnx"), default="hf", help="form of the export")
    made.add_argument("--wandb", metavar="PROJECT", help="also log the version as a W&B artifact")
    again = "withdraw the latest version; the one before it is served again"
    made.add_argument("--roll_back", action="store_true", help=again)
    return made


def _start(project: Project, verb: str, *flags: str) -> None:
    """Runs a verb in processes of its own, after a line with its command.

    Raises:
        Ended: it has failed, and has said why.
    """
    print(f"{program(verb)} {' '.join(flags)}", flush=True)
    if ended := run_verb(project, [verb, *flags]):
        code = Exit(ended) if ended in [*Exit] else Exit.FAILED
        raise Ended(code, f"nothing is promoted: {verb} ended with code {ended}")


def _upload(version: Path, name: str, project: str) -> str:
    """Logs the folder of a version as a W&B artifact; returns where it is, in words."""
    import wandb

    with wandb.init(project=project, job_type="promote") as run:
        artifact = wandb.Artifact(name, type="model")
        artifact.add_dir(str(version))
        run.log_artifact(artifact, aliases=["latest", version.name])
    return f"W&B has it as {name}:{version.name} of the project {project}"
