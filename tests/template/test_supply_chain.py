"""What a generated project installs: locked by hash, old enough, not blocked, audited, listed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from packaging.utils import canonicalize_name

from tests.support.tiers import tiers

from .conftest import ROOT, SOURCE, BakedProject, bake_into, make, run

LOCKS = SOURCE / "requirements"
BLOCK = re.compile(r"^([\w.-]+)==([^\s;]+)(?: ; ([^\\\n]+?))?(?: \\\n +--hash=sha256:[0-9a-f]{64})+\n", re.MULTILINE)
TOOLS = ROOT / ".tools"


def locked(name: str) -> dict[str, tuple[str, str]]:
    """Package -> version and marker; every line belongs to a package with hashes, and none is an option or address."""
    text = re.sub(r"^#.*\n", "", (LOCKS / f"{name}.txt").read_text())
    assert BLOCK.sub("", text) == "" and "://" not in text
    return {found[1]: (found[2], found[3] or "") for found in BLOCK.finditer(text)}


def test_the_locks_have_the_versions_of_constraints_and_all_that_these_need() -> None:
    pins = dict(re.findall(r"^([\w.-]+)==([\w.]+)$", (SOURCE / "constraints.txt").read_text(), re.MULTILINE))
    pins = {str(canonicalize_name(name)): version for name, version in pins.items()}
    cuda, cpu = locked("torch-cuda"), locked("torch-cpu")
    both = locked("locked") | cuda
    assert {name: both.get(name, ("missing",))[0] for name in pins} == pins
    further = {name: marker for name, (_, marker) in both.items() if name not in pins}
    assert {"nvidia-cublas", "triton"} <= set(further)
    assert all("sys_platform ==" in marker for marker in further.values()), "other systems and the CUDA build alone"
    assert not [name for name in cpu if name in further]
    text = (LOCKS / "torch-cpu.txt").read_text()
    assert f"torch=={pins['torch']}+cpu ; sys_platform != 'darwin'" in text
    assert f"torch=={pins['torch']} ; sys_platform == 'darwin'" in text
    assert {"uv", "pip-audit", "cyclonedx-bom", "detect-secrets"} <= set(locked("tools"))


def test_setup_checks_hashes_unless_constraints_were_edited_after_the_lock(tmp_path: Path) -> None:
    project = bake_into(tmp_path)
    for index, lock in ("", "cuda"), ("x", "cpu"):
        plan = make(project, "-n", "setup", "HASHES=1", "TORCH_CUDA=1", f"TORCH_INDEX={index}").stdout
        files = re.findall(r"--require-hashes .*-r requirements/(\S+)", plan)
        assert files == [f"torch-{lock}.txt", "locked.txt"]
    written = re.findall(r"--header '(.*)'", make(project, "-n", "lock").stdout)
    assert written == [project.read("requirements/locked.txt").splitlines()[0]], "setup looks for this line"
    constraints = project.path / "constraints.txt"
    constraints.write_text(constraints.read_text().replace("six==1.17.0", "six==1.16.0"))
    assert "setup: WITHOUT hashes" in make(project, "-n", "setup").stdout
    done = make(project, "setup", "HASHES=1")
    assert done.returncode and "setup: stopped. constraints.txt was edited after `make lock`" in done.stdout
    assert not (project.path / ".venv").exists()


@pytest.fixture(scope="module")
def tools() -> Path:
    """The tools' environment: all packages of tools.txt, each checked by its hash."""
    done = run("make", "-C", str(SOURCE), f"{TOOLS}/bin/.ready", f"TOOLS={TOOLS}", cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return TOOLS / "bin"


@pytest.mark.slow
def test_a_wheel_with_one_changed_byte_is_refused(tmp_path: Path) -> None:
    blocks = {found[1]: found[0] for found in BLOCK.finditer((LOCKS / "locked.txt").read_text())}
    (tmp_path / "lock.txt").write_text(blocks["sniffio"])
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    get = run(*pip, "download", "--no-deps", "--require-hashes", "-d", "wheels", "-r", "lock.txt", cwd=tmp_path)
    assert get.returncode == 0, get.stderr
    (wheel,) = (tmp_path / "wheels").iterdir()
    install = [*pip, "install", "--isolated", "--no-index", "--find-links=wheels", "--require-hashes", "-r", "lock.txt"]
    assert run(*install, "--target=right", cwd=tmp_path).returncode == 0 and (tmp_path / "right" / "sniffio").is_dir()
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
                given = answer(self.path, self.rfile.read(int(self.headers.get("Content-Length", 0))))
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


DAYS = {"1.0": 30, "1.1": 1, "2.13.0": 30, "2.14.0": 30, "2.14.0+cpu": 30}  # version -> days since it was uploaded


def index(path: str, _: bytes) -> Any:
    """A package index: torch has its own versions, every other package 1.0 and 1.1."""
    name = path.strip("/").split("/")[-1]
    if path.endswith(".metadata"):
        package, version = name.split("-")[:2]
        return f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n".encode()
    files = []
    for version in (version for version in DAYS if version.startswith("2") == (name == "torch")):
        wheel = f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
        uploaded = f"{datetime.now(UTC) - timedelta(days=DAYS[version]):%FT%TZ}"
        file = {"filename": wheel, "url": f"/files/{wheel}", "upload-time": uploaded}
        files.append(file | {"hashes": {"sha256": "a" * 64}, "core-metadata": True})
    return {"meta": {"api-version": "1.1"}, "name": name, "files": files}


LOCKING = {  # what is added to constraints.txt, further arguments -> what is said, or what the lock then has
    "an old version": ("demo==1.0", "", "locked.txt: demo==1.0 "),
    "a young version": ("demo==1.1", "", "you require demo==1.1"),
    "a young version, without the rule": ("demo==1.1", "--cool-down=0days", "locked.txt: demo==1.1 "),
    "a blocked version": ("bad==1.0", "", "you require bad==1.0 and"),
    "another torch": ("torch==2.14.0", "", "torch 2.14.0 is new"),
    "another torch, with its index": ("torch==2.14.0", "--torch-index={}", "torch-cpu.txt: torch==2.14.0+cpu "),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", tiers(LOCKING, daily=["an old version", "a young version", "a blocked version"]))
def test_lock_takes_what_is_old_enough_and_not_blocked(case: str, tools: Path, tmp_path: Path) -> None:
    edit, option, said = LOCKING[case]
    folder = shutil.copytree(LOCKS, tmp_path / "requirements")
    (folder / "blocked.txt").write_text("bad!=1.0  # malicious: GHSA-x\n")
    (tmp_path / "constraints.txt").write_text("\n".join({"setuptools==1.0", "torch==2.13.0", edit}))
    if edit.startswith("torch"):
        (tmp_path / "constraints.txt").write_text(f"setuptools==1.0\n{edit}\n")
    before = [path.read_bytes() for path in sorted(folder.iterdir())]
    with Server(index) as address:
        options = [option.format(f"{address}/simple")] if option else []
        settings = {"UV_DEFAULT_INDEX": f"{address}/simple", "UV_NO_CACHE": "1", "UV_INDEX": ""}
        done = run(sys.executable, "requirements/lock.py", str(tools / "uv"), *options, cwd=tmp_path, **settings)
    if ".txt: " in said:
        name, text = said.split(": ")
        assert done.returncode == 0, done.stderr
        assert text in (folder / name).read_text() and "127.0.0.1" not in (folder / name).read_text()
    else:
        assert done.returncode == 1 and "lock: nothing was written" in done.stderr and said in done.stderr, done.stderr
        assert [path.read_bytes() for path in sorted(folder.iterdir())] == before


@pytest.mark.slow
@pytest.mark.parametrize(("options", "version"), tiers([([], "1.0"), (["--upgrade"], "1.1")], [([], "1.0")]))
def test_lock_keeps_the_versions_that_constraints_do_not_name(
    options: list[str], version: str, tools: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(LOCKS, tmp_path / "requirements")
    (tmp_path / "constraints.txt").write_text("setuptools==1.0\ntorch==2.13.0\n")
    names = ("cyclonedx-bom", "detect-secrets", "pip-audit", "uv")
    kept = "".join(f"{name}=={version} \\\n    --hash=sha256:{'a' * 64}\n" for name in names)
    (folder / "tools.txt").write_text(kept.replace("1.1", "1.0"))
    with Server(index) as address:
        settings = {"UV_DEFAULT_INDEX": f"{address}/simple", "UV_NO_CACHE": "1", "UV_INDEX": ""}
        lock = [sys.executable, "requirements/lock.py", str(tools / "uv"), "--cool-down=0days", *options]
        done = run(*lock, cwd=tmp_path, **settings)
    assert done.returncode == 0, done.stderr
    assert (folder / "tools.txt").read_text() == kept


AUDITS = {"vulnerable": "Error 1", "sound": "No known vulnerabilities found", "no answer": "Error 3"}


@pytest.mark.slow
@pytest.mark.parametrize("case", AUDITS)
def test_audit_says_what_is_vulnerable_and_when_it_does_not_know(case: str, tools: Path, tmp_path: Path) -> None:
    project = bake_into(tmp_path)
    for path in (project.path / "requirements" / name for name in ("torch-cuda.txt", "locked.txt")):
        path.write_text("".join(found[0] for found in list(BLOCK.finditer(path.read_text()))[-3:]))
    package = {"package": {"name": "yarl", "ecosystem": "PyPI"}, "ranges": []}
    said = {"vulns": [{"id": "GHSA-x", "summary": "s", "affected": [package]}]} if case == "vulnerable" else {}
    with Server(lambda path, body: said if b'"yarl"' in body else {}) as address:
        address = "http://127.0.0.1:9" if case == "no answer" else address
        done = make(project, "audit", f"TOOLS={tools.parent}", f"ARGS=--vulnerability-service osv --osv-url {address}")
    assert AUDITS[case] in done.stdout and ("audit: not done" in done.stdout) == (case == "no answer"), done.stdout
    assert (done.returncode == 0) == (case == "sound") and ("GHSA-x" in done.stdout) == (case == "vulnerable")


@pytest.mark.slow
@pytest.mark.parametrize("where", tiers(["the tools", "the training"], daily=["the tools"]))
def test_the_bill_of_materials_lists_every_installed_package(where: str, tools: Path, tmp_path: Path) -> None:
    project = bake_into(tmp_path)
    python = tools / "python" if where == "the tools" else Path(sys.executable)
    done = make(project, "sbom", f"RUN={python}", f"TOOLS={tools.parent}")
    assert done.returncode == 0, done.stdout
    parts = json.loads(project.read("sbom.json"))["components"]
    code = "import json, importlib.metadata as m; print(json.dumps([(d.name, d.version) for d in m.distributions()]))"
    installed = json.loads(subprocess.check_output([python, "-I", "-c", code], text=True, cwd=tmp_path))
    assert len(installed) > 20
    assert {(part["name"], part["version"]) for part in parts} == {tuple(each) for each in installed}


@pytest.mark.slow
def test_a_secret_is_found_before_it_is_committed(tools: Path, tmp_path: Path) -> None:
    project = bake_into(tmp_path)
    run("git", "init", "-q", cwd=project.path)
    run("git", "add", "--all", cwd=project.path)
    done = make(project, "secrets", f"TOOLS={tools.parent}")
    assert done.returncode == 0, done.stdout
    with (project.path / "configs" / "quickstart.yaml").open("a") as file:
        file.write("key: AKIA" + "Q3EGRX7DW2LMZT5K\n")
    done = make(project, "secrets", f"TOOLS={tools.parent}")
    assert done.returncode and "configs/quickstart.yaml" in done.stdout


def test_actions_and_images_are_pinned_by_digest(default: BakedProject) -> None:
    texts = [default.read(name) for name in (".github/workflows/ci.yml", "Dockerfile")]
    texts += [(SOURCE / ".gitlab-ci.yml").read_text(), *(path.read_text() for path in ROOT.glob(".github/workflows/*"))]
    used = [use for text in texts for use in re.findall(r"uses: (.*)", text)]
    assert len(used) >= 2 and all(re.fullmatch(r"[\w./-]+@[0-9a-f]{40}  ?# v[\d.]+", use) for use in used), used
    images = [image for text in texts for image in re.findall(r"^(?:FROM| *image:) (\S+[:@]\S+)", text, re.MULTILINE)]
    images = [image for image in images if not image.startswith("${")]
    assert len(images) == 2 and all(re.search(r"@sha256:[0-9a-f]{64}$", image) for image in images), images
