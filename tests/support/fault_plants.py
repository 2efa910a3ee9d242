"""Faults of fault_runs.py that no key causes: defects of the machine, and errors in edited code.

Each plant is called in every worker before the command, and changes a class or a function there. Callbacks
are appended to all others.
"""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import psutil
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from trainer_dev.module import LanguageModule

from tests.support.library import PackedRows, training_module

H100 = {"device": "NVIDIA H100 80GB HBM3", "supports_bf16": True, "memory_gib": 79.1}

# ---- the data's ------------------------------------------------------------------------------------------------------


def mask_all_labels() -> None:
    _edit_batches(lambda batch: batch | {"labels": torch.full_like(batch["labels"], -100)})


def mask_most_labels() -> None:
    _edit_batches(lambda batch: batch | {"labels": batch["labels"].index_fill(1, torch.arange(1, 64), -100)})


def do_not_shift_labels() -> None:
    _edit_batches(lambda batch: batch | {"labels": batch["input_ids"].clone()})


def read_slowly(seconds: float) -> None:
    _edit_batches(lambda batch: time.sleep(seconds) or batch)


def _edit_batches(edit: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    read = PackedRows.__getitems__
    PackedRows.__getitems__ = lambda self, rows: edit(read(self, rows))


# ---- the model's -----------------------------------------------------------------------------------------------------


def freeze_all_but_norms() -> None:
    def freeze(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad = name.endswith("norm.weight")

    _edit_model(freeze)


def bias_router(biases: Sequence[float]) -> None:
    """Sets the bias of each expert, as in a DeepSeek-V3 router that has learned to choose few experts."""

    def bias(model: nn.Module) -> None:
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.tensor(biases))

    _edit_model(bias)


def collapse_router(favoured: int) -> None:
    """Without a bias: all embeddings share a direction, by which the routers choose `favoured` experts."""

    def collapse(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if name.endswith("embed_tokens.weight"):
                parameter += 0.05
            if name.endswith("mlp.gate.weight"):
                parameter[:favoured] += 0.01
                parameter[favoured:] -= 0.01

    _edit_model(collapse)


def make_nan(name: str, call: int) -> None:
    """The module returns NaN from its `call`th training forward on."""

    def spoil(model: nn.Module) -> None:
        calls = iter(range(10**9))

        def hook(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            return output * float("nan") if module.training and next(calls) >= call else output

        model.get_submodule(name).register_forward_hook(hook)

    _edit_model(spoil)


def _edit_model(edit: Callable[[nn.Module], None]) -> None:
    build = LanguageModule.build_model

    def build_model(self: Any, data: Any) -> nn.Module:
        model = build(self, data)
        with torch.no_grad():
            edit(model)
        return model

    LanguageModule.build_model = build_model


# ---- the training's --------------------------------------------------------------------------------------------------


def detach_loss() -> None:
    _edit_loss(lambda self, loss: loss.detach() + 0 * loss)


def leak_memory(mib: int) -> None:
    """Keeps `mib` MiB of every step, as a list of results does; memory is measured once a second."""
    kept = []

    def leak(self: Any, loss: Tensor) -> Tensor:
        kept.append(torch.ones(mib * 2**18))
        time.sleep(0.05)
        return loss

    _edit_loss(leak)


def burst_gradients(factor: float, steps: Sequence[int]) -> None:
    _edit_loss(lambda self, loss: loss + (loss - loss.detach()) * factor * (self.global_step in steps))


def raise_in_loss(step: int, error: Exception) -> None:
    def fail(self: Any, loss: Tensor) -> Tensor:
        if self.global_step >= step:
            raise error
        return loss

    _edit_loss(fail)


def run_out_in_backward(step: int) -> None:
    """Raises the error of the CUDA allocator."""
    message = (
        "CUDA out of memory. Tried to allocate 1.96 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.02 GiB is"
        " free. Including non-PyTorch memory, this process has 78.08 GiB memory in use. Of the allocated memory 75.90"
        " GiB is allocated by PyTorch, and 1.31 GiB is reserved by PyTorch but unallocated."
    )

    def fail(gradient: Tensor) -> Tensor:
        raise torch.OutOfMemoryError(message)

    def hook(self: Any, loss: Tensor) -> Tensor:
        if self.global_step >= step:
            loss.register_hook(fail)
        return loss

    _edit_loss(hook)


def _edit_loss(edit: Callable[[Any, Tensor], Tensor]) -> None:
    step = LanguageModule.training_step
    LanguageModule.training_step = lambda self, batch, batch_idx: edit(self, step(self, batch, batch_idx))


def overshoot_schedule(step: int, factor: float) -> None:
    """An edited schedule multiplies the learning rate by `factor` after `step`."""
    code: Any = training_module
    build = code.build_schedule

    def build_schedule(optimizer: Any, *rest: Any) -> Any:
        built = build(optimizer, *rest)
        scheduler = built["scheduler"]
        scheduler.lr_lambdas = [
            lambda at, shape=shape: shape(at) * (factor if at > step else 1) for shape in scheduler.lr_lambdas
        ]
        return built

    code.build_schedule = build_schedule


def compute_slowly(seconds: float, rank: int) -> None:
    forward = LanguageModule.forward

    def slow(self: Any, batch: Any) -> Tensor:
        if self.global_rank == rank:
            time.sleep(seconds)
        return forward(self, batch)

    LanguageModule.forward = slow


# ---- the machine's ---------------------------------------------------------------------------------------------------


class LimitMemory(Callback):
    """Limits the address space of this process to `mib` MiB more than at the start of training."""

    def __init__(self, mib: int) -> None:
        self.mib = mib

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        limit = psutil.Process().memory_info().vms + self.mib * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


class StopAt(Callback):
    """Stops training regularly after `step`, as a time limit does; the schedule covers all steps."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        trainer.should_stop = trainer.should_stop or trainer.global_step >= self.step


def edit_facts(run: Path, **edits: dict[str, Any]) -> None:
    """Writes the facts of a machine with GPUs."""
    path = run / "facts.json"
    facts = json.loads(path.read_text("utf-8"))
    for group, values in edits.items():
        facts[group] = facts.get(group, {}) | values
    path.write_text(json.dumps(facts), "utf-8")


def edit_metrics(run: Path, name: str, value: float) -> None:
    """Sets a metric in each line that has perf/step_s."""
    path = run / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    lines = [line | {name: value} if "perf/step_s" in line else line for line in lines]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
