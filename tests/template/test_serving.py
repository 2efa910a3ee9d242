"""What serves a model in containers: the Dockerfile, the compose file, the Kubernetes objects."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

import pytest
import yaml

from dist_template.wings.ship.serve import command

from .conftest import ROOT, BakedProject

DEPLOY = ROOT / "docs" / "deploy"
INSTRUCTIONS = "ARG CMD COPY ENTRYPOINT ENV FROM RUN USER WORKDIR".split()


def test_the_dockerfile_has_one_image_to_train_and_to_serve(default: BakedProject) -> None:
    lines = default.read("Dockerfile").splitlines()
    steps = [line.partition(" ")[::2] for line in lines if line and not line.startswith("#")]
    words = [word for word, _ in steps]
    assert set(words) <= set(INSTRUCTIONS)
    base = r"ARG BASE=python:3\.11\.\d+-slim-bookworm@sha256:[0-9a-f]{64}"
    assert re.fullmatch(base, " ".join(steps[0])) and ("FROM", "${BASE}") in steps
    last = dict(steps)
    assert last["USER"] == "trainer", "no process is root"
    assert words.index("USER") > max(i for i, word in enumerate(words) if word == "COPY")
    # The exec form: python gets SIGTERM, not a shell.
    assert json.loads(last["ENTRYPOINT"]) == ["python", "-m", "my_trainer"]
    assert json.loads(last["CMD"]) == ["--help"]


def test_compose_serves_on_loopback_and_waits_for_running_requests() -> None:
    (service,) = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"].values()
    known = "build cap_drop command environment healthcheck init ports restart security_opt"
    assert sorted(service) == [*known.split(), "stop_grace_period", "volumes"]
    assert service["build"] == "." and service["command"][0] == "serve"
    assert service["ports"] == ["127.0.0.1:8000:8000"] and service["cap_drop"] == ["ALL"]
    probe = service["healthcheck"]["test"]
    ast.parse(probe[3])
    assert probe[:3] == ["CMD", "python", "-c"] and "127.0.0.1:8000/health" in probe[3]
    given = command.flags(service["command"][1:])
    assert int(service["stop_grace_period"].rstrip("s")) > given.grace_s and given.host == "0.0.0.0"
    assert given.api_key_env in service["environment"]
    assert service["volumes"][0].endswith(f":{given.model}")


# Object -> the fields that the Kubernetes API of that version has, as far as they are sensible
# here. A field that is
# not in the table is a slip, or needs a line here.
FIELDS: dict[str, str] = {
    "Deployment": "apiVersion kind metadata spec",
    "Deployment.spec": "replicas selector strategy template minReadySeconds revisionHistoryLimit",
    "Deployment.spec.strategy": "type rollingUpdate",
    "Deployment.spec.strategy.rollingUpdate": "maxUnavailable maxSurge",
    "Deployment.spec.template": "metadata spec",
    "Deployment.spec.template.spec": "automountServiceAccountToken containers securityContext"
    " terminationGracePeriodSeconds volumes nodeSelector tolerations affinity serviceAccountName",
    "Deployment.spec.template.spec.securityContext": "fsGroup runAsGroup runAsNonRoot runAsUser "
    "seccompProfile",
    "Deployment.spec.template.spec.containers": "args command env image imagePullPolicy lifecycle "
    "livenessProbe name"
    " ports readinessProbe resources securityContext startupProbe volumeMounts",
    "Deployment.spec.template.spec.containers.ports": "containerPort name protocol",
    "Deployment.spec.template.spec.containers.resources": "limits requests",
    "Deployment.spec.template.spec.containers.securityContext": "allowPrivilegeEscalation "
    "capabilities"
    " readOnlyRootFilesystem runAsNonRoot runAsUser",
    "Deployment.spec.template.spec.containers.volumeMounts": "mountPath name readOnly subPath",
    **{
        f"Deployment.spec.template.spec.containers.{probe}": "exec failureThreshold httpGet initialDelaySeconds"
        " periodSeconds successThreshold timeoutSeconds"
        for probe in ("livenessProbe", "readinessProbe", "startupProbe")
    },
    "Deployment.spec.template.spec.volumes": "configMap emptyDir hostPath name "
    "persistentVolumeClaim secret",
    "Service": "apiVersion kind metadata spec",
    "Service.spec": "ports selector type",
    "Service.spec.ports": "name port protocol targetPort",
    "HorizontalPodAutoscaler": "apiVersion kind metadata spec",
    "HorizontalPodAutoscaler.spec": "behavior maxReplicas metrics minReplicas scaleTargetRef",
    "HorizontalPodAutoscaler.spec.scaleTargetRef": "apiVersion kind name",
    "HorizontalPodAutoscaler.spec.metrics": "type resource pods",
    "HorizontalPodAutoscaler.spec.metrics.resource": "name target",
}
VERSIONS = {"Deployment": "apps/v1", "Service": "v1", "HorizontalPodAutoscaler": "autoscaling/v2"}


def unknown_fields(value: Any, path: str) -> list[str]:
    if isinstance(value, list):
        return [found for each in value for found in unknown_fields(each, path)]
    if not isinstance(value, dict):
        return []
    allowed = FIELDS.get(path, "").split()
    wrong = [f"{path}.{key}" for key in value if allowed and key not in allowed]
    return wrong + [
        found for key, each in value.items() for found in unknown_fields(each, f"{path}.{key}")
    ]


def wrong_objects(text: str) -> list[str]:
    """What an API server, or its first rollout, would complain about."""
    manifest = yaml.safe_load(text)
    items = {item["kind"]: item for item in manifest["items"]}
    found = [] if (manifest["apiVersion"], manifest["kind"]) == ("v1", "List") else ["not a list"]
    found += [f"{kind}: {items.get(kind, {}).get('apiVersion')}" for kind,
        version in VERSIONS.items()
              if items.get(kind, {}).get("apiVersion") != version]  # fmt: skip
    for kind, item in items.items():
        found += unknown_fields(item, kind)
        if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", item["metadata"]["name"]):
            found.append(f"{kind}: the name")
    deployment, service, scaler = (items[kind]["spec"] for kind in VERSIONS)
    pod = deployment["template"]["spec"]
    (container,) = pod["containers"]
    labels = deployment["template"]["metadata"]["labels"].items()
    if (
        not deployment["selector"]["matchLabels"].items() <= labels
        or not service["selector"].items() <= labels
    ):
        found.append("a selector does not match the pods' labels")
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    probes = [
        container[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")
    ]
    if {probe["port"] for probe in probes} | {
        port["targetPort"] for port in service["ports"]
    } != set(ports):
        found.append("a probe or the service names another port")
    if [probe["path"] for probe in probes] != ["/health", "/health", "/health"]:
        found.append("a probe asks for another path")
    if {mount["name"] for mount in container["volumeMounts"]} != {
        volume["name"] for volume in pod["volumes"]
    }:
        found.append("a mount has no volume")
    target = scaler["scaleTargetRef"]
    if (target["kind"], target["name"]) != ("Deployment", items["Deployment"]["metadata"]["name"]):
        found.append("the autoscaler scales something else")
    if (
        not 1 <= scaler["minReplicas"] <= scaler["maxReplicas"]
        or "cpu" not in container["resources"]["requests"]
    ):
        found.append("the autoscaler has no range, or nothing to measure")
    if not pod["securityContext"]["runAsNonRoot"] or container["securityContext"][
        "capabilities"
    ] != {"drop": ["ALL"]}:
        found.append("it runs as root")
    given = command.flags(container["args"][1:])
    if list(ports.values()) != [given.port] or given.host != "0.0.0.0":
        found.append("it does not listen where it is asked")
    before = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    if before + given.grace_s + 5 > pod["terminationGracePeriodSeconds"]:
        found.append("it is killed before its grace is over")
    if given.api_key_env not in {variable["name"] for variable in container["env"]}:
        found.append("it has no key")
    return found


def test_the_kubernetes_objects_fit_together() -> None:
    assert wrong_objects((DEPLOY / "kubernetes.yaml").read_text()) == []


WRONG = {
    "a misspelt field": ("readinessProbe:", "readynessProbe:"),
    "another label": ("selector: { app: serve }", "selector: { app: server }"),
    "another port": ("containerPort: 8000", "containerPort: 8080"),
    "another version": ("autoscaling/v2", "autoscaling/v1beta1"),
    "a volume less": ("- { name: tmp, emptyDir: {} }", ""),
    "no grace": ("terminationGracePeriodSeconds: 40", "terminationGracePeriodSeconds: 20"),
    "loopback": ("--host=0.0.0.0, ", ""),
    "root": ("runAsNonRoot: true", "runAsNonRoot: false"),
    "a misspelt field of a volume": ("persistentVolumeClaim", "persistantVolumeClaim"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_slip_in_them_is_found(case: str) -> None:
    right, wrong = WRONG[case]
    text = (DEPLOY / "kubernetes.yaml").read_text()
    assert right in text
    try:
        assert wrong_objects(text.replace(right, wrong, 1)) != []
    except KeyError as missing:  # a field that has to be there
        assert case.startswith("a misspelt field"), missing
