"""Faults that a user's edit, or ours, could bring in. `rehearse` must fail on each and say where it is.

Each function breaks this process's package; a rehearsal's workers call it before they train.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback

from ..callbacks.random_state import RandomState
from ..module import LanguageModule
from ..text.order import GlobalOrder


def loss_per_rank() -> None:
    """The mean over this micro-batch's own tokens: right only where all micro-batches have equally many."""

    def training_step(self: Any, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        losses, counted = self.loss(self(batch), batch["labels"]), batch["labels"] != -100
        loss = losses.sum() / counted.sum()
        self.track("train/loss", loss)
        return loss

    LanguageModule.training_step = training_step


def layer_outside_of_fsdp() -> None:
    """The second block's MLP stays whole on every rank, and nobody reduces its gradients."""
    import transformers.distributed.fsdp as fsdp

    shard, left_out = fsdp.fully_shard, set()

    def fully_shard(module: Any, **options: Any) -> Any:
        if getattr(getattr(module, "self_attn", None), "layer_idx", 0) == 1:
            left_out.update(module.mlp.parameters())
        return shard(module, ignored_params=left_out, **options)

    fsdp.fully_shard = fully_shard  # ty: ignore[invalid-assignment]


def layer_outside_of_the_tensor_parallel_plan() -> None:
    """The MLP's first matrices are cut and its last is not."""
    build = LanguageModule.build_config

    def build_config(self: Any, data: Any) -> Any:
        config = build(self, data)
        config.base_model_tp_plan = {k: v for k, v in config.base_model_tp_plan.items() if not k.endswith(".down_proj")}
        return config

    LanguageModule.build_config = build_config


def gradients_reduced_twice() -> None:
    """A norm's gradient under tensor parallelism is summed over the ranks once more at each micro-batch.

    So it is in transformers 5.23, for the norms of queries and keys. Neither the loss nor the gradients' joint norm
    shows it within their tolerances in every model.
    """
    configure = LanguageModule.configure_model

    def configure_model(self: Any) -> None:
        configure(self)
        if self.trainer.world_size > 1:
            weight = self.model.model.layers[1].input_layernorm.weight
            weight.register_post_accumulate_grad_hook(_double)

    LanguageModule.configure_model = configure_model


def _double(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(2)


def repeating_sampler() -> None:
    """Every rank reads rank 0's rows."""
    entries = GlobalOrder._entries

    def same_for_all(self: GlobalOrder, position: int, count: int) -> list[int]:
        return entries(self, position - self.rank * self.micro_batch_size, count)

    GlobalOrder._entries = same_for_all


def unseeded_parameter() -> None:
    """One parameter is drawn from a generator of its own."""
    build = LanguageModule.build_model

    def build_model(self: Any, data: Any) -> Any:
        model: Any = build(self, data)
        generator = torch.Generator()
        generator.seed()
        weight = model.model.norm.weight.data
        if not weight.is_meta:
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.1)
        return model

    LanguageModule.build_model = build_model


def random_state_not_saved() -> None:
    """As Lightning leaves it: dropout begins anew after a resume."""
    for hook in ("on_save_checkpoint", "on_load_checkpoint"):
        setattr(RandomState, hook, getattr(Callback, hook))


def buffer_by_rank() -> None:
    """A buffer that is computed from the rank."""
    configure = LanguageModule.configure_model

    def configure_model(self: Any) -> None:
        configure(self)
        self.register_buffer("temperature", torch.tensor(1.0 + 0.1 * self.trainer.global_rank), persistent=False)

    LanguageModule.configure_model = configure_model
