"""What a generated project installs: locked by hash, old enough, not blocked, audited, listed."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiers import tiers

from .conftest import ROOT, SOURCE, BakedProject, bake_into, run

BLOCK = re.compile(
    r"^([\w.-]+)==([^\s;]+)(?: ; ([^\\\n]+?))?(?: \\\n +--hash=sha256:[0-9a-f]{64})+\n",
    re.MULTILINE,
)
PROJECT = tomllib.loads((SOURCE / "pyproject.toml").read_text())
PAGE = (ROOT / "docs" / "supply_chain.md").read_text(encoding="utf-8")
LINES = "\n".join(re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)).splitlines()
TOOLS = ROOT / ".tools"


def line_of(word: str) -> str:
    """The command of the page that has this word."""
    (line,) = [line for line in LINES if word in line]
    return line


def locked(kind: str) -> dict[str, tuple[str, str]]:
    """Package -> version and marker; each line belongs to a package with hashes."""
    text = re.sub(r"^#.*\n", "", (SOURCE / f"lock-{kind}.txt").read_text())
    assert BLOCK.sub("", text) == "" and "://" not in text
    return {found[1]: (found[2], found[3] or "") for found in BLOCK.finditer(text)}


def test_the_locks_differ_by_torchs_build_and_have_the_pins_of_pyproject() -> None:
    cuda, cpu = locked("cuda"), locked("cpu")
    pins = PROJECT["tool"]["environment"]["pins"]
    assert {name: cuda[name][0] for name in pins} == pins and "uv" in cuda
    further = {name: marker for name, (_, marker) in cuda.items() if name not in cpu}
    assert {"nvidia-cublas", "triton"} <= set(further) and cpu.keys() < cuda.keys()
    assert all("sys_platform == 'linux'" in marker for marker in further.values())
    assert [name for name in cpu if name != "torch" and cpu[name] != cuda[name]] == []
    text = (SOURCE / "lock-cpu.txt").read_text()
    assert f"\ntorch=={pins['torch']}+cpu ; sys_platform != 'darwin'" in text
    assert f"\ntorch=={pins['torch']} ; sys_platform == 'darwin'" in text
    first = {path.read_text().partition("\n")[0] for path in SOURCE.glob("lock-*.txt")}
    assert len(first) == 1, "both are of one pyproject.toml"


@pytest.fixture(scope="module")
def tools() -> Path:
    """The tools' environment, as the page installs it, and the uv of the lock."""
    install = f"{line_of('python3 -m venv .tools')} uv=={locked('cuda')['uv'][0]}"
    stamp = TOOLS / "installed"
    if not stamp.exists() or stamp.read_text() != install:
        done = run("bash", "-c", install, cwd=ROOT)
        assert done.returncode == 0, done.stdout + done.stderr
        stamp.write_text(install)
    return TOOLS / "bin"


