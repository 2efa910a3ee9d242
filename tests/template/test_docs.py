"""The documentation is current, names keys that exist, and builds."""

import ast
import re
import runpy
import shlex
import shutil
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from importlib import import_module
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest

from dist_template import AdapterConfig
from dist_template.cli import config_file
from dist_template.strategies import MeshStrategy, ZeroStrategy
from dist_template.text.objectives.distillation import DistillationConfig
from dist_template.text.objectives.mtp import MtpConfig
from dist_template.wings.diagnose import engine
from tests.support.line import PACKAGE, main
from tests.support.recorded import METRICS
from tests.support.tiers import NIGHTLY
from tests.support.written import falling, write_run

from .conftest import ROOT, run

DOCS = ROOT / "docs"
GENERATED = DOCS / "reference.md"  # by `make docs`, not in git
PAGES = sorted(page for page in DOCS.rglob("*.md") if page != GENERATED)
# The project's README.md: test_source.py.
OTHERS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "benchmarks").rglob("*.md"))]
CONFIG = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]

STRATEGY = set[str]()
for kind in (MeshStrategy, *ZeroStrategy.__mro__[:2]):  # and what ZeroStrategy derives from
    STRATEGY.update(signature(kind).parameters)
PARTS = {"adapter": AdapterConfig, "distillation": DistillationConfig, "mtp": MtpConfig}
INSIDE = {f"model.{name}.{key}" for name, of in PARTS.items() for key in signature(of).parameters}
# Attributes of Lightning's objects, a file, and keys of a module that is not ours.
INSIDE |= {f"trainer.{name}" for name in dir(L.Trainer)} | {"model.safetensors", "data.batch_size"}
INSIDE |= {"trainer.callbacks.monitor", "trainer.callbacks.mode"}  # of the preset's last callback
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LAUNCHERS = {"launch/torchrun.sh", "launch/slurm.sh"}
TRAINING = {"fit", "validate", "test", "predict", "prepare"}
# Blocks that run on a CPU.
MARKED = re.compile(r"^<!-- run -->\n```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# What a marked training gets besides its own flags, so that it takes seconds.
SHORT = """trainer: {max_steps: 2, val_check_interval: 2, limit_val_batches: 1}
data: {source: {class_path: TextFiles, init_args: {paths: [CORPUS/*.txt]}},
  tokenizer: Bytes, seq_len: 32, validation_share: 0.2, test_share: 0.2}
last_checkpoint: {every_n_steps: 1}
"""


def name_of(page: Path) -> str:
    return page.relative_to(DOCS if DOCS in page.parents else ROOT).as_posix()


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, language: str) -> list[str]:
    return [code for found, code in FENCE.findall(text_of(page)) if found == language]


def commands(code: str) -> Iterator[list[str]]:
    """The project's commands in a bash block, as verb and flags; <names> stand for one word."""
    for line in re.sub(r"<[a-z ]+>|\{\{.*?\}\}", "name", code.replace("\\\n", " ")).splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        for word in [*lexer, ";"]:
            if word[0] not in ";&|()<>":
                words.append(word)
                continue
            command = after_launcher(words)
            if command:
                yield command
            words = []


def after_launcher(words: list[str]) -> list[str]:
    """The words after a launcher, or after `python -m` and the package."""
    for number, word in enumerate(words):
        if word in LAUNCHERS:
            return words[number + 1 :]
    for number in range(len(words)):
        if words[number : number + 2] == ["python", "-m"]:
            return words[number + 3 :]
    return []


def test_pages_name_configurations_that_a_project_has() -> None:
    """The library's presets have names, as strategy/fsdp2; their files are not in a project."""
    project = next(ROOT.glob("{{*"))
    for page in [*PAGES, DOCS / "quickstart.ipynb"]:
        for path in re.findall(r"\bconfigs/[\w/]+\.yaml", text_of(page)):
            assert (project / path).is_file(), f"{page}: {path}; a preset is taken by its name"
        for name in re.findall(r"--config (\w+/\w+)\b(?!\.|/)", text_of(page)):
            assert name in config_file.names() or name.startswith("runs/"), f"{page}: {name}"


