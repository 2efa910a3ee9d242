"""`doctor`: checks this machine for problems that would stop a training or slow it down.

Each check yields (verdict, what was found, what to do). A problem makes training fail, a
warning may. With fit's --config files it checks that training's folders, else the default ones."""

import json
import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from ...cluster.environment import comparable
from ...errors import Exit
from ...project import Flags, Project
from ..values import GIB

Findings = Iterator[tuple[str, str, str]]
OK, WARNING, PROBLEM = "ok", "warning", "problem"
INFINIBAND = Path("/sys/class/infiniband")
LOCK, CHOSEN = "lock-cpu.txt", "pyproject.toml"


def main(argv: list[str], project: Project) -> None:
    """Runs all checks, prints a line per finding, and exits with 1 if there is a problem."""
    parser = Flags("doctor", description=__doc__)
    parser.add_argument(
        "--json", action="store_true", help="findings and environment, to compare machines"
    )
    given, flags = parser.parse_known_args(argv[1:])
    checks = {
        "versions": check_versions(),
        "packages": check_packages(project.folder.parent),
        "gpus": check_gpus(),
        "disks": check_disks(written_folders(flags, project)),
        "limits": check_limits(),
        "network": check_network(),
    }
    findings = []
    for check, found_by_check in checks.items():
        for verdict, found, todo in found_by_check:
            findings.append({"check": check, "verdict": verdict, "found": found, "todo": todo})
            if not given.json:
                cure = f"\n{'':<23} -> {todo}" if todo else ""
                print(f"{verdict:<8} {check:<14} {found}{cure}", flush=True)
    if given.json:
        print(json.dumps({"findings": findings, "environment": comparable()}, indent=2))
    if any(finding["verdict"] == PROBLEM for finding in findings):
        sys.exit(Exit.FAILED)


def written_folders(flags: list[str], project: Project) -> dict[str, Path]:
    """Returns the folders that a training writes to, by the keys that set them."""
    root = "runs"
    cache = "data_cache" if _has_cache(project) else None
    if flags:
        from ...cli.fit import WithoutTrainer

        cli = WithoutTrainer.of(["doctor", *flags], project)
        root = cli.config_init.run.root
        cache = getattr(cli.datamodule, "cache_dir", None)
    found = {"run.root": Path(root)}
    if cache is not None:
        found["data.cache_dir"] = Path(cache)
    return found


def _has_cache(project: Project) -> bool:
    """Returns whether the project's data module has a cache of tokens; a plain one has none."""
    try:
        kind = project.class_of(project.data)
    except Exception:  # `fit` reports it, and the machine is to be examined anyway
        return True
    return hasattr(kind, "cache_dir")


def check_versions() -> Findings:
    """Reports versions and machine: two lines that a bug report needs first."""
    names = ("dist-template", "torch", "lightning", "transformers", "deepspeed")
    installed: Any = comparable()["packages"]
    versions = [f"{name} {installed.get(name, 'missing')}" for name in names]
    yield OK, f"{', '.join(versions)}, Python {platform.python_version()}", ""
    memory = psutil.virtual_memory().total / GIB
    yield OK, f"{platform.platform()}, {os.cpu_count()} CPU cores, {memory:.1f} GiB of memory", ""


