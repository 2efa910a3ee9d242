"""launch --on kubernetes: what is rendered is valid, fits together, and maps the exit codes."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import jsonschema
import kubernetes_validate
import pytest
import referencing
import yaml
from kubernetes_validate.utils import schema_contents

from dist_template import InputError
from dist_template.cluster.site import Kubernetes, Site
from dist_template.errors import Exit
from dist_template.wings.launch.job import Job, describe
from dist_template.wings.launch.targets import target
from tests import ROOT
from tests.support.injury import OF_A_LAUNCHER, TwoHosts
from tests.support.runs import CONFIGS, OURS, PROJECT, Workers, logged, run
from tests.support.tiers import tiers

# The CustomResourceDefinition of kubernetes-sigs/jobset v0.12.0 (Apache License 2.0), without texts
# and status: unknown fields are errors, pods and Jobs refer to Kubernetes' own schemas.
JOB_SET = ROOT / "tests" / "support" / "schemas" / "JobSet.json"
DEFINITIONS: Any = referencing.Resource.from_contents(
    schema_contents("kubernetes-json-schema/v1.37.0-local-strict/_definitions.json", "1.37.0")
)
KNOWN: Any = referencing.Registry().with_resource("/api/_definitions.json", DEFINITIONS)
JOB_SETS: Any = jsonschema.Draft202012Validator(json.loads(JOB_SET.read_text()), registry=KNOWN)
CASES = [(kind, gang) for kind in ("Job", "JobSet") for gang in (None, "kueue")]
KUBERNETES: Any = target("kubernetes")
SECRET, START = "9f8e7d6c5b4a", "20261123-140000"


def job(kind: str = "Job", gang: str | None = None, *flags: str, **site: Any) -> Job:
    own: dict[str, Any] = {"resources": {"cpu": 32, "memory": "256Gi"}, "kind": kind, "gang": gang}
    own |= {"secrets": {"WANDB_API_KEY": "wandb/api-key"}, "pod": {"nodeSelector": {"gpu": "h100"}}}
    given: dict[str, Any] = {"image": "registry.example.org/train:1", "partition": "research"}
    given |= {"mounts": ["runs:/app/runs", "scratch:/scratch"], "time_limit": "24:00:00"}
    given |= {"nodes": 2, "save_s": 120, "environment": {"NCCL_DEBUG": "WARN"}}
    given |= {"kubernetes": Kubernetes(**own), **site}
    folder, words = Path("/project"), ["--config", "configs/pretrain.yaml", *flags]
    sizes: Any = {"nodes": 2, "devices": 8, "hosts": [], "accelerator": "cuda"}
    sizes |= {"folder": folder, "python": sys.executable, "data": None}
    run = folder / "runs" / "pretrain" / START
    return Job(package="trainer", verb="fit", flags=words, site=Site(**given), run=run, **sizes)


def rendered(described: Job) -> list[dict[str, Any]]:
    """The objects, which have only fields that Kubernetes and JobSet know."""
    objects = list(yaml.safe_load_all(KUBERNETES.render(described)["kubernetes.yaml"]))
    for one in objects:
        if one["kind"] == "JobSet":
            JOB_SETS.validate(one)
        else:
            kubernetes_validate.validate(one, "1.37", strict=True)
    return objects


def pod_of(main: dict[str, Any]) -> dict[str, Any]:
    """The template of the pods of a Job, or of the only Job of a JobSet."""
    if main["kind"] == "JobSet":
        main = main["spec"]["replicatedJobs"][0]["template"]
    return main["spec"]["template"]


@pytest.mark.parametrize(("kind", "gang"), CASES)
def test_a_manifest_is_valid_and_fits_together(kind: str, gang: str | None) -> None:
    objects = rendered(job(kind, gang))
    main, name = objects[-1], objects[-1]["metadata"]["name"]
    assert main["kind"] == kind and {one["metadata"]["name"] for one in objects} == {name}
    pod = pod_of(main)
    (container,), spec = pod["spec"]["containers"], pod["spec"]
    known = {one["name"]: one.get("value", one.get("valueFrom")) for one in container["env"]}
    assert pod["metadata"]["labels"] == {"dist-template/run": name}
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in spec["volumes"]}
    assert spec["nodeSelector"] == {"gpu": "h100"}, "the site's own fields"
    assert {"name": "shm", "emptyDir": {"medium": "Memory"}} in spec["volumes"]
    assert known["WANDB_API_KEY"] == {"secretKeyRef": {"name": "wandb", "key": "api-key"}}
    assert known["NCCL_DEBUG"] == "WARN"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
    first = f"{name}-0" if kind == "Job" else f"{name}-node-0-0"
    assert known["RDZV_ENDPOINT"].rpartition(":")[0] == f"{first}.{name}"
    assert (known["NNODES"], known["NPROC"], known["DIST_RUN_ID"]) == ("2", "8", START)
    assert int(known["SHUTDOWN_TIMEOUT"]) + 10 <= spec["terminationGracePeriodSeconds"] == 120
    if gang == "kueue":
        assert main["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"
    if kind == "Job":
        (service,) = [one for one in objects if one["kind"] == "Service"]
        template = main["spec"]["template"]
        assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
        assert template["spec"]["subdomain"] == name


@pytest.mark.parametrize("kind", ["Job", "JobSet"])
def test_a_name_that_kubernetes_refuses_is_a_sentence(kind: str) -> None:
    """63 characters of a host name: the longest pod's."""
    most = 63 - len("run-" if kind == "Job" else "run--node-0") - len("-1")
    described = job(kind)
    parent = described.run.parent
    assert rendered(replace(described, run=parent / ("a" * most)))
    for name in ("a" * (most + 1), "___"):
        with pytest.raises(InputError, match="DIST_RUN_ID '.*' becomes the pod run-"):
            KUBERNETES.render(replace(described, run=parent / name))


