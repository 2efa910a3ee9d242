"""`launch`: what it renders and refuses, and that each launcher trains on two loopback hosts."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dist_template.cluster.site import Site
from dist_template.errors import Exit
from dist_template.wings.launch import command, nodes
from tests import ROOT
from tests.support import launched as of
from tests.support.injury import OF_A_LAUNCHER
from tests.support.installed import write_metadata
from tests.support.launched import STEPS, Launched, site, two
from tests.support.line import main
from tests.support.loopback import LACKING, Hosts
from tests.support.runs import OURS, PACKAGE, PROJECT, logged, only_run, run, run_in_subprocess
from tests.support.tiers import tiers
from tests.support.wings import describe_job as describe
from tests.support.wings import launch_target as target

BATCH = "--data.global_batch_size=192"
Flags = list[str]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    if LACKING:
        pytest.skip(LACKING)
    with Hosts(tmp_path_factory.mktemp("ssh")) as started:
        yield started


@pytest.fixture(autouse=True)
def in_the_project(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(PROJECT)
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    handlers = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def rendered(capsys: Any, tmp_path: Path, *argv: str) -> dict[str, str]:
    """What `--dry-run` prints; it writes nothing."""
    os.environ.setdefault("DIST_RUN_ID", "rendered")
    given, before = [*argv, BATCH], sorted(tmp_path.rglob("*"))
    command.main(["launch", "--dry-run", *given], OURS)
    text = capsys.readouterr().out
    assert sorted(tmp_path.rglob("*")) == before and "\n# would run: " in text
    own, flags = command.parse(given)
    to = target(own.on)
    job = describe(OURS, own.verb, flags, to.on_hosts)
    files = to.render(job)
    assert all(content in text for content in files.values())
    return files | {"command": shlex.join(to.commands(job)[0])}


def test_torchrun_and_ray_get_sizes_and_a_limit(flags: Flags, tmp_path: Path, capsys: Any) -> None:
    keys: dict[str, Any] = {"hosts": ["a", "b", "c"], "min_nodes": 2, "devices_per_node": 4}
    where = site(tmp_path, **keys, port=2345, time_limit="26:10:00")
    lines = rendered(capsys, tmp_path, "--on=torchrun", *flags, where)["node.sh"].splitlines()
    given = f"NPROC=4 NNODES=2:3 RDZV_ENDPOINT=a:2345 NODE_RANK=$1 DIST_PACKAGE={PACKAGE}"
    assert {f"export {each}" for each in given.split()} < {*lines}
    sizes = "--trainer.devices=4 --trainer.num_nodes=3"
    assert lines[-1].startswith("exec bash launch/torchrun.sh fit --run.root=")
    assert lines[-1].endswith(f"{sizes} --preemption.max_time=01:02:05:00")
    ray = rendered(capsys, tmp_path, "--on=ray", *flags, site(tmp_path, **keys))["node.sh"]
    assert "launch.targets.ray 12 cpu " in ray and f"{sizes}\n" in ray


def test_a_dry_run_prints_commands_and_no_secrets(flags: Any, tmp_path: Path, capsys: Any) -> None:
    secrets = {"HF_TOKEN": "hf s3cret", "PROXY": "http://me:s3cret@proxy", "PLAIN": "shown"}
    where = site(tmp_path, hosts=["a", "b"], environment=secrets, ssh="ssh -F x")
    key = "--cluster.environment.WANDB_API_KEY=s3cret"
    os.environ["DIST_RUN_ID"] = "dry"
    command.main(["launch", "--dry-run", "--on=ssh", *flags, where, key, BATCH], OURS)
    text = capsys.readouterr().out
    assert "s3cret" not in text and "export PLAIN=shown" in text
    script = tmp_path / "runs" / "default" / "dry" / "launch" / "node.sh"
    assert f"# would run: ssh -F x b 'bash {script} 1'" in text.splitlines()
    assert not (tmp_path / "runs").exists()


def test_slurm_gets_the_values_of_the_site(flags: Flags, tmp_path: Path, capsys: Any) -> None:
    def slurm(**keys: Any) -> dict[str, str]:
        gpu = "--trainer.accelerator=gpu"
        return rendered(capsys, tmp_path, "--on=slurm", *flags, site(tmp_path, **keys), gpu)

    odd = {"comment": 'two "words" # \\', "nice": 0, "exclusive": None, "array": "0-3"}
    image: Any = {"container": "apptainer", "image": "train.sif", "mounts": ["/data:/data"]}
    sizes: Any = {"nodes": 4, "devices_per_node": 8, "time_limit": "1-12:00:00", "partition": "gpu"}
    files = slurm(options=odd, **image, **sizes)
    text, words = files["job.sh"], shlex.split(files["command"])
    assert words[:2] == ["sbatch", "--parsable"] and words[-1].endswith("/launch/job.sh")
    given = "--nodes=4 --ntasks-per-node=8 --gpus-per-node=8 --time=36:00:00 --signal=SIGUSR1@300"
    given += " --exclusive --array=0-3 --partition=gpu --nice=0"
    assert {*given.split(), '--comment=two "words" # \\'} < {*words}
    container = f"apptainer exec --nv --bind {PROJECT}:{PROJECT},/data:/data"
    container += f" --pwd {PROJECT} train.sif"
    assert f"export CONTAINER='{container}'" in text and "export PYTHON=python\n" in text
    assert "--trainer.num_nodes" not in text, "launch/slurm.sh adds the sizes of the job"
    files = slurm(container="pyxis", image="r#train", options={"gres": "gpu:2"}, devices_per_node=2)
    assert "SRUN_FLAGS='--container-image=r#train --container-mounts=" in files["job.sh"]
    assert " --gres=gpu:2 " in files["command"] and "gpus-per-node" not in files["command"]


REFUSED: dict[str, dict[str, Any]] = {
    "cluster.master has '-x'; give a name": {"master": "-x"},
    "cluster.hosts has a twice": {"hosts": ["a", "a"]},
    "the job has 3 nodes; name as many in cluster.hosts": {"hosts": ["a"], "nodes": 3},
    "cluster.time_limit is 300 s, and the run saves 300 s": {"time_limit": "00:05:00"},
    "give seconds, HH:MM:SS or DAYS-HH:MM:SS": {"time_limit": "2h"},
    "give a number with a unit, as 80GB or 80GiB": {"device_memory": "80"},
    "give cluster.image": {"container": "pyxis"},
    "cluster.environment has 'A=1\\nrm x;B'": {"environment": {"A=1\nrm x;B": "1"}},
    "cluster.hosts has '-oProxyCommand=x'": {"hosts": ["-oProxyCommand=x"]},
    "cluster.nodes is 0; give 1 to 100,000": {"nodes": 0},
    "global_batch_size": {"devices_per_node": 3},
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_bad_input_is_refused(sentence: str, flags: Flags, tmp_path: Path, capsys: Any) -> None:
    where = site(tmp_path, **REFUSED[sentence])
    assert run("launch", "--on=ssh", "--dry-run", *flags, where) == Exit.BAD_INPUT
    error = capsys.readouterr().err.strip()
    assert sentence in error and "\n" not in error, error
    assert not list(tmp_path.glob("runs/*/*")), "nothing is half-written"


def test_a_node_that_is_not_up_is_named(
    hosts: Any, flags: Any, tmp_path: Path, capsys: Any
) -> None:
    assert run("prepare", *flags) == 0
    not_ready: dict[str, dict[str, Any]] = {
        "nowhere.invalid is not ready: ssh: ": {"hosts": ["node1", "nowhere.invalid"]},
        "down is not ready: ssh: connect to host 127.0.0.1 port 1": {"hosts": ["down"]},
        "cluster.ssh 'shh -q' cannot be run: ": {"ssh": "shh -q"},
        "node1 is not ready: OSError: [Errno 98] Address already in use": {"port": hosts.port},
    }
    for sentence, keys in not_ready.items():
        assert run("launch", "--on=ssh", *flags, two(hosts, tmp_path, **keys)) == Exit.BAD_INPUT
        assert sentence in capsys.readouterr().err
    assert run("launch", "--on=ssh", *flags, f"--data.cache_dir={tmp_path}/none") == Exit.BAD_INPUT
    assert "run `prepare` first" in capsys.readouterr().err
    assert not list(tmp_path.glob("runs/*/*")), "a refused run leaves no folder"
    assert run("launch", "status", str(tmp_path)) == Exit.BAD_INPUT
    assert "give a run that `launch` has started" in capsys.readouterr().err


def test_units_of_memory_and_time() -> None:
    memory = [Site(device_memory=each).memory_bytes for each in ("80GB", "1.5 TiB")]
    assert memory == [80 * 10**9, 3 * 2**39]
    times = ["1-00:00:01", "30:00", yaml.safe_load("24:00:00")]  # a number in YAML 1.1
    assert [Site(time_limit=each).time_limit_s for each in times] == [86_401, 1800, 86_400]


@pytest.mark.parametrize("name", ["../../x", "..", "a\nb", "x" * 256])
def test_a_runs_id_is_one_folders_name(name: str, flags: Any, tmp_path: Path, capsys: Any) -> None:
    os.environ["DIST_RUN_ID"] = name
    assert main(["fit", *flags]) == Exit.BAD_INPUT
    assert "DIST_RUN_ID" in capsys.readouterr().err and not list(tmp_path.glob("runs/*"))


ACCELERATE = "accelerate launch --cpu --num_processes 2 --num_machines 1 --mixed_precision no -m"
HOSTFILE = "--no_ssh --node_rank 0 --master_addr 127.0.0.1 --hostfile {folder}/hosts"
RDZV = "--rdzv-backend c10d --rdzv-endpoint localhost:0"
OWN = {
    "torchrun": "torchrun --nproc_per_node 2 -m",
    "torchrun c10d": f"torchrun {RDZV} --nproc_per_node 2 -m",
    "accelerate": ACCELERATE,
    "deepspeed": "deepspeed --num_gpus 2 --module",
    "deepspeed hostfile": f"deepspeed {HOSTFILE} --module",
}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", tiers(OWN, daily=["torchrun"]))
def test_the_guides_commands_train_as_fit_does(launcher: str, flags: Flags, tmp_path: Path) -> None:
    """Nobody names the run here: the ranks take their launcher's start for its folder."""
    assert run("prepare", *flags) == 0
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    program, *words = OWN[launcher].format(folder=tmp_path).split()
    own = [*flags, *STEPS, "--trainer.devices=2"]
    command = [str(Path(sys.executable).parent / program), *words, PACKAGE, "fit", *own]
    if launcher.startswith("torchrun"):  # the first `python` on PATH may be another
        command[:1] = [sys.executable, "-m", "torch.distributed.run"]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(OF_A_LAUNCHER)}
    options: Any = {"capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run(command, cwd=PROJECT, env=kept | of.ENVIRONMENT, **options)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert run_in_subprocess("fit", *own, "--run.name=plain").returncode == 0
    losses = [logged(only_run(tmp_path, name), "train/loss") for name in ("default", "plain")]
    assert losses[0] == losses[1] and sorted(losses[0]) == [1, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.parametrize("on", tiers(of.LAUNCHERS, daily=["torchrun"]))
def test_a_launcher_trains_on_two_hosts(on: str, hosts: Any, flags: Flags, tmp_path: Path) -> None:
    """The nodes are reached by ssh."""
    assert run("prepare", *flags) == 0
    launched = Launched(tmp_path, on, *flags, two(hosts, tmp_path), *STEPS)
    assert launched.end() == Exit.DONE, launched.out.read_text()[-3000:]
    assert sorted(logged(launched.run, "train/loss")) == [1, 2, 3, 4]
    logs = [log.read_text() for log in (launched.run / "launch").glob("node-*.log")]
    assert sum("finished after step 4" in log for log in logs) == 1  # torchrun orders nodes itself
    facts = json.loads((launched.run / "launch" / "launch.json").read_text())
    assert facts["on"] == on and facts["hosts"] == ["node1", "node2"]


SSH: Any = target("ssh")
RUNNING, GONE = "this machine: running", "this machine: no process"


@pytest.fixture
def process() -> Iterator[Any]:
    environment = {**os.environ, "DIST_RUN_ID": "one.[a]"}
    with subprocess.Popen(["sleep", "1000"], env=environment) as started:
        yield started
        started.kill()


def record(**changes: Any) -> dict[str, Any]:
    return {"on": "ssh", "id": "", "hosts": [], "ssh": "ssh"} | changes


def test_a_signal_reaches_the_started_process_alone(process: Any, tmp_path: Path) -> None:
    others = [tmp_path / name / "launch" for name in ("two", "one", "one.[a]b", "oneX[a]")]
    for folder in [*others, mine := tmp_path / "one.[a]" / "launch"]:
        folder.mkdir(parents=True)
        (folder / "node-0.pid").write_text(f"{process.pid}\n")
    for other in others:
        assert SSH.stop(record(), other) == GONE, other
    time.sleep(0.1)
    assert process.poll() is None, "another process has the number that is in the file"
    assert SSH.stop(record(), mine) == RUNNING
    assert process.wait(10) == -signal.SIGTERM
    assert SSH.status(record(), mine) == GONE


def test_a_host_that_hangs_is_named(
    flags: Any, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(PROJECT)
    monkeypatch.setattr(nodes, "ANSWER_S", 3.0)
    run("prepare", *flags)
    ssh = tmp_path / "fake_ssh"  # $1 is the host, $2 the command
    hangs = f'[ "$1" = b ] && {{ sleep 1000 & wait; }}; cd {tmp_path}; exec sh -c "true"'
    ssh.write_text(f"#!/bin/sh\n{hangs}\n")
    ssh.chmod(0o755)
    where, start = site(tmp_path, hosts=["a", "b"], ssh=str(ssh)), time.monotonic()
    assert run("launch", "--on=ssh", *flags, where) == Exit.BAD_INPUT
    sentence = "b is not ready: no answer in 3 s; edit cluster.hosts, ssh or port"
    assert sentence in capsys.readouterr().err
    assert time.monotonic() - start < 30 and not list(tmp_path.glob("runs/*/*"))
    status = SSH.status(record(hosts=["a", "b"], ssh=str(ssh)), tmp_path)
    assert status == "a: running\nb: no answer in 3 s"


@pytest.mark.slow
def test_a_second_launch_is_refused(
    flags: Any, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(PROJECT)
    run("prepare", *flags)
    first = Launched(tmp_path, "ssh", *flags, site(tmp_path), *of.LONG)
    try:
        first.reach(2)
        kept = [file for file in (first.run / "launch").iterdir() if file.suffix != ".log"]
        texts = [file.read_text() for file in kept]
        os.environ["DIST_RUN_ID"] = first.run.name
        for on in ("ssh", "torchrun"):
            argv = ["launch", f"--on={on}", *flags, *of.LONG]
            assert main(argv) == Exit.BAD_INPUT  # `run` names another run
            error = capsys.readouterr().err
            assert f"{first.run} is running: `" in error and "launch stop" in error
        assert [file.read_text() for file in kept] == texts
        assert run("launch", "status", str(first.run)) == 0 and RUNNING in capsys.readouterr().out
        assert run("launch", "stop", str(first.run)) == 0
        assert first.end() == Exit.REQUEUE
    finally:
        first.process.kill()


DOCS = ROOT / "docs" / "launch.md"


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("on", of.LAUNCHERS)
def test_launchers_have_equal_losses_and_codes(
    on: str, hosts: Any, flags: Any, tmp_path: Path
) -> None:
    assert run("prepare", *flags) == 0
    root = f"--run.root={tmp_path / 'plain' / 'runs'}"
    done = run_in_subprocess("fit", *flags, root, *STEPS, "--trainer.devices=2")
    assert done.returncode == 0, done.stderr
    losses, started = logged(only_run(tmp_path / "plain"), "train/loss"), list[Launched]()

    def start(name: str, flags: list[str], environment: dict[str, str]) -> Launched:
        where = two(hosts, tmp_path, environment=environment)
        started.append(Launched(tmp_path, on, *flags, where, name=name))
        return started[-1]

    found = of.codes(start, flags, Launched.end)
    own = logged(started[0].run, "train/loss")
    assert own.keys() == losses.keys()
    print(line := of.row(on, max(abs(own[step] - losses[step]) for step in losses), found))
    assert line in DOCS.read_text(encoding="utf-8"), line


LSF = """#!/bin/sh
echo "$(basename $0) $@" >> {folder}/called
case $0 in *bsub) echo 17;; *bjobs) echo "17 RUN";; *bkill) echo signalled;; esac
"""


def register(folder: Path, package: str, value: str) -> None:
    """Writes the metadata of a package, as pip does."""
    write_metadata(folder, package, {"dist_template.launch_targets": {"lsf": value}})


@pytest.fixture
def lsf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The documented class as an installed package, and its scheduler; returns the latter's log."""
    monkeypatch.chdir(PROJECT)
    monkeypatch.syspath_prepend(tmp_path)
    page = (ROOT / "docs" / "launch.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"```python\n(.*?class Lsf.*?)```", page, re.DOTALL)
    (tmp_path / "lsf_of_a_site.py").write_text(text)
    register(tmp_path, "site-tools", "lsf_of_a_site:Lsf")
    for name in ("bsub", "bjobs", "bkill"):
        (tmp_path / name).write_text(LSF.format(folder=tmp_path))
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("DIST_RUN_ID", "own")
    monkeypatch.delitem(sys.modules, "lsf_of_a_site", raising=False)
    return tmp_path / "called"


def test_a_target_of_another_package(lsf: Path, flags: Any, tmp_path: Path, capsys: Any) -> None:
    sizes = ["--cluster.nodes=2", "--cluster.devices_per_node=3", "--data.global_batch_size=192"]
    given = ["launch", "--on=lsf", "--cluster.partition=short", *flags, *sizes]
    assert main([*given, "--dry-run"]) == Exit.DONE
    printed = capsys.readouterr().out
    folder = tmp_path / "runs" / "default" / "own" / "launch"
    assert f"# would run: bsub -q short -n 2 {folder}/job.sh" in printed and not lsf.exists()
    assert main(given) == Exit.DONE
    assert "torchrun --nproc-per-node=3 -m trainer_dev fit" in (folder / "job.sh").read_text()
    assert json.loads((folder / "launch.json").read_text())["id"] == "17"
    for verb, answer in (("status", "17 RUN"), ("stop", "signalled"), ("logs", "")):
        capsys.readouterr()
        assert main(["launch", verb, str(folder.parent)]) == Exit.DONE
        assert answer in capsys.readouterr().out
    submitted = f"bsub -q short -n 2 {folder}/job.sh"
    assert lsf.read_text().splitlines() == [submitted, "bjobs 17", "bkill -s USR1 17"]


def test_one_name_of_two_packages_is_refused_with_both(lsf: Path, capsys: Any) -> None:
    assert main(["launch", "--on", "slrum"]) == Exit.BAD_INPUT
    assert "argument --on: invalid choice: 'slrum'" in capsys.readouterr().err
    register(lsf.parent, "other-tools", "json:loads")
    assert main(["launch", "--on", "lsf"]) == Exit.BAD_INPUT
    error = capsys.readouterr().err
    assert "site-tools" in error and "other-tools" in error and "'lsf'" in error
