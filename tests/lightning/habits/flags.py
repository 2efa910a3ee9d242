"""Flags of the Trainer, and callbacks."""

from typing import Any

import lightning as L
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BaseFinetuning, EarlyStopping, GradientAccumulationScheduler
from torch import nn

from ..arms import Habit
from .rows import EPOCHS, MEAN, Regression, Rows


class NoValidation(Rows):
    val_dataloader = L.LightningDataModule.val_dataloader


class Backbone(Regression):
    """A frozen part and a head, for BackboneFinetuning."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(self.backbone(x))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([each for each in self.parameters() if each.requires_grad], 0.05)


class UnfreezeLater(BaseFinetuning):
    """Freezes a part until epoch 1, as in Lightning's documentation."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer, lr=0.01)


class AccumulatesMore(GradientAccumulationScheduler):
    """A schedule of the accumulation: JSON has no numbers as keys."""

    def __init__(self) -> None:
        super().__init__({0: 2, 1: 3})


class CountsBatches(Callback):
    """A callback of a user's with a state, which changes the loss's weight each epoch."""

    def __init__(self) -> None:
        self.batches, self.epochs = 0, 0

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.scale = 1.0 / (1 + trainer.current_epoch)

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        self.batches += 1

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.epochs += 1

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches, "epochs": self.epochs}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.batches, self.epochs = state_dict["batches"], state_dict["epochs"]


class Scaled(Regression):
    """A loss whose weight a callback sets."""

    scale = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.scale * super().training_step(batch, batch_idx)


class OwnCallbacks(Regression):
    """A module that brings its callbacks."""

    def configure_callbacks(self) -> list[Callback]:
        return [EarlyStopping("val_loss", patience=1, mode="max"), CountsBatches()]


class ShuffledByANumber(Rows):
    """Another loader in each epoch, for reload_dataloaders_every_n_epochs."""

    def train_dataloader(self) -> Any:
        epoch = self.trainer.current_epoch
        order = torch.randperm(len(self.train), generator=torch.Generator().manual_seed(epoch))
        rows = torch.utils.data.Subset(self.train, order.tolist())
        return torch.utils.data.DataLoader(rows, self.batch_size)


class SkipsBroken(Rows):
    """A `collate_fn` that gives no batch for samples that cannot be read."""

    def train_dataloader(self) -> Any:
        def collate(rows: Any) -> Any:
            is_broken = any(row["row"] in (4, 9) for row in rows)
            return None if is_broken else torch.utils.data.default_collate(rows)

        return torch.utils.data.DataLoader(self.train, self.batch_size, collate_fn=collate)


def scales(trainer: Any, pl_module: Any) -> None:
    """Sets the weight of the loss when an epoch starts."""
    pl_module.scale = 1.0 / (1 + trainer.current_epoch)


def batch_size_of(batch: Any) -> int:
    return len(batch["y"])


def callback(name: str, **arguments: Any) -> dict[str, Any]:
    """Returns a callback of Lightning as a configuration has it."""
    where = f"lightning.pytorch.callbacks.{name}"
    return {"class_path": where, "init_args": arguments}


def own(name: str, **arguments: Any) -> dict[str, Any]:
    return {"class_path": f"tests.lightning.habits.flags.{name}", "init_args": arguments}


def with_callbacks(*callbacks: dict[str, Any], **others: Any) -> Habit:
    trainer = EPOCHS | others.pop("trainer", {})
    return Habit(trainer=trainer, callbacks=callbacks, **others)


