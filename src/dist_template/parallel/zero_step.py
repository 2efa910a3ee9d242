"""An optimizer step by DeepSpeed's engine, and how one is skipped."""

from __future__ import annotations

import math
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from ..compat.deepspeed import can_veto_steps
from ..compat.lightning import EnginePrecision, accumulates


class ZeroPrecision(EnginePrecision):
    """Lets DeepSpeed cast parameters, clip, and average over an accumulation."""

    def __init__(self, precision: Any, autocast: bool) -> None:
        super().__init__(precision)
        if autocast:
            self.use_dtype(torch.float32)  # autocast casts in each operation

    def convert_module(self, module: nn.Module) -> nn.Module:
        return module  # DeepSpeed casts parameters, and keeps buffers in fp32

    def backward(self, tensor: Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        """Backpropagates by the engine, and finishes a micro-batch that no optimizer step follows.

        The engine must see every micro-batch; the module's hooks of a step run once per step."""
        kwargs["scale_wrt_gas"] = False  # Lightning has divided the loss already
        engine, is_last = model.trainer.model, not accumulates(model.trainer)
        engine.set_gradient_accumulation_boundary(is_last)
        super().backward(tensor, model, *args, **kwargs)
        if not is_last:
            engine.step()

    def optimizer_step(self, optimizer: Any, model: Any, closure: Any, **kwargs: Any) -> Any:
        engine = model.trainer.model
        result = super().optimizer_step(optimizer, model, closure, **kwargs)
        if getattr(engine.optimizer, "cpu_offload", False) and engine.optimizer.overflow:
            # DeepSpeed 0.19.8 clears them only without offload; in bf16 the next step adds them.
            engine.optimizer.averaged_gradients = dict.fromkeys(engine.optimizer.averaged_gradients)
        return result

    def skip_step(self, model: L.LightningModule, anomalous: Tensor) -> None:
        """Skips the engine's next step where `anomalous` () is true; equal on all ranks.

        The step is handled like an overflow in fp16: gradients are cleared, weights and moments
        stay. `anomalous` is read on the host; DeepSpeed reads the gradients' norm there in every step anyway."""
        engine: Any = model.trainer.model
        optimizer = engine.optimizer
        skips = bool(anomalous)
        if not can_veto_steps(optimizer) and skips:  # a norm that is NaN makes it skip the step
            for gradients in optimizer.fp32_groups_gradients_flat:
                gradients.fill_(math.nan)
        optimizer.vetoed = skips

    @staticmethod
    def outcome(model: L.LightningModule) -> tuple[bool, float]:
        """Returns whether the newest step's gradients were non-finite, and their norm, or -1."""
        engine: Any = model.trainer.model
        skipped, vetoed = engine.optimizer.overflow, engine.optimizer.vetoed
        if getattr(engine.optimizer, "found_overflow", skipped and not vetoed):
            return True, math.inf
        return False, -1.0 if skipped else float(engine.get_global_grad_norm())
