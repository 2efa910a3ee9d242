"""Help of every verb; how files and flags compose, and configurations by their names."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from dist_template.cli import config_file
from dist_template.cli.verbs import verbs
from dist_template.errors import InputError
from tests.support.runs import FIT_CONFIGS, PACKAGE, PROJECT, SHIPPED, run


def shown(capsys: Any, *words: str | Path) -> str:
    """What a verb prints instead of its work, with --help or --print_config."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        run(*map(str, words))
    shown = capsys.readouterr()
    assert stopped.value.code in (0, None), shown.err
    return shown.out


@pytest.mark.parametrize("verb", verbs())
def test_help_begins_with_the_verbs_own_flags(verb: str, capsys: Any) -> None:
    page = shown(capsys, verb, "--help")
    assert page.startswith(f"usage: python -m {PACKAGE} {verb} ")
    assert len(page.split("\n\n")[0].splitlines()) < 9, "the usage is short"
    assert verb == "fit" or len(page.splitlines()) < 50
    if verb in ("validate", "test", "predict", "prepare", "export", "rehearse"):
        rest = f"Every other key is fit's: see `python -m {PACKAGE} fit --help`"
        assert rest in " ".join(page.split())


def test_help_of_fit_has_sections_and_explains_every_knob_of_ours(capsys: Any) -> None:
    page = shown(capsys, "fit", "--help")
    _, _, sections = page.split("\n\n", 2)[1].partition(": ")
    assert {"trainer", "model", "data", "cluster", "numerics"} < set(sections.split())
    for part in page.split("\n  --"):
        name, _, text = part.partition("\n")
        explained = f"{name.partition(' ')[2]} {text}".partition("(type:")[0].split()
        is_ours = part.startswith(("data.", "model.", "run."))
        assert not is_ours or "help" in name or len(explained) > 3, f"no help: --{part}"
    for verb, section in (("fit", "run"), ("test", "model.optim"), ("prepare", "data")):
        keys = re.findall(r"^  --([\w.]+)", shown(capsys, verb, "--help", section), re.MULTILINE)
        assert len(keys) > 4 and all(f"{key}.".startswith(f"{section}.") for key in keys)


def parsed(capsys: Any, *flags: str | Path) -> Any:
    return yaml.safe_load(shown(capsys, "fit", *flags, "--print_config"))


