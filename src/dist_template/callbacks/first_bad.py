"""Locates the first non-finite number of a step: in the weights, or in the output of a module.

The numerics guard calls it once, after a non-finite step. All ranks check their weights, and run
the forward pass of that step's batch again with a hook on every module. The weights have changed by
one step since: if everything is finite now, nothing is found.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from .. import weights
from ..layout import local_shard
from ..model.any_module import metrics_of
from ..model.metrics import MetricBuffer
from ..parallel import run_strategy

# A module's name, then two () bools on the device: whether its inputs and its outputs are finite.
Call = tuple[str, Tensor, Tensor]


def first_bad(trainer: L.Trainer, module: nn.Module, batches: list[Any]) -> dict[str, Any] | None:
    """Searches the weights, then the outputs of modules whose inputs are finite. Collective.

    Returns:
        what ("weight" or "output"), module (its name, or the weight's), ranks (that found it).
        None: nothing was found.
    """
    # A NaN may be in one rank's shard alone: no rank runs the forward pass, or all run it.
    return _agreed(_bad_weight(module)) or _agreed(_bad_output(trainer, module, batches))


def _agreed(local: tuple[str, str] | None) -> dict[str, Any] | None:
    """Returns the first rank's result and the ranks that have the same one. Collective."""
    results = weights.from_all_ranks(local)
    first, ranks = None, []
    for rank, result in enumerate(results):
        first = first or result
        if result and result == first:
            ranks.append(rank)
    return first and {"what": first[0], "module": first[1], "ranks": ranks}


def weights_are_finite(trainer: L.Trainer, module: nn.Module) -> bool:
    """Returns whether all parameters of all ranks are finite; one read on the host. Collective."""
    # No sum is finite if a term is not; the largest value takes a CPU eight times as long.
    device = trainer.strategy.root_device  # offloaded ones are in host memory
    sums = []
    for parameter in module.parameters():
        sums.append(local_shard(parameter).detach().sum(dtype=torch.float32).to(device))
    finite = torch.stack(sums).isfinite().all().float()
    return bool(trainer.strategy.reduce(finite, reduce_op="min").item())


def _bad_weight(module: nn.Module) -> tuple[str, str] | None:
    names, finite = [], []
    for name, tensor in weights.named_tensors(module).items():
        shard = local_shard(tensor).detach()
        if shard.numel() and shard.is_floating_point():
            names.append(name)
            finite.append(shard.isfinite().all().cpu())  # offloaded ones are there already
    bad = (~torch.stack(finite)).nonzero().flatten().tolist() if finite else []
    return ("weight", names[bad[0]]) if bad else None


def _bad_output(trainer: L.Trainer, module: Any, batches: list[Any]) -> tuple[str, str] | None:
    """Runs the forward pass of each micro-batch under hooks; restores random state and metrics."""
    devices = [module.device] if module.device.type == "cuda" else []
    layers = run_strategy(trainer.strategy).layers
    calls: list[Call] = []  # in the order in which they return
    activations: list[Tensor] = []  # those with a gradient
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices))
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # or it ignores the hooks
        stack.enter_context(trainer.precision_plugin.train_step_context())
        buffer = vars(metrics_of(module))
        stack.callback(buffer.update, dict(buffer))
        buffer.update(vars(MetricBuffer()))
        for name, submodule in module.named_modules():
            if name:
                hook = partial(_note_call, calls, activations, name)
                handle = submodule.register_forward_hook(hook, with_kwargs=True)
                stack.callback(handle.remove)
        for batch in batches:
            output = layers.forward_only(module.training_step, (batch, 0))
            if output is None:  # the loss is on the last stage of a pipeline
                continue
            loss = output["loss"] if isinstance(output, dict) else output
            calls.append(("the loss", torch.tensor(True), _are_finite([loss])))
            # After a backward pass, to the first activation alone, the hooks of FSDP2 and DeepSpeed
            # are ready for the next step, and no parameter has a gradient.
            if activations and loss.requires_grad:
                torch.autograd.grad(loss, activations[0], allow_unused=True)
            activations.clear()
    for name, inputs, outputs in calls:
        if inputs and not outputs:
            return "output", name
    return None


def _note_call(calls: list[Call], activations: list[Tensor], name: str, module: nn.Module, *given: Any) -> None:
    *inputs, output = given
    inputs, outputs = list(_floats(inputs)), list(_floats(output))
    activations += [tensor for tensor in (*inputs, *outputs) if tensor.requires_grad]
    # A mask has minus infinities. In any other tensor they would be in an earlier output already.
    unmasked = [each.detach().masked_fill(each == -torch.inf, 0) for each in inputs]
    calls.append((name, _are_finite(unmasked), _are_finite(outputs)))


def _floats(value: Any) -> Iterator[Tensor]:
    """Yields the floating-point tensors in nested tuples, lists and mappings."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict):
        yield from _floats(list(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _floats(each)


def _are_finite(tensors: Any) -> Tensor:
    """Returns a () bool of this rank's shards."""
    finite = [local_shard(tensor.detach()).isfinite().all().cpu() for tensor in tensors]
    return torch.stack(finite).all() if finite else torch.tensor(True)
