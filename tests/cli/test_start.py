"""What a command imports and needs: nothing heavy for help, no extra and no Linux to train."""

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dist_template import InputError, Project
from dist_template.cli import config_file
from dist_template.cli.verbs import verbs
from tests.support.extras import without_extras
from tests.support.runs import PACKAGE, refused

HEAVY = {"torch", "lightning", "transformers", "jsonargparse", "numpy", "dist_template.wings"}


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_help_imports_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys; from tests.support.line import main; "
        "assert main(['--help']) == 0; "
        f"assert not {HEAVY} & set(sys.modules)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    shown = python(tmp_path, "-c", code)
    assert shown.returncode == 0, shown.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    took_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert took_s < 0.3, "seconds of CPU"
    (listed,) = re.findall(r"verbs:\n(.*?)\n\n", shown.stdout, re.DOTALL)
    lines = listed.splitlines()
    assert [line.split()[0] for line in lines] == [*verbs()]
    assert all(len(line.split()) > 4 and len(line) <= 120 for line in lines), "each has its line"


def test_every_verb_refuses_a_python_without_packages(tmp_path: Path) -> None:
    """-S: without site-packages, as a Python whose environment is not activated."""
    code = (
        "from dist_template.cli.verbs import verbs; from tests.support.line import command;"
        "print([int(command([verb, '--help'])) for verb in verbs()])"
    )
    shown = python(tmp_path, "-S", "-c", code)
    codes, lines = json.loads(shown.stdout), shown.stderr.splitlines()
    assert codes and set(codes) == {2} and len(lines) == len(codes), shown.stderr
    said = re.compile("error: .* has no torch, .*: `make setup` .*`source .venv/bin/activate`")
    assert all(said.match(line) for line in lines), shown.stderr


def test_a_syntax_error_in_the_users_file_has_its_line(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "__init__.py").touch()
    (tmp_path / "broken" / "module.py").write_text("x = 1\nclass LanguageModule(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match=r"module.py:2: .*: class LanguageModule\(:"):
        Project("broken").class_of(".module:LanguageModule")


@pytest.mark.slow
def test_training_imports_nothing_that_it_does_not_use(flags: list[str], tmp_path: Path) -> None:
    """Besides what torch, lightning and the model bring, which depends on the machine."""
    code = (
        "import json, sys, torch, lightning\n"
        "from transformers import AutoModelForCausalLM, LlamaForCausalLM\n"
        "before = set(sys.modules)\n"
        "from tests.support.line import main\n"
        "assert main(sys.argv[1:]) == 0\n"
        "new = set(sys.modules) - before\n"
        "print('imported', json.dumps([*new, *(name.partition('.')[0] for name in new)]))"
    )
    unused = "deepspeed wandb datasets tensorboard plotly pandas pyarrow scipy sklearn torchvision"
    unused += " torchaudio matplotlib peft accelerate tensorflow triton IPython"
    unused += " bitsandbytes torch._inductor.compile_fx"  # peft brings the one, it torch's compiler
    short = ["--trainer.max_steps=2", "--trainer.logger=false"]
    done = python(tmp_path, "-c", code, "fit", *flags, *short)
    imported = done.stdout.rpartition("imported ")[2]
    assert PACKAGE in imported, done.stderr
    assert not {*unused.split()} & set(json.loads(imported))


FILES = {  # a file of --config: what the sentence has
    "data: [1": "x.yaml is not YAML",
    "- trainer\n- model": "x.yaml is a list: give keys",
    "run:\n  name: a\nmodel:\n  optim: {}\nrun: {}": "the key run twice, in lines 1 and 5",
    "model.optim.warmup: 1\nmodel: {optim: {warmup: 2}}": "has model and model.optim.warmup",
    "model:\n  optim:\n    a: 1\n    'a': 2": "the key a twice, in lines 3 and 4",
    "data: " + "[" * 20_000 + "]" * 20_000: "x.yaml is nested too deeply",
    "trainer: {max_steps: " + "9" * 5000 + "}": "x.yaml is not YAML",
    "run: {name: 2026-13-99}": "x.yaml is not YAML",  # a date that does not exist
    "\ud800": "x.yaml is not YAML",
}


def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path) -> None:
    for text, sentence in FILES.items():
        (tmp_path / "x.yaml").write_text(text, encoding="utf-8", errors="surrogatepass")
        with pytest.raises(InputError, match=sentence):
            config_file.read(f"{tmp_path}/x.yaml")


LIBRARY = "'dist-template["
NEED = {
    "deepspeed": ("fit --config=strategy/zero2", f"pip install --no-build-isolation {LIBRARY}"),
    "wandb": ("fit --config=logger/wandb", f"pip install {LIBRARY}"),
    "tensorboard": ("fit --trainer.logger=TensorBoard", f"pip install {LIBRARY}"),
    "datasets": ("prepare --data.source=HubDataset --data.source.name=x", f"pip install {LIBRARY}"),
}


@pytest.mark.parametrize("package", NEED)
def test_a_lack_is_explained(package: str, flags: list[str], monkeypatch: Any, capfd: Any) -> None:
    words, command = NEED[package]
    verb, *given = words.split()
    monkeypatch.setitem(sys.modules, package, None)
    said = f" needs the package {package}: {command}{package}]'"
    assert said in refused(verb, [*flags, *given], capfd)


# The libraries are imported first: they decide by the true platform.
AS_ON_A_MAC = f"""
import builtins, ctypes, io, os, sys
import lightning.pytorch, psutil, torch.distributed.fsdp, transformers
from runpy import run_module

for name in "getaffinity setaffinity".split():
    delattr(os, "sched_" + name)
for name in "pidfd_open posix_fadvise posix_fallocate memfd_create".split():
    delattr(os, name)

def open_without_proc(path, *args, real=io.open, **options):
    is_psutils = "psutil" in sys._getframe(1).f_code.co_filename  # it is built for one system
    if str(path).startswith(("/proc/", "/sys/", "/dev/shm")) and not is_psutils:
        raise FileNotFoundError(2, "No such file or directory", str(path))
    return real(path, *args, **options)

class LibraryWithoutPrctl(ctypes.CDLL):
    def __getattr__(self, name):
        if name == "prctl":
            raise AttributeError(name)
        return super().__getattr__(name)

io.open = builtins.open = open_without_proc
ctypes.CDLL = LibraryWithoutPrctl
sys.platform = "darwin"
run_module("{PACKAGE}", run_name="__main__", alter_sys=True)
"""


@pytest.mark.slow
def test_a_training_needs_no_extra_and_nothing_only_linux_has(flags: Any, tmp_path: Path) -> None:
    """With DDP, the default loggers and the report."""
    path = os.pathsep.join([without_extras(tmp_path), os.environ["PYTHONPATH"]])
    short = ["--trainer.max_steps=2", "--trainer.strategy=ddp", "--run.report=true"]
    command = [sys.executable, "-c", AS_ON_A_MAC, "fit", *flags, *short]
    env = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    cure = "the report needs the package plotly: pip install 'dist-template[report]'"
    assert f"at_run_end of diagnose failed: {cure}" in done.stderr
