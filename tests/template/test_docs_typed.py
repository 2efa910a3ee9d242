"""The pages' commands, typed as they are with the shipped defaults.

The reader's part is made: FOLDER (the small model that also has the hub's name), chats, pairs,
texts. Not typed: what needs an index, a cluster, GPUs or a container."""

import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dist_template.wings.values import free_port
from tests.support import chats
from tests.support.line import PACKAGE
from tests.support.runs import SHIPPED

ROOT = Path(__file__).parents[2]
PAGES = ("start", "finetune", "evaluate")
BASH = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ELSEWHERE = ("pip", "cookiecutter", "cd", "make", "source", "launch/", "sbatch", "docker")
ELSEWHERE += ("MODEL=", "kubectl")
QUICKSTART = f"python -m {PACKAGE} fit --config configs/quickstart.yaml"
ON_CPUS = "--trainer.accelerator cpu --trainer.devices 2"
NUMBER = 200

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


def lines(page: str) -> Iterator[str]:
    """The commands of a page's bash blocks, with the project's name, and CPUs in place of GPUs."""
    for code in BASH.findall((ROOT / "docs" / f"{page}.md").read_text("utf-8")):
        for line in code.replace("\\\n", " ").splitlines():
            line = re.sub(r"\s+", " ", re.sub(r"\s#\s.*", "", line)).strip()
            if line and not line.startswith(ELSEWHERE):
                line = re.sub(r"my_trainer|<package>", PACKAGE, line)
                yield re.sub(r"--config (configs/)?cluster(/gpu)?(\.yaml)?(?!\S)", ON_CPUS, line)


def environment() -> dict[str, str]:
    """This process's, in which `python` is this interpreter."""
    return os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def typed(folder: Path, line: str) -> str:
    """Returns what a command prints; fails if it fails."""
    options: Any = {"env": environment(), "capture_output": True, "text": True}
    done = subprocess.run(["bash", "-c", line], cwd=folder, **options)
    assert done.returncode == 0, f"{line}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("typed")
    for entry in (ROOT / "build" / "dev").iterdir():
        if entry.name not in {"runs", "data_cache"}:
            (folder / entry.name).symlink_to(entry.resolve())
    for name in ("chats", "pairs", "data", "Qwen"):
        (folder / name).mkdir()
    draw = random.Random(0)
    sums = [[draw.randint(1, 999), draw.randint(1, 999)] for _ in range(NUMBER)]
    talks, pairs = list[dict[str, Any]](), list[dict[str, str]]()
    for a, b in sums:
        asked = (("user", f"{a} times {b}?"), ("assistant", f"{a * b}."))
        talks.append({"messages": chats.messages(*asked, *asked)})
        right, wrong = f"{a + b}.", f"{a + b + 1}."
        pairs.append({"prompt": f"{a} and {b} is ", "chosen": right, "rejected": wrong})
    chats.write(folder / "chats" / "a.jsonl", talks)
    chats.write(folder / "pairs" / "a.jsonl", pairs)
    for source in sorted(Path(os.__file__).parent.glob("*.py"))[:60]:
        text = source.read_text("utf-8")[:20_000]
        (folder / "data" / f"{source.stem}.txt").write_text(text, "utf-8")
    chats.weights(chats.tokenizer(folder / "FOLDER"))
    for name in ("my-weights", "Qwen/Qwen3-0.6B"):
        (folder / name).symlink_to(folder / "FOLDER")
    llama = yaml.safe_load((SHIPPED / "model" / "llama.yaml").read_text("utf-8"))
    short = {
        "model": llama["model"] | {"optim": {"warmup": 1}},
        "data": {
            "seq_len": 64,
            "global_batch_size": 4,
            "micro_batch_size": 2,
            "validation_share": 0.1,
        }
        | {
            "test_share": 0.1,
            "tokenizer": {"class_path": "ByteBPE", "init_args": {"vocab_size": 512}},
        },
        "trainer": {"max_steps": 4, "val_check_interval": 2, "limit_val_batches": 1},
    }
    (folder / "short.yaml").write_text(yaml.safe_dump(short), "utf-8")
    return folder


@pytest.fixture(scope="module")
def run(project: Path) -> Path:
    """The quickstart's run, by the command that the start and the release give."""
    typed(project, QUICKSTART)
    return next((project / "runs" / "quickstart").glob("2*"))


@pytest.fixture
def servers() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for server in started:
        server.terminate()
        assert server.wait(60) == 0


def served(folder: Path, line: str, log: Path) -> subprocess.Popen[str]:
    """Starts `serve`, and returns when it is ready."""
    command = ["bash", "-c", f"exec env {line}"]
    with log.open("w") as file:
        options: Any = {"env": environment(), "stdout": file, "stderr": file, "text": True}
        server = subprocess.Popen(command, cwd=folder, **options)
    while "is ready at" not in log.read_text():
        assert server.poll() is None, log.read_text()
        time.sleep(0.2)
    return server


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_do_what_it_says(
    page: str, project: Path, run: Path, tmp_path: Path, servers: list[subprocess.Popen[str]]
) -> None:
    found, port = [line for line in lines(page) if line != QUICKSTART], free_port()
    assert found
    for output in ("out", "out-bf16", "registry"):  # of another page
        shutil.rmtree(project / output, ignore_errors=True)
    for line in found:
        own = next(iter(sorted((project / "runs" / "finetune").glob("2*"))[-1:]), run)
        chosen = own if page in ("finetune", "adapters") else run
        line = re.sub(r"runs/quickstart/(<\w+>|\d[\w-]+)|\bRUN\b", str(chosen), line)
        line = line.replace("BEFORE", f"{run}/checkpoints/step00000200.ckpt")
        line = line.replace(":8000", f":{port}")
        line = line.replace("pretrain.yaml", "pretrain.yaml --config short.yaml")
        if f"{PACKAGE} serve " in line:
            servers.append(served(project, f"{line} --port {port}", tmp_path / "log"))
        else:
            typed(project, line)
