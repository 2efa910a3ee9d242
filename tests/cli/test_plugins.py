"""Broken and hostile packages: each is one line that names it, and the run is not changed."""

import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from jsonargparse import Namespace

from dist_template import InputError, hooks, plugins
from dist_template.checkpoint import formats, protocol
from dist_template.cli.fit import is_logger
from dist_template.cli.verbs import verbs
from dist_template.parallel.rank_view import is_strategy
from dist_template.parallel.spec import REPLACED_GROUPS, is_spec, specs
from dist_template.ranges import Range, checks_of
from dist_template.wings.diagnose import engine
from tests.support.extras import write_metadata
from tests.support.line import command
from tests.support.runs import only_run, refused, run


class Hostile(NamedTuple):
    """A package with one entry point: what its module contains, and what is printed about it; "":
    nothing, in a training."""

    group: str
    source: str | bytes
    said: str
    name: str = "{package}"
    value: str = "{module}"


CALLBACK = "from lightning.pytorch import Callback\nclass Bad(Callback):\n    "
DATACLASS = "from dataclasses import dataclass\n@dataclass\nclass Bad:\n"
SPEC = """
from dist_template.checkpoint.protocol import CheckpointFormat
from dist_template.parallel.spec import Spec


class Bad(Spec):
"""
OF_CLASS = "{module}:Bad"
PACKAGES = {
    # at import
    "raises": Hostile("hooks", "1 / 0", "cannot be imported: ZeroDivisionError: division by zero"),
    "exits": Hostile("hooks", "raise SystemExit(7)", "cannot be imported: SystemExit: 7"),
    "is-no-python": Hostile("hooks", "def x(:", "cannot be imported: SyntaxError: invalid syntax"),
    "is-no-text": Hostile("hooks", b"x = '\xff'", "cannot be imported: SyntaxError"),
    "lacks-a-module": Hostile("hooks", "import nowhere_at_all", "ModuleNotFoundError: No module"),
    "is-missing": Hostile("hooks", "", "ModuleNotFoundError", value="not_here.at_all"),
    "lacks-a-name": Hostile("hooks", "", "cannot be imported: AttributeError", value="{module}:a"),
    "recurses": Hostile("hooks", "def f(): f()\nf()", "cannot be imported: RecursionError"),
    "prints": Hostile("hooks", "print('one\\ntwo')", "printed: one (and 1 more lines)"),
    "is-of-a-base": Hostile("hooks", "class E(BaseException): ...\nraise E('x')", "imported: E: x"),
    "moves": Hostile("hooks", "import os; os.chdir('/')", ""),
    "takes-signals": Hostile("hooks", "import signal\nsignal.signal(15, lambda *_: None)", ""),
    # a hook's call
    "raises-at-start": Hostile(
        "hooks", "def at_start(s, v): s.x.y", "fails in at_start: Attribute"
    ),
    "exits-at-start": Hostile("hooks", "def at_start(s, v): exit()", "in at_start: SystemExit"),
    "takes-nothing": Hostile("hooks", "def at_start(): ...", "fails in at_start: TypeError"),
    "returns-a-number": Hostile("hooks", "def at_start(s, v): return 7", "returns a int, and not"),
    "removes-keys": Hostile(
        "hooks", "def at_start(s, v): del s['run']", "cannot be: ValueError: run.name, run.plotly"
    ),
    "changes-types": Hostile(
        "hooks", "def at_start(s, v): s.run.report = [3]", "has set keys to what they cannot be"
    ),
    "is-no-function": Hostile("hooks", "at_run_end = 3", "fails in at_run_end: TypeError"),
    "fails-at-the-end": Hostile(
        "hooks", "def at_run_end(run, error): exit(3)", "fails in at_run_end: SystemExit: 3"
    ),
    "returns-at-the-end": Hostile(
        "hooks", "def at_run_end(run, error): return 'x'", "returns a str, and not None from at_ru"
    ),
    "aaa-is-called-store": Hostile(
        "hooks", "def at_start(s, v): print('asked')", "printed: asked", name="store"
    ),
    # callbacks
    "is-no-callback": Hostile("callbacks", "", "ModuleNotFoundError", value="nowhere:X"),
    "is-no-class": Hostile(
        "callbacks", "Bad = 3", "3 is no subclass of Lightning's", value=OF_CLASS
    ),
    "needs-an-argument": Hostile(
        "callbacks", f"{CALLBACK}def __init__(self, a: int): ...", "configured", value=OF_CLASS
    ),
    "cannot-be-made": Hostile(
        "callbacks", f"{CALLBACK}def __init__(self): 1 / 0", "created: ZeroDiv", value=OF_CLASS
    ),
    "is-the-trainer": Hostile(
        "callbacks", "", "its 'trainer' of dist_template.callbacks is skipped", name="trainer"
    ),
    # keys of run
    "has-no-keys": Hostile("run_keys", "Bad = 3", "3 is no dataclass", value=OF_CLASS),
    "takes-a-key": Hostile(
        "run_keys", f"{DATACLASS}    store: int = 3", "run.store is a key already", value=OF_CLASS
    ),
    "has-no-default": Hostile(
        "run_keys", f"{DATACLASS}    bad: int", "missing 1 required", value=OF_CLASS
    ),
    # names and values
    "is-fit": Hostile("verbs", "", "its 'fit' of dist_template.verbs is skipped", name="fit"),
    "is-doctor": Hostile("verbs", "", "'doctor' of dist_template.verbs is sk", name="doctor"),
    "has-a-space": Hostile(
        "verbs", "", "'has two' = 'a' of dist_template", name="has two", value="a"
    ),
    "value-has-a-space": Hostile("verbs", "", "'b c' of dist_template.verbs", value="b c"),
    "value-is-empty": Hostile("verbs", "", "= '' of dist_template.verbs is skipped", value=""),
    "is-a-flag": Hostile("verbs", "", "'--help' = 'x' of dist_template", name="--help", value="x"),
    # what a strategy's name chooses
    "is-no-strategy": Hostile("strategies", "Bad = dict", "; give a subclass of", value=OF_CLASS),
    "is-meshs": Hostile("strategies", "", "its 'MeshStrategy' of", name="MeshStrategy"),
    "is-no-logger": Hostile("loggers", "Bad = 3", "give a subclass of Light", value=OF_CLASS),
    "class-raises": Hostile(
        "strategies",
        f"{SPEC}    strategy_class = staticmethod(lambda: 1 / 0)",
        "fails in strategy_class: ZeroDivisionError",
        value=OF_CLASS,
    ),
    "class-is-a-number": Hostile(
        "strategies",
        f"{SPEC}    strategy_class = staticmethod(lambda: 3)",
        "is 3; give a subclass of Lightning's Strategy",
        value=OF_CLASS,
    ),
    "is-no-format": Hostile(
        "strategies",
        f"{SPEC}    format_class = staticmethod(lambda: 3)",
        "is 3; give a subclass of dist_template.checkpoint",
        value=OF_CLASS,
    ),
    "format-raises": Hostile(
        "strategies",
        f"{SPEC}    format_class = staticmethod(lambda: Format)\n\n\n"
        "class Format(CheckpointFormat):\n    is_at = staticmethod(lambda path: path.x)",
        "",
        value=OF_CLASS,
    ),
    # rules of diagnosis
    "rule-exits": Hostile("rules", "def Bad(h): exit(3)", "", value=OF_CLASS),
    "rule-yields-text": Hostile("rules", "def Bad(h): yield 'x'", "", value=OF_CLASS),
    "rule-is-a-number": Hostile("rules", "Bad = 3", "", value=OF_CLASS),
}
KINDS = {"strategies": is_spec, "loggers": is_logger}
PARTS = {"strategy_class": is_strategy, "format_class": protocol.is_format}


