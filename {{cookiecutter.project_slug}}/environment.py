"""Builds .venv (`setup`) and writes its locks (`lock`). Standard library only: it runs before
anything is installed.

[tool.environment] in pyproject.toml has what you choose; lock-cpu.txt and lock-cuda.txt have all
versions, with hashes. uv installs them, in a fifth of pip's time: the one on PATH, or the locked
one, which pip installs first. TORCH_INDEX: package index for torch alone (empty: pip's).
TORCH_CUDA=1: take torch's CUDA build without a GPU. HASHES=1: stop if the locks are stale. HASHES=
(empty): by version alone. UV= (empty): by pip.
"""

import ast
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import termios
import time
import zlib
from pathlib import Path
from urllib.parse import unquote

if sys.version_info < (3, 11):  # noqa: UP036
    for newer in filter(
        None, map(shutil.which, ("python3.12", "python3.13", "python3.14", "python3.11"))
    ):
        if subprocess.run([newer, "-c", ""]).returncode == 0:
            os.execv(newer, [newer, *sys.argv])
    sys.exit(
        f"setup: Python 3.11 or newer is needed, not {sys.version.split()[0]}: make setup"
        " PYTHON=<path>."
    )
import tomllib

PROGRESS_EVERY_S = 10.0  # between two lines of progress, where the output is no terminal
COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")  # and moves of a terminal's cursor
KEPT = 1 << 18  # bytes of an installer's output: a bar is drawn again 20 times a second
PYPROJECT = tomllib.loads(Path("pyproject.toml").read_text("utf-8"))
ASKED = PYPROJECT["project"]["dependencies"] + PYPROJECT["dependency-groups"]["dev"]
CHOSEN = PYPROJECT["tool"]["environment"]
PINS, BLOCKED = CHOSEN["pins"], list(CHOSEN["blocked"])
# first line of a lock
STAMP = f"# pyproject.toml {zlib.crc32(repr([ASKED, PINS, BLOCKED]).encode())}\n"
# a package's pin, marker and hashes
BLOCK = re.compile(r"^([\w.-]+)==.*\n(?: .*\n)*", re.MULTILINE)
CUDA = re.compile("nvidia-(?!ml-)|cuda-|triton=")  # what torch's CUDA build brings
# what ends with a slash is a folder, installed editable
LIBRARY = os.environ.get("LIBRARY", CHOSEN["library"])
FOLDER = (
    Path(unquote(re.sub("^dist-template @ (file://)?", "", LIBRARY))).resolve()
    if LIBRARY.endswith("/")
    else None
)
VENV, INDEX = os.environ.get("VENV", ".venv"), os.environ.get("TORCH_INDEX", "")
PYTHON, RULES = Path(VENV, "bin", "python"), Path(VENV, "constraints.txt")
NO_CPU_BUILD = (
    "This machine has no GPU, and the package index no CPU build of torch; its CUDA build has"
    " several GB: name an index with CPU builds, make setup TORCH_INDEX=<address>, or accept the"
    " other, make setup TORCH_CUDA=1."
)


