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
from dist_template.errors import Exit, InputError
from dist_template.wings.launch import command, nodes
from dist_template.wings.launch.targets import target
from tests import ROOT
from tests.support import launched as of
from tests.support import runs
from tests.support.extras import write_metadata
from tests.support.launched import STEPS, Launched, one_machine, site
from tests.support.line import main
from tests.support.runs import PACKAGE, PROJECT, logged, refused, run

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
    "give minutes, MM:SS, HH:MM:SS, DAYS-HH, DAYS-HH:MM or": {"time_limit": "2h"},
    "cluster.min_nodes is 3, and cluster.nodes is 2": {
        "hosts": ["a", "b"],
        "nodes": 2,
        "min_nodes": 3,
    },
    "cluster.min_nodes is 2, and cluster.hosts has 1": {"hosts": ["a"], "min_nodes": 2},
    "cluster.min_nodes is 2, and the job has 1 nodes": {"min_nodes": 2},
    "cluster.kubernetes.pod has containers; this": {"kubernetes": {"pod": {"containers": []}}},
    "give cluster.image": {"container": "pyxis"},
    "cluster.environment has 'A=1\\nrm x;B'": {"environment": {"A=1\nrm x;B": "1"}},
    "cluster.environment has DIST_RUN_ID, which the launcher sets": {
        "environment": {"DIST_RUN_ID": "x"}
    },
    "cluster.options has nodes, which the job itself has: edit cluster.nodes": {
        "options": {"nodes": 7}
    },
    "cluster.options has wrap, which the job itself has: remove it": {"options": {"wrap": "x"}},
    "cluster.options has 'x y'; give a long name": {"options": {"x y": 1}},
    "cluster.options has '-p'; give a long name": {"options": {"-p": 1}},
    "cluster.options.account is ['a']; give one value": {"options": {"account": ["a"]}},
    "cluster.partition is 'a b'; give a name without blanks": {"partition": "a b"},
    "cluster.partition is ''; give a name": {"partition": ""},
    "cluster.image is 'a b'; give a name": {"image": "a b"},
    "cluster.mounts has 'a'; give SOURCE:/in/the/container": {"mounts": ["a"]},
    "cluster.mounts has '/a b:/c'": {"mounts": ["/a b:/c"]},
    "cluster.mounts has ':/c'": {"mounts": [":/c"]},
    "cluster.kubernetes.secrets has '1A'": {"kubernetes": {"secrets": {"1A": "a/b"}}},
    "cluster.kubernetes has the resource ''": {"kubernetes": {"device": ""}},
    "cluster.kubernetes has the resource 'a b'": {"kubernetes": {"resources": {"a b": 1}}},
    "cluster.kubernetes.resources.cpu is -1": {"kubernetes": {"resources": {"cpu": -1}}},
    "cluster.kubernetes.resources.cpu is 'many'": {"kubernetes": {"resources": {"cpu": "many"}}},
    "cluster.hosts has '-oProxyCommand=x'": {"hosts": ["-oProxyCommand=x"]},
    "global_batch_size": {"devices_per_node": 3},
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_bad_input_is_refused(sentence: str, flags: Flags, tmp_path: Path, capfd: Any) -> None:
    where = site(tmp_path, **REFUSED[sentence])
    assert sentence in refused("launch", ["--on=ssh", "--dry-run", *flags, where], capfd)
    assert not list(tmp_path.glob("runs/*/*")), "nothing is half-written"


HOSTFILES: dict[str, tuple[str, dict[str, Any]]] = {
    "line 2 is 'b': write `name slots=N`": ("a slots=1\nb\n", {}),
    "line 1 is 'a slots=0': write": ("a slots=0\n", {}),
    "line 1 is 'a slots=-1': write": ("a slots=-1\n", {}),
    "line 1 is 'a slots=2 max_slots=4': write": ("a slots=2 max_slots=4\n", {}),
    "line 3 has a a second time: remove": ("a slots=1\n# b\na slots=1\n", {}),
    " names no host: write": ("# none\n\n", {}),
    "cluster.hostfile has '-oProxyCommand=x'; give a name": ("-oProxyCommand=x slots=1\n", {}),
    "Hostname 'c' not found in hostfile": ("a slots=1\n", {"include": "c"}),
    "No slot '1' specified on host 'a'": ("a slots=1\n", {"include": "a:1"}),
    "cluster.include or cluster.exclude: ": ("a slots=1\n", {"include": "a:x"}),
    "cluster.exclude 'a' leaves no host": ("a slots=1\n", {"exclude": "a"}),
    "include and cluster.exclude are both given": ("a slots=1\n", {"include": "a", "exclude": "b"}),
    "cluster.hosts and cluster.hostfile are both given": ("a slots=1\n", {"hosts": ["a"]}),
}


