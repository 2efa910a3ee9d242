"""Optional features of a module and its data beyond Lightning's interface, and their fallbacks.

A TrainingModule has a metric buffer, and PackedText an order of samples. Any other LightningModule
and LightningDataModule trains as well: only this file distinguishes them.
"""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden

from ..parallel.protocol import Samples
from ..parallel.run_strategy import run_trainer
from .flops import Size
from .metrics import MetricBuffer


def samples_of(trainer: L.Trainer) -> Samples | None:
    """Returns the stream of samples; None for a loader that defines its own order."""
    owners: list[Any] = [run_trainer(trainer).datamodule, *run_trainer(trainer).callbacks]
    for each in owners:
        if owns_order(each) and each.global_batch_size:
            return each
    return None


def owns_order(data: Any) -> bool:
    """Returns whether `data` shards and orders the samples; if so, it derives accumulation too."""
    return hasattr(data, "consumed_samples")


def own(module: Any, name: str, kind: type) -> Any:
    """Returns the attribute if it is of the library's type: a user's may have the same name."""
    value = getattr(module, name, None)
    return value if isinstance(value, kind) else None


def metrics_of(module: Any) -> MetricBuffer:
    """Returns the module's metric buffer; a plain LightningModule gets one on first use."""
    return own(module, "metrics", MetricBuffer) or vars(module).setdefault(
        "metric_buffer", MetricBuffer()
    )


def tracks_metrics(module: Any) -> bool:
    """Returns whether the module puts its own training metrics (train/loss …) into the buffer."""
    return own(module, "metrics", MetricBuffer) is not None


def size_of(trainer: Any, module: Any) -> Size:
    """Returns the size of the model, of which a rank may have some layers."""
    return own(module, "whole_size", Size) or Size.of(getattr(module, "model", module))


def results_of(trainer: Any, module: Any) -> dict[str, float]:
    """Returns the newest validation or test results: those of `log_eval`, else of `self.log`."""
    if given := own(module, "eval_metrics", dict):
        return given
    logged = trainer.callback_metrics.items()
    return {name: float(value) for name, value in logged if not name.startswith("train")}


def has_validation(module: Any, data: Any) -> bool:
    """Returns whether there is anything to validate."""
    own_step = is_overridden("validation_step", module, LightningModule)
    own_loader = is_overridden("val_dataloader", data, LightningDataModule)
    return bool(own_step and getattr(data, "validation_share", own_loader))


def build_config(module: Any, data: Any) -> Any:
    """Returns the model's transformers configuration; None for another model."""
    return module.build_config(data) if hasattr(module, "build_config") else None
