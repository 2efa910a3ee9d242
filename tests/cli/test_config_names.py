"""Configurations by their names: the project's, then the library's; the verb `config`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from dist_template.cli import config_file
from dist_template.errors import InputError
from tests.support.runs import CONFIGS, PROJECT, SHIPPED, run

FSDP2 = SHIPPED / "strategy" / "fsdp2.yaml"
OWN = "# Mine.\ntrainer: {strategy: {class_path: MeshStrategy, init_args: {tp_size: 2}}}\n"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project's folder with one configuration of its own, the current folder."""
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "mine.yaml").write_text("# My model.\nmodel: {}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def own(project: Path) -> Path:
    """The project's copy of a strategy's file."""
    file = project / "configs" / "strategy" / "fsdp2.yaml"
    file.parent.mkdir()
    file.write_text(OWN)
    return file


SPELLINGS = ["strategy/fsdp2", "strategy/fsdp2.yaml", "configs/strategy/fsdp2.yaml"]
SPELLINGS += [
    "configs/strategy/fsdp2",
    "./configs/strategy/fsdp2.yaml",
    "{}/configs/strategy/fsdp2.yaml",
]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_name_is_the_librarys_file(project: Path, spelling: str) -> None:
    assert config_file.locate(spelling.format(project)) == FSDP2
    assert config_file.read(spelling.format(project)) == yaml.safe_load(FSDP2.read_text())


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_projects_own_file_of_the_name_is_read(own: Path, spelling: str) -> None:
    assert config_file.locate(spelling.format(own.parents[2])).samefile(own)
    assert config_file.read(spelling.format(own.parents[2])) == yaml.safe_load(OWN)


def test_a_path_that_exists_wins(
    own: Path, project: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
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


@pytest.mark.parametrize(
    ("name", "hint"),
    {
        "strategy/fspd2": "did you mean strategy/fsdp2 or ",
        "configs/strategy/zero.yaml": "did you mean strategy/zero",
        "fsdp2": "did you mean strategy/fsdp2?",
        "min": "did you mean mine?",
        "nothing/like/it": "; `python -m",
    }.items(),
)
def test_a_name_that_is_nowhere_is_refused_before_torch(
    project: Path, name: str, hint: str
) -> None:
    for flags in (["--config", name], [f"--config={name}"], ["-c", name]):
        with pytest.raises(InputError) as refused:
            config_file.check(["fit", *flags])
        sentence = str(refused.value)
        assert sentence.startswith(
            f"--config {name} cannot be read, seen from {project}: No such file"
        )
        assert (
            hint in sentence
            and sentence.endswith("config list` has every name")
            and "\n" not in sentence
        )


def resolved(capsys: pytest.CaptureFixture[str], *flags: str) -> Any:
    """The configuration of `fit` with `flags`."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        run("fit", *flags, "--print_config")
    assert stopped.value.code in (0, None)
    return yaml.safe_load(capsys.readouterr().out)


def test_fit_reads_names_and_prefers_the_projects_file(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ["--config", f"{CONFIGS}/quickstart.yaml", "--config"]
    shipped = resolved(capsys, *base, "strategy/fsdp2")["trainer"]["strategy"]
    assert shipped == resolved(capsys, *base, str(FSDP2))["trainer"]["strategy"]
    assert shipped["init_args"]["tp_size"] == 1
    assert run("config", "copy", "strategy/fsdp2") == 0
    copy = project / "configs" / "strategy" / "fsdp2.yaml"
    copy.write_text(copy.read_text().replace("tp_size: 1", "tp_size: 2"))
    for name in ("strategy/fsdp2", "configs/strategy/fsdp2.yaml"):
        assert resolved(capsys, *base, name)["trainer"]["strategy"]["init_args"]["tp_size"] == 2


def test_other_verbs_read_names(
    project: Path, own: Path, flags: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    (project / "launch").symlink_to(PROJECT / "launch")
    launched = [*flags, "-c", "preset/debug", "--config=strategy/ddp", "--on=torchrun"]
    assert run("launch", *launched, "--dry-run") == 0
    assert "--config=strategy/ddp" in capfd.readouterr().out  # found on each machine
    assert run("sweep", *flags, "--space", "sweep/lrr") == 2
    assert "did you mean sweep/lr?" in capfd.readouterr().err
    assert run("plan", *flags, "--config", "strategy/fspd2") == 2
    assert "did you mean strategy/fsdp2" in capfd.readouterr().err
    machine = ["--nodes=1", "--devices=8", "--memory=80GB"]
    assert run("plan", *flags, "--config=strategy/fsdp2", *machine) == 0
    assert "--config strategy/ddp" in capfd.readouterr().out


def test_config_lists_shows_and_copies(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def lines() -> dict[str, str]:
        assert run("config", "list") == 0
        return {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}

    found = lines()
    shipped = {
        path.relative_to(SHIPPED).with_suffix("").as_posix() for path in SHIPPED.rglob("*.yaml")
    }
    assert found.keys() == shipped | {"mine"} and "strategy/fsdp2" in shipped
    assert found["mine"].split() == ["mine", "yours", "My", "model."]
    assert (
        " FSDP2: parameters" in found["strategy/fsdp2"]
        and "overridden" not in found["strategy/fsdp2"]
    )

    assert run("config", "show", "strategy/fsdp2") == 0
    assert capsys.readouterr().out == f"# {FSDP2}\n{FSDP2.read_text()}"
    assert run("config", "copy", "configs/strategy/fsdp2.yaml") == 0
    assert (
        "written to configs/strategy/fsdp2.yaml: from now on --config strategy/fsdp2"
        in capsys.readouterr().out
    )
    copy = project / "configs" / "strategy" / "fsdp2.yaml"
    assert copy.read_text() == FSDP2.read_text()

    copy.write_text(OWN)
    assert "overridden Mine." in lines()["strategy/fsdp2"]
    assert run("config", "show", "strategy/fsdp2") == 0
    assert capsys.readouterr().out == f"# {copy}\n{OWN}"
    for name in ("strategy/fsdp2", str(FSDP2)):
        assert run("config", "copy", name) == 2
        error = capsys.readouterr().err
        assert error.startswith(
            "error: config copy: configs/strategy/fsdp2.yaml is yours already: "
        )
        assert error.count("\n") == 1 and copy.read_text() == OWN


REFUSED = {
    "no action": ([], "action"),
    "another action": (["edit", "mine"], "invalid choice: 'edit'"),
    "no name": (["show"], "config show needs a name"),
    "a name that is nowhere": (["copy", "strategy/fsdp3"], "did you mean strategy/fsdp2"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_config_refuses_in_a_sentence(
    case: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv, sentence = REFUSED[case]
    assert run("config", *argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and sentence in error and error.count("\n") == 1


def test_the_projects_four_files_are_short() -> None:
    files = sorted(CONFIGS.rglob("*.yaml"))
    assert [file.stem for file in files] == ["cluster", "finetune", "pretrain", "quickstart"]
    assert sum(len(file.read_text().splitlines()) for file in files) <= 140
