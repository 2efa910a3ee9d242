"""Help of every verb, and how files and flags compose."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from dist_template.cli.verbs import verbs
from tests.support.runs import FIT_CONFIGS, PACKAGE, run


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