@pytest.mark.parametrize("path", FIT_CONFIGS, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_every_shipped_file_parses_and_stays_in_its_place(path: Path, capsys: Any) -> None:
    assert parsed(capsys, f"--config={path}")
    text, folder = path.read_text(), path.parent.name
    allowed = {"strategy": {"strategy"}}
    allowed["cluster"] = {"accelerator", "devices", "num_nodes", "precision"}
    if keys := allowed.get(folder):
        content = yaml.safe_load(text)
        assert set(content) - {folder} == {"trainer"} and set(content["trainer"]) <= keys
    assert text.startswith("# "), "the first line says what the file is for"
    assert folder != "strategy" or ("\n# When: " in text and "\n# Communication" in text)


def test_later_files_and_flags_win(tmp_path: Path, capsys: Any) -> None:
    for name, seq_len in (("a", 64), ("b", 128)):
        (tmp_path / f"{name}.yaml").write_text(f"data: {{seq_len: {seq_len}}}")
    both = [f"--config={tmp_path}/a.yaml", f"--config={tmp_path}/b.yaml"]
    assert parsed(capsys, *both)["data"]["seq_len"] == 128
    assert parsed(capsys, *both, "--data.seq_len=256")["data"]["seq_len"] == 256


ZERO = {"stage": 3, "offload_parameters": True, "config": "own.json", "timeout": "00:01:00"}
MESH = {"tp_size": 4, "tp_plan": {"a": "b"}, "cpu_offload": True, "timeout": "00:01:00"}
EARLIER = {"fsdp2": ("ZeroStrategy", ZERO), "zero2": ("MeshStrategy", MESH)}


@pytest.mark.parametrize("name", EARLIER)
def test_a_strategy_file_replaces_an_earlier_one(name: str, tmp_path: Path, capsys: Any) -> None:
    own = tmp_path / "own.yaml"
    kind, arguments = EARLIER[name]
    strategy = {"class_path": kind, "init_args": arguments}
    own.write_text(yaml.safe_dump({"trainer": {"strategy": strategy}}))
    both = parsed(capsys, "--config", own, "-c", f"strategy/{name}")
    assert both["trainer"] == parsed(capsys, f"--config=strategy/{name}")["trainer"]


def test_a_file_and_a_flag_may_change_one_size_of_a_strategy(tmp_path: Path, capsys: Any) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("trainer: {strategy: {init_args: {dp_replicate_size: 4}}}")
    hsdp = "--config=strategy/hsdp"
    changed = parsed(capsys, hsdp, "--config", own, "--trainer.strategy.fsdp_size=8")
    before = parsed(capsys, hsdp)["trainer"]["strategy"]["init_args"]
    sizes = {"dp_replicate_size": 4, "fsdp_size": 8}
    assert changed["trainer"]["strategy"]["init_args"] == before | sizes
    assert parsed(capsys, hsdp, "--trainer.strategy=ddp")["trainer"]["strategy"] == "ddp"


FSDP2 = SHIPPED / "strategy" / "fsdp2.yaml"
OWN = "# Mine.\ntrainer: {strategy: {class_path: MeshStrategy, init_args: {tp_size: 2}}}\n"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project's folder with one configuration of its own, the current folder."""
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "mine.yaml").write_text("# My model.\nmodel: {}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


SPELLINGS = ["strategy/fsdp2", "strategy/fsdp2.yaml", "configs/strategy/fsdp2"]
SPELLINGS += [f"{folder}configs/strategy/fsdp2.yaml" for folder in ("", "./", "{}/")]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_name_is_the_projects_file_else_the_librarys(project: Path, spelling: str) -> None:
    assert config_file.locate(spelling.format(project)) == FSDP2
    assert config_file.read(spelling.format(project)) == yaml.safe_load(FSDP2.read_text())
    assert run("config", "copy", "strategy/fsdp2") == 0
    own = project / "configs" / "strategy" / "fsdp2.yaml"
    own.write_text(OWN)
    assert config_file.locate(spelling.format(project)).samefile(own)
    assert config_file.read(spelling.format(project)) == yaml.safe_load(OWN)


def test_a_path_that_exists_wins(project: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    (project / "strategy").mkdir()
    (project / "strategy" / "fsdp2").write_text("run: {name: a}")
    assert config_file.read("strategy/fsdp2") == {"run": {"name": "a"}}
    other = tmp_path_factory.mktemp("other") / "configs"
    other.mkdir()
    (other / "mine.yaml").write_text("run: {name: b}")
    assert config_file.read(f"{other}/mine.yaml") == {"run": {"name": "b"}}
    assert config_file.locate("mine") == Path("configs/mine.yaml")
    missing = f"{other}/quickstart.yaml"  # of another project: not replaced by this one's
    assert config_file.locate(missing) == Path(missing)


NOWHERE = {
    "strategy/fspd2": "did you mean strategy/fsdp2 or ",
    "configs/strategy/zero.yaml": "did you mean strategy/zero",
    "fsdp2": r"did you mean strategy/fsdp2\?", "min": r"did you mean mine\?",
    "nothing/like/it": "; `python -m",
}  # fmt: skip


@pytest.mark.parametrize("name", NOWHERE)
def test_a_name_that_is_nowhere_is_refused(project: Path, name: str) -> None:
    start = f"^--config {name} cannot be read, seen from {project}: No such file"
    sentence = f"{start}.*{NOWHERE[name]}.*config list` has every name$"
    with pytest.raises(InputError, match=sentence):
        config_file.read(name)


@pytest.mark.slow
def test_other_verbs_read_names(project: Path, flags: list[str], capfd: Any) -> None:
    (project / "launch").symlink_to(PROJECT / "launch")
    launched = [*flags, "-c", "preset/debug", "--config=strategy/ddp", "--on=torchrun"]
    assert run("launch", *launched, "--dry-run") == 0
    assert "--config=strategy/ddp" in capfd.readouterr().out  # found on each machine
    machine = ["--nodes=1", "--devices=8", "--memory=80GB"]
    assert run("plan", *flags, "--config=strategy/fsdp2", *machine) == 0
    assert "--config strategy/ddp" in capfd.readouterr().out


def test_config_lists_shows_and_copies(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def config(*words: str) -> str:
        assert run("config", *words) == 0
        return capsys.readouterr().out

    def listed() -> dict[str, str]:
        return {line.split()[0]: line for line in config("list").splitlines()}

    shipped = {file.relative_to(SHIPPED).with_suffix("") for file in SHIPPED.rglob("*.yaml")}
    found = listed()
    assert found.keys() == {name.as_posix() for name in shipped} | {"mine"}
    assert found["mine"].split() == ["mine", "yours", "My", "model."]
    assert config("show", "strategy/fsdp2") == f"# {FSDP2}\n{FSDP2.read_text()}"

    written = config("copy", "configs/strategy/fsdp2.yaml")
    assert "to configs/strategy/fsdp2.yaml: from now on --config strategy/fsdp2" in written
    copy = project / "configs" / "strategy" / "fsdp2.yaml"
    assert copy.read_text() == FSDP2.read_text()
    copy.write_text(OWN)
    assert "overridden Mine." in listed()["strategy/fsdp2"]
    assert config("show", "strategy/fsdp2") == f"# {copy}\n{OWN}"
    for name in ("strategy/fsdp2", str(FSDP2)):
        assert run("config", "copy", name) == 2
        assert "config copy: configs/strategy/fsdp2.yaml is yours" in capsys.readouterr().err
        assert copy.read_text() == OWN
