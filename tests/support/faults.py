"""Faults that `rehearse` must name: in the module, the data, the strategy, processes, checkpoints.

Each function breaks this process's package; a rehearsal's workers call it before they train.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor, nn
from trainer_dev.data import DataModule
from trainer_dev.module import LanguageModule

from dist_template.callbacks import RandomState
from dist_template.parallel.pipeline.run import Pipeline
from tests.support.library import global_order

Batch = dict[str, Tensor]


def replaces(name: str, owner: Any = LanguageModule) -> Callable[[Callable], Callable[[], None]]:
    """Makes a fault of a method: it replaces `name` of `owner`, which it gets as first argument."""

    def decorate(new: Callable) -> Callable[[], None]:
        @wraps(new)
        def plant() -> None:
            old = getattr(owner, name, None)
            setattr(owner, name, lambda *args, **options: new(old, *args, **options))

        return plant

    return decorate


def after_configure_model(change: Callable[[Any], None]) -> Callable[[], None]:
    """Makes a fault that calls `change` with the module once its model is in place."""

    def configure_model(configure: Any, self: Any) -> None:
        is_new = not hasattr(self, "model")
        configure(self)
        if is_new:
            change(self)

    return wraps(change)(replaces("configure_model")(configure_model))


# ---- loss and data -------------------------------------------------------------------------------


@replaces("training_step")
def loss_per_rank(_: Any, self: Any, batch: Batch, batch_idx: int) -> Tensor:
    """The mean over this micro-batch's tokens: right only if all micro-batches have as many."""
    loss = self.sums(self(batch), batch["labels"])["loss"] / (batch["labels"] != -100).sum()
    self.track("train/loss", loss)
    return loss


@replaces("training_step")
def loss_divided_by_ranks(step: Any, self: Any, batch: Batch, batch_idx: int) -> Tensor:
    """DDP averages gradients already."""
    return step(self, batch, batch_idx) / self.trainer.world_size


@replaces("_entries", global_order.GlobalOrder)
def repeating_sampler(entries: Any, self: Any, position: int, count: int) -> list[int]:
    """Every rank reads rank 0's rows."""
    return entries(self, position - self.rank * self.micro_batch_size, count)


# ---- the forward pass ----------------------------------------------------------------------------


@replaces("forward")
def documents_leak(_: Any, self: Any, batch: Batch) -> Tensor:
    """Positions are not given to the model, which then takes a row for one document."""
    return self.model(input_ids=batch["input_ids"], use_cache=False).logits


@replaces("forward")
def future_leaks(_: Any, self: Any, batch: Batch) -> Tensor:
    """Each token's embedding contains the next one's."""
    embedded = self.model.get_input_embeddings()(batch["input_ids"])
    embedded = embedded + 0.5 * embedded.roll(-1, dims=1)
    positions = batch["position_ids"]
    return self.model(inputs_embeds=embedded, position_ids=positions, use_cache=False).logits


@after_configure_model
def mlp_of_rank(self: Any) -> None:
    """The second block's MLP computes something else on rank 1."""
    mlp = self.model.model.layers[1].mlp
    mlp.act_fn = Scaled(mlp.act_fn, 1 + 0.01 * self.trainer.global_rank)


class Scaled(nn.Module):
    def __init__(self, inner: nn.Module, scale: float) -> None:
        super().__init__()
        self.inner, self.scale = inner, scale

    def forward(self, *args: Any) -> Tensor:
        return self.inner(*args) * self.scale


@after_configure_model
def router_of_rank(self: Any) -> None:
    """A mixture of experts routes otherwise on rank 1."""
    gate, scale = self.model.model.layers[1].mlp.gate, 1 - 2 * self.trainer.global_rank
    gate.register_forward_pre_hook(lambda module, args: (args[0] * scale, *args[1:]))


@after_configure_model
def layer_detached(self: Any) -> None:
    """The first block's MLP is computed without gradients."""
    mlp = self.model.model.layers[0].mlp
    mlp.forward = torch.no_grad()(mlp.forward)


# ---- gradients -----------------------------------------------------------------------------------


def layer_outside_of_fsdp() -> None:
    """The second block's MLP is unsharded on every rank, and its gradients are not reduced."""
    import transformers.distributed.fsdp as fsdp

    shard, ignored = fsdp.fully_shard, set()

    def fully_shard(module: Any, **options: Any) -> Any:
        if getattr(getattr(module, "self_attn", None), "layer_idx", 0) == 1:
            ignored.update(module.mlp.parameters())
        return shard(module, ignored_params=ignored, **options)

    fsdp.fully_shard = fully_shard  # ty: ignore[invalid-assignment]


@replaces("build_config")
def layer_outside_of_the_tensor_parallel_plan(build: Any, self: Any, data: Any) -> Any:
    """The MLP's first matrices are sharded and its last is not."""
    config = build(self, data)
    plan = config.base_model_tp_plan.items()
    config.base_model_tp_plan = {k: v for k, v in plan if not k.endswith(".down_proj")}
    return config


