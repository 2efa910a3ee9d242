"""A job: the command that runs on each node, its run's folder, and its size.

`describe` makes it from a configuration: it takes the nodes and devices from `cluster` or from the
trainer, checks the configuration as `fit` would on these, and estimates the best interval of
checkpoints. A target (targets/) renders and starts it."""

import shlex
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...cluster.launch import Variable
from ...cluster.site import Site
from ...errors import InputError
from ...project import Project
from ..values import PORTS


@dataclass(frozen=True)
class Job:
    """Job that a target renders and starts: `verb` of `package` with `flags`, on equal nodes."""

    package: str
    verb: str
    flags: list[str]
    site: Site
    run: Path  # the run's folder
    nodes: int
    devices: int  # processes of each node
    hosts: list[str]  # [] for this machine, or if a scheduler chooses the nodes
    accelerator: str  # cpu, cuda, …
    data: object  # the data module
    interval: str = ""  # of checkpoints that loses least, in a line
    folder: Path = field(default_factory=Path.cwd)  # the project's; the same path on all nodes
    python: str = sys.executable

    @property
    def files(self) -> Path:
        """The folder of the rendered files."""
        return self.run / "launch"

    @property
    def master(self) -> str:
        """Address of the first node for the others."""
        if self.site.master:
            return self.site.master
        if not self.hosts:
            return "127.0.0.1"
        return self.hosts[0].rpartition("@")[2]  # without the user

    @property
    def port(self) -> int:
        """TCP port of the rendezvous on the first node; a run keeps it."""
        if self.site.port:
            return self.site.port
        return PORTS[zlib.crc32(self.run.name.encode()) % len(PORTS)]

    @property
    def arguments(self) -> list[str]:
        """The verb and its flags; the job's sizes come last, so that they override a --config."""
        sizes = [f"--trainer.devices={self.devices}", f"--trainer.num_nodes={self.nodes}"]
        return [self.verb, *self.flags, *sizes]

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of every process."""
        return {Variable.RUN_ID: self.run.name, **self.site.environment}

    def require_data(self) -> None:
        """Raises InputError without prepared data; where nodes share this machine's disks."""
        require = getattr(self.data, "require", None)
        if require and self.verb != "prepare":
            require()


def exports(environment: dict[str, str]) -> str:
    """Returns lines of a shell script that set variables."""
    return "\n".join(f"export {key}={shlex.quote(text)}" for key, text in environment.items())


def describe(project: Project, verb: str, flags: list[str], on_hosts: bool) -> Job:
    """Reads a configuration, and makes the checks of `fit` for the machines that it describes.
    `on_hosts`: the target starts the nodes that `cluster` names; else a scheduler chooses as
    many."""
    from ...cli.fit import WithoutTrainer
    from ...cli.limits import Machine, accumulated_batch, violations
    from ..preflight.interval import of_job
    from ..rehearse.command import model_config

    read_as = "fit" if verb == "prepare" else verb  # prepare has fit's keys
    cli = WithoutTrainer.of([read_as, *flags, "--trainer.logger=false"], project, run=True)
    settings = cli.config_init[read_as]
    site, trainer, data = settings.cluster, vars(settings.trainer), cli.datamodule
    slots = site.slots()
    nodes = site.nodes or len(slots) or trainer["num_nodes"]
    if site.min_nodes and site.min_nodes > nodes:
        raise InputError(
            f"cluster.min_nodes is {site.min_nodes}, and the job has {nodes} nodes: give as many or"
            " fewer, or null"
        )
    if verb == "prepare":
        nodes = 1
    if on_hosts and nodes > max(1, len(slots)):
        where = "cluster.hostfile" if site.hostfile else "cluster.hosts"
        raise InputError(f"the job has {nodes} nodes; name as many in {where}")
    hosts = list(slots)[:nodes]
    sizes = [len(slots[host]) for host in hosts]
    if len(set(sizes)) > 1:
        raise InputError(f"cluster.hostfile has hosts with {sizes} slots: use as many of each")
    devices: int | str = 1
    if verb != "prepare":
        devices = _devices(site, sizes, trainer["devices"])
    if not str(devices).isdigit() or int(devices) < 1:
        cure = "give cluster.devices_per_node, the devices of one node"
        raise InputError(f"trainer.devices is {devices!r}; {cure}")
    devices = int(devices)
    machine = Machine.described(trainer | {"devices": devices, "num_nodes": nodes})
    if verb == "fit":
        # As fit itself does; the checks below then see the size that trains.
        size = accumulated_batch(machine, trainer, cli.model, data)
        if size:
            data.global_batch_size = size
    if verb != "prepare":
        asynchronous = settings.last_checkpoint.asynchronous
        setup = (machine, trainer, cli.model, data, model_config(cli), verb == "fit")
        refusals = violations(*setup, saves_asynchronously=asynchronous)
        if refusals:
            raise InputError(refusals[0])
    run = cli.run.absolute()
    interval = ""
    if verb == "fit":
        interval = of_job(settings, cli.model, data, run.parent, nodes, devices)
    return Job(
        package=project.package,
        verb=verb,
        flags=flags,
        site=site,
        run=run,
        nodes=nodes,
        devices=devices,
        hosts=hosts if on_hosts else [],
        accelerator=machine.accelerator,
        data=data,
        interval=interval,
    )


def _devices(site: Site, slots: Sequence[int], default: int | str) -> int | str:
    """Returns the devices of a node. Raises InputError if they are not those of the hostfile."""
    given = site.devices_per_node
    of_file = slots[0] if slots else 0  # 0: cluster.hosts says no number
    if given and of_file and given != of_file:
        raise InputError(
            f"cluster.devices_per_node is {given}, and cluster.hostfile gives {of_file} slots to"
            " each host: remove the first, or edit the file"
        )
    return given or of_file or default  # the first that is given


def project_file(name: str) -> str:
    """Returns `name`, a script; raises InputError outside of the project's folder."""
    if not Path(name).is_file():
        raise InputError(f"{Path.cwd()} has no {name}; start `launch` in the project's folder")
    return name
