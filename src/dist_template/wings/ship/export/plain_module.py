"""ONNX of any LightningModule: the `forward` of its network, by torch's own exporter.

A module that the library does not know shows by its steps what its network takes: Lightning runs a
step, and the arguments of `forward` are recorded. Their tensors are the inputs of the graph. The
first dimension is dynamic where it is the batch's, and so is each one in which two batches differ.
onnxruntime computes batches of other sizes, and the outputs are compared with torch's. If that
fails, a graph of fixed shapes is tried.

    model.onnx         the graph; protobuf's limit of 2 GB is for this file
    model.onnx.data    its weights"""

from __future__ import annotations

import inspect
import logging
import re
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.utilities.model_helpers import is_overridden
from safetensors.torch import load_file, save_model
from torch import Tensor, nn

from ....checkpoint.formats import load_full
from ....compat.torch import keystr, tree_flatten, tree_flatten_with_path, tree_unflatten
from ....errors import InputError, reason
from ....model.any_module import network_of
from ....model.training_module import TrainingModule
from ....progress import Progress, running
from .gate import EXACT, OTHER
from .trained import GRAPH

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

# Verbs of Lightning's Trainer with their steps, in the order in which they are tried. Training is
# the last: its samples may be augmented, and its steps have side effects.
VERBS = {
    "validate": "validation_step",
    "test": "test_step",
    "predict": "predict_step",
    "fit": "training_step",
}
WEIGHTS = "model.safetensors"
EXPORTED_ROWS = 3  # torch would take a batch of 1 for a constant
COMPARED_ROWS = (1, 2, 5)  # batch sizes other than the exported one
NUMPY = {"tensor(float)": "float32", "tensor(double)": "float64"}  # numpy's names of ONNX' types
KINDS = "float16 float32 float64 int8 int16 int32 int64 uint8 bool"  # which numpy has, too


@dataclass
class Call:
    """The arguments of one call of `forward`."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in tree_flatten(self._tree)[0] if isinstance(leaf, Tensor)]

    @property
    def shapes(self) -> list[torch.Size]:
        return [tensor.shape for tensor in self.tensors]

    def names(self, forward: Any) -> list[str]:
        """Returns a name for each tensor: the parameter of `forward`, then the keys inside."""
        places = [object() for _ in self.tensors]  # keywords may have another order than parameters
        call = self.with_tensors(places)
        given: Any = inspect.signature(forward).bind(*call.args, **call.kwargs).arguments
        pairs = tree_flatten_with_path(dict(given))[0]
        names = {id(leaf): _dotted(keystr(path)) for path, leaf in pairs}
        return [names[id(place)] for place in places]

    def with_tensors(self, tensors: Sequence[Any]) -> Call:
        """Returns the call with others in place of its tensors."""
        leaves, structure = tree_flatten(self._tree)
        replacements = iter(tensors)
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                leaves[index] = next(replacements)
        args, kwargs = tree_unflatten(leaves, structure)
        return Call(args, kwargs)

    def of_rows(self, rows: int) -> Call:
        """Returns the call for a batch of `rows` samples. They repeat, in order: samples may be
        sorted by length."""
        size = _batch_size(self.tensors)
        index = torch.arange(rows) * size // rows
        changed = []
        for tensor in self.tensors:
            if _has_batch(tensor, size):
                tensor = tensor.index_select(0, index)
            changed.append(tensor)
        return self.with_tensors(changed)

    @property
    def _tree(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self.args, self.kwargs


@dataclass
class Exported:
    """What was written: names and shapes of the graph's inputs, names of its outputs, and in words
    how it was compared."""

    inputs: dict[str, tuple[list[int | str], str]]
    outputs: list[str]
    verified: str


class _Flat(nn.Module):
    """Calls a network with a flat list of tensors, and returns one: ONNX knows no structures."""

    def __init__(self, network: nn.Module, call: Call) -> None:
        super().__init__()
        self.network = network
        self.call = call
        self.names: list[str] = []  # of the outputs

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        call = self.call.with_tensors(tensors)
        outputs = self.network(*call.args, **call.kwargs)
        self.names = []
        flat = []
        for path, leaf in tree_flatten_with_path(outputs)[0]:
            if isinstance(leaf, Tensor):
                self.names.append(_output_name(_dotted(keystr(path))))
                flat.append(leaf)
        return flat


def _output_name(path: str) -> str:
    """Returns the name of an output for its place in what `forward` returns."""
    if not path:  # a single tensor
        return "output"
    if path.isdecimal():  # of a tuple
        return f"output_{path}"
    return path


# ---- the command ---------------------------------------------------------------------------------


def is_plain(module: L.LightningModule) -> bool:
    """Returns whether a module's network is not of transformers, so that this file exports it."""
    if not isinstance(module, TrainingModule):
        return True
    return not is_overridden("build_config", module, TrainingModule)


