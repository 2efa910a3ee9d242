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


# Object of Kubernetes -> the fields that it has here. Another one is a slip, or needs a line here.
POD = "Deployment.spec.template.spec"
PROBE = "failureThreshold httpGet initialDelaySeconds periodSeconds timeoutSeconds"
FIELDS: dict[str, str] = {
    "Deployment.spec": "replicas selector strategy template",
    POD: "automountServiceAccountToken containers securityContext terminationGracePeriodSeconds"
    " volumes",
    f"{POD}.containers": "args command env image lifecycle livenessProbe name ports readinessProbe"
    " resources securityContext startupProbe volumeMounts",
    f"{POD}.containers.livenessProbe": PROBE, f"{POD}.containers.readinessProbe": PROBE,
    f"{POD}.containers.startupProbe": PROBE,
    f"{POD}.volumes": "emptyDir name persistentVolumeClaim",
    "Service.spec": "ports selector type",
    "HorizontalPodAutoscaler.spec": "behavior maxReplicas metrics minReplicas scaleTargetRef",
}  # fmt: skip
VERSIONS = {"Deployment": "apps/v1", "Service": "v1", "HorizontalPodAutoscaler": "autoscaling/v2"}


def unknown_fields(value: Any, path: str) -> list[str]:
    if isinstance(value, list):
        return [found for each in value for found in unknown_fields(each, path)]
    if not isinstance(value, dict):
        return []
    allowed = FIELDS[path].split() if path in FIELDS else value
    wrong = [f"{path}.{key}" for key in value if key not in allowed]
    for key, each in value.items():
        wrong += unknown_fields(each, f"{path}.{key}")
    return wrong


def wrong_objects(text: str) -> list[str]:
    """What an API server, or its first rollout, would complain about."""
    manifest = yaml.safe_load(text)
    items = {item["kind"]: item for item in manifest["items"]}
    fields = [field for kind, item in items.items() for field in unknown_fields(item, kind)]
    names = [item["metadata"]["name"] for item in items.values()]
    deployment, service, scaler = (items[kind]["spec"] for kind in VERSIONS)
    pod = deployment["template"]["spec"]
    (container,) = pod["containers"]
    labels = deployment["template"]["metadata"]["labels"].items()
    selectors = (deployment["selector"]["matchLabels"], service["selector"])
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    kinds = ("startupProbe", "livenessProbe", "readinessProbe")
    probes = [container[name]["httpGet"] for name in kinds]
    asked = {probe["port"] for probe in probes} | {port["targetPort"] for port in service["ports"]}
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    target = scaler["scaleTargetRef"]
    given = command.flags(container["args"][1:])
    before = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    grace = pod["terminationGracePeriodSeconds"]
    no_root = pod["securityContext"]["runAsNonRoot"]
    capabilities = container["securityContext"]["capabilities"]
    holds = {
        f"no unknown field: {fields}": not fields,
        "a list": (manifest["apiVersion"], manifest["kind"]) == ("v1", "List"),
        "versions": {kind: item["apiVersion"] for kind, item in items.items()} == VERSIONS,
        "names": all(re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", name) for name in names),
        "selectors match the pods' labels": all(each.items() <= labels for each in selectors),
        "probes and the service name the port": asked == set(ports),
        "probes ask for /health": all(probe["path"] == "/health" for probe in probes),
        "each mount has a volume": mounts == {volume["name"] for volume in pod["volumes"]},
        "the deployment is scaled": target["name"] == items["Deployment"]["metadata"]["name"],
        "a range of replicas": 1 <= scaler["minReplicas"] <= scaler["maxReplicas"],
        "CPUs to measure": "cpu" in container["resources"]["requests"],
        "no root": no_root and capabilities == {"drop": ["ALL"]},
        "it listens": [*ports.values()] == [given.port] and given.host == "0.0.0.0",
        "it has its grace": before + given.grace_s + 5 <= grace,
        "it has a key": given.api_key_env in {variable["name"] for variable in container["env"]},
    }
    return [name for name, is_so in holds.items() if not is_so]


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
