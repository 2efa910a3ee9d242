"""Kubernetes: a pod per node, as a Job or a JobSet.

kubernetes.template has the manifests, in YAML. In each pod launch/torchrun.sh starts the processes;
the first pod hosts their rendezvous. The failure policy is docs/recovery/killed.md in Kubernetes'
terms."""

import json
import re
from pathlib import Path, PurePosixPath
from string import Template

import yaml

from ....cluster.launch import Variable
from ....cluster.redaction import redacted_command
from ....errors import InputError
from ....records import text_of
from ..job import Job
from . import Record, Target, ask

LABEL_LENGTH = 63  # characters of a host name and of a label's value (RFC 1123)
NAME = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,61}[a-z0-9])?")
FILE, LABEL = "kubernetes.yaml", "dist-template/run"
WORKDIR = PurePosixPath("/app")  # of the project's Dockerfile


class Kubernetes(Target):
    """Objects of Kubernetes, applied and deleted by kubectl."""

    def render(self, job: Job) -> dict[str, str]:
        """Returns the manifests. Raises InputError if something is not given, or a secret is, by
        its value."""
        _check(job)
        words = {word: json.dumps(value) for word, value in _values(job).items()}
        template = Path(__file__).with_suffix(".template").read_text(encoding="utf-8")
        objects = yaml.safe_load(Template(template).substitute(words))[job.site.kubernetes.kind]
        # a copy without references, which YAML would write as anchors
        copied = json.loads(json.dumps(objects))
        return {FILE: yaml.safe_dump_all(copied, sort_keys=False, width=100)}

    def commands(self, job: Job) -> list[list[str]]:
        return [["kubectl", "apply", "--filename", str(job.files / FILE)]]

    def submit(self, job: Job) -> str:
        super().submit(job)
        return _name(job)

    def status(self, record: Record, folder: Path) -> str:
        return ask("kubectl", "get", "pods", f"--selector={LABEL}={record['id']}")

    def logs(self, record: Record, folder: Path) -> str:
        return ask("kubectl", "logs", "--prefix", "--tail=-1", f"--selector={LABEL}={record['id']}")

    def stop(self, record: Record, folder: Path) -> str:
        """Deletes the objects of the job by kind and name, whatever the manifest in the run's
        folder lists; the pods save within their grace period."""
        kinds = ["service", "job"]
        if re.search(r"^kind: JobSet$", text_of(folder / FILE), re.MULTILINE):
            kinds = ["jobset"]
        names = [f"{kind}/{record['id']}" for kind in kinds]
        return ask("kubectl", "delete", "--ignore-not-found", *names)


def _check(job: Job) -> None:
    """Raises InputError if the job has no image, no volume for its runs, a name that Kubernetes
    refuses, or a secret that the manifest would show."""
    site, runs = job.site, PurePosixPath(job.run.parents[1])
    if runs.is_relative_to(job.folder):
        runs = WORKDIR / runs.relative_to(job.folder)
    if not site.image:
        raise InputError("cluster.image is not given; give the image of the pods as REGISTRY/NAME")
    _check_name(job)
    paths = [mount.partition(":")[2] for mount in site.mounts]
    if not any(path and runs.is_relative_to(path) for path in paths):
        cure = f"give a volume that all pods can write, as CLAIM:{runs}"
        raise InputError(f"cluster.mounts has no volume for {runs}; {cure}")
    claims, folders = [], []
    for mount in site.mounts:
        claim, _, path = mount.partition(":")
        claims.append(claim)
        folders.append(path)
    if site.kubernetes.gang and site.partition:
        claims.append(site.partition)
    for name in claims:
        if not NAME.fullmatch(name):
            key = "cluster.partition" if name == site.partition else "cluster.mounts"
            cure = "give a name in Kubernetes: small letters, digits and -, at most 63"
            raise InputError(f"{key} has {name!r}; {cure}")
    for folder in folders:
        if folders.count(folder) > 1:
            raise InputError(f"cluster.mounts has {folder} twice; give each folder once")
    if site.kubernetes.gang and not site.partition:
        raise InputError("cluster.partition is not given; Kueue needs the name of a LocalQueue")
    for name, reference in site.kubernetes.secrets.items():
        if not re.fullmatch(r"[a-z0-9.-]+/[\w.-]+", reference):  # its text may be the secret
            raise InputError(
                f"cluster.kubernetes.secrets.{name} is not a reference; give SECRET/KEY"
            )
    words = [word for word in job.arguments if not word.startswith("--cluster.kubernetes.secrets.")]
    for name, text in site.environment.items():
        words.append(f"--cluster.environment.{name}={text}")
    for word, shown in zip(words, redacted_command(words), strict=True):
        if word != shown:
            where = word.partition("=")[0] if word.startswith("--") else "the command"
            cure = "put it into a Secret and name that in cluster.kubernetes.secrets"
            raise InputError(f"{where} has a secret, which the manifest would show; {cure}")


