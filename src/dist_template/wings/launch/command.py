"""`launch`: renders a run's files for a launcher or scheduler, and submits them.

launch --config FILE… --on TARGET [--dry-run]    a new run; RUN/launch has its files
launch status|logs|stop RUN                      RUN is a run's folder, runs/<name>/<id>
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import cast

from ...cluster.launch import Variable
from ...cluster.redaction import redacted_command, redacted_environment
from ...errors import Ended, InputError
from ...plugins import registered
from ...project import Flags, Project, program
from ...records import read_mapping, write_atomically
from .job import Job, describe
from .targets import GROUP, Record, Target, target

RECORD = "launch.json"
VERBS = ("fit", "validate", "test", "predict", "prepare")


def main(argv: list[str], project: Project) -> None:
    """Renders and submits a run, or asks about a submitted one.

    Raises:
        InputError: the configuration, the machines or the scheduler refuse it.
        Ended: a launcher in the foreground has ended with another code than 0.
    """
    if argv[1:2] and argv[1] in ("status", "logs", "stop"):
        folder = Path(" ".join(argv[2:])).absolute() / "launch"
        record = _read(folder)
        print(getattr(target(record["on"]), argv[1])(record, folder))
        return
    given, to, flags = parse(argv[1:])
    job = describe(project, given.verb, flags, to.on_hosts)
    files = to.render(job)
    if given.dry_run:
        return show(job, to)
    require_end(job)
    folder = write(job, given.on, files)
    for file in sorted(folder.iterdir()):
        print(f"written to {file}", flush=True)
    try:
        identifier = to.submit(job, folder)
    except Ended as ended:
        again = f"{Variable.RUN_ID}={job.run_id} and the same command resume the run"
        raise Ended(ended.code, f"launch: {ended}; {again}") from ended
    except InputError:
        withdraw(job)
        raise
    if identifier:
        record = {**_read(folder), "id": identifier}
        write_atomically(folder / RECORD, json.dumps(record, indent=2))
        print(f"{given.on} has it as {identifier}: {program('launch')} status {job.run}")


def parse(argv: list[str]) -> tuple[Namespace, Target, list[str]]:
    """Returns the flags of `launch`, the target with its own flags, and the flags for the verb."""
    parser = Flags(
        "launch",
        usage=f"{program('launch')} --config FILE… --on TARGET [--dry-run]\n"
        f"       {program('launch')} status|logs|stop RUN",
        description="Renders a run's files for a launcher or scheduler, and submits them.",
        epilog=f"Every other key is fit's, `cluster` too: see `{program('fit')} --help`.",
    )
    what = "launcher or scheduler"
    parser.add_argument("--on", "--target", choices=[*registered(GROUP)], required=True, help=what)
    parser.add_argument("--verb", choices=VERBS, default="fit", help="what is started (fit)")
    dry = "print the files and the command; write and submit nothing"
    parser.add_argument("--dry-run", "--dry_run", action="store_true", help=dry)
    on = Flags("launch", add_help=False)
    on.add_argument("--on", "--target")
    name = on.parse_known_args(argv)[0].on
    if name is None:
        parser.parse_args(argv)  # prints the help, or raises InputError
    try:
        to = target(name)
    except InputError as error:
        parser.error(str(error))
    to.add_flags(parser)
    to.flags, flags = parser.parse_known_args(argv)
    return to.flags, to, flags


def show(job: Job, to: Target) -> None:
    """Prints the files and the commands of a launch, without secrets; it writes nothing."""
    site = replace(job.site, environment=redacted_environment(job.site.environment))
    shown = replace(job, site=site, flags=redacted_command(job.flags))
    for name, text in to.render(shown).items():
        print(f"# {job.files / name}\n{text}")
    for words in to.commands(shown):
        print(f"# would run: {shlex.join(words)}", flush=True)


def require_end(job: Job) -> None:
    """Raises InputError if an earlier launch of the run is active: its files must stay in place.

    A job that depends on another one, which may be that launch, only waits for it."""
    if "dependency" in job.site.options:
        return
    try:
        record = _read(job.files)
        is_active = target(record["on"]).is_active(record, job.files)
    except InputError:  # no earlier launch, or nothing answers about it
        return
    if is_active:
        what = f"`{program('launch')} stop {job.run}` ends it; or set another {Variable.RUN_ID}"
        what += " or run.name"
        raise InputError(f"{job.run} is running, as `launch --on {record['on']}` has started it: {what}")


def write(job: Job, on: str, files: dict[str, str]) -> Path:
    """Writes RUN/launch with all files at once; an earlier launch's becomes RUN/launch.1, …"""
    temporary = job.run / f".launch.{os.getpid()}"
    temporary.mkdir(mode=0o700, parents=True)  # cluster.environment may have secrets
    for name, text in files.items():
        (temporary / name).write_text(text, encoding="utf-8")
        (temporary / name).chmod(0o700 if name.endswith(".sh") else 0o600)
    record = Record(on=on, id="", hosts=job.hosts, ssh=job.site.ssh)
    write_atomically(temporary / RECORD, json.dumps(record, indent=2))
    if job.files.exists():
        job.files.rename(job.run / f"launch.{_newest(job) + 1}")
    return temporary.rename(job.files)


def withdraw(job: Job) -> None:
    """Removes the files of a job that was refused, and restores an earlier launch's."""
    shutil.rmtree(job.files)
    if newest := _newest(job):
        job.run.joinpath(f"launch.{newest}").rename(job.files)
    if not any(job.run.iterdir()):
        job.run.rmdir()


def _newest(job: Job) -> int:
    """Returns the number of the newest earlier launch; 0 without one. Any may be deleted."""
    suffixes = [folder.suffix[1:] for folder in job.run.glob("launch.*")]
    return max((int(suffix) for suffix in suffixes if suffix.isdecimal()), default=0)


def _read(folder: Path) -> Record:
    where = "give a run that `launch` has started, as runs/<name>/<id>"
    return cast(Record, read_mapping(folder / RECORD, where))