def install(folder: Path, package: str, given: Hostile) -> None:
    module = f"of_{package.replace('-', '_')}"
    source = given.source if isinstance(given.source, bytes) else given.source.encode()
    (folder / f"{module}.py").write_bytes(source)
    name, value = (
        text.format(package=package.replace("-", "_"), module=module)
        for text in (given.name, given.value)
    )
    write_metadata(folder, package, {f"dist_template.{given.group}": {name: value}})


def forget() -> None:
    plugins.loaded.cache_clear()
    plugins.loaded_parts.cache_clear()
    plugins._noted.clear()
    hooks._broken.clear()
    engine.registered_rules.cache_clear()
    for name in [name for name in sys.modules if name.startswith("of_")]:
        del sys.modules[name]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    forget()
    yield folder
    forget()


def line_of(package: str, printed: str) -> str:
    """The only line that names the package."""
    lines = printed.splitlines()
    lines = [line for line in lines if re.match(rf"(error: )?(.* package )?{package}[: ]", line)]
    assert len(lines) == 1, (package, printed)
    return lines[0]


HEARTBEAT = """
from __future__ import annotations
from typing import Annotated
from annotated_types import Ge, Interval
from lightning.pytorch import Callback
from dist_template.ranges import Folder, PositiveInt, Range


class Base(Callback):
    def __init__(self, share: Annotated[float, Range(ge=0, lt=1)] = 0.5):
        self.share = share


class Heartbeat(Base):
    def __init__(
        self,
        beats: PositiveInt | None = None,
        ports: list[Annotated[int, Interval(ge=1, le=9)]] = [1],
        times: Annotated[int, Ge(1)] = 2,
        folder: Folder = "x",
        **options: object,
    ) -> None:
        super().__init__(**options)
"""
REFUSED = {  # flags: what is said
    "--heartbeat.beats=0": "heartbeat.beats is 0; give 1 or more",
    "--heartbeat.share=1": "heartbeat.share is 1.0; give 0 or more, below 1",
    "--heartbeat.share=.nan": "heartbeat.share is nan; give 0 or more, below 1",
    "--heartbeat.times=0": "heartbeat.times is 0; give 1 or more",
    "--heartbeat.times=x": "heartbeat.times is 'x': expected an integer",
    "--heartbeat.ports=[3,12]": "heartbeat.ports[1] is 12; give 1 to 9",
    "--heartbeat.folder=": "heartbeat.folder is ''; give a folder",
}