def uv_settings() -> dict[str, str]:
    """Returns the environment, with pip's indexes as variables of uv, which does not read pip's
    settings."""
    command = [PYTHON if PYTHON.exists() else sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    listed.sort(key=lambda line: line.startswith(":env:"))  # pip's variables are above its files
    found = {
        line.partition("=")[0].split(".")[-1]: ast.literal_eval(line.partition("=")[2])
        for line in listed
    }
    further, links = (found.get(name, "").split() for name in ("extra-index-url", "find-links"))
    values = {"UV_DEFAULT_INDEX": found.get("index-url"), "UV_INDEX_STRATEGY": "unsafe-best-match"}
    values |= {
        "UV_INDEX": " ".join(further),
        "UV_FIND_LINKS": ",".join(links),
        "SSL_CERT_FILE": found.get("cert"),
    }
    return {name: value for name, value in values.items() if value} | os.environ


def uv_path() -> "str | None":
    """Returns the uv on PATH, else the one in .venv; None if there is none, or UV is empty."""
    name = os.environ.get("UV", "uv")
    return (shutil.which(name) or shutil.which(Path(VENV, "bin", name))) if name else None


def fetch_uv(line: str, *options: str) -> None:
    """Installs the locked uv by pip, unless there is one. Where it cannot be had, pip installs the
    rest, too."""
    if uv_path() or not os.environ.get("UV", "uv"):
        return
    run_pip([line], *options)
    if not uv_path():
        print("setup: uv cannot be installed, so pip installs all: some minutes longer", flush=True)


def run_pip(
    lines: list[str], *options: str, uv: "str | None" = None
) -> subprocess.CompletedProcess:
    """Installs requirements by pip, or by `uv`, and shows how far it is."""
    file = Path(VENV, "requirements.txt")
    file.write_text("\n".join(lines), "utf-8")
    command = [uv, "pip", "install", "--python", PYTHON] if uv else [PYTHON, "-m", "pip", "install"]
    command += [*options, "-r", file]
    return run_shown(command, uv_settings() if uv else dict(os.environ), lines)


def run_shown(
    command: list, environment: dict[str, str], lines: list[str]
) -> subprocess.CompletedProcess:
    """Runs an installer of the requirements `lines`, and returns what it wrote, as plain text.

    A terminal gets the installer's own progress, other output a line every PROGRESS_EVERY_S
    seconds. The installer writes into a terminal of its own in both cases: uv counts there only."""
    on_terminal = sys.stdout.isatty()
    size = (50, 200)  # rows, columns
    if on_terminal:
        size = (os.get_terminal_size().lines, os.get_terminal_size().columns)
    else:
        environment = {**environment, "TERM": "xterm"}
    try:
        source, output = pty.openpty()
        termios.tcsetwinsize(output, size)
    except OSError:  # a container without terminals
        source, output = os.pipe()
    started = printed = time.monotonic()
    process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    os.close(output)
    written, is_installed = b"", False
    while True:
        if select.select([source], [], [], 0.5)[0]:
            try:
                part = os.read(source, 1 << 16)
            except OSError:  # Linux: the installer has closed its terminal
                part = b""
            if not part:
                break
            if on_terminal and not is_installed:
                shown, word, rest = part.partition(b"Installed ")
                is_installed = bool(word)  # the names of all packages follow
                sys.stdout.buffer.write(shown + word + rest[: rest.find(b"\n") + 1 or None])
                sys.stdout.flush()
            written = (written + part)[-KEPT:]
        if not on_terminal and time.monotonic() - printed >= PROGRESS_EVERY_S:
            printed = time.monotonic()
            print(f"setup: {how_far(written, lines)}, {printed - started:.0f} s", flush=True)
    os.close(source)
    return subprocess.CompletedProcess(command, process.wait(), plain(written))


def how_far(written: bytes, lines: list[str]) -> str:
    """Returns how many of the requirements `lines` an installer has prepared, by what it wrote."""
    text = COLOUR.sub("", written.decode("utf-8", "replace"))
    counted = re.findall(r"packages\.\.\. \((\d+)/\d+\)", text)  # uv's, drawn again
    collected = re.findall(r"(?m)^(?:Collecting|Requirement already satisfied:) ", text)  # pip's
    names = [re.sub("^-e .*|[=@ ].*", "", line, flags=re.DOTALL) for line in lines]
    names = [name or "dist-template" for name in names]
    of_all = f"{len(names)} packages" if len(names) > 1 else names[0]
    if 1 < len(names) < 4:
        of_all += f" ({', '.join(names)})"
    if re.search("Prepared |Installing collected", text) or not (counted or collected):
        return f"installing {of_all}"
    if len(names) == 1:
        return f"preparing {of_all}"
    return f"{int(counted[-1]) if counted else len(collected)} of {of_all}"


def plain(written: bytes) -> str:
    """Returns the text that a terminal shows in the end, without colours."""
    lines = COLOUR.sub("", written.decode("utf-8", "replace")).split("\n")
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in lines)


def install(lines: list[str], *options: str) -> None:
    done = run_pip(lines, *options, uv=uv_path())
    if done.returncode:
        if not sys.stdout.isatty():  # else it was shown
            print(done.stdout, flush=True)
        has_none = re.search(
            r"(?i)no (matching distribution|version of).{0,200} torch\b.{0,200}\+cpu",
            " ".join(done.stdout.split()),  # a terminal's lines are wrapped
        )
        sys.exit(
            "setup: stopped."
            f" {NO_CPU_BUILD if has_none else 'A package was not installed, see above.'}"
        )


