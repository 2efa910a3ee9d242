"""The faults of fault_runs.py that no YAML key makes: the machine's, and mistakes in edited code.

Each `plant` is called in every worker before the command, and changes a class or a function there. Callbacks come after
all others.
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
from trainer_dev import module as module_file
from trainer_dev.module import LanguageModule

from dist_template.text.rows import PackedRows
from dist_template.text.tokenizers import Bytes

H100 = {"device": "NVIDIA H100 80GB HBM3", "supports_bf16": True, "memory_gib": 79.1}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
)

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


def write_tokenizer(folder: Path, shift: int = 0, chat_template: str | None = None) -> Path:
    """Bytes' tokenizer as a folder, its ids moved on by `shift`."""
    tokenizer = Bytes().fit(iter(()))
    if chat_template:
        tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
        tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer.json"
    plain = json.loads(path.read_text("utf-8"))
    vocabulary = plain["model"]["vocab"]
    plain["model"]["vocab"] = {k: (v + shift) % 256 if v < 256 else v for k, v in vocabulary.items()}
    path.write_text(json.dumps(plain), "utf-8")
    return folder


# ---- the model's -----------------------------------------------------------------------------------------------------


def freeze_all_but_norms() -> None:
    def freeze(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad = name.endswith("norm.weight")

    _edit_model(freeze)


def bias_router(biases: Sequence[float]) -> None:
    """What a router ends with that has learned to send everything to few experts; [experts] of DeepSeek-V3."""

    def bias(model: nn.Module) -> None:
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.tensor(biases))

    _edit_model(bias)


def collapse_router(favoured: int) -> None:
    """Without a bias: a direction that all tokens share, and routers that choose `favoured` experts by it."""

    def collapse(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if name.endswith("embed_tokens.weight"):
                parameter += 0.05
            if name.endswith("mlp.gate.weight"):
                parameter[:favoured] += 0.01
                parameter[favoured:] -= 0.01

    _edit_model(collapse)


def make_nan(name: str, call: int) -> None:
    """The module of that name gives NaN from its `call`th training forward on."""

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


def let_gradients_grow(per_step: float) -> None:
    """Their scale, not the loss, as with weights that grow without decay behind a norm."""

    def grow(self: Any, loss: Tensor) -> Tensor:
        return loss + (loss - loss.detach()) * per_step * self.global_step

    _edit_loss(grow)


def burst_gradients(factor: float, steps: Sequence[int]) -> None:
    _edit_loss(lambda self, loss: loss + (loss - loss.detach()) * factor * (self.global_step in steps))


def raise_in_loss(step: int, error: Exception) -> None:
    def fail(self: Any, loss: Tensor) -> Tensor:
        if self.global_step >= step:
            raise error
        return loss

    _edit_loss(fail)


def run_out_in_backward(step: int) -> None:
    """As the CUDA allocator says it."""
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
    """An edited schedule that raises the learning rate after `step`."""
    code: Any = module_file
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
    """From the first step on this process may have `mib` MiB of addresses more than it has."""

    def __init__(self, mib: int) -> None:
        self.mib = mib

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        limit = psutil.Process().memory_info().vms + self.mib * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


class StopAt(Callback):
    """Ends training in good order after `step`, long before `trainer.max_steps`; each step takes `step_s` longer."""

    def __init__(self, step: int, step_s: float = 0.0) -> None:
        self.step = step
        self.step_s = step_s

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        time.sleep(self.step_s)
        trainer.should_stop = trainer.should_stop or trainer.global_step >= self.step


def edit_facts(run: Path, **edits: dict[str, Any]) -> None:
    """What a GPU machine would have written: this one has none."""
    path = run / "facts.json"
    facts = json.loads(path.read_text("utf-8"))
    for group, values in edits.items():
        facts[group] = facts.get(group, {}) | values
    path.write_text(json.dumps(facts), "utf-8")


def edit_metrics(run: Path, **columns: float) -> None:
    """The same, of metrics: `perf__mfu=0.1` adds perf/mfu to each line that has perf/step_s."""
    path = run / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    more = {name.replace("__", "/"): value for name, value in columns.items()}
    lines = [line | more if "perf/step_s" in line else line for line in lines]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")


def act_as_gpus(run: Path, **columns: float) -> None:
    """What GPUs would have written: bf16 at hand, and these metrics."""
    edit_facts(run, machine=H100)
    edit_metrics(run, **columns)