@pytest.mark.parametrize("is_postponed", [True, False])
def test_ranges_of_a_packages_callback_are_checked(
    is_postponed: bool, site: Path, flags: list[str], tmp_path: Path, capfd: Any
) -> None:
    """Of annotated_types, too: jsonargparse gives them to pydantic unless they are postponed."""
    source = HEARTBEAT if is_postponed else HEARTBEAT.replace("from __future__", "# from")
    value = "{module}:Heartbeat"
    install(site, "heartbeat", Hostile("callbacks", source, "", value=value))
    for flag, said in REFUSED.items():
        key, _, text = flag[2:].partition("=")
        section, _, name = key.partition(".")
        (tmp_path / "wrong.yaml").write_text(f"{section}: {{{name}: {text or repr(text)}}}")
        for given in (flag, f"--config={tmp_path}/wrong.yaml"):
            error = refused("fit", [*flags, given], capfd)
            if not is_postponed and name == "times":
                said = said.replace("is 'x': expected", "is x; give")
            if not is_postponed and name == "ports":
                assert "heartbeat.ports" in error and "9" in error
            else:
                assert said in error


def test_a_package_adds_keys_to_run(
    site: Path, flags: list[str], tmp_path: Path, capfd: Any
) -> None:
    """Its hook reads them, their ranges are checked, and config.yaml has them."""
    source = f"""from dist_template.ranges import NonNegativeInt
{DATACLASS}
    tries: NonNegativeInt = 1
def at_start(settings, verb):
    print(f"tries: {{settings.run.tries}}")"""
    install(site, "retries", Hostile("run_keys", source, "", value=OF_CLASS))
    write_metadata(site, "retries-hook", {"dist_template.hooks": {"retries": "of_retries"}})
    error = refused("fit", [*flags, "--run.tries=-1"], capfd)
    assert "run.tries is -1; give 0 or more" in error
    assert "did you mean run.tries?" in refused("fit", [*flags, "--run.triez=2"], capfd)
    (tmp_path / "keys.yaml").write_text("run: {tries: 4, name: retried, report: false}")
    given = [*flags, f"--config={tmp_path}/keys.yaml", "--trainer.max_steps=1"]
    assert run("fit", *given, "--trainer.limit_val_batches=0") == 0
    assert "retries-hook printed: tries: 4" in capfd.readouterr().err
    config = yaml.safe_load((only_run(tmp_path, "retried") / "config.yaml").read_text("utf-8"))
    assert [*config["run"]] == ["name", "root", "report", "plotly", "store", "tries"]


