"""The model of docs/models.md, pasted into module.py, trains alike under DDP, FSDP2 and ZeRO."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "models.md"
PROJECT = ROOT / "{{cookiecutter.project_slug}}"
PACKAGE = "{{cookiecutter.package_name}}"


def edited(module: str, page: str) -> str:
    """`module` after the edits that `page` asks for: its classes for the default architecture, its
    methods for ours."""
    classes, methods = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    body = ast.parse(module).body
    (default,) = [node for node in body if isinstance(node, ast.Assign)]
    (ours,) = [
        node for node in body if isinstance(node, ast.ClassDef) and node.name == "LanguageModule"
    ]
    new = {
        node.name: source(methods, node)
        for node in ast.parse(methods).body
        if isinstance(node, ast.FunctionDef)
    }
    methods_of_ours = [
        node for node in ours.body if isinstance(node, ast.FunctionDef) and node.name in new
    ]
    edits = [(source(module, node), new.pop(node.name)) for node in methods_of_ours]
    last = source(module, ours.body[-1])  # methods that only the base class has are appended
    module = module.replace(
        last, "\n\n".join([last, *(textwrap.indent(text, "    ") for text in new.values())])
    )
    edits.append((source(module, default), classes))
    for old, text in edits:
        indented = old.startswith("    ")
        module = module.replace(old, textwrap.indent(text, "    ") if indented else text)
    return module.replace("= SMALL_DEEPSEEK_V3", "= SMALL_GPT")


def source(text: str, node: ast.stmt) -> str:
    first = min(
        [node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))]
    )
    return "\n".join(text.splitlines()[first - 1 : node.end_lineno])


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own_model")
    shutil.copytree(PROJECT / "configs", folder / "configs")
    shutil.copytree(
        PROJECT / PACKAGE,
        folder / "trainer_dev",
        ignore=shutil.ignore_patterns("tests", "__pycache__"),
    )
    module = folder / "trainer_dev" / "module.py"
    module.write_text(edited(module.read_text("utf-8"), PAGE.read_text("utf-8")), "utf-8")
    texts = folder / "texts"
    texts.mkdir()
    for number in range(30):
        (texts / f"{number}.txt").write_text(f"{number} is a number of some length. " * 30, "utf-8")
    return folder


def losses(project: Path, strategy: str) -> list[float]:
    flags = f"""--config strategy/{strategy} --run.root {project / "runs"} --run.name {strategy}
        --data.source TextFiles --data.source.paths [{project}/texts/*.txt] --data.tokenizer Bytes --data.seq_len 32
        --data.validation_share 0.2 --data.test_share 0
        --data.global_batch_size 8 --data.micro_batch_size 2
        --model.architecture {{width:\\ 32,num_layers:\\ 2,num_heads:\\ 2}}
        --model.sample_tokens 4 --trainer.accelerator cpu --trainer.devices 2 --trainer.max_steps 4
        --trainer.val_check_interval 4 --trainer.log_every_n_steps 1"""
    environment = {k: v for k, v in os.environ.items() if k != "DIST_RUN_ID"} | {
        "OMP_NUM_THREADS": "1"
    }
    command = [sys.executable, "-m", "trainer_dev", "fit", *shlex.split(flags)]
    run = subprocess.run(
        command,
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    (folder,) = (project / "runs" / strategy).iterdir()
    lines = [
        json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()
    ]
    return [line["train/loss"] for line in lines if "train/loss" in line]


@pytest.mark.slow
# a minute; test_any_module.py trains models that are not of transformers in `make test`
@pytest.mark.nightly
def test_the_model_of_the_docs_trains_alike_under_ddp_fsdp2_and_zero(project: Path) -> None:
    expected = losses(project, "ddp")
    assert len(expected) == 4
    assert expected[-1] < expected[0]
    for strategy in ("fsdp2", "zero2", "zero3"):
        assert losses(project, strategy) == pytest.approx(expected, rel=1e-5), strategy
