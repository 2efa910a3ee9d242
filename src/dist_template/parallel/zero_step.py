"""An optimizer step by DeepSpeed: what its engine does itself, and how it is kept from taking one."""

from __future__ import annotations

import math
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from ..compat.deepspeed import can_veto_steps
from ..compat.lightning import EnginePrecision


class ZeroPrecision(EnginePrecision):
    """Leaves to DeepSpeed what it does itself: casting parameters, clipping, and the mean over an accumulation."""

    def __init__(self, precision: Any, autocast: bool) -> None:
        super().__init__(precision)
        if autocast:
            self.use_dtype(torch.float32)  # weights and inputs stay; operations choose

    def convert_module(self, module: nn.Module) -> nn.Module:
        return module  # DeepSpeed casts parameters, and keeps buffers such as rotary frequencies in fp32

    def backward(self, tensor: Tensor, model: L.LightningModule, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        super().backward(tensor, model, optimizer, *args, scale_wrt_gas=False, **kwargs)  # Lightning has divided

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
        if not can_veto_steps(optimizer) and is_bad:  # the norm then keeps it from stepping
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
