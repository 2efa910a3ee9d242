"""What a command imports and needs; entry points, and the package of docs/extend.md, installed."""

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import yaml

from dist_template import InputError, Project, plugins
from dist_template.cli import config_file, keys
from dist_template.cli import main as command_line
from dist_template.cli.verbs import verbs
from dist_template.errors import install_command
from dist_template.wings.diagnose import engine
from tests.support.extras import without_extras, write_metadata
from tests.support.line import OURS, command
from tests.support.runs import PACKAGE, PROJECT, logged, only_run, refused, run

MOST_MODULES = 250  # of Python's library too; torch alone imports 1,500
HEAVY = {"torch", "lightning", "transformers", "jsonargparse", "numpy", "dist_template.wings"}


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_help_imports_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys; before = {*sys.modules}; from tests.support.line import main; "
        "assert main(['--help']) == 0; "
        "print(*{*sys.modules} - before, file=sys.stderr)"
    )
    shown = python(tmp_path, "-c", code)
    assert shown.returncode == 0, shown.stderr
    imported = {*shown.stderr.split()}
    packages = {name.partition(".")[0] for name in imported} - sys.stdlib_module_names
    assert packages == {"dist_template", "tests"} and not HEAVY & imported
    assert len(imported) < MOST_MODULES, sorted(imported)
    (listed,) = re.findall(r"verbs:\n(.*?)\n\n", shown.stdout, re.DOTALL)
    lines = listed.splitlines()
    assert [line.split()[0] for line in lines] == [*verbs()]
    assert all(len(line.split()) > 4 and len(line) <= 120 for line in lines), "each has its line"


MISSPELT = {
    "--trainr.max_steps=5": "--trainr.max_steps is not a key .*; did you mean trainer.max_steps?",
    "--trainer.max_step=5": "--trainer.max_step is not .*; did you mean trainer.max_steps?",
    "--model.optim.learning_rat=1": "did you mean model.optim.learning_rate?",
    "--data.seq_lenn=4": "did you mean data.seq_len?",
    "--cluster.hostfil=x": "did you mean cluster.hostfile?",
    "--numerics.patienc=4": "did you mean numerics.patience?",
    "--config=wrong.yaml": "--config wrong.yaml:1: best_checkpoint.kep is not a key of this",
    "-c wrong.yaml": "did you mean best_checkpoint.keep?",
    "--nowhere=1": "--nowhere is not a key of this program; see --help for every key",
}


@pytest.mark.parametrize("given", MISSPELT)
def test_a_misspelt_key_is_refused_before_torch_is_imported(given: str, tmp_path: Path) -> None:
    (tmp_path / "wrong.yaml").write_text("best_checkpoint: {kep: 3}")
    code = (
        "import sys; from tests.support.line import command; code = command(sys.argv[1:]);"
        "print(code, 'torch' in sys.modules)"
    )
    shown = python(tmp_path, "-c", code, "fit", *given.split())
    assert shown.stdout == "2 False\n", shown.stdout + shown.stderr
    assert re.fullmatch(f"error: .*{MISSPELT[given]}.*\n".replace("?", "\\?"), shown.stderr)


USERS = {  # modules whose classes accept `widths`, near a name that is read
    "kwargs": "class M:\n    def __init__(self, width=1, **rest):\n        f(**rest)",
    "twice": "class M:\n    def __init__(self, width=1): ...\nM = N",
    "condition": "if True:\n    class M:\n        def __init__(self, width=1): ...",
    "method": "class M:\n    if True:\n        def __init__(self, width=1): ...",
    "decorator": "@other\nclass M:\n    def __init__(self, width=1): ...",
    "new": "class M:\n    def __init__(self, width=1): ...\n    def __new__(cls, widths=1): ...",
    "metaclass": "class M(metaclass=X):\n    def __init__(self, width=1): ...",
    "star": "from somewhere import *\nclass M:\n    def __init__(self, width=1): ...",
}


