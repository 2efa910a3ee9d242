"""Faults in what ranks must share. `rehearse` must fail on each and name the parameter or buffer that is planted."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from trainer_dev.module import LanguageModule

from dist_template.parallel.pipeline.run import Pipeline
from tests.support.faults import after_configure_model


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
        self.register_buffer("temperature", torch.tensor(1.0 + 0.1 * self.trainer.global_rank), persistent=False)

    after_configure_model(change)


def running_mean_by_rank() -> None:
    """A buffer that each rank updates from its own samples, as in a batch norm that is not synchronized."""

    def update(module: nn.Module, args: Any, output: Tensor) -> None:
        running_mean: Any = module.running_mean
        if module.training:
            running_mean.lerp_(output.detach().float().mean(), 0.1)

    def change(self: Any) -> None:
        norm = self.model.model.layers[0].input_layernorm
        norm.register_buffer("running_mean", torch.zeros(()))
        norm.register_forward_hook(update)

    after_configure_model(change)


def buffer_summed_over_ranks() -> None:
    """A buffer that all ranks hold alike and that depends on how many they are."""

    def optimizer_step(self: Any, *args: Any, **kwargs: Any) -> None:
        L.LightningModule.optimizer_step(self, *args, **kwargs)
        self.model.model.layers[0].input_layernorm.gain += 0.01 * self.trainer.world_size

    def change(self: Any) -> None:
        norm = self.model.model.layers[0].input_layernorm
        norm.register_buffer("gain", torch.ones(()))
        norm.register_forward_hook(lambda module, args, output: output * module.gain)

    after_configure_model(change)
    LanguageModule.optimizer_step = optimizer_step


def noise_on_a_weight() -> None:
    """After each step, drawn on each rank for itself."""

    def on_train_batch_end(self: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.fit_loop._should_accumulate():
            return
        generator = torch.Generator().manual_seed(self.trainer.global_rank)
        weight = self.model.model.layers[1].mlp.up_proj.weight.data
        weight.add_(torch.randn(weight.shape, generator=generator), alpha=1e-3)

    LanguageModule.on_train_batch_end = on_train_batch_end


# ---- stages of a pipeline --------------------------------------------------------------------------------------------

SKIPPED: list[Tensor] = []  # of this process


def block_reads_what_another_stage_has_filled() -> None:
    """A connection from the first block to the second, through a list: empty on the second's rank."""

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
    """The first and the last stage have a copy each of a tied weight, and each keeps its own gradient."""
    Pipeline._sum_shared = lambda self: None


def last_stage_halves_gradients() -> None:
    """The output layer, which only the last stage has, gets half of its gradient."""

    def on_before_optimizer_step(self: Any, optimizer: Any) -> None:
        for parameter in self.model.lm_head.parameters():
            parameter.grad.mul_(0.5)

    LanguageModule.on_before_optimizer_step = on_before_optimizer_step


def last_stage_counts_in_python() -> None:
    """The loss's weight grows with an attribute that is set where the loss is, on the last stage."""
    step = LanguageModule.training_step

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        loss = step(self, batch, batch_idx)
        self.num_losses = getattr(self, "num_losses", 0) + 1
        return loss * min(1.0, self.num_losses / 100)

    LanguageModule.training_step = training_step
