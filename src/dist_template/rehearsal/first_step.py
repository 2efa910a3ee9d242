"""Records outputs and gradients of the first step, to find what makes losses differ."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from ..compat.deepspeed import is_partitioned_in_half
from ..compat.hooks import own
from ..compat.lightning import accumulates
from ..compat.torch import on_optimizer_step
from ..parallel import pipeline_of
from ..parallel.pipeline.division import Elsewhere, Position
from ..weights import from_all_ranks, is_partitioned_by_zero
from . import code_locations
from .forward_hooks import ForwardCall, ForwardHooks, full
from .recorder import fingerprint, samples_in

DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d")
DROPOUTS += ("alpha_dropout", "feature_alpha_dropout")
HOOKS = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping")
Factors = Mapping[str, tuple[float, str]]  # {hook: (factor, file:line)}


class Details(Callback):
    """Saves forward passes and gradients of the first step, and the trained model's logits.

    forward<rank>.pt   per micro-batch: rows (a hash of each), tensors (see `ForwardHooks`)
    places.pt          {module: class and file:line}; also of training_step, forward, datamodule,
                       optimizer, order
    draws.pt           {module: "dropout", or another use of the random generator in its forward}
    gradients.pt       {parameter: unsharded gradient} after the first backward, before clipping
    buffers.pt         {buffer: value} after the first step
    missing.pt         {parameter that never gets a gradient: whether its module's forward ran}
    logits.pt          (batch, logits) of the trained module

    Rank 0 writes all but the first, in a pipeline with those of all stages. An error in the first
    forward pass gets a note with its module.

    Args:
        folder: Destination.
        dropout_is_off: Replaces dropout by the identity, because random masks differ between ranks.
    """

    def __init__(self, folder: Path, dropout_is_off: bool = False) -> None:
        self.folder = folder
        self.dropout_is_off = dropout_is_off
        self._hooks: _Draws | None = None
        self._passes: list[dict[str, Any]] = []
        self._batch: Any = None
        self._missing: dict[str, bool] = {}

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        if self.dropout_is_off:
            _turn_dropout_off(lambda: self._hooks and self._hooks.note("dropout"))

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        pipeline = pipeline_of(trainer.strategy)
        self._group = pipeline and pipeline.group
        self._hooks = _Draws(pl_module, self._passes, pipeline and pipeline.position)
        self._call = ForwardCall(pl_module)
        data: Any = trainer.datamodule  # ty: ignore[missing-attribute]
        order = getattr(trainer.train_dataloader, "batch_sampler", None)
        modules = [(n, m) for n, m in pl_module.named_modules() if not isinstance(m, Elsewhere)]
        places = {name: code_locations.of_module(module) for name, module in modules}
        for name in ("training_step", "forward"):
            places[name] = code_locations.of_function(getattr(pl_module, name))
        owners = {"datamodule": data, "optimizer": trainer.optimizers[0], "order": order}
        for name, owner in owners.items():
            places[name] = code_locations.of_class(type(owner))
        self._save(trainer, "places", places)

    def on_exception(self, trainer: L.Trainer, pl_module: Any, exception: BaseException) -> None:
        if self._hooks and self._hooks.inside:
            module = self._hooks.inside[-1] or "the module"
            exception.add_note(f"in the forward pass of {module}")

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        self._batch = batch if self._batch is None else self._batch
        if self._hooks:
            self._hooks.begin([fingerprint(sample) for sample in samples_in(batch)])

    def on_before_backward(self, trainer: L.Trainer, pl_module: Any, loss: Tensor) -> None:
        if self._hooks:
            self._hooks.changed()

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: Any) -> None:
        trained = {name: p for name, p in pl_module.named_parameters() if p.requires_grad}
        if self._hooks:
            gradients: dict[str, Tensor] = {}
            for name, parameter in trained.items():
                gradient = gradient_of(parameter)
                if gradient is None:
                    owner = name.rpartition(".")[0]
                    self._missing[name] = any(owner in each["tensors"] for each in self._passes)
                else:
                    gradients[name] = gradient
            self._save(trainer, "gradients", gradients)
        self._missing = {n: ran for n, ran in self._missing.items() if trained[n].grad is None}

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any, **__: Any) -> None:
        if self._hooks and trainer.global_step and not accumulates(trainer):
            self._hooks.remove()
            torch.save(self._passes, self.folder / f"forward{trainer.global_rank}.pt")
            self._save(trainer, "draws", self._hooks.draws)
            buffers = {name: full(buffer) for name, buffer in pl_module.named_buffers()}
            self._save(trainer, "buffers", buffers)
            self._hooks = None

    @torch.no_grad()
    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._save(trainer, "missing", self._missing)
        pl_module.eval()
        logits = self._call.repeat(pl_module)
        pl_module.train()
        if isinstance(logits, Tensor):  # other outputs of `forward` are not compared
            self._save(trainer, "logits", (self._batch, full(logits)))

    def _save(self, trainer: L.Trainer, name: str, value: Any) -> None:
        if self._group and isinstance(value, dict):
            stages = from_all_ranks(value, self._group)
            value = {key: part[key] for part in reversed(stages) for key in part}
        if trainer.is_global_zero:
            torch.save(value, self.folder / f"{name}.pt")


class _Draws(ForwardHooks):
    """Also records which modules advance the random generator in their own code."""

    def __init__(
        self, root: nn.Module, passes: list[dict[str, Any]], position: Position | None
    ) -> None:
        self.draws: dict[str, str] = {}
        self.passes, self._position = passes, position
        super().__init__(root)

    def begin(self, rows: list[str]) -> None:
        """Called at the start of a micro-batch."""
        self.tensors, self.inside = {}, []
        self.passes.append({"rows": rows, "tensors": self.tensors})
        self._state = torch.get_rng_state()

    def _keep(self, key: str, value: Any) -> None:
        if self._position is not None:  # all micro-batches run after the last one's start
            if not self._position.is_inside:
                return
            self.tensors = self.passes[self._position.micro_batch]["tensors"]
        super()._keep(key, value)

    def note(self, what: str) -> None:
        self.draws.setdefault(self.inside[-1] if self.inside else "training_step", what)

    def changed(self) -> None:
        state = torch.get_rng_state()
        if not torch.equal(state, self._state):
            self._state = state
            self.note("another random number")


def _turn_dropout_off(note: Callable[[], Any]) -> None:
    """Replaces torch's dropout functions in this process, which runs one training."""

    def identity(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        if training and p:
            note()
        return input

    functional: Any = torch.nn.functional
    for name in DROPOUTS:
        setattr(functional, name, identity)
    attention = functional.scaled_dot_product_attention

    def without_dropout(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        *args: Any,
        **options: Any,
    ) -> Tensor:
        if dropout_p:
            note()
        return attention(query, key, value, attn_mask, 0.0, *args, **options)

    functional.scaled_dot_product_attention = without_dropout


def gradient_of(parameter: nn.Parameter) -> Tensor | None:
    """Returns the unsharded gradient, or None if there is none. Collective."""
    if is_partitioned_by_zero(parameter) or is_partitioned_in_half(parameter):
        from deepspeed.utils import safe_get_full_grad  # DeepSpeed keeps it elsewhere than in .grad

        gradient = safe_get_full_grad(parameter)
    else:
        gradient = parameter.grad
    return None if gradient is None else full(gradient)


class GradientHooks(Callback):
    """Writes factors.pt: `Factors` in the order of execution; the last is the optimizer's step.

    They are those of the norm over all stages of a pipeline.

    Args:
        folder: Destination.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._factors: dict[str, tuple[float, str]] = {}
        self._norm = 0.0  # after the last hook

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        for owner in [*trainer.callbacks, pl_module]:  # ty: ignore[missing-attribute]
            if type(owner).__module__.startswith(f"{__package__}."):
                continue
            base = Callback if isinstance(owner, Callback) else L.LightningModule
            for name in HOOKS:
                if hasattr(base, name) and (hook := own(owner, name, base)):
                    label = f"{type(owner).__name__}.{name}"
                    setattr(owner, name, self._measured(trainer, pl_module, hook, label))

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        optimizer: Any = trainer.optimizers[0]
        self._handle = on_optimizer_step(optimizer, lambda *_: self._at_step(trainer, pl_module))

    def _measured(self, trainer: Any, module: Any, hook: Any, label: str) -> Callable[..., Any]:
        @functools.wraps(hook)
        def measured(*args: Any, **kwargs: Any) -> Any:
            if trainer.global_step or accumulates(trainer):
                return hook(*args, **kwargs)
            before = _norm(trainer, module)
            result = hook(*args, **kwargs)
            self._add(label, before, _norm(trainer, module), code_locations.of_function(hook))
            return result

        return measured

    def _at_step(self, trainer: Any, module: Any) -> None:
        if trainer.global_step == 0 and self._factors:
            self._add("the optimizer's step", self._norm, _norm(trainer, module), "")

    def _add(self, label: str, before: float, after: float, location: str) -> None:
        self._factors[label] = (after / before if before else 1.0, location)
        self._norm = after

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step == 1 and self._factors and trainer.is_global_zero:
            torch.save(self._factors, self.folder / "factors.pt")
            self._factors = {}


def _norm(trainer: Any, module: Any) -> float:
    """Returns the norm of all gradients over all ranks. Collective if they are sharded."""
    if pipeline := pipeline_of(trainer.strategy):
        return pipeline.norm([*module.parameters()]).item()
    total = 0.0
    for parameter in module.parameters():
        gradient = gradient_of(parameter) if parameter.requires_grad else None
        if gradient is not None:
            total += gradient.double().pow(2).sum().item()
    return total**0.5


def first_other_factor(expected: Factors, got: Factors, tolerance: float) -> str:
    """Describes the first hook with another factor than expected; "" if there is none."""
    for hook, (factor, location) in got.items():
        expected_factor, _ = expected.get(hook, (1.0, ""))
        if abs(factor - expected_factor) > tolerance * expected_factor:
            where = f" ({location})" if location else ""
            return (
                f"{hook}{where} multiplies the gradients, which agree after backward, by"
                f" {factor:.4g} instead of {expected_factor:.4g}"
            )
    return ""
