"""`launch`: renders a run's files for a launcher or scheduler, and submits them.

launch --config FILE… --on TARGET [--dry-run]    a new run; RUN/launch has its files
launch status|logs|stop RUN                      RUN is a run's folder, runs/<name>/<id>
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...cluster.launch import RUN_ID
from ...errors import Ended, InputError
from ...project import Project, program
from .job import Job, describe
from .targets import ON_HOSTS, TARGETS, target

FOLDER, RECORD = "launch", "launch.json"
VERBS = ("fit", "validate", "test", "predict", "prepare")


def main(argv: list[str], project: Project) -> None:
    """Renders and submits a run, or asks about a submitted one.

    Raises:
        InputError: the configuration, the machines or the scheduler refuse it.
        Ended: a launcher in the foreground has ended with another code than 0.
    """
    if argv[1:2] and argv[1] in ("status", "logs", "stop"):
        _ask(*argv[1:])
        return
    own, flags = parser().parse_known_args(argv[1:])
    to = target(own.on)
    job = describe(project, own.verb, flags, on_hosts=own.on in ON_HOSTS)
    folder = write(job, own.on, to.render(job))
    for file in sorted(folder.iterdir()):
        print(f"written to {file}", flush=True)
        if own.dry_run and file.name != RECORD:
            print(file.read_text(encoding="utf-8"))
    if own.dry_run:
        return
    try:
        identifier = to.submit(job, folder)
    except Ended as ended:
        again = f"{RUN_ID}={job.run_id} and the same command resume the run"
        raise Ended(ended.code, f"launch: {ended}; {again}") from ended
    if identifier:
        record = _read(folder)
        _write_record(folder, {**record, "id": identifier})
        print(f"{own.on} has it as {identifier}: {program('launch')} status {job.run}")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        program("launch"),
        usage=f"{program('launch')} --config FILE… --on TARGET [--dry-run]\n"
        f"       {program('launch')} status|logs|stop RUN",
        description="Renders a run's files for a launcher or scheduler, and submits them.",
        epilog=f"Every other key is fit's, `cluster` too: see `{program('fit')} --help`.",
        allow_abbrev=False,
    )
    made.add_argument("--on", choices=TARGETS, required=True, help="launcher or scheduler")
    made.add_argument("--verb", choices=VERBS, default="fit", help="what is started (fit)")
    dry = "write and print the files of RUN/launch; submit nothing"
    made.add_argument("--dry-run", "--dry_run", action="store_true", help=dry)
    return made


def write(job: Job, on: str, files: dict[str, str]) -> Path:
    """Writes RUN/launch with all files at once; an earlier launch's becomes RUN/launch.1, …"""
    folder = job.run / FOLDER
    temporary = job.run / f".{FOLDER}.{os.getpid()}"
    temporary.mkdir(parents=True)
    for name, text in files.items():
        (temporary / name).write_text(text, encoding="utf-8")
        if name.endswith(".sh"):
            (temporary / name).chmod(0o755)
    record = {"on": on, "id": "", "hosts": job.hosts, "ssh": job.site.ssh}
    described = {"command": shlex.join(job.command), "cluster": asdict(job.site)}
    _write_record(temporary, {**record, **described})
    if folder.exists():
        earlier = len(list(job.run.glob(f"{FOLDER}.*"))) + 1
        folder.rename(job.run / f"{FOLDER}.{earlier}")
    temporary.rename(folder)
    return folder


def _write_record(folder: Path, record: dict[str, Any]) -> None:
    (folder / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _read(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except OSError as error:
        sentence = f"{folder.parent} has no {FOLDER}/{RECORD}; give a run that `launch` has started"
        raise InputError(sentence) from error


def _ask(what: str, *runs: str) -> None:
    if len(runs) != 1:
        raise InputError(f"launch {what} takes one run, as runs/<name>/<id>")
    folder = Path(runs[0]).absolute() / FOLDER
    record = _read(folder)
    print(getattr(target(record["on"]), what)(record, folder))
