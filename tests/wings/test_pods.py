"""The rendered pods train, each in a network namespace with the pod's host name and address."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from dist_template.errors import Exit
from tests.support.injury import OF_A_LAUNCHER, TwoHosts
from tests.support.manifests import pods, wrong
from tests.support.runs import CONFIGS, OURS, PROJECT, Workers, logged, run
from tests.support.tiers import tiers
from tests.support.wings import describe_job as describe
from tests.support.wings import launch_target as target

HOSTS = Path("/etc/netns")  # `ip netns exec` shows HOSTS/NAME/hosts as /etc/hosts


def lacking() -> str:
    """Why there can be no pods here; "" where there can."""
    if not shutil.which("ip") or not shutil.which("unshare"):
        return "needs `ip` (iproute2) and `unshare`"
    tried = "ip netns add pod-try && ip netns exec pod-try unshare --uts hostname pod"
    tried += "; ip netns delete pod-try"
    made = subprocess.run(["sh", "-c", tried], capture_output=True, text=True, check=False)
    return f"network namespaces are not allowed: {made.stderr.strip()}" if made.stderr else ""


class Pods(TwoHosts):
    """Two pods of a manifest, as the kubelet and the headless Service would run them."""

    def __init__(self, objects: list[dict[str, Any]], folder: Path) -> None:
        self.objects, self.folder, self.started = objects, folder, []
        ((self.template,), main) = pods(objects), objects[-1]
        self.name = main["metadata"]["name"]
        prefix = self.name if main["kind"] == "Job" else f"{self.name}-node-0"
        self.hosts = [f"{prefix}-{i}" for i in range(2)]

    def __enter__(self) -> Pods:
        super().__enter__()
        pairs = zip(self.addresses, self.hosts, strict=True)
        known = [f"{address} {host}.{self.name} {host}\n" for address, host in pairs]
        for name in self.names:
            (HOSTS / name).mkdir(parents=True)
            (HOSTS / name / "hosts").write_text("127.0.0.1 localhost\n" + "".join(known))
        return self

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        for process in self.started:
            process.wait()
        for name in self.names:
            shutil.rmtree(HOSTS / name, ignore_errors=True)

    def start(self, index: int) -> subprocess.Popen[bytes]:
        (container,) = self.template["spec"]["containers"]
        given = {"metadata.podIP": "", "status.podIP": self.addresses[index]}
        variables = {"JOB_COMPLETION_INDEX": str(index)}  # by Kubernetes, in pods of an indexed Job
        for one in container["env"]:
            path = one.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            variables[one["name"]] = given[path] if path else one["value"]
        kept = {k: value for k, value in os.environ.items() if not k.startswith(OF_A_LAUNCHER)}
        kept["PATH"] = f"{Path(sys.executable).parent}:{kept['PATH']}"  # as in the image
        words = ["ip", "netns", "exec", self.names[index], "unshare", "--uts", "sh", "-c"]
        words += ['hostname "$0"; exec "$@"', self.hosts[index]]
        words += [*container["command"], *container["args"]]
        with (self.folder / f"pod-{index}").open("ab") as log:
            options: Any = {"cwd": PROJECT, "stdout": log, "stderr": log}
            process = subprocess.Popen(words, env={**kept, **variables}, **options)
        self.started.append(process)
        return process

    def logs(self) -> str:
        return "\n".join((self.folder / f"pod-{index}").read_text()[-3000:] for index in range(2))


def manifest(kind: str, flags: list[str], folder: Path, monkeypatch: Any) -> list[dict[str, Any]]:
    """What `launch --on kubernetes` applies for two pods of one process."""
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.environ["PYTHONPATH"]}
    cluster: dict[str, Any] = {"nodes": 2, "devices_per_node": 1, "image": "train:1", "save_s": 30}
    cluster |= {
        "environment": environment,
        "mounts": [f"runs:{folder}"],
        "kubernetes": {"kind": kind},
    }
    (folder / "site.yaml").write_text(yaml.safe_dump({"cluster": cluster}))
    monkeypatch.chdir(PROJECT)
    monkeypatch.setenv("DIST_RUN_ID", f"pods_{kind}")
    job = describe(OURS, "fit", [*flags, f"--config={folder / 'site.yaml'}"], on_hosts=False)
    return list(yaml.safe_load_all(target("kubernetes").render(job)["kubernetes.yaml"]))


@pytest.mark.netns
@pytest.mark.slow
@pytest.mark.parametrize("kind", tiers(["Job", "JobSet"], daily=["Job"]))
def test_two_pods_train_as_one_machine_does(
    kind: str, flags: list[str], tmp_path: Path, monkeypatch: Any
) -> None:
    if why := lacking():
        pytest.skip(why)
    given = ("--model.architecture", "--trainer.devices")  # of the quickstart
    own = [f"--config={CONFIGS}/quickstart.yaml", "--run.name=default", "--trainer.max_steps=4"]
    own[1:1] = [flag for flag in flags if not flag.startswith(given)]
    run("prepare", *own)
    with Workers(2) as workers:
        argv = ["fit", *own, "--trainer.devices=2", "--run.name=one"]
        one = workers.run(argv, tmp_path / "one").check()
    objects = manifest(kind, own, tmp_path, monkeypatch)
    assert wrong(objects) == ""
    with Pods(objects, tmp_path) as two:
        later = two.start(1)  # it waits for the first pod
        codes = [two.start(0).wait(240), later.wait(60)]
        assert codes == [Exit.DONE, Exit.DONE], two.logs()
    losses = logged(tmp_path / "runs" / "default" / f"pods_{kind}", "train/loss")
    assert len(losses) == 4 and losses == pytest.approx(one.loss, abs=1e-6)
