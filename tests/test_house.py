"""The rules that hold the repository together, and for each rule a small tree that breaks it."""

import ast
import re
import sys
import tomllib
from collections.abc import Callable
from dataclasses import fields
from importlib import import_module
from importlib.metadata import EntryPoint
from pathlib import Path

import lightning
import lightning.pytorch
import pytest
import torch
import transformers
from torch import nn

import dist_template

from .support import house

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
LIBRARY = ROOT / "src" / "dist_template"
PROJECT = ROOT / "{{cookiecutter.project_slug}}"
DOCS = ROOT / "docs"

# Room: what its lines are for. A room imports only rooms below it.
ROOMS = {
    "public": "what users import: strategies, and testing for their own tests",
    "wings": "not needed to train: rehearse, diagnose, plan, launch, sweep, evaluate, serve …",
    "text": "sources to packed rows, tokenizers, TextModule, adapters, loss in chunks, kernels",
    "cli": "verbs, parser, configuration errors, the run folder",
    "callbacks": "what is measured, saved and guarded during training; the order of samples",
    "observe": "history of a run, loggers, crash records",
    "model": "the training module, optimizer, metrics, FLOPs, experts, proven models",
    "parallel": "MeshStrategy, ZeroStrategy, DDP; placement; the DeepSpeed JSON",
    "checkpoint": "three formats, the commit protocol, loading into any strategy",
    "cluster": "launch, rendezvous, signals, watchdog, same environment",
    "compat": "private names of other libraries, Lightning's loop",
    "ground": "errors, the user's project, tensors of any layout, small files, tables",
}
ORDER = tuple(ROOMS)
MOST_ROOMS = 10  # folders; "public" and "ground" are the files beside them

# As a string; entry points name wings in pyproject.toml.
WING_MODULE = r"(dist_template|\.*)\.wings\.|wings\."

# Module outside compat/: how many private names of other libraries are still to move from it.
PRIVATE: dict[str, int] = {}
INHERITED: dict[str, int] = {}  # class: how many of its base classes'

CACHES = {"__pycache__", ".ruff_cache", ".pytest_cache"}

INTERFACE = "For wings and packages"  # the section of docs/api.md


def broken_files(package: Path) -> list[str]:
    """Import cycles between files."""
    return house.cycles(house.graph(package))


def broken_rooms(package: Path) -> list[str]:
    """Import cycles between rooms, arrows upwards, rooms without a place, too many rooms."""
    arrows = house.rooms(package)
    found = house.cycles(arrows)
    found += [f"{room} is not in ORDER" for room in arrows.keys() - set(ORDER)]
    if not found:
        for room, targets in arrows.items():
            above = [target for target in targets if ORDER.index(target) < ORDER.index(room)]
            found += [f"{room} imports {target}, above it" for target in above]
    folders = arrows.keys() - {"ground", "public"}
    if len(folders) > MOST_ROOMS:
        found.append(f"{len(folders)} rooms")
    return found


def broken_core(package: Path) -> list[str]:
    """Files of the core that import a wing, or name a module of one."""
    files, found = house.modules(package), []
    for name, targets in house.graph(package).items():
        if house.room_of(name, files[name]) in ("wings", "public"):  # `testing` offers rehearse
            continue
        named = [text for text in house.strings(files[name]) if re.match(WING_MODULE, text)]
        wings = [target for target in targets if target.split(".")[0] == "wings"]
        found += [f"{name}: {each}" for each in named + wings]
    return found


POINTS: dict[str, dict[str, str]] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))[
    "project"
]["entry-points"]


def names_of_wings() -> set[str]:
    """Folders of wings, and what they register. Targets of `launch` are names of launchers, which
    the core has to know."""
    names = {path.name for path in (LIBRARY / "wings").iterdir() if (path / "__init__.py").exists()}
    for group in POINTS.keys() - {"dist_template.launch_targets"}:
        for name, place in POINTS[group].items():
            if ".wings." in place:
                names.add(name)
    return names


