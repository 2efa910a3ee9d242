"""How a site's Kubernetes runs a job, as `cluster.kubernetes` in a configuration describes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Kubernetes:
    """How a site's Kubernetes runs a job, one pod per node.

    Args:
        kind: What is rendered: Job (built into Kubernetes), JobSet, TrainJob (Kubeflow Trainer 2)
            or RayJob (KubeRay).
        gang: Who starts all pods or none, from the queue `cluster.partition`: kueue or volcano.
            null: each pod starts when there is a node for it.
        device: Resource name of a device. A run on CPUs requests none.
        resources: Further requests and limits of a pod, as {cpu: 32, memory: 256Gi}.
        secrets: Environment variables from Secrets, as {WANDB_API_KEY: wandb/api-key}: the key
            api-key of the Secret wandb.
        pod: Further fields of the pods, with Kubernetes' own names: nodeSelector, tolerations,
            priorityClassName, affinity, imagePullSecrets …
    """

    kind: Literal["Job", "JobSet", "TrainJob", "RayJob"] = "Job"
    gang: Literal["kueue", "volcano"] | None = None
    device: str = "nvidia.com/gpu"
    resources: dict[str, Any] = field(default_factory=dict)
    secrets: dict[str, str] = field(default_factory=dict)
    pod: dict[str, Any] = field(default_factory=dict)
