"""Compiles the fake CUDA device with g++, once for each torch, Python and text of the sources, and
runs ranks on it.

torch.utils.cpp_extension would compile it as well, but needs ninja, and links the CUDA of a machine
that has it."""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

import fake_cuda

from ....errors import InputError
from ..record import RunRecord
from ..workers import run_ranks

VERIFIED = ("2.13.0",)  # the device replaces parts of torch that another release may have moved
MACHINES = ("x86_64", "aarch64")
INCLUDE, TORCH, HERE = (
    Path(sysconfig.get_paths()["include"]),
    Path(torch.__file__).parent,
    Path(fake_cuda.__file__).parent,
)
LINKED = [
    f"-L{TORCH}/lib",
    f"-Wl,-rpath,{TORCH}/lib",
    "-Wl,--no-as-needed",
    "-lc10",
    "-ltorch_cpu",
    "-ltorch_python",
]
LIBRARIES = {"hooks": [], "device": LINKED, "nccl": LINKED}  # what each is linked with


def refusal() -> str:
    """Returns why the device cannot work here; "" if it can."""
    version, machine = torch.__version__.partition("+")[0], platform.machine()
    if sys.platform != "linux" or machine not in MACHINES:
        return (
            f"fake GPUs need Linux on {' or '.join(MACHINES)}; this is {sys.platform} on {machine}"
        )
    if torch.version.cuda or torch.version.hip:
        return (
            f"fake GPUs need a CPU build of torch, as torch=={VERIFIED[0]}+cpu; this one has"
            " kernels of real GPUs"
        )
    if version not in VERIFIED:
        return f"fake GPUs were verified with torch {' and '.join(VERIFIED)}; this is {version}"
    if not (shutil.which("g++") and (INCLUDE / "Python.h").exists()):
        return (
            "fake GPUs have to be compiled once: install g++ and Python's headers (apt-get"
            " install g++ python3-dev)"
        )
    return ""


def build() -> Path:
    """Returns the folder of the libraries, compiled if they are not there; raises InputError if
    they cannot be."""
    if why := refusal():
        raise InputError(why)
    key = [
        torch.__version__,
        sys.version,
        *(path.read_text("utf-8") for path in sorted(HERE.glob("*.[ch]pp"))),
    ]
    caches = Path(
        os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "dist_template", "fake_cuda"
    )
    folder = caches / hashlib.sha256("".join(key).encode()).hexdigest()[:16]
    if all((folder / f"fake_{name}.so").exists() for name in LIBRARIES):
        return folder
    print("compiling fake GPUs, once: about 40 s", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    flags = f"""-shared -fPIC -O0 -w -std=c++20 -DUSE_DISTRIBUTED -DUSE_C10D_GLOO
        -DTORCH_API_INCLUDE_EXTENSION_H
        -D_GLIBCXX_USE_CXX11_ABI={torch.compiled_with_cxx11_abi():d} -I{INCLUDE} -I{TORCH}/include
        -I{TORCH}/include/torch/csrc/api/include""".split()
    compilers = {}
    for name, linked in LIBRARIES.items():
        named = [
            f"-DTORCH_EXTENSION_NAME=fake_{name}",
            f"{HERE}/{name}.cpp",
            "-o",
            f"{folder}/{name}.{os.getpid()}",
        ]
        compilers[name] = subprocess.Popen(
            ["g++", *flags, *linked, *named], stderr=subprocess.PIPE, text=True
        )
    for name, compiler in compilers.items():
        text = compiler.communicate()[1]
        if compiler.returncode:
            raise InputError(f"g++ cannot compile fake GPUs ({name}.cpp): {text.splitlines()[0]}")
        (folder / f"{name}.{os.getpid()}").rename(folder / f"fake_{name}.so")
    return folder


def run_on_devices(*args: Any, **options: Any) -> RunRecord:
    """`run_ranks` on fake devices, one for each rank; raises InputError if they cannot be built."""
    return _starter().submit(run_ranks, *args, **options).result()


@cache
def _starter() -> ProcessPoolExecutor:
    """Returns a process with the device's hooks, to start ranks."""
    hooks = build() / "fake_hooks.so"
    starter = ProcessPoolExecutor(
        1, get_context("spawn"), initializer=_write_into, initargs=(hooks.with_name("log"),)
    )
    before, os.environ["LD_PRELOAD"] = os.environ.get("LD_PRELOAD", ""), str(hooks)
    starter.submit(os.getpid).result()  # it has started
    os.environ["LD_PRELOAD"] = before
    return starter


def _write_into(log: Path) -> None:
    """Redirects stderr to `log`, in which libraries complain about the device when they are
    imported."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
