"""What serves a model in containers: the Dockerfile's two targets, the compose file, the Kubernetes objects."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

import pytest
import yaml

from dist_template.wings.ship.serve import command

from .conftest import BakedProject

STAGE = re.compile(r"^FROM (\S+)(?: AS (\w+))?$", re.MULTILINE)
INSTRUCTIONS = "ARG CMD COPY ENTRYPOINT ENV EXPOSE FROM HEALTHCHECK RUN STOPSIGNAL USER WORKDIR".split()


def stages(text: str) -> dict[str, list[tuple[str, str]]]:
    """Stage -> its (instruction, arguments), after its base stages'."""
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    found: dict[str, list[tuple[str, str]]] = {}
    own: list[tuple[str, str]] = []
    for line in lines:
        if not line.strip() or line.startswith("#"):
            continue
        word, _, rest = line.partition(" ")
        assert word in INSTRUCTIONS, line
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            own = found[name] = list(found.get(base, []))
        own.append((word, rest))
    return found


def test_the_dockerfile_has_a_target_to_train_and_one_to_serve(default: BakedProject) -> None:
    text = default.read("Dockerfile")
    found = stages(text)
    assert list(found) == ["pinned", "wheels", "base", "serve", "train"], "the last one is built without --target"
    assert ("FROM", "${BASE:-pinned} AS base") in found["base"], "one base image, by digest or from one argument"
    assert re.search(r"^FROM python:3\.11\.\d+-slim-bookworm@sha256:[0-9a-f]{64} AS pinned$", text, re.MULTILINE)
    for name in ("serve", "train"):
        last = dict(found[name])
        words = [word for word, _ in found[name]]
        assert last["USER"] == "trainer", "no process is root"
        assert words.index("USER") > max(i for i, word in enumerate(words) if word == "COPY")
        entry = json.loads(last["ENTRYPOINT"])  # the exec form: python gets SIGTERM, not a shell
        assert entry[:3] == ["python", "-m", "my_trainer"] and isinstance(json.loads(last["CMD"]), list)
    serve = dict(found["serve"])
    assert "HEALTHCHECK" in serve and "HEALTHCHECK" not in dict(found["train"])
    probe = json.loads(serve["HEALTHCHECK"].partition(" CMD ")[2] or serve["HEALTHCHECK"].partition("CMD ")[2])
    ast.parse(probe[2])
    assert "127.0.0.1:8000/health" in probe[2] and serve["EXPOSE"] == "8000"
    given = command.flags([*json.loads(serve["ENTRYPOINT"])[4:], *json.loads(serve["CMD"])])
    assert (given.model, given.host, given.port) == ("/model", "0.0.0.0", 8000)


def test_compose_serves_on_loopback_and_waits_for_running_requests(default: BakedProject) -> None:
    (service,) = yaml.safe_load(default.read("launch/compose.yaml"))["services"].values()
    known = "build cap_drop command environment init ports restart security_opt stop_grace_period volumes".split()
    assert sorted(service) == known
    assert service["build"] == {"context": "..", "target": "serve"}
    assert service["ports"] == ["127.0.0.1:8000:8000"] and service["cap_drop"] == ["ALL"]
    given = command.flags(service["command"])
    assert int(service["stop_grace_period"].rstrip("s")) > given.grace_s and given.host == "0.0.0.0"
    assert given.api_key_env in service["environment"]
    assert service["volumes"][0].endswith(f":{given.model}")


