"""What a command imports before it answers: nothing heavy for help, nothing unused for training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dist_template import InputError, Project
from dist_template.cli import config_file
from dist_template.cli.fit import CLI
from tests.support.runs import OF_ANOTHER_RUN, OURS, PACKAGE

HEAVY = ["torch", "lightning", "transformers", "jsonargparse", "numpy"]
EARLY = {
    "--wachdog.enabled true": "wachdog .* mean watchdog?",
    "--shuffle true": "--shuffle is not a key of this program; see",
    "-c nowhere.yaml": "nowhere.yaml cannot be read",
    "--config=group.yaml": "group.yaml: wachdog .* mean watchdog?",
    "--config=broken.yaml": "broken.yaml is not YAML",
}


def python(code: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k not in OF_ANOTHER_RUN}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(
        command, env=env, cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )


def sentences_of(cases: dict[str, str], folder: Path) -> str:
    """Runs `fit` with the flags of each case, checks each sentence, returns the loaded modules."""
    (folder / "group.yaml").write_text("wachdog: {timeout_s: 3}\n")
    (folder / "broken.yaml").write_text("data: [1\n")
    code = (
        "import gc, json, sys\n"
        "from tests.support.line import main\n"
        "def code(flags):\n"
        "    try:\n"
        "        return main(['fit', *flags])\n"
        "    except SystemExit as stopped:\n"
        "        return stopped.code\n"
        "codes = [code(flags) for flags in json.loads(sys.argv[1])]\n"
        f"heavy = [name for name in {HEAVY} if name in sys.modules]\n"
        "frozen = ['frozen'] * (gc.isenabled() and gc.get_freeze_count() > 100_000)\n"
        "print(json.dumps(codes), heavy + frozen)"
    )
    more = ["--trainer.accelerator=cpu", f"--run.root={folder}/runs"]
    flags = [[*words.split(), *more] for words in cases]
    done = python(code, folder, json.dumps(flags))
    codes, _, modules = done.stdout.partition("] ")
    assert codes == json.dumps([2] * len(cases))[:-1], done.stdout + done.stderr
    for parts, sentence in zip(cases.values(), done.stderr.splitlines(), strict=True):
        assert all(part in sentence for part in ("error: ", *parts.split(" .* "))), sentence
    return modules


def test_unknown_keys_and_unreadable_files_are_reported_before_the_imports(tmp_path: Path) -> None:
    assert sentences_of(EARLY, tmp_path) == "[]\n"


@pytest.mark.slow
def test_what_the_parser_refuses_comes_after_the_imports(tmp_path: Path) -> None:
    modules = sentences_of({"--trainer.max_stepz=3": "mean trainer.max_steps?"}, tmp_path)
    assert "torch" in modules and "frozen" in modules, "no later collection visits these objects"


def test_a_syntax_error_in_the_users_file_has_its_line(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "__init__.py").touch()
    (tmp_path / "broken" / "module.py").write_text("x = 1\nclass LanguageModule(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match=r"module.py:2: .*: class LanguageModule\(:"):
        Project("broken").class_of(".module:LanguageModule")


def test_no_key_that_the_parser_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """All are given as null."""

    def keys(self: CLI, parser: Any, args: Any) -> None:
        raise Found([action.dest for action in self._subcommand_parsers["fit"]._actions])

    monkeypatch.setattr(CLI, "parse_arguments", keys)
    with pytest.raises(Found) as found:
        CLI(OURS, ["fit"], run=True)
    known = {key for key in found.value.args[0] if not key.endswith("help")}
    assert {"data.seq_len", "model.optim.learning_rate", "trainer.max_steps"} <= known
    config_file.check(["fit", *(f"--{key}=null" for key in known - {"print_config", "config"})])


class Found(Exception):
    """With the parser's keys."""


@pytest.mark.slow
def test_training_imports_nothing_that_it_does_not_use(flags: list[str], tmp_path: Path) -> None:
    """Besides what torch, lightning and the model bring, which depends on the machine."""
    code = (
        "import sys, torch, lightning\n"
        "from transformers import AutoModelForCausalLM, LlamaForCausalLM\n"
        "before = set(sys.modules)\n"
        "from tests.support.line import main\n"
        "assert main(sys.argv[1:]) == 0\n"
        "new = set(sys.modules) - before\n"
        "print('imported', sorted(new | {name.partition('.')[0] for name in new}))"
    )
    unused = "deepspeed wandb datasets tensorboard plotly pandas pyarrow scipy sklearn torchvision"
    unused += " torchaudio matplotlib peft accelerate tensorflow triton IPython"
    unused += " bitsandbytes torch._inductor.compile_fx"  # peft brings the one, it torch's compiler
    done = python(code, tmp_path, "fit", *flags, "--trainer.max_steps=2", "--trainer.logger=false")
    imported = done.stdout.rpartition("imported ")[2]
    assert PACKAGE in imported, done.stderr
    assert not {*unused.split()} & set(json.loads(imported.replace("'", '"')))


FILES = [
    ("- trainer\n- model", "x.yaml is a list: give keys"),
    ("run:\n  name: a\nmodel:\n  optim: {}\nrun: {}", "the key run twice, in lines 1 and 5"),
    ("model.optim.warmup: 1\nmodel:\n  optim: {warmup: 2}", "has model and model.optim.warmup"),
    ("model:\n  optim:\n    warmup: 1\n    'warmup': 2", "the key warmup twice, in lines 3 and 4"),
    ("data: " + "[" * 20_000 + "]" * 20_000, "x.yaml is nested too deeply"),
    ("trainer: {max_steps: " + "9" * 5000 + "}", "x.yaml is not YAML"),
    ("run: {name: 2026-13-99}", "x.yaml is not YAML"),  # a date that does not exist
    ("\ud800", "x.yaml is not YAML"),
]


def test_a_file_that_is_no_configuration_is_refused_before_the_imports(tmp_path: Path) -> None:
    for text, sentence in FILES:
        (tmp_path / "x.yaml").write_text(text, encoding="utf-8", errors="surrogatepass")
        with pytest.raises(InputError, match=sentence):
            config_file.check(["fit", "--config", f"{tmp_path}/x.yaml"])