def double_gradient(self: Any, parameter: Tensor) -> None:
    def double(each: Tensor) -> None:
        assert each.grad is not None
        each.grad.mul_(2)

    if self.trainer.world_size > 1:
        parameter.register_post_accumulate_grad_hook(double)


@after_configure_model
def gradients_reduced_twice(self: Any) -> None:
    """A norm's gradient under tensor parallelism is summed once more at each micro-batch.

    So it is in transformers 5.23, for the norms of queries and keys. Neither the loss nor the
    gradients' joint norm shows it within their tolerances in every model.
    """
    double_gradient(self, self.model.model.layers[1].input_layernorm.weight)


@after_configure_model
def expert_gradients_doubled(self: Any) -> None:
    """As if the experts' gradients were not divided by all ranks."""
    double_gradient(self, self.model.model.layers[1].mlp.experts.gate_up_proj)


@replaces("on_before_optimizer_step")
def gradients_divided_before_the_step(_: Any, self: Any, optimizer: Any) -> None:
    """In the module's hook, by the number of ranks: they are averaged already."""
    for parameter in self.parameters():
        parameter.grad.div_(self.trainer.world_size)


class HalveGradients(Callback):
    """The same by a callback, after each backward pass."""

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        for parameter in pl_module.parameters():
            parameter.grad.div_(trainer.world_size)


@replaces("configure_callbacks")
def callback_divides_gradients(*_: Any) -> list[Callback]:
    return [HalveGradients()]


@replaces("configure_gradient_clipping")
def clipping_by_rank(_: Any, self: Any, *args: Any, **options: Any) -> None:
    """Each rank clips by the norm of its own shards."""
    found = [p.grad for p in self.parameters() if p.grad is not None]
    local = [getattr(each, "_local_tensor", each) for each in found]
    norm = torch.stack([each.norm() for each in local]).norm()
    for each in local:
        each.mul_((0.1 / norm).clamp(max=1))
    self.track("train/grad_norm", norm)


# ---- what ranks must share -----------------------------------------------------------------------


@replaces("build_model")
def unseeded_parameter(build: Any, self: Any, data: Any) -> Any:
    """One parameter is drawn from a generator of its own."""
    model: Any = build(self, data)
    generator = torch.Generator()
    generator.seed()
    weight = model.model.norm.weight.data
    if not weight.is_meta:
        weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.1)
    return model


@after_configure_model
def buffer_by_rank(self: Any) -> None:
    """A buffer that is computed from the rank."""
    value = torch.tensor(1.0 + 0.1 * self.trainer.global_rank)
    self.register_buffer("temperature", value, persistent=False)


@after_configure_model
def running_mean_by_rank(self: Any) -> None:
    """Each rank updates a buffer from its samples, as in a batch norm that is not synchronized."""

    def update(module: nn.Module, args: Any, output: Tensor) -> None:
        running_mean: Any = module.running_mean
        if module.training:
            running_mean.lerp_(output.detach().float().mean(), 0.1)

    norm = self.model.model.layers[0].input_layernorm
    norm.register_buffer("running_mean", torch.zeros(()))
    norm.register_forward_hook(update)


@replaces("on_train_batch_end")
def noise_on_a_weight(_: Any, self: Any, *args: Any) -> None:
    """After each step, drawn on each rank for itself."""
    if self.trainer.fit_loop._should_accumulate():
        return
    generator = torch.Generator().manual_seed(self.trainer.global_rank)
    weight = self.model.model.layers[1].mlp.up_proj.weight.data
    weight.add_(torch.randn(weight.shape, generator=generator), alpha=1e-3)


# ---- stages of a pipeline ------------------------------------------------------------------------

SKIPPED: list[Tensor] = []  # of this process


@after_configure_model
def block_reads_what_another_stage_has_filled(self: Any) -> None:
    """The first block passes a value to the second through a list, empty on the second's rank."""
    first, second = (self.model.model.layers[number] for number in (0, 1))
    run_first, run_second = first.forward, second.forward

    def fill(hidden: Tensor, **options: Any) -> Tensor:
        SKIPPED[:] = [hidden]
        return run_first(hidden, **options)

    def read(hidden: Tensor, **options: Any) -> Tensor:
        return run_second(hidden, **options) + 0.1 * sum(SKIPPED)

    first.forward, second.forward = fill, read


@replaces("_sum_shared", Pipeline)
def tied_gradient_not_summed(*_: Any) -> None:
    """The first and the last stage have a copy each of a tied weight and keep its own gradient."""


@replaces("on_before_optimizer_step")
def last_stage_halves_gradients(_: Any, self: Any, optimizer: Any) -> None:
    """The output layer, which only the last stage has, gets half of its gradient."""
    for parameter in self.model.lm_head.parameters():
        parameter.grad.mul_(0.5)


