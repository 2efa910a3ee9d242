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


def test_help_imports_nothing_heavy_and_names_every_verb() -> None:
    code = (
        "import sys; from tests.support.line import main; main(['--help']);"
        "assert not {'torch', 'lightning', 'transformers', 'jsonargparse', 'dist_template.wings'} & set(sys.modules)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    env = os.environ
    shown = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert shown.returncode == 0, shown.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.3, "seconds of CPU"
    (listed,) = re.findall(r"verbs:\n(.*?)\n\n", shown.stdout, re.DOTALL)
    lines = listed.splitlines()
    assert [line.split()[0] for line in lines] == [*verbs()]
    assert all(len(line.split()) > 4 and len(line) <= 120 for line in lines), "each has its line"


@pytest.mark.parametrize("has_venv", [True, False])
def test_a_python_without_the_dependencies_is_refused_by_every_verb(has_venv: bool, tmp_path: Path) -> None:
    """-S: without site-packages, as a Python whose environment is not activated."""
    if has_venv:
        (tmp_path / ".venv/bin").mkdir(parents=True)
        (tmp_path / ".venv/bin/python").touch()
    code = (
        "from dist_template.cli.verbs import verbs; from tests.support.line import command;"
        "print([int(command([verb, '--help'])) for verb in verbs()])"
    )
    env = os.environ
    command = [sys.executable, "-S", "-c", code]
    shown = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    codes = yaml.safe_load(shown.stdout)
    assert codes and set(codes) == {2}, shown.stderr
    cure = (
        "`source .venv/bin/activate`, or start .venv/bin/python -m"
        if has_venv
        else "`(make setup` in .* builds|source /)"
    )
    lines = shown.stderr.splitlines()
    assert len(lines) == len(codes)
    assert all(re.match(f"error: .* has no torch, .* environment: {cure}", line) for line in lines), shown.stderr


def test_every_knob_of_ours_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("fit", "--help")
    lines = capsys.readouterr().out
    ours = [part for part in lines.split("\n  --") if part.startswith(("data.", "model.", "run."))]
    assert len(ours) > 25
    for part in ours:
        name, _, text = part.partition("\n")
        explained = " ".join((name.partition(" ")[2] + " " + text).split())
        assert "help" in name or len(explained.split("(type:")[0].split()) > 3, f"no help: --{part}"


@pytest.mark.parametrize("verb", verbs())
def test_help_begins_with_the_verbs_own_flags(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(verb, "--help")
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: python -m {PACKAGE} {verb} ")
    assert len(shown.split("\n\n")[0].splitlines()) < 9, "the usage is short"
    if verb != "fit":
        assert len(shown.splitlines()) < 50
    if verb in ("validate", "test", "predict"):
        assert "--ckpt_path" in shown and "--weights_only" in shown and "--print_config" in shown
    if verb in ("validate", "test", "predict", "prepare", "export", "rehearse"):
        assert f"Every other key is fit's: see `python -m {PACKAGE} fit --help`" in " ".join(shown.split())
    assert verb != "export" or ("--checkpoint" in shown and "--dtype" in shown)


def test_help_of_fit_begins_with_the_names_of_the_sections(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("fit", "--help")
    _, first, rest = capsys.readouterr().out.split("\n\n", 2)
    start, _, sections = first.partition(": ")
    assert f"{PACKAGE} fit --help SECTION" in start and "  --data.seq_len " in rest
    assert {"trainer", "model", "data", "cluster", "numerics"} < set(sections.split())


@pytest.mark.parametrize(("verb", "section"), [("fit", "run"), ("test", "model.optim"), ("prepare", "data")])
def test_help_of_a_section_has_its_keys_alone(verb: str, section: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(verb, "--help", section)
    keys = re.findall(r"^  --([\w.]+)", capsys.readouterr().out, re.MULTILINE)
    assert len(keys) > 4 and all(f"{key}.".startswith(f"{section}.") for key in keys)


def test_help_of_an_unknown_section_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("fit", "--help", "modle") == 2
    assert f"error: there is no section modle: see `python -m {PACKAGE} fit --help`" in capsys.readouterr().err


def test_later_files_and_flags_win(tmp_path: Path, flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    for name, seq_len in (("a", 64), ("b", 128)):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({"data": {"seq_len": seq_len}}))
    both = [f"--config={tmp_path}/a.yaml", f"--config={tmp_path}/b.yaml"]
    for given, expected in ((both, 128), ([*both, "--data.seq_len=256"], 256)):
        with pytest.raises(SystemExit) as stopped:
            run("fit", *given, "--print_config")
        assert stopped.value.code in (0, None)
        assert yaml.safe_load(capsys.readouterr().out)["data"]["seq_len"] == expected


@pytest.mark.parametrize("path", FIT_CONFIGS, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_every_shipped_file_parses_and_stays_in_its_place(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        run("fit", f"--config={path}", "--print_config")
    assert stopped.value.code in (0, None), capsys.readouterr().err
    content = yaml.safe_load(path.read_text())
    allowed = {"strategy": {"strategy"}, "cluster": {"accelerator", "devices", "num_nodes", "precision"}}
    if path.parent.name in allowed:
        assert set(content) - {path.parent.name} == {"trainer"} and set(content["trainer"]) <= allowed[path.parent.name]
    assert path.read_text().startswith("# "), "the first line says what the file is for"
    if path.parent.name == "strategy":
        assert "\n# When: " in path.read_text() and "\n# Communication" in path.read_text()


EARLIER = {
    "MeshStrategy": {"tp_size": 4, "tp_plan": {"a": "b"}, "cpu_offload": True, "timeout": "00:01:00"},
    "ZeroStrategy": {"stage": 3, "offload_parameters": True, "config": "own.json", "timeout": "00:01:00"},
}


def parsed_strategy(capsys: pytest.CaptureFixture[str], *given: str | Path) -> Any:
    with pytest.raises(SystemExit) as stopped:
        run("fit", *(str(part) for part in given), "--print_config")
    shown = capsys.readouterr()
    assert stopped.value.code in (0, None), shown.err
    return yaml.safe_load(shown.out)["trainer"]["strategy"]


@pytest.mark.parametrize("earlier", EARLIER)
@pytest.mark.parametrize("name", ["fsdp2", "zero2"])
def test_a_strategy_file_leaves_nothing_of_an_earlier_strategy(
    name: str, earlier: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(yaml.safe_dump({"trainer": {"strategy": {"class_path": earlier, "init_args": EARLIER[earlier]}}}))
    path = f"strategy/{name}"
    assert parsed_strategy(capsys, "--config", own, "-c", path) == parsed_strategy(capsys, f"--config={path}")


def test_a_file_and_a_flag_may_change_one_size_of_a_strategy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("trainer: {strategy: {init_args: {dp_replicate_size: 4}}}")
    hsdp = "--config=strategy/hsdp"
    changed = parsed_strategy(capsys, hsdp, "--config", own, "--trainer.strategy.fsdp_size=8")["init_args"]
    assert changed == parsed_strategy(capsys, hsdp)["init_args"] | {"dp_replicate_size": 4, "fsdp_size": 8}
    assert parsed_strategy(capsys, hsdp, "--trainer.strategy=ddp") == "ddp"


@pytest.mark.parametrize("spelling", [["-c", "{}"], ["--config", "{}"], ["--config={}"]])
def test_two_files_from_strategy_are_refused(spelling: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    files = ["strategy/zero3", "configs/strategy/fsdp2.yaml"]
    between = "--config=preset/overfit"
    assert run("fit", f"--config={files[0]}", between, *(part.format(files[1]) for part in spelling)) == 2
    error = capfd.readouterr().err
    assert error == "error: --config strategy/zero3 and --config strategy/fsdp2 are both a strategy: give one of them\n"


@pytest.fixture
def garbage(tmp_path: Path) -> Path:
    path = tmp_path / "garbage.ckpt"
    path.write_bytes(b"not a checkpoint")
    return path


BAD_INPUT = {
    "unknown key": (["--trainer.max_stepz=3"], "max_stepz"),
    "wrong type": (["--data.seq_len=long"], "seq_len"),
    "misspelt class": (["--data.source=TextFile"], "data.source.* no class TextFile"),
    "missing data": (["--data.source.paths=[nowhere/*.txt]"], "nowhere"),
    "sequence longer than the data": (["--data.seq_len=1000000"], "seq_len"),
    "batch that does not divide": (["--data.global_batch_size=9"], "global_batch_size 9 .* micro_batch_size 2"),
    "no such checkpoint": (["--ckpt_path=nowhere.ckpt"], "nowhere.ckpt.* does not exist"),
    "nothing to resume": (["--ckpt_path=last"], "no checkpoint under"),
    "misspelt field": (
        ["--model.architecture={model_type: llama, num_hiden_layers: 2}"],
        "model.architecture.num_hiden_layers is no field of LlamaConfig: did you mean num_hidden_layers?",
    ),
    "unknown model type": (["--model.architecture={model_type: gpt99}"], "gpt99"),
    "model that is not there": (["--model.pretrained=./nowhere"], "nowhere"),
    "no such config file": (["--config=nowhere.yaml"], "nowhere.yaml"),
    "unknown schedule": (["--model.optim.schedule=exponential"], "cosine"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_reported_in_one_sentence(
    case: str, flags: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    wrong, expected = BAD_INPUT[case]
    try:
        code = run("fit", *flags, *wrong)
    except SystemExit as stopped:
        code = stopped.code
    error = capfd.readouterr().err
    assert code == 2, error
    sentence = [line for line in error.splitlines() if line.startswith("error: ")]
    assert len(sentence) == 1 and re.search(expected, sentence[0]), error
    assert "Traceback" not in error and "usage:" not in error
    assert not (tmp_path / "runs").exists(), "a refused run leaves no folder"


def test_a_misspelt_field_is_found_before_the_data_are_tokenized(flags: list[str], tmp_path: Path) -> None:
    wrong = [*BAD_INPUT["misspelt field"][0], f"--data.cache_dir={tmp_path / 'cache'}"]
    assert run("fit", *flags, *wrong) == 2
    assert not (tmp_path / "cache").exists()


def test_a_garbage_checkpoint_is_refused(flags: list[str], garbage: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run("fit", *flags, f"--ckpt_path={garbage}") == 2
    assert "is not a checkpoint" in capfd.readouterr().err
    assert garbage.read_bytes() == b"not a checkpoint"


def test_empty_data_is_refused(flags: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.txt").touch()
    assert run("fit", *flags, f"--data.source.paths=[{tmp_path}/empty.txt]") == 2
    assert capfd.readouterr().err.count("error: ") == 1


def test_an_unknown_verb_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("fitt") == 2
    assert "allowed are fit" in capsys.readouterr().err
