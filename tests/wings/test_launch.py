"""`launch`: what it renders and refuses; launchers train on two hosts, and on a local Ray."""

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from dist_template.cluster.site import Site
from dist_template.errors import Exit
from dist_template.wings.launch import command, nodes
from tests import ROOT
from tests.support import launched as of
from tests.support import runs
from tests.support.extras import write_metadata
from tests.support.launched import STEPS, Launched, one_machine, site
from tests.support.line import main
from tests.support.runs import PACKAGE, PROJECT, logged, refused, run
from tests.support.wings import launch_target as target

DOCS = (ROOT / "docs" / "launch.md").read_text(encoding="utf-8")
BATCH = "--data.global_batch_size=192"
Flags = list[str]


@pytest.fixture(scope="module")
def losses(corpus: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Of four steps on two processes of this machine."""
    folder = tmp_path_factory.mktemp("losses")
    return of.one_machine([*runs.small(corpus, cache, folder), *STEPS], folder)


@pytest.fixture(autouse=True)
def in_the_project(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(PROJECT)
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    handlers = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def dry_run(capsys: Any, folder: Path, *argv: str) -> list[str]:
    """The lines that `--dry-run` prints; it writes nothing."""
    os.environ["DIST_RUN_ID"] = "dry"
    before = sorted(folder.rglob("*"))
    command.main(["launch", "--dry-run", *argv, BATCH], runs.OURS)
    assert sorted(folder.rglob("*")) == before
    return capsys.readouterr().out.splitlines()


def test_torchrun_and_ray_get_sizes_and_a_limit(flags: Flags, tmp_path: Path, capsys: Any) -> None:
    keys: dict[str, Any] = {"hosts": ["a", "b", "c"], "min_nodes": 2, "devices_per_node": 4}
    where = site(tmp_path, **keys, port=2345, time_limit="26:10:00")
    lines = dry_run(capsys, tmp_path, "--on=torchrun", *flags, where)
    given = f"NPROC=4 NNODES=2:3 RDZV_ENDPOINT=a:2345 NODE_RANK=$1 DIST_PACKAGE={PACKAGE}"
    assert {f"export {each}" for each in given.split()} < {*lines}
    sizes = "--trainer.devices=4 --trainer.num_nodes=3"
    (start,) = (line for line in lines if line.startswith("exec bash launch/torchrun.sh fit "))
    assert start.endswith(f"{sizes} --preemption.max_time=01:02:05:00")
    assert re.fullmatch(r"checkpoints: best every .* 4,225\.0 h\), estimated", lines[0])
    lines = dry_run(capsys, tmp_path, "--on=ray", *flags, site(tmp_path, **keys))
    (start,) = (line for line in lines if "launch.targets.ray 12 cpu " in line)
    assert start.endswith(sizes)


def test_a_dry_run_prints_commands_and_no_secrets(flags: Any, tmp_path: Path, capsys: Any) -> None:
    secrets = {"HF_TOKEN": "hf s3cret", "PROXY": "http://me:s3cret@proxy", "PLAIN": "shown"}
    where = site(tmp_path, hosts=["a", "b"], environment=secrets, ssh="ssh -F x")
    key = "--cluster.environment.WANDB_API_KEY=s3cret"
    lines = dry_run(capsys, tmp_path, "--on=ssh", *flags, where, key)
    assert not any("s3cret" in line for line in lines) and "export PLAIN=shown" in lines
    script = tmp_path / "runs" / "default" / "dry" / "launch" / "node.sh"
    assert f"# would run: ssh -F x b 'bash {script} 1'" in lines


def test_slurm_gets_the_values_of_the_site(flags: Flags, tmp_path: Path, capsys: Any) -> None:
    def slurm(**keys: Any) -> tuple[str, list[str]]:
        gpu = "--trainer.accelerator=gpu"
        lines = dry_run(capsys, tmp_path, "--on=slurm", *flags, site(tmp_path, **keys), gpu)
        return "\n".join(lines), shlex.split(lines[-1].removeprefix("# would run: "))

    odd = {"comment": 'two "words" # \\', "nice": 0, "exclusive": None, "array": "0-3"}
    image: Any = {"container": "apptainer", "image": "train.sif", "mounts": ["/data:/data"]}
    sizes: Any = {"nodes": 4, "devices_per_node": 8, "time_limit": "1-12:00:00", "partition": "gpu"}
    text, words = slurm(options=odd, **image, **sizes)
    assert words[:2] == ["sbatch", "--parsable"] and words[-1].endswith("/launch/job.sh")
    given = "--nodes=4 --ntasks-per-node=8 --gpus-per-node=8 --time=36:00:00 --signal=SIGUSR1@300"
    given += " --exclusive --array=0-3 --partition=gpu --nice=0"
    assert {*given.split(), '--comment=two "words" # \\'} < {*words}
    container = f"apptainer exec --nv --bind {PROJECT}:{PROJECT},/data:/data"
    container += f" --pwd {PROJECT} train.sif"
    assert f"export CONTAINER='{container}'" in text and "export PYTHON=python\n" in text
    assert "--trainer.num_nodes" not in text, "launch/slurm.sh adds the sizes of the job"
    gres: Any = {"options": {"gres": "gpu:2"}, "devices_per_node": 2}
    text, words = slurm(container="pyxis", image="r#train", **gres)
    assert "SRUN_FLAGS='--container-image=r#train --container-mounts=" in text
    assert "--gres=gpu:2" in words and "gpus-per-node" not in " ".join(words)


REFUSED: dict[str, dict[str, Any]] = {
    "cluster.master has '-x'; give a name": {"master": "-x"},
    "cluster.hosts has a twice": {"hosts": ["a", "a"]},
    "the job has 3 nodes; name as many in cluster.hosts": {"hosts": ["a"], "nodes": 3},
    "cluster.time_limit is 300 s, and the run saves 300 s": {"time_limit": "00:05:00"},
    "give seconds, HH:MM:SS or DAYS-HH:MM:SS": {"time_limit": "2h"},
    "give cluster.image": {"container": "pyxis"},
    "cluster.environment has 'A=1\\nrm x;B'": {"environment": {"A=1\nrm x;B": "1"}},
    "cluster.hosts has '-oProxyCommand=x'": {"hosts": ["-oProxyCommand=x"]},
    "global_batch_size": {"devices_per_node": 3},
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_bad_input_is_refused(sentence: str, flags: Flags, tmp_path: Path, capfd: Any) -> None:
    where = site(tmp_path, **REFUSED[sentence])
    assert sentence in refused("launch", ["--on=ssh", "--dry-run", *flags, where], capfd)
    assert not list(tmp_path.glob("runs/*/*")), "nothing is half-written"


SSH: Any = target("ssh")


@pytest.mark.slow
def test_an_unready_node_is_named(flags: Any, tmp_path: Path, monkeypatch: Any, capfd: Any) -> None:
    monkeypatch.setattr(nodes, "ANSWER_S", 5.0)
    run("prepare", *flags)
    with socket.create_server(("", 0)) as other:
        not_ready: dict[str, dict[str, Any]] = {
            "hangs is not ready: no answer in 5 s; edit cluster": {"names": ["node1", "hangs"]},
            "down is not ready: ssh: connect to host": {"names": ["down"]},
            "cluster.ssh 'shh -q' cannot be run: ": {"ssh": "shh -q"},
            "node1 is not ready: OSError: [Errno 98]": {"port": other.getsockname()[1]},
        }
        for sentence, keys in not_ready.items():
            where = of.hosts(tmp_path, **keys)
            assert sentence in refused("launch", ["--on=ssh", *flags, where], capfd)
    unprepared = ["--on=ssh", *flags, f"--data.cache_dir={tmp_path}/none"]
    assert "run `prepare` first" in refused("launch", unprepared, capfd)
    assert not list(tmp_path.glob("runs/*/*")), "a refused run leaves no folder"
    unknown = refused("launch", ["status", str(tmp_path)], capfd)
    assert "give a run that `launch` has started" in unknown
    status = SSH.status({"hosts": ["node1", "hangs"], "ssh": f"{tmp_path}/ssh"}, tmp_path)
    assert status == "node1: no process\nhangs: no answer in 5 s"


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


def test_a_signal_reaches_the_started_process_alone(tmp_path: Path) -> None:
    record = {"hosts": [], "ssh": "ssh"}
    environment = {**os.environ, "DIST_RUN_ID": "one.[a]"}
    with subprocess.Popen(["sleep", "60"], env=environment) as process:
        others = [tmp_path / name / "launch" for name in ("two", "one", "one.[a]b", "oneX[a]")]
        for folder in [*others, mine := tmp_path / "one.[a]" / "launch"]:
            folder.mkdir(parents=True)
            (folder / "node-0.pid").write_text(f"{process.pid}\n")
        stopped = [SSH.stop(record, folder) for folder in [*others, mine]]
        assert stopped == ["this machine: no process"] * 4 + ["this machine: running"]
        assert process.wait(10) == -signal.SIGTERM
    assert SSH.status(record, mine) == "this machine: no process"


@pytest.mark.slow
def test_two_hosts_train_as_one_and_refuse_another(flags: Any, tmp_path: Path, capsys: Any) -> None:
    run("prepare", *flags)
    first = Launched(tmp_path, "torchrun", *flags, of.hosts(tmp_path), *of.LONG)
    try:
        first.reach(4)
        kept = [file for file in (first.run / "launch").iterdir() if file.suffix != ".log"]
        texts = [file.read_text() for file in kept]
        for on in ("ssh", "torchrun"):
            os.environ["DIST_RUN_ID"] = first.run.name
            assert main(["launch", f"--on={on}", *flags, *of.LONG]) == Exit.BAD_INPUT
            error = capsys.readouterr().err
            assert f"{first.run} is running: `" in error and "launch stop" in error
        assert [file.read_text() for file in kept] == texts
        assert run("launch", "status", str(first.run)) == 0
        assert capsys.readouterr().out == "node1: running\nnode2: running\n"
        assert run("launch", "stop", str(first.run)) == 0
        assert first.end() == Exit.REQUEUE, first.out.read_text()[-3000:]
    finally:
        first.process.kill()
    argv = ["fit", *flags, *of.LONG, "--trainer.devices=2", "--run.name=one"]
    one = runs.Workers(2).run(argv, tmp_path / "one", callbacks=[runs.StopAfter(4)]).loss
    losses = logged(first.run, "train/loss")
    assert len(one) >= 3 and {step: losses[step] for step in one} == pytest.approx(one, abs=1e-6)


@pytest.mark.nightly
@pytest.mark.parametrize("on", ["ssh", "torchrun"])
def test_launchers_have_equal_results(on: str, flags: Any, losses: Any, tmp_path: Path) -> None:
    def start(name: str, flags: Flags, environment: dict[str, str]) -> Launched:
        where = of.hosts(tmp_path, environment=environment)
        return Launched(tmp_path, on, *flags, where, name=name)

    assert (line := of.row(on, flags, losses, start)) in DOCS, line


LSF = """#!/bin/sh
echo "$(basename $0) $@" >> {folder}/called
case $0 in *bsub) echo 17;; *bjobs) echo "17 RUN";; *bkill) echo signalled;; esac
"""


def test_a_target_of_a_package(flags: Any, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """The documented class as an installed package, with the commands of its scheduler."""
    monkeypatch.syspath_prepend(tmp_path)
    (text,) = re.findall(r"```python\n(.*?class Lsf.*?)```", DOCS, re.DOTALL)
    (tmp_path / "lsf_of_a_site.py").write_text(text)
    group = {"dist_template.launch_targets": {"lsf": "lsf_of_a_site:Lsf"}}
    write_metadata(tmp_path, "site-tools", group)
    for name in ("bsub", "bjobs", "bkill"):
        (tmp_path / name).write_text(LSF.format(folder=tmp_path))
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("DIST_RUN_ID", "own")
    sizes = ["--cluster.nodes=2", "--cluster.devices_per_node=3", BATCH]
    given = ["launch", "--on=lsf", "--cluster.partition=short", *flags, *sizes]
    assert main([*given, "--dry-run"]) == Exit.DONE
    folder, called = tmp_path / "runs" / "default" / "own" / "launch", tmp_path / "called"
    submitted = f"bsub -q short -n 2 {folder}/job.sh"
    assert f"# would run: {submitted}" in capsys.readouterr().out and not called.exists()
    assert main(given) == Exit.DONE
    assert "torchrun --nproc-per-node=3 -m trainer_dev fit" in (folder / "job.sh").read_text()
    assert json.loads((folder / "launch.json").read_text())["id"] == "17"
    for verb, answer in (("status", "17 RUN"), ("stop", "signalled"), ("logs", "")):
        capsys.readouterr()
        assert main(["launch", verb, str(folder.parent)]) == Exit.DONE
        assert answer in capsys.readouterr().out
    assert called.read_text().splitlines() == [submitted, "bjobs 17", "bkill -s USR1 17"]


LACKS_RAY = pytest.mark.skipif(not find_spec("ray"), reason="needs ray, which `all` does not have")
VICTIMS: dict[str, Callable[[psutil.Process], bool]] = {
    "a rank": lambda process: process.environ().get("RANK") == "1" and PACKAGE in process.cmdline(),
    "a worker of Ray": lambda process: process.name().startswith("ray::RayTrain"),
}


def kill(started: int, is_victim: Callable[[psutil.Process], bool]) -> None:
    for process in psutil.Process(started).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if is_victim(process):
                process.kill()
                return
    raise AssertionError("there is no such process")


@LACKS_RAY
@pytest.mark.nightly
@pytest.mark.parametrize("victim", VICTIMS)
def test_a_kill_changes_no_loss(victim: str, flags: Any, tmp_path: Path, monkeypatch: Any) -> None:
    more = "--trainer.max_steps=300 --last_checkpoint.every_n_steps=50"
    flags = [*flags, *more.split(), "--trainer.val_check_interval=300"]
    losses = one_machine(flags, tmp_path)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    sizes = ["--trainer.devices=2", site(tmp_path, nodes=1)]
    launched = Launched(tmp_path, "ray", *flags, *sizes)
    try:
        launched.reach(60)
        kill(launched.process.pid, VICTIMS[victim])
        assert launched.end() == Exit.DONE, launched.out.read_text()[-5000:]
    finally:
        launched.process.terminate()
    found = logged(launched.run, "train/loss")
    assert len(found) == 300 and found == pytest.approx(losses, abs=1e-6)
