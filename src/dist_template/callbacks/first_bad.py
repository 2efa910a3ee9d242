"""Locates the first non-finite number of a step that the numerics guard has skipped.

`find_first_bad` searches parameters and the batch, then runs the forward pass of one micro-batch
again with a hook on every module, and a backward pass to the first activation: in the backward pass
a gradient may become non-finite though every output is finite. No gradient reaches a parameter. The
random state, buffers, metrics and attributes of the modules are restored, so the training continues
with the same bits as without a search.

The weights have changed by one step since, and dropout draws other masks: a cause that depends on
them may not be found."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from .. import processes
from ..layout import local_shard
from ..model.any_module import metrics_of
from ..model.metrics import MetricBuffer
from ..parallel import rank_view
from ..parallel.rank_view import LocalModel
from .random_state import get_state, set_state

MOST_MICRO_BATCHES = 8  # that are searched if no loss of a micro-batch shows which one it is
LOSS = "the loss"
# torch's own attributes of a module; hooks are added and removed by their owners
KEPT = (
    "_parameters",
    "_buffers",
    "_modules",
    "_forward",
    "_backward",
    "_state_dict",
    "_load_state",
)


@dataclass
class MicroBatch:
    """What `training_step` was given, and the loss () of this rank, on the device."""

    batch: Any
    index: int
    loss: Tensor | None = None  # until it is computed


@dataclass
class Found:
    """The first non-finite number of one rank: `what` is weight, data, output, buffer or gradient,
    `module` the name of its module or tensor, `place` its position in the order of execution: the
    micro-batch, the first block of the pipeline stage, the call in it."""

    what: str
    module: str
    place: tuple[int, int, int] = (0, 0, 0)


@dataclass
class Passes:
    """What hooks have noted of the passes of a micro-batch, each () bool on the device."""

    layers: LocalModel  # of this rank
    # name, whether inputs are finite, whether outputs are, in the order in which modules return
    calls: list[tuple[str, Tensor, Tensor]] = field(default_factory=list)
    first_blocks: list[int] = field(default_factory=list)  # of the stage of each call
    # name of the module, whether its output's gradient is finite, in the order of the backward pass
    gradients: list[tuple[str, Tensor]] = field(default_factory=list)
    first: Tensor | None = None  # the first activation with a gradient
    is_forward: bool = True  # a checkpointed block runs again in the backward pass

    def note(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Is a forward hook of `module`."""
        first_block = self.layers.first_block_of_pass()
        if not self.is_forward or first_block is None:
            return
        outputs = list(_floats(output))
        for tensor in outputs:
            if tensor.requires_grad:
                self.first = tensor if self.first is None else self.first
                tensor.register_hook(partial(self._note_gradient, name))
        # A mask has minus infinities. In any other tensor they were in an earlier output already.
        inputs = [_without_masked(each) for each in _floats((args, kwargs))]
        self.calls.append((name, _are_finite(inputs), _are_finite(outputs)))
        self.first_blocks.append(first_block)

    def _note_gradient(self, name: str, gradient: Tensor) -> None:
        self.gradients.append((name, _are_finite([gradient])))

    def note_loss(self, loss: Tensor) -> None:
        device = loss.device
        before = [both.to(device) for _, *each in self.calls for both in each]
        is_finite = torch.stack(before).all() if before else torch.tensor(True, device=device)
        self.calls.append((LOSS, is_finite, _are_finite([loss])))
        self.first_blocks.append(max(self.first_blocks, default=0))


