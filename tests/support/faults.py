"""Faults in the module, the data or the strategy. `rehearse` must fail on each and name what is planted.

Each function breaks this process's package; a rehearsal's workers call it before they train. Faults in what ranks
share are in faults_of_ranks.py, of processes and of what a resumed training lacks in faults_of_runs.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from trainer_dev.module import LanguageModule

from tests.support.library import GlobalOrder


def after_configure_model(change: Callable[[Any], None]) -> None:
    """Calls `change` with the module once its model is in place."""
    configure = LanguageModule.configure_model

    def configure_model(self: Any) -> None:
        is_new = not hasattr(self, "model")
        configure(self)
        if is_new:
            change(self)

    LanguageModule.configure_model = configure_model


# ---- loss and data -------------------------------------------------------------------------------------------------


def loss_per_rank() -> None:
    """The mean over this micro-batch's own tokens: right only where all micro-batches have equally many."""

    def training_step(self: Any, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.sums(self(batch), batch["labels"])["loss"] / (batch["labels"] != -100).sum()
        self.track("train/loss", loss)
        return loss

    LanguageModule.training_step = training_step


def loss_divided_by_ranks() -> None:
    """DDP averages gradients already."""
    step = LanguageModule.training_step

    def training_step(self: Any, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return step(self, batch, batch_idx) / self.trainer.world_size

    LanguageModule.training_step = training_step


def repeating_sampler() -> None:
    """Every rank reads rank 0's rows."""
    entries = GlobalOrder._entries

    def same_for_all(self: GlobalOrder, position: int, count: int) -> list[int]:
        return entries(self, position - self.rank * self.micro_batch_size, count)

    GlobalOrder._entries = same_for_all


# ---- the forward pass ----------------------------------------------------------------------------------------------


def documents_leak() -> None:
    """Positions are not given to the model, which then takes a row for one document."""

    def forward(self: Any, batch: dict[str, Tensor]) -> Tensor:
        return self.model(input_ids=batch["input_ids"], use_cache=False).logits

    LanguageModule.forward = forward


def future_leaks() -> None:
    """Each token's embedding has the next one's in it."""

    def forward(self: Any, batch: dict[str, Tensor]) -> Tensor:
        embedded = self.model.get_input_embeddings()(batch["input_ids"])
        embedded = embedded + 0.5 * embedded.roll(-1, dims=1)
        return self.model(inputs_embeds=embedded, position_ids=batch["position_ids"], use_cache=False).logits

    LanguageModule.forward = forward


def logits_scaled() -> None:
    """By a number that no weight holds: an exported model does not know it."""
    forward = LanguageModule.forward

    def scaled(self: Any, batch: dict[str, Tensor]) -> Tensor:
        return forward(self, batch) * 1.5

    LanguageModule.forward = scaled


def mlp_of_rank() -> None:
    """The second block's MLP computes something else on rank 1."""

    def change(self: Any) -> None:
        mlp, scale = self.model.model.layers[1].mlp, 1 + 0.01 * self.trainer.global_rank
        mlp.act_fn = Scaled(mlp.act_fn, scale)

    after_configure_model(change)


class Scaled(nn.Module):
    def __init__(self, inner: nn.Module, scale: float) -> None:
        super().__init__()
        self.inner, self.scale = inner, scale

    def forward(self, *args: Any) -> Tensor:
        return self.inner(*args) * self.scale


def router_of_rank() -> None:
    """A mixture of experts routes otherwise on rank 1."""

    def change(self: Any) -> None:
        gate, scale = self.model.model.layers[1].mlp.gate, 1 - 2 * self.trainer.global_rank
        gate.register_forward_pre_hook(lambda module, args: (args[0] * scale, *args[1:]))

    after_configure_model(change)


def layer_detached() -> None:
    """The first block's MLP is computed without gradients."""

    def change(self: Any) -> None:
        mlp = self.model.model.layers[0].mlp
        mlp.forward = torch.no_grad()(mlp.forward)

    after_configure_model(change)


# ---- gradients -----------------------------------------------------------------------------------------------------


def layer_outside_of_fsdp() -> None:
    """The second block's MLP is unsharded on every rank, and its gradients are not reduced."""
    import transformers.distributed.fsdp as fsdp

    shard, left_out = fsdp.fully_shard, set()

    def fully_shard(module: Any, **options: Any) -> Any:
        if getattr(getattr(module, "self_attn", None), "layer_idx", 0) == 1:
            left_out.update(module.mlp.parameters())
        return shard(module, ignored_params=left_out, **options)

    fsdp.fully_shard = fully_shard  # ty: ignore[invalid-assignment]


def layer_outside_of_the_tensor_parallel_plan() -> None:
    """The MLP's first matrices are sharded and its last is not."""
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
    _double_gradient(lambda model: model.layers[1].input_layernorm.weight)


def expert_gradients_doubled() -> None:
    """As if the experts' gradients were not divided by all ranks."""
    _double_gradient(lambda model: model.layers[1].mlp.experts.gate_up_proj)


def _double_gradient(choose: Callable[[Any], Any]) -> None:
    def change(self: Any) -> None:
        if self.trainer.world_size > 1:
            choose(self.model.model).register_post_accumulate_grad_hook(_double)

    after_configure_model(change)


def _double(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(2)


def gradients_divided_before_the_step() -> None:
    """In the module's hook, by the number of ranks: they are averaged already."""

    def on_before_optimizer_step(self: Any, optimizer: Any) -> None:
        for parameter in self.parameters():
            parameter.grad.div_(self.trainer.world_size)

    LanguageModule.on_before_optimizer_step = on_before_optimizer_step


class HalveGradients(Callback):
    """The same by a callback, after each backward pass."""

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        for parameter in pl_module.parameters():
            parameter.grad.div_(trainer.world_size)


def callback_divides_gradients() -> None:
    LanguageModule.configure_callbacks = lambda self: [HalveGradients()]


def clipping_by_rank() -> None:
    """Each rank clips by the norm of its own shards."""

    def configure_gradient_clipping(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        local = [getattr(p.grad, "_local_tensor", p.grad) for p in self.parameters() if p.grad is not None]
        norm = torch.stack([each.norm() for each in local]).norm()
        for each in local:
            each.mul_((0.1 / norm).clamp(max=1))
        self.track("train/grad_norm", norm)

    LanguageModule.configure_gradient_clipping = configure_gradient_clipping
