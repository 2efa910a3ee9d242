"""Callback: records the first optimizer step, to find what makes losses differ.

Before the training it makes random numbers equal in all runs, where that is asked for. Its hooks
record each forward pass of the first step, then it reads the gradients before the optimizer steps,
and removes the hooks. What later steps show, it notes until the training ends."""

import inspect
import zlib
from itertools import product
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from ...compat.deepspeed import gradient_of
from ...compat.lightning import accumulates
from ...compat.randomness import turn_dropout_off, use_running_statistics
from ...parallel import rank_view
from ...processes import from_all_ranks
from ...project import is_users
from ...text.datamodule import PackedText
from .forward_hooks import ForwardHooks, full, location
from .record import ForwardPass
from .recorder import fingerprint, samples_in
from .same_draws import seed, state, with_seeded_samples

METHODS = ("training_step", "forward", "validation_step", "configure_optimizers")
LOADERS = ("train_dataloader", "val_dataloader")
BATCH_HOOKS = (*LOADERS, "transform", "on_before_batch_transfer", "transfer_batch_to_device")
GRADIENT_HOOKS = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping")


class FirstStep(Callback):
    """Records forward passes and gradients of the first step.

    forward<rank>.pt   a `ForwardPass` for each micro-batch
    places.pt          {module: class and file:line}; also of METHODS, transform, optimizer and
                       order; "hooks" and "batches" are the user's GRADIENT_HOOKS and BATCH_HOOKS
    gradients.pt       {parameter: unsharded gradient} after the first backward, before clipping
    dropout.pt         {"dropout": True} if dropout was turned off in a forward pass; likewise
                       "norms", "samples" and "draws" (see `dropout_is_off`), "seeded" if that was
                       done, and "validation" if its steps draw random numbers
    missing.pt         {parameter that never gets a gradient: whether its module's forward ran}

    Rank 0 writes all but the first, in a pipeline with the entries of all stages.
    `dropout_is_off` replaces dropout by the identity, because random masks differ between ranks;
    and, where the data are no text, what else differs by nature: BatchNorm uses its running
    statistics, and samples and steps draw random numbers that depend on their rows alone."""

    def __init__(self, folder: Path, dropout_is_off: bool = False) -> None:
        self.folder = folder
        self.dropout_is_off = dropout_is_off
        self._hooks: ForwardHooks | None = None  # until the first step has ended
        self._passes: list[ForwardPass] = []
        self._missing: dict[str, bool] = {}
        self._gradients: dict[str, Tensor] = {}
        self._dropout: dict[str, bool] = {}
        self._is_seeded = False
        self._before = state()

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._trainer, self._module = trainer, pl_module
        if self.dropout_is_off:
            turn_dropout_off(lambda: self._dropout.update(dropout=True))
        data = getattr(trainer, "datamodule", None)
        self._is_seeded = self.dropout_is_off and not isinstance(data, PackedText)
        if self._is_seeded:
            self._dropout["seeded"] = True
            use_running_statistics(lambda: self._dropout.update(norms=True))
            self._seed_samples(data or pl_module)

    def _seed_samples(self, owner: Any) -> None:
        """Lets each sample of the training draw the same numbers in each run."""
        create = owner.train_dataloader

        def seeded(*args: Any, **options: Any) -> Any:
            loaders = create(*args, **options)
            if with_seeded_samples(loaders):
                self._dropout["samples"] = True
            return loaders

        owner.train_dataloader = seeded

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        for owner in (getattr(trainer, "datamodule", None), pl_module):
            if self._is_seeded and owner is not None:
                vars(owner).pop("train_dataloader", None)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        layers = rank_view(trainer.strategy).layers
        self._group = layers.group

        def tensors() -> dict[str, Tensor] | None:
            # In a pipeline all micro-batches run after the last one's start.
            number = layers.micro_batch_of_pass(len(self._passes) - 1)
            if number is None:
                return None
            return self._passes[number]["tensors"]

        self._hooks = ForwardHooks(pl_module, tensors)
        self._save("places", _places(trainer, pl_module))

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: object, batch: object, batch_idx: int
    ) -> None:
        if not self._hooks and not self._is_seeded:
            return
        rows = [fingerprint(sample) for sample in samples_in(batch)]
        if self._hooks:
            self._passes.append({"rows": rows, "tensors": {}})
        if self._is_seeded:
            # The step and its rows choose the numbers, so that each run draws the same.
            seed(zlib.crc32(repr((trainer.global_step, rows)).encode()))
            self._before = state()

    def on_validation_batch_start(self, *_: object, **__: object) -> None:
        self._before = state()

    def on_validation_batch_end(self, *_: object, **__: object) -> None:
        if state() != self._before:
            self._dropout["validation"] = True

    def on_before_optimizer_step(self, *_: object, **__: object) -> None:
        gradients: dict[str, Tensor] = {}
        for name, parameter in self._module.named_parameters():
            if self._hooks and parameter.requires_grad:
                gradient, owner = gradient_of(parameter), name.rpartition(".")[0]
                if gradient is not None:
                    gradients[name] = full(gradient)
                else:
                    has_run = any(owner in passed["tensors"] for passed in self._passes)
                    self._missing[name] = has_run
            if parameter.grad is not None:  # a later step may reach it
                self._missing.pop(name, None)
        if self._hooks:  # several optimizers step one after the other: the first value counts
            self._gradients = gradients | self._gradients
            self._save("gradients", self._gradients)

    def on_train_batch_end(self, trainer: L.Trainer, *_: object, **__: object) -> None:
        if self._is_seeded and state() != self._before:
            self._dropout["draws"] = True
        if self._hooks and trainer.global_step and not accumulates(trainer):
            self._hooks.remove()
            torch.save(self._passes, self.folder / f"forward{trainer.global_rank}.pt")
            self._hooks = None

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._save("dropout", self._dropout)
        self._save("missing", self._missing)

    def _save(self, name: str, value: dict[str, Any]) -> None:
        if self._group:
            for stage in reversed(from_all_ranks(value, self._group)):
                value = value | stage
        if self._trainer.is_global_zero:
            torch.save(value, self.folder / f"{name}.pt")