# A wing's key, also within a text: a callback's argument, a key that it adds to `run`.
KEYS_OF_WINGS = [f"{name}[.]" for name in POINTS["dist_template.callbacks"]]
KEYS_OF_WINGS += [
    rf"run[.]{field.name}\b"
    for at in POINTS["dist_template.run_keys"].values()
    for field in fields(EntryPoint("", at, "").load())
]
KEY_OF_A_WING = re.compile(rf"\b(?<![.])({'|'.join(KEYS_OF_WINGS)})")
# Names of wings that are a word of the core's own where they are a whole string. Within a longer
# string they are words of a sentence, or a command that it recommends.
WORDS = {
    "completion": "a field of a record with a prompt",
    "config": "the flag --config, and an argument of models and of DeepSpeed",
    "launch": "a folder in a run, where other verbs write too; an entry of a lock",
    "prepare": "a method of a data module",
    "rehearse": "a command that a sentence recommends",
    "setup": "a method of Lightning's callbacks and strategies",
}


def broken_words(package: Path) -> list[str]:
    """Strings of the core, docstrings aside, that are a wing's name, or have a key of one."""
    names, files, found = names_of_wings() - WORDS.keys(), house.modules(package), []
    for name, path in files.items():
        if house.room_of(name, path) in ("wings", "public"):
            continue
        for text in house.texts(path):
            if text in names or KEY_OF_A_WING.search(text):
                found.append(f"{name}: {text[:80]}")
    return found


def test_each_exception_of_the_core_is_a_wings_name_and_is_used() -> None:
    texts = set[str]()
    for name, path in house.modules(LIBRARY).items():
        if house.room_of(name, path) not in ("wings", "public"):
            texts.update(house.texts(path))
    assert WORDS.keys() <= names_of_wings()
    assert WORDS.keys() <= texts


def outside_of(room: str, package: Path) -> dict[str, Path]:
    files = house.modules(package)
    return {name: path for name, path in files.items() if house.room_of(name, path) != room}


def broken_private(package: Path) -> list[str]:
    """Private names of other libraries outside compat/, where there are more than PRIVATE says."""
    found = []
    for name, path in outside_of("compat", package).items():
        private = house.private_names(path)
        if len(private) > PRIVATE.get(name, 0):
            found.append(f"{name}: {private}")
    return found


ASKED = re.compile(r"\b(pp|dp_replicate|fsdp|tp|ep|cp)_size\b|\bpipeline_of\(")


def broken_strategies(package: Path) -> list[str]:
    """Code outside of parallel/ that inspects a strategy: an axis's key, a class, an attribute."""
    found = []
    for name, path in outside_of("parallel", package).items():
        looks = ASKED.findall(path.read_text("utf-8")) + list(house.checks_of_strategies(path))
        if looks:
            found.append(f"{name}: {looks}")
    return found


# What a language model can learn, by the names of keys and losses. Sources, and the modules of a
# network, have the names of what they are for.
OBJECTIVES = re.compile(r"\b(mtp|preference|distillation|dpo|ipo|simpo|orpo|kto)\b")
OF_OBJECTIVES = ("text.objectives", "text.model", "text.sources")
NAMES_KEYS = {"cli.parser"}  # its hint lists the keys of a TextModule


def broken_objectives(package: Path) -> list[str]:
    """Code that knows an objective by name, comments and docstrings aside."""
    found = []
    for name, path in house.modules(package).items():
        if name.startswith(OF_OBJECTIVES) or name in NAMES_KEYS:
            continue
        known = set[str]()
        for text in house.names_and_strings(path):
            known.update(OBJECTIVES.findall(text))
        if known:
            found.append(f"{name}: {sorted(known)}")
    return found


def broken_mock(package: Path) -> list[str]:
    return [name for name, path in house.modules(package).items() if house.uses_mock(path)]


def broken_tests(tests: Path) -> list[str]:
    """Tests that another test module imports; support/ or a conftest.py has what several share."""
    arrows = [(name, target) for name, targets in house.graph(tests).items() for target in targets]
    return [f"{arrow}" for arrow in arrows if arrow[1].rpartition(".")[2].startswith("test_")]


def broken_api(docs: Path) -> list[str]:
    """Names that a section of the page documents and its module does not offer, or the reverse."""
    found = []
    for section in (docs / "api.md").read_text("utf-8").split("## ")[1:]:
        if not section.startswith(INTERFACE):
            module = section.split()[0]
            documented = set(re.findall(r"^- `(\w+)`", section, flags=re.MULTILINE))
            differ = documented ^ set(import_module(module).__all__)
            found += [f"{module}: {name}" for name in sorted(differ)]
    return found