def setup() -> None:
    has_wheels, gpu, is_linux = (
        any(Path("wheels").glob("*.whl")),
        shutil.which("nvidia-smi"),
        sys.platform == "linux",
    )
    kind = "cuda" if is_linux and not INDEX and (gpu or os.environ.get("TORCH_CUDA")) else "cpu"
    lock = Path(f"lock-{kind}.txt").read_text("utf-8")
    hashes = os.environ.get("HASHES", "1" if lock.startswith(STAMP) and not has_wheels else "")
    if hashes and not lock.startswith(STAMP):
        sys.exit(
            "setup: stopped. pyproject.toml was edited after `make lock`: type make lock, or make"
            " setup HASHES="
        )
    if FOLDER and not has_wheels and not FOLDER.is_dir():
        sys.exit(
            f"setup: stopped. pyproject.toml names the folder {FOLDER} for dist-template, which is"
            " not there."
        )
    if not PYTHON.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", VENV], check=True)
    hashed: dict[str, str] = {}
    for block in BLOCK.finditer(lock):  # torch has two: for Linux and for macOS
        hashed[block[1]] = hashed.get(block[1], "") + block[0]
    pins = {name: text.partition(" \\")[0] for name, text in hashed.items()}
    pins |= {name: f"{name}=={version}" for name, version in PINS.items()}
    if kind == "cpu" and is_linux and not INDEX and not has_wheels:
        pins["torch"] += "+cpu"  # never the CUDA build, which may be all that an index has
    print(
        f"setup: {sys.executable}, lock-{kind}.txt {'with' if hashes else 'WITHOUT'} hashes",
        flush=True,
    )
    source = ["--no-index", "--find-links", "wheels"] if has_wheels else []
    checked = ["--require-hashes", "--no-deps", *(["--extra-index-url", INDEX] if INDEX else [])]
    lines, options = (hashed, checked) if hashes else (pins, source)
    if "uv" in lines:
        fetch_uv(lines["uv"], *(checked[:2] if hashes else source))
    if not hashes or (
        INDEX and gpu
    ):  # the locks do not have the hashes of an index's other CUDA builds
        install([pins["torch"]], *(["--index-url", INDEX] if INDEX else source))
        lines = {name: line for name, line in lines.items() if name != "torch"}
    # deepspeed is built from source and imports torch
    first, last = (
        {"torch", "setuptools"},
        {"deepspeed"},
    )
    for names in (first, lines.keys() - first - last, last):
        install([lines[name] for name in lines if name in names], *options, "--no-build-isolation")
    if LIBRARY:  # its ranges have to fit the pins
        RULES.write_text("\n".join([*pins.values(), *BLOCKED]), "utf-8")
        asked = "dist-template" if has_wheels else f"-e {FOLDER.as_uri()}/" if FOLDER else LIBRARY
        install([asked], *source, "--no-build-isolation", "-c", str(RULES))
    print("setup: done")


def compiled(asked: list[str], *options: str) -> str:
    """Returns a lock of these packages for Linux and macOS, without blocked versions; exits if
    there are none."""
    uv = (
        shutil.which("uv")
        or shutil.which(Path(VENV, "bin", "uv"))
        or sys.exit("lock: uv is needed: make setup")
    )
    RULES.parent.mkdir(exist_ok=True)
    RULES.write_text("\n".join(BLOCKED), "utf-8")
    fixed = ["--universal", "--python-version=3.11", "--generate-hashes"]
    fixed += ["--no-config", "--no-annotate", "--no-header"]
    words = [
        uv,
        "pip",
        "compile",
        *fixed,
        "--no-emit-package=dist-template",
        "-c",
        RULES,
        *options,
        "-",
    ]
    done = subprocess.run(words, input="\n".join(asked), capture_output=True, text=True)
    return (
        sys.exit(f"lock: nothing was written.\n{done.stderr}") if done.returncode else done.stdout
    )


def lock() -> None:
    """Takes versions that are old enough and not blocked; locked ones stay where they may (without
    ARGS=--upgrade)."""
    version, cpu = PINS["torch"], Path("lock-cpu.txt").read_text("utf-8")
    if INDEX:  # the CPU builds for Linux are in an index of their own
        cpu = compiled([f"torch=={version}+cpu"], "--no-deps", "--default-index", INDEX)
    found = re.search(rf"^torch=={version}\+cpu.*\n(?: .*\n)*", cpu, re.MULTILINE)
    if not found:
        sys.exit(
            f"lock: nothing was written: torch {version} needs make lock TORCH_INDEX=<index of its"
            " CPU builds>."
        )
    library = f"dist-template @ {FOLDER.as_uri()}/" if FOLDER else LIBRARY
    young = [
        "-o",
        "lock-cuda.txt",
        "--exclude-newer",
        os.environ.get("COOL_DOWN", "7 days"),
        *sys.argv[2:],
    ]
    cuda = STAMP + compiled([*ASKED, *(f"{name}=={PINS[name]}" for name in PINS), library], *young)
    linux = re.sub(r"\+cpu[^\\]*", "+cpu ; sys_platform != 'darwin' ", found[0])
    mac = f"torch=={version} ; sys_platform == 'darwin' "  # PyPI's build
    cpu = BLOCK.sub(lambda block: "" if CUDA.match(block[0]) else block[0], cuda)
    Path("lock-cuda.txt").write_text(cuda, "utf-8")
    Path("lock-cpu.txt").write_text(cpu.replace(f"\ntorch=={version} ", f"\n{linux}{mac}"), "utf-8")
    print(
        f"lock: {len(BLOCK.findall(cuda))} packages in lock-cuda.txt, without CUDA in lock-cpu.txt"
    )


{"setup": setup, "lock": lock}[sys.argv[1]]()
