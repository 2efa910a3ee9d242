"""The command line: it answers quickly, composes files, and reports bad input in one sentence."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from dist_template.cli.verbs import verbs
from tests.support.runs import FIT_CONFIGS, PACKAGE, run


def python(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    options |= {"env": os.environ, "capture_output": True, "text": True}
    return subprocess.run([sys.executable, *arguments], check=False, **options)


def test_help_imports_nothing_heavy_and_names_every_verb() -> None:
    code = (
        "import sys; from tests.support.line import main; main(['--help']); assert not {'torch',"
        " 'lightning', 'transformers', 'jsonargparse', 'dist_template.wings'} & set(sys.modules)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    shown = python("-c", code)
    assert shown.returncode == 0, shown.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    took_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert took_s < 0.3, "seconds of CPU"
    (listed,) = re.findall(r"verbs:\n(.*?)\n\n", shown.stdout, re.DOTALL)
    lines = listed.splitlines()
    assert [line.split()[0] for line in lines] == [*verbs()]
    assert all(len(line.split()) > 4 and len(line) <= 120 for line in lines), "each has its line"


@pytest.mark.parametrize("has_venv", [True, False])
def test_every_verb_refuses_a_python_without_packages(has_venv: bool, tmp_path: Path) -> None:
    """-S: without site-packages, as a Python whose environment is not activated."""
    cure = "`(make setup` in .* builds|source /)"
    if has_venv:
        (tmp_path / ".venv/bin").mkdir(parents=True)
        (tmp_path / ".venv/bin/python").touch()
        cure = "`source .venv/bin/activate`, or start .venv/bin/python -m"
    code = (
        "from dist_template.cli.verbs import verbs; from tests.support.line import command;"
        "print([int(command([verb, '--help'])) for verb in verbs()])"
    )
    shown = python("-S", "-c", code, cwd=tmp_path)
    codes, lines = yaml.safe_load(shown.stdout), shown.stderr.splitlines()
    assert codes and set(codes) == {2} and len(lines) == len(codes), shown.stderr
    said = re.compile(f"error: .* has no torch, .* environment: {cure}")
    assert all(said.match(line) for line in lines), shown.stderr


def test_every_knob_of_ours_is_explained(capsys: Any) -> None:
    parts = shown_help(capsys, "fit").split("\n  --")
    ours = [part for part in parts if part.startswith(("data.", "model.", "run."))]
    assert len(ours) > 25
    for part in ours:
        name, _, text = part.partition("\n")
        explained = " ".join((name.partition(" ")[2] + " " + text).split())
        assert "help" in name or len(explained.split("(type:")[0].split()) > 3, f"no help: --{part}"


def shown_help(capsys: Any, *words: str) -> str:
    with pytest.raises(SystemExit):
        run(words[0], "--help", *words[1:])
    return capsys.readouterr().out


@pytest.mark.parametrize("verb", verbs())
def test_help_begins_with_the_verbs_own_flags(verb: str, capsys: Any) -> None:
    shown = shown_help(capsys, verb)
    assert shown.startswith(f"usage: python -m {PACKAGE} {verb} ")
    assert len(shown.split("\n\n")[0].splitlines()) < 9, "the usage is short"
    if verb != "fit":
        assert len(shown.splitlines()) < 50
    if verb in ("validate", "test", "predict"):
        assert "--ckpt_path" in shown and "--weights_only" in shown and "--print_config" in shown
    if verb in ("validate", "test", "predict", "prepare", "export", "rehearse"):
        rest = f"Every other key is fit's: see `python -m {PACKAGE} fit --help`"
        assert rest in " ".join(shown.split())


def test_help_of_fit_has_sections_each_with_its_keys_alone(capsys: Any) -> None:
    _, first, rest = shown_help(capsys, "fit").split("\n\n", 2)
    start, _, sections = first.partition(": ")
    assert f"{PACKAGE} fit --help SECTION" in start and "  --data.seq_len " in rest
    assert {"trainer", "model", "data", "cluster", "numerics"} < set(sections.split())
    for verb, section in (("fit", "run"), ("test", "model.optim"), ("prepare", "data")):
        keys = re.findall(r"^  --([\w.]+)", shown_help(capsys, verb, section), re.MULTILINE)
        assert len(keys) > 4 and all(f"{key}.".startswith(f"{section}.") for key in keys)
    assert run("fit", "--help", "modle") == 2
    assert "error: there is no section modle: see" in capsys.readouterr().err


def test_later_files_and_flags_win(tmp_path: Path, flags: list[str], capsys: Any) -> None:
    for name, seq_len in (("a", 64), ("b", 128)):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({"data": {"seq_len": seq_len}}))
    both = [f"--config={tmp_path}/a.yaml", f"--config={tmp_path}/b.yaml"]
    for given, expected in ((both, 128), ([*both, "--data.seq_len=256"], 256)):
        with pytest.raises(SystemExit) as stopped:
            run("fit", *given, "--print_config")
        assert stopped.value.code in (0, None)
        assert yaml.safe_load(capsys.readouterr().out)["data"]["seq_len"] == expected


@pytest.mark.parametrize("path", FIT_CONFIGS, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_every_shipped_file_parses_and_stays_in_its_place(path: Path, capsys: Any) -> None:
    with pytest.raises(SystemExit) as stopped:
        run("fit", f"--config={path}", "--print_config")
    assert stopped.value.code in (0, None), capsys.readouterr().err
    content = yaml.safe_load(path.read_text())
    allowed = {"strategy": {"strategy"}}
    allowed["cluster"] = {"accelerator", "devices", "num_nodes", "precision"}
    if keys := allowed.get(path.parent.name):
        assert set(content) - {path.parent.name} == {"trainer"} and set(content["trainer"]) <= keys
    assert path.read_text().startswith("# "), "the first line says what the file is for"
    if path.parent.name == "strategy":
        assert "\n# When: " in path.read_text() and "\n# Communication" in path.read_text()


def parsed_strategy(capsys: Any, *given: str | Path) -> Any:
    with pytest.raises(SystemExit) as stopped:
        run("fit", *(str(part) for part in given), "--print_config")
    shown = capsys.readouterr()
    assert stopped.value.code in (0, None), shown.err
    return yaml.safe_load(shown.out)["trainer"]["strategy"]


ZERO = {"stage": 3, "offload_parameters": True, "config": "own.json", "timeout": "00:01:00"}
MESH = {"tp_size": 4, "tp_plan": {"a": "b"}, "cpu_offload": True, "timeout": "00:01:00"}


def test_a_strategy_file_leaves_nothing_of_an_earlier_strategy(tmp_path: Path, capsys: Any) -> None:
    own = tmp_path / "own.yaml"
    cases = (("fsdp2", "ZeroStrategy", ZERO), ("zero2", "MeshStrategy", MESH))
    for name, earlier, arguments in cases:
        strategy = {"class_path": earlier, "init_args": arguments}
        own.write_text(yaml.safe_dump({"trainer": {"strategy": strategy}}))
        path = f"strategy/{name}"
        both = parsed_strategy(capsys, "--config", own, "-c", path)
        assert both == parsed_strategy(capsys, f"--config={path}")


def test_a_file_and_a_flag_may_change_one_size_of_a_strategy(tmp_path: Path, capsys: Any) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("trainer: {strategy: {init_args: {dp_replicate_size: 4}}}")
    hsdp = "--config=strategy/hsdp"
    changed = parsed_strategy(capsys, hsdp, "--config", own, "--trainer.strategy.fsdp_size=8")
    sizes = {"dp_replicate_size": 4, "fsdp_size": 8}
    assert changed["init_args"] == parsed_strategy(capsys, hsdp)["init_args"] | sizes
    assert parsed_strategy(capsys, hsdp, "--trainer.strategy=ddp") == "ddp"


def test_two_files_from_strategy_are_refused(capfd: Any) -> None:
    files = ["--config=strategy/zero3", "--config=preset/overfit"]
    assert run("fit", *files, "-c", "configs/strategy/fsdp2.yaml") == 2
    both = "--config strategy/zero3 and --config strategy/fsdp2"
    assert capfd.readouterr().err == f"error: {both} are both a strategy: give one of them\n"


def test_an_unknown_verb_is_refused(capsys: Any) -> None:
    assert run("fitt") == 2
    assert "allowed are fit" in capsys.readouterr().err
