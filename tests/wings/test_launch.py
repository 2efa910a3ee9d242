"""`launch`: what it renders, what it refuses, and that each launcher trains on two hosts, which are loopback."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dist_template.cluster.site import Site
from dist_template.errors import Exit
from dist_template.wings.launch.command import main, parse
from tests.support.injury import OF_A_LAUNCHER
from tests.support.launched import ENVIRONMENT, LAUNCHERS, STEPS, Launched, site, two
from tests.support.line import main as main_of_line
from tests.support.loopback import Hosts
from tests.support.runs import OURS, PACKAGE, PROJECT, logged, only_run, run, run_in_subprocess
from tests.support.tiers import tiers
from tests.support.wings import describe_job as describe
from tests.support.wings import launch_target as target


@pytest.fixture(autouse=True)
def in_the_project(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(PROJECT)
    handlers = {
        number: signal.getsignal(number)
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    }
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def rendered(capsys: pytest.CaptureFixture[str], tmp_path: Path, *argv: str) -> dict[str, str]:
    """What `--dry-run` prints; it writes nothing."""
    os.environ.setdefault("DIST_RUN_ID", "rendered")
    given, before = [*argv, "--data.global_batch_size=192"], sorted(tmp_path.rglob("*"))
    main(["launch", "--dry-run", *given], OURS)
    text = capsys.readouterr().out
    assert sorted(tmp_path.rglob("*")) == before and "\n# would run: " in text
    own, flags = parse(given)
    to = target(own.on)
    job = describe(OURS, own.verb, flags, to.on_hosts)
    files = to.render(job)
    assert all(content in text for content in files.values())
    return files | {"command": shlex.join(to.commands(job)[0])}


# ---- what is rendered -----------------------------------------------------------------------


def test_torchrun_gets_sizes_by_its_scripts_variables(
    flags: list[str], tmp_path: Path, capsys: Any
) -> None:
    where = site(
        tmp_path,
        hosts=["a", "b", "c"],
        min_nodes=2,
        devices_per_node=4,
        port=2345,
        time_limit="26:10:00",
    )
    files = rendered(capsys, tmp_path, "--on=torchrun", *flags, where)
    assert set(files) == {"node.sh", "command"}
    lines = files["node.sh"].splitlines()
    for line in (
        "NPROC=4",
        "NNODES=2:3",
        "RDZV_ENDPOINT=a:2345",
        "NODE_RANK=$1",
        f"DIST_PACKAGE={PACKAGE}",
    ):
        assert f"export {line}" in lines
    assert lines[-1].startswith("exec bash launch/torchrun.sh fit --run.root=")
    assert lines[-1].endswith(
        "--trainer.devices=4 --trainer.num_nodes=3 --preemption.max_time=01:02:05:00"
    )


def test_ray_places_the_processes_of_all_hosts_that_are_named(
    flags: list[str], tmp_path: Path, capsys: Any
) -> None:
    where = site(tmp_path, hosts=["a", "b"], devices_per_node=3)
    (line,) = [
        line
        for line in rendered(capsys, tmp_path, "--on=ray", *flags, where)["node.sh"].splitlines()
        if line.startswith("exec ")
    ]
    assert "launch.targets.ray 6 cpu " in line and line.endswith(
        "--trainer.devices=3 --trainer.num_nodes=2"
    )
    assert " --nodes=2 " in rendered(capsys, tmp_path, "--on=slurm", *flags, where)["command"]


def test_a_dry_run_prints_commands_and_no_secrets(
    flags: list[str], tmp_path: Path, capsys: Any
) -> None:
    secrets = {"HF_TOKEN": "hf s3cret", "PROXY": "http://me:s3cret@proxy", "PLAIN": "shown"}
    where = site(tmp_path, hosts=["a", "b"], environment=secrets, ssh="ssh -F x")
    key = "--cluster.environment.WANDB_API_KEY=s3cret"
    os.environ["DIST_RUN_ID"] = "dry"
    main(
        ["launch", "--dry-run", "--on=ssh", *flags, where, key, "--data.global_batch_size=192"],
        OURS,
    )
    text = capsys.readouterr().out
    assert (
        "s3cret" not in text
        and "export PLAIN=shown" in text
        and "export HF_TOKEN='(not recorded)'" in text
    )
    script = tmp_path / "runs" / "default" / "dry" / "launch" / "node.sh"
    assert f"# would run: ssh -F x b 'bash {script} 1'" in text.splitlines()
    assert not (tmp_path / "runs").exists()


def test_slurm_gets_the_values_of_the_site(flags: list[str], tmp_path: Path, capsys: Any) -> None:
    options: dict[str, Any] = {
        "account": "physics",
        "exclusive": None,
        "array": "0-3",
        "cpus-per-task": 12,
    }
    image = {"container": "apptainer", "image": "train.sif", "mounts": ["/data:/data"]}
    where = site(
        tmp_path,
        nodes=4,
        devices_per_node=8,
        partition="gpu",
        time_limit="1-12:00:00",
        options=options,
        **image,
    )
    files = rendered(capsys, tmp_path, "--on=slurm", *flags, where, "--trainer.accelerator=gpu")
    text, words = files["job.sh"], files["command"].split()
    sizes = {
        "--nodes=4",
        "--ntasks-per-node=8",
        "--gpus-per-node=8",
        "--time=36:00:00",
        "--signal=SIGUSR1@300",
    }
    assert words[:2] == ["sbatch", "--parsable"] and words[-1].endswith("/launch/job.sh")
    assert sizes | {"--exclusive", "--cpus-per-task=12", "--array=0-3", "--partition=gpu"} < set(
        words
    )
    assert "#SBATCH --requeue\n" in text and "gpus-per-node" not in text, "the script's defaults"
    container = (
        f"apptainer exec --nv --bind {PROJECT}:{PROJECT},/data:/data --pwd {PROJECT} train.sif"
    )
    assert f"export CONTAINER='{container}'" in text and "export PYTHON=python\n" in text
    assert "--trainer.num_nodes" not in text, "launch/slurm.sh adds the sizes of the job"


def test_pyxis_and_gres_are_the_sites_own(flags: list[str], tmp_path: Path, capsys: Any) -> None:
    keys = {
        "container": "pyxis",
        "image": "registry#train",
        "options": {"gres": "gpu:h100:2"},
        "devices_per_node": 2,
    }
    files = rendered(
        capsys, tmp_path, "--on=slurm", *flags, site(tmp_path, **keys), "--trainer.accelerator=gpu"
    )
    assert "SRUN_FLAGS='--container-image=registry#train --container-mounts=" in files["job.sh"]
    assert " --gres=gpu:h100:2 " in files["command"] and "gpus-per-node" not in files["command"]
    odd = {"comment": 'two "words" # \\', "nice": 0}
    words = shlex.split(
        rendered(capsys, tmp_path, "--on=slurm", *flags, site(tmp_path, options=odd))["command"]
    )
    assert {'--comment=two "words" # \\', "--nice=0"} < set(words)


# ---- what is refused ------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a master that is an option": ({"master": "-x"}, "cluster.master has '-x'; give a name"),
    "a host twice": ({"hosts": ["a", "a"]}, "cluster.hosts has a twice"),
    "more nodes than hosts": (
        {"hosts": ["a"], "nodes": 3},
        "the job has 3 nodes; name as many in cluster.hosts",
    ),
    "nodes without names": ({"nodes": 2}, "the job has 2 nodes; name as many in cluster.hosts"),
    "a limit shorter than a save": (
        {"time_limit": "00:05:00"},
        "cluster.time_limit is 300 s, and the run saves 300 s",
    ),
    "a time without a unit": ({"time_limit": "2h"}, "give seconds, HH:MM:SS or DAYS-HH:MM:SS"),
    "memory without a unit": (
        {"device_memory": "80"},
        "give a number with a unit, as 80GB or 80GiB",
    ),
    "a container without an image": ({"container": "pyxis"}, "give cluster.image"),
    "a variable that is a line": (
        {"environment": {"A=1\nrm x;B": "1"}},
        "cluster.environment has 'A=1\\nrm x;B'",
    ),
    "an option of ssh": ({"hosts": ["-oProxyCommand=x"]}, "cluster.hosts has '-oProxyCommand=x'"),
    "no node": ({"nodes": 0}, "cluster.nodes is 0; give 1 to 100,000"),
    "a size that does not fit": ({"devices_per_node": 3}, "global_batch_size"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_in_one_sentence(
    case: str, flags: list[str], tmp_path: Path, capsys: Any
) -> None:
    keys, sentence = REFUSED[case]
    on = "slurm" if "partition" in keys else "ssh"
    code = run("launch", f"--on={on}", "--dry-run", *flags, site(tmp_path, **keys))
    error = capsys.readouterr().err.strip()
    assert code == Exit.BAD_INPUT and sentence in error and "\n" not in error, error
    assert not list(tmp_path.glob("runs/*/*")), "nothing is half-written"


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (
            {"hosts": ["node1", "nowhere.invalid"]},
            "nowhere.invalid is not ready: ssh: Could not resolve hostname",
        ),
        (
            {"hosts": ["down"]},
            "down is not ready: ssh: connect to host 127.0.0.1 port 1: Connection refused",
        ),
        (
            {"ssh": "shh -q"},
            "cluster.ssh 'shh -q' cannot be run: [Errno 2] No such file or directory: 'shh'",
        ),
        (
            {"port": "the server's"},
            "node1 is not ready: OSError: [Errno 98] Address already in use",
        ),
    ],
)
def test_a_node_that_is_not_ready_is_named(
    keys: dict[str, Any], sentence: str, hosts: Hosts, flags: list[str], tmp_path: Path, capsys: Any
) -> None:
    assert run("prepare", *flags) == 0
    keys = {**keys, "port": hosts.port} if "port" in keys else keys
    assert run("launch", "--on=ssh", *flags, two(hosts, tmp_path, **keys)) == Exit.BAD_INPUT
    assert sentence in capsys.readouterr().err
    assert not list(tmp_path.glob("runs/*/*")), "a refused run leaves no folder"


def test_data_that_is_not_prepared_and_a_run_that_was_not_launched(
    flags: list[str], tmp_path: Path, capsys: Any
) -> None:
    assert run("launch", "--on=ssh", *flags, f"--data.cache_dir={tmp_path}/none") == Exit.BAD_INPUT
    assert "run `prepare` first" in capsys.readouterr().err
    assert not list(tmp_path.glob("runs/*/*"))
    capsys.readouterr()
    assert run("launch", "status", str(tmp_path)) == Exit.BAD_INPUT
    assert "give a run that `launch` has started" in capsys.readouterr().err


def test_units_of_memory_and_time() -> None:
    assert (
        Site(device_memory="80GB").memory_bytes == 80 * 10**9
        and Site(device_memory="1.5 TiB").memory_bytes == 3 * 2**39
    )
    assert (
        Site(time_limit="1-00:00:01").time_limit_s == 86_401
        and Site(time_limit="30:00").time_limit_s == 1800
    )
    assert Site(time_limit=yaml.safe_load("24:00:00")).time_limit_s == 86_400, (
        "YAML 1.1 reads it as a number"
    )


# ---- the other libraries' own commands --------------------------------------------------------

OWN = {
    "torchrun": "torchrun --nproc_per_node 2 -m",
    "torchrun standalone": "torchrun --standalone --nnodes 1 --nproc-per-node 2 --max-restarts 1 -m",
    "torchrun c10d": "torchrun --rdzv-backend c10d --rdzv-endpoint localhost:0 --nproc_per_node 2 -m",
    "accelerate": "accelerate launch --cpu --num_processes 2 --num_machines 1 --mixed_precision no -m",
    "deepspeed": "deepspeed --num_gpus 2 --module",
    "deepspeed hostfile": "deepspeed --no_ssh --node_rank 0 --master_addr 127.0.0.1 --hostfile {folder}/hosts --module",
}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", tiers(OWN, daily=["torchrun"]))
def test_the_guides_commands_train_as_fit_does(
    launcher: str, flags: list[str], tmp_path: Path
) -> None:
    """Nobody names the run here: the ranks take their launcher's start for its folder."""
    assert run("prepare", *flags) == 0
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    program, *words = OWN[launcher].format(folder=tmp_path).split()
    command = [str(Path(sys.executable).parent / program), *words, PACKAGE, "fit", *flags, *STEPS]
    if launcher.startswith("torchrun"):  # the first `python` on PATH may be another
        command[:1] = [sys.executable, "-m", "torch.distributed.run"]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(OF_A_LAUNCHER)}
    two_ranks = [*command, "--trainer.devices=2"]
    done = subprocess.run(
        two_ranks, cwd=PROJECT, env=kept | ENVIRONMENT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert (
        run_in_subprocess(
            "fit", *flags, *STEPS, "--trainer.devices=2", "--run.name=plain"
        ).returncode
        == 0
    )
    losses = [logged(only_run(tmp_path, name), "train/loss") for name in ("default", "plain")]
    assert losses[0] == losses[1] and sorted(losses[0]) == [1, 2, 3, 4]


@pytest.mark.parametrize("name", ["../../x", "..", "a/b", "a\nb", "x" * 256])
def test_a_runs_id_is_one_folders_name(
    name: str, flags: list[str], tmp_path: Path, capsys: Any
) -> None:
    os.environ["DIST_RUN_ID"] = name
    assert main_of_line(["fit", *flags]) == Exit.BAD_INPUT
    assert "DIST_RUN_ID" in capsys.readouterr().err and not list(tmp_path.glob("runs/*"))


# ---- on two hosts ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("on", tiers(LAUNCHERS, daily=["torchrun"]))
def test_a_launcher_trains_on_two_hosts(
    on: str, hosts: Hosts, flags: list[str], tmp_path: Path
) -> None:
    """The nodes are reached by ssh."""
    assert run("prepare", *flags) == 0
    launched = Launched(tmp_path, on, *flags, two(hosts, tmp_path), *STEPS)
    assert launched.end() == Exit.DONE, launched.out.read_text()[-3000:]
    assert sorted(logged(launched.run, "train/loss")) == [1, 2, 3, 4]
    logs = [
        log.read_text() for log in (launched.run / "launch").glob("node-*.log")
    ]  # torchrun orders nodes itself
    assert sum("finished after step 4" in log for log in logs) == 1
    facts = json.loads((launched.run / "launch" / "launch.json").read_text())
    assert facts["on"] == on and facts["hosts"] == ["node1", "node2"]
