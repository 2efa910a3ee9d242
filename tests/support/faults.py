"""Faults in the module, the data, the strategy, processes and checkpoints. `rehearse` must fail on
each and name it.

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


def after_configure_model(change: Callable[[Any], None]) -> None:
    """Calls `change` with the module once its model is in place."""
    configure = LanguageModule.configure_model

    def configure_model(self: Any) -> None:
        is_new = not hasattr(self, "model")
        configure(self)
        if is_new:
            change(self)

    LanguageModule.configure_model = configure_model


# ---- loss and data -------------------------------------------------------------------------------


def loss_per_rank() -> None:
    """The mean over this micro-batch's own tokens: right only where all micro-batches have equally
    many."""

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
    entries = global_order.GlobalOrder._entries

    def same_for_all(self: global_order.GlobalOrder, position: int, count: int) -> list[int]:
        return entries(self, position - self.rank * self.micro_batch_size, count)

    global_order.GlobalOrder._entries = same_for_all


# ---- the forward pass ----------------------------------------------------------------------------


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
        return self.model(
            inputs_embeds=embedded, position_ids=batch["position_ids"], use_cache=False
        ).logits

    LanguageModule.forward = forward


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


# ---- gradients -----------------------------------------------------------------------------------


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
        config.base_model_tp_plan = {
            k: v for k, v in config.base_model_tp_plan.items() if not k.endswith(".down_proj")
        }
        return config

    LanguageModule.build_config = build_config


def gradients_reduced_twice() -> None:
    """A norm's gradient under tensor parallelism is summed over the ranks once more at each
    micro-batch.

    So it is in transformers 5.23, for the norms of queries and keys. Neither the loss nor the
    gradients' joint norm shows it within their tolerances in every model.
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
        local = [
            getattr(p.grad, "_local_tensor", p.grad)
            for p in self.parameters()
            if p.grad is not None
        ]
        norm = torch.stack([each.norm() for each in local]).norm()
        for each in local:
            each.mul_((0.1 / norm).clamp(max=1))
        self.track("train/grad_norm", norm)

    LanguageModule.configure_gradient_clipping = configure_gradient_clipping


# ---- what ranks must share -----------------------------------------------------------------------


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


def buffer_by_rank() -> None:
    """A buffer that is computed from the rank."""

    def change(self: Any) -> None:
        self.register_buffer(
            "temperature", torch.tensor(1.0 + 0.1 * self.trainer.global_rank), persistent=False
        )

    after_configure_model(change)


def running_mean_by_rank() -> None:
    """A buffer that each rank updates from its own samples, as in a batch norm that is not
    synchronized."""

    def update(module: nn.Module, args: Any, output: Tensor) -> None:
        running_mean: Any = module.running_mean
        if module.training:
            running_mean.lerp_(output.detach().float().mean(), 0.1)

    def change(self: Any) -> None:
        norm = self.model.model.layers[0].input_layernorm
        norm.register_buffer("running_mean", torch.zeros(()))
        norm.register_forward_hook(update)

    after_configure_model(change)


