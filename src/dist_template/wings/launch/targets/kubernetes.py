"""Kubernetes: a pod per node, as a Job, a JobSet, Kubeflow's TrainJob or KubeRay's RayJob.

kubernetes.template has the manifests, in YAML. In each pod launch/torchrun.sh starts the processes;
the first pod hosts their rendezvous. The failure policy is docs/recovery/exit_codes.md in
Kubernetes' terms.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path, PurePosixPath
from string import Template
from typing import Any

import yaml

from ....cluster.redaction import redacted, redacted_command
from ....errors import InputError, first_line
from ..job import Job
from . import ray

FILE, LABEL = "kubernetes.yaml", "dist-template/run"
WORKDIR = PurePosixPath("/app")  # of the project's Dockerfile
EXIT_S = 15  # from the end of a save to the end of the pod
BY_NAME = ("env", "volumes", "volumeMounts")


def render(job: Job) -> dict[str, str]:
    """Returns the manifests.

    Raises:
        InputError: the image, the volume or the queue is not given, or a secret is, by its value.
    """
    _check(job)
    own, path = job.site.kubernetes, Path(__file__).with_suffix(".template")
    filled = {word: json.dumps(value) for word, value in _values(job).items()}
    parts = yaml.safe_load(Template(path.read_text(encoding="utf-8")).substitute(filled))
    objects = ([parts["volcano"]] if own.gang == "volcano" else []) + parts[own.kind]
    # a copy without references, which YAML would write as anchors
    completed = json.loads(json.dumps(_completed(objects, own.pod)))
    return {FILE: yaml.safe_dump_all(completed, sort_keys=False, width=100)}


def _check(job: Job) -> None:
    site, own, runs = job.site, job.site.kubernetes, job.run.parents[1]
    inside = WORKDIR / (runs.relative_to(job.folder) if runs.is_relative_to(job.folder) else runs)
    if not site.image:
        raise InputError("cluster.image is not given; give the image of the pods as REGISTRY/NAME")
    if not all(re.fullmatch(r"[a-z0-9.-]+:/.*", mount) for mount in site.mounts):
        raise InputError(f"cluster.mounts is {site.mounts}; write each as CLAIM:/in/the/container")
    if not any(inside.is_relative_to(mount.partition(":")[2]) for mount in site.mounts):
        what = f"give one that all pods can write, as CLAIM:{inside}"
        raise InputError(f"cluster.mounts has no volume for {inside}; {what}")
    if own.gang == "kueue" and not site.partition:
        raise InputError("cluster.partition is not given; Kueue needs the name of a LocalQueue")
    for name, reference in own.secrets.items():
        if not re.fullmatch(r"[a-z0-9.-]+/[\w.-]+", reference):  # its text may be the secret
            key = f"cluster.kubernetes.secrets.{name}"
            raise InputError(f"{key} is not a reference; give SECRET/KEY")
    shown = redacted(site.environment)
    secrets = [
        f"cluster.environment.{name}" for name in shown if shown[name] != site.environment[name]
    ]
    references = "--cluster.kubernetes.secrets."  # checked above
    words = [word for word in job.arguments if not word.startswith(references)]
    if redacted_command(words) != words:
        secrets.append("the command")
    if secrets:
        what = "put it into a Secret and name that in cluster.kubernetes.secrets"
        raise InputError(f"{secrets[0]} has a secret, which the manifest would show; {what}")


def _completed(value: Any, of_pods: dict[str, Any]) -> Any:
    """Returns `value` without null fields, and with the further fields of pods."""
    if isinstance(value, list):
        return [_completed(one, of_pods) for one in value]
    if not isinstance(value, dict):
        return value
    found = {key: _completed(one, of_pods) for key, one in value.items() if one is not None}
    for key in found.keys() & BY_NAME:
        found[key] = [{"name": name, **fields} for name, fields in found[key].items()]
    return {**found, **of_pods} if "containers" in found else found


def _values(job: Job) -> dict[str, Any]:
    """Returns the values for kubernetes.template."""
    site, own, name = job.site, job.site.kubernetes, _name(job)
    first = f"{name}-0" if own.kind == "Job" else f"{name}-node-0-0"
    mounts = [(f"volume-{n}", *mount.split(":", 1)) for n, mount in enumerate(site.mounts)]
    secrets = [(variable, *where.split("/")) for variable, where in own.secrets.items()]
    is_volcano = own.gang == "volcano"
    devices = {own.device: job.devices} if job.accelerator != "cpu" else {}
    return {
        "name": name,
        "kueue": site.partition if own.gang == "kueue" else None,
        "group": name if is_volcano else None,
        "scheduler": "volcano" if is_volcano else None,
        "queue": site.partition,
        "image": site.image,
        "arguments": job.arguments,
        "entrypoint": ray.command(job, "python", str(WORKDIR)),
        "environment": {key: {"value": str(value)} for key, value in job.environment.items()},
        "secrets": {
            variable: {"valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}
            for variable, secret, key in secrets
        },
        "resources": {key: str(value) for key, value in {**own.resources, **devices}.items()},
        "volumes": {
            volume: {"persistentVolumeClaim": {"claimName": claim}} for volume, claim, _ in mounts
        },
        "mounts": {volume: {"mountPath": target} for volume, _, target in mounts},
        "endpoint": f"{first}.{name}:{job.port}",
        "nodes": job.nodes,
        "pods": job.nodes + (own.kind == "RayJob"),  # with Ray's head
        "devices": job.devices,
        "limit_s": site.time_limit_s,
        "grace_s": site.save_s,
        "timeout_s": max(site.save_s - EXIT_S, 1),
    }


def _name(job: Job) -> str:
    return "run-" + re.sub(r"[^a-z0-9]+", "-", job.run_id.lower()).strip("-")


def _kubectl(*words: str) -> str:
    try:
        done = subprocess.run(["kubectl", *words], capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise InputError("kubectl is not on PATH; install it, or give --dry-run") from error
    if done.returncode:
        raise InputError(f"kubectl {words[0]}: {first_line(done.stderr)}")
    return done.stdout.rstrip()


def commands(job: Job) -> list[list[str]]:
    return [["kubectl", "apply", "--filename", str(job.files / FILE)]]


def submit(job: Job, folder: Path) -> str:
    _kubectl("apply", "--filename", str(folder / FILE))
    return _name(job)


def is_active(record: dict[str, Any], folder: Path) -> bool:
    """Returns whether the run has pods that have not ended."""
    ended = "--field-selector=status.phase!=Succeeded,status.phase!=Failed"
    try:
        return bool(_kubectl("get", "pods", f"--selector={LABEL}={record['id']}", ended, "-o=name"))
    except InputError:
        return False


def status(record: dict[str, Any], folder: Path) -> str:
    return _kubectl("get", "pods", f"--selector={LABEL}={record['id']}")


def logs(record: dict[str, Any], folder: Path) -> str:
    return _kubectl("logs", "--prefix", "--tail=-1", f"--selector={LABEL}={record['id']}")


def stop(record: dict[str, Any], folder: Path) -> str:
    """Deletes the objects; the pods save within their grace period."""
    return _kubectl("delete", "--filename", str(folder / FILE))
