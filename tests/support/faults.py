"""Faults that `rehearse` must name, and edits on which it must raise no alarm.

Each function changes this process's package; a rehearsal's workers call it before they train."""

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemWriter
from trainer_dev.module import LanguageModule

from dist_template.callbacks import RandomState, global_order
from dist_template.compat.deepspeed import set_deepspeed_config
from dist_template.parallel.mesh.pipeline.run import Pipeline
from dist_template.parallel.zero import json as deepspeed_config
from dist_template.strategies import ZeroStrategy

Batch = dict[str, Tensor]


def replaces(name: str, owner: Any = LanguageModule) -> Callable[[Callable], Callable[[], None]]:
    """Makes a fault of a method: it replaces `name` of `owner`, which it gets as first argument."""

    def decorate(new: Callable) -> Callable[[], None]:
        @wraps(new)
        def plant() -> None:
            old = getattr(owner, name, None)
            planted = wraps(new)(lambda *args, **options: new(old, *args, **options))
            setattr(owner, name, planted)

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


# ---- steps, weights and data ---------------------------------------------------------------------


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
    if self.trainer.global_rank == 1:
        self.model.model.layers[1].mlp.act_fn = nn.GELU()


@after_configure_model
def layer_detached(self: Any) -> None:
    """The first block's MLP is computed without gradients."""
    mlp = self.model.model.layers[0].mlp
    mlp.forward = torch.no_grad()(mlp.forward)


def layer_outside_of_fsdp() -> None:
    """The second block's MLP is unsharded on every rank, and its gradients are not reduced."""
    import transformers.distributed.fsdp as fsdp

    shard, ignored = fsdp.fully_shard, set()

    def fully_shard(module: Any, **options: Any) -> Any:
        if getattr(getattr(module, "self_attn", None), "layer_idx", 0) == 1:
            ignored.update(module.mlp.parameters())
        return shard(module, ignored_params=ignored, **options)

    fsdp.fully_shard = fully_shard  # ty: ignore[invalid-assignment]


def double_gradient(self: Any, parameter: Tensor) -> None:
    def double(each: Any) -> None:
        each.grad.mul_(2)

    if self.trainer.world_size > 1:
        parameter.register_post_accumulate_grad_hook(double)


@after_configure_model
def gradients_reduced_twice(self: Any) -> None:
    """A norm's gradient under tensor parallelism is summed once more at each micro-batch.

    So it is in transformers 5.23, for norms of queries and keys. Losses and joint norms hide it."""
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


@replaces("configure_gradient_clipping")
def clipping_by_rank(_: Any, self: Any, *args: Any, **options: Any) -> None:
    """Each rank clips by the norm of its own shards."""
    found = [p.grad for p in self.parameters() if p.grad is not None]
    local = [getattr(each, "_local_tensor", each) for each in found]
    norm = torch.stack([each.norm() for each in local]).norm()
    for each in local:
        each.mul_((0.1 / norm).clamp(max=1))
    self.track("train/grad_norm", norm)


@replaces("build_model")
def unseeded_parameter(build: Any, self: Any, data: Any) -> Any:
    """One parameter is drawn from a generator of its own."""
    model: Any = build(self, data)
    model.model.norm.weight.data.add_(random.SystemRandom().random())
    return model


def add_running_mean(self: Any, persistent: bool) -> None:
    """Each rank updates a buffer from its samples, as in a batch norm that is not synchronized."""

    def update(module: Any, args: Any, output: Tensor) -> None:
        if module.training:
            module.running_mean.lerp_(output.detach().float().mean(), 0.1)

    norm = self.model.model.layers[0].input_layernorm
    norm.register_buffer("running_mean", torch.zeros(()), persistent)
    norm.register_forward_hook(update)


@after_configure_model
def running_mean_by_rank(self: Any) -> None:
    add_running_mean(self, persistent=True)


@replaces("on_train_batch_end")
def weight_shifted_by_rank(_: Any, self: Any, *args: Any) -> None:
    """After each step, on each rank by another value."""
    if not self.trainer.fit_loop._should_accumulate():
        weight = self.model.model.layers[1].mlp.up_proj.weight.data
        weight.add_(1e-3 * self.trainer.global_rank)


# ---- stages of a pipeline ------------------------------------------------------------------------

