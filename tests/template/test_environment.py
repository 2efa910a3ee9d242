"""environment.py, which builds a project's .venv: what it installs, and how it refuses.

A stand-in for the environment's Python writes down its calls; only the last test downloads."""

import ast
import contextlib
import os
import pty
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .conftest import ROOT, SOURCE, BakedProject, bake_into, edit, output, run

STAND_IN = r"""#!/bin/bash
case "$*" in
    *"config list"*) echo "global.index-url='https://mirror.example.org'"; exit ;;
    *"-m venv"*) exit ;;
esac
echo "asked $(basename "$0") $UV_DEFAULT_INDEX $*" >> "$LOG"; grep -v hash= "${@: -1}" >> "$LOG"
grep -q "$MISSING" "${@: -1}" || {
    grep -q "^uv==" "${@: -1}" && [ -z "$(grep yarl "${@: -1}")" ] && cp "$0" "$(dirname "$0")/uv"
    exit 0
}
echo "ERROR: No matching distribution found for $MISSING" >&2; exit 1
"""
HASHED, WHEELS = "--require-hashes --no-deps", "--no-index --find-links wheels"


class Machine:
    """A project, a PATH that has only what setup needs, and the log of what was installed."""

    def __init__(self, folder: Path, project: Path) -> None:
        self.project = Path(shutil.copytree(project, folder / "project"))
        self.path, self.log = folder / "bin", folder / "log"
        self.path.mkdir()
        for name in "bash basename cat cp dirname grep make sh touch".split():
            (self.path / name).symlink_to(str(shutil.which(name)))
        self.has("python3", f'#!/bin/bash\nexec "{sys.executable}" "$@"\n')
        (self.project / ".venv" / "bin").mkdir(parents=True)
        self.has("../project/.venv/bin/python", STAND_IN)

    def has(self, name: str, script: str = "#!/bin/bash\n") -> None:
        (self.path / name).write_text(script)
        (self.path / name).chmod(0o755)

    def setup(
        self, *variables: str, missing: str = "none", library: bool = False
    ) -> tuple[str, list[str]]:
        """Returns what `make setup` prints, and its calls: each a command, then the packages."""
        self.log.write_text("")
        settings = [f"LOG={self.log}", f"MISSING={missing}", *([] if library else ["LIBRARY="])]
        command = ["make", "setup", *settings, *variables]
        done = run(*command, cwd=self.project, PATH=str(self.path), PYTHONPATH="")
        (self.project / ".venv" / ".ready").unlink(missing_ok=True)
        calls = [call.strip() for call in self.log.read_text().split("asked ")[1:]]
        return done.stdout + done.stderr, calls

    def edit(self, old: str, new: str) -> None:
        edit(self.project / "pyproject.toml", old, new)


@pytest.fixture
def machine(tmp_path: Path, default: BakedProject) -> Machine:
    return Machine(tmp_path, default.path)


def nothing(machine: Machine) -> None:
    """Leaves the machine without a GPU, and the project with a current lock."""


def gpu(machine: Machine) -> None:
    machine.has("nvidia-smi")


def stale(machine: Machine) -> None:
    machine.edit('transformers = "5.23.0"', 'transformers = "5.23.1"')


def wheels(machine: Machine) -> None:
    (machine.project / "wheels").mkdir()
    (machine.project / "wheels" / "x.whl").touch()


# Machine, variables -> the options and packages of each call, in order.
PLANS: dict[str, tuple[Callable[[Machine], None], str, list[str]]] = {
    "no GPU": (
        nothing,
        "",
        [f"{HASHED}.*torch==2.13.0.cpu ;", f"{HASHED}.*yarl", f"{HASHED}.*deepspeed"],
    ),
    "a GPU": (gpu, "", [rf"{HASHED}.*torch==2.13.0 \\", f"{HASHED}.*nvidia-.*triton", "deepspeed"]),
    "CUDA": (nothing, "TORCH_CUDA=1", [rf"{HASHED}.*torch==2.13.0 \\", "nvidia-", "deepspeed"]),
    "an index": (
        nothing,
        "TORCH_INDEX=x",
        [f"{HASHED} --extra-index-url x.*torch==2.13.0.cpu", "yarl==", "deepspeed"],
    ),
    "a GPU, an index": (
        gpu,
        "TORCH_INDEX=x",
        ["--index-url x [^\n]*\ntorch==2.13.0$", f"{HASHED}.*setuptools", "yarl", "deepspeed"],
    ),
    "a stale lock": (
        stale,
        "",
        ["torch==2.13.0.cpu$", "setuptools==84.2.1$", "transformers==5.23.1\n", "deepspeed=="],
    ),
    "without hashes": (
        nothing,
        "HASHES=",
        ["torch==2.13.0.cpu$", "setuptools", "yarl==1.25.1\n", "deepspeed"],
    ),
    "wheels": (wheels, "", [f"{WHEELS}.*torch==2.13.0$", *[WHEELS] * 3]),
}