def documented_interface(docs: Path) -> set[str]:
    """Names of the section of docs/api.md, as "module.name"."""
    section = (docs / "api.md").read_text(encoding="utf-8").partition(f"## {INTERFACE}")[2]
    return set(re.findall(r"^- `([\w.]+)`", section, flags=re.MULTILINE))


def broken_interface(package: Path, docs: Path = DOCS) -> list[str]:
    """Names that wings take from the core without `__all__` or docs/api.md."""
    names, documented = house.wing_names(package), documented_interface(docs)
    found = [f"{name} is in no __all__" for name in sorted(names - house.offered(package))]
    return found + [f"docs/api.md: {name}" for name in sorted(names ^ documented)]


# Folders from which comments name files: of this repository, of a project, of other libraries.
OTHERS = (torch, lightning, lightning.pytorch, transformers)
LIBRARIES = [Path(str(library.__file__)).parent for library in OTHERS]
BASES = [ROOT, PROJECT, LIBRARY, DOCS, ROOT / "tests", *LIBRARIES]
PLACEHOLDERS = {"folder/file.py", "RUN/launch/node.sh"}
COMMENTED = re.compile(r".*\.(py|ya?ml|sh|toml)|Makefile|Dockerfile")


def broken_paths(root: Path) -> list[str]:
    """Paths in comments and docstrings of Python, YAML, sh and Make that do not exist."""
    found = []
    for path in sorted(root.rglob("*")):
        if COMMENTED.fullmatch(path.name) and path.is_file() and not CACHES & set(path.parts):
            found += house.missing_paths(path, BASES)
    return [name for name in found if name.split(": ")[1] not in PLACEHOLDERS]


def broken_closure(package: Path) -> list[str]:
    """Wings that importing `cli.fit`, its default callbacks or `strategies` can load."""
    files, found = house.modules(package), []
    for root in ("cli.fit", "strategies"):
        roots = {root}
        if root == "cli.fit" and "cli.defaults" in files:
            # which names callbacks as "module:class"
            roots.update(text.partition(":")[0] for text in house.strings(files["cli.defaults"]))
        modules = house.closure(package, roots & files.keys())
        found += [f"{root} reaches {name}" for name in modules if name.startswith("wings")]
    return found


LIBRARY_RULES = [
    broken_closure,
    broken_files,
    broken_rooms,
    broken_core,
    broken_words,
    broken_private,
    broken_strategies,
    broken_objectives,
    broken_mock,
    broken_interface,
]


@pytest.mark.parametrize("rule", LIBRARY_RULES, ids=lambda rule: rule.__name__)
def test_the_library_keeps_the_rule(rule: Callable[[Path], list[str]]) -> None:
    assert rule(LIBRARY) == []


def test_public_names_are_documented_and_tests_import_no_test() -> None:
    assert broken_api(DOCS) == [] and broken_tests(ROOT / "tests") == []
    assert all(hasattr(dist_template, name) for name in dist_template.__all__)


def test_paths_in_comments_exist() -> None:
    for folder in (LIBRARY, PROJECT, *map(ROOT.joinpath, "tests benchmarks zoo hooks".split())):
        assert broken_paths(folder) == [], folder


def test_no_class_outside_compat_uses_a_private_name_of_its_base() -> None:
    """Needs imports: `self._x` may be the class's own, or another library's."""
    for name, path in house.modules(LIBRARY).items():
        if house.room_of(name, path) != "compat":
            module = import_module(f"dist_template.{name}".rstrip("."))
            for one, names in house.inherited_private_names(module).items():
                assert len(names) <= INHERITED.get(f"{name}.{one}", 0), (name, one, names)


def broken_modules(package: Path) -> list[str]:
    """Modules and names that comments, docstrings and pages name and the library does not have."""
    groups = set(POINTS)
    found = []
    for path in house.modules(package).values():
        for comment in house.comments(path):
            missing = house.missing_modules(comment, LIBRARY, groups)
            found += [f"{path.name}: {name}" for name in missing]
    return found