def write_plain(
    module: L.LightningModule, data: L.LightningDataModule, checkpoint: Path, folder: Path
) -> Exported:
    """Writes the module with the weights of the verified `checkpoint` into `folder`, as a graph.
    Raises InputError if it cannot be exported, or the checkpoint is another model's."""
    with running(f"export: batches for forward of {type(module).__name__}"):
        calls = recorded_calls(module, data)
    load_full(checkpoint, module)
    return export(module, calls, folder)


def write_weights(module: L.LightningModule, checkpoint: Path, dtype: str, folder: Path) -> str:
    """Writes the weights and buffers of the verified `checkpoint` as safetensors, under the names
    of the module's state dict, and reads them again. Returns in words how they were verified.
    Raises InputError if the checkpoint is another model's."""
    if is_overridden("configure_model", module, L.LightningModule):
        module.configure_model()
    load_full(checkpoint, module)
    if dtype != "float32":  # the default keeps the module's own types
        module.to(getattr(torch, dtype))
    file = folder / WEIGHTS
    save_model(module, str(file))
    expected, found = module.state_dict(), load_file(file)
    differing = [name for name in found if not torch.equal(found[name], expected[name])]
    if differing:
        raise InputError(f"{WEIGHTS} differs from what was trained, first in {differing[0]}")
    verified = f"{len(found)} tensors read again"
    shared = len(expected) - len(found)
    if shared:
        verified += f", {shared} shared with them"
    return verified


def loading(module: L.LightningModule) -> str:
    """Returns lines of Python that load the weights, for the model card."""
    kind = type(module)
    return f"""\
from safetensors.torch import load_model

from {kind.__module__} import {kind.__qualname__}

module = {kind.__qualname__}(…)  # with the arguments of `model` in the run's config.yaml
load_model(module, "{WEIGHTS}")
module.eval()
"""


def example(exported: Exported) -> str:
    """Returns lines of Python that run the graph, for the model card."""
    feeds = []
    for name, (shape, kind) in exported.inputs.items():
        dtype = NUMPY.get(kind, kind[7:-1])  # tensor(int64): int64
        feeds.append(f'"{name}": np.ones({_example_shape(shape)}, np.{dtype})')
    return f"""\
import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession("{GRAPH}")
outputs = session.run(None, {{{", ".join(feeds)}}})
"""


def recorded_calls(module: L.LightningModule, data: L.LightningDataModule) -> list[Call]:
    """Returns the arguments of `forward` in the first calls of a step, with batches of `data`, as
    Lightning prepares them; else the module's example_input_array. Raises InputError if there are
    none."""
    name, failure = type(module).__name__, ""
    for verb, step in VERBS.items():
        if not is_overridden(step, module, L.LightningModule):
            continue
        try:
            calls = _calls_in(verb, module, data)
        except Exception as error:  # of the user's code, with any batch
            if not failure:
                failure = f"; {step} failed: {reason(error)}"
            continue
        if calls:
            return calls
    example = module.example_input_array
    if example is None:
        raise InputError(
            f"--to onnx exports forward, and no step of {name} calls it{failure}:"
            " define forward, and call self(…) in validation_step; or set example_input_array"
        )
    if isinstance(example, dict):
        return [Call((), example)]
    if not isinstance(example, tuple):
        example = (example,)
    return [Call(example)]


def export(module: L.LightningModule, calls: list[Call], folder: Path) -> Exported:
    """Writes the graph of a module with its weights into `folder`, for calls such as these, and
    compares it by onnxruntime. Raises InputError if the module cannot be exported, or the graph
    does not compute what the module does."""
    name, network = type(module).__name__, _network(module).eval().requires_grad_(False)
    call = calls[0]
    kinds = {str(one.dtype).removeprefix("torch.") for one in call.tensors}
    if not kinds or not kinds <= set(KINDS.split()):
        found = ", ".join(sorted(kinds)) if kinds else "no tensor"
        raise InputError(f"--to onnx: forward of {name} takes {found}: give {KINDS}")
    why = ""
    for is_dynamic in (True, False):
        try:
            others: list[Call] | None = None
            if is_dynamic:
                others = [each for each in calls[1:] if _is_alike(each, call)]
                example = call.of_rows(EXPORTED_ROWS)
                compared = [*map(call.of_rows, COMPARED_ROWS), *others]
            else:
                example = call
                compared = [each for each in calls if each.shapes == call.shapes]
                compared.append(call.with_tensors([_rolled(one) for one in call.tensors]))
            parts = Progress(f"export: outputs of {name}", "batches", len(compared)).over(compared)
            expected = [_torch_outputs(network, each, name) for each in parts]
            with running(f"export: {name} to ONNX"):
                flat = _write_graph(network, example, others, folder)
            difference = _compare(folder, compared, expected)
        except OSError:  # a full disk
            raise
        except Exception as error:  # of the user's code, torch.export, onnxscript and onnxruntime
            if isinstance(error, InputError) and not is_dynamic:
                raise
            why = _cause(error)
            continue
        return _described(folder, flat, difference, len(compared), is_dynamic)
    raise InputError(f"--to onnx: torch.onnx cannot export forward of {name}: edit it ({why})")


