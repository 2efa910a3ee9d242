"""`export --to onnx` of LightningModules that are not ours, by torch's exporter."""

from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dist_template import InputError, Project
from dist_template.cli import main as command_line
from dist_template.wings.ship.export.plain_module import write_plain
from tests.support.classifier import PLAIN

FIT = """--trainer.accelerator=cpu --trainer.devices=1 --trainer.max_steps=2
    --best_checkpoint.monitor=val_loss --run.report=false --trainer.log_every_n_steps=1"""


def typed(project: Project, *argv: str) -> int:
    return command_line.run([*argv], project)


@pytest.mark.slow
def test_a_plain_classifier_exports_to_its_own_outputs(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DIST_RUN_ID", raising=False)
    assert typed(PLAIN, "fit", f"--run.root={tmp_path}/runs", *FIT.split()) == 0
    (run,) = (tmp_path / "runs" / "default").iterdir()
    out = tmp_path / "out"
    assert typed(PLAIN, "export", str(run), "--to=onnx", f"--output={out}") == 0
    printed = capsys.readouterr().out
    assert "largest difference to the trained module's outputs" in printed
    session = onnxruntime.InferenceSession(out / "model.onnx")
    (given,) = session.get_inputs()
    images = torch.randn(7, 3, 8, 8)
    module = PLAIN.class_of(PLAIN.module)()
    newest = sorted((run / "checkpoints").glob("step*.ckpt"))[-1]
    file = newest / "checkpoint.pt" if newest.is_dir() else newest
    module.load_state_dict(torch.load(file, weights_only=False)["state_dict"], strict=False)
    with torch.no_grad():
        expected = module.eval()(images).numpy()
    (found,) = session.run(None, {given.name: images.numpy()})
    assert np.abs(found - expected).max() < 1e-5
    card = (out / "README.md").read_text("utf-8")
    assert "library_name: onnx" in card and "text-generation" not in card
    assert f'session.run(None, {{"{given.name}": …}})' in card
    assert typed(PLAIN, "export", str(run), f"--output={tmp_path}/hf") == 2
    assert "`export --to onnx` exports its forward" in capsys.readouterr().err


class Rows(L.LightningDataModule):
    """A batch as `kind` says, of 4 rows of 5 steps with 6 values, and their lengths."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def train_dataloader(self) -> DataLoader:
        rows = [(torch.randn(5, 6), torch.tensor(3), torch.tensor(1)) for _ in range(4)]
        if self.kind == "mapping":
            return DataLoader([{"steps": a, "length": b, "label": c} for a, b, c in rows], 4)  # ty: ignore[invalid-argument-type]
        return DataLoader([rows[0][0] for _ in rows] if self.kind == "tensor" else rows, 4)  # ty: ignore[invalid-argument-type]


class Recurrent(L.LightningModule):
    """Two inputs and two outputs, in a mapping."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(6, 8, batch_first=True)

    def forward(self, steps: Tensor, length: Tensor) -> dict[str, Tensor]:
        states, (last, _) = self.rnn(steps)
        return {"last": last[0], "scaled": states.sum((1, 2)) / length}


class Encoder(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, steps: Tensor) -> Tensor:
        return self.layers(steps).mean(1)


class Branching(L.LightningModule):
    def forward(self, steps: Tensor) -> Tensor:
        return steps if float(steps.sum()) > 0 else -steps


CASES = [(Recurrent, "mapping"), (Recurrent, "tuple"), (Encoder, "tensor"), (Encoder, "tuple")]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "batch"), CASES)
def test_forwards_of_other_shapes_export(
    kind: type[L.LightningModule], batch: str, tmp_path: Path
) -> None:
    proof = write_plain(kind().eval(), Rows(batch), tmp_path)
    assert "for 4, 1, 7 rows" in proof


class WithoutForward(L.LightningModule):
    pass


WRONG = {
    "forward of Branching cannot be exported by torch": (Branching, "tensor"),
    "WithoutForward has no forward: define what": (WithoutForward, "tensor"),
    "forward of Recurrent takes steps, length, which a batch": (Recurrent, "tensor"),
}


@pytest.mark.slow
@pytest.mark.parametrize("sentence", WRONG)
def test_what_cannot_be_exported_is_one_sentence(sentence: str, tmp_path: Path) -> None:
    kind, batch = WRONG[sentence]
    with pytest.raises(InputError, match=sentence) as refused:
        write_plain(kind(), Rows(batch), tmp_path)
    assert "\n" not in str(refused.value)
