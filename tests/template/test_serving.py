"""What serves a model in containers: the Dockerfile, the compose file, the Kubernetes objects."""

import ast
import glob
import json
import re

import kubernetes_validate
import pytest
import yaml

from dist_template.wings.ship.serve import command
from dist_template.wings.ship.serve.service import HEALTH, METRICS, READY

from .conftest import ROOT, SOURCE, BakedProject

DEPLOY = ROOT / "docs" / "deploy"
DIGEST = "@sha256:[0-9a-f]{64}"


def test_the_dockerfile_has_one_image_to_train_and_to_serve(default: BakedProject) -> None:
    lines = default.read("Dockerfile").splitlines()
    steps = [line.partition(" ")[::2] for line in lines if re.match("[A-Z]+ ", line)]
    words = [word for word, _ in steps]
    base = rf"ARG BASE=python:3\.11\.\d+-slim-bookworm{DIGEST}"
    assert re.fullmatch(base, " ".join(steps[0])) and ("FROM", "${BASE}") in steps
    assert re.search(rf"(?m)^ *image: \S+{DIGEST}$", (SOURCE / ".gitlab-ci.yml").read_text())
    last = dict(steps)
    assert last["USER"] == "trainer", "no process is root"
    assert words.index("USER") > max(i for i, word in enumerate(words) if word == "COPY")
    # The exec form: python gets SIGTERM, not a shell.
    assert json.loads(last["ENTRYPOINT"]) == ["python", "-m", "my_trainer"]
    assert json.loads(last["CMD"]) == ["--help"]
    sources = set[str]()
    for word, text in steps:
        if word == "COPY":
            *names, _ = text.split()  # the last one is where they go
            sources.update(name for name in names if not name.startswith("--"))
    assert {"environment.py", "lock-*.txt", "Makefile", "my_trainer", "configs"} <= sources
    # [x] at the end: may be missing, and COPY takes the others of its line
    for source in sources - {"wheel[s]", "vendor/dist-templat[e]"}:
        assert glob.glob(source, root_dir=default.path), source
    assert re.findall(r"make (\w+)", default.read("Dockerfile")) == ["setup"]


def test_compose_serves_on_loopback_and_waits_for_running_requests() -> None:
    (service,) = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"].values()
    known = "build cap_drop command environment healthcheck init ports restart security_opt"
    assert sorted(service) == [*known.split(), "stop_grace_period", "volumes"]
    assert service["build"] == "." and service["command"][0] == "serve"
    assert service["ports"] == ["127.0.0.1:8000:8000"] and service["cap_drop"] == ["ALL"]
    probe = service["healthcheck"]["test"]
    ast.parse(probe[3])
    assert probe[:3] == ["CMD", "python", "-c"] and "127.0.0.1:8000/ready" in probe[3]
    given = command.flags(service["command"][1:])
    assert int(service["stop_grace_period"].rstrip("s")) > given.grace_s and given.host == "0.0.0.0"
    assert given.api_key_env in service["environment"]
    assert service["volumes"][0].endswith(f":{given.model}")


def wrong_objects(text: str) -> list[str]:
    """What an API server, or its first rollout, would complain about."""
    manifest = yaml.safe_load(text)
    try:
        for item in manifest["items"]:
            kubernetes_validate.validate(item, "1.37", strict=True)
    except kubernetes_validate.ValidationError as error:
        return [error.message]
    items = {item["kind"]: item for item in manifest["items"]}
    deployment, service = items["Deployment"]["spec"], items["Service"]["spec"]
    scaler = items["HorizontalPodAutoscaler"]["spec"]
    pod = deployment["template"]["spec"]
    (container,) = pod["containers"]
    labels = deployment["template"]["metadata"]["labels"].items()
    of_deployment = deployment["selector"]["matchLabels"].items()
    of_service = service["selector"].items()
    (port,) = container["ports"]
    kinds = ("startupProbe", "livenessProbe", "readinessProbe")
    probes = [container[name]["httpGet"] for name in kinds]
    paths = [probe["path"] for probe in probes]
    asked = {probe["port"] for probe in probes}
    asked.update(each["targetPort"] for each in service["ports"])
    annotations = deployment["template"]["metadata"]["annotations"]
    scraped = {name: annotations[f"prometheus.io/{name}"] for name in ("scrape", "path", "port")}
    metrics = {"scrape": "true", "path": METRICS, "port": str(port["containerPort"])}
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"] for volume in pod["volumes"]}
    target = scaler["scaleTargetRef"]["name"]
    given = command.flags(container["args"][1:])
    before = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    grace = pod["terminationGracePeriodSeconds"]
    no_root = pod["securityContext"]["runAsNonRoot"]
    capabilities = container["securityContext"]["capabilities"]
    variables = {variable["name"] for variable in container["env"]}
    is_at_port = given.port == port["containerPort"]
    holds = {
        "selectors match the pods' labels": of_deployment <= labels and of_service <= labels,
        "probes and the service name the port": asked == {port["name"]},
        "it is ready when the model is": paths == [READY, HEALTH, READY],
        "Prometheus finds the metrics": scraped == metrics,
        "each mount has a volume": mounts == volumes,
        "the deployment is scaled": target == items["Deployment"]["metadata"]["name"],
        "a range of replicas": 1 <= scaler["minReplicas"] <= scaler["maxReplicas"],
        "CPUs to measure": "cpu" in container["resources"]["requests"],
        "no root": no_root and capabilities == {"drop": ["ALL"]},
        "it listens": is_at_port and given.host == "0.0.0.0",
        "it has its grace": before + given.grace_s + 5 <= grace,
        "it has a key": given.api_key_env in variables,
    }
    return [name for name, is_so in holds.items() if not is_so]


TWICE = "minReplicas: 2\n      minReplica"
WRONG = {  # text, another, what is then wrong
    "another label": ("selector: { app: serve }", "selector: { app: server }", "selectors match"),
    "another port": ("--host=0.0.0.0, ", "--host=0.0.0.0, --port=8080, ", "it listens"),
    "not ready, but asked": (
        "readinessProbe: { httpGet: { path: /ready",
        "readinessProbe: { httpGet: { path: /health",
        "it is ready when",
    ),
    "no metrics": ("prometheus.io/path: /metrics", "prometheus.io/path: /", "Prometheus finds"),
    "a misspelt field": ("minReplicas: 2", f"{TWICE}: 2", "Additional properties"),
    "a volume less": ("- { name: tmp, emptyDir: {} }", "", "each mount has a volume"),
    "no grace": ("PeriodSeconds: 40", "PeriodSeconds: 20", "it has its grace"),
    "loopback": ("--host=0.0.0.0, ", "", "it listens"),
    "root": ("runAsNonRoot: true", "runAsNonRoot: false", "no root"),
}


@pytest.mark.parametrize("case", WRONG)
def test_the_kubernetes_objects_fit_together_and_a_slip_in_them_is_found(case: str) -> None:
    right, wrong, sentence = WRONG[case]
    text = (DEPLOY / "kubernetes.yaml").read_text()
    assert right in text and wrong_objects(text) == []
    (found,) = wrong_objects(text.replace(right, wrong, 1))
    assert found.startswith(sentence)
