"""The rules that hold the repository together, and for each rule a small tree that breaks it."""

import re
import sys
from collections.abc import Callable
from importlib import import_module
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

# Lines of Python in the library. Who deletes lowers it; only an issue that names lines adds.
LINES = 25_649
# Title of an issue: the lines that it names.
ADDED = {"A real model, end to end": 900, "At any scale": 1_400, "DeepSeek-V3 as published": 1_000}
ADDED |= {"A GPU's rules on a laptop": 350}

# As a string; entry points name wings in pyproject.toml.
WING_MODULE = r"(dist_template|\.*)\.wings\.|wings\."

# What a reader of `fit` meets, with always-on callbacks and late imports, and of `strategies`.
CLOSURES = {"cli.fit": 11_500, "strategies": 4_500}
# Conditional expressions and comprehensions per 100 statements: of the library, and of a file.
DENSITY, DENSITY_OF_A_FILE = 5.5, 10.0
ANY = 0.1  # share of annotations outside compat

# Module outside compat/: how many private names of other libraries are still to move from it.
PRIVATE: dict[str, int] = {}
INHERITED: dict[str, int] = {}  # class: how many of its base classes'

# Without licence and locks; a project has one CI file of the two.
PROJECT_FILES, PROJECT_LINES = 22, 750
CACHES = {"__pycache__", ".ruff_cache", ".pytest_cache"}
NOT_COUNTED = re.compile(r"LICENSE.*|lock-(cpu|cuda)\.txt|\.gitlab-ci\.yml")

# Names that wings take from the core, and imports of internal names by tests.
WING_NAMES = 60
INTERNALS = 250
INTERFACE = "For wings and packages"  # the section of docs/api.md

PAGES, WORDS, PAGE_LINES = 40, 38_000, 150  # words by `wc -w`
TEST_LINES, BENCHMARK_LINES = 21_000, 1_800
LONG_PAGES = {"api.md": 160}

MOST_PRONOUNS = 10
PROSE = ("src", "docs", "tests", "benchmarks", "zoo", "README.md", "CONTRIBUTING.md")
NOT_REWRITTEN = ("src/dist_template/parallel",)  # remove what has been rewritten


def broken_files(package: Path) -> list[str]:
    """Import cycles between files."""
    return house.cycles(house.graph(package))


def broken_rooms(package: Path) -> list[str]:
    """Import cycles between rooms, arrows upwards, rooms without a place, too many rooms."""
    arrows = house.rooms(package)
    found = house.cycles(arrows) + [
        f"{room} is not in ORDER" for room in arrows.keys() - set(ORDER)
    ]
    for room, targets in arrows.items() if not found else ():
        above = [target for target in targets if ORDER.index(target) < ORDER.index(room)]
        found += [f"{room} imports {target}, above it" for target in above]
    folders = arrows.keys() - {"ground", "public"}
    return found + ([f"{len(folders)} rooms"] if len(folders) > MOST_ROOMS else [])


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


def outside_of(room: str, package: Path) -> dict[str, Path]:
    files = house.modules(package)
    return {name: path for name, path in files.items() if house.room_of(name, path) != room}


def broken_private(package: Path) -> list[str]:
    """Private names of other libraries outside compat/, where there are more than PRIVATE says."""
    found = {
        name: house.private_names(path) for name, path in outside_of("compat", package).items()
    }
    return [f"{name}: {each}" for name, each in found.items() if len(each) > PRIVATE.get(name, 0)]


ASKED = re.compile(r"\b(pp|dp_replicate|fsdp|tp|ep|cp)_size\b|\bpipeline_of\(")


def broken_strategies(package: Path) -> list[str]:
    """Code outside of parallel/ that inspects a strategy: an axis's key, a class, an attribute."""
    found = []
    for name, path in outside_of("parallel", package).items():
        looks = [*ASKED.findall(path.read_text("utf-8")), *house.checks_of_strategies(path)]
        found += [f"{name}: {looks}"] if looks else []
    return found


def broken_mock(package: Path) -> list[str]:
    return [name for name, path in house.modules(package).items() if house.uses_mock(path)]


def broken_tests(tests: Path) -> list[str]:
    """Tests that another test module imports; support/ or a conftest.py has what several share."""
    arrows = [(name, target) for name, targets in house.graph(tests).items() for target in targets]
    return [f"{arrow}" for arrow in arrows if arrow[1].rpartition(".")[2].startswith("test_")]


def broken_size(package: Path) -> list[str]:
    """The library's size, where it is above the limit."""
    found = house.lines(package.rglob("*.py"))
    return [f"{found} lines"] if found > LINES + sum(ADDED.values()) else []


