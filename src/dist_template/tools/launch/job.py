"""A job: the command that runs on each node, its run's folder, and its size."""

from __future__ import annotations

import shlex
import sys
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...cluster.launch import RUN_ID
from ...cluster.site import Site
from ...errors import InputError, reason, require
from ...project import Project

PORTS = range(20_000, 30_000)  # below those that Linux assigns to clients


@dataclass(frozen=True)
class Job:
    """What a target renders and starts: `verb` of `package` with `flags`, on nodes of equal size.

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
    data: Any
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
    def command(self) -> list[str]:
        """The command of one process."""
        return [self.python, "-m", self.package, *self.arguments]

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of every process."""
        return {RUN_ID: self.run_id, **self.site.environment}

    def require_data(self) -> None:
        """Refuses data that are not prepared, where nodes share this machine's disks.

        Raises:
            InputError: the processes of a launcher do not tokenize.
        """
        if self.verb != "prepare" and hasattr(self.data, "require"):
            self.data.require()


def exports(environment: dict[str, str]) -> str:
    """Returns lines of a shell script that set variables."""
    return "\n".join(f"export {key}={shlex.quote(text)}" for key, text in environment.items())


def describe(project: Project, verb: str, flags: list[str], on_hosts: bool) -> Job:
    """Reads a configuration, and makes the checks of `fit` for the machines that it describes.

    Args:
        project: Its module and data.
        verb: Of the job.
        flags: Of the verb.
        on_hosts: Whether the target starts the nodes that `cluster` names; else a scheduler
            chooses them.

    Raises:
        InputError: the configuration cannot be run there.
    """
    from ...cli import config_file
    from ...cli.fit import describe as read
    from ...cli.limits import Machine, violations
    from ..rehearse import model_config

    known = "fit" if verb == "prepare" else verb
    config_file.check([known, *flags])
    cli = read([known, *flags, "--trainer.logger=false"], project)
    settings, site = cli.config_init[known], cli.config_init[known].cluster
    trainer = vars(settings.trainer)
    slots = _hosts(site) if on_hosts else {}
    nodes = 1 if verb == "prepare" else site.nodes or len(slots) or trainer["num_nodes"]
    if slots and nodes > len(slots):
        raise InputError(f"cluster.nodes is {nodes}, and {len(slots)} hosts are named; name all")
    slots = dict(list(slots.items())[:nodes])
    devices = _devices(site, slots, trainer)
    machine = Machine.described({**trainer, "devices": devices, "num_nodes": nodes})
    asynchronous = settings.last_checkpoint.asynchronous
    setup = (machine, trainer, cli.model, cli.datamodule, model_config(cli), verb == "fit")
    if verb != "prepare" and (found := violations(*setup, saves_asynchronously=asynchronous)):
        raise InputError(found[0])
    sizes = (nodes, devices, list(slots), machine.accelerator)
    return Job(project.package, verb, flags, site, cli.run.absolute(), *sizes, cli.datamodule)


def project_file(name: str) -> str:
    """Returns `name`, a script of the project.

    Raises:
        InputError: the working folder is not the project's.
    """
    if not Path(name).is_file():
        raise InputError(f"{Path.cwd()} has no {name}; start `launch` in the project's folder")
    return name


def _hosts(site: Site) -> dict[str, int | None]:
    """Returns the hosts to use, with the number of their slots if it is known.

    Raises:
        InputError: the hostfile is wrong, or cluster.include or exclude does not fit it.
    """
    slots = site.slots()
    if not (site.include or site.exclude):
        return slots
    require("deepspeed", "cluster.include")
    from deepspeed.launcher.runner import parse_inclusion_exclusion

    pool = {host: count or site.devices_per_node or 1 for host, count in slots.items()}
    try:
        found = parse_inclusion_exclusion(pool, site.include, site.exclude)
    except ValueError as error:
        raise InputError(f"cluster.include or cluster.exclude: {reason(error)}") from error
    return {host: len(chosen) for host, chosen in found.items()}


def _devices(site: Site, slots: dict[str, int | None], trainer: dict[str, Any]) -> int:
    """Returns the processes of each node.

    Raises:
        InputError: nodes differ, or the number is not known.
    """
    of_nodes = {count for count in slots.values() if count}
    if len(of_nodes) > 1:
        listed = ", ".join(f"{host} {count}" for host, count in slots.items())
        raise InputError(f"the nodes differ in their slots ({listed}); include as many of each")
    given = site.devices_per_node or next(iter(of_nodes), None) or trainer["devices"]
    if not str(given).isdigit() or int(given) < 1:
        key = "cluster.devices_per_node"
        raise InputError(f"trainer.devices is {given!r}; give {key}, the devices of one node")
    return int(given)
