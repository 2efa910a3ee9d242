"""`launch`: renders a run's files for a launcher or scheduler, and submits them.

launch --config FILE… --on TARGET [--dry-run]    a new run; RUN/launch has its files
launch status|logs|stop RUN [--config FILE…]     RUN is a run's folder, runs/<name>/<id>

A new run: job.py reads the configuration and checks it as `fit` does, the target renders the files
and checks its nodes, then the files are written and the job is submitted. launch.json records the
target, the hosts and the scheduler's id, for the other verbs.

What status and stop run on the hosts comes from the configuration and from flags, never from RUN:
somebody else may have written it."""

import json
import re
import shlex
import shutil
from argparse import Namespace
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ...cli import config_file
from ...cluster.launch import Variable
from ...cluster.redaction import redacted_command
from ...cluster.site import Site, check_host
from ...errors import Ended, InputError, shortened
from ...foreign import refuse_links
from ...plugins import registered
from ...project import Flags, Project, program
from ...records import read_mapping, write_atomically
from .job import Job, describe
from .targets import GROUP, Record, Target, target

RECORD = "launch.json"
JOB_ID = r"(?:[\w.][\w.:/@\[\]-]*)?"  # "" for a launcher's; it never starts as a flag does
VERBS = ("fit", "validate", "test", "predict", "prepare")


def main(argv: list[str], project: Project) -> None:
    """Renders and submits a run, or asks about a submitted one. Raises Ended if it ends in an
    error."""
    arguments = argv[1:]
    if arguments and arguments[0] in ("status", "logs", "stop"):
        return ask_target(arguments[0], arguments[1:])
    given, flags = parse(arguments)
    chosen = target(given.on)
    job = describe(project, given.verb, flags, chosen.on_hosts)
    _check_hostfile(job, given.on, chosen)
    files = chosen.render(job)
    if job.interval:
        print(job.interval, flush=True)
    if given.dry_run:
        return show(job, chosen)
    chosen.check(job)
    record = write(job, given.on, files)
    try:
        record["id"] = chosen.submit(job)
    except Ended as ended:
        again = f"{Variable.RUN_ID}={shlex.quote(job.run.name)} and the same command resume the run"
        raise Ended(ended.code, f"launch: {ended}; {again}") from ended
    except InputError:  # a scheduler refuses it
        shutil.rmtree(job.files)
        with suppress(OSError):  # an earlier launch has written more
            job.run.rmdir()
        raise
    if record["id"]:
        write_atomically(job.files / RECORD, json.dumps(record, indent=2))
        typed = shlex.quote(str(job.run))
        print(f"{given.on} has it as {record['id']}: {program('launch')} status {typed}")


def ask_target(question: str, argv: list[str]) -> None:
    """Prints the answer of a submitted run's target to `status`, `logs` or `stop`."""
    asked = parse_asked(question, argv)
    folder = asked.run.absolute() / "launch"
    record = read_record(folder)
    record["ssh"] = ssh_of(asked, record)
    answer = getattr(target(record["on"]), question)
    print(answer(record, folder))


def _check_hostfile(job: Job, on: str, chosen: Target) -> None:
    """Raises InputError if the target does not read the hostfile, or slots of a host."""
    if job.site.hostfile and not chosen.on_hosts:
        raise InputError(f"--on {on} chooses its nodes itself: remove cluster.hostfile")
    if ":" in job.site.include + job.site.exclude and not chosen.takes_slots:
        raise InputError(
            f"--on {on} uses all devices of a host: name hosts without slots in cluster.include and"
            " cluster.exclude, or take --on deepspeed"
        )