def test_dotted_names_in_comments_and_on_pages_exist() -> None:
    assert broken_modules(LIBRARY) == []
    groups = set(POINTS)
    examples = groups | {"dist_template.examples"}
    for page in [*DOCS.rglob("*.md"), ROOT / "CONTRIBUTING.md"]:
        full = re.findall(r"\bdist_template\.[\w.]+", page.read_text("utf-8"))
        assert house.missing_modules(" ".join(full), LIBRARY, examples) == [], page


# Case: the rule that it breaks, and files as "name: text"; two files are separated by " | ".
BREAKS: dict[str, tuple[Callable[[Path], list[str]], str]] = {
    "a cycle between files, by a late import": (
        broken_files, "cli/a.py: from . import b | cli/b.py: def f():\n    from .a import f"),
    "a cycle by TYPE_CHECKING": (
        broken_files, "cli/a.py: from .b import f |"
        " cli/b.py: if TYPE_CHECKING:\n    from dist_template.cli.a import f"),
    "a cycle between rooms": (
        broken_rooms, "cli/a.py: from ..text import c | text/b.py: from ..cli import d |"
        " text/c.py: | cli/d.py: "),
    "an arrow upwards": (
        broken_rooms, "errors.py: def f():\n    import dist_template.cli.a | cli/a.py: "),
    "a core that imports a wing late": (
        broken_core, "cli/a.py: def f():\n    from ..wings.plan import g | wings/plan.py: "),
    "a core that names a wing's module": (
        broken_core, "cli/a.py: import_module('dist_template.wings.plan')"),
    "a core that has a wing's key": (broken_words, "cli/a.py: KEYS = 'data.seed store.keep'"),
    "a core that has a key which a wing adds to run": (
        broken_words, "cli/a.py: print(f'--run.store={x}')"),
    "a core that names a wing": (broken_words, "cli/a.py: settings['preflight'].enabled = True"),
    "an unknown room": (broken_rooms, "utils/a.py: "),
    "too many rooms": (
        broken_rooms, " | ".join(f"{room}/a.py: " for room in [*ORDER[:-1], "eleventh"])),
    "a private import": (broken_private, "cli/a.py: from torch.utils.data import _utils"),
    "a private module": (broken_private, "cli/a.py: def f():\n    from torch._dynamo import x"),
    "a private attribute": (broken_private, "cli/a.py: def f(t):\n    t.fit_loop._data_fetcher"),
    "a private attribute by its name": (broken_private, "cli/a.py: getattr(s, '_timeout', None)"),
    "an axis's key": (broken_strategies, "cli/a.py: print('set tp_size to 1')"),
    "an axis's size": (broken_strategies, "model/a.py: def f(s):\n    return s.fsdp_size"),
    "a pipeline": (broken_strategies, "text/a.py: stage = pipeline_of(trainer.strategy)"),
    "a strategy's class": (broken_strategies, "cli/a.py: isinstance(t.strategy, MeshStrategy)"),
    "one of several classes": (
        broken_strategies, "cli/a.py: isinstance(given, (str, strategies.DDPStrategy))"),
    "a strategy's attribute": (broken_strategies, "cli/a.py: hasattr(t.strategy, 'stage')"),
    "a mock": (broken_mock, "cli/a.py: from unittest.mock import patch"),
    "a test that imports a test": (
        broken_tests, "cli/test_a.py: | text/test_b.py: from ..cli.test_a import f"),
    "a wing that fit reaches by a late import": (
        broken_closure, "cli/fit.py: def f():\n    from ..wings import a | wings/a.py: "),
    "a verb that knows an objective": (
        broken_objectives, "wings/a.py: def f(module): return module.mtp"),
    "a key of an objective in a verb": (broken_objectives, "wings/a.py: key = 'model.mtp.weight'"),
    "a path that is not there": (broken_paths, "cli/a.py: # as in configs/cluster/nowhere.yaml"),
    "a module that is not there": (broken_modules, "cli/a.py: # see parallel.nowhere"),
    "a path in YAML": (broken_paths, "a.yaml: trainer: {}  # see cli/nowhere.py"),
    "a name of a wing that no __all__ has": (
        broken_interface, "errors.py: class E: ... | wings/a.py: from ..errors import E"),
    "a module of which a wing uses an undocumented name": (
        broken_interface, "errors.py: __all__ = ['f'] |"
        " wings/a.py: from .. import errors\nerrors.f()"),
    "a name without documentation": (broken_api, "api.md: ## dist_template\n- `main`: …"),
}  # fmt: skip


