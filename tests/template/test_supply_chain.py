"""What a generated project installs: locked by hash, old enough, not blocked, audited, listed."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiers import tiers

from .conftest import LIBRARY, ROOT, SOURCE, BakedProject, commit, output, run

BLOCK = re.compile(
    r"^([\w.-]+)==([^\s;]+)(?: ; ([^\\\n]+?))?(?: \\\n +--hash=sha256:[0-9a-f]{64})+\n",
    re.MULTILINE,
)
PROJECT = tomllib.loads((SOURCE / "pyproject.toml").read_text())
PAGE = (ROOT / "docs" / "supply_chain.md").read_text(encoding="utf-8")
LINES = "\n".join(re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)).splitlines()
KERNELS = {"flash", "ray"}  # extras for GPUs, and Ray, which the locks do not have
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


def test_every_requirement_is_pinned() -> None:
    extras = LIBRARY["optional-dependencies"]
    required = [each for name in extras.keys() - KERNELS for each in extras[name]]
    asked = PROJECT["project"]["dependencies"] + PROJECT["dependency-groups"]["dev"]
    names = [
        re.split(r"[^\w.-]", each)[0] for each in (*LIBRARY["dependencies"], *required, *asked)
    ]
    normalized = {re.sub(r"[-_.]+", "-", name).lower() for name in names}
    assert normalized - locked("cuda").keys() == {"dist-template"}


@contextmanager
def serving(answer: Callable[[str, bytes], Any]) -> Generator[str]:
    """Serves on loopback what `answer(path, body)` returns, as JSON; yields the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            given = answer(self.path, body)
            self.send_response(200)
            self.send_header("Content-Type", "application/vnd.pypi.simple.v1+json")
            self.end_headers()
            self.wfile.write(given if isinstance(given, bytes) else json.dumps(given).encode())

        do_POST = do_GET

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


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
    "not pinned, upgraded": ("--upgrade", {"COOL_DOWN": "0 days"}, "kept==1.1 "),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", tiers(LOCKING, daily=[*LOCKING][:2] + ["a blocked version"]))
def test_lock_takes_what_is_old_enough_and_not_blocked(case: str, tmp_path: Path) -> None:
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
    with serving(index) as address:
        settings = {name: value.format(f"{address}/cpu") for name, value in variables.items()}
        settings |= {"UV_DEFAULT_INDEX": f"{address}/simple", "UV_NO_CACHE": "1", "UV_INDEX": ""}
        settings |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        options = [pin] if pin.startswith("--") else []
        done = run(sys.executable, "environment.py", "lock", *options, cwd=tmp_path, **settings)
    if "==" in said and not said.startswith("you"):
        assert done.returncode == 0, done.stderr
        cpu, cuda = (lock.read_text() for lock in locks)
        assert f"\n{said}" in cpu and "127.0.0.1" not in cpu + cuda
        assert ("\nkept==1.0 " in cpu) == (not options), "a locked version stays"
        assert ("+cpu" in cpu) != ("+cpu" in cuda)
    else:
        assert done.returncode == 1 and "lock: nothing was written" in done.stderr, done.stderr
        assert said in done.stderr and [lock.read_text() for lock in locks] == before, done.stderr


@pytest.fixture(scope="module")
def project(default: BakedProject, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project that git tracks, with the tools as the page installs them."""
    install, stamp = line_of("python3 -m venv .tools"), TOOLS / "installed"
    if not stamp.exists() or stamp.read_text() != install:
        output("bash", "-c", install, cwd=ROOT)
        stamp.write_text(install)
    made = tmp_path_factory.mktemp("project") / "made"
    shutil.copytree(default.path, made)
    (made / ".tools").symlink_to(TOOLS)
    commit(made, "all")
    return made


def typed(project: Path, line: str) -> subprocess.CompletedProcess[str]:
    return run("bash", "-o", "pipefail", "-c", line, cwd=project)


@pytest.mark.nightly
def test_audit_says_what_is_vulnerable_and_fails_when_it_does_not_know(project: Path) -> None:
    lock = project / "lock-cuda.txt"
    lock.write_text("".join(found[0] for found in list(BLOCK.finditer(lock.read_text()))[-3:]))
    package = {"package": {"name": "yarl", "ecosystem": "PyPI"}, "ranges": []}
    vulnerable = {"vulns": [{"id": "GHSA-x", "summary": "s", "affected": [package]}]}
    line = f"{line_of('pip-audit --')} --vulnerability-service osv --osv-url"
    with serving(lambda path, body: vulnerable if b'"yarl"' in body else {}) as address:
        done = typed(project, f"{line} {address}")
    assert done.returncode == 1 and "GHSA-x" in done.stdout
    assert typed(project, f"{line} http://127.0.0.1:9").returncode == 1


@pytest.mark.nightly
def test_the_bill_of_materials_lists_every_installed_package(project: Path) -> None:
    (project / ".venv").symlink_to(TOOLS)
    done = typed(project, line_of("cyclonedx-py environment"))
    assert done.returncode == 0, done.stdout + done.stderr
    parts = json.loads((project / "sbom.json").read_text())["components"]
    listed = output(f"{TOOLS}/bin/pip", "list", "--format=json", cwd=project)
    installed = {(one["name"], one["version"]) for one in json.loads(listed)}
    assert len(installed) > 20
    assert {(part["name"], part["version"]) for part in parts} == installed


@pytest.mark.nightly
def test_a_secret_is_found_before_it_is_committed(project: Path) -> None:
    done = typed(project, line_of("detect-secrets-hook"))
    assert done.returncode == 0, done.stdout
    with (project / "configs" / "quickstart.yaml").open("a") as file:
        file.write("key: AKIA" + "Q3EGRX7DW2LMZT5K\n")
    done = typed(project, line_of("detect-secrets-hook"))
    assert done.returncode and "configs/quickstart.yaml" in done.stdout