@pytest.mark.parametrize("case", USERS)
def test_what_is_not_certain_from_the_source_is_left_to_the_parser(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"of_{case}").mkdir()
    (tmp_path / f"of_{case}" / "__init__.py").touch()
    (tmp_path / f"of_{case}" / "module.py").write_text(f"import lightning as L\n{USERS[case]}\n")
    monkeypatch.syspath_prepend(tmp_path)
    keys.check(["fit", "--model.widths=3"], Project(f"of_{case}", ".module:M"))


def test_every_key_of_a_resolved_configuration_passes_the_early_check(capsys: Any) -> None:
    """As typed and in a file: what the parser knows is not refused before it."""
    configs = ["strategy/fsdp2", "preset/early_stopping", "recipe/deepseek_v3", "logger/wandb"]
    flags = [f"--config={name}" for name in configs]
    with pytest.raises(SystemExit):
        run("fit", *flags, "--print_config")
    resolved = yaml.safe_load(capsys.readouterr().out)
    paths = [*keys._paths(resolved)]
    assert len(paths) > 150
    for verb in ("fit", "validate", "plan", "launch"):
        keys.check([verb, *(f"--{path}=1" for path in paths)], OURS)
    own = ["--trainer.callbacks+=X", "--model.architecture.hidden_sise=1", "--data.source.nmae=x"]
    keys.check(["fit", *own, "--trainer.strategy=zero1", "--deepspeed=x", "-h"], OURS)
    keys.check(["plan", "--memory=80GB", "--nodes", "2"], OURS)


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
    "# nothing": "x.yaml is empty; give keys, as in",
    "- trainer\n- model": "x.yaml is a list: give keys",
    "run:\n  name: a\nmodel:\n  optim: {}\nrun: {}": "the key run twice, in lines 1 and 5",
    "model.optim.warmup: 1\nmodel: {optim: {warmup: 2}}": "has model and model.optim.warmup",
    "model:\n  optim:\n    a: 1\n    'a': 2": "the key a twice, in lines 3 and 4",
    "data: " + "[" * 20_000 + "]" * 20_000: "x.yaml is nested too deeply",
    "trainer: {max_steps: " + "9" * 5000 + "}": "x.yaml is not YAML",
    "run: {name: 2026-13-99}": "x.yaml is not YAML",  # a date that does not exist
    "\ud800": "x.yaml is not YAML",
    "a: &a {b: *a}": "contains itself, by an alias",
    "a: &a [x, x, x, x, x, x, x, x, x]\n"
    + "".join(
        f"{n}: &{n} [{', '.join([f'*{o}'] * 9)}]\n" for o, n in zip("abcdef", "bcdefg", strict=True)
    ): ("has more than 1000000 values"),
}


def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path) -> None:
    for text, sentence in FILES.items():
        (tmp_path / "x.yaml").write_text(text, encoding="utf-8", errors="surrogatepass")
        with pytest.raises(InputError, match=sentence):
            config_file.read(f"{tmp_path}/x.yaml")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", "/dev/zero", "/dev/stdin"):
        with pytest.raises(InputError, match="cannot be read, .* it is a pipe or a device"):
            config_file.read(str(path))
    with pytest.raises(InputError, match="cannot be read, .* Is a directory"):
        config_file.read(str(tmp_path))
    (tmp_path / "big.yaml").touch()
    os.truncate(tmp_path / "big.yaml", 2**40)
    with pytest.raises(InputError, match="it has 1099511627776 bytes, and at most"):
        config_file.read(f"{tmp_path}/big.yaml")


def test_a_file_has_the_line_of_a_key(tmp_path: Path) -> None:
    text = "# a comment\ntrainer:\n  max_steps: 3\nmodel.optim:\n  warmup: 4\n"
    (tmp_path / "x.yaml").write_text(text)
    found = {key: config_file.line_of(f"{tmp_path}/x.yaml", key) for key in ("trainer.max_steps",)}
    found["model.optim.warmup"] = config_file.line_of(f"{tmp_path}/x.yaml", "model.optim.warmup")
    assert found == {"trainer.max_steps": 3, "model.optim.warmup": 5}


