"""Kubernetes: a pod per node, as a Job, a JobSet, Kubeflow's TrainJob or KubeRay's RayJob.

kubernetes.template has the manifests, in YAML. In each pod launch/torchrun.sh starts the processes; the first pod hosts
their rendezvous. The failure policy is docs/recovery/exit_codes.md in Kubernetes' terms.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from string import Template
from typing import Any

import yaml

from ....cluster.redaction import redacted_command
from ....errors import InputError
from ..job import Job
from . import Record, Target, ask, ray

FILE, LABEL = "kubernetes.yaml", "dist-template/run"
WORKDIR = PurePosixPath("/app")  # of the project's Dockerfile
EXIT_S = 15  # from the end of a save to the end of the pod
BY_NAME = ("env", "volumes", "volumeMounts")


class Kubernetes(Target):
    """Objects of Kubernetes, applied and deleted by kubectl."""

    def render(self, job: Job) -> dict[str, str]:
        """Returns the manifests.

        Raises:
            InputError: the image, the volume or the queue is not given, or a secret is, by its value.
        """
        _check(job)
        _check_secrets(job)
        site, path = job.site.kubernetes, Path(__file__).with_suffix(".template")
        words = {word: json.dumps(value) for word, value in _values(job).items()}
        parts = yaml.safe_load(Template(path.read_text(encoding="utf-8")).substitute(words))
        objects = parts[site.kind]
        if site.gang == "volcano":
            objects = [parts["volcano"], *objects]
        # a copy without references, which YAML would write as anchors
        completed = json.loads(json.dumps(_completed(objects, site.pod)))
        return {FILE: yaml.safe_dump_all(completed, sort_keys=False, width=100)}

    def commands(self, job: Job) -> list[list[str]]:
        return [["kubectl", "apply", "--filename", str(job.files / FILE)]]

    def submit(self, job: Job, folder: Path) -> str:
        ask(*self.commands(job)[0])
        return _name(job)

    def is_active(self, record: Record, folder: Path) -> bool:
        """Returns whether the run has pods that have not ended."""
        ended = "--field-selector=status.phase!=Succeeded,status.phase!=Failed"
        selector = f"--selector={LABEL}={record['id']}"
        return ask("kubectl", "get", "pods", selector, ended, "-o=name") != ""

    def status(self, record: Record, folder: Path) -> str:
        return ask("kubectl", "get", "pods", f"--selector={LABEL}={record['id']}")

    def logs(self, record: Record, folder: Path) -> str:
        return ask("kubectl", "logs", "--prefix", "--tail=-1", f"--selector={LABEL}={record['id']}")

    def stop(self, record: Record, folder: Path) -> str:
        """Deletes the objects; the pods save within their grace period."""
        return ask("kubectl", "delete", "--filename", str(folder / FILE))


def _check(job: Job) -> None:
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
    if site.kubernetes.gang == "kueue" and not site.partition:
        raise InputError("cluster.partition is not given; Kueue needs the name of a LocalQueue")


def _check_secrets(job: Job) -> None:
    for name, reference in job.site.kubernetes.secrets.items():
        if not re.fullmatch(r"[a-z0-9.-]+/[\w.-]+", reference):  # its text may be the secret
            key = f"cluster.kubernetes.secrets.{name}"
            raise InputError(f"{key} is not a reference; give SECRET/KEY")
    secrets = []
    for name, text in job.site.environment.items():
        word = f"--{name}={text}"
        if redacted_command([word]) != [word]:
            secrets.append(f"cluster.environment.{name}")
    references = "--cluster.kubernetes.secrets."  # checked above
    words = [word for word in job.arguments if not word.startswith(references)]
    if redacted_command(words) != words:
        secrets.append("the command")
    if secrets:
        what = "put it into a Secret and name that in cluster.kubernetes.secrets"
        raise InputError(f"{secrets[0]} has a secret, which the manifest would show; {what}")


def _completed(value: Any, of_pods: Mapping[str, object]) -> Any:
    """Returns `value` without null fields, and with the further fields of pods."""
    if isinstance(value, list):
        return [_completed(item, of_pods) for item in value]
    if not isinstance(value, dict):
        return value
    found = {}
    for key, field in value.items():
        if field is None:
            continue
        found[key] = _completed(field, of_pods)
        if key in BY_NAME:
            found[key] = [{"name": name, **fields} for name, fields in found[key].items()]
    if "containers" in found:
        found |= of_pods
    return found


def _values(job: Job) -> dict[str, object]:
    """Returns the values for kubernetes.template."""
    site, kubernetes, name = job.site, job.site.kubernetes, _name(job)
    environment: dict[str, object] = {}
    environment |= {name: {"value": str(value)} for name, value in job.environment.items()}
    for variable, reference in kubernetes.secrets.items():
        secret, _, key = reference.partition("/")
        environment[variable] = {"valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}
    volumes, mounts = {}, {}
    for number, mount in enumerate(site.mounts):
        claim, _, path = mount.partition(":")
        volumes[f"volume-{number}"] = {"persistentVolumeClaim": {"claimName": claim}}
        mounts[f"volume-{number}"] = {"mountPath": path}
    resources = {key: str(value) for key, value in kubernetes.resources.items()}
    if job.accelerator != "cpu":
        resources[kubernetes.device] = str(job.devices)
    first = f"{name}-0" if kubernetes.kind == "Job" else f"{name}-node-0-0"
    values: dict[str, object] = {
        "name": name,
        "kueue": None,
        "group": None,
        "scheduler": None,
        "queue": site.partition,
        "image": site.image,
        "arguments": job.arguments,
        "entrypoint": ray.command(job, "python", str(WORKDIR)),
        "environment": environment,
        "resources": resources,
        "volumes": volumes,
        "mounts": mounts,
        "endpoint": f"{first}.{name}:{job.port}",
        "nodes": job.nodes,
        "pods": job.nodes + (kubernetes.kind == "RayJob"),  # with Ray's head
        "devices": job.devices,
        "limit_s": site.time_limit_s,
        "grace_s": site.save_s,
        "timeout_s": max(site.save_s - EXIT_S, 1),
    }
    if kubernetes.gang == "kueue":
        values["kueue"] = site.partition
    elif kubernetes.gang == "volcano":
        values |= {"group": name, "scheduler": "volcano"}
    return values


def _name(job: Job) -> str:
    return "run-" + re.sub(r"[^a-z0-9]+", "-", job.run_id.lower()).strip("-")