@pytest.mark.parametrize("sentence", HOSTFILES)
def test_a_wrong_hostfile_is_named_with_its_line(sentence: str, tmp_path: Path) -> None:
    text, keys = HOSTFILES[sentence]
    (file := tmp_path / "hosts.txt").write_text(text)
    with pytest.raises(InputError, match=re.escape(sentence)) as refusal:
        Site(hostfile=str(file), **keys).slots()
    if "line " in sentence:
        assert str(refusal.value).startswith(f"cluster.hostfile {file}, line ")


NOT_OF_THE_JOB: dict[str, tuple[str, dict[str, Any]]] = {
    "has hosts with [2, 1] slots: use as many": ("a slots=2\nb slots=1\n", {}),
    "the job has 3 nodes; name as many in cluster.hostfile": ("a slots=1\n", {"nodes": 3}),
    "is 4, and cluster.hostfile gives 2 slots": ("a slots=2\n", {"devices_per_node": 4}),
    "--on ssh uses all devices of a host": ("a slots=2\n", {"include": "a:0"}),
    "cannot be read: [Errno 2] No such file": ("", {"hostfile": "no.txt"}),
}


@pytest.mark.parametrize("sentence", NOT_OF_THE_JOB)
def test_a_hostfile_is_refused(sentence: str, flags: Flags, tmp_path: Path, capfd: Any) -> None:
    text, keys = NOT_OF_THE_JOB[sentence]
    (file := tmp_path / "hosts.txt").write_text(text)
    where = site(tmp_path, **{"hostfile": str(file), **keys})
    found = refused("launch", ["--on=ssh", "--dry-run", *flags, where], capfd)
    assert sentence in found and not list(tmp_path.glob("runs/*/*"))


def test_a_scheduler_takes_no_hostfile(flags: Flags, tmp_path: Path, capfd: Any) -> None:
    (tmp_path / "hosts.txt").write_text("a slots=1\n")
    where = site(tmp_path, hostfile=f"{tmp_path}/hosts.txt")
    for on in ("slurm", "ray"):
        found = refused("launch", [f"--on={on}", "--dry-run", *flags, where], capfd)
        assert f"--on {on} chooses its nodes itself: remove cluster.hostfile" in found
    found = refused("launch", ["--on=ssh", "--dry-run", *flags, site(tmp_path, include="a")], capfd)
    assert "cluster.include chooses from cluster.hostfile: give that, too" in found


RACK = "# a rack\na slots=4  # the first\n\nb\tslots=4\nc slots=4\n"
CHOSEN: list[tuple[dict[str, Any], dict[str, list[int]]]] = [  # keys of the site, the nodes' slots
    ({}, {"a": [0, 1, 2, 3], "b": [0, 1, 2, 3], "c": [0, 1, 2, 3]}),
    ({"nodes": 2}, {"a": [0, 1, 2, 3], "b": [0, 1, 2, 3]}),  # for c the ranks would wait
    ({"exclude": "a"}, {"b": [0, 1, 2, 3], "c": [0, 1, 2, 3]}),
    ({"include": "c@a"}, {"a": [0, 1, 2, 3], "c": [0, 1, 2, 3]}),
    ({"include": "a:0,1@b:0,1"}, {"a": [0, 1], "b": [0, 1]}),
    ({"include": "a:0,1@b:2,3"}, {"a": [0, 1], "b": [2, 3]}),
    ({"exclude": "a:0,1@b:3,2@c"}, {"a": [2, 3], "b": [0, 1]}),
]


