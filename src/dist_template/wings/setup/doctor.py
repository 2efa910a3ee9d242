"""`doctor`: checks this machine for problems that would stop a training or slow it down.

Each check yields (verdict, what was found, what to do). A problem makes training fail, a
warning may. With fit's --config files it checks that training's folders, else the default ones.
"""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from ...cluster.environment import comparable, driver, packages
from ...errors import Exit
from ...project import Flags, Project
from ...records import GIB
from ..values import free_port

Findings = Iterator[tuple[str, str, str]]
OK, WARNING, PROBLEM = "ok", "warning", "problem"
LOCK, BLOCKED = "constraints.txt", "requirements/blocked.txt"
SCARCE_GIB, TOO_LITTLE_GIB = 20, 1  # free disk space: a few small checkpoints; not even one
SHARED_MEMORY, SHARED_GIB = Path("/dev/shm"), 1  # Docker's 64 MiB are filled by loader workers
OPEN_FILES = 4096  # sockets to other ranks, files of the token cache, pipes of loader workers
TIMEOUT_S = 60.0  # for nvidia-smi, and for two processes to start and meet


@dataclass(frozen=True)
class Where:
    """The folders and loader workers that a training uses."""

    project: Path = Path()  # the folder that has constraints.txt
    root: Path = Path("runs")
    cache: Path = Path("data_cache")
    num_workers: int = 0
    strategy: str = "no --config given"


def main(argv: list[str], project: Project) -> None:
    """Runs all checks and prints a line per finding.

    Raises:
        SystemExit: with 1, if there is a problem.
        InputError: the configuration cannot be read.
    """
    parser = Flags("doctor", description=__doc__)
    as_json = "findings and environment as JSON, to compare machines"
    parser.add_argument("--json", action="store_true", help=as_json)
    given, flags = parser.parse_known_args(argv[1:])
    where = read(flags, project) if flags else Where(project.folder.parent)
    findings = []
    for check, function in CHECKS.items():
        for verdict, found, todo in function(where):
            findings.append({"check": check, "verdict": verdict, "found": found, "todo": todo})
            if not given.json:
                cure = f"\n{'':<23} -> {todo}" if todo else ""
                print(f"{verdict:<8} {check:<14} {found}{cure}")
    if given.json:
        print(json.dumps({"findings": findings, "environment": comparable()}, indent=2))
    if any(finding["verdict"] == PROBLEM for finding in findings):
        sys.exit(Exit.FAILED)


def read(flags: list[str], project: Project) -> Where:
    """Returns what a configuration uses."""
    from ...cli.fit import parse

    cli = parse(["doctor", *flags], project)
    data, trainer = cli.datamodule, cli.config.trainer
    chosen = [str(getattr(trainer.strategy, "class_path", trainer.strategy)).rpartition(".")[2]]
    for name, value in vars(getattr(trainer.strategy, "init_args", None) or Namespace()).items():
        if re.fullmatch("stage|(fsdp|dp_replicate|tp|ep|cp|pp)_size", name):
            chosen.append(f"{name}={value}")
    chosen.append(f"on {trainer.num_nodes} x {trainer.devices} devices, {trainer.precision or 32}")
    root, cache = Path(cli.config_init.run.root), Path(getattr(data, "cache_dir", Where.cache))
    workers = getattr(data, "num_workers", 0)
    return Where(project.folder.parent, root, cache, workers, " ".join(chosen))


def check_versions(where: Where) -> Findings:
    """Reports versions, machine and strategy: two lines that a bug report needs first."""
    names = ("dist-template", "torch", "lightning", "transformers", "deepspeed")
    versions = [f"{name} {packages().get(name, 'missing')}" for name in names]
    yield OK, f"{', '.join(versions)}, Python {platform.python_version()}", ""
    memory = psutil.virtual_memory().total / GIB
    machine = f"{platform.platform()}, {os.cpu_count()} CPU cores, {memory:.1f} GiB of memory"
    yield OK, f"{machine}; strategy: {where.strategy}", ""