def broken_project(project: Path) -> list[str]:
    """The generated project's size, where it is above the limit."""
    files = [path for path in project.rglob("*") if path.is_file() and not CACHES & set(path.parts)]
    files = [path for path in files if not NOT_COUNTED.fullmatch(path.name)]
    files = [path for path in files if DOCS not in path.resolve().parents]
    found = [f"{len(files)} files"] if len(files) > PROJECT_FILES else []
    return found + ([f"{n} lines"] if (n := house.lines(files)) > PROJECT_LINES else [])


def broken_pages(docs: Path) -> list[str]:
    """Too many pages or words, pages above the limit or their length in the table of exceptions."""
    pages = {page.relative_to(docs).as_posix(): page for page in docs.rglob("*.md")}
    pages.pop("reference.md", None)  # generated, not in git
    lengths = {name: house.lines([page]) for name, page in pages.items()}
    words = sum(len(page.read_text("utf-8").split()) for page in pages.values())
    found = [f"{name}: {n}" for name, n in lengths.items() if n > LONG_PAGES.get(name, PAGE_LINES)]
    is_much = len(pages) > PAGES or words > WORDS
    return found + ([f"{len(pages)} pages, {words} words"] if is_much else [])


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


def broken_sentences(root: Path) -> list[str]:
    """Places of PRONOUNS in Python and in Markdown, where there are more than MOST_PRONOUNS."""
    skipped = {root / name for name in NOT_REWRITTEN}
    found = []
    for path in [file for name in PROSE for file in [root / name, *(root / name).rglob("*")]]:
        is_prose = path.suffix in (".py", ".md") and path.is_file() and not CACHES & set(path.parts)
        if is_prose and not skipped & set(path.parents):
            found += house.pronouns(path)
    return found if len(found) > MOST_PRONOUNS else []


def documented_interface(docs: Path) -> set[str]:
    """Names of the section of docs/api.md, as "module.name"."""
    section = (docs / "api.md").read_text(encoding="utf-8").partition(f"## {INTERFACE}")[2]
    return set(re.findall(r"^- `([\w.]+)`", section, flags=re.MULTILINE))


def broken_interface(package: Path, docs: Path = DOCS) -> list[str]:
    """Names that wings take from the core without `__all__` or docs/api.md, and too many names."""
    names, documented = house.wing_names(package), documented_interface(docs)
    found = [f"{len(names)} names"] if len(names) > WING_NAMES else []
    found += [f"{name} is in no __all__" for name in sorted(names - house.offered(package))]
    return found + [f"docs/api.md: {name}" for name in sorted(names ^ documented)]


def public_names() -> set[str]:
    """Names that docs/api.md documents, as "module.name" below the package."""
    found, page = documented_interface(DOCS), (DOCS / "api.md").read_text(encoding="utf-8")
    for module in re.findall(r"^## (dist_template[\w.]*)", page, re.MULTILINE):
        names = import_module(module).__all__
        found |= {f"{module}.{name}".partition(".")[2] for name in names}
    return found


def broken_internals(tests: Path) -> list[str]:
    """Names that tests import and docs/api.md lacks, where there are more than INTERNALS."""
    found = house.internals(tests, "dist_template", public_names())
    return found if len(found) > INTERNALS else []


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


def broken_closures(package: Path) -> list[str]:
    """Wings in the closure of `fit`, and closures that have more lines than CLOSURES says."""
    files, found = house.modules(package), []
    for root, most in CLOSURES.items():
        roots = {root}
        if root == "cli.fit" and (defaults := files.get("cli.defaults")):
            roots |= {text.partition(":")[0] for text in house.strings(defaults)} & files.keys()
        modules = house.closure(package, roots & files.keys())
        if (lines := house.lines([files[name] for name in modules if name in files])) > most:
            found.append(f"{root} reaches {lines} lines")
        found += [f"{root} reaches {name}" for name in modules if name.startswith("wings")]
    return found


def broken_density(package: Path) -> list[str]:
    """Too many conditional expressions and comprehensions, in the library or in a file."""
    found, all_dense, all_statements = [], 0, 0
    for name, path in house.modules(package).items():
        dense, statements = house.dense(path)
        all_dense, all_statements = all_dense + dense, all_statements + statements
        if statements >= 10 and 100 * dense / statements > DENSITY_OF_A_FILE:
            found.append(f"{name}: {dense} in {statements} statements")
    is_dense = 100 * all_dense > DENSITY * all_statements
    return found + [f"{all_dense} in {all_statements} statements"] * is_dense


