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
LIBRARIES = {"hooks": "", "device": "torch", "nccl": "torch"}  # name: what it is linked with
INSTALL = "apt-get install g++ python3-dev"


def refusal() -> str:
    """Returns why the device cannot work here; "" if it can."""
    version, where = torch.__version__.partition("+")[0], f"{sys.platform} on {platform.machine()}"
    headers = Path(sysconfig.get_paths()["include"], "Python.h")
    if sys.platform != "linux" or platform.machine() not in MACHINES:
        return f"the fake GPU needs Linux on {' or '.join(MACHINES)}; this is {where}"
    if torch.version.cuda or torch.version.hip:
        return f"the fake GPU needs a CPU build of torch, and {torch.__version__} has kernels for real ones"
    if version not in VERIFIED:
        return f"the fake GPU was verified with torch {' and '.join(VERIFIED)}, and this is {version}"
    if shutil.which("g++") is None or not headers.exists():
        return f"the fake GPU has to be compiled once: install g++ and Python's headers ({INSTALL})"
    return ""


def build() -> Path:
    """Returns the folder of the libraries, compiled if they are not there; raises InputError if they cannot be."""
    if why := refusal():
        raise InputError(why)
    sources = sorted(Path(__file__).parent.glob("*.[ch]pp"))
    key = [torch.__version__, sys.version, platform.machine(), *(path.read_text("utf-8") for path in sources)]
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = caches / "dist_template" / "fake_cuda" / hashlib.sha256("".join(key).encode()).hexdigest()[:16]
    missing = [name for name in LIBRARIES if not (folder / f"fake_{name}.so").exists()]
    if missing:
        print("compiling the fake GPU, once: about 40 s", flush=True)
        folder.mkdir(parents=True, exist_ok=True)
    compilers = [(name, folder / f"{name}.{os.getpid()}", _compiler(name, folder)) for name in missing]
    for name, temporary, compiler in compilers:
        _, text = compiler.communicate()
        if compiler.returncode:
            raise InputError(f"g++ cannot compile the fake GPU ({name}.cpp): {text.strip().splitlines()[0]}")
        temporary.rename(folder / f"fake_{name}.so")
    return folder


def _compiler(name: str, folder: Path) -> subprocess.Popen[str]:
    package, here = Path(torch.__file__).parent, Path(__file__).parent
    includes = (package / "include", package / "include/torch/csrc/api/include", sysconfig.get_paths()["include"])
    command = ["g++", "-shared", "-fPIC", "-O0", "-w", "-std=c++20", "-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO"]
    command += [f"-DTORCH_EXTENSION_NAME=fake_{name}", "-DTORCH_API_INCLUDE_EXTENSION_H"]
    command += [f"-D_GLIBCXX_USE_CXX11_ABI={torch._C._GLIBCXX_USE_CXX11_ABI:d}", *(f"-I{path}" for path in includes)]
    if LIBRARIES[name]:
        linked = ["-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python"]
        command += [f"-L{package}/lib", f"-Wl,-rpath,{package}/lib", "-Wl,--no-as-needed", *linked]
    command += [f"{here}/{name}.cpp", "-o", f"{folder}/{name}.{os.getpid()}"]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