def test_bounds_of_annotated_types_are_a_range() -> None:
    annotated_types = pytest.importorskip("annotated_types")
    metadata = [annotated_types.Gt(0), annotated_types.Le(9), "no bound"]
    (found,) = checks_of(metadata)
    assert isinstance(found, Range)
    assert [found.accepts(value) for value in (0, 1, 9, 10)] == [False, True, True, False]
    assert str(found) == "more than 0, 9 or less" and checks_of(["text"]) == []


@pytest.mark.slow
def test_a_run_with_all_of_them_ends_as_without(
    site: Path, flags: list[str], tmp_path: Path, capfd: Any
) -> None:
    for package, given in PACKAGES.items():
        install(site, package, given)
    (site / "without_metadata-1.0.dist-info").mkdir()
    (site / "without_metadata-1.0.dist-info" / "METADATA").write_text("")
    handlers, folder = [signal.getsignal(number) for number in plugins.HANDLED], Path.cwd()

    store = tmp_path / "store"
    words = ["--trainer.max_steps=3", f"--run.store=file://{store}"]
    assert command(["fit", *flags, *words]) == 0
    printed = capfd.readouterr().err
    for package, given in PACKAGES.items():
        if given.said and given.group in ("hooks", "callbacks", "run_keys"):
            assert given.said in line_of(package, printed)
    assert Path.cwd() == folder
    assert [signal.getsignal(number) for number in plugins.HANDLED] == handlers
    name = only_run(tmp_path).name
    assert [*store.glob(f"*/{name}/checkpoints/step*.ckpt/manifest.json")], "the store is used"

    known = verbs()
    assert known["fit"].point.is_ours and known["doctor"].point.is_ours and "has two" not in known
    for group, is_kind in KINDS.items():
        found = plugins.loaded(f"dist_template.{group}", is_kind)
        assert found and not any("no_strategy" in name or "no_logger" in name for name in found)
    for part, is_kind in PARTS.items():
        found = plugins.loaded_parts(plugins.STRATEGIES, part, is_kind)
        assert {*found} <= {"MeshStrategy", "ZeroStrategy", "format_raises"}
    printed += capfd.readouterr().err
    for package, given in PACKAGES.items():
        if given.said and given.group in ("verbs", *KINDS):
            assert given.said in line_of(package, printed)

    assert formats.format_of(tmp_path) is None
    assert "of_format_raises.Format fails in is_at: " in capfd.readouterr().err
    assert command(["diagnose", str(only_run(tmp_path))]) == 0
    shown = capfd.readouterr().out
    for package, given in PACKAGES.items():
        if given.group == "rules":
            assert f"the rule {package.replace('-', '_')} failed" in shown


def test_a_package_of_an_earlier_version_reads_what_replaces_its_entry_points(
    site: Path, capfd: Any
) -> None:
    for group in REPLACED_GROUPS:
        name = group.partition(".")[2]
        install(site, f"has-{name.replace('_', '-')}", Hostile(name, "", "", name="Own"))
    assert {*specs()} == {"MeshStrategy", "ZeroStrategy"}
    printed = capfd.readouterr().err
    for group in REPLACED_GROUPS:
        said = f"its 'Own' of {group} has no effect: register one Spec as dist_template.strategies"
        assert printed.count(said) == 1