def broken_types(package: Path) -> list[str]:
    """The share of `Any` among annotations outside compat/, where it is above ANY."""
    files = outside_of("compat", package).values()
    annotations = [each for path in files for each in house.annotations(path)]
    untyped = sum(map(house.has_any, annotations))
    return [f"{untyped} of {len(annotations)}"] if untyped > ANY * len(annotations) else []


LIBRARY_RULES = [
    broken_closures, broken_density, broken_types, broken_files, broken_rooms, broken_core,
    broken_private, broken_strategies, broken_mock, broken_size, broken_interface,
]  # fmt: skip


@pytest.mark.parametrize("rule", LIBRARY_RULES, ids=lambda rule: rule.__name__)
def test_the_library_keeps_the_rule(rule: Callable[[Path], list[str]]) -> None:
    assert rule(LIBRARY) == []


def test_the_project_the_pages_the_public_names_and_the_tests_keep_theirs() -> None:
    assert broken_project(PROJECT) == [] and broken_pages(DOCS) == [] and broken_api(DOCS) == []
    assert broken_tests(ROOT / "tests") == [] and broken_internals(ROOT / "tests") == []
    for folder in (LIBRARY, PROJECT, *map(ROOT.joinpath, "tests benchmarks zoo hooks".split())):
        assert broken_paths(folder) == [], folder
    assert all(hasattr(dist_template, name) for name in dist_template.__all__)
    assert house.lines((ROOT / "tests").rglob("*.py")) <= TEST_LINES
    assert house.lines((ROOT / "benchmarks").rglob("*.py")) <= BENCHMARK_LINES


def test_sentences_have_nouns() -> None:
    assert broken_sentences(ROOT) == []
    for name in NOT_REWRITTEN:
        found = [house.pronouns(path) for path in (ROOT / name).rglob("*.py")]
        assert any(found), f"{name} is rewritten: remove its entry"


def test_no_class_outside_compat_uses_a_private_name_of_its_base() -> None:
    """Needs imports: `self._x` may be the class's own, or another library's."""
    for name, path in house.modules(LIBRARY).items():
        if house.room_of(name, path) != "compat":
            module = import_module(f"dist_template.{name}".rstrip("."))
            for one, names in house.inherited_private_names(module).items():
                assert len(names) <= INHERITED.get(f"{name}.{one}", 0), (name, one, names)


def test_an_exception_of_a_page_is_needed() -> None:
    assert all(house.lines([DOCS / name]) > PAGE_LINES for name in LONG_PAGES), (
        "a page is short now: remove its entry"
    )


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
    "too many lines": (broken_size, "cli/a.py: " + "\n" * (LINES + sum(ADDED.values()) + 1)),
    "a project of many files": (broken_project, " | ".join(f"{n}.py: " for n in range(60))),
    "a project of many lines": (broken_project, "module.py: " + "\n" * 5_000),
    "many pages": (broken_pages, " | ".join(f"{n}.md: a" for n in range(PAGES + 1))),
    "many words": (broken_pages, "page.md: " + "– " * (WORDS + 1)),
    "a long page": (broken_pages, "page.md: " + "\n" * (PAGE_LINES + 1)),
    "a wing that fit reaches by a late import": (
        broken_closures, "cli/fit.py: def f():\n    from ..wings import a | wings/a.py: "),
    "a callback of every run that is long": (
        broken_closures, "cli/fit.py: | cli/defaults.py: ALL = {'a': 'callbacks.a:A'} |"
        " callbacks/a.py: " + "\n" * (CLOSURES["cli.fit"] + 1)),
    "a dense file": (broken_density, "cli/a.py: " + "x = [y for y in z]\n" * 10),
    "a dense library": (
        broken_density, " | ".join(f"cli/{n}.py: x = [y for y in z]\ny = 1\n" for n in range(5))),
    "arguments without a type": (broken_types, "cli/a.py: def f(x: Any) -> None: ..."),
    "a path that is not there": (broken_paths, "cli/a.py: # as in configs/cluster/nowhere.yaml"),
    "a path in YAML": (broken_paths, "a.yaml: trainer: {}  # see cli/nowhere.py"),
    "pronouns in place of nouns": (
        broken_sentences, "docs/page.md: " + "Its losses are those of one process.\n" * 11),
    "a name of a wing that no __all__ has": (
        broken_interface, "errors.py: class E: ... | wings/a.py: from ..errors import E"),
    "a module of which a wing uses an undocumented name": (
        broken_interface, "errors.py: __all__ = ['f'] |"
        " wings/a.py: from .. import errors\nerrors.f()"),
    "many internal names in tests": (
        broken_internals, " | ".join(
            f"test_{n}.py: from dist_template.layout import PART" for n in range(INTERNALS + 1))),
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