NO_GAPS = {"several": "one rank cannot skip a step"}
FLAGS: dict[str, Habit] = {
    "plain": Habit(trainer=EPOCHS),
    "max_steps": Habit(trainer={"max_steps": 10}),
    "accumulates": Habit(trainer=EPOCHS | {"accumulate_grad_batches": 2}),
    "clips": Habit(trainer=EPOCHS | {"gradient_clip_val": 0.1}),
    "clips_values": Habit(
        trainer=EPOCHS | {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        refused={"zero2": "DeepSpeed clips by norm only"},
    ),
    "limits_batches": Habit(trainer=EPOCHS | {"limit_train_batches": 5}),
    "limits_a_share": Habit(trainer=EPOCHS | {"limit_train_batches": 0.5}),
    "limits_validation": Habit(trainer=EPOCHS | {"limit_val_batches": 2}),
    "limits_validation_to_none": Habit(trainer=EPOCHS | {"limit_val_batches": 0}),
    "accumulates_unevenly": Habit(
        trainer=EPOCHS | {"accumulate_grad_batches": 2, "limit_train_batches": 5}, why=MEAN
    ),
    "validates_rarely": Habit(trainer=EPOCHS | {"check_val_every_n_epoch": 2}),
    "validates_within": Habit(trainer=EPOCHS | {"val_check_interval": 2}),
    "validates_twice_an_epoch": Habit(trainer=EPOCHS | {"val_check_interval": 0.5}),
    "validates_across_epochs": Habit(
        trainer=EPOCHS | {"val_check_interval": 4, "check_val_every_n_epoch": None}
    ),
    "validates_by_time": Habit(trainer=EPOCHS | {"val_check_interval": "00:00:00:01"}),
    "no_validation": Habit(data="NoValidation", trainer=EPOCHS),
    "no_sanity_check": Habit(trainer=EPOCHS | {"num_sanity_val_steps": 0}),
    "full_sanity_check": Habit(trainer=EPOCHS | {"num_sanity_val_steps": -1}),
    "min_epochs": Habit(
        trainer={"min_epochs": 2, "max_epochs": 4},
        callbacks=(callback("EarlyStopping", monitor="val_loss", patience=0, mode="max"),),
    ),
    "min_steps": Habit(
        trainer={"min_steps": 14, "max_epochs": 4},
        callbacks=(callback("EarlyStopping", monitor="val_loss", patience=0, mode="max"),),
    ),
    "endless_epochs": Habit(trainer={"max_epochs": -1, "max_steps": 16}),
    "overfits": Habit(trainer=EPOCHS | {"overfit_batches": 2}),
    "overfits_a_share": Habit(trainer=EPOCHS | {"overfit_batches": 0.5}),
    "reloads": Habit(
        data="ShuffledByANumber", trainer=EPOCHS | {"reload_dataloaders_every_n_epochs": 1}
    ),
    "skips_broken_rows": Habit(data="SkipsBroken", trainer=EPOCHS, refused=NO_GAPS),
    "skips_broken_rows_of_two": Habit(
        data="SkipsBroken", trainer=EPOCHS | {"accumulate_grad_batches": 2}, refused=NO_GAPS
    ),
    "detects_anomalies": Habit(trainer=EPOCHS | {"detect_anomaly": True}),
    "deterministic": Habit(trainer=EPOCHS | {"deterministic": True, "benchmark": False}),
    "warns_of_indeterminism": Habit(trainer=EPOCHS | {"deterministic": "warn"}),
    "profiles": Habit(trainer=EPOCHS | {"profiler": "simple"}),
    "profiles_more": Habit(trainer=EPOCHS | {"profiler": "advanced"}),
    "profiles_by_torch": Habit(trainer=EPOCHS | {"profiler": "pytorch"}),
    "bf16_mixed": Habit(trainer=EPOCHS | {"precision": "bf16-mixed"}, tolerance=0.02),
    "bf16_true": Habit(trainer=EPOCHS | {"precision": "bf16-true"}, tolerance=0.02),
    "fp64": Habit(
        trainer=EPOCHS | {"precision": "64-true"},
        refused={way: "'64-true' does not exist" for way in ("fsdp2", "zero2")},
    ),
    "fp16_mixed": Habit(
        trainer=EPOCHS | {"precision": "16-mixed"}, refused={"all": "does not exist on a CPU"}
    ),
    "syncs_batchnorm": Habit(
        trainer=EPOCHS | {"sync_batchnorm": True},
        refused={"fsdp2": "has no effect", "zero2": "has no effect"},
    ),
    "inference_mode": Habit(trainer=EPOCHS | {"inference_mode": True}),
    "barebones": Habit(trainer=EPOCHS | {"barebones": True}, refused={"all": "remove the key"}),
    "logs": Habit(trainer=EPOCHS | {"logger": True, "log_every_n_steps": 1}),
    "logs_nothing": Habit(trainer=EPOCHS | {"logger": False}),
    "saves_nothing": Habit(trainer=EPOCHS | {"enable_checkpointing": False}),
    "shows_progress": Habit(
        trainer=EPOCHS | {"enable_progress_bar": True, "enable_model_summary": True}
    ),
}

SHARDED = {way: "which shards the model" for way in ("fsdp2", "zero2")}
CALLBACKS: dict[str, Habit] = {
    "keeps_the_best": with_callbacks(
        callback(
            "ModelCheckpoint",
            dirpath="{out}/deep/er",
            filename="{epoch}/{step}-{val_loss:.2f}",
            monitor="val_loss",
            save_top_k=2,
            save_last=True,
        )
    ),
    "saves_by_steps": with_callbacks(
        callback(
            "ModelCheckpoint",
            dirpath="{out}",
            every_n_train_steps=4,
            save_top_k=-1,
            save_last="link",
        )
    ),
    "saves_at_the_epochs_end": with_callbacks(
        callback(
            "ModelCheckpoint",
            dirpath="{out}",
            monitor="train_loss",
            every_n_epochs=2,
            save_on_train_epoch_end=True,
            save_weights_only=True,
        )
    ),
    "saves_by_time": with_callbacks(
        callback("ModelCheckpoint", dirpath="{out}", train_time_interval="0:00:00", save_top_k=-1)
    ),
    "saves_newest": with_callbacks(callback("ModelCheckpoint", dirpath="{out}")),
    "stops_early": with_callbacks(
        callback("EarlyStopping", monitor="val_loss", patience=1, mode="max")
    ),
    "stops_early_by_two": with_callbacks(
        callback("EarlyStopping", monitor="val_loss", patience=5),
        callback(
            "EarlyStopping",
            monitor="train_loss",
            mode="max",
            patience=2,
            check_on_train_epoch_end=True,
        ),
    ),
    "monitors_rates": with_callbacks(
        callback("LearningRateMonitor", logging_interval="step"), trainer={"logger": True}
    ),
    "accumulates_by_epoch": with_callbacks(
        own("AccumulatesMore"), refused={"zero2": "are fixed when training starts"}
    ),
    "finetunes_a_backbone": with_callbacks(
        callback("BackboneFinetuning", unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.01),
        module="Backbone",
        refused={"zero2": "are fixed when training starts"},
        oracle="one",  # under plain DDP each rank trains the unfrozen layers by itself
    ),
    "finetunes_its_own_way": with_callbacks(
        own("UnfreezeLater"),
        module="Backbone",
        refused={"zero2": "are fixed when training starts"},
        oracle="one",
    ),
    "averages": with_callbacks(callback("EMAWeightAveraging", decay=0.9), refused=SHARDED),
    "averages_later": with_callbacks(
        callback("EMAWeightAveraging", decay=0.9, update_starting_at_epoch=1), refused=SHARDED
    ),
    "averages_equally": with_callbacks(callback("WeightAveraging"), refused=SHARDED),
    "watches_for_spikes": with_callbacks(
        callback("spike.SpikeDetection", warmup=5, atol=100.0),
        refused={"all": "set numerics.on_spike stop"},
    ),
    "calls_functions": with_callbacks(
        callback("LambdaCallback", on_train_epoch_start="tests.lightning.habits.flags.scales"),
        module="Scaled",
    ),
    "averages_by_swa": with_callbacks(
        callback("StochasticWeightAveraging", swa_lrs=0.01),
        refused={"all": "StochasticWeightAveraging is not supported"},
    ),
    "prunes": with_callbacks(
        callback("ModelPruning", pruning_fn="l1_unstructured", amount=0.3),
        refused={"all": "ModelPruning is not supported"},
    ),
    "times": with_callbacks(callback("Timer", duration={"hours": 1})),
    "watches_the_device": with_callbacks(
        callback("DeviceStatsMonitor", cpu_stats=True), trainer={"logger": True}
    ),
    "shows_rich_progress": with_callbacks(
        callback("RichProgressBar"), callback("RichModelSummary")
    ),
    "shows_tqdm": with_callbacks(callback("TQDMProgressBar", refresh_rate=2)),
    "finds_a_batch_size": with_callbacks(
        callback("BatchSizeFinder"), refused={"all": "BatchSizeFinder is not supported"}
    ),
    "finds_a_rate": with_callbacks(
        callback("LearningRateFinder"), refused={"all": "LearningRateFinder is not supported"}
    ),
    "measures_throughput": with_callbacks(
        callback(
            "ThroughputMonitor",
            batch_size_fn="tests.lightning.habits.flags.batch_size_of",
            window_size=2,
        ),
        trainer={"logger": True, "log_every_n_steps": 2},
    ),
    "saves_on_exceptions": with_callbacks(
        callback("OnExceptionCheckpoint", dirpath="{out}"),
        refused={"several": "OnExceptionCheckpoint does not work on 2 processes"},
    ),
    "counts_for_itself": with_callbacks(own("CountsBatches"), module="Scaled"),
    "brings_callbacks": with_callbacks(module="OwnCallbacks"),
}

HABITS: dict[str, Habit] = FLAGS | CALLBACKS
