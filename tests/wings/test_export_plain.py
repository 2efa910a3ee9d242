"""Any LightningModule as an ONNX graph: what onnxruntime computes is compared with torch."""

import re
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
from dist_template.checkpoint.formats import load_full
from dist_template.checkpoint.manifest import agreed
from dist_template.cli import main as command_line
from dist_template.wings.ship.export.plain_module import Call, export, recorded_calls
from tests.support.classifier import CLASSIFIER, PLAIN, Images
from tests.support.tiers import tiers

torch.manual_seed(0)
DRAW = torch.Generator().manual_seed(0)


class Rows(L.LightningDataModule):
    """Rows of a list, in batches of four that `collate` makes."""

    def __init__(self, rows: Any, collate: Any = None, batch_size: int = 4) -> None:
        super().__init__()
        self.rows, self.collate, self.batch_size = rows, collate, batch_size

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.rows, self.batch_size, collate_fn=self.collate)

    val_dataloader = train_dataloader


class Module(L.LightningModule):
    """Calls forward with a whole batch."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("eval/loss", self(batch).float().mean())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        raise AssertionError("a module that validates is not trained")


class Images2(Module):
    """BatchNorm and pooling; the label is no input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.LazyLinear(5), nn.Dropout(0.5),
        )  # fmt: skip
        self.layers(torch.randn(2, 3, 16, 12, generator=DRAW))

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.forward(batch[0])


class Recurrent(Module):
    """Series of any length, with two outputs and a state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 8, 2, batch_first=True), nn.Linear(8, 2)

    def forward(self, series: Tensor) -> dict[str, Any]:
        found, (hidden, _) = self.lstm(series)
        return {"forecast": self.head(found), "states": (hidden.transpose(0, 1), None)}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self(batch)


class Encoder(Module):
    """Tokens of any length with a mask, as keywords."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, *, tokens: Tensor, is_padding: Tensor) -> Tensor:
        found = self.encoder(self.embedding(tokens), src_key_padding_mask=is_padding)
        return found.masked_fill(is_padding[..., None], 0).sum(1).argmax(-1)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self(is_padding=batch["is_padding"], tokens=batch["tokens"])