def check_packages(where: Where) -> Findings:
    """The installed versions equal constraints.txt; any build of torch is accepted."""
    from packaging.utils import canonicalize_name

    lock = where.project / LOCK
    if not lock.exists():
        yield WARNING, f"there is no {lock}", "run it in a checkout of the project"
        return
    pins = dict(re.findall(r"^([\w.-]+)==([\w.]+)", lock.read_text(encoding="utf-8"), re.MULTILINE))
    installed, wrong = packages(), []
    for name, version in pins.items():
        has = installed.get(canonicalize_name(name), "missing").split("+")[0]
        if has != version:
            wrong.append(f"{name} {has} (locked: {version})")
    if wrong:
        todo = f"pip install --no-build-isolation -r {LOCK}, or change it"
        yield PROBLEM, f"{len(wrong)} of {len(pins)} differ: {', '.join(wrong)}", todo
    else:
        yield OK, f"{len(pins)} as {LOCK} has them, Python {platform.python_version()}", ""


def check_blocked(where: Where) -> Findings:
    """No version is installed that requirements/blocked.txt names: malicious or withdrawn ones."""
    from packaging.specifiers import SpecifierSet
    from packaging.utils import canonicalize_name

    path, installed = where.project / BLOCKED, packages()
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    for name, rule, advisory in re.findall(r"^([\w.-]+)(\S+)\s+# (.*)$", text, re.MULTILINE):
        version = installed.get(canonicalize_name(name))
        if version and not SpecifierSet(rule).contains(version, prereleases=True):
            todo = "remove this environment, change your passwords and tokens, then make setup"
            yield PROBLEM, f"{name} {version} is blocked: {advisory}", todo


