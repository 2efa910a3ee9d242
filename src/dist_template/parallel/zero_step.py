"""An optimizer step by DeepSpeed: what its engine does itself, and how it is kept from taking one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from torch import Tensor, nn


def trace_whole_forwards(engine: Any) -> None:
    """Let ZeRO-3 begin its record of which module follows which where a micro-batch begins, and there alone.

    DeepSpeed (0.19.8) begins it whenever the LightningModule is called, and Lightning (2.6.6) calls it twice: once as
    what `training_step` is called through, and then `training_step` calls `self(batch)`. A record that is begun in the
    middle does not fit the next micro-batch, is thrown away and made anew for ever: nothing is fetched ahead, and each
    time all ranks compare theirs, on the host. Seen on two processes: 84 all-gathers and 16 broadcasts in a step
    that without it has 21 and none (tests/parallel/test_collectives.py).
    """
    offload = getattr(engine.optimizer, "parameter_offload", engine.optimizer)
    offload.fwd_pre_hook.remove()
    offload.fwd_pre_hook = engine.register_forward_pre_hook(lambda *_: offload.get_param_coordinator().reset_step())


class ZeroPrecision(DeepSpeedPrecision):
    """Leaves to DeepSpeed what it does itself: casting parameters, clipping, and the mean over an accumulation."""

    def __init__(self, precision: Any, autocast: bool) -> None:
        super().__init__(precision)
        if autocast:
            self._desired_dtype = torch.float32  # weights and inputs stay; operations choose

    def convert_module(self, module: nn.Module) -> nn.Module:
        return module  # DeepSpeed casts parameters, and keeps buffers such as rotary frequencies in fp32

    def backward(self, tensor: Tensor, model: L.LightningModule, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        super().backward(tensor, model, optimizer, *args, scale_wrt_gas=False, **kwargs)  # Lightning has divided

    def _after_closure(self, model: L.LightningModule, optimizer: Any) -> None:
        engine: Any = model.trainer.model
        if engine.is_gradient_accumulation_boundary():
            super()._after_closure(model, optimizer)  # on_before_optimizer_step, once per optimizer step

    def _clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        """DeepSpeed clips what it has reduced. In stage 1, `.grad` holds this rank's share until then."""

    def optimizer_step(self, optimizer: Any, model: L.LightningModule, closure: Any, **kwargs: Any) -> Any:
        engine: Any = model.trainer.model
        is_last = engine.is_gradient_accumulation_boundary()
        result = super().optimizer_step(optimizer, model, closure, **kwargs)
        if is_last and engine.optimizer.overflow and getattr(engine.optimizer, "cpu_offload", False):
            # DeepSpeed 0.19.8 forgets them only where nothing is offloaded: every later step would overflow as well.
            engine.optimizer.averaged_gradients = dict.fromkeys(engine.optimizer.averaged_gradients)
        return result

    def leave_out(self, model: L.LightningModule, bad: Tensor) -> None:
        """Keep DeepSpeed from taking the step that comes next, if `bad` (), equal on all ranks, says so.

        That goes the way of an overflow in fp16: gradients are cleared, weights and moments stay. Reads `bad` on the
        host; DeepSpeed reads the gradients' norm in every step anyway.
        """
        engine: Any = model.trainer.model
        optimizer = engine.optimizer
        is_bad = bool(bad)
        if hasattr(optimizer, "_update_scale"):  # stages 1, 2 and 3 decide there, after the norm and before the update
            if not hasattr(optimizer, "vetoed"):
                optimizer._update_scale = _with_veto(optimizer, optimizer._update_scale)
        elif is_bad:  # BF16_Optimizer, of stage 1 that accumulates in fp32, looks at nothing but the norm
            for gradients in optimizer.fp32_groups_gradients_flat:
                gradients.fill_(math.nan)
        optimizer.vetoed = is_bad

    @staticmethod
    def outcome(model: L.LightningModule) -> tuple[bool, float]:
        """Whether DeepSpeed itself found the newest step's gradients not finite, and their norm, -1 if not computed."""
        engine: Any = model.trainer.model
        left_out, vetoed = engine.optimizer.overflow, engine.optimizer.vetoed
        if getattr(engine.optimizer, "found_overflow", left_out and not vetoed):
            return True, math.inf
        return False, -1.0 if left_out else float(engine.get_global_grad_norm())


def _with_veto(optimizer: Any, update_scale: Callable[[bool], None]) -> Callable[[bool], None]:
    """`_update_scale`, by which an optimizer of ZeRO's learns of an overflow, with `optimizer.vetoed` counted as one.

    The loss scale is not lowered for it: a spike is not the scale's fault.
    """

    def vetoed(has_overflow: bool = False) -> None:
        optimizer.found_overflow = has_overflow
        optimizer.overflow = has_overflow or optimizer.vetoed
        update_scale(has_overflow)

    return vetoed
