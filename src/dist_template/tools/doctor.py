"""`doctor`: what is wrong with this machine, found before a training does.

Each check looks at one thing and yields (verdict, what was found, what to do). A problem makes training fail or go
wrong; a warning may. With fit's --config files it looks where that training would write; without any, at the defaults.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..cluster.environment import comparable, driver, normalized, packages
from ..errors import Exit
from ..project import Project, program

Findings = Iterator[tuple[str, str, str]]
OK, WARNING, PROBLEM = "ok", "warning", "problem"
LOCK = "constraints.txt"
SHARED_MEMORY = Path("/dev/shm")
GIB = 2**30
SCARCE_GIB, TOO_LITTLE_GIB = 20, 1  # of disk: a few checkpoints of a small model, and not one of them
SHARED_GIB = 1  # Docker gives 64 MiB, which NCCL and workers' batches fill
FILES = 4096  # open at once: sockets to the other ranks, files of the cache, pipes of workers
CLOCK_S = 2.0  # by which a file server may be off
MEET_S = 60.0  # for two processes to start and meet


@dataclass(frozen=True)
class Where:
    """What a training uses of the machine."""

    project: Path = Path()  # the folder that has constraints.txt
    root: Path = Path("runs")
    cache: Path = Path("data_cache")
    num_workers: int = 0


def main(argv: list[str], project: Project) -> None:
    """Look, and print a line per finding.

    Raises:
        SystemExit: with 1, when there is a problem.
        InputError: the configuration cannot be read.
    """
    parser = argparse.ArgumentParser(program("doctor"), description=__doc__, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="findings and environment as JSON, to compare machines")
    own, flags = parser.parse_known_args(argv[1:])
    where = _read(flags, project) if flags else Where(project.folder.parent)
    nothing = [(OK, "nothing found", "")]
    findings = [(name, *finding) for name, check in CHECKS.items() for finding in list(check(where)) or nothing]
    if own.json:
        told = [dict(zip(("check", "verdict", "found", "todo"), finding, strict=True)) for finding in findings]
        print(json.dumps({"findings": told, "environment": comparable()}, indent=2))
    else:
        for name, verdict, found, todo in findings:
            print(f"{verdict:<8} {name:<14} {found}" + f"\n{'':<23} -> {todo}" * bool(todo))
    if any(verdict == PROBLEM for _, verdict, *_ in findings):
        sys.exit(Exit.FAILED)


def _read(flags: list[str], project: Project) -> Where:
    from ..cli.fit import parse

    cli = parse(["doctor", *flags], project)
    return Where(
        project.folder.parent,
        Path(cli.config_init.run.root),
        Path(cli.datamodule.cache_dir),
        cli.datamodule.num_workers,
    )


def check_packages(where: Where) -> Findings:
    """Installed are the versions of constraints.txt; torch's build (+cpu, +cu130) may be any."""
    lock = where.project / LOCK
    if not lock.exists():
        yield WARNING, f"there is no {lock}", "run it in a checkout of the project"
        return
    pins = dict(re.findall(r"^([\w.-]+)==([\w.]+)", lock.read_text(encoding="utf-8"), re.MULTILINE))
    installed = packages()
    has = {name: installed.get(normalized(name), "missing").split("+")[0] for name in pins}
    if wrong := [f"{name} {has[name]} (locked: {version})" for name, version in pins.items() if has[name] != version]:
        todo = f"pip install --no-build-isolation -r {LOCK}, or change it"
        yield PROBLEM, f"{len(wrong)} of {len(pins)} differ: {', '.join(wrong)}", todo
    else:
        yield OK, f"{len(pins)} as {LOCK} has them, Python {platform.python_version()}", ""


def check_gpus(where: Where) -> Findings:
    """torch's build fits the driver, and the GPUs have no memory errors and are free."""
    import torch

    version, build = driver(), torch.version.cuda or torch.version.hip
    if version and not build:
        yield PROBLEM, f"torch {torch.__version__} has no CUDA; there is driver {version}", "install torch's CUDA build"
    elif version and not torch.cuda.is_available():
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
        todo = (
            "unset CUDA_VISIBLE_DEVICES" if hidden else f"install a driver for CUDA {build}, or another build of torch"
        )
        yield PROBLEM, f"torch {torch.__version__} sees no GPU under driver {version}", todo
    else:
        number = torch.cuda.device_count() or "no"
        yield OK, f"torch {torch.__version__}, driver {version or 'none'}, {number} GPU(s)", ""
    if shutil.which("nvidia-smi"):
        yield from _ask_nvidia_smi()


