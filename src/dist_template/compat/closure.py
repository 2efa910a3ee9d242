"""The closure of an optimizer step: forward pass, `zero_grad`, backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from torch import Tensor


class StepClosure(Closure):
    """Lightning's closure, of one function in place of three."""

    def __init__(self, step: Callable[[], dict[str, Any]]) -> None:
        super(Closure, self).__init__()
        self._step = step

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor | None:
        with torch.enable_grad():
            outputs: Any = self._step()
        self._result = outputs
        return outputs.get("loss")


def with_loss(output: Any, trainer: Any) -> tuple[Tensor | None, dict[str, Any]]:
    """Returns the loss, divided by the accumulation, and the outputs for callbacks."""
    if output is None and trainer.world_size > 1:
        raise RuntimeError(
            "Skipping the `training_step` by returning None in distributed training is not"
            " supported: one rank cannot skip a step that all ranks take together"
        )
    if isinstance(output, Tensor) and trainer.accumulate_grad_batches == 1:
        return output, {"loss": output.detach()}
    result = ClosureResult.from_training_step_output(output, trainer.accumulate_grad_batches)
    if result.loss is None:
        Closure.warning_cache.warn("`training_step` returned `None`: this batch is skipped")
        return None, {}
    return result.closure_loss, result.asdict()
