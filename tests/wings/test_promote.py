"""`promote`: which verbs it starts with which flags, and what is registered; the verbs have tests of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dist_template import Ended, InputError, Project
from dist_template.errors import Exit
from dist_template.wings.ship import promote

PROJECT = Project("trainer_dev")


class Verbs:
    """Writes what `evaluate` and `export` write, or exits with a code."""

    def __init__(self) -> None:
        self.started: list[list[str]] = []
        self.failing = ""

    def __call__(self, argv: list[str], project: Project) -> None:
        verb, *flags = argv
        self.started.append([verb, *flags])
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


def given(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def test_a_run_is_compared_with_its_start_and_then_with_the_latest_version(
    run: str, verbs: Verbs
) -> None:
    promote.main(["promote", run], PROJECT)
    evaluate, export = verbs.started
    assert given(evaluate, "--baseline") == "start" and "--require=eval/loss better" in evaluate
    assert "--adapter=merged" in export
    version = json.loads(Path("registry/v1/version.json").read_text())
    assert (
        version["figures"] == {"loss": 1.5}
        and version["run"] == run
        and "config.json" in version["sha256"]
    )

    promote.main(
        ["promote", "runs", "--require", "acc not worse by 0.1", "--require", "loss better"],
        PROJECT,
    )
    evaluate = verbs.started[2]
    assert given(evaluate, "--baseline").endswith("registry/v1"), (
        "not the link, which may change meanwhile"
    )
    assert [word for word in evaluate if word.startswith("--require")] == [
        "--require=acc not worse by 0.1", "--require=loss better",
    ]  # fmt: skip
    assert (
        json.loads(Path("registry/latest/version.json").read_text())["required"][0]
        == "acc not worse by 0.1"
    )


@pytest.mark.parametrize("verb", ["evaluate", "export"])
def test_a_verb_that_fails_promotes_nothing_and_its_code_is_kept(
    verb: str, run: str, verbs: Verbs
) -> None:
    verbs.failing = verb
    with pytest.raises(Ended, match=f"{verb} has a reason") as ended:
        promote.main(["promote", run], PROJECT)
    assert ended.value.code == Exit.BAD_INPUT
    assert [*Path().glob("registry/*")] == []


def test_a_roll_back_serves_the_version_before(run: str, verbs: Verbs, capsys: Any) -> None:
    promote.main(["promote", run], PROJECT)
    promote.main(["promote", run], PROJECT)
    promote.main(["promote", "--roll_back"], PROJECT)
    assert capsys.readouterr().out.endswith("v2 is withdrawn; registry/latest is v1\n")


def test_what_cannot_be_promoted_is_refused(run: str, verbs: Verbs) -> None:
    refused: dict[str, list[Any]] = {
        "promote needs a run": [],
        "is not a run folder": ["registry"],
        "registry.*Not a directory|File exists": [run, "--registry", f"{run}/config.yaml"],
    }
    for sentence, flags in refused.items():
        with pytest.raises(InputError, match=sentence):
            promote.main(["promote", *flags], PROJECT)
    assert not verbs.started