def _ask_nvidia_smi() -> Findings:
    query = [
        "--query-gpu=index,name,ecc.errors.uncorrected.volatile.total,memory.used",
        "--format=csv,noheader,nounits",
    ]
    try:
        asked = subprocess.run(["nvidia-smi", *query], capture_output=True, text=True, timeout=MEET_S, check=False)
    except subprocess.TimeoutExpired:
        yield PROBLEM, f"nvidia-smi does not answer for {MEET_S:g} s", "reboot the node: its driver hangs"
        return
    if asked.returncode:
        yield PROBLEM, f"nvidia-smi: {asked.stdout.strip() or asked.stderr.strip()}", "reboot the node, or take it out"
        return
    for line in asked.stdout.strip().splitlines():
        index, name, errors, used_mib = (part.strip() for part in line.split(","))
        gpu = f"GPU {index}, {name}"
        if errors.isdigit() and int(errors):  # "[N/A]" where there is no ECC
            yield PROBLEM, f"{gpu}: {errors} uncorrected memory errors", "reset it; if they come back, take it out"
        elif used_mib.isdigit() and int(used_mib) > 1024:
            yield WARNING, f"{gpu}: {used_mib} MiB are in use", "see nvidia-smi for whose they are"
        else:
            yield OK, gpu, ""


def check_disks(where: Where) -> Findings:
    """Free space and inodes, and that a file can be written, where a training writes."""
    places = {"run.root": where.root, "data.cache_dir": where.cache, "TMPDIR": Path(tempfile.gettempdir())}
    for key, path in places.items():
        folder = _existing(path)
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(b"x")
        except OSError as error:
            yield PROBLEM, f"{key} {path}: {error.strerror}", f"set {key} to another folder, or free this one"
            continue
        free, inodes = shutil.disk_usage(folder).free / GIB, os.statvfs(folder)
        few = inodes.f_files > 0 and inodes.f_favail < 1000  # some file systems count none
        found = f"{key} {path}: {free:.1f} GiB free" + f", {inodes.f_favail} inodes" * few
        todo = (
            f"free space, or set {key} to another folder; a checkpoint takes 12 bytes per parameter, and two are kept"
        )
        if few or free < SCARCE_GIB:
            yield PROBLEM if few or free < TOO_LITTLE_GIB else WARNING, found, todo
        else:
            yield OK, found, ""


def check_shared_memory(where: Where) -> Findings:
    import torch

    if not where.num_workers and torch.cuda.device_count() < 2:
        yield OK, "not used: data.num_workers is 0, and there are no GPUs to join", ""
        return
    size = shutil.disk_usage(SHARED_MEMORY).total / GIB if SHARED_MEMORY.is_dir() else 0
    todo = "docker run --shm-size 8g, or mount -o remount,size=8G /dev/shm" if size < SHARED_GIB else ""
    yield PROBLEM if todo else OK, f"{SHARED_MEMORY} has {size:.2f} GiB", todo


def check_clock(where: Where) -> Findings:
    if time.time() < Path(__file__).stat().st_mtime - 86400:
        yield PROBLEM, f"it is {time.ctime()} here, before this program was written", "set the clock: chronyc makestep"
        return
    folder = _existing(where.root)
    if not os.access(folder, os.W_OK):
        return  # check_disks tells
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        off_s = os.stat(file.name).st_mtime - time.time()
    todo = "synchronize this machine and the file server (chrony)" if abs(off_s) > CLOCK_S else ""
    found = f"{time.strftime('%Y-%m-%d %H:%M:%S%z')}; a new file in {folder} is {abs(off_s):.1f} s off"
    yield WARNING if todo else OK, found, todo


