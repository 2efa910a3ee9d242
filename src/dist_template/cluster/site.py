"""The machines of a run, as `cluster` in a configuration describes them."""

import re
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Literal, Self

from ..errors import InputError
from ..ranges import NumNodes, PositiveInt, Range
from . import hostfile
from .redaction import redacted_environment

__all__ = ["Site", "check_host"]

# Fields of a pod in wings/launch/targets/kubernetes.template, which would replace a user's.
OF_PODS = frozenset(
    """automountServiceAccountToken enableServiceLinks restartPolicy subdomain containers volumes
    terminationGracePeriodSeconds securityContext""".split()
)
# Options of sbatch that a job's sizes set, or that replace its script: the key to edit instead.
OF_JOBS = {
    "nodes": "cluster.nodes",
    "ntasks": "cluster.nodes and cluster.devices_per_node",
    "ntasks-per-node": "cluster.devices_per_node",
    "time": "cluster.time_limit",
    "partition": "cluster.partition",
    "signal": "cluster.save_s",
    "wrap": "",
    "parsable": "",
}
# Variables that the launchers set for each process or node.
OF_LAUNCHERS = frozenset(
    """DIST_RUN_ID DIST_LAUNCH DIST_EXIT_CODES DIST_JOB_STARTED RANK LOCAL_RANK NODE_RANK WORLD_SIZE
    LOCAL_WORLD_SIZE NNODES NPROC RDZV_ENDPOINT""".split()
)
RESOURCE = re.compile(r"(?:[a-z0-9][a-z0-9.-]*/)?[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9])?", re.ASCII)
AMOUNT = re.compile(r"(?=.*[1-9])\d+(?:\.\d+)?(?:m|[kMGTPE]|[KMGTPE]i)?")
UNITS = {"K": 1, "M": 2, "G": 3, "T": 4}
SIZE = re.compile(r"(?=.*[1-9])(\d{1,9}(?:\.\d+)?) ?([KMGT])(i?)B")
# A claim or a folder, the folder in the container, and options of pyxis such as ro.
MOUNT = re.compile(r"[^\s:,]+:/[^\s:,]*(?::[\w+-]+)?")
# Slurm's formats: minutes, minutes:seconds, hours:minutes:seconds, and after days and a dash
# hours, hours:minutes, hours:minutes:seconds.
TIME = re.compile(r"(?:(\d{1,6})-)?(\d{1,9})(?::(\d{1,9}))?(?::(\d{1,9}))?", re.ASCII)


def check_host(name: str, where: str) -> None:
    """Raises InputError if `name` could be read as an option or a script."""
    if not re.fullmatch(r"[\w.@:%\[\]][\w.@:%\[\]-]*", name):
        raise InputError(f"{where} has {name!r}; give a name as ssh knows it")


def _check_option(name: str, value: object) -> None:
    """Raises InputError for what is no long option of sbatch with its value, and for options that
    the job's sizes set."""
    if not re.fullmatch(r"[a-z][a-z-]*[a-z]", str(name)):
        raise InputError(
            f"cluster.options has {name!r}; give a long name of sbatch's without dashes before it,"
            " as account"
        )
    if isinstance(value, list | dict):
        raise InputError(f"cluster.options.{name} is {value!r}; give one value")
    if name in OF_JOBS:
        cure = f"edit {OF_JOBS[name]} instead" if OF_JOBS[name] else "remove it"
        raise InputError(f"cluster.options has {name}, which the job itself has: {cure}")