@pytest.mark.slow
def test_a_closed_pipe_ends_a_verb_quietly() -> None:
    """As in `config list | head -1`, and where the verb writes each line at once."""
    for argv in (["config", "list"], ["--help"]):
        command = [sys.executable, "-m", PACKAGE, *argv]
        reader, writer = os.pipe()
        os.close(reader)
        done = subprocess.run(
            command, cwd=PROJECT, stdout=writer, stderr=subprocess.PIPE, text=True, check=False
        )
        os.close(writer)
        assert (done.returncode, done.stderr) == (141, ""), argv


def test_a_misspelt_verb_has_the_nearest(capsys: Any) -> None:
    assert command(["fitt"]) == 2
    assert "'fitt' is not a verb of trainer_dev; did you mean fit? all" in capsys.readouterr().err


NEED = {
    "deepspeed": ("fit --config=strategy/zero2", "--no-build-isolation 'deepspeed"),
    "wandb": ("fit --config=logger/wandb", "'wandb"),
    "tensorboard": ("fit --trainer.logger=TensorBoard", "'tensorboard"),
    "datasets": ("prepare --data.source=HubDataset --data.source.name=x", "'datasets"),
}


@pytest.mark.parametrize("package", NEED)
def test_a_lack_is_explained(package: str, flags: list[str], monkeypatch: Any, capfd: Any) -> None:
    words, packages = NEED[package]
    verb, *given = words.split()
    monkeypatch.setitem(sys.modules, package, None)
    said = f" needs the package {package}: pip install {packages}"
    assert said in refused(verb, [*flags, *given], capfd)


ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("logger", ["MLFlowLogger", "CometLogger"])
def test_a_logger_of_lightning_whose_package_is_missing_is_explained(
    logger: str, flags: list[str], capfd: Any
) -> None:
    package = {"MLFlowLogger": "mlflow", "CometLogger": "comet-ml"}[logger]
    said = refused("fit", [*flags, f"--trainer.logger={logger}"], capfd)
    assert f"{logger} needs the package {package}: pip install '{package}>=" in said
    assert "trainer.logger" in said and "\n" not in said.strip(), said


def test_a_lack_names_packages_that_an_index_has() -> None:
    """Each extra's own packages, by pyproject.toml: no index has dist-template."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    for extra, packages in project["optional-dependencies"].items():
        command = install_command(extra)
        for package in packages:
            name = re.split(r"[<>=!~]", package)[0]
            assert f"'{name}" in command, command


PRINTED = [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").rglob("*.md")]
PLAIN_INSTALL = re.compile(r"pip\s+install[^\n]*\n?[^\n]*dist-template\[")


def test_no_command_installs_the_library_from_an_index() -> None:
    for path in PRINTED:
        assert not PLAIN_INSTALL.search(path.read_text("utf-8")), path


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
    cure = "the report needs the package plotly: pip install 'plotly"
    assert f"at_run_end of diagnose failed: {cure}" in done.stderr


PAGE = Path(__file__).parents[2] / "docs" / "extend.md"
FILE = re.compile(r"^```(?:python|toml)\n# (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The page's files outside of the repository, with metadata as pip writes it."""
    folder = tmp_path / "site"
    for name, text in FILE.findall(PAGE.read_text(encoding="utf-8")):
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    write_metadata(folder, project["name"], project["entry-points"])
    monkeypatch.syspath_prepend(folder)
    engine.registered_rules.cache_clear()
    yield folder
    engine.registered_rules.cache_clear()


def started(site: Path, *argv: str) -> str:
    """What Python prints where the package is installed."""
    env = os.environ | {"PYTHONPATH": f"{site}{os.pathsep}{os.environ['PYTHONPATH']}"}
    return subprocess.check_output([sys.executable, *argv], env=env, cwd=PROJECT, text=True)