@pytest.mark.slow
def test_a_wheel_with_one_changed_byte_is_refused(tmp_path: Path) -> None:
    blocks = {found[1]: found[0] for found in BLOCK.finditer((SOURCE / "lock-cpu.txt").read_text())}
    (tmp_path / "lock.txt").write_text(blocks["sniffio"])
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    words = "download --no-deps --require-hashes -d wheels -r lock.txt"
    get = run(*pip, *words.split(), cwd=tmp_path)
    assert get.returncode == 0, get.stderr
    (wheel,) = (tmp_path / "wheels").iterdir()
    install = [*pip, "install", "--isolated", "--no-index", "--find-links=wheels"]
    install += ["--require-hashes", "-r", "lock.txt"]
    assert run(*install, "--target=right", cwd=tmp_path).returncode == 0
    assert (tmp_path / "right" / "sniffio").is_dir()
    data = bytearray(wheel.read_bytes())
    data[len(data) // 2] ^= 1
    wheel.write_bytes(data)
    done = run(*install, "--target=wrong", cwd=tmp_path)
    assert done.returncode == 1 and "DO NOT MATCH THE HASHES" in done.stderr
    assert not (tmp_path / "wrong").exists()


class Server:
    """Serves on loopback what `answer(path, body)` returns, as JSON."""

    def __init__(self, answer: Callable[[str, bytes], Any]) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                given = answer(self.path, body)
                self.send_response(200)
                self.send_header("Content-Type", "application/vnd.pypi.simple.v1+json")
                self.end_headers()
                self.wfile.write(given if isinstance(given, bytes) else json.dumps(given).encode())

            do_POST = do_GET

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def __enter__(self) -> str:
        return f"http://127.0.0.1:{self.http.server_port}"

    def __exit__(self, *_: object) -> None:
        self.http.shutdown()
        self.http.server_close()


# Version -> days since it was uploaded.
DAYS = {"1.0": 30, "1.1": 1, "2.13.0": 30, "2.14.0": 30, "2.14.0+cpu": 30}


def index(path: str, _: bytes) -> Any:
    """Two indexes: torch has its own versions, in /cpu/ CPU builds; other packages 1.0, 1.1."""
    name = path.strip("/").split("/")[-1]
    if path.endswith(".metadata"):
        package, version = name.split("-")[:2]
        return f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n".encode()
    files = []
    for version in DAYS:
        is_cpu = "+" in version
        if version.startswith("2") != (name == "torch") or is_cpu != path.startswith("/cpu"):
            continue
        wheel = f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
        uploaded = f"{datetime.now(UTC) - timedelta(days=DAYS[version]):%FT%TZ}"
        file = {"filename": wheel, "url": f"/files/{wheel}", "upload-time": uploaded}
        files.append(file | {"hashes": {"sha256": "a" * 64}, "core-metadata": True})
    return {"meta": {"api-version": "1.1"}, "name": name, "files": files}


LOCKING = {  # a further pin, variables -> what is said, or what lock-cpu.txt then has
    "an old version": ('demo = "1.0"', {}, "demo==1.0 "),
    "a young version": ('demo = "1.1"', {}, "you require demo==1.1"),
    "a young version, without the rule": ('demo = "1.1"', {"COOL_DOWN": "0 days"}, "demo==1.1 "),
    "a blocked version": ('bad = "1.0"', {}, "you require bad==1.0 and"),
    "another torch": ('torch = "2.14.0"', {}, "torch 2.14.0 needs make lock TORCH_INDEX="),
    "another torch, its index": ('torch = "2.14.0"', {"TORCH_INDEX": "{}"}, "torch==2.14.0+cpu ;"),
    "a version that is not pinned": ("", {"COOL_DOWN": "0 days"}, "kept==1.0 "),
    "a version that is not pinned, upgraded": ("--upgrade", {"COOL_DOWN": "0 days"}, "kept==1.1 "),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", tiers(LOCKING, daily=[*LOCKING][:2] + ["a blocked version"]))
def test_lock_takes_what_is_old_enough_and_not_blocked(
    case: str, tools: Path, tmp_path: Path
) -> None:
    pin, variables, said = LOCKING[case]
    pins = {"torch": 'torch = "2.13.0"', "setuptools": 'setuptools = "1.0"'}
    if "=" in pin:
        pins[pin.split()[0]] = pin
    (tmp_path / "pyproject.toml").write_text(f"""
project.dependencies = ["kept"]
dependency-groups.dev = []
tool.environment.library = ""
tool.environment.pins = {{ {", ".join(pins.values())} }}
tool.environment.blocked."bad!=1.0" = "malicious: GHSA-x"
""")
    shutil.copy(SOURCE / "environment.py", tmp_path)
    locks = [tmp_path / f"lock-{kind}.txt" for kind in ("cpu", "cuda")]
    for lock in locks:
        kept = f"kept==1.0 \\\n    --hash=sha256:{'a' * 64}\n"
        lock.write_text((SOURCE / lock.name).read_text() + kept)
    before = [lock.read_text() for lock in locks]
    with Server(index) as address:
        settings = {name: value.format(f"{address}/cpu") for name, value in variables.items()}
        settings |= {"UV_DEFAULT_INDEX": f"{address}/simple", "UV_NO_CACHE": "1", "UV_INDEX": ""}
        settings |= {"PATH": f"{tools}:{os.environ['PATH']}"}
        options = [pin] if pin.startswith("--") else []
        done = run(sys.executable, "environment.py", "lock", *options, cwd=tmp_path, **settings)
    if "==" in said and not said.startswith("you"):
        assert done.returncode == 0, done.stderr
        cpu, cuda = (lock.read_text() for lock in locks)
        assert f"\n{said}" in cpu and "127.0.0.1" not in cpu + cuda
        assert ("+cpu" in cpu) != ("+cpu" in cuda)
    else:
        assert done.returncode == 1 and "lock: nothing was written" in done.stderr, done.stderr
        assert said in done.stderr and [lock.read_text() for lock in locks] == before, done.stderr


@pytest.fixture
def project(tools: Path, tmp_path: Path) -> BakedProject:
    """A project with the tools that the page installs."""
    made = bake_into(tmp_path)
    (made.path / ".tools").symlink_to(TOOLS)
    return made


def typed(project: BakedProject, line: str) -> subprocess.CompletedProcess[str]:
    return run("bash", "-o", "pipefail", "-c", line, cwd=project.path)


AUDITS = {"vulnerable": "GHSA-x", "sound": "No known vulnerabilities found", "no answer": ""}


@pytest.mark.slow
@pytest.mark.parametrize("case", AUDITS)
def test_audit_says_what_is_vulnerable_and_fails_when_it_does_not_know(
    case: str, project: BakedProject
) -> None:
    lock = project.path / "lock-cuda.txt"
    lock.write_text("".join(found[0] for found in list(BLOCK.finditer(lock.read_text()))[-3:]))
    package = {"package": {"name": "yarl", "ecosystem": "PyPI"}, "ranges": []}
    vulnerable = {"vulns": [{"id": "GHSA-x", "summary": "s", "affected": [package]}]}
    said = vulnerable if case == "vulnerable" else {}
    with Server(lambda path, body: said if b'"yarl"' in body else {}) as address:
        address = "http://127.0.0.1:9" if case == "no answer" else address
        line = f"{line_of('pip-audit --')} --vulnerability-service osv --osv-url {address}"
        done = typed(project, line)
    assert (done.returncode == 0) == (case == "sound"), done.stdout + done.stderr
    assert AUDITS[case] in done.stdout + done.stderr


@pytest.mark.slow
def test_the_bill_of_materials_lists_every_installed_package(project: BakedProject) -> None:
    (project.path / ".venv").symlink_to(TOOLS)
    done = typed(project, line_of("cyclonedx-py environment"))
    assert done.returncode == 0, done.stdout + done.stderr
    parts = json.loads(project.read("sbom.json"))["components"]
    code = "import importlib.metadata as m; print([(d.name, d.version) for d in m.distributions()])"
    python = str(TOOLS / "bin" / "python")
    installed = ast.literal_eval(run(python, "-I", "-c", code, cwd=project.path).stdout)
    assert len(installed) > 20
    assert {(part["name"], part["version"]) for part in parts} == set(installed)


@pytest.mark.slow
def test_a_secret_is_found_before_it_is_committed(project: BakedProject) -> None:
    for command in ("init -q", "add --all"):
        run("git", *command.split(), cwd=project.path)
    done = typed(project, line_of("detect-secrets-hook"))
    assert done.returncode == 0, done.stdout
    with (project.path / "configs" / "quickstart.yaml").open("a") as file:
        file.write("key: AKIA" + "Q3EGRX7DW2LMZT5K\n")
    done = typed(project, line_of("detect-secrets-hook"))
    assert done.returncode and "configs/quickstart.yaml" in done.stdout


def test_actions_and_images_are_pinned_by_digest(default: BakedProject) -> None:
    texts = [default.read(name) for name in (".github/workflows/ci.yml", "Dockerfile")]
    paths = [SOURCE / ".gitlab-ci.yml", *ROOT.glob(".github/workflows/*")]
    texts += [path.read_text() for path in paths]
    used = [use for text in texts for use in re.findall(r"uses: (.*)", text)]
    pinned = re.compile(r"[\w./-]+@[0-9a-f]{40}  ?# v[\d.]+")
    assert len(used) >= 2 and all(pinned.fullmatch(use) for use in used), used
    image = re.compile(r"^(?:ARG BASE=| *image: )(\S+[:@]\S+)", re.MULTILINE)
    images = [found for text in texts for found in image.findall(text)]
    assert len(images) == 2, images
    assert all(re.search(r"@sha256:[0-9a-f]{64}$", found) for found in images), images