@dataclass(frozen=True)
class Kubernetes:
    """How a site's Kubernetes runs a job, one pod per node.

    Args:
        kind: What is rendered: Job (built into Kubernetes) or JobSet.
        gang: kueue starts all pods or none, from the queue `cluster.partition`.
            null: each pod starts when there is a node for it.
        device: Resource name of a device. A run on CPUs requests none.
        resources: Further requests and limits of a pod, as {cpu: 32, memory: 256Gi}.
        secrets: Environment variables from Secrets, as {WANDB_API_KEY: wandb/api-key}: the key
            api-key of the Secret wandb.
        pod: Further fields of the pods, with Kubernetes' own names: nodeSelector, tolerations,
            priorityClassName, affinity, imagePullSecrets …"""

    kind: Literal["Job", "JobSet"] = "Job"
    gang: Literal["kueue"] | None = None
    device: str = "nvidia.com/gpu"
    resources: dict[str, Any] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict)
    pod: dict[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Raises InputError for a field of pods that this library sets itself, and for names and
        amounts that Kubernetes refuses."""
        for name in self.secrets:
            if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
                what = "give the name of a variable: letters, digits and _"
                raise InputError(f"cluster.kubernetes.secrets has {name!r}; {what}")
        for name in (self.device, *self.resources):
            if not RESOURCE.fullmatch(name):
                what = "give the name of a resource, as nvidia.com/gpu"
                raise InputError(f"cluster.kubernetes has the resource {name!r}; {what}")
        for name, amount in self.resources.items():
            if not AMOUNT.fullmatch(str(amount)):
                what = "give an amount, as 32, 500m or 256Gi"
                raise InputError(f"cluster.kubernetes.resources.{name} is {amount!r}; {what}")
        for name in OF_PODS.intersection(self.pod):
            what = (
                "this library sets it: remove it, or render the manifest by --dry-run and edit it"
            )
            raise InputError(f"cluster.kubernetes.pod has {name}; {what}")


@dataclass(frozen=True)
class Site:
    """Where a run is: `launch` and `plan` read it; `fit` ignores it.

    Args:
        nodes: Number of nodes. null: as many as `hosts`, else trainer.num_nodes.
        min_nodes: Of an elastic run, by torchrun only: training continues when nodes are lost, as
            long as this many are left. null: all nodes are needed.
        devices_per_node: GPUs of a node, or CPU processes. null: trainer.devices.
        device_memory: Memory of one device with its unit, as 80GB (10^9 bytes) or 80GiB. For
            `plan`.
        time_limit: Of the job, in Slurm's formats: minutes, MM:SS, HH:MM:SS, DAYS-HH, DAYS-HH:MM,
            DAYS-HH:MM:SS. A number in YAML is seconds, as YAML reads an unquoted 24:00:00. null:
            none, or the site's.
        save_s: Seconds before the time limit at which the run saves and exits with 75.
        hosts: Names of the nodes, as ssh knows them; the first one is the rendezvous's. []: this
            machine, or a scheduler chooses the nodes.
        hostfile: In place of `hosts`: a file in the format of the deepspeed launcher, with a line
            `name slots=N` for each node.
        include: Hosts of the hostfile to use, as node1@node2; with --on deepspeed also slots, as
            node1@node2:0,1. "": all.
        exclude: Likewise, hosts or slots not to use. "": none.
        ssh: Command that runs a command on a host; its last words are the host and the command.
        master: Address of the first node for the other nodes. null: its name in `hosts`.
        port: TCP port of the first node for the rendezvous. null: one from the run's id.
        partition: Slurm partition, or the queue of Kueue.
        container: Under Slurm, what runs `image`: pyxis or apptainer. null: no container.
        image: Container image; its path or its name in a registry.
        mounts: Folders in the container, as /on/the/node:/in/the/container; for Kubernetes
            claim:/in/the/container, with the name of a PersistentVolumeClaim.
        environment: Environment variables of all processes.
        options: Further options of sbatch by their long names, as {account: a, gres: gpu:h100:8,
            exclusive: null, dependency: afterok:17, array: 0-3}; gres replaces --gpus-per-node.
        kubernetes: What Kubernetes needs besides."""

    nodes: NumNodes | None = None
    min_nodes: PositiveInt | None = None
    devices_per_node: NumNodes | None = None
    device_memory: str | None = None
    time_limit: str | Annotated[int, Range(gt=0)] | None = None
    save_s: PositiveInt = 300
    hosts: list[str] = field(default_factory=list)
    hostfile: str | None = None
    include: str = ""
    exclude: str = ""
    ssh: str = "ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=20"
    master: str | None = None
    port: Annotated[int, Range(ge=1, le=65_535)] | None = None
    partition: str | None = None
    container: Literal["pyxis", "apptainer"] | None = None
    image: str | None = None
    mounts: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    kubernetes: Kubernetes = field(default_factory=Kubernetes)

    def __post_init__(self) -> None:
        if self.container and not self.image:
            raise InputError(f"cluster.container is {self.container}; give cluster.image as well")
        for name in self.environment:
            if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
                what = "give the name of a variable: letters, digits and _"
                raise InputError(f"cluster.environment has {name!r}; {what}")
            if name in OF_LAUNCHERS:
                raise InputError(
                    f"cluster.environment has {name}, which the launcher sets for each process:"
                    " remove it"
                )
        for name, value in self.options.items():
            _check_option(name, value)
        for key in ("partition", "image"):
            value = getattr(self, key)
            if value is not None and re.search(r"^$|^-|\s", value):
                what = "give a name without blanks, or null"
                raise InputError(f"cluster.{key} is {value!r}; {what}")
        for mount in self.mounts:
            if not MOUNT.fullmatch(mount):
                what = "give SOURCE:/in/the/container, without blanks and commas"
                raise InputError(f"cluster.mounts has {mount!r}; {what}")
        for name in self.hosts:
            check_host(name, "cluster.hosts")
            if self.hosts.count(name) > 1:
                raise InputError(f"cluster.hosts has {name} twice; give each host once")
        if self.master:
            check_host(self.master, "cluster.master")
        if self.hosts and self.hostfile:
            raise InputError("cluster.hosts and cluster.hostfile are both given: remove one")
        for key in ("include", "exclude"):
            if getattr(self, key) and not self.hostfile:
                raise InputError(f"cluster.{key} chooses from cluster.hostfile: give that, too")
        if self.nodes:
            nodes, given = self.nodes, f"cluster.nodes is {self.nodes}"
        else:
            nodes, given = len(self.hosts), f"cluster.hosts has {len(self.hosts)}"
        if self.min_nodes and nodes and self.min_nodes > nodes:
            what = "give as many or fewer, or null"
            raise InputError(f"cluster.min_nodes is {self.min_nodes}, and {given}: {what}")
        self.kubernetes.check()
        if self.include and self.exclude:
            raise InputError("cluster.include and cluster.exclude are both given: remove one")
        _ = self.memory_bytes  # raises InputError
        limit = self.time_limit_s
        if limit is not None and limit <= self.save_s:
            how = f"the run saves {self.save_s} s before it (cluster.save_s); give more time"
            raise InputError(f"cluster.time_limit is {limit} s, and {how}")

    def slots(self) -> dict[str, list[int]]:
        """Returns the hosts to use, with the numbers of their devices where a hostfile says them,
        else []. Raises InputError for a hostfile that cannot be used."""
        if self.hostfile is None:
            return {host: [] for host in self.hosts}
        slots = hostfile.read(self.hostfile, partial(check_host, where="cluster.hostfile"))
        return hostfile.chosen(slots, self.include, self.exclude)

    def without_secrets(self) -> Self:
        """Returns the site with a text in place of each secret in `environment`."""
        return replace(self, environment=redacted_environment(self.environment))

    @property
    def memory_bytes(self) -> int | None:
        """Memory of one device."""
        if self.device_memory is None:
            return None
        found = SIZE.fullmatch(self.device_memory)
        if found is None:
            what = "give a number with a unit, as 80GB or 80GiB"
            raise InputError(f"cluster.device_memory is {self.device_memory!r}; {what}")
        number, prefix, binary = found.groups()
        return int(float(number) * (1024 if binary else 1000) ** UNITS[prefix])

    @property
    def time_limit_s(self) -> int | None:
        """The time limit in seconds. Slurm reads the numbers from the left: days, hours, minutes
        after a dash; else the last one is seconds, and one alone minutes."""
        if self.time_limit is None or isinstance(self.time_limit, int):
            return self.time_limit
        found = TIME.fullmatch(self.time_limit)
        numbers: list[int] = []
        if found:
            numbers = [int(number) for number in found.groups()[1:] if number]
        # The first number may be of any size; those after it are below 60.
        if not found or any(number > 59 for number in numbers[1:]):
            what = "give minutes, MM:SS, HH:MM:SS, DAYS-HH, DAYS-HH:MM or DAYS-HH:MM:SS"
            raise InputError(f"cluster.time_limit is {self.time_limit!r}; {what}")
        days = 0
        if found[1]:  # DAYS-HH[:MM[:SS]]
            days = int(found[1])
            hours, minutes, seconds = [*numbers, 0, 0][:3]
        elif len(numbers) == 1:
            hours, minutes, seconds = 0, numbers[0], 0
        else:  # [HH:]MM:SS
            hours, minutes, seconds = [0, *numbers][-3:]
        return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