@pytest.mark.parametrize("case", PLANS)
def test_setup_installs_what_fits_the_machine(machine: Machine, case: str) -> None:
    prepare, variables, calls = PLANS[case]
    prepare(machine)
    said, (first, *asked) = machine.setup(*variables.split())
    alone = f"{HASHED if '--require-hashes' in first else ''}.*\nuv==[^\n]*$"
    assert first.startswith("python ") and re.search(alone, first), "pip installs uv, and no more"
    assert len(asked) == len(calls), said + "\n".join(asked)
    for pattern, call in zip(calls, asked, strict=True):
        assert re.search(pattern, call, re.DOTALL), call
    assert ("WITHOUT hashes" in said) != ("--require-hashes" in "".join(asked))
    assert "setup: done" in said
    assert all(call.startswith("uv ") for call in asked)
    assert all("--no-build-isolation" in call for call in asked[1:])


def test_pip_installs_all_where_uv_cannot_be_had(machine: Machine) -> None:
    none = STAND_IN.replace('cp "$0" "$(dirname "$0")/uv"', "exit 1")
    machine.has("../project/.venv/bin/python", none)
    said, (first, *asked) = machine.setup()
    assert "uv cannot be installed, so pip installs all: some minutes longer" in said
    assert "setup: done" in said and len(asked) == 3
    assert all(call.startswith("python  -m pip install") for call in [first, *asked])
    assert machine.setup("UV=")[1] == asked, "pip is asked for: uv is not even tried"


def test_the_library_comes_last_with_pins_and_without_blocked_versions(machine: Machine) -> None:
    _, asked = machine.setup(library=True)
    assert asked[-1].endswith(f"\n-e {ROOT.as_uri()}/")
    assert "--no-build-isolation -c .venv/constraints.txt" in asked[-1]
    rules = (machine.project / ".venv" / "constraints.txt").read_text().splitlines()
    assert {"torch==2.13.0+cpu", "lightning==2.6.6", "yarl==1.25.1"} <= set(rules)
    assert "lightning!=2.6.2,!=2.6.3" in rules
    for address in ("dist-template @ git+https://example.org/x@v1", "dist-template==0.1.0"):
        assert machine.setup(f"LIBRARY={address}")[1][-1].endswith(f"\n{address}")
    vendored = machine.project / "vendor" / "dist-template"
    vendored.mkdir(parents=True)
    asked = machine.setup("LIBRARY=dist-template @ vendor/dist-template/")[1]
    assert asked[-1].endswith(f"\n-e {vendored.as_uri()}/")
    wheels(machine)
    assert machine.setup(library=True)[1][-1].endswith("\ndist-template")


def test_uv_installs_where_it_is_from_the_indexes_of_pip(machine: Machine) -> None:
    locked = machine.setup()[1]
    assert [call.partition(" ")[0] for call in locked] == ["python", "uv", "uv", "uv"]
    machine.has("uv", STAND_IN)
    asked = machine.setup()[1]
    start = "uv https://mirror.example.org pip install --python .venv/bin/python --require"
    assert len(asked) == 3 and all(call.startswith(start) for call in asked)
    assert all(call.startswith("python  -m pip install") for call in machine.setup("UV=")[1])
    words = "no version of torch{sys_platform != 'darwin'}==2.13.0+cpu"  # as uv 0.13 says it
    machine.has("uv", STAND_IN.replace("No matching distribution found for $MISSING", words))
    assert "its CUDA build has several GB" in machine.setup(missing="torch==2.13.0+cpu")[0]


# What uv 0.13 writes into a terminal: a line that is drawn again, in colours.
COUNTS = r"""
printf '\033[2mResolved \033[1m3 packages\033[0m \033[2min 1ms\033[0m\r\n'
for number in 0 1 2 3; do
    printf '\r\033[2K\033[37m-\033[0m \033[2mPreparing packages...\033[0m (%s/3)  ' $number; sleep 1
done
printf '\r\033[2K\033[2mInstalled \033[1m3 packages\033[0m\r\n \033[32m+\033[0m yarl==1.25.1\r\n'
"""


def counting(machine: Machine) -> None:
    """A uv that counts, and a project that prints a line as often as it can."""
    machine.has("uv", STAND_IN.replace('echo "asked', COUNTS + 'echo "asked', 1))
    (machine.path / "sleep").symlink_to(str(shutil.which("sleep")))
    edit(machine.project / "environment.py", "PROGRESS_EVERY_S = 10.0", "PROGRESS_EVERY_S = 0.0")


@pytest.mark.slow
def test_setup_tells_how_far_it_is(machine: Machine) -> None:
    counting(machine)
    said = machine.setup()[0]
    assert re.search(r"(?m)^setup: 1 of \d+ packages, \d+ s$", said), said
    assert re.search(r"(?m)^setup: \d of 2 packages \(setuptools, torch\), \d+ s$", said), said
    assert "\033" not in said and "\r" not in said and "yarl" not in said


