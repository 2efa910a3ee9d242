"""A new project whose module was replaced: its tests train what is there."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dist_template.testing import foreign_keys, is_of_texts, quick_flags, this_project

from .conftest import bake_into

MODULE = """
import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset


class Line(L.LightningModule):
    def __init__(self, width: int = 4):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(2, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 1)
        )

    def training_step(self, batch, batch_idx):
        return (self.net(batch[0]) - batch[1]).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05)


class Points(L.LightningDataModule):
    def __init__(self, batch_size: int = 4):
        super().__init__()
        self.batch_size = batch_size
        points = torch.randn(64, 2, generator=torch.Generator().manual_seed(0))
        self.rows = TensorDataset(points, points.sum(1, keepdim=True))

    def train_dataloader(self):
        return DataLoader(self.rows, self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.rows, self.batch_size)
"""


@pytest.fixture
def replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = bake_into(tmp_path).path
    package = next(folder.glob("*/__main__.py")).parent
    (package / "module.py").write_text(MODULE, "utf-8")
    (package / "data.py").unlink()
    main = package / "__main__.py"
    text = main.read_text("utf-8").replace(".module:LanguageModule", ".module:Line")
    main.write_text(text.replace(".data:DataModule", ".module:Points"), "utf-8")
    monkeypatch.syspath_prepend(str(folder))
    for name in [name for name in sys.modules if name.split(".")[0] == package.name]:
        monkeypatch.delitem(sys.modules, name)
    return folder


def test_the_projects_classes_are_read_from_its_main(replaced: Path) -> None:
    project = this_project(str(replaced / "tests" / "test_project.py"))
    assert (project.module, project.data) == (".module:Line", ".module:Points")
    assert not is_of_texts(project)
    quick = replaced / "configs" / "quickstart.yaml"
    assert {"data.source", "model.optim"} <= {*foreign_keys(project, quick)}
    assert quick_flags(project) == ["--trainer.accelerator=cpu", "--trainer.devices=1"]
    quick.write_text("model: {width: 8}\ntrainer: {accelerator: cpu, devices: 1}\n", "utf-8")
    assert quick_flags(project) == [f"--config={quick}"]


@pytest.mark.nightly
def test_its_tests_train_it_and_name_files_that_are_anothers(replaced: Path) -> None:
    def test() -> Any:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        return subprocess.run(command, cwd=replaced, capture_output=True, text=True, check=False)

    first = test().stdout
    assert first.count("configuration_can_run") == 6 and "3 failed" in first, first
    assert "write your own keys, or delete the file" in first
    for name in ("pretrain", "finetune", "quickstart"):
        (replaced / "configs" / f"{name}.yaml").unlink()
    second = test()
    assert second.returncode == 0, second.stdout