@pytest.mark.parametrize("case", BREAKS)
def test_a_rule_fails_where_it_is_broken(case: str, tmp_path: Path) -> None:
    rule, files = BREAKS[case]
    for given in files.split(" |"):
        name, _, text = given.strip(" ").partition(":")
        file = tmp_path / "dist_template" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text.removeprefix(" "), "utf-8")
    assert rule(tmp_path / "dist_template") != []


class OfTorch(nn.Module):
    def parameter_names(self) -> list[str]:
        return list(self._parameters)


def test_a_private_name_of_a_base_class_is_found() -> None:
    assert house.inherited_private_names(sys.modules[__name__]) == {"OfTorch": ["_parameters"]}


CLOCKS = {"time", "monotonic", "perf_counter", "process_time", "thread_time"}
CLOCKS |= {f"{name}_ns" for name in CLOCKS} | {"ru_utime", "ru_stime", "getrusage"}
WAITS = TESTS / "support" / "waiting.py"


def measured_limits(path: Path) -> list[str]:
    """Comparisons of measured time with an upper limit, which a busy machine passes.

    A name that is assigned from a clock is measured, too. A lower limit is none: a wait that is too
    short is a fault on any machine."""
    tree, measured, found = ast.parse(path.read_text("utf-8")), set[str](), []

    def is_measured(node: ast.AST) -> bool:
        for part in ast.walk(node):
            if isinstance(part, ast.Attribute) and reads_clock(part):
                return True
            if isinstance(part, ast.Name) and part.id in measured:
                return True
        return False

    def has_upper_limit(left: ast.AST, operator: ast.cmpop, right: ast.AST) -> bool:
        if isinstance(operator, ast.Lt | ast.LtE):
            return is_measured(left)
        return isinstance(operator, ast.Gt | ast.GtE) and is_measured(right)

    for node in sorted(ast.walk(tree), key=lambda node: getattr(node, "lineno", 0)):
        if isinstance(node, ast.Assign) and is_measured(node.value):
            # a lambda reads the clock later
            if not any(isinstance(part, ast.Lambda) for part in ast.walk(node.value)):
                for target in node.targets:
                    names = [part for part in ast.walk(target) if isinstance(part, ast.Name)]
                    measured.update(name.id for name in names)
        if not isinstance(node, ast.Compare):
            continue
        sides = [node.left, *node.comparators]
        for left, operator, right in zip(sides, node.ops, sides[1:], strict=False):
            if has_upper_limit(left, operator, right):
                found.append(f"{path.name}:{node.lineno}")
    return found


def reads_clock(part: ast.Attribute) -> bool:
    """Whether it is time.monotonic, resource.getrusage, or a field of what that returns."""
    if part.attr not in CLOCKS:
        return False
    is_of_module = isinstance(part.value, ast.Name) and part.value.id in ("time", "resource")
    return part.attr.startswith("ru_") or is_of_module


def test_no_test_compares_measured_time_with_a_limit() -> None:
    """Benchmarks measure. What a test waits for is in tests/support/waiting.py."""
    for path in TESTS.rglob("*.py"):
        if path != WAITS:
            assert measured_limits(path) == []


MEASURES = {
    "import time\nstart = time.monotonic()\nassert time.monotonic() - start < 3": 1,
    "import time\nassert time.monotonic() - start >= LEASE_S": 0,
    "took = time.perf_counter() - start\nassert 2.5 <= took <= 9": 1,
    "used = resource.getrusage(0)\nassert 0.3 > used.ru_utime + used.ru_stime": 1,
    "end = time.time() + 9\nwhile time.time() < end:\n    pass": 1,
    "monkeypatch.setattr(time, 'time', lambda: wall() + 1)\nassert 3 < 4": 0,
}


@pytest.mark.parametrize("text", MEASURES)
def test_the_check_finds_a_measured_limit(text: str, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(text)
    assert len(measured_limits(tmp_path / "test_it.py")) == MEASURES[text]