@pytest.mark.parametrize(("keys", "expected"), CHOSEN)
def test_deepspeeds_launcher_gets_the_nodes_and_slots_of_the_job(
    keys: Any, expected: Any, flags: Flags, tmp_path: Path, capsys: Any
) -> None:
    """As the launcher itself reads the rendered hostfile and its --include."""
    from deepspeed.launcher import runner

    (tmp_path / "rack").write_text(RACK)
    where = site(tmp_path, hostfile=f"{tmp_path}/rack", **keys)
    lines = dry_run(capsys, tmp_path, "--on=deepspeed", *flags, where)
    (tmp_path / "rendered").write_text("\n".join(line for line in lines if " slots=" in line))
    (line,) = (line for line in lines if "deepspeed.launcher.runner" in line)
    start = shlex.split(line.replace("$NODE_RANK", "1"))
    own = runner.parse_args(start[start.index("deepspeed.launcher.runner") + 1 :])
    pool = runner.fetch_hostfile(str(tmp_path / "rendered"))
    assert runner.parse_inclusion_exclusion(pool, own.include, own.exclude) == expected
    sizes = [f"--trainer.devices={len(expected['b' if 'b' in expected else 'a'])}"]
    assert own.user_args[-2:] == [*sizes, f"--trainer.num_nodes={len(expected)}"]
    assert own.no_ssh and own.module and own.user_script == PACKAGE


def test_prepare_runs_once_by_every_launcher(flags: Flags, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "rack").write_text(RACK)
    where = site(tmp_path, hostfile=f"{tmp_path}/rack")
    for on, expected in (("deepspeed", "a slots=1"), ("accelerate", "num_processes: 1")):
        lines = dry_run(capsys, tmp_path, f"--on={on}", "--verb=prepare", *flags, where)
        assert expected in lines and not any(line.startswith("b slots") for line in lines)


def test_accelerates_launcher_gets_sizes_and_the_rendezvous(
    flags: Flags, tmp_path: Path, capsys: Any
) -> None:
    """As accelerate reads the rendered configuration."""
    from accelerate.commands.config.config_args import load_config_from_file

    where = site(tmp_path, hosts=["me@a", "b", "c"], devices_per_node=4, port=2345)
    lines = dry_run(capsys, tmp_path, "--on=accelerate", *flags, where)
    begin = next(at for at, line in enumerate(lines) if line.endswith("/launch/accelerate.yaml"))
    end = next(at for at, line in enumerate(lines) if at > begin and not line)
    (tmp_path / "read.yaml").write_text("\n".join(lines[begin:end]))
    read: Any = load_config_from_file(str(tmp_path / "read.yaml"))
    assert [read.num_machines, read.num_processes] == [3, 12]
    assert [read.main_process_ip, read.main_process_port] == ["a", 2345]
    (start,) = (line for line in lines if "accelerate.commands.launch" in line)
    assert '--machine_rank "$NODE_RANK" -m trainer_dev fit' in start
    assert "--trainer.devices=4 --trainer.num_nodes=3" in start


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


STRANGERS: dict[str, tuple[object, list[str]]] = {  # launch.json and flags -> what is said
    "is a list, and not an object: give a run": ([], []),
    "has no target and list of hosts": ({"hosts": []}, []),
    "launch.json has '-oProxyCommand=touch x'; give a name": (
        {"on": "ssh", "hosts": ["-oProxyCommand=touch x"], "ssh": "ssh"}, []),
    "launch.json has \"{'a': 1}\"; give a name": (
        {"on": "ssh", "hosts": [{"a": 1}], "ssh": "ssh"}, []),
    "by 'touch x #', and the command is 'ssh -o BatchMode=yes": (
        {"on": "ssh", "hosts": ["a"], "ssh": "touch x #"}, []),
    "by 'touch x #', and the command is 'true': give the --config": (
        {"on": "ssh", "hosts": ["a"], "ssh": "touch x #"}, ["--cluster.ssh=true"]),
    "has the id '--all', which is no job's": ({"on": "slurm", "hosts": [], "id": "--all"}, []),
    "'os:system' is no target of launch": ({"on": "os:system", "hosts": []}, []),
}  # fmt: skip