# ---- the inputs ----------------------------------------------------------------------------------


class _Enough(Exception):
    """Ends a step: its calls of `forward` are recorded."""


def _network(module: L.LightningModule) -> nn.Module:
    """Returns the module if it defines `forward`, else its `model`."""
    if type(module).forward is not L.LightningModule.forward:
        return module
    return network_of(module)


def _calls_in(verb: str, module: L.LightningModule, data: L.LightningDataModule) -> list[Call]:
    """Runs a verb of Lightning's Trainer until `forward` was called twice, and returns the calls. A
    training stops at its first call, before any weight changes."""
    recorder = _Recorder(limit=1 if verb == "fit" else 2)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        plugins=[LightningEnvironment()],  # not Slurm's: this is one process
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        inference_mode=False,  # torch.export takes no tensors of that mode
        num_sanity_val_steps=0,
        max_steps=1,
        limit_train_batches=1,
        limit_val_batches=2,
        limit_test_batches=2,
        limit_predict_batches=2,
        callbacks=[recorder],
    )
    try:
        with _quiet():
            getattr(trainer, verb)(module, datamodule=data)
    except _Enough:
        pass
    except Exception:
        if not recorder.calls:
            raise  # else a step failed after it had called forward
    finally:
        recorder.remove()
    return recorder.calls


class _Recorder(L.Callback):
    """Records calls of `forward`, also direct ones, which a hook of torch does not see."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.calls: list[Call] = []
        self.network: Any = None

    def start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Replaces `forward`, when configure_model has built the network."""
        self.network = _network(pl_module)
        forward = self.network.forward

        def recorded(*args: Any, **kwargs: Any) -> Any:
            call = Call(args, kwargs)
            self.calls.append(call.with_tensors([one.detach().clone() for one in call.tensors]))
            if len(self.calls) == self.limit:
                raise _Enough
            return forward(*args, **kwargs)

        self.network.forward = recorded

    on_validation_start = on_test_start = on_predict_start = on_train_start = start

    def remove(self) -> None:
        """Restores the class's `forward`."""
        if self.network is not None:
            vars(self.network).pop("forward", None)


@contextmanager
def _quiet() -> Generator[None]:
    """Hides what Lightning, torch and onnxscript report: dozens of lines for an export."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def _batch_size(tensors: list[Tensor]) -> int:
    return next((len(one) for one in tensors if one.ndim), 1)


def _has_batch(tensor: Tensor, size: int) -> bool:
    return tensor.ndim > 0 and len(tensor) == size


def _rolled(tensor: Tensor) -> Tensor:
    """Returns other values of the same shape."""
    return tensor.roll(1, 0) if tensor.ndim else tensor


def _is_alike(call: Call, other: Call) -> bool:
    """Returns whether two calls have tensors of the same number, types and numbers of
    dimensions."""
    if len(call.args) != len(other.args) or list(call.kwargs) != list(other.kwargs):
        return False
    kinds = [(tensor.ndim, tensor.dtype) for tensor in call.tensors]
    return kinds == [(tensor.ndim, tensor.dtype) for tensor in other.tensors]


def _dynamic_dimensions(call: Call, others: list[Call]) -> list[dict[int, str]]:
    """Returns the names of the dynamic dimensions of each tensor: the batch, and dimensions in
    which the calls differ. Those that change together have one name."""
    found: list[dict[int, str]] = []
    size = _batch_size(call.tensors)
    names: dict[tuple[int, ...], str] = {}  # by the sizes in all calls
    for index, tensor in enumerate(call.tensors):
        dimensions = {0: "batch"} if _has_batch(tensor, size) else {}
        for axis in range(tensor.ndim):
            sizes = tuple(each.tensors[index].shape[axis] for each in (call, *others))
            if axis not in dimensions and len(set(sizes)) > 1:
                dimensions[axis] = names.setdefault(sizes, f"size_{len(names) + 1}")
        found.append(dimensions)
    return found


def _dotted(path: str) -> str:
    """Returns a name for `['batch'][0].image`, a path of torch's pytree: batch.0.image."""
    return ".".join(re.findall(r"[^\[\]'\".]+", path))


