"""A checkpoint of any strategy becomes one file, or torch's distributed format, and training goes on from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dist_template.checkpoint import commit
from dist_template.checkpoint.formats import format_of, read_full
from dist_template.rehearsal.record import RunRecord
from dist_template.tools import convert
from tests.support.runs import Workers, only_run, run
from tests.support.strategies import flags_of

# How it was written, into what it is converted, who goes on from that.
CELLS = [
    ("zero2", "file", "ddp"),
    ("zero3", "distributed", "fsdp2"),
    ("fsdp2", "file", "zero3"),
]
STEPS, HALF = 8, 4


class Trainings:
    def __init__(self, folder: Path, flags: list[str]) -> None:
        self.folder = folder
        self.flags = flags
        self._whole: dict[str, RunRecord] = {}

    def whole(self, strategy: str) -> RunRecord:
        """A run to the end, which keeps a checkpoint of its half."""
        if strategy not in self._whole:
            self._whole[strategy] = self(strategy, strategy).check()
        return self._whole[strategy]

    def __call__(self, name: str, strategy: str, *extra: str) -> RunRecord:
        argv = ["fit", *self.flags, *flags_of(strategy), "--trainer.devices=2"]
        if strategy == "zero3":  # or so small a model would stay whole on every rank
            argv += ["--trainer.strategy.init_args.param_persistence_threshold=16"]
        with Workers(2) as workers:
            return workers.run([*argv, f"--run.name={name}", *extra], self.folder / name)

    def convert(self, checkpoint: Path, form: str, output: Path) -> RunRecord:
        argv = ["convert", *self.flags, f"--checkpoint={checkpoint}", f"--format={form}", f"--output={output}"]
        with Workers(1) as workers:
            return workers.run(argv, output.with_suffix(".log"))


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Trainings:
    folder = tmp_path_factory.mktemp("convert")
    flags = [
        f"--run.root={folder / 'runs'}", "--data.source=TextFiles", f"--data.source.paths=[{corpus}/0*.txt]",
        "--data.tokenizer=Bytes", f"--data.cache_dir={folder / 'cache'}", "--data.seq_len=32",
        "--data.global_batch_size=8", "--data.micro_batch_size=4", "--data.validation_share=0", "--data.test_share=0",
        "--model.optim.warmup=2", "--trainer.accelerator=cpu", f"--trainer.max_steps={STEPS}",
        "--trainer.log_every_n_steps=1", "--trainer.logger=false", f"--last_checkpoint.every_n_steps={HALF}",
        "--model.architecture={model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,"
        " num_attention_heads: 2, tie_word_embeddings: true}",
    ]  # fmt: skip
    with Workers(1) as workers:
        workers.run(["prepare", *flags], folder / "prepare").check()
    return Trainings(folder, flags)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "form", "then"), CELLS)
def test_training_goes_on_from_what_was_converted(train: Trainings, strategy: str, form: str, then: str) -> None:
    whole = train.whole(strategy)
    output = train.folder / f"{strategy}-{form}.ckpt"
    told = train.convert(whole.run / "checkpoints" / f"step{HALF:08}.ckpt", form, output).check().log()
    assert f"step {HALF}" in told and "same content" in told
    assert format_of(output) == form and commit.verify(output) is None
    resumed = train(f"{strategy}-{then}", then, f"--ckpt_path={output}").check()
    assert resumed.loss == pytest.approx({s: v for s, v in whole.loss.items() if s > HALF}, rel=1e-5)
    assert "moments start from zero" not in resumed.log()
    assert resumed.learning_rate == pytest.approx({s: v for s, v in whole.learning_rate.items() if s > HALF}, rel=1e-12)


def test_it_takes_the_last_and_never_writes_over_anything(
    flags: list[str], tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    assert run("fit", *flags, "--trainer.max_steps=2", "--model.optim.warmup=1") == 0
    flags = [*flags, "--checkpoint=last", f"--output={tmp_path / 'one.ckpt'}"]
    assert run("convert", *flags, "--format=distributed") == 0
    newest = commit.newest(only_run(tmp_path) / "checkpoints")
    assert newest and not convert.difference(read_full(newest), read_full(tmp_path / "one.ckpt"))
    assert run("convert", *flags, "--format=file") == 2
    assert "exists; give another" in capfd.readouterr().err


def test_what_reads_back_otherwise_is_not_given_a_name(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    def forgets_the_moments(full: dict[str, Any], folder: Path) -> None:
        write_file({key: value for key, value in full.items() if key != "optimizer_states"}, folder)

    write_file = convert.write_file
    assert run("fit", *flags, "--trainer.max_steps=2", "--model.optim.warmup=1") == 0
    monkeypatch.setattr(convert, "write_file", forgets_the_moments)
    output = tmp_path / "one.ckpt"
    assert run("convert", *flags, "--checkpoint=last", "--format=file", f"--output={output}") == 2
    assert "it reads back as another" in capfd.readouterr().err
    assert not output.exists() and not list(tmp_path.glob(".*"))


def moved(value: Any, by: float = 1e-7) -> Any:
    """`value`, its first number or tensor another."""
    if isinstance(value, dict):
        key = next(iter(value))
        return value | {key: moved(value[key], by)}
    return [moved(value[0], by), *value[1:]] if isinstance(value, list) else value + by


@pytest.mark.parametrize("key", ["state_dict", "optimizer_states", "loops"])
def test_any_difference_is_found(key: str) -> None:
    state = {"state": {"weight": {"exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 0.1, "params": ["weight"]}]}
    full: dict[str, Any] = {"state_dict": {"weight": torch.ones(2)}, "optimizer_states": [state], "loops": {"n": [1.0]}}
    full["recent"] = torch.tensor([torch.nan, 1.0])
    assert convert.difference(full, full) == ""
    assert key in convert.difference(full, full | {key: moved(full[key])})
    assert key in convert.difference(full, {k: v for k, v in full.items() if k != key})