@pytest.mark.parametrize("sentence", STRANGERS)
def test_no_command_comes_from_a_runs_folder(
    sentence: str, tmp_path: Path, monkeypatch: Any, capfd: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    record, flags = STRANGERS[sentence]
    (tmp_path / "run" / "launch").mkdir(parents=True)
    (tmp_path / "run" / "launch" / "launch.json").write_text(json.dumps(record))
    for verb in ("status", "stop"):
        assert sentence in refused("launch", [verb, "run", *flags], capfd)
    assert not (tmp_path / "x").exists()


def test_a_pid_that_is_no_number_is_no_process(tmp_path: Path) -> None:
    folder = tmp_path / "one" / "launch"
    folder.mkdir(parents=True)
    for text in ("-1", "self", f"../{os.getpid()}", "$(touch x)", ""):
        (folder / "node-0.pid").write_text(f"{text}\n")
        assert SSH.stop({"hosts": [], "ssh": "ssh"}, folder) == "this machine: no process"
    (folder / "node-0.pid").unlink()
    os.mkfifo(folder / "node-0.pid")
    assert SSH.status({"hosts": [], "ssh": "ssh"}, folder) == "this machine: no process"


def test_units_of_memory_and_time_are_read() -> None:
    memory = [Site(device_memory=each).memory_bytes for each in ("80GB", "1.5 TiB")]
    assert memory == [80 * 10**9, 3 * 2**39]
    times = ["1-00:00:01", "30:00", yaml.safe_load("24:00:00")]  # a number in YAML 1.1
    assert [Site(time_limit=each).time_limit_s for each in times] == [86_401, 1800, 86_400]


SLURM_TIMES = {  # in seconds, by the formats of `--time` in sbatch(1); no Slurm was asked
    "90": 90 * 60,
    "12:30": 12 * 60 + 30,
    "90:00": 90 * 60,
    "1:02:03": 3723,
    "100:00:00": 360_000,
    "2-0": 2 * 86_400,
    "1-12": 36 * 3600,
    "1-12:00": 36 * 3600,
    "1-12:34": 36 * 3600 + 34 * 60,
    "1-12:34:56": 36 * 3600 + 34 * 60 + 56,
}


@pytest.mark.parametrize("given", SLURM_TIMES)
def test_times_are_read_as_slurm_reads_them(given: str) -> None:
    assert Site(time_limit=given).time_limit_s == SLURM_TIMES[given]


@pytest.mark.parametrize(
    "given", ["", "1-", "-5", "1:2:3:4", "1-1:1:1:1", "1:60", "1:2:99", "x", "²"]
)
def test_other_times_are_refused(given: str) -> None:
    with pytest.raises(InputError, match="cluster.time_limit is"):
        Site(time_limit=given)


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
        assert run("launch", "status", str(first.run)) == Exit.BAD_INPUT  # by a script of its own
        assert "give the --config of the launch, or --cluster.ssh" in capsys.readouterr().err
        config = f"--config={tmp_path / 'site.yaml'}"
        assert run("launch", "status", str(first.run), config) == 0
        assert capsys.readouterr().out == "node1: running\nnode2: running\n"
        assert run("launch", "stop", str(first.run), f"--cluster.ssh={tmp_path / 'ssh'}") == 0
        assert first.end() == Exit.REQUEUE, first.out.read_text()[-3000:]
    finally:
        first.process.kill()
    argv = ["fit", *flags, *of.LONG, "--trainer.devices=2", "--run.name=one"]
    one = runs.Workers(2).run(argv, tmp_path / "one", callbacks=[runs.StopAfter(4)]).loss
    losses = logged(first.run, "train/loss")
    assert len(one) >= 3 and {step: losses[step] for step in one} == pytest.approx(one, abs=1e-6)


@pytest.mark.nightly
@pytest.mark.parametrize("on", ["ssh", "torchrun", "accelerate", "deepspeed"])
def test_launchers_have_equal_results(on: str, flags: Any, losses: Any, tmp_path: Path) -> None:
    def start(name: str, flags: Flags, environment: dict[str, str]) -> Launched:
        where = of.hosts(tmp_path, environment=environment)
        return Launched(tmp_path, on, *flags, where, name=name)

    assert (line := of.row(on, flags, losses, start)) in DOCS, line


@pytest.mark.nightly
def test_a_part_of_a_hostfile_trains(flags: Any, losses: Any, tmp_path: Path) -> None:
    """Two of three hosts: the launcher of each node waits for the other's rank alone."""
    (tmp_path / "rack").write_text("down slots=1\nnode1 slots=1\nnode2 slots=1\nnode3 slots=1\n")
    keys = {"hostfile": f"{tmp_path}/rack", "exclude": "down", "nodes": 2}
    launched = Launched(tmp_path, "deepspeed", *flags, of.hosts(tmp_path, (), **keys), *STEPS)
    assert launched.end() == Exit.DONE, launched.out.read_text()[-3000:]
    assert logged(launched.run, "train/loss") == pytest.approx(losses, abs=1e-6)


LSF = """#!/bin/sh
echo "$(basename $0) $@" >> {folder}/called
case $0 in *bsub) echo 17;; *bjobs) echo "17 RUN";; *bkill) echo signalled;; esac
"""


def test_a_target_of_a_package_submits_shows_and_stops(
    flags: Any, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
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