def anchors(page: Path) -> set[str]:
    """The ids of a page's headings in the site: lower case, hyphens for blanks, no punctuation."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text_of(page)), re.MULTILINE)
    words = [re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings]
    return {each.replace(" ", "-") for each in words}


@pytest.fixture(scope="module")
def reference() -> Any:
    return SimpleNamespace(**runpy.run_path(str(DOCS / "reference.py"), run_name="reference"))


@pytest.fixture(scope="module")
def package(reference: Any) -> Any:
    with reference.package() as cli:
        yield cli


@pytest.fixture(scope="module")
def parser(reference: Any, package: Any) -> Any:
    return reference.fit_parser(package)


@pytest.fixture(scope="module")
def keys(reference: Any, parser: Any) -> set[str]:
    return reference.keys(parser)


@pytest.fixture(scope="module")
def generated(reference: Any, package: Any) -> str:
    return reference.page(package)


def test_every_key_has_a_text_in_the_reference(parser: Any, reference: Any, generated: str) -> None:
    """Keys of a group, of a callback that always runs, and of a class that `class_path` names."""
    classes_and_files = "StandardLibrary HubDataset ByteBPE quickstart.yaml"
    assert [name for name in classes_and_files.split() if name not in generated] == []
    rows = dict(re.findall(r"^\| `([\w.]+)` \|(?:.*\|)? ([^|]*) \|$", generated, re.MULTILINE))
    lightnings = ("trainer", "optimizer", "lr_scheduler", "weights_only")
    own = {key for key in reference.knobs(parser) if not key.startswith(lightnings)}
    assert len(own) > 80 and own <= rows.keys()
    empty = [key for key, text in rows.items() if not text.strip()]
    assert [key for key in empty if not key.startswith("trainer.")] == []
    sections = re.findall(r"^#+ (.+)\n\n(.*)$", generated, re.MULTILINE)
    assert [title for title, text in sections if not text.strip()] == []


def test_navigation_names_every_page_once() -> None:
    named = re.findall(r"[\w/]+\.md", str(CONFIG["nav"]))
    assert sorted(named) == sorted(map(name_of, [*PAGES, GENERATED]))


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=name_of)
def test_every_relative_link_resolves(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text_of(page))):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        linked = page.parent / name if name else page
        if linked.resolve() == GENERATED and not anchor:
            continue  # the site has it
        is_here = linked.exists() and ROOT in linked.resolve().parents
        is_known = is_here and (not anchor or anchor in anchors(linked))
        assert is_known, f"{name_of(page)} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_key_that_a_page_names_exists(page: Path, keys: set[str]) -> None:
    groups = "|".join(sorted({key.split(".")[0] for key in keys if "." in key}))
    key = rf"(?:{groups})\.(?!(?:py|txt|jsonl|json|onnx)\b)[a-z_]+(?:\.[a-z_]+)*"
    flags = [flag for code in blocks(page, "bash") for flag in re.findall(rf"--({key})", code)]
    prose, *_ = FENCE.sub("", text_of(page)).split("## For wings and packages")  # it lists modules
    named = re.findall(rf"`(?:--)?({key})\+?(?: [^`]*)?`", prose)
    for found in {*flags, *named}:
        is_key = found.removesuffix(".init_args") in keys
        is_known = is_key or found.startswith("model.architecture.")
        of_strategy = found.removeprefix("trainer.strategy.").removeprefix("init_args.") in STRATEGY
        assert is_known or of_strategy or found in INSIDE, f"{name_of(page)} names {found}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_that_a_page_gives_has_its_files(page: Path, reference: Any) -> None:
    for code in blocks(page, "bash"):
        for path in re.findall(r"\b((?:configs|launch)/[\w./-]+)", code):
            places = [reference.PROJECT / path, reference.LIBRARY / path]
            assert any(place.is_file() for place in places), f"{name_of(page)} names {path}"
        for name in re.findall(r"(?:--config|-c|--space)[ =]([a-z]\w+(?:/\w+)?)(?![\w./-])", code):
            folders = (reference.PROJECT, reference.LIBRARY)
            files = [folder / "configs" / f"{name}.yaml" for folder in folders]
            assert any(file.is_file() for file in files), f"{name_of(page)} names {name}"


READ = [*PAGES, ROOT / "README.md", *ROOT.glob("{{*/README.md")]


@pytest.mark.parametrize("page", READ, ids=name_of)
def test_every_training_that_a_page_gives_is_accepted(
    page: Path, parser: Any, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(reference.PROJECT)
    for code in blocks(page, "bash"):
        for verb, *flags in commands(code):
            if verb in TRAINING and not {"--help", "--print_config"} & set(flags):
                parser.parse_args(flags)


def marked_commands(page: Path) -> list[list[str]]:
    return [argv for code in MARKED.findall(text_of(page)) for argv in commands(code)]


def pages_that(train: bool) -> list[Any]:
    """The pages whose marked blocks have such commands; `plan` takes seconds."""
    chosen = []
    for page in PAGES:
        if any((argv[0] in TRAINING) == train for argv in marked_commands(page)):
            marks = NIGHTLY if page.name == "plan.md" else ()
            chosen.append(pytest.param(page, marks=marks, id=name_of(page)))
    return chosen


def marked(page: Path, folder: Path) -> list[list[str]]:
    """A page's marked commands, without GPUs; `folder` gets the project and the named runs."""
    for entry in (ROOT / "build" / "dev").iterdir():
        if entry.name not in {"runs", "data_cache"}:
            (folder / entry.name).symlink_to(entry.resolve())
    chosen = []
    for argv in marked_commands(page):
        is_of_cluster = any(re.match("(configs/)?cluster[./]", word) for word in argv)
        if "plan" in argv or not is_of_cluster:
            chosen.append(argv)
    runs = {word for argv in chosen for word in argv if re.match(r"runs/\w+/\w", word)}
    for name in runs:
        write_run(folder / name, falling(20))
    return chosen


