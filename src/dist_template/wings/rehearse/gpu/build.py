"""Compiles the fake CUDA device with g++, once for each torch, Python, machine and text of the sources.

torch.utils.cpp_extension would compile it as well, but needs ninja, and links the CUDA of a machine that has it."""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

from ....errors import InputError

VERIFIED = ("2.13.0",)  # the device replaces parts of torch that another release may have moved
MACHINES = ("x86_64", "aarch64")
INCLUDE, TORCH, HERE = Path(sysconfig.get_paths()["include"]), Path(torch.__file__).parent, Path(__file__).parent
LINKED = [f"-L{TORCH}/lib", f"-Wl,-rpath,{TORCH}/lib", "-Wl,--no-as-needed", "-lc10", "-ltorch_cpu", "-ltorch_python"]
LIBRARIES = {"hooks": [], "device": LINKED, "nccl": LINKED}  # what each is linked with


def refusal() -> str:
    """Returns why the device cannot work here; "" if it can."""
    version, machine = torch.__version__.partition("+")[0], platform.machine()
    if sys.platform != "linux" or machine not in MACHINES:
        return f"fake GPUs need Linux on {' or '.join(MACHINES)}; this is {sys.platform} on {machine}"
    if torch.version.cuda or torch.version.hip:
        return (
            f"fake GPUs need a CPU build of torch, as pip's torch=={VERIFIED[0]}+cpu; this one has kernels of real GPUs"
        )
    if version not in VERIFIED:
        return f"fake GPUs were verified with torch {' and '.join(VERIFIED)}; this is {version}"
    if not (shutil.which("g++") and (INCLUDE / "Python.h").exists()):
        return "fake GPUs have to be compiled once: install g++ and Python's headers (apt-get install g++ python3-dev)"
    return ""


def build() -> Path:
    """Returns the folder of the libraries, compiled if they are not there; raises InputError if they cannot be."""
    if why := refusal():
        raise InputError(why)
    key = [torch.__version__, sys.version, *(path.read_text("utf-8") for path in sorted(HERE.glob("*.[ch]pp")))]
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "dist_template", "fake_cuda")
    folder = caches / hashlib.sha256("".join(key).encode()).hexdigest()[:16]
    if not all((folder / f"fake_{name}.so").exists() for name in LIBRARIES):
        print("compiling fake GPUs, once: about 40 s", flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        compilers = {name: _compiler(name, folder / f"{name}.{os.getpid()}") for name in LIBRARIES}
        for name, compiler in compilers.items():
            text = compiler.communicate()[1]
            if compiler.returncode:
                raise InputError(f"g++ cannot compile fake GPUs ({name}.cpp): {text.splitlines()[0]}")
            (folder / f"{name}.{os.getpid()}").rename(folder / f"fake_{name}.so")
    return folder


def _compiler(name: str, output: Path) -> subprocess.Popen[str]:
    """Starts g++."""
    flags = f"""-shared -fPIC -O0 -w -std=c++20 -DUSE_DISTRIBUTED -DUSE_C10D_GLOO -DTORCH_EXTENSION_NAME=fake_{name}
        -DTORCH_API_INCLUDE_EXTENSION_H -D_GLIBCXX_USE_CXX11_ABI={torch._C._GLIBCXX_USE_CXX11_ABI:d}"""
    folders = [f"-I{path}" for path in (TORCH / "include", TORCH / "include/torch/csrc/api/include", INCLUDE)]
    command = ["g++", *flags.split(), *folders, *LIBRARIES[name], str(HERE / f"{name}.cpp"), "-o", str(output)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
