"""A LightningModule whose network is built for the strategy, with metrics without a device sync."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from .. import weights
from ..checkpoint.frozen import describe, exclude_frozen
from ..layout import clip_by_norm
from ..parallel import run_strategy
from ..parallel.blocks import BlockConfig
from ..parallel.place import place
from ..records import flatten
from .adapters import AdapterConfig, add_adapters
from .architecture_keys import decisive_fields
from .balance import BalanceConfig, Balancer
from .flops import Size
from .kernels import cast_experts
from .metrics import MetricBuffer
from .optim import OptimConfig, build_optimizer, build_schedule
from .quantize import quantize


class TrainingModule(L.LightningModule):
    """Base class of a training module: define `build_model` and `training_step`, and override any
    hook.

    Args:
        optim: Optimizer and schedule.
        blocks: Activation checkpointing and compilation, block by block.
        balance: Load balancing of a mixture of experts.
        adapter: Train LoRA adapters and freeze everything else. null: train all weights.
    """

    model: nn.Module
    whole_size: Size

    def __init__(
        self,
        optim: OptimConfig = OptimConfig(),  # noqa: B008  (a dataclass that nothing mutates)
        blocks: BlockConfig = BlockConfig(),  # noqa: B008
        balance: BalanceConfig = BalanceConfig(),  # noqa: B008
        adapter: AdapterConfig | None = None,
    ) -> None:
        super().__init__()
        self.optim = optim
        self.blocks = blocks
        self.balance = balance
        self.adapter = adapter
        self.frozen_base: dict[str, str] | None = None
        self.metrics = MetricBuffer()
        self.eval_metrics: dict[str, float] = {}  # of the newest validation or test, for callbacks

    @property
    def data(self) -> Any:
        """The LightningDataModule."""
        return self.trainer.datamodule  # ty: ignore[missing-attribute]

    def build_model(self, data: Any) -> nn.Module:
        """Returns the network. Only rank 0 builds it with weights; the others receive theirs."""
        raise NotImplementedError(f"{type(self).__name__} has no build_model: define it")

    def build_config(self, data: Any) -> Any:
        """Returns the transformers configuration, checked before a start; None for other models."""
        return None

    def fixed_settings(self, data: Any) -> dict[str, Any]:
        """Returns what decides the model's function or its loss, of which the weights show nothing:
        a resumed run is compared by these. Add your own keys."""
        found = {f"model.balance.{key}": value for key, value in vars(self.balance).items()}
        if self.adapter is not None:
            for key in ("alpha", "rslora", "dropout", "quantize"):
                found[f"model.adapter.{key}"] = getattr(self.adapter, key)
        classes = {key: getattr(self.optim, key) for key in ("optimizer", "lr_scheduler")}
        classes["optimizer"] = classes["optimizer"] or {"class_path": "AdamW"}
        optim = {key: value for key, value in vars(self.optim).items() if key not in classes}
        found |= flatten({"model": {"optim": optim}, **classes})
        start = "model.pretrained" if getattr(self, "pretrained", None) else "model.architecture"
        if config := self.build_config(data):
            found |= flatten(decisive_fields(config.to_dict()), f"{start}.")
        return found

    def configure_model(self) -> None:
        """Builds the model once, when the data are known, and shards it for the strategy."""
        if not hasattr(self, "model"):
            cast_experts()
            build = partial(self._build_and_count, self.data)
            self.model = place(build, self.trainer.strategy, self.blocks).train()
            if self.adapter is not None:
                self.frozen_base = weights.broadcast(self.frozen_base)  # rank 0 has the weights
                exclude_frozen(self)
            group = run_strategy(self.trainer.strategy).layers.group
            self.balancer = Balancer(self.model, self.balance, group)

    def build_with_adapters(self, data: Any) -> nn.Module:
        """Returns the network of `build_model`, with the adapters of `model.adapter`."""
        model = self.build_model(data)
        if self.adapter is None:
            return model
        model = add_adapters(model, self.adapter)
        name = getattr(self, "pretrained", None) or type(model).__name__
        self.frozen_base = describe(model, name)
        if self.adapter.quantize:
            quantize(model)
        return model

    def _build_and_count(self, data: Any) -> nn.Module:
        model = self.build_with_adapters(data)
        self.whole_size = Size.of(model)  # a stage of a pipeline has a part
        return model

    # ---- metrics ---------------------------------------------------------------------------------

    def track(self, name: str, value: Tensor) -> None:
        """Logs the mean of `value` over ranks and steps since the last log step; no device sync."""
        self.metrics.add(name, value)

    def derive(self, metrics: dict[str, float]) -> None:
        """Adds metrics that are computed from the means, at a log step."""

    def log_eval(self, metrics: dict[str, float]) -> None:
        """Logs validation or test results, by full name ("eval/loss"), to loggers and callbacks."""
        self.eval_metrics = metrics
        # for callbacks to monitor; Lightning would log it a step early
        self.log_dict(metrics, logger=False)
        if (
            not self.trainer.sanity_checking
            or self.trainer.num_sanity_val_batches == self.trainer.num_val_batches
        ):
            for logger in self.trainer.loggers:
                logger.log_metrics(metrics, step=self.global_step)

    # ---- optimization ----------------------------------------------------------------------------

    def configure_optimizers(self) -> Any:
        optimizer = build_optimizer(self, self.optim, scaled=self.trainer.scaler is not None)
        num_steps = self.trainer.estimated_stepping_batches
        every = self.trainer.val_check_interval  # of a rank's batches
        every = every if isinstance(every, int) else None
        schedule = build_schedule(optimizer, self.optim, num_steps, every)
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        if gradient_clip_val and gradient_clip_algorithm == "value":
            # one by one: tensor parallelism mixes meshes and placements
            for parameter in self.parameters():
                torch.nn.utils.clip_grad_value_(parameter, gradient_clip_val)
            gradient_clip_val = None
        norm_of = run_strategy(self.trainer.strategy).layers.norm
        norm = clip_by_norm(self.parameters(), gradient_clip_val, norm_of)
        if norm is not None:  # DeepSpeed clips in its own step and reports the norm itself
            self.track("train/grad_norm", norm)
