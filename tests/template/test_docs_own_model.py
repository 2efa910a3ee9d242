"""The model of docs/models.md, pasted into module.py, trains alike under DDP, FSDP2 and ZeRO."""

from __future__ import annotations

import ast
import json
import re
import textwrap
from pathlib import Path

import pytest

from .conftest import ROOT, copied_project, fit

PAGE = ROOT / "docs" / "models.md"


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


def losses(project: Path, strategy: str) -> list[float]:
    sizes = r"{width:\ 32,num_layers:\ 2,num_heads:\ 2}"
    flags = f"--model.architecture {sizes} --trainer.max_steps 4 --run.name {strategy}"
    fit(project, f"--config strategy/{strategy} {flags}")
    (folder,) = (project / "runs" / strategy).iterdir()
    text = (folder / "metrics.jsonl").read_text("utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    return [line["train/loss"] for line in lines if "train/loss" in line]


@pytest.mark.slow
# a minute; test_any_module.py trains models that are not of transformers in `make test`
@pytest.mark.nightly
def test_the_model_of_the_docs_trains_alike_under_ddp_fsdp2_and_zero(tmp_path: Path) -> None:
    project = copied_project(tmp_path)
    module = project / "trainer_dev" / "module.py"
    module.write_text(edited(module.read_text("utf-8"), PAGE.read_text("utf-8")), "utf-8")
    expected = losses(project, "ddp")
    assert len(expected) == 4 and expected[-1] < expected[0]
    for strategy in ("fsdp2", "zero2", "zero3"):
        assert losses(project, strategy) == pytest.approx(expected, rel=1e-5), strategy