# ---- the graph -----------------------------------------------------------------------------------


def _write_graph(network: nn.Module, call: Call, others: list[Call] | None, folder: Path) -> _Flat:
    """Writes the graph, with a dynamic batch unless `others` is None."""
    flat = _Flat(network, call)
    shapes = None
    if others is not None:
        shapes = {"tensors": tuple(_dynamic_dimensions(call, others))}
    with _quiet(), torch.no_grad():
        flat(*call.tensors)  # sets the outputs' names
        names = list(flat.names)
        torch.onnx.export(
            flat.eval(),
            tuple(call.tensors),
            folder / GRAPH,
            input_names=call.names(network.forward),
            output_names=names,
            dynamic_shapes=shapes,
            dynamo=True,
            external_data=True,
            verbose=False,
        )
    flat.names = names
    return flat


def _torch_outputs(network: nn.Module, call: Call, name: str) -> list[np.ndarray]:
    """Returns the network's outputs. Raises InputError if they are random."""
    flat = _Flat(network, call)

    def outputs() -> list[np.ndarray]:
        with torch.no_grad():
            found = flat(*[tensor.clone() for tensor in call.tensors])
        return [tensor.numpy(force=True) for tensor in found]

    first = outputs()
    for one, other in zip(first, outputs(), strict=True):
        can_be_nan = one.dtype.kind == "f"
        if not np.array_equal(one, other, equal_nan=can_be_nan):
            raise InputError(
                f"--to onnx: {name} computes other outputs for the same inputs, so that no graph"
                " can be compared with it: remove random numbers and state from forward in eval"
                " mode"
            )
    return first


def _session(folder: Path) -> InferenceSession:
    import onnxruntime

    onnxruntime.set_default_logger_severity(4)  # an error is raised, too
    return onnxruntime.InferenceSession(folder / GRAPH, providers=["CPUExecutionProvider"])


def _compare(folder: Path, calls: list[Call], expected: list[list[np.ndarray]]) -> float:
    """Returns the largest difference of the graph's outputs, computed by onnxruntime, to torch's.
    Raises InputError if it is more than rounding."""
    session, largest = _session(folder), 0.0
    inputs = [one.name for one in session.get_inputs()]
    pairs = Progress("export: outputs of the graph", "batches", len(calls))
    for call, outputs in pairs.over(zip(calls, expected, strict=True)):
        tensors = [one.numpy() for one in call.tensors]
        found = session.run(None, dict(zip(inputs, tensors, strict=True)))
        for one, other in zip(found, outputs, strict=True):
            difference = _difference(np.asarray(one), other)
            scale = max(1.0, np.abs(other[np.isfinite(other)].astype(float)).max(initial=0.0))
            if not difference <= EXACT * scale:
                raise InputError(f"{OTHER}: its outputs differ by up to {difference:.1e}")
            largest = max(largest, difference)
    return largest


def _difference(found: np.ndarray, expected: np.ndarray) -> float:
    """Returns the largest difference; infinite where shapes, types or non-finite values differ."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return float("inf")
    one, other = found.astype(float), expected.astype(float)
    finite = np.isfinite(other)
    if not np.array_equal(one[~finite], other[~finite], equal_nan=True):
        return float("inf")
    return float(np.abs(one[finite] - other[finite]).max(initial=0.0))


def _cause(error: BaseException) -> str:
    """Returns the reason at the beginning of a chain of errors."""
    while error.__cause__ is not None:
        error = error.__cause__
    return re.sub(r"<OpOverload\(op='(.+?)', overload='(.+?)'\)>", r"\1.\2", reason(error))


# ---- the result ----------------------------------------------------------------------------------


def _described(
    folder: Path, flat: _Flat, difference: float, compared: int, is_dynamic: bool
) -> Exported:
    inputs = {one.name: (one.shape, one.type) for one in _session(folder).get_inputs()}
    if is_dynamic:
        sizes = ", ".join(map(str, COMPARED_ROWS))
        over = f"in batches of {sizes}"
        if compared > len(COMPARED_ROWS):
            over += " and another batch of the data module"
    else:
        size = _batch_size(flat.call.tensors)
        over = f"in batches of {size}, the only size that the graph takes"
    verified = f"largest difference to the trained model's outputs {difference:.1e} {over}"
    return Exported(inputs, flat.names, verified)


def _example_shape(shape: list[int | str]) -> tuple[int, ...]:
    return tuple(size if isinstance(size, int) else 2 for size in shape)