@pytest.mark.slow
def test_a_package_adds_verb_rule_hooks(site: Path, flags: Any, tmp_path: Path, capfd: Any) -> None:
    help_line = "\n  runs +lists runs with their last validation loss\n"
    assert re.search(help_line, started(site, "-m", PACKAGE, "--help"))
    assert run("fit", *flags, "--trainer.max_steps=3") == 0
    folder = only_run(tmp_path)
    assert (folder / "ended.txt").read_text() == "None"
    listed = started(site, "-m", PACKAGE, "runs", str(tmp_path / "runs"))
    assert re.fullmatch(rf"{folder} \d\.\d{{4}}\n", listed)
    assert run("diagnose", str(folder)) == 0
    shown = capfd.readouterr().out
    assert "the run is short (certain)" in shown and "--trainer.max_steps 1000" in shown

    breaks = ["--run.name=second", "--trainer.callbacks+=tests.support.runs.StopAfter"]
    assert command(["fit", *flags, *breaks, "--trainer.callbacks.step=2"]) == 1
    assert "\nsee the runbook of RuntimeError\n" in capfd.readouterr().err
    ended = (only_run(tmp_path, "second") / "ended.txt").read_text()
    assert ended.startswith("RuntimeError('stopped by the test")


@pytest.mark.slow
def test_a_package_adds_an_objective(site: Path, flags: Any, tmp_path: Path) -> None:
    """Every verb takes it: one file, and one entry point."""
    smoothed = ["--model.objective=Smoothed", "--model.objective.smoothing=0.2"]
    entry = ["-m", PACKAGE]
    given = [*flags, *smoothed, "--data.validation_share=0.3"]
    shown = started(site, *entry, "plan", *given, "--memory=1GiB")
    assert "\ndevices  strategy" in shown and "\ntotal " in shown
    started(site, *entry, "fit", *given)
    folder = only_run(tmp_path)
    losses = logged(folder, "train/loss")
    objective = logged(folder, "train/objective")
    normalizer = logged(folder, "train/normalizer")
    assert len(objective) == 20 and objective[20] != losses[20]
    assert normalizer.keys() == losses.keys()
    assert losses[20] < losses[1]
    facts = json.loads((folder / "facts.json").read_text())["objective"]
    assert facts["class"] == "Smoothed"
    shown = started(site, *entry, "evaluate", str(folder), "--baseline=start", "--split=validation")
    assert "better" in shown
    output = tmp_path / "exported"
    started(site, *entry, "export", str(folder), f"--output={output}")
    assert "text-generation" in (output / "README.md").read_text()
    shown = started(
        site, *entry, "rehearse", *given, f"--output={tmp_path / 'small'}", "--only=loss"
    )
    assert re.search("^pass +loss curve = one process", shown, re.MULTILINE)


def test_what_raises_changes_nothing(site: Path, flags: Any, tmp_path: Path, capfd: Any) -> None:
    files = {"hooks": "def at_run_end(run, error):\n    raise SystemExit(7)\n"}
    files["rules"] = "import a_module_that_is_missing\n"
    for name, text in files.items():
        (site / "my_tools" / f"{name}.py").write_text(text)
        sys.modules.pop(f"my_tools.{name}", None)
    assert run("fit", *flags, "--trainer.max_steps=2") == 0
    assert (
        "the plug-in my_tools of the package my-tools fails in at_run_end: SystemExit: 7"
        in capfd.readouterr().err
    )
    assert run("diagnose", str(only_run(tmp_path))) == 0
    assert "the rule short_run failed" in capfd.readouterr().out


# A package with a strategy: a folder, and one entry point.
SPEC = """
from collections.abc import Iterator
from dataclasses import dataclass

from dist_template.parallel.spec.plain import PlainSpec


@dataclass(frozen=True)
class CarefulSpec(PlainSpec):
    name: str = "Careful"

    @staticmethod
    def strategy_class() -> type:
        from .strategy import Careful

        return Careful

    def refusals(self, setup) -> Iterator[str]:
        if setup.machine.world_size > self.arguments.get("most", 2):
            yield f"Careful takes {self.arguments['most']} processes: edit trainer.devices"
"""
STRATEGY = """
from lightning.pytorch.strategies import DDPStrategy

from dist_template.parallel.rank_view import RankView


class Careful(RankView, DDPStrategy):
    def __init__(self, most: int = 2) -> None:
        super().__init__(process_group_backend="gloo")
        self.arguments = {"most": most}
"""
TWICE = """
import sys
from tests.support.runs import run

assert run(*sys.argv[1:], "--trainer.strategy.most=0") == 2
assert run(*sys.argv[1:], "--trainer.strategy.most=1") == 0
"""