class Several(Module):
    """A dict as one argument, a number, and a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 6), nn.Linear(3, 6)

    def forward(self, batch: dict[str, Any], scale: float, double: bool = False) -> Any:
        found = self.left(batch["user"]) * self.right(batch["items"][0]) * scale
        return (found * 2 if double else found), found > 0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self(batch, 0.5, double=True)


class Siblings(L.LightningModule):
    """Has no forward, as in docs/any_module.md, but a network `model`; it builds that late."""

    def configure_model(self) -> None:
        self.model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1.0)


def padded(rows: list[Tensor]) -> dict[str, Tensor]:
    tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return {"tokens": tokens, "is_padding": tokens == 0}


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=DRAW)


def rows_of_several() -> list[Any]:
    return [{"user": normal(4), "items": [normal(3)], "label": 1} for _ in range(8)]


LENGTHS = (5, 3, 6, 4, 9, 2, 7, 8)  # the longest of each batch of four: 6, 9
DATA = {
    "cnn": (Images2, lambda: Rows([(normal(3, 16, 12), 1) for _ in range(8)])),
    "lstm": (Recurrent, lambda: Rows([*normal(4, 7, 3), *normal(4, 7, 3)])),
    "encoder": (
        Encoder,
        lambda: Rows([torch.randint(1, 20, (n,), generator=DRAW) for n in LENGTHS], padded),
    ),
    "several inputs": (Several, lambda: Rows(rows_of_several())),
    "no forward": (Siblings, lambda: Rows([*normal(8, 4)])),
    "batch of one": (Siblings, lambda: Rows([*normal(8, 4)], batch_size=1)),
}
GIVEN = {  # inputs of the graph, outputs, and a call of other sizes
    "cnn": ({"images": ["batch", 3, 16, 12]}, ["output"], Call((normal(7, 3, 16, 12),))),
    "lstm": ({"series": ["batch", 7, 3]}, ["forecast", "states.0"], Call((normal(7, 7, 3),))),
    "encoder": (
        {"tokens": ["batch", "size_1"], "is_padding": ["batch", "size_1"]},
        ["output"],
        Call((), padded([torch.randint(1, 20, (n,), generator=DRAW) for n in (13, 1, 4)])),
    ),
    "several inputs": (
        {"batch.user": ["batch", 4], "batch.items.0": ["batch", 3], "batch.label": ["batch"]},
        ["output_0", "output_1"],
        Call(
            ({"user": normal(7, 4), "items": [normal(7, 3)], "label": torch.ones(7).long()}, 0.5),
            {"double": True},
        ),
    ),
    "no forward": ({"input": ["batch", 4]}, ["output"], Call((normal(7, 4),))),
    "batch of one": ({"input": ["batch", 4]}, ["output"], Call((normal(7, 4),))),
}


@pytest.mark.parametrize("kind", tiers(DATA, daily=["cnn", "encoder", "several inputs"]))
def test_a_graph_computes_what_forward_does_in_batches_of_any_size(
    tmp_path: Path, kind: str
) -> None:
    build, data = DATA[kind]
    module: Any = build()
    calls = recorded_calls(module, data())
    exported = export(module, calls, tmp_path)
    assert "difference to the trained model's outputs" in exported.verified
    assert "in batches of 1, 2, 5" in exported.verified
    inputs, outputs, call = GIVEN[kind]
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    assert {one.name: one.shape for one in session.get_inputs()} == inputs
    assert [one.name for one in session.get_outputs()] == outputs == exported.outputs
    network = getattr(module, "model", module).eval()
    with torch.no_grad():
        found = network(*call.args, **call.kwargs)
    expected = Call((found,)).tensors
    feeds = {name: one.numpy() for name, one in zip(inputs, call.tensors, strict=True)}
    for one, other in zip(session.run(None, feeds), expected, strict=True):
        np.testing.assert_allclose(np.asarray(one), other.numpy(), atol=1e-5)


class Fixed(Siblings):
    """Takes batches of four rows alone, or computes others in another way."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, rows: Tensor) -> Tensor:
        if self.kind == "view":
            return self.model(rows.view(4, 4)).view(2, -1)
        return self.model(rows) + (1 if len(rows) == 1 else 0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch).mean()


@pytest.mark.parametrize("kind", ["view", "another for one row"])
def test_a_graph_of_one_batch_size_says_so(tmp_path: Path, kind: str) -> None:
    module = Fixed(kind)
    exported = export(module, recorded_calls(module, Rows([*normal(8, 4)])), tmp_path)
    assert "in batches of 4, the only size that the graph takes" in exported.verified
    assert exported.inputs["rows"][0] == [4, 4]