def check_leftovers(where: Where) -> Findings:
    """Locks of compilations that were killed or of a `prepare` at work; half checkpoints, which fill the disk."""
    from ..parallel.build_locks import build_locks, is_open

    for lock in build_locks():
        if not is_open(lock):
            yield WARNING, f"{lock}: no process here holds it", f"rm {lock}; fit does it when it is two minutes old"
    for lock in where.cache.glob("*.lock"):
        if _is_held(lock):
            yield WARNING, f"{lock}: a `prepare` is at work", "let it end before you start a training"
    for path in sorted([*where.root.glob("*/*/checkpoints/.*.tmp"), *where.root.glob("*/*/checkpoints/.*.old")]):
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) / GIB
        yield (
            WARNING,
            f"{path}: a half checkpoint of {size:.1f} GiB",
            f"rm -r {path}, unless its run is saving right now",
        )


def check_limits(where: Where) -> Findings:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = 0 <= soft < FILES  # -1 is no limit
    most = 65536 if hard < 0 else min(hard, 65536)
    yield WARNING if few else OK, f"open files: {soft if soft >= 0 else 'no limit'}", f"ulimit -n {most}" if few else ""


def check_ports(where: Where) -> Findings:
    for name, port in (("a free port", "0"), ("MASTER_PORT", os.environ.get("MASTER_PORT"))):
        try:
            if port:
                yield OK, f"{name} of 127.0.0.1 can be had: {_bind(int(port))}", ""
        except OSError as error:
            todo = "set another MASTER_PORT, or end what has this one" if port != "0" else "look at the loopback device"
            yield PROBLEM, f"{name} of 127.0.0.1, {port}: {error.strerror}", todo


def check_all_reduce(where: Where) -> Findings:
    """Two processes meet over loopback and add up a tensor: on two GPUs with NCCL, else with gloo."""
    import torch

    backend = "nccl" if torch.cuda.device_count() > 1 else "gloo"
    code = f"from {__name__} import reduce_once; reduce_once(%d, {_bind(0)}, {backend!r})"
    started = time.monotonic()
    with tempfile.TemporaryFile("w+") as log:
        ranks = [subprocess.Popen([sys.executable, "-c", code % rank], stdout=log, stderr=log) for rank in range(2)]
        try:
            codes = [rank.wait(max(0.1, started + MEET_S - time.monotonic())) for rank in ranks]
            why = f"exit codes {codes}" if any(codes) else ""
        except subprocess.TimeoutExpired:
            why = f"no end after {MEET_S:g} s"
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        log.seek(0)
        last = next((line for line in reversed(log.read().splitlines()) if line.strip()), "they said nothing")
    if why:
        todo = "look at firewall and loopback; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name another device"
        yield PROBLEM, f"{backend} between two processes: {why}; {last}", todo
    else:
        yield OK, f"{backend} between two processes: {last}; {time.monotonic() - started:.1f} s with their start", ""


def reduce_once(rank: int, port: int, backend: str) -> None:
    """One of the two; prints how long an all-reduce of 4 MB took, after a first one that builds connections."""
    import torch
    import torch.distributed as dist

    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    tensor = torch.ones(2**20, device=f"cuda:{rank}" if backend == "nccl" else "cpu")
    for _ in range(2):
        started = time.perf_counter()
        dist.all_reduce(tensor)
        total = float(tensor[-1])
    assert total == 4, f"2 processes doubled 1 twice and got {total}"
    print(f"4 MB in {1000 * (time.perf_counter() - started):.1f} ms", flush=True)
    dist.destroy_process_group()


def _bind(port: int) -> int:
    """The port, or a free one for 0, after it could be had."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port))
        return probe.getsockname()[1]


def _existing(path: Path) -> Path:
    """What is there of a folder that a training would make."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())


def _is_held(lock: Path) -> bool:
    with lock.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


CHECKS: dict[str, Callable[[Where], Findings]] = {
    "packages": check_packages,
    "gpus": check_gpus,
    "disks": check_disks,
    "shared memory": check_shared_memory,
    "clock": check_clock,
    "leftovers": check_leftovers,
    "limits": check_limits,
    "ports": check_ports,
    "all-reduce": check_all_reduce,
}
