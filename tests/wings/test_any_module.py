"""Verbs around the training, on a module that is no language model: each works, or says in a
sentence for what it is."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dist_template import InputError, Project
from dist_template.checkpoint.formats import read_full
from dist_template.cli import main as command_line
from dist_template.cli.fit import WithoutTrainer
from dist_template.wings.ship.evaluate import plain
from tests.support.runs import logged, only_run

pytestmark = pytest.mark.slow
HERE = Project("tests.wings", ".test_any_module:Regression", ".test_any_module:Table")


class Regression(L.LightningModule):
    """Shares a weight, which safetensors stores once."""

    def __init__(self, width: int = 8, learning_rate: float = 1e-2) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.first, self.norm = nn.Linear(5, width), nn.BatchNorm1d(width)
        self.second = nn.Linear(width, width, bias=False)
        self.third, self.head = nn.Linear(width, width, bias=False), nn.Linear(width, 1)
        self.third.weight = self.second.weight

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(rows)).tanh()
        return self.head(self.third(self.second(hidden).tanh()))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        error = self(batch[0]) - batch[1]
        self.log("train_mae", error.abs().mean(), prog_bar=True)
        return (error**2).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        error = self(batch[0]) - batch[1]
        self.log_dict({"val_loss": (error**2).mean(), "val_mae": error.abs().mean()})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), self.learning_rate)


class Table(L.LightningDataModule):
    def __init__(self, batch_size: int = 8) -> None:
        super().__init__()
        self.batch_size = batch_size
        rows = torch.randn(96, 5, generator=torch.Generator().manual_seed(0))
        self.rows = TensorDataset(rows, rows.sum(1, keepdim=True).sin())

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.rows, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.rows, self.batch_size)


def run(*argv: str) -> int:
    return command_line.run([*argv], HERE)


def fit(folder: Path, *more: str) -> Path:
    flags = f"--run.root={folder}/runs --run.report=false --trainer.accelerator=cpu"
    flags += " --trainer.devices=1 --trainer.logger=false --trainer.log_every_n_steps=1"
    assert run("fit", *flags.split(), *more) == 0
    return only_run(folder)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fit(tmp_path_factory.mktemp("any"), "--trainer.max_epochs=2")


def refused(capsys: Any, *argv: str) -> str:
    assert run(*argv) == 2
    text = capsys.readouterr().err.strip()
    assert text.count("\n") == 0 and "Traceback" not in text
    return text


def test_each_verb_of_language_models_says_so(trained: Path, capsys: Any) -> None:
    run_ = str(trained)
    assert "promote registers language models" in refused(capsys, "promote", run_)
    assert "builds no language model" in refused(capsys, "serve", run_, "--port=0")
    assert "plan traces language models" in refused(capsys, "plan", "--memory=80GB", "--devices=8")
    require = ("--require", "val_loss better", "--baseline=start")
    assert "--require is for language models" in refused(capsys, "evaluate", run_, *require)
    assert "is for language models" in refused(capsys, "evaluate", run_, "--baseline=gpt2/x")
    where = ("--split=test", "--baseline=start")
    assert "Regression has no test_step" in refused(capsys, "evaluate", run_, *where)
    to = f"--output={trained}/hf"
    assert "--to hf is for language models" in refused(capsys, "export", run_, to, "--to=hf")
    with pytest.raises(SystemExit):
        run("fit", "--config=preset/overfit")
    of_text = "has no argument optim, which is for the library's language models"
    assert of_text in capsys.readouterr().err
    assert run("prepare") == 0
    assert "Table has no prepare_data" in capsys.readouterr().out


def test_weights_are_exported_as_they_were_trained(trained: Path, capsys: Any) -> None:
    output = trained / "weights"
    assert run("export", str(trained), f"--output={output}") == 0, capsys.readouterr().err
    found = load_file(output / "model.safetensors")
    checkpoint = sorted(trained.glob("checkpoints/step*"))[-1]
    expected = read_full(checkpoint)["state_dict"]
    assert len(found) == len(expected) - 1, "a shared weight is stored once"
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name
    card = (output / "README.md").read_text("utf-8")
    assert "load_model(module" in card and "val_loss at the run's end" in card


def test_a_split_is_found_or_named() -> None:
    flags = ["evaluate", "--trainer.accelerator=cpu"]
    cli = WithoutTrainer.of(flags, HERE)
    assert plain.split_of(None, cli) == "validation"
    with pytest.raises(InputError, match="--split test: Regression has no test_step"):
        plain.split_of("test", cli)
    cli.model = L.LightningModule()
    with pytest.raises(InputError, match="evaluate: .* no test_step and .* no validation_step"):
        plain.split_of(None, cli)


def test_a_training_stops_early_by_any_metric_and_resumes_its_count(
    tmp_path: Path, capsys: Any
) -> None:
    preset = ["--config=preset/early_stopping", "--trainer.max_epochs=9"]
    still = ["--model.learning_rate=0.0", "--trainer.callbacks.patience=2"]
    whole = fit(tmp_path, *preset, *still)
    assert max(logged(whole, "train/loss")) == 36, "two validations without an improvement"
    of_another = [*preset, *still, "--trainer.callbacks.monitor=val_mae"]
    first = fit(tmp_path / "b", *of_another, "--trainer.max_epochs=2")
    assert run("fit", f"--config={first}/config.yaml", "--ckpt_path=last",
               "--trainer.max_epochs=9") == 0  # fmt: skip
    assert max(logged(first, "train/loss")) == 36, "the count of validations is restored"
    capsys.readouterr()
    assert run("fit", *preset, f"--run.root={tmp_path}/c", "--trainer.accelerator=cpu",
               "--trainer.callbacks.monitor=eval/loss") == 2  # fmt: skip
    error = capsys.readouterr().err
    assert "'eval/loss', which is not measured; give its monitor one of" in error
    assert "val_loss, val_mae" in error and "Traceback" not in error