class Wrong(Siblings):
    """Does with its rows what a test says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.model: Any = nn.Linear(4, 4)

    def configure_model(self) -> None:
        pass

    def forward(self, rows: Tensor) -> Any:
        found = self.model(rows)
        if self.kind == "branch" and found.sum() > 0:
            return found + 1
        if self.kind == "random":
            return found + torch.rand_like(found)
        if self.kind == "operator":
            return torch.ops.dist_template_tests.twice(found)
        if self.kind == "eigenvalues":
            return torch.linalg.eigvals(found.T @ found)
        return found

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch["rows"] if self.kind == "key" else batch).mean()


@torch.library.custom_op("dist_template_tests::twice", mutates_args=())
def twice(rows: Tensor) -> Tensor:
    return rows * 2


@twice.register_fake
def _(rows: Tensor) -> Tensor:
    return torch.empty_like(rows)


REASONS = {
    "branch": "edit it .Could not guard on data-dependent expression",
    "operator": "edit it .No ONNX function found for dist_template_tests.twice.default",
    "random": "computes other outputs for the same inputs, .*: remove random numbers and state",
    "eigenvalues": "edit it .No ONNX function found for aten.linalg_eig.default",
    "key": "calls it; training_step failed: too many indices .*: define forward, and call self",
}


@pytest.mark.parametrize("kind", REASONS)
def test_a_module_that_cannot_be_exported_is_one_sentence(tmp_path: Path, kind: str) -> None:
    module = Wrong(kind)
    with pytest.raises(InputError, match=f"^--to onnx.* Wrong.*{REASONS[kind]}") as error:
        export(module, recorded_calls(module, Rows([*normal(8, 4)])), tmp_path)
    assert "\n" not in str(error.value)


def test_a_graph_of_other_weights_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, write = Siblings(), torch.onnx.export

    def write_others(network: Any, *args: Any, **kwargs: Any) -> None:
        weight = network.network[2].weight
        with torch.no_grad():
            weight.add_(0.01)
        write(network, *args, **kwargs)

    monkeypatch.setattr(torch.onnx, "export", write_others)
    sentence = "the exported folder is not what was trained: its outputs differ by up to "
    with pytest.raises(InputError, match=sentence):
        export(module, recorded_calls(module, Rows([*normal(8, 4)])), tmp_path)


def test_an_example_is_taken_where_no_step_calls_forward(tmp_path: Path) -> None:
    module = Wrong("key")
    module.example_input_array = normal(2, 4)
    (call,) = recorded_calls(module, Rows([*normal(8, 4)]))
    assert call.args[0] is module.example_input_array
    assert export(module, [call], tmp_path).inputs["rows"][0] == ["batch", 4]


@pytest.mark.parametrize("project", tiers([PLAIN, CLASSIFIER], daily=[PLAIN]), ids=["plain", "own"])
def test_the_verb_writes_a_graph_with_its_card(
    tmp_path: Path, project: Project, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a plain module, and of a TrainingModule whose network is none of transformers'."""
    monkeypatch.delenv("DIST_RUN_ID", raising=False)
    monitor = "val_loss" if project is PLAIN else "eval/loss"
    fit = f"""fit --run.root={tmp_path}/runs --run.report=false --trainer.accelerator=cpu
        --trainer.devices=1 --trainer.max_steps=2 --best_checkpoint.monitor={monitor}"""
    assert command_line.run(fit.split(), project) == 0
    (run,) = (tmp_path / "runs" / "default").iterdir()
    folder = tmp_path / "out"
    to_onnx = ["export", str(run), "--to=onnx", f"--output={folder}"]
    assert command_line.run([*to_onnx, "--license=mit"], project) == 0
    verified = "outputs .* in batches of 1, 2, 5 and another batch of the data module"
    assert re.search(verified, capfd.readouterr().out)
    card = (folder / "README.md").read_text("utf-8")
    assert "license: mit" in card and re.search(verified, card) and "library_name: onnx" in card
    assert "text-generation" not in card
    assert (folder / "model.onnx.data").stat().st_size > 4 * 2000
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    found: dict[str, Any] = {}
    with monkeypatch.context() as here:
        here.chdir(folder)
        exec(code, found)
    trained = project.class_of(project.module)()
    recorded_calls(trained, Images())  # builds it
    load_full(agreed(run / "checkpoints"), trained)
    with torch.no_grad():
        expected = trained.eval()(torch.ones(2, 3, 8, 8))
    np.testing.assert_allclose(found["outputs"][0], expected.numpy(), atol=1e-5)
    refused = {"--dtype=float16": "--dtype float16 is for models of transformers"}
    if project is PLAIN:
        refused["--to=hf"] = "or --to onnx for its forward"
    for flag, sentence in refused.items():
        argv = [*to_onnx[:3], f"--output={tmp_path}/other", flag]
        assert command_line.run(argv, project) == 2
        assert sentence in capfd.readouterr().err
    assert {each.name for each in tmp_path.iterdir()} == {"runs", "out"}


pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
