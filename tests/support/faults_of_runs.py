"""Faults of processes, and of what a resumed training lacks. `rehearse` must fail on each and name what is planted."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from trainer_dev.module import LanguageModule

from dist_template.callbacks import RandomState
from tests.support.faults import after_configure_model
from tests.support.library import GlobalOrder


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


# ---- what no checkpoint holds --------------------------------------------------------------------------------------


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
    iterate = GlobalOrder.__iter__

    def from_the_start(self: GlobalOrder) -> Iterator[list[int]]:
        self.consumed = lambda: 0
        return iterate(self)

    GlobalOrder.__iter__ = from_the_start


def average_in_a_buffer() -> None:
    """An average of weights that is no part of the state dict."""

    def on_train_batch_end(self: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.average.lerp_(self.model.model.norm.weight.detach(), 0.1)

    def change(self: Any) -> None:
        self.register_buffer("average", torch.ones_like(self.model.model.norm.weight), persistent=False)

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