def check_gpus(where: Where) -> Findings:
    """torch's build fits the driver; the GPUs are idle and have no memory errors."""
    import torch

    version, build = driver(), torch.version.cuda or torch.version.hip
    if version and not build:
        found = f"torch {torch.__version__} has no CUDA; the driver is {version}"
        yield PROBLEM, found, "install torch's CUDA build"
    elif version and not torch.cuda.is_available():
        todo = f"install a driver for CUDA {build}, or another build of torch"
        if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
            todo = "unset CUDA_VISIBLE_DEVICES"
        yield PROBLEM, f"torch {torch.__version__} sees no GPU under driver {version}", todo
    else:
        number = torch.cuda.device_count() or "no"
        yield OK, f"torch {torch.__version__}, driver {version or 'none'}, {number} GPU(s)", ""
    if not shutil.which("nvidia-smi"):
        return
    columns = "--query-gpu=index,name,ecc.errors.uncorrected.volatile.total,memory.used"
    query = ["nvidia-smi", columns, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        found = f"nvidia-smi does not answer for {TIMEOUT_S:g} s"
        yield PROBLEM, found, "reboot the node: its driver hangs"
        return
    if done.returncode:
        found = f"nvidia-smi: {done.stdout.strip() or done.stderr.strip()}"
        yield PROBLEM, found, "reboot the node, or exclude it"
        return
    for line in done.stdout.strip().splitlines():
        index, name, errors, used_mib = line.split(", ")
        if errors.isdigit() and int(errors):  # "[N/A]" where there is no ECC
            found = f"GPU {index}, {name}: {errors} uncorrected memory errors"
            yield PROBLEM, found, "reset the GPU; if they return, exclude it"
        elif used_mib.isdigit() and int(used_mib) > 1024:
            found = f"GPU {index}, {name}: {used_mib} MiB are in use"
            yield WARNING, found, "nvidia-smi lists the processes"
        else:
            yield OK, f"GPU {index}, {name}", ""


def check_disks(where: Where) -> Findings:
    """The folders that a training writes to can be written, and have free space and inodes."""
    folders = {"run.root": where.root, "data.cache_dir": where.cache}
    folders["TMPDIR"] = Path(tempfile.gettempdir())
    for key, path in folders.items():
        folder = path.absolute()
        while not folder.exists():
            folder = folder.parent
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(b"x")
        except OSError as error:
            todo = f"set {key} to another folder, or free this one"
            yield PROBLEM, f"{key} {path}: {error.strerror}", todo
            continue
        free, inodes = shutil.disk_usage(folder).free / GIB, os.statvfs(folder)
        found = f"{key} {path}: {free:.1f} GiB free"
        todo = f"free space, or set another {key}; checkpoints take 12 bytes per parameter"
        if inodes.f_files > 0 and inodes.f_favail < 1000:  # some file systems do not count inodes
            yield PROBLEM, f"{found}, {inodes.f_favail} inodes", todo
        elif free < SCARCE_GIB:
            yield PROBLEM if free < TOO_LITTLE_GIB else WARNING, found, todo
        else:
            yield OK, found, ""


def check_shared_memory(where: Where) -> Findings:
    """NCCL and loader workers exchange data through /dev/shm."""
    import torch

    if not where.num_workers and torch.cuda.device_count() < 2:
        yield OK, "not used: data.num_workers is 0, and there are not several GPUs", ""
        return
    size = shutil.disk_usage(SHARED_MEMORY).total / GIB if SHARED_MEMORY.is_dir() else 0
    found, todo = f"{SHARED_MEMORY} has {size:.2f} GiB", ""
    if size < SHARED_GIB:
        todo = "docker run --shm-size 8g, or mount -o remount,size=8G /dev/shm"
    yield PROBLEM if todo else OK, found, todo


def check_open_files(where: Where) -> Findings:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 0:
        yield OK, "open files: no limit", ""
    elif soft < OPEN_FILES:
        most = 65536 if hard < 0 else min(hard, 65536)
        yield WARNING, f"open files: {soft}", f"ulimit -n {most}"
    else:
        yield OK, f"open files: {soft}", ""


def check_all_reduce(where: Where) -> Findings:
    """Two processes all-reduce a tensor over loopback: NCCL on two GPUs, otherwise gloo."""
    import torch

    backend = "nccl" if torch.cuda.device_count() > 1 else "gloo"
    code = f"from {__name__} import reduce_once; reduce_once(%d, {free_port()}, {backend!r})"
    started, ranks, why = time.monotonic(), [], ""
    with tempfile.TemporaryFile("w+") as log:
        for rank in range(2):
            argv = [sys.executable, "-c", code % rank]
            ranks.append(subprocess.Popen(argv, stdout=log, stderr=log, text=True))
        try:
            codes = [rank.wait(max(0.1, started + TIMEOUT_S - time.monotonic())) for rank in ranks]
            if any(codes):
                why = f"exit codes {codes}; "
        except subprocess.TimeoutExpired:
            why = f"not finished after {TIMEOUT_S:g} s; "
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        log.seek(0)
        printed = ["no output", *log.read().split("\n")]
    last = [line for line in printed if line.strip()][-1]
    found = f"{backend} between two processes: {why}{last}"
    if why:
        todo = "check firewall and loopback; set another GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME"
        yield PROBLEM, found, todo
    else:
        yield OK, f"{found}; {time.monotonic() - started:.1f} s including start-up", ""


def reduce_once(rank: int, port: int, backend: str) -> None:
    """Runs in one of two processes; the first prints the time of a second all-reduce."""
    import torch
    import torch.distributed as dist

    device = f"cuda:{rank}" if backend == "nccl" else "cpu"
    if backend == "nccl":  # else both processes also use the first GPU
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    tensor = torch.ones(2**20, device=device)
    for _ in range(2):
        started = time.perf_counter()
        dist.all_reduce(tensor)
        total = float(tensor[-1])
    assert total == 4, f"two all-reduces of 1 over 2 processes gave {total}"
    if rank == 0:  # unbuffered lines of both would be one
        print(f"4 MB in {1000 * (time.perf_counter() - started):.1f} ms", flush=True)
    dist.destroy_process_group()


CHECKS: dict[str, Callable[[Where], Findings]] = {
    "versions": check_versions,
    "packages": check_packages,
    "blocked": check_blocked,
    "gpus": check_gpus,
    "disks": check_disks,
    "shared memory": check_shared_memory,
    "open files": check_open_files,
    "all-reduce": check_all_reduce,
}