@pytest.mark.slow
def test_a_packages_strategy_has_a_name_and_refuses(flags: Any, tmp_path: Path, capfd: Any) -> None:
    folder = tmp_path / "my_strategy"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "spec.py").write_text(SPEC)
    (folder / "strategy.py").write_text(STRATEGY)
    points = {"dist_template.strategies": {"Careful": "my_strategy.spec:CarefulSpec"}}
    write_metadata(tmp_path, "my-strategy", points)
    careful = ["--trainer.max_steps=2", "--trainer.strategy.class_path=Careful"]
    printed = started(tmp_path, "-c", TWICE, "fit", *flags, *careful)
    assert "finished after step 2" in printed
    assert "error: Careful takes 0 processes: edit trainer.devices\n" in capfd.readouterr().err


GROUP = "dist_template.examples"  # this library registers none


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The pyproject.toml of a started project with two entry points."""
    monkeypatch.setattr("dist_template.project._program", "dist_template")
    (tmp_path / "a_trainer").mkdir()
    file = tmp_path / "pyproject.toml"
    points = f'[project.entry-points."{GROUP}"]\nb = "a_trainer.b:B"\na = "x"\n'
    file.write_text(f'[project]\nname = "A.Trainer"\n{points}')
    monkeypatch.syspath_prepend(tmp_path)
    Project("a_trainer").start()
    return file


def test_entry_points_are_the_projects_then_packages_by_their_names(project: Path) -> None:
    write_metadata(project.parent, "other", {GROUP: {"aa": "other:AB"}})
    write_metadata(project.parent, "another", {GROUP: {"z": "another:Z", "y": "another:Y"}})
    found = plugins.registered(GROUP)
    assert list(found) == ["a", "b", "y", "z", "aa"]
    assert found["b"].point == EntryPoint("b", "a_trainer.b:B", GROUP)


def test_one_name_of_two_packages_is_the_firsts_and_a_line(project: Path, capsys: Any) -> None:
    write_metadata(project.parent, "other", {GROUP: {"b": "other:B"}})
    plugins._noted.clear()
    assert plugins.registered(GROUP)["b"].value == "a_trainer.b:B"
    assert list(plugins.registered(GROUP, taken={"a"})) == ["b"]
    printed = capsys.readouterr().err
    assert printed.count("\n") == 2 and f"other: its 'b' of {GROUP} is skipped: a-tra" in printed
    assert f"a-trainer: its 'a' of {GROUP} is skipped: dist-template has this name" in printed


BROKEN = {
    "def main(:": "(cannot be read: invalid syntax (<unknown>, line 1))",
    '"""`broken`: does nothing."""': "does nothing",
    None: "(not found: a_trainer.broken)",
}


@pytest.mark.parametrize("text", BROKEN)
def test_help_shows_a_broken_or_missing_verb(text: str | None, project: Path, capsys: Any) -> None:
    if text is not None:
        (project.parent / "a_trainer" / "broken.py").write_text(text)
    project.write_text('[project.entry-points."dist_template.verbs"]\nbroken = "a_trainer.broken"')
    assert command_line.run(["--help"], Project("a_trainer")) == 0
    assert f"\n  broken             {BROKEN[text]}\n" in capsys.readouterr().out


def test_a_pyproject_that_is_not_toml_is_refused_with_its_path(project: Path) -> None:
    project.write_text("[project\n")
    with pytest.raises(InputError, match=rf"^{project}: .*line 1"):
        plugins.registered(GROUP)
