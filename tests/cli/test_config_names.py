"""Configurations by their names: the project's, then the library's; the verb `config`."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from dist_template.cli import config_file
from dist_template.errors import InputError
from tests.support.runs import PROJECT, SHIPPED, run

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
    "fsdp2": r"did you mean strategy/fsdp2\?",
    "min": r"did you mean mine\?",
    "nothing/like/it": "; `python -m",
}


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
