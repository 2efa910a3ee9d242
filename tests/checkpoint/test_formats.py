"""A checkpoint of any strategy is read whole by one process, and nothing in it runs."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_template import InputError
from dist_template.checkpoint.optimizer import numbered
from tests.support.formats import NAMES, REST, Tiny, build_optimizer, step

from tests.support.formats import write_distributed, write_file, write_zero  # isort: skip
from tests.support.library import by_name, formats, read_full


@pytest.fixture
def trained() -> Any:
    """A model and its optimizer after two steps."""
    torch.manual_seed(0)
    model = Tiny()
    optimizer = build_optimizer(model)
    step(model, optimizer)
    step(model, optimizer)
    return model, optimizer


@pytest.fixture(params=["file", "distributed", "zero2", "zero3"])
def checkpoint(request: pytest.FixtureRequest, trained: Any, tmp_path: Path) -> Path:
    model, optimizer = trained
    path, state = tmp_path / "last.ckpt", by_name(optimizer.state_dict(), sum(NAMES, []))
    if request.param == "file":
        write_file(path, model, optimizer)
    elif request.param == "distributed":
        write_distributed(path, model.state_dict(), state, REST)
    else:
        write_zero(path, model, state, int(request.param[-1]))
    return path


def test_every_format_reads_as_the_same_state(checkpoint: Path, trained: Any) -> None:
    full = read_full(checkpoint)
    assert {key: full[key] for key in REST} == REST
    for name, tensor in trained[0].state_dict().items():
        read = full["state_dict"][name]
        assert torch.equal(read, tensor) and read.dtype == tensor.dtype, name
    (state,) = full["optimizer_states"]
    back = numbered(state, NAMES, trained[1].param_groups)
    expected = trained[1].state_dict()
    assert [g["params"] for g in back["param_groups"]] == [[0, 1], [2, 3]]
    assert [g["weight_decay"] for g in back["param_groups"]] == [0.1, 0.0]
    for number, values in expected["state"].items():
        for key, value in values.items():
            assert torch.equal(back["state"][number][key], value), (number, key)


def test_a_header_has_the_shapes_and_the_entries_of_the_whole(checkpoint: Path) -> None:
    """They are compared with the module's before anything is loaded."""
    found, full = formats.format_of(checkpoint), read_full(checkpoint)
    assert found is not None
    metadata, shapes = found.header(checkpoint, None)
    assert shapes == {name: tuple(tensor.shape) for name, tensor in full["state_dict"].items()}
    assert {key: metadata[key] for key in REST} == REST
    assert not {"state_dict", "optimizer_states", "module", "optimizer"} & metadata.keys()


class Touch:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_nothing_in_a_checkpoint_runs(checkpoint: Path, tmp_path: Path) -> None:
    proof = tmp_path / "it ran"
    files = [*checkpoint.rglob("*.pt"), *checkpoint.glob(".metadata")]
    for file in files or [checkpoint]:
        before = file.read_bytes()
        if file.name == ".metadata":
            file.write_bytes(pickle.dumps(Touch(proof)))
        else:
            torch.save(torch.load(file) | {"more": Touch(proof)}, file)
        with pytest.raises(InputError, match="cannot be read"):
            read_full(checkpoint)
        assert not proof.exists(), file.name
        file.write_bytes(before)
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ
    read_full(checkpoint)