@pytest.mark.parametrize("page", pages_that(train=False))
def test_the_marked_commands_of_a_page_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that train nothing: in this process, which has imported what they need."""
    given = marked(page, tmp_path)
    monkeypatch.chdir(tmp_path)
    for argv in given:
        if argv[0] in TRAINING:
            continue
        words: list[str] = []
        for word in argv:  # as a shell does
            words += sorted(map(str, Path().glob(word))) if "*" in word else [word]
        assert main(words) == 0, argv


@pytest.mark.nightly
@pytest.mark.parametrize("page", pages_that(train=True))
def test_the_marked_trainings_of_a_page_run(page: Path, corpus: Path, tmp_path: Path) -> None:
    trainings = [argv for argv in marked(page, tmp_path) if argv[0] in TRAINING]
    short_yaml = SHORT.replace("CORPUS", str(corpus))
    (tmp_path / "short.yaml").write_text(short_yaml, encoding="utf-8")
    for argv in trainings:
        command = [sys.executable, "-m", PACKAGE, *argv]
        if {"--help", "--print_config"}.isdisjoint(argv):
            command += ["--config", "short.yaml"]
        done = run(*command, cwd=tmp_path)
        assert done.returncode == 0, (argv, done.stdout[-2000:] + done.stderr[-2000:])


@pytest.mark.usefixtures("keys", "generated")  # before the page's own class is there
def test_the_code_of_the_start_is_valid_and_its_yaml_is_accepted(parser: Any, package: Any) -> None:
    data = import_module("trainer_dev.data")
    for code in blocks(DOCS / "start.md", "python"):
        ast.parse(textwrap.dedent(code))
        if code.startswith("# data.py"):  # what a user would have written there
            head = "from __future__ import annotations\nfrom pathlib import Path\n"
            exec(compile(head + code, "start.md", "exec"), vars(data))
    yamls = blocks(DOCS / "start.md", "yaml")
    assert yamls
    for text in yamls:
        parser.parse_string(text)


def test_the_diagnosis_page_names_every_rule() -> None:
    cells = re.findall(r"^\| `([\w.]+)` \|", text_of(DOCS / "diagnosis.md"), re.MULTILINE)
    assert sorted(cells) == sorted(engine.RULES)


def test_rules_read_metrics_that_are_documented() -> None:
    """A renamed metric would silence its rules."""
    page = text_of(DOCS / "metrics.md")
    documented = {*re.findall(r"^(?:\| |- )`(\w+/\w+)`", page, re.MULTILINE)}
    of_plain_modules = {"val/loss", "valid/loss", "validation/loss"}  # which name them themselves
    read = {*METRICS} - of_plain_modules - config_file.names().keys()
    assert len(read) > 10 and read <= documented, read - documented


@pytest.mark.slow
def test_the_site_builds(tmp_path: Path, generated: str) -> None:
    for name in ("docs", "zensical.toml"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    (tmp_path / "docs" / GENERATED.name).write_text(generated, encoding="utf-8")
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    built = run(*command, cwd=tmp_path)
    assert built.returncode == 0, built.stdout + built.stderr
    for page in [*PAGES, GENERATED]:
        place = page.relative_to(DOCS).with_suffix("")
        html = tmp_path / "site" / (place.parent if place.name == "index" else place) / "index.html"
        assert html.is_file(), f"{name_of(page)} is not in the site"
        assert "stylesheets/extra.css" in html.read_text(encoding="utf-8"), "wide tables"
