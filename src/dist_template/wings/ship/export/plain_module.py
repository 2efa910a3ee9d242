"""ONNX of any LightningModule: its `forward`, by torch's own exporter, from a batch of its data.

The names of the graph's inputs are those of `forward`'s arguments. The batch dimension, the first
of every tensor, is dynamic; the others are those of the batch."""

from __future__ import annotations

import copy
import inspect
import io
import logging
import warnings
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from ....checkpoint.formats import load_full
from ....errors import InputError, reason
from .gate import EXACT, OTHER
from .trained import GRAPH

LOADERS = ("predict_dataloader", "val_dataloader", "train_dataloader")  # the first that is defined
FURTHER_ROWS = 3  # more than the exported batch has, to compare another batch size
EXAMPLE = """\
import onnxruntime

session = onnxruntime.InferenceSession("model.onnx")
outputs = session.run(None, {})  # arrays, of any number of rows
"""


def load(module: L.LightningModule, checkpoint: Path) -> None:
    """Loads the weights of a checkpoint of any strategy, in evaluation mode."""
    module.configure_model()
    load_full(checkpoint, module)
    module.eval()


def write_plain(module: L.LightningModule, data: L.LightningDataModule, folder: Path) -> str:
    """Writes model.onnx into `folder`; returns in words how it was compared. Raises InputError if
    `forward` is not defined, does not take a batch's tensors, or cannot be exported, and if
    onnxruntime gives other outputs."""
    inputs = _inputs(module, _batch(data))
    name = type(module).__name__
    dynamic = {key: {0: torch.export.Dim.DYNAMIC} for key in inputs}
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), torch.no_grad():
            warnings.simplefilter("ignore")
            logging.disable(logging.WARNING)
            torch.onnx.export(
                module,
                (),
                str(folder / GRAPH),
                kwargs=inputs,
                input_names=[*inputs],
                dynamic_shapes=dynamic,
                dynamo=True,
                external_data=True,
                verbose=False,
            )
    except Exception as error:  # of torch.export and onnxscript
        raise InputError(
            f"--to onnx: forward of {name} cannot be exported by torch ({reason(error)}): edit it"
        ) from error
    finally:
        logging.disable(logging.NOTSET)
    return _compared(module, inputs, folder)


def example(inputs: list[str]) -> str:
    """Returns lines of Python that run the graph, for the model card."""
    return EXAMPLE.replace("{}", "{" + ", ".join(f'"{name}": …' for name in inputs) + "}")


def names_of(folder: Path) -> list[str]:
    """Returns the names of a graph's inputs."""
    import onnxruntime

    session = onnxruntime.InferenceSession(folder / GRAPH)
    return [each.name for each in session.get_inputs()]


def _batch(data: L.LightningDataModule) -> Any:
    data.prepare_data()
    for name in LOADERS:
        if is_overridden(name, data, L.LightningDataModule):
            data.setup({"predict_dataloader": "predict"}.get(name, "fit"))
            loader = getattr(data, name)()
            return next(iter(loader[0] if isinstance(loader, list | tuple) else loader))
    raise InputError(f"--to onnx: {type(data).__name__} has no dataloader to take a batch from")


def _inputs(module: L.LightningModule, batch: Any) -> dict[str, Tensor]:
    """Returns `forward`'s tensors of a batch by their names: of a mapping those keys, of a tuple
    the first ones. Two rows at least: torch.export takes a dimension of 1 for a constant."""
    name = type(module).__name__
    if not is_overridden("forward", module, L.LightningModule):
        raise InputError(f"--to onnx: {name} has no forward: define what the graph computes")
    parameters = inspect.signature(module.forward).parameters.values()
    needed = [each.name for each in parameters if each.default is inspect.Parameter.empty]
    if isinstance(batch, Mapping):
        found = {key: batch[key] for key in needed if key in batch}
    else:
        tensors = [batch] if isinstance(batch, Tensor) else list(batch)
        found = dict(zip(needed, tensors, strict=False))
    if len(found) < len(needed) or not all(isinstance(each, Tensor) for each in found.values()):
        raise InputError(
            f"--to onnx: forward of {name} takes {', '.join(needed)}, which a batch of its data,"
            f" a {type(batch).__name__}, does not have as tensors"
        )
    return {key: torch.cat([each, each])[: max(2, len(each))] for key, each in found.items()}


def _compared(module: L.LightningModule, inputs: dict[str, Tensor], folder: Path) -> str:
    """Compares outputs by onnxruntime for the exported number of rows, for one and for more."""
    import onnxruntime

    onnxruntime.set_default_logger_severity(4)  # an error of a graph is raised, too
    session = onnxruntime.InferenceSession(folder / GRAPH)
    known = {each.name for each in session.get_inputs()}
    num_rows = len(next(iter(inputs.values())))
    largest, sizes = 0.0, (num_rows, 1, num_rows + FURTHER_ROWS)
    for size in sizes:
        given = {key: torch.cat([each] * (1 + size))[:size] for key, each in inputs.items()}
        with torch.no_grad():
            tensors: list[Tensor] = []
            apply_to_collection(copy.deepcopy(module)(**given), Tensor, tensors.append)
        feeds = {key: each.numpy() for key, each in given.items() if key in known}
        try:
            outputs = session.run(None, feeds)
        except Exception as error:  # of pybind11
            raise InputError(
                f"--to onnx: the graph of {type(module).__name__} does not run for {size} rows"
                f" ({reason(error)})"
            ) from error
        for ours, theirs in zip(tensors, outputs, strict=True):
            change = (ours.float() - torch.as_tensor(theirs).float()).abs().max().item()
            if change > EXACT * max(1.0, ours.abs().max().item()):
                raise InputError(f"{OTHER}: its outputs differ by up to {change:.1e}")
            largest = max(largest, change)
    rows = ", ".join(map(str, sizes))
    return f"largest difference to the trained module's outputs {largest:.1e} for {rows} rows"