@pytest.mark.parametrize("name", ["replicatedJobs", "enableDNSHostnames", "completionMode"])
def test_a_misspelt_field_of_a_job_set_is_found(name: str) -> None:
    text = yaml.safe_dump(rendered(job("JobSet"))[0])
    with pytest.raises(jsonschema.ValidationError):
        JOB_SETS.validate(yaml.safe_load(text.replace(name, f"{name}x")))


def test_the_failure_policy_is_the_table_of_exit_codes() -> None:
    spec = rendered(job())[-1]["spec"]
    actions = {}
    for rule in spec["podFailurePolicy"]["rules"]:
        codes = rule.get("onExitCodes", {}).get("values", [])
        actions |= dict.fromkeys(codes, rule["action"])
    expected = {code: "FailJob" for code in Exit if Exit.is_deliberate([code])}
    assert actions == expected | {Exit.REQUEUE: "Ignore"}, "others are retried and counted"
    assert (spec["backoffLimitPerIndex"], spec["maxFailedIndexes"]) == (10, 0)
    assert spec["template"]["spec"]["restartPolicy"] == "Never", "a failure policy requires it"
    assert spec["activeDeadlineSeconds"] == 86_400


OPEN = Kubernetes(secrets={"WANDB_API_KEY": SECRET})
SHOWN, KEY = "has a secret, which the manifest would show", "--trainer.logger.init_args.api_key"
REFUSED: list[tuple[str, list[str], dict[str, Any]]] = [
    ("cluster.image is not given", [], {"image": None}),
    ("cluster.mounts has no volume for /app/runs", [], {"mounts": ["data:/data"]}),
    ("cluster.mounts has 'Runs_1'; give a name", [], {"mounts": ["Runs_1:/app/runs"]}),
    ("cluster.mounts has /app/runs twice", [], {"mounts": ["a:/app/runs", "b:/app/runs"]}),
    ("cluster.partition is not given", [], {"partition": None}),
    ("PROXY has a secret", [], {"environment": {"PROXY": f"http://me:{SECRET}@proxy"}}),
    ("WANDB_API_KEY has a secret", [], {"environment": {"WANDB_API_KEY": SECRET}}),
    ("WANDB_API_KEY is not a reference", [], {"kubernetes": OPEN}),
    (SHOWN, [f"{KEY}={SECRET}"], {}),
    (SHOWN, [KEY, SECRET], {}),
]


@pytest.mark.parametrize(("sentence", "words", "site"), REFUSED)
def test_what_cannot_run_or_shows_a_secret_is_refused(sentence: str, words: Any, site: Any) -> None:
    with pytest.raises(InputError, match=sentence) as refused:
        KUBERNETES.render(job("Job", "kueue", *words, **site))
    assert "\n" not in str(refused.value) and SECRET not in str(refused.value)
    assert rendered(job("Job", None, "--cluster.kubernetes.secrets.WANDB_API_KEY=wandb/api-key"))


def test_kubectl_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/called\necho pod/a\n')
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    name = KUBERNETES.submit(job())
    for function in (KUBERNETES.status, KUBERNETES.logs, KUBERNETES.stop):
        function({"id": name}, tmp_path)
    called = (tmp_path / "called").read_text().splitlines()
    assert [line.split()[0] for line in called] == ["apply", "get", "logs", "delete"]
    assert name == f"run-{START}" and f"dist-template/run={name}" in called[1]
    assert called[3] == f"delete --ignore-not-found service/{name} job/{name}"
    (tmp_path / "kubernetes.yaml").write_text("kind: JobSet\n---\nkind: Deployment\n")
    KUBERNETES.stop({"id": name}, tmp_path)
    assert (tmp_path / "called").read_text().endswith(f"--ignore-not-found jobset/{name}\n")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(InputError, match="there is no kubectl on this machine; .*--dry-run"):
        KUBERNETES.submit(job())


