"""A job: the command that runs on each node, its run's folder, and its size."""

from __future__ import annotations

import re
import shlex
import sys
import zlib
from dataclasses import dataclass, field
from pathlib import Path

from ...cluster.launch import Variable
from ...cluster.site import Site
from ...errors import InputError, reason, require
from ...project import Project

PORTS = range(20_000, 30_000)  # below those that Linux assigns to clients


@dataclass(frozen=True)
class Job:
    """Job that a target renders and starts: `verb` of `package` with `flags`, on equal nodes.

    Args:
        run: The run's folder.
        devices: Processes of each node.
        hosts: The nodes' names; [] for this machine, or if a scheduler chooses the nodes.
        accelerator: cpu, cuda, …
        data: The data module.
        folder: The project's folder; as `python`, the same path on all nodes.
    """

    package: str
    verb: str
    flags: list[str]
    site: Site
    run: Path
    nodes: int
    devices: int
    hosts: list[str]
    accelerator: str
    data: object
    folder: Path = field(default_factory=Path.cwd)
    python: str = sys.executable

    @property
    def run_id(self) -> str:
        return self.run.name

    @property
    def files(self) -> Path:
        """The folder of the rendered files."""
        return self.run / "launch"

    @property
    def master(self) -> str:
        """Address of the first node for the others."""
        return self.site.master or (self.hosts or ["127.0.0.1"])[0].rpartition("@")[2]

    @property
    def port(self) -> int:
        """TCP port of the rendezvous on the first node; a run keeps it."""
        return self.site.port or PORTS[zlib.crc32(self.run_id.encode()) % len(PORTS)]

    @property
    def arguments(self) -> list[str]:
        """The verb and its flags; the job's sizes come last, so that they override a --config."""
        sizes = [f"--trainer.devices={self.devices}", f"--trainer.num_nodes={self.nodes}"]
        return [self.verb, *self.flags, *sizes]

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of every process."""
        return {Variable.RUN_ID: self.run_id, **self.site.environment}

    def require_data(self) -> None:
        """Raises InputError without prepared data; where nodes share this machine's disks."""
        if self.verb != "prepare" and (require_data := getattr(self.data, "require", None)):
            require_data()


def exports(environment: dict[str, str]) -> str:
    """Returns lines of a shell script that set variables."""
    return "\n".join(f"export {key}={shlex.quote(text)}" for key, text in environment.items())


def describe(project: Project, verb: str, flags: list[str], on_hosts: bool) -> Job:
    """Reads a configuration, and makes the checks of `fit` for the machines that it describes.

    `on_hosts`: the target starts the nodes that `cluster` names; else a scheduler chooses as many.

    Raises:
        InputError: the configuration cannot be run there.
    """
    from ...cli.config_file import check
    from ...cli.fit import WithoutTrainer
    from ...cli.limits import Machine, proven, violations
    from ..rehearse.command import model_config

    known = "fit" if verb == "prepare" else verb
    check([known, *flags])
    arguments = [known, *flags, "--trainer.logger=false"]
    cli = WithoutTrainer(project, arguments, run=True)
    settings = cli.config_init[known]
    site: Site = settings.cluster
    trainer, data, slots = vars(settings.trainer), cli.datamodule, _slots(site)
    hosts = [*slots]
    if verb == "prepare":
        nodes = devices = 1
    else:
        nodes = site.nodes or len(slots) or trainer["num_nodes"]
        if on_hosts and slots and nodes > len(slots):
            raise InputError(f"cluster.nodes is {nodes}, and {len(slots)} hosts are named; name all")
        sizes = [slots[host] for host in hosts[:nodes]]
        if len(set(sizes)) > 1:
            raise InputError(f"the hosts have {sizes} slots; include as many of each")
        given = site.devices_per_node or (sizes or [None])[0] or trainer["devices"]
        if not str(given).isdigit() or int(given) < 1:
            why = "give cluster.devices_per_node, the devices of one node"
            raise InputError(f"trainer.devices is {given!r}; {why}")
        devices = int(given)
    machine = Machine.described({**trainer, "devices": devices, "num_nodes": nodes})
    config = model_config(cli)
    if verb != "prepare":
        asynchronous = settings.last_checkpoint.asynchronous
        setup = (machine, trainer, cli.model, data, config, verb == "fit")
        if found := violations(*setup, saves_asynchronously=asynchronous):
            raise InputError(found[0])
    if verb == "fit":
        for note in proven.notes(config, cli.model, data, trainer["strategy"], machine.world_size):
            print(note, flush=True)
    hosts = hosts[:nodes] if on_hosts else []
    run, accelerator = cli.run.absolute(), machine.accelerator
    return Job(project.package, verb, flags, site, run, nodes, devices, hosts, accelerator, data)


def _slots(site: Site) -> dict[str, int | None]:
    """Returns the hosts to use, with the number of their slots if it is known."""
    if not site.hostfile:
        return dict.fromkeys(site.hosts)
    where, found = f"cluster.hostfile {site.hostfile}", dict[str, int | None]()
    try:
        lines = Path(site.hostfile).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InputError(f"{where} cannot be read: {error.strerror}") from error
    for text in lines:
        line = text.partition("#")[0].strip()
        if not line:
            continue
        if not (known := re.fullmatch(r"(\S+)\s+slots=([1-9]\d*)", line)):
            raise InputError(f"{where} has {line!r}; write `name slots=N` for each node")
        Site.check_host(known[1], where)
        if known[1] in found:
            raise InputError(f"{where} has {known[1]} twice; remove one of its lines")
        found[known[1]] = int(known[2])
    if not (site.include or site.exclude):
        return found
    require("deepspeed", "cluster.include")
    from deepspeed.launcher.runner import parse_inclusion_exclusion

    try:
        active = parse_inclusion_exclusion(found, site.include, site.exclude)
    except ValueError as error:
        raise InputError(f"cluster.include or exclude: {reason(error)}") from error
    return {host: len(chosen) for host, chosen in active.items()}


def project_file(name: str) -> str:
    """Returns `name`, a script; raises InputError outside of the project's folder."""
    if not Path(name).is_file():
        raise InputError(f"{Path.cwd()} has no {name}; start `launch` in the project's folder")
    return name
