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

from ...cluster.environment import comparable, driver, free_port, normalized, packages
from ...errors import Exit
from ...project import Flags, Project
from ...records import GIB

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
    own, flags = parser.parse_known_args(argv[1:])
    where = _read(flags, project) if flags else Where(project.folder.parent)
    findings = [(name, *finding) for name, check in CHECKS.items() for finding in check(where)]
    if own.json:
        keys = ("check", "verdict", "found", "todo")
        listed = [dict(zip(keys, finding, strict=True)) for finding in findings]
        print(json.dumps({"findings": listed, "environment": comparable()}, indent=2))
    else:
        for name, verdict, found, todo in findings:
            print(f"{verdict:<8} {name:<14} {found}" + (f"\n{'':<23} -> {todo}" if todo else ""))
    if any(verdict == PROBLEM for _, verdict, *_ in findings):
        sys.exit(Exit.FAILED)


def _read(flags: list[str], project: Project) -> Where:
    from ...cli.fit import parse

    cli = parse(["doctor", *flags], project)
    data, root = cli.datamodule, Path(cli.config_init.run.root)
    cache = Path(getattr(data, "cache_dir", Where.cache))
    trainer = cli.config.trainer
    chosen = [str(getattr(trainer.strategy, "class_path", trainer.strategy)).rpartition(".")[2]]
    for name, value in vars(getattr(trainer.strategy, "init_args", None) or Namespace()).items():
        if name == "stage" or re.fullmatch("(fsdp|dp_replicate|tp|ep|cp|pp)_size", name):
            chosen.append(f"{name}={value}")
    chosen.append(f"on {trainer.num_nodes} x {trainer.devices} devices, {trainer.precision or 32}")
    workers = getattr(data, "num_workers", 0)
    return Where(project.folder.parent, root, cache, workers, " ".join(chosen))


def check_versions(where: Where) -> Findings:
    """What a bug report needs first, in two lines."""
    names = ("dist-template", "torch", "lightning", "transformers", "deepspeed")
    versions = [f"{name} {packages().get(name, 'missing')}" for name in names]
    yield OK, f"{', '.join(versions)}, Python {platform.python_version()}", ""
    memory = psutil.virtual_memory().total / GIB
    machine = f"{platform.platform()}, {os.cpu_count()} CPU cores, {memory:.1f} GiB of memory"
    yield OK, f"{machine}; strategy: {where.strategy}", ""


def check_packages(where: Where) -> Findings:
    """The installed versions are those of constraints.txt; any build of torch is accepted."""
    lock = where.project / LOCK
    if not lock.exists():
        yield WARNING, f"there is no {lock}", "run it in a checkout of the project"
        return
    pins = dict(re.findall(r"^([\w.-]+)==([\w.]+)", lock.read_text(encoding="utf-8"), re.MULTILINE))
    installed = packages()
    wrong: list[str] = []
    for name, version in pins.items():
        has = installed.get(normalized(name), "missing").split("+")[0]
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

    path, found = where.project / BLOCKED, packages()
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    for name, rule, advisory in re.findall(r"^([\w.-]+)(\S+)\s+# (.*)$", text, re.MULTILINE):
        version = found.get(normalized(name))
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
    if shutil.which("nvidia-smi"):
        yield from _ask_nvidia_smi()


def _ask_nvidia_smi() -> Findings:
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
        index, name, errors, used_mib = (part.strip() for part in line.split(","))
        gpu = f"GPU {index}, {name}"
        if errors.isdigit() and int(errors):  # "[N/A]" where there is no ECC
            found = f"{gpu}: {errors} uncorrected memory errors"
            yield PROBLEM, found, "reset the GPU; if they return, exclude it"
        elif used_mib.isdigit() and int(used_mib) > 1024:
            yield WARNING, f"{gpu}: {used_mib} MiB are in use", "nvidia-smi lists the processes"
        else:
            yield OK, gpu, ""


def check_disks(where: Where) -> Findings:
    """The folders that a training writes to can be written, and have free space and inodes."""
    folders = {"run.root": where.root, "data.cache_dir": where.cache}
    folders["TMPDIR"] = Path(tempfile.gettempdir())
    for key, path in folders.items():
        folder = _existing(path)
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(b"x")
        except OSError as error:
            todo = f"set {key} to another folder, or free this one"
            yield PROBLEM, f"{key} {path}: {error.strerror}", todo
            continue
        free, inodes = shutil.disk_usage(folder).free / GIB, os.statvfs(folder)
        few = inodes.f_files > 0 and inodes.f_favail < 1000  # some file systems do not count inodes
        found = f"{key} {path}: {free:.1f} GiB free"
        found += f", {inodes.f_favail} inodes" if few else ""
        todo = f"free space, or set another {key}; checkpoints take 12 bytes per parameter"
        if few or free < SCARCE_GIB:
            yield PROBLEM if few or free < TOO_LITTLE_GIB else WARNING, found, todo
        else:
            yield OK, found, ""


def check_shared_memory(where: Where) -> Findings:
    """NCCL and loader workers exchange data through /dev/shm."""
    import torch

    if not where.num_workers and torch.cuda.device_count() < 2:
        yield OK, "not used: data.num_workers is 0, and there are not several GPUs", ""
        return
    size = shutil.disk_usage(SHARED_MEMORY).total / GIB if SHARED_MEMORY.is_dir() else 0
    found = f"{SHARED_MEMORY} has {size:.2f} GiB"
    if size < SHARED_GIB:
        yield PROBLEM, found, "docker run --shm-size 8g, or mount -o remount,size=8G /dev/shm"
    else:
        yield OK, found, ""


def check_open_files(where: Where) -> Findings:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"open files: {soft if soft >= 0 else 'no limit'}"  # -1 is no limit
    if 0 <= soft < OPEN_FILES:
        most = 65536 if hard < 0 else min(hard, 65536)
        yield WARNING, found, f"ulimit -n {most}"
    else:
        yield OK, found, ""


def check_all_reduce(where: Where) -> Findings:
    """Two processes all-reduce a tensor over loopback: NCCL on two GPUs, otherwise gloo."""
    import torch

    backend = "nccl" if torch.cuda.device_count() > 1 else "gloo"
    code = f"from {__name__} import reduce_once; reduce_once(%d, {free_port()}, {backend!r})"
    started = time.monotonic()
    with tempfile.TemporaryFile("w+") as log:
        ranks: list[subprocess.Popen[str]] = []
        for rank in range(2):
            argv = [sys.executable, "-c", code % rank]
            ranks.append(subprocess.Popen(argv, stdout=log, stderr=log, text=True))
        try:
            codes = [rank.wait(max(0.1, started + TIMEOUT_S - time.monotonic())) for rank in ranks]
            why = f"exit codes {codes}" if any(codes) else ""
        except subprocess.TimeoutExpired:
            why = f"not finished after {TIMEOUT_S:g} s"
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        log.seek(0)
        printed = [line for line in log.read().splitlines() if line.strip()]
    last, what = (printed or ["no output"])[-1], f"{backend} between two processes"
    if why:
        todo = "check firewall and loopback; set another GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME"
        yield PROBLEM, f"{what}: {why}; {last}", todo
        return
    yield OK, f"{what}: {last}; {time.monotonic() - started:.1f} s including start-up", ""


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


def _existing(path: Path) -> Path:
    """Returns `path`, or the nearest folder above it that exists."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())


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