@replaces("training_step")
def last_stage_counts_in_python(step: Any, self: Any, batch: Any, batch_idx: int) -> Any:
    """The loss's weight grows with an attribute that is set on the last stage alone."""
    loss = step(self, batch, batch_idx)
    self.num_losses = getattr(self, "num_losses", 0) + 1
    return loss * min(1.0, self.num_losses / 100)


# ---- processes -----------------------------------------------------------------------------------


def on_rank_one(act: Callable[[], Any]) -> Callable[[], None]:
    """Makes a fault that calls `act` in rank 1's training step, in the second step."""

    def training_step(step: Any, self: Any, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_rank == 1 and self.trainer.global_step == 1:
            act()
        return step(self, batch, batch_idx)

    return wraps(act)(replaces("training_step")(training_step))


@on_rank_one
def rank_killed() -> None:
    print("device 1 has fallen off the bus", file=sys.stderr)
    os.kill(os.getpid(), signal.SIGKILL)


@on_rank_one
def crash_in_c() -> None:
    def read_address_zero() -> None:
        ctypes.string_at(0)

    read_address_zero()


@on_rank_one
def error_on_one_rank() -> None:
    raise ValueError("no such shard")


@on_rank_one
def hang() -> None:
    time.sleep(600)


@on_rank_one
def collective_on_one_rank() -> None:
    dist.all_reduce(torch.ones(3))


# ---- what no checkpoint holds --------------------------------------------------------------------


def random_state_not_saved() -> None:
    """As in Lightning: a resumed training draws other dropout masks."""
    for hook in ("on_save_checkpoint", "on_load_checkpoint"):
        setattr(RandomState, hook, getattr(Callback, hook))


@replaces("training_step")
def counter_in_python(step: Any, self: Any, batch: Any, batch_idx: int) -> Any:
    """The loss's weight grows with an attribute."""
    self.num_calls = getattr(self, "num_calls", 0) + 1
    return step(self, batch, batch_idx) * min(1.0, self.num_calls / 100)


class ForgetfulAdamW(torch.optim.AdamW):
    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state["exp_avg"].zero_()


@replaces("configure_optimizers")
def optimizer_forgets(configure: Any, self: Any) -> Any:
    made = configure(self)
    made["optimizer"].__class__ = ForgetfulAdamW
    return made


@replaces("on_load_checkpoint")
def schedule_starts_anew(_: Any, self: Any, checkpoint: dict[str, Any]) -> None:
    checkpoint["lr_schedulers"][0]["last_epoch"] = 0


@replaces("__iter__", global_order.GlobalOrder)
def data_start_anew(iterate: Any, self: Any) -> Iterator[list[int]]:
    """The order of samples does not know how many have been consumed."""
    self.consumed = lambda: 0
    return iterate(self)


def average_in_a_buffer() -> None:
    """An average of weights that is no part of the state dict."""

    def update(_: Any, self: Any, *args: Any) -> None:
        self.average.lerp_(self.model.model.norm.weight.detach(), 0.1)

    def change(self: Any) -> None:
        weight = self.model.model.norm.weight
        self.register_buffer("average", torch.ones_like(weight), persistent=False)

    after_configure_model(change)()
    replaces("on_train_batch_end")(update)()


class Average(Callback):
    """The same in a callback that has no state_dict."""

    def __init__(self) -> None:
        self.shadow: dict[str, torch.Tensor] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        for name, parameter in pl_module.named_parameters():
            self.shadow.setdefault(name, parameter.detach().clone()).lerp_(parameter.detach(), 0.1)


@replaces("configure_callbacks")
def average_in_a_callback(*_: Any) -> list[Callback]:
    return [Average()]


# ---- one process too: what a step predicts, draws and orders, what a validation adds up ----------


def evaluation_is_a_mean_of_means() -> None:
    """Each batch counts alike, however many labels it has."""

    def validation_step(self: Any, batch: Batch, batch_idx: int) -> None:
        loss = self.sums(self(batch), batch["labels"])["loss"] / (batch["labels"] != -100).sum()
        self.log("eval/loss", loss, sync_dist=True, batch_size=1)

    LanguageModule.validation_step = validation_step
    LanguageModule.on_validation_epoch_end = lambda self: None


@replaces("configure_optimizers")
def parameter_without_optimizer(configure: Any, self: Any) -> Any:
    found = configure(self)
    del found["optimizer"].param_groups[0]["params"][0]
    return found


@replaces("training_step")
def labels_drawn(step: Any, self: Any, batch: Batch, batch_idx: int) -> Tensor:
    """Masks half of the labels by Python's generator: no fault, and not comparable over ranks."""
    labels = batch["labels"].clone()
    labels[:, random.randrange(8) :: 2] = -100
    return step(self, batch | {"labels": labels}, batch_idx)


@replaces("transform", DataModule)
def tokens_by_process(transform: Any, self: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """Shifts tokens by the process's number, as a generator that a pid seeds would."""
    return transform(self, batch | {"input_ids": (batch["input_ids"] + os.getpid()) % 200})