def find_first_bad(
    trainer: L.Trainer, module: Any, micro_batches: list[MicroBatch]
) -> dict[str, Any] | None:
    """Returns what is not finite ("weight", "data", "output", "buffer" or "gradient"), the name of
    the module or tensor, and the ranks that found it first; None if nothing was found. An error in
    the user's code is a warning. Collective."""
    # A NaN may be in one rank's shard alone: no rank runs the forward pass, or all ranks run it.
    found = _agreed(_bad_weight(module))
    if not found:
        found = _agreed(_bad_data(micro_batches))
    if found:
        return found
    chosen = _chosen(trainer, micro_batches)
    local = None
    try:
        with _unchanged(trainer, module):
            local = _bad_call(trainer, module, [micro_batches[i] for i in chosen])
    except Exception as error:  # the user's code, which ran without an error in training
        rank_zero_warn(
            "numerics: the search for the first non-finite module failed, training continues:"
            f" {type(error).__name__}: {error}"
        )
    return _agreed(local)


def _agreed(local: Found | None) -> dict[str, Any] | None:
    """Returns the result that is first in the order of execution, and its ranks. Collective."""
    given = (local.place, local.what, local.module) if local else None
    results = processes.from_all_ranks(given)
    if not any(results):
        return None
    place, what, name = min((each for each in results if each), key=lambda each: each[0])
    ranks = [i for i, each in enumerate(results) if each and each[1:] == (what, name)]
    return {"what": what, "module": name, "ranks": ranks}


def _bad_weight(module: nn.Module) -> Found | None:
    named = list(module.named_parameters())
    # ZeRO-3 has the shard as an attribute
    shards = [local_shard(getattr(p, "ds_tensor", p)).detach() for _, p in named]
    finite = [_are_finite([shard]).cpu() for shard in shards]  # offloaded ones are there already
    bad = [name for (name, _), is_finite in zip(named, finite, strict=True) if not is_finite]
    return Found("weight", bad[0]) if bad else None


def _bad_data(micro_batches: list[MicroBatch]) -> Found | None:
    for number, micro_batch in enumerate(micro_batches):
        for name, tensor in _named_floats(micro_batch.batch, "batch"):
            if not _are_finite([_without_masked(tensor)]):
                return Found("data", name, (number, 0, 0))
    return None


def _chosen(trainer: Any, micro_batches: list[MicroBatch]) -> list[int]:
    """Returns the number of the first micro-batch whose loss is not finite on a rank; the first few
    if all are finite, or in a pipeline, which returns the sum of their losses with the last.
    Collective."""
    first_few = list(range(min(len(micro_batches), MOST_MICRO_BATCHES)))
    if rank_view(trainer.strategy).layers.group is not None:
        return first_few
    bad: list[int] = []
    for number, micro_batch in enumerate(micro_batches):
        if micro_batch.loss is not None and not micro_batch.loss.isfinite():
            bad.append(number)
    firsts = [each[0] for each in processes.from_all_ranks(bad) if each]
    return [min(firsts)] if firsts else first_few


def _bad_call(trainer: Any, module: Any, micro_batches: list[MicroBatch]) -> Found | None:
    """Runs the micro-batches under hooks. All ranks run the same number of passes."""
    found = None
    layers = rank_view(trainer.strategy).layers
    takes_index = "batch_idx" in inspect.signature(module.training_step).parameters
    for number, micro_batch in enumerate(micro_batches):
        given = (micro_batch.batch, *[micro_batch.index] * takes_index)
        passes = Passes(layers)
        with ExitStack() as stack:
            for name, submodule in module.named_modules():
                if name:
                    hook = partial(passes.note, name)
                    handle = submodule.register_forward_hook(hook, with_kwargs=True)
                    stack.callback(handle.remove)
            output = layers.forward_only(module.training_step, given)
            loss = output.get("loss") if isinstance(output, Mapping) else output
            if isinstance(loss, Tensor):  # else another stage of a pipeline has it
                passes.note_loss(loss)
                passes.is_forward = False
                # Its hooks of FSDP2 and DeepSpeed leave them ready for the next step.
                if passes.first is not None and loss.requires_grad:
                    torch.autograd.grad(loss, passes.first, allow_unused=True)
        found = found or _first_of(module, passes, number)
    return found