HOSTS = Path("/etc/netns")  # `ip netns exec` shows HOSTS/NAME/hosts as /etc/hosts


def lacking() -> str:
    """Why there can be no pods here; "" where there can."""
    tried = "ip netns add pod-try && ip netns exec pod-try unshare --uts hostname pod"
    words = ["sh", "-c", f"{tried}; ip netns delete pod-try"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stderr.strip()


class Pods(TwoHosts):
    """Two pods of a manifest, as the kubelet and the headless Service would run them."""

    def __init__(self, main: dict[str, Any], folder: Path) -> None:
        self.folder, self.name = folder, main["metadata"]["name"]
        (self.container,) = pod_of(main)["spec"]["containers"]
        prefix = self.name if main["kind"] == "Job" else f"{self.name}-node-0"
        self.hosts = [f"{prefix}-{i}" for i in range(2)]

    def __enter__(self) -> Self:
        super().__enter__()
        pairs = zip(self.addresses, self.hosts, strict=True)
        known = [f"{address} {host}.{self.name} {host}\n" for address, host in pairs]
        for name in self.names:
            (HOSTS / name).mkdir(parents=True)
            (HOSTS / name / "hosts").write_text("127.0.0.1 localhost\n" + "".join(known))
        return self

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        for name in self.names:
            shutil.rmtree(HOSTS / name, ignore_errors=True)

    def start(self, index: int) -> subprocess.Popen[bytes]:
        kept = {k: value for k, value in os.environ.items() if not k.startswith(OF_A_LAUNCHER)}
        kept["PATH"] = f"{Path(sys.executable).parent}:{kept['PATH']}"  # as in the image
        kept["JOB_COMPLETION_INDEX"] = str(index)  # by Kubernetes, in pods of an indexed Job
        given = {"metadata.podIP": "", "status.podIP": self.addresses[index]}
        for one in self.container["env"]:
            path = one.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            kept[one["name"]] = given[path] if path else one["value"]
        words = ["ip", "netns", "exec", self.names[index], "unshare", "--uts", "sh", "-c"]
        words += ['hostname "$0"; exec "$@"', self.hosts[index]]
        words += [*self.container["command"], *self.container["args"]]
        with (self.folder / f"pod-{index}").open("wb") as log:
            return subprocess.Popen(words, env=kept, cwd=PROJECT, stdout=log, stderr=log)


@pytest.mark.netns
@pytest.mark.slow
@pytest.mark.parametrize("kind", tiers(["Job", "JobSet"], daily=[]))
def test_pods_train_as_one_machine(kind: str, flags: Any, tmp_path: Path, monkeypatch: Any) -> None:
    if why := lacking():
        pytest.skip(f"needs network namespaces: {why}")
    given = ("--model.architecture", "--trainer.devices")  # of the quickstart
    own = [f"--config={CONFIGS}/quickstart.yaml", "--run.name=default", "--trainer.max_steps=4"]
    own[1:1] = [flag for flag in flags if not flag.startswith(given)]
    run("prepare", *own)
    argv = ["fit", *own, "--trainer.devices=2", "--run.name=one"]
    one = Workers(2).run(argv, tmp_path / "one").check()
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.environ["PYTHONPATH"]}
    cluster: dict[str, Any] = {"nodes": 2, "devices_per_node": 1, "image": "train:1", "save_s": 30}
    cluster |= {"environment": environment, "mounts": [f"runs:{tmp_path}"]}
    cluster["kubernetes"] = {"kind": kind}
    (tmp_path / "site.yaml").write_text(yaml.safe_dump({"cluster": cluster}))
    monkeypatch.chdir(PROJECT)
    monkeypatch.setenv("DIST_RUN_ID", f"pods_{kind}")
    described = describe(OURS, "fit", [*own, f"--config={tmp_path}/site.yaml"], on_hosts=False)
    with Pods(rendered(described)[-1], tmp_path) as two:
        later = two.start(1)  # it waits for the first pod
        codes = [two.start(0).wait(240), later.wait(60)]
    logs = [(tmp_path / f"pod-{index}").read_text()[-3000:] for index in range(2)]
    assert codes == [Exit.DONE, Exit.DONE], "\n".join(logs)
    losses = logged(tmp_path / "runs" / "default" / f"pods_{kind}", "train/loss")
    assert len(losses) == 4 and losses == pytest.approx(one.loss, abs=1e-6)
