"""A LightningModule whose network is built for the strategy, with metrics without a device sync."""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from ..by_tokens import AUTO
from ..checkpoint.frozen import FrozenHash
from ..compat.transformers import cast_experts
from ..errors import InputError
from ..layout import clip_by_norm
from ..parallel import rank_view
from ..parallel.blocks import BlockConfig
from ..parallel.place import build_unsharded, place
from ..records import flatten
from .any_module import data_of
from .balance import BalanceConfig, Balancer
from .flops import Size
from .metrics import MetricBuffer
from .optim import OptimConfig, build_optimizer, build_schedule

__all__ = ["TrainingModule"]

NOT_DECISIVE = re.compile(
    r"_.*|vocab_size|max_position_embeddings|.*token_id|transformers_version|architectures|.*dtype|"
    r"use_cache|output_.*|return_dict|.*label.*"
)


class TrainingModule(L.LightningModule):
    """Base class of a training module: define `build_model` and `training_step`; override any hook.

    Args:
        optim: Optimizer and schedule.
        blocks: Activation checkpointing and compilation, block by block.
        balance: Load balancing of a mixture of experts."""

    model: nn.Module
    whole_size: Size

    def __init__(
        self,
        optim: OptimConfig = OptimConfig(),  # noqa: B008  (a dataclass that nothing mutates)
        blocks: BlockConfig = BlockConfig(),  # noqa: B008
        balance: BalanceConfig = BalanceConfig(),  # noqa: B008
    ) -> None:
        super().__init__()
        self.optim = optim
        self.blocks = blocks
        self.balance = balance
        self.metrics = MetricBuffer()
        self.eval_metrics: dict[str, float] = {}  # of the newest validation or test, for callbacks

    @property
    def data(self) -> Any:
        """The LightningDataModule."""
        return data_of(self.trainer)

    def build_model(self, data: Any) -> nn.Module:
        """Returns the network, on torch's meta device; ranks compute its weights later, in
        turns."""
        raise NotImplementedError(f"{type(self).__name__} has no build_model: define it")

    def build_config(self, data: Any) -> Any:
        """Returns the transformers configuration, checked before a start; None for other models."""
        return None

    def fixed_settings(self, data: Any) -> dict[str, object]:
        """Returns the settings that change the model's function or its loss but no weight's shape:
        a resume compares them. Add your own keys."""
        found = {f"model.balance.{key}": value for key, value in vars(self.balance).items()}
        optimizer = self.optim.chosen
        if optimizer is None:
            optimizer = {"class_path": "AdamW"}
        classes = {"optimizer": optimizer, "lr_scheduler": self.optim.lr_scheduler_class}
        named = {*classes, "optimizer_class", "lr_scheduler_class"}
        optim = {key: value for key, value in vars(self.optim).items() if key not in named}
        if isinstance(optim["learning_rate"], list):
            optim["learning_rate"] = {"phases": optim["learning_rate"]}
        found |= flatten({"model": {"optim": optim}, **classes})
        start = "model.pretrained" if getattr(self, "pretrained", None) else "model.architecture"
        config = self.build_config(data)
        if config is not None:
            found |= flatten(decisive_fields(config.to_dict()), f"{start}.")
        return found

    def configure_model(self) -> None:
        """Builds the model once, when the data are known, and shards it for the strategy."""
        if hasattr(self, "model"):
            return

        def build() -> nn.Module:
            model = self.build_network(self.data)
            self.whole_size = Size.of(model)  # a stage of a pipeline has a part
            return model

        cast_experts()
        self.frozen = FrozenHash()
        self.model = place(build, self.trainer.strategy, self.blocks, self.frozen).train()
        strategy = rank_view(self.trainer.strategy)
        self.balancer = Balancer(
            self.model, self.balance, strategy.layers.group, strategy.sequence_group
        )

    def build_network(self, data: Any, quantized: bool = True) -> nn.Module:
        """Builds the network of `build_model`; a subclass may add to it. `quantized`: whether
        frozen weights may be packed; False to trace them on the meta device."""
        return self.build_model(data)

    def build_on_host(self, data: Any) -> nn.Module:
        """Returns the network with the weights from which a training starts, in this process and in
        full."""
        self.frozen = FrozenHash()
        return build_unsharded(partial(self.build_network, data), self.frozen)

    def track(self, name: str, value: Tensor) -> None:
        """Logs the mean of `value` over ranks and steps since the last log step; no device sync."""
        self.metrics.add(name, value)

    def derive(self, metrics: dict[str, float]) -> None:
        """Adds metrics that are computed from the means, at a log step."""

    def log_eval(self, metrics: dict[str, float]) -> None:
        """Logs validation or test results, by full name ("eval/loss"), to loggers and callbacks."""
        self.eval_metrics = metrics
        # For callbacks to monitor; Lightning would log it to the loggers a step early.
        self.log_dict(metrics, logger=False)
        trainer = self.trainer
        if not trainer.sanity_checking or trainer.num_sanity_val_batches == trainer.num_val_batches:
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=self.global_step)

    def configure_optimizers(self) -> Any:
        if self.optim.learning_rate == AUTO:
            raise InputError(
                "model.optim.learning_rate auto is chosen by `fit` on the command line: give a"
                " number"
            )
        trainer = self.trainer
        group = rank_view(trainer.strategy).layers.batch_group
        optimizer = build_optimizer(self, self.optim, trainer.scaler is not None, group)
        batches = getattr(trainer, "val_check_interval", None)
        if not isinstance(batches, int):  # a share of an epoch
            batches = None
        num_steps = trainer.estimated_stepping_batches
        schedule = build_schedule(optimizer, self.optim, num_steps, batches, self.data)
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        if gradient_clip_val and gradient_clip_algorithm == "value":
            # One by one: tensor parallelism mixes meshes and placements.
            for parameter in self.parameters():
                torch.nn.utils.clip_grad_value_(parameter, gradient_clip_val)
            gradient_clip_val = None
        norm_of = rank_view(self.trainer.strategy).layers.norm
        norm = clip_by_norm(self.parameters(), gradient_clip_val, norm_of)
        if norm is not None:  # DeepSpeed clips in its own step and reports the norm itself
            self.track("train/grad_norm", norm)


def decisive_fields(fields: Mapping[str, object]) -> dict[str, object]:
    """Returns the fields of a transformers configuration that change a model's function, without
    those that the data set."""
    found = {}
    for key, value in fields.items():
        if not NOT_DECISIVE.fullmatch(key):
            found[key] = decisive_fields(value) if isinstance(value, dict) else value
    return found
