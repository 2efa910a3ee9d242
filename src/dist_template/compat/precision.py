"""Precision plugins that call a step's hooks by loop.py, where Lightning's own ask each callback,
empty ones too.

Read in lightning 2.6.6, plugins/precision/. The second class has its name from Lightning's: under
it a checkpoint holds the state of the loss scaler."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.pytorch.plugins import precision
from torch import Tensor

from .hooks import call
from .torch import step_of


class Precision(precision.Precision):
    """The four methods that call hooks, a context within a context, a profiler's range."""

    def train_step_context(self) -> Any:
        return self.forward_context()

    def optimizer_step(
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **options: Any
    ) -> Any:
        closure = partial(self._wrap_closure, model, optimizer, closure)
        return step_of(optimizer)(closure=closure, **options)

    def pre_backward(self, tensor: Tensor, module: Any) -> Tensor:
        module.trainer.fit_loop.epoch_loop.each("on_before_backward", tensor)
        return tensor

    def post_backward(self, tensor: Tensor, module: Any) -> Tensor:
        module.trainer.fit_loop.epoch_loop.each("on_after_backward")
        return tensor

    def _after_closure(self, model: Any, optimizer: Any) -> None:
        trainer = model.trainer
        trainer.fit_loop.epoch_loop.each("on_before_optimizer_step", optimizer)
        algorithm = trainer.gradient_clip_algorithm
        self._clip_gradients(
            model, optimizer, trainer.gradient_clip_val, gradient_clip_algorithm=algorithm
        )

    def _clip_gradients(
        self, model: Any, optimizer: Any, clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        if model.automatic_optimization:
            clip = partial(
                model.configure_gradient_clipping,
                gradient_clip_val=clip_val,
                gradient_clip_algorithm=gradient_clip_algorithm,
            )
            call(model, "configure_gradient_clipping", clip, optimizer)


class MixedPrecision(precision.MixedPrecision, Precision):
    """What Lightning's MixedPrecision calls by `super()` is the class above."""


def without_overhead(plugin: Any) -> Any:
    """Returns a plugin of a class here in place of Lightning's own; another plugin as it is."""
    if type(plugin) is precision.Precision:
        return Precision()
    if type(plugin) is precision.MixedPrecision:
        return MixedPrecision(plugin.precision, plugin.device, plugin.scaler)
    return plugin
