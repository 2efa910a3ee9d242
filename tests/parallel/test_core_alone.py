"""A script trains under FSDP2 where only the core's packages are installed."""

import importlib.metadata
import os
import re
import subprocess
import tomllib
import venv
from pathlib import Path

import pytest

from tests.support.repository import ROOT
from tests.support.runs import OF_ANOTHER_RUN

pytestmark = pytest.mark.slow

SCRIPT = """
import sys

import lightning as L
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import dist_template.strategies
from dist_template.callbacks import LastCheckpoint, RandomState, SampleOrder


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))

    def training_step(self, batch, batch_idx):
        x = batch[0]
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return mse_loss(x, -batch[0])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.01)


if __name__ == "__main__":
    rows = torch.randn(32, 3, generator=torch.Generator().manual_seed(0))
    last = LastCheckpoint(every_n_steps=2, dirpath="checkpoints")
    trainer = L.Trainer(
        strategy="fsdp2",
        accelerator="cpu",
        devices=2,
        max_steps=int(sys.argv[1]),
        logger=False,
        enable_progress_bar=False,
        callbacks=[RandomState(), SampleOrder(), last],
    )
    trainer.fit(Module(), DataLoader(TensorDataset(rows), 4), ckpt_path=last.newest())
    if trainer.is_global_zero:
        lacking = [name for name in ("transformers", "jsonargparse") if name in sys.modules]
        print("step", trainer.global_step, last.newest(), lacking)
"""


def packages_of_the_core() -> set[str]:
    """Returns the packages that the library requires without extras, and what these require."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = list(project["dependencies"])
    found: set[str] = set()
    while wanted:
        requirement, _, marker = wanted.pop().partition(";")
        name = re.split(r"[^\w.-]", requirement)[0].lower().replace("_", "-")
        if name in found or "extra" in marker:
            continue
        try:
            wanted += importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # of another system
        found.add(name)
    return found


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with links to the core's packages, and this checkout."""
    folder = tmp_path_factory.mktemp("core")
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    links = folder / "links"
    links.mkdir()
    for name in {*packages_of_the_core(), "dist-template"}:
        distribution = importlib.metadata.distribution(name)
        tops = {file.parts[0] for file in distribution.files or () if ".." not in file.parts}
        if name == "dist-template":  # an editable install, which would add the whole environment
            tops = {top for top in tops if top.endswith(".dist-info")}
        for top in tops - {"__pycache__"}:
            if not (links / top).exists():
                (links / top).symlink_to(Path(str(distribution.locate_file(top))))
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    (site / "core.pth").write_text(f"{links}\n{ROOT / 'src'}\n")
    return folder / "venv" / "bin" / "python"


def answer(python: Path, folder: Path, *argv: str) -> str:
    env = {k: v for k, v in os.environ.items() if k not in {*OF_ANOTHER_RUN, "PYTHONPATH"}}
    env |= {"OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [python, *argv],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return ran.stdout + ran.stderr


def test_a_script_trains_and_resumes_without_extras(python: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    first = answer(python, tmp_path, "script.py", "3")
    assert "step 3" in first and "[]" in first, first
    second = answer(python, tmp_path, "script.py", "6")
    assert "step 6" in second and "Restor" in second, second


def test_what_an_extra_brings_is_named_in_a_sentence(python: Path, tmp_path: Path) -> None:
    said = answer(python, tmp_path, "-c", "from dist_template.text import TextModule")
    assert "dist_template.text.TextModule needs the package safetensors" in said, said
    assert "pip install" in said and "'transformers" in said, said
    program = "from dist_template import main; main('m:M', 'd:D', None, ['fit'])"
    said = answer(python, tmp_path, "-c", program)
    assert "has no transformers, jsonargparse" in said and "Traceback" not in said, said
