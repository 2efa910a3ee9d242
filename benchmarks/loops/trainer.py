"""Hugging Face's Trainer with its defaults: its bar, its log line, its filter of losses that are
not finite."""

import tempfile
from typing import Any

from accelerate.state import AcceleratorState
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from ..arms import Sample
from .stopwatch import Stopwatch
from .task import Task, inputs_of, loss_of


def train(task: Task) -> Sample:
    stopwatch = Stopwatch(task)
    with tempfile.TemporaryDirectory(dir=task.folder) as folder:
        arguments = TrainingArguments(
            folder,
            use_cpu=task.device == "cpu",
            bf16=task.precision == "bf16-mixed",
            torch_compile=task.compile,
            per_device_train_batch_size=task.batch_size,
            max_steps=task.steps,
            optim="adamw_torch_fused",
            learning_rate=task.learning_rate,
            weight_decay=task.weight_decay,
            adam_beta1=task.betas[0],
            adam_beta2=task.betas[1],
            max_grad_norm=task.clip,
            lr_scheduler_type="cosine_with_min_lr",
            lr_scheduler_kwargs={"min_lr_rate": 0.1},
            warmup_steps=task.warmup,
            logging_steps=task.log_every,
            remove_unused_columns=False,  # it would look for them in each row
            save_strategy="steps",
            save_steps=task.checkpoint_every,
            ddp_backend="gloo" if task.strategy == "ddp" and task.device == "cpu" else None,
        )
        callbacks: list[Any] = [Timer(stopwatch)]
        model = WithLoss(task.build())  # the rows come as a batch already: `inputs_of`
        trainer = Trainer(model, arguments, inputs_of, train_dataset=task.rows, callbacks=callbacks)
        trainer.train()
    AcceleratorState._reset_state(reset_partial_state=True)
    return stopwatch.sample


class WithLoss(nn.Module):
    """The Trainer wants the loss from the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Tensor) -> dict[str, Tensor]:
        return {"loss": loss_of(self.model, batch)[0]}


class Timer(TrainerCallback):
    def __init__(self, stopwatch: Stopwatch) -> None:
        self.stopwatch = stopwatch

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.stopwatch.tick(state.global_step)
        control.should_save = (
            False  # at the last step, which is timed by now: tied weights could not be saved so
        )
