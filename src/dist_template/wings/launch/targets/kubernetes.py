"""Kubernetes: a pod per node, as a Job or a JobSet.

kubernetes.template has the manifests, in YAML. In each pod launch/torchrun.sh starts the processes; the first pod hosts
their rendezvous. The failure policy is docs/recovery/exit_codes.md in Kubernetes' terms.
"""

from __future__ import annotations

import json
import re
from pathlib import Path, PurePosixPath
from string import Template

import yaml

from ....cluster.redaction import redacted_command
from ....errors import InputError
from ..job import Job
from . import Record, Target, ask

FILE, LABEL = "kubernetes.yaml", "dist-template/run"
WORKDIR = PurePosixPath("/app")  # of the project's Dockerfile
EXIT_S = 15  # from the end of a save to the end of the pod


class Kubernetes(Target):
    """Objects of Kubernetes, applied and deleted by kubectl."""

    def render(self, job: Job) -> dict[str, str]:
        """Returns the manifests.

        Raises:
            InputError: the image, the volume or the queue is not given, or a secret is, by its value.
        """
        _check_site(job)
        _check_secrets(job)
        words = {word: json.dumps(value) for word, value in _values(job).items()}
        template = Path(__file__).with_suffix(".template").read_text(encoding="utf-8")
        objects = yaml.safe_load(Template(template).substitute(words))[job.site.kubernetes.kind]
        # a copy without references, which YAML would write as anchors
        return {FILE: yaml.safe_dump_all(json.loads(json.dumps(objects)), sort_keys=False, width=100)}

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
        """Deletes the objects; the pods save within their grace period."""
        return ask("kubectl", "delete", "--filename", str(folder / FILE))


def _check_site(job: Job) -> None:
    site, runs = job.site, job.run.parents[1]
    inside = WORKDIR / (runs.relative_to(job.folder) if runs.is_relative_to(job.folder) else runs)
    if not site.image:
        raise InputError("cluster.image is not given; give the image of the pods as REGISTRY/NAME")
    has_runs = False
    for mount in site.mounts:
        if not re.fullmatch(r"[a-z0-9.-]+:/.*", mount):
            what = "write each as CLAIM:/in/the/container"
            raise InputError(f"cluster.mounts is {site.mounts}; {what}")
        has_runs |= inside.is_relative_to(mount.partition(":")[2])
    if not has_runs:
        what = f"give one that all pods can write, as CLAIM:{inside}"
        raise InputError(f"cluster.mounts has no volume for {inside}; {what}")
    if site.kubernetes.gang and not site.partition:
        raise InputError("cluster.partition is not given; Kueue needs the name of a LocalQueue")


def _check_secrets(job: Job) -> None:
    for name, reference in job.site.kubernetes.secrets.items():
        if not re.fullmatch(r"[a-z0-9.-]+/[\w.-]+", reference):  # its text may be the secret
            key = f"cluster.kubernetes.secrets.{name}"
            raise InputError(f"{key} is not a reference; give SECRET/KEY")
    what = "put it into a Secret and name that in cluster.kubernetes.secrets"
    for name, text in job.site.environment.items():
        if redacted_command([f"--{name}={text}"]) != [f"--{name}={text}"]:
            raise InputError(f"cluster.environment.{name} has a secret, which the manifest would show; {what}")
    references = "--cluster.kubernetes.secrets."  # checked above
    words = [word for word in job.arguments if not word.startswith(references)]
    if redacted_command(words) != words:
        raise InputError(f"the command has a secret, which the manifest would show; {what}")


def _values(job: Job) -> dict[str, object]:
    """Returns the values for kubernetes.template."""
    site, kubernetes, name = job.site, job.site.kubernetes, _name(job)
    first = f"{name}-0" if kubernetes.kind == "Job" else f"{name}-node-0-0"
    settings = {"NNODES": job.nodes, "NPROC": job.devices, "PYTHON": "python", **job.environment}
    settings |= {"RDZV_ENDPOINT": f"{first}.{name}:{job.port}", "SHUTDOWN_TIMEOUT": max(site.save_s - EXIT_S, 1)}
    environment: list[object] = [{"name": key, "value": str(value)} for key, value in settings.items()]
    address = {"fieldRef": {"fieldPath": "status.podIP"}}
    environment.append({"name": "LOCAL_ADDR", "valueFrom": address})
    for variable, reference in kubernetes.secrets.items():
        secret, _, key = reference.partition("/")
        environment.append({"name": variable, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}})
    volumes: list[object] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    mounts = [{"name": "shm", "mountPath": "/dev/shm"}]
    for number, mount in enumerate(site.mounts):
        claim, _, path = mount.partition(":")
        volumes.append({"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": f"volume-{number}", "mountPath": path})
    resources = {key: str(value) for key, value in kubernetes.resources.items()}
    if job.accelerator != "cpu":
        resources[kubernetes.device] = str(job.devices)
    return {
        "name": name,
        "queue": {"kueue.x-k8s.io/queue-name": site.partition} if kubernetes.gang else {},
        "image": site.image,
        "arguments": job.arguments,
        "environment": environment,
        "resources": resources,
        "volumes": volumes,
        "mounts": mounts,
        "pod": kubernetes.pod,
        "nodes": job.nodes,
        "limit": {"activeDeadlineSeconds": site.time_limit_s} if site.time_limit_s else {},
        "grace_s": site.save_s,
    }


def _name(job: Job) -> str:
    return "run-" + re.sub(r"[^a-z0-9]+", "-", job.run_id.lower()).strip("-")
