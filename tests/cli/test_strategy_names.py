"""Names that a Lightning user gives to `trainer.strategy` do what files of configs/strategy do."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.strategies import StrategyRegistry

from dist_template.cli.strategy_names import NAMES, TAKEN
from tests.support.runs import Workers, logged, only_run, refused, run

FLAGS = "--trainer.strategy"


def strategy_of(capsys: Any, *flags: str) -> Any:
    """The resolved `trainer.strategy` of a command line."""
    with pytest.raises(SystemExit) as ended:
        run("fit", *flags, "--print_config")
    assert ended.value.code == 0
    return yaml.safe_load(capsys.readouterr().out)["trainer"]["strategy"]


@pytest.mark.parametrize("name", NAMES)
def test_a_lightning_name_does_what_the_strategys_file_does(
    name: str, tmp_path: Path, capsys: Any
) -> None:
    """As two words, joined, and in a file; every argument is the file's, but for NAMES'."""
    file, arguments = NAMES[name]
    expected = strategy_of(capsys, f"--config=strategy/{file}")
    expected["init_args"] |= arguments
    assert strategy_of(capsys, FLAGS, name) == expected
    own = tmp_path / "own.yaml"
    own.write_text(yaml.safe_dump({"trainer": {"strategy": name}}))
    assert strategy_of(capsys, f"--config={own}") == expected


def test_lightnings_own_names_are_lightnings(capsys: Any) -> None:
    assert strategy_of(capsys, f"{FLAGS}=ddp") == "ddp"
    ours = {"fsdp", "fsdp_cpu_offload", "deepspeed", "deepspeed_stage_3_offload_nvme"}
    assert ours <= NAMES.keys() & {*StrategyRegistry.available_strategies()}


def test_later_flags_and_files_change_the_named_strategy(tmp_path: Path, capsys: Any) -> None:
    sized = strategy_of(capsys, f"{FLAGS}=fsdp", f"{FLAGS}.fsdp_size=2", f"{FLAGS}.tp_size", "2")
    assert sized["init_args"]["fsdp_size"] == 2 and sized["init_args"]["tp_size"] == 2
    offloaded = [FLAGS, "deepspeed_stage_3_offload", f"{FLAGS}.offload_parameters=false"]
    arguments = strategy_of(capsys, *offloaded)["init_args"]
    assert arguments["offload_optimizer"] and not arguments["offload_parameters"]
    assert strategy_of(capsys, f"{FLAGS}=fsdp", f"{FLAGS}=ddp") == "ddp" and not TAKEN
    own = tmp_path / "own.yaml"
    own.write_text("trainer: {strategy: hsdp}")
    later = strategy_of(capsys, f"--config={own}", f"{FLAGS}=zero3")
    assert later["class_path"].endswith("ZeroStrategy") and "fsdp_size" not in later["init_args"]


def test_a_projects_file_of_that_name_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (tmp_path / "configs" / "strategy").mkdir(parents=True)
    own = "trainer: {strategy: {class_path: MeshStrategy, init_args: {cpu_offload: true}}}"
    (tmp_path / "configs" / "strategy" / "fsdp2.yaml").write_text(own)
    monkeypatch.chdir(tmp_path)
    assert strategy_of(capsys, f"{FLAGS}=fsdp")["init_args"]["cpu_offload"]


@pytest.mark.parametrize(
    "name, near", [("fdsp2", "fsdp2"), ("zero_3", "zero3"), ("dpp", "ddp"), ("FSDP", "fsdp")]
)
def test_an_unknown_name_is_one_sentence(
    name: str, near: str, flags: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    sentence = refused("fit", [*flags, FLAGS, name], capfd)
    assert f"trainer.strategy {name!r} is no strategy; did you mean {near}? Or ddp," in sentence


def test_a_key_of_a_strategy_that_is_only_a_name_is_one_sentence(
    flags: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    sentence = refused("fit", [*flags, f"{FLAGS}=ddp", f"{FLAGS}.config=ds.json"], capfd)
    assert "trainer.strategy is the name 'ddp', which takes no --trainer.strategy.KEY" in sentence
    assert "--deepspeed FILE for a DeepSpeed JSON" in sentence


@pytest.mark.slow
def test_a_named_strategy_trains(flags: list[str], tmp_path: Path) -> None:
    """The losses of the strategy's file, and one line that says what was taken."""
    assert run("prepare", *flags) == 0
    losses = []
    for number, given in enumerate((["--config=strategy/fsdp2"], [FLAGS, "fsdp"])):
        root = tmp_path / str(number)
        changed = [f"--run.root={root}/runs", "--trainer.devices=2", "--trainer.max_steps=2"]
        record = Workers(2).run(["fit", *flags, *changed, *given], root / "record").check()
        line = "trainer.strategy fsdp: --config strategy/fsdp2\n"
        assert record.log(0).count(line) == number
        losses.append(logged(only_run(root), "train/loss"))
    assert losses[0] == losses[1]