def test_metadata_that_cannot_be_read_hide_no_other_package(site: Path, capfd: Any) -> None:
    broken = site / "without_an_equals_sign-1.0.dist-info"
    broken.mkdir()
    (broken / "entry_points.txt").write_text("[dist_template.hooks]\nnonsense\n")
    install(site, "good", Hostile("verbs", "", ""))
    assert "good" in verbs()
    assert f"in {site}: its entry_points.txt cannot be read" in capfd.readouterr().err


def test_at_start_of_every_package_is_called_and_its_changes_are_printed(
    site: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """`aa` sorts before the store; it had switched it off."""
    sets = "def at_start(settings, verb):\n    settings.run.name += '{0}'\n"
    install(site, "bb", Hostile("hooks", sets.format("B"), "", name="aa"))
    install(site, "aa", Hostile("hooks", sets.format("A"), "", name="zz"))
    seen: list[str] = []
    ours = "dist_template.wings.store.hooks"
    __import__(ours)
    monkeypatch.setattr(sys.modules[ours], "at_start", lambda s, verb: seen.append(s.run.name))
    settings = Namespace(run=Namespace(name="x", store=None))
    hooks.start(settings, "fit", lambda: None)
    assert settings.run.name == "xAB" and seen == ["xAB"], "packages by name, the store last"
    printed = capfd.readouterr().err.splitlines()
    assert printed == [
        "the plug-in zz of the package aa has set run.name to 'xA'",
        "the plug-in aa of the package bb has set run.name to 'xAB'",
    ]


def test_a_hook_may_refuse_the_start(site: Path) -> None:
    source = "from dist_template import InputError\ndef at_start(s, v): raise InputError('no')"
    install(site, "careful", Hostile("hooks", source, ""))
    with pytest.raises(InputError, match="plug-in careful of the package careful refuses .*: no$"):
        hooks.start(Namespace(run=Namespace()), "fit", lambda: None)


def test_files_that_one_hook_does_not_fetch_are_asked_of_the_next(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes = "def fetch(address, files, folder):\n    (folder / 'a').write_text('good')\n"
    install(site, "aa", Hostile("hooks", "def fetch(address): ...", ""))
    install(site, "bb", Hostile("hooks", "def fetch(*_): return 7", ""))
    install(site, "cc", Hostile("hooks", "def fetch(*_): return None", ""))
    install(site, "dd", Hostile("hooks", "def fetch(*_): exit()", ""))
    install(site, "ee", Hostile("hooks", writes, ""))

    def lacking(files: list[str]) -> list[str]:
        return [file for file in files if not (tmp_path / file).exists()]

    assert hooks.fetch("memory://x", ["a"], tmp_path, lacking) == ([], None)
    files, why = hooks.fetch("memory://x", ["a", "b"], tmp_path, lacking)
    assert files == ["b"] and "its b is not here, and the store" in str(why), "it is asked last"


VERBS = {
    "1 / 0": (2, "error: the plug-in bad of the package bad cannot be imported: ZeroDivisionError"),
    "x = 1": (2, "error: the plug-in bad of the package bad: of_bad has no function `main`"),
    "def main(): ...": (1, "the plug-in bad of the package bad fails: TypeError: main() takes 0"),
}


@pytest.mark.parametrize("source", VERBS)
def test_a_verb_that_is_broken_is_a_sentence(source: str, site: Path, capfd: Any) -> None:
    install(site, "bad", Hostile("verbs", source, ""))
    code, said = VERBS[source]
    assert command(["bad"]) == code
    assert said in line_of("bad", capfd.readouterr().err)


def test_a_target_of_launch_that_is_broken_is_a_sentence(
    site: Path, flags: list[str], capfd: Any
) -> None:
    install(site, "bad", Hostile("launch_targets", "Bad = dict", "", value=OF_CLASS))
    assert run("launch", "--on=bad", "--dry-run", *flags) == 2
    assert "the plug-in bad of the package bad is no Target: {}" in capfd.readouterr().err