SKIPPED: list[Tensor] = []  # of this process


@after_configure_model
def block_reads_what_another_stage_has_filled(self: Any) -> None:
    """The first block passes a value to the second through a list, empty on the second's rank."""
    first, second = self.model.model.layers
    run_first, run_second = first.forward, second.forward

    def fill(hidden: Tensor, **options: Any) -> Tensor:
        SKIPPED[:] = [hidden]
        return run_first(hidden, **options)

    first.forward = fill
    second.forward = lambda *args, **options: run_second(*args, **options) + 0.1 * sum(SKIPPED)


@replaces("_sum_shared", Pipeline)
def tied_gradient_not_summed(*_: Any) -> None:
    """The first and the last stage have a copy each of a tied weight and keep its own gradient."""


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
def error_on_one_rank() -> None:
    raise ValueError("no such shard")


@on_rank_one
def hang() -> None:
    time.sleep(600)


def random_state_not_saved() -> None:
    """As in Lightning: a resumed training draws other dropout masks."""
    for hook in ("on_save_checkpoint", "on_load_checkpoint"):
        setattr(RandomState, hook, getattr(Callback, hook))


@replaces("training_step")
def counter_in_python(step: Any, self: Any, batch: Any, batch_idx: int) -> Any:
    """The loss's weight grows with an attribute."""
    self.num_calls = getattr(self, "num_calls", 0) + 1
    return step(self, batch, batch_idx) * min(1.0, self.num_calls / 100)


@replaces("load_state_dict", torch.optim.Optimizer)
def optimizer_forgets(load: Any, self: Any, state_dict: Any) -> None:
    load(self, state_dict)
    for state in self.state.values():
        state["exp_avg"].zero_()


@replaces("on_load_checkpoint")
def schedule_starts_anew(_: Any, self: Any, checkpoint: dict[str, Any]) -> None:
    checkpoint["lr_schedulers"][0]["last_epoch"] = 0


@replaces("__iter__", global_order.GlobalOrder)
def data_start_anew(iterate: Any, self: Any) -> Iterator[list[int]]:
    """The order of samples does not know how many have been consumed."""
    self.consumed = lambda: 0
    return iterate(self)


@after_configure_model
def running_mean_not_saved(self: Any) -> None:
    add_running_mean(self, persistent=False)


class Average(Callback):
    """An average of weights in a callback that has no state_dict."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        weight = pl_module.model.model.norm.weight.detach()
        self.shadow = torch.lerp(getattr(self, "shadow", weight), weight, 0.1)


@replaces("configure_callbacks")
def average_in_a_callback(*_: Any) -> list[Callback]:
    return [Average()]


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


# ---- what only a GPU shows (parallel/test_fake_cuda.py) ------------------------------------------


@replaces("setup", ZeroStrategy)
def parameters_left_on_the_host(_: Any, self: Any, trainer: Any) -> None:
    """ZeRO-3 after `fit`: teardown has moved the parameters, and setup leaves them there."""
    set_deepspeed_config(self, self._config_of_trainer)
    DeepSpeedStrategy.setup(self, trainer)


def thread_that_copies_ahead() -> None:
    """Asynchronous saves: torch's writer waits on training's stream."""
    writer: Any = FileSystemWriter
    writer.per_thread_copy_ahead = property(lambda _: 1_000, lambda *_: None)


@replaces("resolve", deepspeed_config)
def deepspeeds_clock(resolve: Any, *args: Any) -> Any:
    """ZeRO: DeepSpeed's throughput timer synchronizes the device."""
    return resolve(*args) | {"timers": {"throughput": {"enabled": True}}}


@replaces("training_step")
def loss_that_is_not_a_number(step: Any, self: Any, batch: Batch, batch_idx: int) -> Tensor:
    return step(self, batch, batch_idx) * (float("nan") if self.global_step == 4 else 1)


# ---- no faults -----------------------------------------------------------------------------------


@replaces("training_step")
def labels_drawn(step: Any, self: Any, batch: Batch, batch_idx: int) -> Tensor:
    """Masks half of the labels by Python's generator: not comparable over ranks."""
    labels = batch["labels"].clone()
    labels[:, random.randrange(8) :: 2] = -100
    return step(self, batch | {"labels": labels}, batch_idx)