def parse(argv: list[str]) -> tuple[Namespace, list[str]]:
    """Returns the flags of `launch`, and the flags for the verb."""
    parser = Flags(
        "launch",
        usage=f"{program('launch')} --config FILE… --on TARGET [--dry-run]\n"
        f"       {program('launch')} status|logs|stop RUN [--config FILE…]",
        epilog=f"Every other key is fit's, `cluster` too: see `{program('fit')} --help`.",
    )
    parser.add_argument(
        "--on", choices=sorted(registered(GROUP)), required=True, help="launcher or scheduler"
    )
    parser.add_argument("--verb", choices=VERBS, default="fit", help="what is started (fit)")
    parser.add_argument(
        "--dry-run", "--dry_run", action="store_true", help="print files and command, no more"
    )
    return parser.parse_known_args(argv)


def parse_asked(question: str, argv: list[str]) -> Namespace:
    """Returns the flags of `launch status`, `logs` and `stop`."""
    parser = Flags(f"launch {question}")
    parser.add_argument("run", type=Path, help="a run's folder, runs/<name>/<id>")
    parser.add_argument(
        "-c", "--config", action="append", default=[], help="as of the launch: for cluster.ssh"
    )
    parser.add_argument("--cluster.ssh", dest="ssh", help="command that reaches a host")
    return parser.parse_args(argv)


def ssh_of(asked: Namespace, record: Record) -> str:
    """Returns the command that reaches a host: of the flags, else of the last configuration that
    has it, else ssh. Raises InputError if the run was launched with another, which is not taken
    from its folder."""
    ssh = Site.ssh
    for file in asked.config:
        cluster = config_file.read(file).get("cluster")
        if isinstance(cluster, dict):
            ssh = str(cluster.get("ssh", ssh))
    if asked.ssh:
        ssh = asked.ssh
    if record["hosts"] and record.get("ssh", ssh) != ssh:
        given = shortened(repr(record["ssh"]), 200)
        raise InputError(
            f"{asked.run} says that its hosts are reached by {given}, and the command is {ssh!r}:"
            " give the --config of the launch, or --cluster.ssh; neither is taken from a run"
        )
    return ssh


def show(job: Job, chosen: Target) -> None:
    """Prints the files and the commands of a launch, without secrets; it writes nothing."""
    shown = replace(job, site=job.site.without_secrets(), flags=redacted_command(job.flags))
    for name, text in chosen.render(shown).items():
        print(f"# {job.files / name}\n{text}")
    for words in chosen.commands(shown):
        print(f"# would run: {shlex.join(words)}", flush=True)


def write(job: Job, on: str, files: dict[str, str]) -> Record:
    """Writes RUN/launch in place of an earlier launch's files, and prints their names."""
    job.files.mkdir(mode=0o700, parents=True, exist_ok=True)  # cluster.environment may have secrets
    for name, text in files.items():
        path = job.files / name
        path.write_text(text, encoding="utf-8")
        path.chmod(0o700 if name.endswith(".sh") else 0o600)
        print(f"written to {path}", flush=True)
    record = {"on": on, "id": "", "hosts": job.hosts, "ssh": job.site.ssh}
    write_atomically(job.files / RECORD, json.dumps(record, indent=2))
    return record


def read_record(folder: Path) -> Record:
    """Returns what RUN/launch/launch.json says, with the types and characters that `write` gives
    it. Raises InputError: another program, or a stranger, has written it."""
    cure = "give a run that `launch` has started, as runs/<name>/<id>"
    if folder.is_dir():
        refuse_links(folder.parent)
    path = folder / RECORD
    record = read_mapping(path, cure)
    hosts = record.get("hosts", [])
    if not isinstance(record.get("on"), str) or not isinstance(hosts, list):
        raise InputError(f"{path} has no target and list of hosts: {cure}")
    for host in hosts:
        # A host that is no text is refused by what it prints.
        check_host(host if isinstance(host, str) else repr(host), str(path))
    job_id = record.get("id") or ""
    if not isinstance(job_id, str) or not re.fullmatch(JOB_ID, job_id):
        raise InputError(
            f"{path} has the id {shortened(repr(job_id), 100)}, which is no job's: {cure}"
        )
    return record | {"hosts": hosts, "id": job_id}