def check_packages(project: Path) -> Findings:
    """Compares the installed versions with the lock, pins and blocked ones in pyproject.toml; any
    torch fits."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    lock, chosen = project / LOCK, project / CHOSEN
    if not lock.exists() or not chosen.exists():
        yield WARNING, f"there is no {lock} or no {chosen}", "run it in a checkout of the project"
        return
    installed: Any = comparable()["packages"]
    pins: dict[str, str] = {}
    for line in lock.read_text(encoding="utf-8").splitlines():
        if not line[:1].isalnum():  # a hash, a comment, or an option of pip
            continue
        pin = Requirement(line.rstrip(" \\"))
        if pin.marker is None or pin.marker.evaluate():
            # ==2.13.0+cpu: any build fits
            pins[canonicalize_name(pin.name)] = str(pin.specifier)[2:].split("+")[0]
    table = tomllib.loads(chosen.read_text(encoding="utf-8")).get("tool", {}).get("environment", {})
    for name, version in table.get("pins", {}).items():
        pins[canonicalize_name(name)] = version
    wrong = []
    for name, version in pins.items():
        has = installed.get(name, "missing").split("+")[0]
        if has != version:
            wrong.append(f"{name} {has} (locked: {version})")
    if wrong:
        found = f"{len(wrong)} of {len(pins)} differ: {', '.join(wrong)}"
        yield PROBLEM, found, f"make setup, or change {CHOSEN}"
    else:
        yield OK, f"{len(pins)} match {LOCK}", ""
    todo = "remove this environment, change your passwords and tokens, then make setup"
    for rule, advisory in table.get("blocked", {}).items():
        name, versions = canonicalize_name(Requirement(rule).name), Requirement(rule).specifier
        if name in installed and not versions.contains(installed[name], prereleases=True):
            yield PROBLEM, f"{name} {installed[name]} is blocked: {advisory}", todo


def check_gpus() -> Findings:
    """Reports the GPUs, CUDA and cuDNN; torch's build has to fit the driver."""
    import torch

    driver = comparable()["driver"]
    number = torch.cuda.device_count()
    build = torch.version.cuda if torch.version.cuda else torch.version.hip
    cudnn = torch.backends.cudnn.version()
    found = (
        f"torch {torch.__version__}, its CUDA {build if build else 'none'},"
        f" its cuDNN {cudnn if cudnn else 'none'}, driver {driver if driver else 'none'},"
        f" {number if number else 'no'} GPU(s)"
    )
    if torch.cuda.is_available():
        names: Counter[str] = Counter()
        for index in range(number):
            device = torch.cuda.get_device_properties(index)
            names[f"{device.name} with {device.total_memory / GIB:.0f} GiB"] += 1
        found += ": " + ", ".join(f"{many} x {name}" for name, many in names.items())
    if driver and not torch.cuda.is_available():
        yield PROBLEM, found, "install torch's build for this driver, or unset CUDA_VISIBLE_DEVICES"
    else:
        yield OK, found, ""


def check_disks(folders: dict[str, Path]) -> Findings:
    """The folders that a training writes to can be written, and have free space."""
    for key, path in folders.items():
        folder = path.absolute()
        while not folder.exists():
            folder = folder.parent
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(b"x")
        except OSError as error:
            yield PROBLEM, f"{key} {path}: {error.strerror}", f"set {key} to another folder"
            continue
        free, verdict, todo = shutil.disk_usage(folder).free / GIB, OK, ""
        if free < 20:  # a few small checkpoints; below 1 not even one
            verdict = PROBLEM if free < 1 else WARNING
            todo = f"free space, or set another {key}; checkpoints take 12 bytes per parameter"
        yield verdict, f"{key} {path}: {free:.1f} GiB free", todo


def check_limits() -> Findings:
    """NCCL and loader workers fill Docker's 64 MiB of /dev/shm; ranks, caches and workers open
    files."""
    size = shutil.disk_usage("/dev/shm").total / GIB
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    todo = []
    if size < 1:
        todo.append("docker run --shm-size 8g, or mount -o remount,size=8G /dev/shm")
    if 0 <= soft < 4096:  # -1: no limit
        todo.append("ulimit -n 4096")
    verdict = WARNING if todo else OK
    yield verdict, f"/dev/shm has {size:.2f} GiB; open files: {soft}", "; ".join(todo)


def check_network() -> Findings:
    """Ranks meet at the address to which the host's name resolves: an interface has to have it.
    NCCL sends by InfiniBand where a port is active, else by Ethernet."""
    yield from _infiniband()
    host = socket.gethostname()
    interfaces = {}  # by address
    for interface, addresses in psutil.net_if_addrs().items():
        for one in addresses:
            interfaces[one.address] = interface
    try:
        address = socket.gethostbyname(host)
    except OSError as error:
        yield PROBLEM, f"{host}: {error}", "give the host a name that resolves, as in /etc/hosts"
        return
    found = f"{host} is {address} on {interfaces.get(address, 'no interface')}"
    if address in interfaces:
        yield OK, found, ""
    else:
        yield WARNING, found, "correct /etc/hosts, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"


def _text_of(file: Path) -> str:
    return file.read_text("utf-8").strip() if file.is_file() else "unknown"


def _infiniband() -> Findings:
    """Reports InfiniBand's ports (RoCE has them too), as Linux lists them; without a port nothing
    is wrong."""
    active: list[str] = []
    down: list[str] = []
    for port in sorted(INFINIBAND.glob("*/ports/*")):
        name = f"{port.parents[1].name} port {port.name}"
        state = _text_of(port / "state")
        if "ACTIVE" in state:
            active.append(f"{name} ({_text_of(port / 'rate')})")
        else:
            down.append(f"{name} ({state})")
    if down:
        todo = "check cable and switch; ibstat has more. NCCL_DEBUG=INFO shows what NCCL uses"
        yield WARNING, f"InfiniBand ports that are not active: {', '.join(down)}", todo
    if active:
        yield OK, f"InfiniBand: {', '.join(active)}", ""
    elif not down:
        yield OK, "no InfiniBand: nodes would exchange by Ethernet", ""
