"""Optional features of a module and its data beyond Lightning's interface, and their fallbacks.

A TrainingModule has a metric buffer, and PackedText an order of samples. Any other LightningModule
and LightningDataModule trains as well: only this file distinguishes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import lightning as L
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from ..by_tokens import ByTokens, value_at
from ..errors import InputError
from ..metric_names import loss_of
from .flops import Size
from .metrics import MetricBuffer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from transformers import PreTrainedConfig

__all__ = ["metrics_of", "network_of", "results_of"]

T = TypeVar("T")
VALIDATION_LOSS = "eval/loss"  # of the library's modules


def samples_of(trainer: L.Trainer) -> Any:
    """Returns what shards and orders the samples, PackedText or the callback SampleOrder; None for
    another loader."""
    for each in [data_of(trainer), *callbacks_of(trainer)]:
        if owns_order(each) and each.global_batch_size:
            return each
    return None


def owns_order(data: object) -> bool:
    """Returns whether `data` shards and orders the samples; if so, it derives accumulation too."""
    return hasattr(data, "consumed_samples")


def value_now(module: L.LightningModule, key: str, given: ByTokens) -> float:
    """Returns the value of `key` in the present optimizer step, in evaluation at the tokens
    consumed so far, which a resumed run knows too. Raises InputError if it has phases and the data
    module does not count tokens."""
    if not isinstance(given, list):
        return given
    data = data_of(module.trainer)
    if not hasattr(data, "step_samples"):
        raise InputError(
            f"{key} has phases, and {type(data).__name__} does not count tokens: give a number"
        )
    samples = data.step_samples if module.trainer.training else data.consumed_samples
    return value_at(given, samples * data.seq_len)


def typed_attribute(module: object, name: str, kind: type[T]) -> T | None:
    """Returns the attribute if it is of the library's type: a user's may have the same name."""
    value = getattr(module, name, None)
    return value if isinstance(value, kind) else None


def network_of(module: L.LightningModule) -> nn.Module:
    """Returns the network `module.model` of a TrainingModule, else the module itself."""
    return typed_attribute(module, "model", nn.Module) or module


def metrics_of(module: L.LightningModule) -> MetricBuffer:
    """Returns the module's metric buffer; a plain LightningModule gets one on first use."""
    metrics = typed_attribute(module, "metrics", MetricBuffer)
    return metrics or vars(module).setdefault("metric_buffer", MetricBuffer())


def tracks_metrics(module: L.LightningModule) -> bool:
    """Returns whether the module puts its own training metrics (train/loss …) into the buffer."""
    return typed_attribute(module, "metrics", MetricBuffer) is not None


def size_of(module: L.LightningModule) -> Size:
    """Returns the size of the model; a rank may have some of its layers."""
    return typed_attribute(module, "whole_size", Size) or Size.of(network_of(module))


def results_of(trainer: L.Trainer, module: L.LightningModule) -> dict[str, float]:
    """Returns the newest validation or test results, by `log_eval` or else by `self.log`."""
    given = typed_attribute(module, "eval_metrics", dict)
    if given:
        return given
    logged = trainer.callback_metrics.items()
    return {name: float(value) for name, value in logged if not name.startswith("train")}


def validation_loss(metrics: Iterable[str]) -> str:
    """Returns that of the metrics' names which is the module's validation loss; "" without one."""
    return loss_of(metrics, VALIDATION_LOSS, "validation")


def has_validation(module: L.LightningModule, data: L.LightningDataModule) -> bool:
    """Returns whether there is anything to validate."""
    if not is_overridden("validation_step", module, L.LightningModule):
        return False
    has_loader = is_overridden("val_dataloader", data, L.LightningDataModule)
    return bool(getattr(data, "validation_share", has_loader))


def build_config(module: L.LightningModule, data: L.LightningDataModule) -> PreTrainedConfig | None:
    """Returns the model's transformers configuration; None for another model."""
    build = getattr(module, "build_config", None)
    return build(data) if build else None


def data_of(trainer: L.Trainer) -> Any:
    """Returns the data module of a trainer; Lightning sets the attribute when it attaches one."""
    return getattr(trainer, "datamodule", None)


def callbacks_of(trainer: L.Trainer) -> list[Any]:
    """Returns the callbacks of a trainer; Lightning's connectors set the attribute."""
    return getattr(trainer, "callbacks", [])
