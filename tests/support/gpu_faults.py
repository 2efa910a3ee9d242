"""Faults that only a GPU shows, put back into the library one at a time."""

from __future__ import annotations

from typing import Any


def parameters_left_on_the_host() -> None:
    """ZeRO-3 after `fit`: teardown has moved the parameters, and setup leaves them there."""
    from lightning.pytorch.strategies import DeepSpeedStrategy

    from dist_template.strategies import ZeroStrategy

    def setup(self: Any, trainer: Any) -> None:
        self._complete_config()
        DeepSpeedStrategy.setup(self, trainer)

    ZeroStrategy.setup = setup


def thread_that_copies_ahead() -> None:
    """Asynchronous saves: torch's writer waits on training's stream."""
    from torch.distributed.checkpoint import FileSystemWriter

    writer: Any = FileSystemWriter
    writer.per_thread_copy_ahead = property(lambda _: 1_000, lambda *_: None)


def deepspeeds_clock() -> None:
    """ZeRO: DeepSpeed's throughput timer synchronizes the device."""
    from dist_template.parallel import deepspeed_config

    module: Any = deepspeed_config
    resolve = module.resolve
    module.resolve = lambda *args: resolve(*args) | {"timers": {"throughput": {"enabled": True}}}


def loss_that_is_not_a_number() -> None:
    """The loss of the fifth step is NaN."""
    from trainer_dev.module import LanguageModule

    step = LanguageModule.training_step

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        loss = step(self, batch, batch_idx)
        return loss * float("nan") if self.global_step == 4 else loss

    LanguageModule.training_step = training_step
