"""Any LightningModule of docs/any_module.md, and the model of docs/models.md, train."""

import math
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_template.checkpoint import manifest
from dist_template.checkpoint.formats import read_full
from tests.support.extras import without_extras
from tests.support.runs import OF_ANOTHER_RUN, logged, only_run
from tests.support.tiers import tiers

from .conftest import ROOT, copied_project, fit

PAGE = Path(__file__).parents[2] / "docs" / "any_module.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("any_module")
    section = PAGE.read_text("utf-8")
    module, main, _stream, script = re.findall(
        r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL
    )
    (folder / "images").mkdir()
    for name, text in {"__init__": "", "module": module, "__main__": main}.items():
        (folder / "images" / f"{name}.py").write_text(text, encoding="utf-8")
    imports = "from images.module import Classifier, Images\n"
    (folder / "own.py").write_text(imports + script, encoding="utf-8")
    return folder


def python(folder: Path, *argv: str, code: int = 0, path: str = "") -> str:
    env = {k: v for k, v in os.environ.items() if k not in OF_ANOTHER_RUN}
    env |= {"OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [path]), env["PYTHONPATH"]])
    options: Any = {"capture_output": True, "text": True, "timeout": 300, "check": False}
    found = subprocess.run([sys.executable, *argv], cwd=folder, env=env, **options)
    assert found.returncode == code, found.stdout + found.stderr
    return found.stdout


@pytest.mark.slow
def test_the_page_trains_by_the_command_line(folder: Path) -> None:
    flags = f"""--run.root={folder / "runs"} --run.report=false --trainer.accelerator=cpu
        --trainer.devices=1 --trainer.max_steps=60 --trainer.log_every_n_steps=1
        --trainer.val_check_interval=20"""
    python(folder, "-m", "images", "fit", *flags.split())
    loss = logged(only_run(folder), "train/loss")
    values = [*loss.values()]
    assert list(loss) == list(range(1, 61)) and sum(values[:20]) > sum(values[-20:])
    held_out = logged(only_run(folder), "eval/loss")
    assert held_out[60] < 0.5 * math.log(4), "it learns what holds for other images"


@pytest.mark.slow
@pytest.mark.parametrize("strategy", tiers(["fsdp2", "zero3"], daily=["fsdp2"]))
def test_the_pages_own_trainer_resumes_exactly(folder: Path, strategy: str, tmp_path: Path) -> None:
    """Two processes by Lightning's own launcher; fsdp2 has the core's dependencies alone."""
    path = without_extras(tmp_path) if strategy == "fsdp2" else str(folder)
    text = (folder / "own.py").read_text("utf-8")
    for old, new in (
        ('strategy="fsdp2"', f'strategy="{strategy}"'),
        ('dirpath="checkpoints"', "dirpath=sys.argv[1]"),
        ("Console()", "Console(line_every_s=0)"),
        ("max_steps=20", "max_steps=int(sys.argv[2]), logger=False"),
    ):
        text = text.replace(old, new)
    script = folder / f"{strategy}.py"
    script.write_text(f"import sys\n{text}", encoding="utf-8")
    out = python(folder, str(script), str(tmp_path / "whole"), "20", path=path)
    assert "samples/s" in out and "step 20/20" in out
    python(folder, str(script), str(tmp_path / "cut"), "10", path=path)
    resumed = python(folder, str(script), str(tmp_path / "cut"), "20", path=path)
    assert "step 5/20" not in resumed
    whole = losses(out)
    assert list(whole) == [5, 10, 15, 20]
    assert losses(resumed) == {step: whole[step] for step in (15, 20)}
    ends = []
    for run in ("whole", "cut"):
        newest = manifest.newest(tmp_path / run)
        assert newest and manifest.step_of(newest) == 20
        ends.append(read_full(newest)["state_dict"])
    for name, weight in ends[0].items():
        assert torch.equal(weight, ends[1][name]), name


SIGNALLED = """
import os, signal, sys
import lightning as L
from dist_template import Ended
from dist_template.callbacks import LastCheckpoint, Preemption, Watchdog
from images.module import Classifier, Images

class Signal(L.Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 7:
            os.kill(os.getpid(), signal.SIGTERM)

callbacks = [Watchdog(), Signal(), LastCheckpoint(every_n_steps=10_000), Preemption()]
trainer = L.Trainer(accelerator="cpu", devices=1, max_steps=2_000, logger=False,
    enable_progress_bar=False, default_root_dir=sys.argv[1], callbacks=callbacks)
try:
    trainer.fit(Classifier(), datamodule=Images())
except Ended as ended:
    sys.exit(ended.code)
"""


@pytest.mark.slow
def test_a_signal_ends_ones_own_trainer_with_a_checkpoint(folder: Path, tmp_path: Path) -> None:
    python(folder, "-c", SIGNALLED, str(tmp_path), code=75)
    newest = manifest.newest(tmp_path / "checkpoints")
    assert newest and manifest.step_of(newest) >= 7


def losses(output: str) -> dict[int, str]:
    found = re.findall(r"step (\d+)/20  loss ([\d.]+)", output)
    return {int(step): loss for step, loss in found}


MODELS_PAGE = ROOT / "docs" / "models.md"


def pasted(module: str, page: str) -> str:
    """`module` with the page's classes, and its methods in a subclass of the same name."""
    classes, methods = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    changed = f"class LanguageModule(LanguageModule):\n{textwrap.indent(methods, '    ')}"
    return f"{module}\n{classes}\n{changed}"


def losses_of(project: Path, strategy: str) -> list[float]:
    sizes = r"{width:\ 32,num_layers:\ 2,num_heads:\ 2}"
    flags = f"--model.architecture {sizes} --trainer.max_steps 4 --run.name {strategy}"
    fit(project, f"--config strategy/{strategy} {flags}")
    (folder,) = (project / "runs" / strategy).iterdir()
    return [*logged(folder, "train/loss").values()]


# a minute; test_any_module.py trains models that are not of transformers in `make test`
@pytest.mark.nightly
def test_the_model_of_the_docs_trains_alike_under_ddp_fsdp2_and_zero(tmp_path: Path) -> None:
    project = copied_project(tmp_path)
    module = project / "trainer_dev" / "module.py"
    module.write_text(pasted(module.read_text("utf-8"), MODELS_PAGE.read_text("utf-8")), "utf-8")
    expected = losses_of(project, "ddp")
    assert len(expected) == 4 and expected[-1] < expected[0]
    for strategy in ("fsdp2", "zero2", "zero3"):
        assert losses_of(project, strategy) == pytest.approx(expected, rel=1e-5), strategy