def _places(trainer: L.Trainer, module: L.LightningModule) -> dict[str, str]:
    """Returns the content of places.pt, see `FirstStep`."""
    places: dict[str, str] = {}
    for name, submodule in module.named_modules():
        # A list, or a module of another stage, has no forward of its own.
        if type(submodule).forward is not nn.Module.forward:
            places[name] = f"{type(submodule).__name__}, {location(submodule.forward)}"
    for name in METHODS:
        places[name] = location(getattr(module, name))
    callbacks, data = trainer.callbacks, trainer.datamodule  # ty: ignore[missing-attribute]
    places["transform"] = location(getattr(data, "transform", None))
    if trainer.optimizers:
        places["optimizer"] = _class_of(trainer.optimizers[0])
    places["order"] = _class_of(getattr(trainer.train_dataloader, "batch_sampler", None))
    places["hooks"] = _of_user([*callbacks, module], GRADIENT_HOOKS)
    places["batches"] = _of_user([data, module], BATCH_HOOKS)
    return places


def _class_of(part: object) -> str:
    return f"{type(part).__name__}, {location(type(part))}"


def _of_user(owners: list[Any], names: tuple[str, ...]) -> str:
    """Returns the methods of these names that are the user's, with their locations."""
    methods: list[str] = []
    for owner, name in product(owners, names):
        hook = getattr(type(owner), name, None)  # `numerics` replaces the instance's
        if inspect.isfunction(hook) and is_users(inspect.getfile(hook)):
            methods.append(f"{type(owner).__name__}.{name}, {location(hook)}")
    return "; ".join(methods)
