"""Flags of the Trainer, and callbacks."""

import lightning as L

from ..arms import Habit
from .rows import EPOCHS, Rows


class NoValidation(Rows):
    val_dataloader = L.LightningDataModule.val_dataloader


HABITS: dict[str, Habit] = {
    "plain": Habit(trainer=EPOCHS),
    "max_steps": Habit(trainer={"max_steps": 10}),
    "accumulates": Habit(trainer=EPOCHS | {"accumulate_grad_batches": 2}),
    "clips": Habit(trainer=EPOCHS | {"gradient_clip_val": 0.1}),
    "clips_values": Habit(
        trainer=EPOCHS | {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    ),
    "limits_batches": Habit(trainer=EPOCHS | {"limit_train_batches": 5}),
    "limits_a_share": Habit(trainer=EPOCHS | {"limit_train_batches": 0.5}),
    "accumulates_unevenly": Habit(
        trainer=EPOCHS | {"accumulate_grad_batches": 2, "limit_train_batches": 5}
    ),
    "validates_rarely": Habit(trainer=EPOCHS | {"check_val_every_n_epoch": 2}),
    "validates_within": Habit(trainer=EPOCHS | {"val_check_interval": 2}),
    "no_validation": Habit(data="NoValidation", trainer=EPOCHS),
}
