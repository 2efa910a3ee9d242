"""A CUDA device that computes on the host: `fit` runs on it, and its waits are counted.

Tensors are on `cuda:0`, copies to the host arrive only when something waits, memory starts as NaN,
a fake NCCL refuses host and non-contiguous tensors. Not shown: speed, memory, order of streams."""

import collections
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.cpp_extension import include_paths

from tests import PROJECT, ROOT

FOLDER = Path(__file__).parent
SOURCES = {"fake_hooks": [], "fake_device": [], "fake_nccl": ["-DUSE_DISTRIBUTED"]}
SOURCES["fake_nccl"].append("-DUSE_C10D_GLOO")
COMPILER = shutil.which("g++")


def build() -> Path:
    """Compiles the libraries once per version of torch and of their sources; returns the folder."""
    sources = sorted(FOLDER.glob("*.[ch]pp"))
    text = torch.__version__ + sys.version
    text += "".join(path.read_text(encoding="utf-8") for path in sources)
    folder = ROOT / "build" / "fake_cuda" / hashlib.sha256(text.encode()).hexdigest()[:16]
    for name, flags in SOURCES.items():
        library = folder / f"{name}.so"
        if not library.exists():
            folder.mkdir(parents=True, exist_ok=True)
            temporary = library.with_suffix(f".{os.getpid()}")
            source = [f"{FOLDER}/{name}.cpp", "-o", str(temporary)]
            subprocess.run([COMPILER or "g++", *_options(name), *flags, *source], check=True)
            temporary.rename(library)
    return folder


def _options(name: str) -> list[str]:
    includes = [f"-I{path}" for path in (*include_paths(), sysconfig.get_paths()["include"])]
    libraries = Path(torch.__file__).parent / "lib"
    linked = [] if name == "fake_hooks" else ["-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python"]
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    options = ["-shared", "-fPIC", "-O0", "-w", "-std=c++20", f"-DTORCH_EXTENSION_NAME={name}"]
    options += ["-DTORCH_API_INCLUDE_EXTENSION_H", f"-D_GLIBCXX_USE_CXX11_ABI={abi}", *includes]
    return [*options, f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-Wl,--no-as-needed", *linked]


@dataclass
class Report:
    """A verb on the fake device: what rank 0 printed and counted."""

    code: int
    text: str
    folder: Path
    events: list[list[Any]]  # phase, kind, operation, line of ours, innermost line, count
    events_alive: int

    def of(self, *kinds: str) -> list[list[Any]]:
        return [event for event in self.events if event[1] in kinds]

    def waits(self) -> dict[str, int]:
        """Returns, by phase, how often the host waited for the device."""
        total: collections.Counter[str] = collections.Counter()
        for phase, _, operation, ours, place, count in self.of("SYNC"):
            # In C++ alone: DDP copies what gloo has reduced, which NCCL leaves on the device.
            if (operation, ours, place) != ("H2D blocking copy", "-", "-"):
                total[phase] += count
        return dict(total)


def run(folder: Path, argv: list[str], num: int = 1, prelude: str = "") -> Report:
    """Runs a verb of the linked project on `num` fake devices. `prelude`: see fit.py."""
    libraries = build()
    folder.mkdir(parents=True, exist_ok=True)
    env = os.environ | {"LD_PRELOAD": f"{libraries}/fake_hooks.so", "FAKE_GPUS": str(num)}
    env |= {"OMP_NUM_THREADS": "1", "FAKE_REPORT": f"{folder}/report"}
    env |= {"PYTHONPATH": f"{os.environ['PYTHONPATH']}:{libraries}"}
    env |= {"FAKE_POISON": "1", "FAKE_PRELUDE": prelude, "FAKE_NCCL": "1" if num > 1 else ""}
    env.pop("DS_ACCELERATOR", None)
    command = [sys.executable, "-m", "tests.support.fake_cuda.fit", *argv]
    options: Any = {"capture_output": True, "text": True, "timeout": 600, "check": False}
    done = subprocess.run(command, env=env, cwd=PROJECT, **options)
    text = done.stdout + done.stderr
    report = folder / "report.0"
    found: Any = json.loads(report.read_text(encoding="utf-8")) if report.exists() else [[], -1]
    return Report(done.returncode, text, folder, *found)
