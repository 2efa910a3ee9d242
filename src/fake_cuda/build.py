"""Compiles the device with g++, once for each torch, Python and text of the sources.

torch.utils.cpp_extension would compile it as well, but needs ninja, and links the CUDA of a machine
that has it."""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

VERIFIED = ("2.13.0",)  # the device replaces parts of torch that another release may have moved
MACHINES = ("x86_64", "aarch64")
SOURCES = ("device", "nccl")  # device.cpp becomes the Python module fake_device
HERE = Path(__file__).parent


class Unsupported(RuntimeError):
    """Why the device cannot work here: one sentence, with what to install."""


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
    if not (shutil.which("g++") and (_python_headers() / "Python.h").exists()):
        return (
            "fake GPUs have to be compiled once: install g++ and Python's headers (apt-get"
            " install g++ python3-dev)"
        )
    return ""


def build() -> Path:
    """Returns the folder of the compiled modules, after compiling those that are not there; raises
    Unsupported where they cannot be."""
    reason = refusal()
    if reason:
        raise Unsupported(reason)
    folder = _cache() / _key()
    if all((folder / f"fake_{name}.so").exists() for name in SOURCES):
        return folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Unsupported(
            f"fake GPUs are compiled into {folder}, which cannot be written"
            f" ({error.strerror}): set XDG_CACHE_HOME to another folder"
        ) from error
    print("compiling fake GPUs, once: about 40 s", flush=True)
    _compile(folder)
    return folder


def _cache() -> Path:
    caches = os.environ.get("XDG_CACHE_HOME")
    return (Path(caches) if caches else Path.home() / ".cache") / "fake_cuda"


def _key() -> str:
    """Returns a hash of all that the compiled modules depend on."""
    sources = [path.read_text("utf-8") for path in sorted(HERE.glob("*.[ch]pp"))]
    text = "".join([torch.__version__, sys.version, *sources])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _compile(folder: Path) -> None:
    """Compiles all sources at once. Each is renamed when it is complete, so that another process
    that compiles at the same time finds it absent or complete."""
    compilers = {}
    for name in SOURCES:
        command = ["g++", *_flags(), f"-DTORCH_EXTENSION_NAME=fake_{name}", f"{HERE}/{name}.cpp"]
        command += ["-o", f"{folder}/{name}.{os.getpid()}"]
        compilers[name] = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    for name, compiler in compilers.items():
        text = compiler.communicate()[1]
        if compiler.returncode:
            first = (text.splitlines() or ["no message"])[0]
            raise Unsupported(f"g++ cannot compile fake GPUs ({name}.cpp): {first}")
        (folder / f"{name}.{os.getpid()}").rename(folder / f"fake_{name}.so")


def _flags() -> list[str]:
    installed = Path(torch.__file__).parent
    return [
        *"-shared -fPIC -O0 -w -std=c++20".split(),
        # As torch's own CPU wheels are compiled: its structures have other members otherwise.
        *"-DUSE_DISTRIBUTED -DUSE_C10D_GLOO -DTORCH_API_INCLUDE_EXTENSION_H".split(),
        f"-D_GLIBCXX_USE_CXX11_ABI={torch.compiled_with_cxx11_abi():d}",
        f"-I{installed}/include",
        f"-I{installed}/include/torch/csrc/api/include",
        f"-I{_python_headers()}",
        f"-L{installed}/lib",
        f"-Wl,-rpath,{installed}/lib",
        *"-Wl,--no-as-needed -lc10 -ltorch_cpu -ltorch_python".split(),
    ]


def _python_headers() -> Path:
    return Path(sysconfig.get_paths()["include"])