@pytest.mark.slow
def test_a_terminal_sees_the_installers_own_progress(machine: Machine) -> None:
    counting(machine)
    argv = ["make", "setup", f"LOG={machine.log}", "MISSING=none", "LIBRARY="]
    source, output = pty.openpty()
    env = dict(PATH=str(machine.path), PYTHONPATH="", HOME=str(machine.project))
    options: Any = {"cwd": machine.project, "stdout": output, "stderr": output, "env": env}
    process = subprocess.Popen(argv, **options)
    os.close(output)
    written = b""
    with contextlib.suppress(OSError):  # Linux: the other end is closed
        while part := os.read(source, 1 << 16):
            written += part
    os.close(source)
    assert process.wait() == 0, written
    assert b"Preparing packages...\x1b[0m (2/3)" in written and b"Installed" in written
    assert b"setup: done" in written and b" of " not in written and b"yarl" not in written


STOPS: dict[str, tuple[Callable[[Machine], None], str, str, str]] = {
    "no CPU build": (nothing, "", "torch==2.13.0+cpu", "its CUDA build has several GB: name"),
    "another package": (nothing, "", "yarl==1.25.1", "A package was not installed, see above"),
    "a stale lock, hashes": (stale, "HASHES=1", "none", "pyproject.toml was edited after"),
    "no folder": (
        lambda machine: machine.edit(ROOT.as_uri(), "file:///nowhere"),
        "",
        "none",
        "pyproject.toml names the folder /nowhere for dist-template, which is not there",
    ),
}


@pytest.mark.parametrize("case", STOPS)
def test_setup_stops_with_one_sentence(machine: Machine, case: str) -> None:
    prepare, variables, missing, sentence = STOPS[case]
    prepare(machine)
    said, asked = machine.setup(*variables.split(), missing=missing, library=True)
    assert sentence in said and "setup: stopped." in said
    assert "Traceback" not in said and "setup: done" not in said
    assert bool(asked) == (missing != "none"), "nothing was installed before"


def test_an_old_python_starts_a_newer_one_or_says_which_it_is(machine: Machine) -> None:
    trick = "import sys; sys.version_info = (3, 10); sys.version = '3.10.1'; "
    trick += "sys.argv = sys.argv[1:]; exec(open('environment.py').read())"
    machine.has("python3", f'#!/bin/bash\nexec "{sys.executable}" -c "{trick}" "$@"\n')
    said, asked = machine.setup()
    assert "Python 3.11 or newer is needed, not 3.10.1: make setup PYTHON=" in said and not asked
    machine.has("python3.12", f'#!/bin/bash\nexec "{sys.executable}" "$@"\n')
    assert "setup: done" in machine.setup()[0]


def test_bare_make_prints_eight_commands(default: BakedProject) -> None:
    printed = re.findall(r"^ *make (\w+) ", output("make", cwd=default.path), re.MULTILINE)
    assert printed == "setup check test train rehearse upgrade lock clean".split()


def test_environment_needs_the_standard_library_alone_and_is_read_by_an_old_python() -> None:
    text = (SOURCE / "environment.py").read_text()
    ast.parse(text, feature_version=(3, 8))
    names = set(re.findall(r"(?m)^ *(?:from|import) (\w+)", text))
    assert {"tomllib", "pathlib"} <= names <= sys.stdlib_module_names


@pytest.mark.nightly
@pytest.mark.timeout(3000)
def test_a_fresh_environment_trains_and_is_built_again_without_a_network_and_from_vendor(
    repository: Path, tmp_path: Path
) -> None:
    project = bake_into(tmp_path).path

    def done(*command: str) -> str:
        return output(*command, cwd=project, PYTHONPATH="")

    def place() -> Path:
        code = "import dist_template; print(dist_template.__file__)"
        return Path(done(".venv/bin/python", "-c", code)).parent

    done("make", "setup")
    assert place() == ROOT / "src" / "dist_template", "a change in the checkout counts at once"
    done("make", "check")
    assert " passed" in done("make", "test")
    assert "Nothing to be done" in done("make", "setup"), "the second setup builds what is there"
    page = (ROOT / "docs" / "supply_chain.md").read_text(encoding="utf-8")
    for line in re.findall(r"^\.venv/bin/python -m pip wheel .*$", page, re.MULTILINE):
        done("bash", "-c", line)
    shutil.rmtree(project / ".venv")
    done("make", "setup", "PIP_INDEX_URL=http://127.0.0.1:9", "PIP_EXTRA_INDEX_URL=")
    assert project / ".venv" in place().parents, "the library is a wheel as well"
    shutil.rmtree(project / "wheels")
    for line in re.findall(r"^(?:git clone|sed -i).*$", page, re.MULTILINE):
        done("bash", "-c", line.replace("<address>", str(repository)))
    assert place() == project / "vendor" / "dist-template" / "src" / "dist_template"
    done("make", "train", "ARGS=--trainer.max_steps 2 --model.optim.warmup 0 --data.prompts []")