def noise_on_a_weight() -> None:
    """After each step, drawn on each rank for itself."""

    def on_train_batch_end(self: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.fit_loop._should_accumulate():
            return
        generator = torch.Generator().manual_seed(self.trainer.global_rank)
        weight = self.model.model.layers[1].mlp.up_proj.weight.data
        weight.add_(torch.randn(weight.shape, generator=generator), alpha=1e-3)

    LanguageModule.on_train_batch_end = on_train_batch_end


# ---- stages of a pipeline ------------------------------------------------------------------------

SKIPPED: list[Tensor] = []  # of this process


def block_reads_what_another_stage_has_filled() -> None:
    """A connection from the first block to the second, through a list: empty on the second's
    rank."""

    def change(self: Any) -> None:
        first, second = (self.model.model.layers[number] for number in (0, 1))
        run_first, run_second = first.forward, second.forward

        def fill(hidden: Tensor, **options: Any) -> Tensor:
            SKIPPED[:] = [hidden]
            return run_first(hidden, **options)

        def read(hidden: Tensor, **options: Any) -> Tensor:
            return run_second(hidden, **options) + 0.1 * sum(SKIPPED)

        first.forward, second.forward = fill, read

    after_configure_model(change)


def tied_gradient_not_summed() -> None:
    """The first and the last stage have a copy each of a tied weight, and each keeps its own
    gradient."""
    Pipeline._sum_shared = lambda self: None


def last_stage_halves_gradients() -> None:
    """The output layer, which only the last stage has, gets half of its gradient."""

    def on_before_optimizer_step(self: Any, optimizer: Any) -> None:
        for parameter in self.model.lm_head.parameters():
            parameter.grad.mul_(0.5)

    LanguageModule.on_before_optimizer_step = on_before_optimizer_step


def last_stage_counts_in_python() -> None:
    """The loss's weight grows with an attribute that is set where the loss is, on the last
    stage."""
    step = LanguageModule.training_step

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        loss = step(self, batch, batch_idx)
        self.num_losses = getattr(self, "num_losses", 0) + 1
        return loss * min(1.0, self.num_losses / 100)

    LanguageModule.training_step = training_step


# ---- processes -----------------------------------------------------------------------------------


def on_rank_one(act: Any) -> None:
    """Calls `act` in rank 1's training step, in the second step."""
    step = LanguageModule.training_step

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_rank == 1 and self.trainer.global_step == 1:
            act()
        return step(self, batch, batch_idx)

    LanguageModule.training_step = training_step


def rank_killed() -> None:
    def act() -> None:
        print("device 1 has fallen off the bus", file=sys.stderr)
        os.kill(os.getpid(), signal.SIGKILL)

    on_rank_one(act)


def crash_in_c() -> None:
    def read_address_zero() -> None:
        ctypes.string_at(0)

    on_rank_one(read_address_zero)


def error_on_one_rank() -> None:
    def act() -> None:
        raise ValueError("no such shard")

    on_rank_one(act)


def hang() -> None:
    def wait_for_a_file() -> None:
        time.sleep(600)

    on_rank_one(wait_for_a_file)


def collective_on_one_rank() -> None:
    def only_here() -> None:
        dist.all_reduce(torch.ones(3))

    on_rank_one(only_here)


# ---- what no checkpoint holds --------------------------------------------------------------------


def random_state_not_saved() -> None:
    """As in Lightning: a resumed training draws other dropout masks."""
    for hook in ("on_save_checkpoint", "on_load_checkpoint"):
        setattr(RandomState, hook, getattr(Callback, hook))


def counter_in_python() -> None:
    """The loss's weight grows with an attribute."""
    step = LanguageModule.training_step

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        self.num_calls = getattr(self, "num_calls", 0) + 1
        return step(self, batch, batch_idx) * min(1.0, self.num_calls / 100)

    LanguageModule.training_step = training_step


class ForgetfulAdamW(torch.optim.AdamW):
    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state["exp_avg"].zero_()


def optimizer_forgets() -> None:
    configure = LanguageModule.configure_optimizers

    def configure_optimizers(self: Any) -> Any:
        made = configure(self)
        made["optimizer"].__class__ = ForgetfulAdamW
        return made

    LanguageModule.configure_optimizers = configure_optimizers


def schedule_starts_anew() -> None:
    def on_load_checkpoint(self: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["lr_schedulers"][0]["last_epoch"] = 0

    LanguageModule.on_load_checkpoint = on_load_checkpoint


def data_start_anew() -> None:
    """The order of samples does not know how many have been consumed."""
    iterate = global_order.GlobalOrder.__iter__

    def from_the_start(self: global_order.GlobalOrder) -> Iterator[list[int]]:
        self.consumed = lambda: 0
        return iterate(self)

    global_order.GlobalOrder.__iter__ = from_the_start


def average_in_a_buffer() -> None:
    """An average of weights that is no part of the state dict."""

    def on_train_batch_end(self: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.average.lerp_(self.model.model.norm.weight.detach(), 0.1)

    def change(self: Any) -> None:
        self.register_buffer(
            "average", torch.ones_like(self.model.model.norm.weight), persistent=False
        )

    after_configure_model(change)
    LanguageModule.on_train_batch_end = on_train_batch_end


class Average(Callback):
    """The same in a callback that has no state_dict."""

    def __init__(self) -> None:
        self.shadow: dict[str, torch.Tensor] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        for name, parameter in pl_module.named_parameters():
            self.shadow.setdefault(name, parameter.detach().clone()).lerp_(parameter.detach(), 0.1)


def average_in_a_callback() -> None:
    LanguageModule.configure_callbacks = lambda self: [Average()]


# ---- one process too: what a step predicts, draws and orders, what a validation adds up ----------


def evaluation_is_a_mean_of_means() -> None:
    """Each batch counts alike, however many labels it has."""

    def validation_step(self: Any, batch: dict[str, Tensor], batch_idx: int) -> None:
        loss = self.sums(self(batch), batch["labels"])["loss"] / (batch["labels"] != -100).sum()
        self.log("eval/loss", loss, sync_dist=True, batch_size=1)

    LanguageModule.validation_step = validation_step
    LanguageModule.on_validation_epoch_end = lambda self: None


def parameter_without_optimizer() -> None:
    configure = LanguageModule.configure_optimizers

    def configure_optimizers(self: Any) -> Any:
        found = configure(self)
        group = found["optimizer"].param_groups[0]["params"]
        del group[0]
        return found

    LanguageModule.configure_optimizers = configure_optimizers


def labels_drawn() -> None:
    """Half of the labels are masked, from Python's generator: no fault, and not comparable over
    ranks."""
    step = LanguageModule.training_step

    def training_step(self: Any, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        labels = batch["labels"].clone()
        labels[:, random.randrange(8) :: 2] = -100
        return step(self, batch | {"labels": labels}, batch_idx)

    LanguageModule.training_step = training_step


def tokens_by_process() -> None:
    """The transform shifts tokens by the process's number, as a generator that a pid seeds
    would."""
    transform = DataModule.transform

    def transformed(self: Any, batch: dict[str, Any]) -> dict[str, Any]:
        tokens = (batch["input_ids"] + os.getpid()) % 200
        return transform(self, batch | {"input_ids": tokens})

    DataModule.transform = transformed
