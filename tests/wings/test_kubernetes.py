"""launch --on kubernetes: what is rendered is valid, fits together, and maps the exit codes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from dist_template import InputError
from dist_template.cluster.site import Kubernetes, Site
from dist_template.errors import Exit
from tests import PROJECT
from tests.support.manifests import OF_SITES, mutations, pods, wrong
from tests.support.wings import Job
from tests.support.wings import launch_target as target

KINDS = ("Job", "JobSet")
CASES = [(kind, gang) for kind in KINDS for gang in (None, "kueue")]
KUBERNETES: Any = target("kubernetes")
SECRET = "9f8e7d6c5b4a"


def job(
    kind: str = "Job",
    gang: str | None = None,
    *flags: str,
    run: str = "20261123-140000",
    **site: Any,
) -> Job:
    own: dict[str, Any] = {
        "resources": {"cpu": 32, "memory": "256Gi"},
        "secrets": {"WANDB_API_KEY": "wandb/api-key"},
        "pod": {
            "nodeSelector": {"gpu": "h100"},
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
        },
    }
    given: dict[str, Any] = {
        "image": "registry.example.org/train:1",
        "partition": "research",
        "nodes": 2,
    }
    given |= {
        "mounts": ["runs:/app/runs", "scratch:/scratch"],
        "time_limit": "24:00:00",
        "save_s": 120,
    }
    given |= {
        "environment": {"NCCL_DEBUG": "WARN"},
        "kubernetes": Kubernetes(kind=kind, gang=gang, **own),
        **site,
    }  # ty: ignore[invalid-argument-type]
    folder = Path("/project")
    return Job(
        package="trainer", verb="fit", flags=["--config", "configs/pretrain.yaml", *flags], site=Site(**given),
        run=folder / "runs" / "pretrain" / run, nodes=2, devices=8, hosts=[], accelerator="cuda", folder=folder,
        python=sys.executable, data=None,
    )  # fmt: skip


def rendered(described: Job) -> list[dict[str, Any]]:

    return list(yaml.safe_load_all(KUBERNETES.render(described)["kubernetes.yaml"]))


def variables(pod: dict[str, Any]) -> dict[str, Any]:
    (container,) = pod["spec"]["containers"]
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in container["env"]}


@pytest.mark.parametrize(("kind", "gang"), CASES)
def test_a_manifest_is_valid_and_fits_together(kind: str, gang: str | None) -> None:
    objects = rendered(job(kind, gang))
    assert wrong(objects) == ""
    by_kind = {one["kind"]: one for one in objects}
    main, name = objects[-1], objects[-1]["metadata"]["name"]
    assert main["kind"] == kind
    assert {one["metadata"]["name"] for one in objects} == {name}
    for one in objects:
        if one["kind"] in ("Job", "Service"):
            assert kubernetes_validate.validate(one, "1.37", strict=True) == "1.37"
    nodes = 0
    for pod in pods(objects):
        (container,), spec = pod["spec"]["containers"], pod["spec"]
        assert pod["metadata"]["labels"] == {"dist-template/run": name}
        assert {mount["name"] for mount in container["volumeMounts"]} == {
            volume["name"] for volume in spec["volumes"]
        }
        assert spec["nodeSelector"] == {"gpu": "h100"}, "the site's own fields"
        assert {"name": "shm", "emptyDir": {"medium": "Memory"}} in spec["volumes"]
        assert spec["terminationGracePeriodSeconds"] == 120
        assert variables(pod)["WANDB_API_KEY"] == {
            "secretKeyRef": {"name": "wandb", "key": "api-key"}
        }
        assert variables(pod)["NCCL_DEBUG"] == "WARN"
        nodes += container["resources"]["limits"].get("nvidia.com/gpu") == "8"
    assert nodes == 1, "one template of the nodes"
    if gang == "kueue":
        assert main["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"
    if kind == "Job":
        assert (
            by_kind["Service"]["spec"]["selector"].items()
            <= main["spec"]["template"]["metadata"]["labels"].items()
        )
        assert main["spec"]["template"]["spec"]["subdomain"] == name


@pytest.mark.parametrize("kind", KINDS)
def test_any_field_that_is_misspelt_or_of_another_type_is_found(kind: str) -> None:
    objects = rendered(job(kind, "kueue"))
    fields = [(name, wrong(changed)) for name, changed in mutations(objects)]
    assert len(fields) > 600
    assert [name for name, error in fields if not error] == []


def test_a_manifest_names_what_sites_name() -> None:
    """The keys below these are not in a schema; the rendered ones are known here."""
    found: dict[str, set[str]] = {}

    def walk(value: Any) -> None:
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            if key in OF_SITES and isinstance(one, dict):
                found.setdefault(key, set()).update(one)
            if isinstance(one, dict | list):
                walk(one)

    for kind, gang in CASES:
        walk(rendered(job(kind, gang)))
    assert found == {
        "labels": {"dist-template/run", "kueue.x-k8s.io/queue-name"},
        "selector": {"dist-template/run"},
        "nodeSelector": {"gpu"},
        "requests": {"cpu", "memory", "nvidia.com/gpu"},
        "limits": {"cpu", "memory", "nvidia.com/gpu"},
    }


@pytest.mark.parametrize("kind", KINDS)
def test_the_nodes_meet_at_the_first_pod_and_have_time_to_save(kind: str) -> None:
    objects = rendered(job(kind))
    (pod,) = pods(objects)
    (container,) = pod["spec"]["containers"]
    name, known = objects[0]["metadata"]["name"], variables(pod)
    first = f"{name}-0" if kind == "Job" else f"{name}-node-0-0"
    assert known["RDZV_ENDPOINT"].rpartition(":")[0] == f"{first}.{name}"
    assert (known["NNODES"], known["NPROC"], known["DIST_RUN_ID"]) == ("2", "8", "20261123-140000")
    assert int(known["SHUTDOWN_TIMEOUT"]) + 10 <= pod["spec"]["terminationGracePeriodSeconds"]
    assert container["args"][0] == "fit" and container["command"][0] == "bash"


def test_the_failure_policy_is_the_table_of_exit_codes() -> None:
    spec = rendered(job())[-1]["spec"]
    actions = {}
    for rule in spec["podFailurePolicy"]["rules"]:
        for code in rule.get("onExitCodes", {}).get("values", []):
            actions[code] = rule["action"]
    deliberate = {code for code in Exit if Exit.is_deliberate([code])}
    assert {code for code, action in actions.items() if action == "FailJob"} == deliberate - {
        Exit.REQUEUE
    }
    assert {code for code, action in actions.items() if action == "Ignore"} == {Exit.REQUEUE}
    assert Exit.HUNG not in actions and Exit.FAILED not in actions, "these are retried and counted"
    assert (spec["backoffLimitPerIndex"], spec["maxFailedIndexes"]) == (10, 0)
    assert spec["template"]["spec"]["restartPolicy"] == "Never", "a failure policy requires it"
    assert spec["activeDeadlineSeconds"] == 86_400


def test_the_projects_manifest_of_a_server_is_valid_too() -> None:
    served = yaml.safe_load((PROJECT / "launch" / "kubernetes.yaml").read_text(encoding="utf-8"))[
        "items"
    ]
    assert {one["kind"] for one in served} == {"Deployment", "Service", "HorizontalPodAutoscaler"}
    assert wrong(served) == ""
    assert [
        name for name, one in mutations(served) if name.endswith("misspelt") and not wrong(one)
    ] == []


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no image": ({"image": None}, "cluster.image is not given"),
    "no volume for the runs": (
        {"mounts": ["data:/data"]},
        "cluster.mounts has no volume for /app/runs",
    ),
    "Kueue without a queue": ({"partition": None}, "cluster.partition is not given"),
    "no path": ({"mounts": ["data"]}, "cluster.mounts has no volume for /app/runs"),
    "a password in an address": (
        {"environment": {"PROXY": f"http://me:{SECRET}@proxy"}},
        "PROXY has a secret",
    ),
    "a secret in the environment": (
        {"environment": {"WANDB_API_KEY": SECRET}},
        "WANDB_API_KEY has a secret",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_run_is_refused_in_one_sentence(case: str) -> None:
    changed, sentence = REFUSED[case]
    with pytest.raises(InputError, match=sentence) as refused:
        KUBERNETES.render(job("Job", "kueue", **changed))
    assert "\n" not in str(refused.value) and SECRET not in str(refused.value)


def test_a_secret_is_given_by_reference_alone() -> None:
    for words in (
        [f"--trainer.logger.init_args.api_key={SECRET}"],
        ["--trainer.logger.init_args.api_key", SECRET],
    ):
        with pytest.raises(
            InputError, match="has a secret, which the manifest would show"
        ) as refused:
            KUBERNETES.render(job("Job", None, *words))
        assert SECRET not in str(refused.value)
    with pytest.raises(InputError, match="secrets.WANDB_API_KEY is not a reference") as refused:
        KUBERNETES.render(job(kubernetes=Kubernetes(secrets={"WANDB_API_KEY": SECRET})))
    assert SECRET not in str(refused.value)


def test_the_printed_cure_is_accepted_on_the_command_line() -> None:
    objects = rendered(job("Job", None, "--cluster.kubernetes.secrets.WANDB_API_KEY=wandb/api-key"))
    assert wrong(objects) == ""


def test_kubectl_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/called\necho pod/a; echo "Error: no server" >&2; exit $FAILS\n'
    )
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("FAILS", "0")
    name = KUBERNETES.submit(job())
    record = {"id": name}
    for function in (KUBERNETES.status, KUBERNETES.logs, KUBERNETES.stop):
        function(record, tmp_path)
    called = (tmp_path / "called").read_text().splitlines()
    assert [line.split()[0] for line in called] == ["apply", "get", "logs", "delete"]
    assert name == "run-20261123-140000" and f"dist-template/run={name}" in called[1]
    assert called[3].endswith(str(tmp_path / "kubernetes.yaml"))
    monkeypatch.setenv("FAILS", "1")
    with pytest.raises(InputError, match="kubectl fails: Error: no server"):
        KUBERNETES.submit(job())
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(
        InputError,
        match="there is no kubectl on this machine; start it where kubectl is, or give --dry-run",
    ):
        KUBERNETES.submit(job())
