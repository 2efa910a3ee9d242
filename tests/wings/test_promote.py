"""`promote`: the verbs that it starts, what is registered, roll-back, and a killed promotion."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dist_template import Ended, InputError, Project
from dist_template.errors import Exit
from dist_template.wings.ship import promote
from tests.support.wings import Registry

PROJECT = Project("trainer_dev")


class Verbs:
    """Writes what `evaluate` and `export` write, or exits with a code."""

    def __init__(self) -> None:
        self.started: list[list[str]] = []
        self.failing = ""

    def __call__(self, argv: list[str], project: Project) -> None:
        verb, *flags = argv
        self.started.append(argv)
        if verb == "evaluate":
            (Path(flags[0]) / "evaluation").mkdir(exist_ok=True)
            (Path(flags[0]) / "evaluation" / "promotion.json").write_text('{"loss": 1.5}')
        else:
            folder = Path(flags[flags.index("--output") + 1])
            folder.mkdir()
            (folder / "config.json").write_text("{}")
        if verb == self.failing:
            raise Ended(Exit.BAD_INPUT, f"{verb} has a reason")


@pytest.fixture
def verbs(monkeypatch: pytest.MonkeyPatch) -> Verbs:
    verbs = Verbs()
    monkeypatch.setattr(promote.evaluate, "main", verbs)
    monkeypatch.setattr(promote.export, "main", verbs)
    return verbs


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "x" / "1"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("{}")
    return str(folder)


def version(name: str) -> dict[str, Any]:
    return json.loads(Path("registry", name, "version.json").read_text())


def test_a_run_is_compared_with_its_start_and_then_with_the_latest_version(
    run: str, verbs: Verbs, capsys: Any
) -> None:
    promote.main(["promote", run], PROJECT)
    evaluate, export = verbs.started
    assert evaluate[evaluate.index("--baseline") + 1] == "start"
    assert "--require=eval/loss better" in evaluate and "--adapter=merged" in export
    assert version("v1")["figures"] == {"loss": 1.5} and version("v1")["run"] == run
    assert "config.json" in version("v1")["sha256"]

    required = ["acc not worse by 0.1", "loss better"]
    promote.main(["promote", "runs", *(f"--require={each}" for each in required)], PROJECT)
    evaluate = verbs.started[2]
    baseline = evaluate[evaluate.index("--baseline") + 1]
    assert baseline.endswith("registry/v1"), "not the link, which may change meanwhile"
    given = [word for word in evaluate if word.startswith("--require")]
    assert given == [f"--require={each}" for each in required]
    assert version("latest")["required"] == required
    promote.main(["promote", "--roll_back"], PROJECT)
    assert capsys.readouterr().out.endswith("v2 is withdrawn; registry/latest is v1\n")


@pytest.mark.parametrize("verb", ["evaluate", "export"])
def test_a_verb_that_fails_promotes_nothing_and_its_code_is_kept(
    verb: str, run: str, verbs: Any
) -> None:
    verbs.failing = verb
    with pytest.raises(Ended, match=f"{verb} has a reason") as ended:
        promote.main(["promote", run], PROJECT)
    assert ended.value.code == Exit.BAD_INPUT
    assert [*Path().glob("registry/*")] == []


def promoted(registry: Registry, *texts: str) -> list[str]:
    names = []
    for text in texts:
        folder = registry.folder / f".{text}"
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_text(text)
        names.append(registry.add(folder, {"run": text}).name)
    return names


def test_a_roll_back_withdraws_a_version_and_its_number_is_not_used_again(tmp_path: Path) -> None:
    registry = Registry(tmp_path / "registry")
    assert registry.latest is None
    with pytest.raises(InputError, match="has no version: promote a run first"):
        registry.roll_back()
    assert promoted(registry, "a", "b", "c") == ["v1", "v2", "v3"]
    first = json.loads((registry.folder / "v1" / "version.json").read_text())
    assert first["sha256"]["model.safetensors"].startswith("ca978112ca1bbdca")  # of "a", FIPS 180-2
    assert [path.name for path in registry.roll_back()] == ["v3", "v2"]
    assert promoted(registry, "d") == ["v4"]
    assert [path.name for path in registry.roll_back()] == ["v4", "v2"], "v3 stays withdrawn"
    registry.roll_back()
    with pytest.raises(InputError, match="v1 is the first version that is not withdrawn"):
        registry.roll_back()
    assert registry.latest == registry.folder / "v1"
    assert (registry.folder / "v4" / "model.safetensors").exists()


def test_a_killed_promotion_leaves_the_latest_version(tmp_path: Path, monkeypatch: Any) -> None:
    def killed(*_: Any) -> Path:
        raise KeyboardInterrupt

    registry = Registry(tmp_path)
    promoted(registry, "a")
    with monkeypatch.context() as patch:
        patch.setattr(Registry, "_point_to", killed)
        with pytest.raises(KeyboardInterrupt):
            promoted(registry, "b")
    assert registry.latest == tmp_path / "v1"
    assert promoted(registry, "c") == ["v3"] and registry.latest == tmp_path / "v3"
    assert (tmp_path / "latest" / "model.safetensors").read_text() == "c"