# Object -> the fields that the Kubernetes API of that version has, as far as they are sensible here. A field that is
# not in the table is a slip, or needs a line here.
FIELDS: dict[str, str] = {
    "Deployment": "apiVersion kind metadata spec",
    "Deployment.spec": "replicas selector strategy template minReadySeconds revisionHistoryLimit",
    "Deployment.spec.strategy": "type rollingUpdate",
    "Deployment.spec.strategy.rollingUpdate": "maxUnavailable maxSurge",
    "Deployment.spec.template": "metadata spec",
    "Deployment.spec.template.spec": "automountServiceAccountToken containers securityContext"
    " terminationGracePeriodSeconds volumes nodeSelector tolerations affinity serviceAccountName",
    "Deployment.spec.template.spec.securityContext": "fsGroup runAsGroup runAsNonRoot runAsUser seccompProfile",
    "Deployment.spec.template.spec.containers": "args command env image imagePullPolicy lifecycle livenessProbe name"
    " ports readinessProbe resources securityContext startupProbe volumeMounts",
    "Deployment.spec.template.spec.containers.ports": "containerPort name protocol",
    "Deployment.spec.template.spec.containers.resources": "limits requests",
    "Deployment.spec.template.spec.containers.securityContext": "allowPrivilegeEscalation capabilities"
    " readOnlyRootFilesystem runAsNonRoot runAsUser",
    "Deployment.spec.template.spec.containers.volumeMounts": "mountPath name readOnly subPath",
    **{
        f"Deployment.spec.template.spec.containers.{probe}": "exec failureThreshold httpGet initialDelaySeconds"
        " periodSeconds successThreshold timeoutSeconds"
        for probe in ("livenessProbe", "readinessProbe", "startupProbe")
    },
    "Deployment.spec.template.spec.volumes": "configMap emptyDir hostPath name persistentVolumeClaim secret",
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
    return wrong + [found for key, each in value.items() for found in unknown_fields(each, f"{path}.{key}")]


def wrong_objects(text: str) -> list[str]:
    """What an API server, or its first rollout, would complain about."""
    manifest = yaml.safe_load(text)
    items = {item["kind"]: item for item in manifest["items"]}
    found = [] if (manifest["apiVersion"], manifest["kind"]) == ("v1", "List") else ["not a list"]
    found += [f"{kind}: {items.get(kind, {}).get('apiVersion')}" for kind, version in VERSIONS.items()
              if items.get(kind, {}).get("apiVersion") != version]  # fmt: skip
    for kind, item in items.items():
        found += unknown_fields(item, kind)
        if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", item["metadata"]["name"]):
            found.append(f"{kind}: the name")
    deployment, service, scaler = (items[kind]["spec"] for kind in VERSIONS)
    pod = deployment["template"]["spec"]
    (container,) = pod["containers"]
    labels = deployment["template"]["metadata"]["labels"].items()
    if not deployment["selector"]["matchLabels"].items() <= labels or not service["selector"].items() <= labels:
        found.append("a selector does not match the pods' labels")
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    probes = [container[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")]
    if {probe["port"] for probe in probes} | {port["targetPort"] for port in service["ports"]} != set(ports):
        found.append("a probe or the service names another port")
    if [probe["path"] for probe in probes] != ["/health", "/health", "/health"]:
        found.append("a probe asks for another path")
    if {mount["name"] for mount in container["volumeMounts"]} != {volume["name"] for volume in pod["volumes"]}:
        found.append("a mount has no volume")
    target = scaler["scaleTargetRef"]
    if (target["kind"], target["name"]) != ("Deployment", items["Deployment"]["metadata"]["name"]):
        found.append("the autoscaler scales something else")
    if not 1 <= scaler["minReplicas"] <= scaler["maxReplicas"] or "cpu" not in container["resources"]["requests"]:
        found.append("the autoscaler has no range, or nothing to measure")
    if not pod["securityContext"]["runAsNonRoot"] or container["securityContext"]["capabilities"] != {"drop": ["ALL"]}:
        found.append("it runs as root")
    given = command.flags(container["args"])
    if list(ports.values()) != [given.port] or given.host != "0.0.0.0":
        found.append("it does not listen where it is asked")
    before = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    if before + given.grace_s + 5 > pod["terminationGracePeriodSeconds"]:
        found.append("it is killed before its grace is over")
    if given.api_key_env not in {variable["name"] for variable in container["env"]}:
        found.append("it has no key")
    return found


def test_the_kubernetes_objects_fit_together(default: BakedProject) -> None:
    assert wrong_objects(default.read("launch/kubernetes.yaml")) == []


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
def test_a_slip_in_them_is_found(default: BakedProject, case: str) -> None:
    right, wrong = WRONG[case]
    text = default.read("launch/kubernetes.yaml")
    assert right in text
    try:
        assert wrong_objects(text.replace(right, wrong, 1)) != []
    except KeyError as missing:  # a field that has to be there
        assert case.startswith("a misspelt field"), missing