def _first_of(module: nn.Module, passes: Passes, number: int) -> Found | None:
    for call, (name, inputs, outputs) in enumerate(passes.calls):
        place = (number, passes.first_blocks[call], call)
        if inputs and not outputs:
            for key, buffer in dict(module.named_buffers()).items():
                if key.rpartition(".")[0] == name and not _are_finite([_without_masked(buffer)]):
                    return Found("buffer", key, place)
            return Found("output", name, place)
    for call, (name, is_finite) in enumerate(passes.gradients):
        if not is_finite:
            return Found("gradient", name, (number, 0, len(passes.calls) + call))
    return None


@contextmanager
def _unchanged(trainer: Any, module: Any) -> Generator[None]:
    """Restores what a `training_step` changes besides gradients: random state, buffers, attributes
    of modules (of torchmetrics, too) and what it logs."""
    with ExitStack() as stack:
        stack.callback(set_state, get_state()())
        for submodule in module.modules():
            stack.callback(_restore, submodule, _attributes(submodule))
            for name, buffer in submodule.named_buffers(recurse=False):
                stack.callback(setattr, submodule, name, buffer)  # it may be replaced by another
                stack.callback(_copy_back, buffer, local_shard(buffer).detach().clone())
        buffer = vars(metrics_of(module))
        stack.callback(buffer.update, dict(buffer))
        buffer.update(vars(MetricBuffer()))
        # `log_dict` calls it; `_restore` removes it
        vars(module)["log"] = lambda *_, **__: None
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # or it ignores the hooks
        stack.enter_context(trainer.precision_plugin.train_step_context())
        yield


def _attributes(module: nn.Module) -> dict[str, Any]:
    found = {}
    for key, value in vars(module).items():
        if key.startswith(KEPT):
            continue
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            value = (value, value.detach().clone())
        elif type(value) in (list, dict, set):
            value = (value, copy.copy(value))
        else:
            value = (value, None)
        found[key] = value
    return found


def _restore(module: nn.Module, attributes: dict[str, Any]) -> None:
    own = vars(module)
    for key in [key for key in own if not key.startswith(KEPT) and key not in attributes]:
        del own[key]
    for key, (value, content) in attributes.items():
        own[key] = value
        if isinstance(value, Tensor) and content is not None:
            _copy_back(value, content)
        elif isinstance(value, list):
            value[:] = content
        elif type(value) in (dict, set):
            value.clear()
            value.update(content)


@torch.no_grad()
def _copy_back(tensor: Tensor, content: Tensor) -> None:
    local = local_shard(tensor.detach())
    content = local_shard(content)
    if local.shape == content.shape and not torch.equal(local, content):
        local.copy_(content)


def _floats(value: Any) -> Iterator[Tensor]:
    for _, tensor in _named_floats(value, ""):
        yield tensor


def _named_floats(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yields the floating-point tensors in nested tuples, lists, mappings and dataclasses."""
    if isinstance(value, Tensor):
        if value.is_floating_point() or value.is_complex():
            yield name, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _named_floats(each, f"{name}[{key!r}]")
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            yield from _named_floats(each, f"{name}[{number}]")
    elif hasattr(value, "__dataclass_fields__"):
        for key in value.__dataclass_fields__:
            yield from _named_floats(getattr(value, key), f"{name}.{key}")


def _without_masked(tensor: Tensor) -> Tensor:
    tensor = local_shard(tensor.detach())
    return tensor if tensor.is_complex() else tensor.masked_fill(tensor == -torch.inf, 0)


def _are_finite(tensors: list[Tensor]) -> Tensor:
    """Returns a () bool of this rank's shards, without waiting for a device."""
    finite = [local_shard(tensor.detach()).isfinite().all() for tensor in tensors]
    if not finite:
        return torch.tensor(True)
    return torch.stack([each.to(finite[0].device) for each in finite]).all()
