"""Builds .venv (`setup`) and writes its locks (`lock`). Standard library only: it runs before anything is installed.

[tool.environment] in pyproject.toml has what you choose; lock-cpu.txt and lock-cuda.txt have every version and its hashes.
TORCH_INDEX: package index for torch alone (empty: pip's). TORCH_CUDA=1: take torch's CUDA build without a GPU.
HASHES=1: stop if the locks are stale. HASHES= (empty): by version alone. UV= (empty): by pip, even if uv is there.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path
from urllib.parse import unquote

if sys.version_info < (3, 11):  # noqa: UP036
    newer = [path for path in map(shutil.which, ("python3.12", "python3.13", "python3.14", "python3.11")) if path]
    if newer:
        os.execv(newer[0], [newer[0], *sys.argv])
    this = ".".join(map(str, sys.version_info[:2]))
    sys.exit(f"setup: Python 3.11 or newer is needed, this is {this}; name another, make setup PYTHON=<path>.")

import tomllib

PYPROJECT = tomllib.loads(Path("pyproject.toml").read_text("utf-8"))
CHOSEN, PROJECT = PYPROJECT["tool"]["environment"], PYPROJECT["project"]
ASKED = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"]
PINS, BLOCKED = CHOSEN["pins"], list(CHOSEN["blocked"])
STAMP = f"# pyproject.toml {zlib.crc32(repr([ASKED, PINS, BLOCKED]).encode())}\n"  # first line of a lock
BLOCK = re.compile(r"^([\w.-]+)==.*\n(?: .*\n)*", re.MULTILINE)  # a package's pin, marker and hashes
CUDA = re.compile("nvidia-(?!ml-)|cuda-|triton=")  # what torch's CUDA build brings
LIBRARY = os.environ.get("LIBRARY", CHOSEN["library"])  # what ends with a slash is a folder, installed editable
FOLDER = unquote(re.sub("^dist-template @ (file://)?", "", LIBRARY)) if LIBRARY.endswith("/") else ""
VENV, INDEX = Path(os.environ.get("VENV", ".venv")), os.environ.get("TORCH_INDEX", "")
PYTHON = str(VENV / "bin" / "python")
NO_CPU_BUILD = """This machine has no NVIDIA GPU (no nvidia-smi), and the package index has no CPU build of torch; the CUDA \
build has several GB. Name an index that has CPU builds, make setup TORCH_INDEX=<address>, or accept the CUDA build, make \
setup TORCH_CUDA=1."""


def uv_settings(python: str) -> dict[str, str]:
    """Returns the environment, with pip's indexes as variables of uv, which does not read pip's settings."""
    listed = subprocess.check_output([python, "-m", "pip", "config", "list"], text=True).splitlines()
    listed.sort(key=lambda line: line.startswith(":env:"))  # pip's variables are above its files
    found = {line.partition("=")[0].split(".")[-1]: ast.literal_eval(line.partition("=")[2]) for line in listed}
    further = " ".join(found.get("extra-index-url", "").split())
    values = {"UV_DEFAULT_INDEX": found.get("index-url"), "UV_INDEX": further, "SSL_CERT_FILE": found.get("cert")}
    values["UV_FIND_LINKS"] = ",".join(found.get("find-links", "").split())
    values["UV_INDEX_STRATEGY"] = further and "unsafe-best-match"  # as pip does
    return {name: value for name, value in values.items() if value} | os.environ


def install(lines: list[str], *options: str) -> None:
    uv, file = shutil.which(os.environ.get("UV", "uv")), VENV / "requirements.txt"
    file.write_text("\n".join(lines), "utf-8")
    command = [uv, "pip", "install", "--python", PYTHON] if uv else [PYTHON, "-m", "pip", "install"]
    settings = uv_settings(PYTHON) if uv else None
    done = subprocess.run([*command, "--quiet", *options, "-r", str(file)], env=settings, capture_output=True, text=True)
    print(end=done.stdout + done.stderr)
    if done.returncode:
        has_none = re.search(r"(?i)no (matching distribution|version of)[^\n]* torch==\S+\+cpu", done.stderr)
        sys.exit(f"setup: stopped. {NO_CPU_BUILD if has_none else 'A package was not installed, see above.'}")


def setup() -> None:
    has_wheels, gpu, is_linux = any(Path("wheels").glob("*.whl")), shutil.which("nvidia-smi"), sys.platform == "linux"
    kind = "cuda" if is_linux and not INDEX and (gpu or os.environ.get("TORCH_CUDA")) else "cpu"
    lock = Path(f"lock-{kind}.txt").read_text("utf-8")
    hashes = os.environ.get("HASHES", "1" if lock.startswith(STAMP) and not has_wheels else "")
    if hashes and not lock.startswith(STAMP):
        sys.exit("setup: stopped. pyproject.toml was edited after `make lock`: type make lock, or make setup HASHES=")
    if FOLDER and not has_wheels and not Path(FOLDER).is_dir():
        sys.exit(f"setup: stopped. pyproject.toml names the folder {FOLDER} for dist-template, which is not there.")
    if not Path(PYTHON).exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(VENV)], check=True)

    hashed: dict[str, str] = {}
    for block in BLOCK.finditer(lock):  # torch has two: for Linux and for macOS
        hashed[block[1]] = hashed.get(block[1], "") + block[0]
    pins = {name: text.partition(" \\")[0] for name, text in hashed.items()}
    pins |= {name: f"{name}=={version}" for name, version in PINS.items()}
    if kind == "cpu" and is_linux and not INDEX and not has_wheels:
        pins["torch"] += "+cpu"  # never the CUDA build, which may be all that an index has
    print(f"setup: {VENV} by {sys.executable}, {pins['torch']}, lock-{kind}.txt {'with' if hashes else 'WITHOUT'} hashes")
    source = ["--no-index", "--find-links", "wheels"] if has_wheels else []
    lines, options = pins, source
    if hashes:
        lines, options = hashed, ["--require-hashes", "--no-deps", *(["--extra-index-url", INDEX] if INDEX else [])]
    if not hashes or (INDEX and gpu):  # the locks do not have the hashes of an index's other CUDA builds
        install([pins["torch"]], *(["--index-url", INDEX] if INDEX else source))
        lines = {name: line for name, line in lines.items() if name != "torch"}
    first, last = {"torch", "setuptools"}, {"deepspeed"}  # deepspeed is built from source and imports torch
    for names in (first, lines.keys() - first - last, last):
        install([lines[name] for name in lines if name in names], *options, "--no-build-isolation")
    if LIBRARY:  # its ranges have to fit the pins
        (VENV / "constraints.txt").write_text("\n".join([*pins.values(), *BLOCKED]), "utf-8")
        asked = "dist-template" if has_wheels else f"-e {FOLDER}" if FOLDER else LIBRARY
        install([asked], *source, "--no-build-isolation", "-c", str(VENV / "constraints.txt"))
    print("setup: done")


def compiled(asked: list[str], *options: str) -> str:
    """Returns a lock of these packages for Linux and macOS; exits if there are no such versions."""
    uv = shutil.which("uv") or shutil.which(VENV / "bin" / "uv") or sys.exit("lock: uv is needed: make setup installs it.")
    command = [uv, "pip", "compile", "--no-config", "--universal", "--python-version=3.11", "--generate-hashes"]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as blocked:
        print(*BLOCKED, sep="\n", file=blocked, flush=True)
        command += ["--no-annotate", "--no-header", "--no-emit-package=dist-template", "-c", blocked.name, *options, "-"]
        settings = uv_settings(sys.executable)
        done = subprocess.run(command, input="\n".join(asked), env=settings, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"lock: nothing was written: no such versions.\n{done.stderr}")
    return done.stdout


def lock() -> None:
    """Takes versions that are old enough and not blocked; the locked ones stay where they may (ARGS=--upgrade)."""
    version, old = PINS["torch"], Path("lock-cpu.txt").read_text("utf-8")
    if INDEX:  # the CPU builds for Linux are in an index of their own
        old = compiled([f"torch=={version}+cpu"], "--no-deps", "--default-index", INDEX)
    cpu = re.search(rf"^torch=={version}\+cpu.*\n(?: .*\n)*", old, re.MULTILINE)
    if not cpu:
        sys.exit(f"lock: nothing was written: torch {version} needs make lock TORCH_INDEX=<index of its CPU builds>.")
    asked = [*ASKED, *(f"{name}=={version}" for name, version in PINS.items())]
    asked.append(f"dist-template @ {Path(FOLDER).resolve().as_uri()}/" if FOLDER else LIBRARY)
    young = ["--exclude-newer", os.environ.get("COOL_DOWN", "7 days")]
    cuda = compiled(asked, "-o", "lock-cuda.txt", *young, *sys.argv[2:])
    blocks = [block[0] for block in BLOCK.finditer(cuda) if not CUDA.match(block[0])]
    linux = re.sub(r"\+cpu( ;.*?)? \\", "+cpu ; sys_platform != 'darwin' \\\\", cpu[0])
    for at, block in enumerate(blocks):
        if block.startswith("torch=="):  # macOS has PyPI's build
            blocks[at] = linux + block.replace(version, f"{version} ; sys_platform == 'darwin'", 1)
    for kind, text in {"cuda": cuda, "cpu": "".join(blocks)}.items():
        Path(f"lock-{kind}.txt").write_text(STAMP + text, "utf-8")
        print(f"lock: {len(BLOCK.findall(text))} packages in lock-{kind}.txt")


{"setup": setup, "lock": lock}[sys.argv[1]]()
