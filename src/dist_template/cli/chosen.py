"""How many optimizer steps a training has, and numbers in place of `auto`, before it starts.

Both need the rows of the data, so the tokens are ready by then, and the model's configuration is
known. A resume keeps the numbers of its checkpoint."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ..by_tokens import AUTO
from ..checkpoint.identity import KEY as SETTINGS
from ..checkpoint.identity import manifest_of
from ..errors import InputError
from ..model.any_module import typed_attribute
from ..model.optim import OptimConfig

BATCH, RATE = "data.global_batch_size", "model.optim.learning_rate"
FEWEST = 5  # optimizer steps: six have learned, one has a rate of 0 (docs/finetune.md)


@dataclass
class Choice:
    """Chooses for a training that starts, or resumes from `checkpoint`.

    Args:
        settings: What config.yaml will have; numbers replace `auto` in it.
        trainer: The Trainer, before Lightning attaches module and data to it.
        module: The module; its rate is set.
        data: The data module; it has the least batch possible in place of `auto`.
        model_config: transformers' configuration of the model; None for another kind.
        checkpoint: From which training resumes.
        world_size: The number of data-parallel ranks."""

    settings: dict[str, Any]
    trainer: Any
    module: Any
    data: Any
    model_config: Any
    checkpoint: str | None
    world_size: int

    def lines(self) -> Iterator[str]:
        """Sets the numbers, and yields lines that say so, with the number of steps; none for data
        without rows. Raises InputError for a batch that the trainer, the ranks or a schedule does
        not allow, and for the rate of a model that was not trained before."""
        self._refuse_rate()
        if not hasattr(self.data, "steps_of_epoch"):
            return
        yield from self._choose_batch()
        # as Lightning attaches it later: the check knows its limits and phases
        self.data.trainer = self.trainer
        self.data.check(self.world_size)
        self._refuse_other_batch()
        steps, shown = self._num_steps()
        yield from self._choose_rate(steps)
        yield f"training has {shown} of {self.data.seq_len:,} tokens"
        if steps < FEWEST and steps != self.trainer.max_steps and not self.trainer.fast_dev_run:
            advice = [f"raise trainer.max_epochs ({self.trainer.max_epochs})"]
            size = self.data.global_batch_size
            if size > self.data.micro_batch_size * self.world_size:
                advice.append(f"lower {BATCH} ({size})")
            yield (
                f"warning: {_steps(steps)}, and hardly anything is learned in fewer than {FEWEST}:"
                f" give more data, or {', or '.join(advice)}"
            )

    @cached_property
    def _manifest(self) -> dict[str, Any]:
        """The checkpoint's."""
        return manifest_of(Path(self.checkpoint)) if self.checkpoint else {}

    @property
    def _before(self) -> dict[str, Any]:
        """The settings of the checkpoint."""
        return self._manifest.get(SETTINGS, {})

    @cached_property
    def _num_rows(self) -> int:
        return self.data.num_rows(self.module)

    @property
    def _optim(self) -> OptimConfig | None:
        return typed_attribute(self.module, "optim", OptimConfig)

    def _choose_batch(self) -> Iterator[str]:
        if self.settings.get("data", {}).get("global_batch_size") != AUTO:
            return
        trainer, least = self.trainer, self.data.global_batch_size
        size = self._before.get(BATCH)
        if isinstance(size, int) and size % least:
            raise InputError(
                f"{BATCH} auto keeps the checkpoint's {size}, and these ranks and micro-batches"
                f" need a multiple of {least}: give a number, or train on fewer ranks"
            )
        if not isinstance(size, int):
            limit = trainer.limit_train_batches, self.world_size
            size = self.data.batch_for(self._num_rows, trainer.max_epochs, least, *limit)
        self.data.global_batch_size = self.settings["data"]["global_batch_size"] = size
        yield f"{BATCH} auto: {size}"

    def _refuse_other_batch(self) -> None:
        """The end of a schedule over epochs is counted in steps of one size."""
        old, new = self._before.get(BATCH), self.data.global_batch_size
        optim, trainer = self._optim, self.trainer
        if not (isinstance(old, int) and isinstance(new, int) and optim) or old == new:
            return
        if trainer.max_steps >= 0 or not trainer.max_epochs or not optim.needs_end:
            return
        step = self._manifest["step"]
        left = max(0, trainer.max_epochs * self._num_rows - step * old)
        raise InputError(
            f"{BATCH} is {new}, and {old} in the checkpoint, but the schedule {optim.schedule} of a"
            f" training by epochs counts all steps alike: set trainer.max_steps, such as"
            f" {step + math.ceil(left / new)}, or {BATCH} to {old}"
        )

    def _choose_rate(self, steps: float) -> Iterator[str]:
        optim = self._optim
        if optim is None or optim.learning_rate != AUTO:
            return
        replaced = (optim.optimizer_class or {}).get("init_args", {}).get("lr")
        rate = self._before.get(RATE) if replaced is None else replaced
        if not isinstance(rate, int | float):
            rate = self.module.rate_for(self.data, self.model_config, steps)
        optim.learning_rate = rate
        if isinstance(given := self.settings["model"].get("optim"), dict):
            given["learning_rate"] = rate
        if replaced is None:
            yield f"{RATE} auto: {rate:g}"

    def _refuse_rate(self) -> None:
        """Raises InputError if the rate is `auto`, and module or data know none."""
        knows = hasattr(self.module, "rate_for") and hasattr(self.data, "steps_of_epoch")
        if self._optim is not None and self._optim.learning_rate == AUTO and not knows:
            raise InputError(
                f"{RATE} auto is for a TextModule on PackedText, not for"
                f" {type(self.module).__name__} on {type(self.data).__name__}: give a number, such"
                " as 3e-4"
            )

    def _num_steps(self) -> tuple[float, str]:
        """Returns the optimizer steps of the training, inf without an end, and words for them."""
        trainer, size = self.trainer, self.data.global_batch_size
        epochs, most = trainer.max_epochs, trainer.max_steps
        if isinstance(size, list):  # there are no epochs, so trainer.max_steps is set
            return most, f"{_steps(most)}, each of up to {self.data.batch_sizes[1]} rows"
        rows = f"{size} row" + "s" * (size > 1)
        limit = trainer.limit_train_batches, self.world_size
        of_epoch = self.data.steps_of_epoch(self._num_rows, *limit)
        by_epochs = epochs * of_epoch if epochs is not None and epochs >= 0 else math.inf
        if 0 <= most < by_epochs:
            passes = most / max(1, of_epoch)
            return most, f"{_steps(most)} ({passes:.3g} epochs), each of {rows}"
        if by_epochs == math.inf:
            return by_epochs, f"no last optimizer step ({of_epoch:,} in an epoch), each of {rows}"
        return by_epochs, f"{_steps(by_epochs)} ({epochs} x {of_epoch:,}), each of {rows}"


def _steps(number: float) -> str:
    return f"{number:,} optimizer step" + "s" * (number != 1)