def _check_name(job: Job) -> None:
    """Raises InputError if Kubernetes refuses the job's name, or the names of its pods."""
    name = _name(job)
    middle = "-node-0" if job.site.kubernetes.kind == "JobSet" else ""
    longest = f"{name}{middle}-{job.nodes - 1}"  # a pod's host name
    if len(longest) > LABEL_LENGTH or not name.removeprefix("run-"):
        raise InputError(
            f"{Variable.RUN_ID} {job.run.name!r} becomes the pod {longest}, with {len(longest)}"
            f" characters of {LABEL_LENGTH} that Kubernetes allows: give a shorter name of"
            " letters and digits"
        )


def _values(job: Job) -> dict[str, object]:
    """Returns the values for kubernetes.template."""
    site, kubernetes, name = job.site, job.site.kubernetes, _name(job)
    first_pod = f"{name}-0" if kubernetes.kind == "Job" else f"{name}-node-0-0"
    settings: dict[str, object] = {"NNODES": job.nodes, "NPROC": job.devices, "PYTHON": "python"}
    settings |= job.environment
    settings["RDZV_ENDPOINT"] = f"{first_pod}.{name}:{job.port}"
    settings["SHUTDOWN_TIMEOUT"] = max(site.save_s - 15, 1)
    address = {"fieldRef": {"fieldPath": "status.podIP"}}
    environment: list[object] = [{"name": "LOCAL_ADDR", "valueFrom": address}]
    for key, value in settings.items():
        environment.append({"name": key, "value": str(value)})
    for variable, reference in kubernetes.secrets.items():
        secret, _, key = reference.partition("/")
        source = {"secretKeyRef": {"name": secret, "key": key}}
        environment.append({"name": variable, "valueFrom": source})
    volumes: list[object] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    for number, mount in enumerate(site.mounts):
        claim, _, path = mount.partition(":")
        volumes.append({"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": f"volume-{number}", "mountPath": path})
    resources = {key: str(value) for key, value in kubernetes.resources.items()}
    if job.accelerator != "cpu":
        resources[kubernetes.device] = str(job.devices)
    # Entries that the template merges into an object, if there are any.
    queue: dict[str, object] = {}
    if kubernetes.gang:
        queue["kueue.x-k8s.io/queue-name"] = site.partition
    limit: dict[str, object] = {}
    if site.time_limit_s:
        limit["activeDeadlineSeconds"] = site.time_limit_s
    return {
        "name": name,
        "queue": queue,
        "image": site.image,
        "arguments": job.arguments,
        "environment": environment,
        "resources": resources,
        "volumes": volumes,
        "mounts": mounts,
        "pod": kubernetes.pod,
        "nodes": job.nodes,
        "limit": limit,
        "grace_s": site.save_s,
    }


def _name(job: Job) -> str:
    return "run-" + re.sub(r"[^a-z0-9]+", "-", job.run.name.lower()).strip("-")
