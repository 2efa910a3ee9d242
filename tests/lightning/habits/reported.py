"""Habits from public reports and Lightning's pages, which an attacker of the other tables took."""

import copy
import dataclasses
import random
from collections import deque, namedtuple
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BackboneFinetuning, BasePredictionWriter
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import (
    ChainDataset,
    ConcatDataset,
    DataLoader,
    IterableDataset,
    Subset,
    default_collate,
    get_worker_info,
)

from ..arms import Habit
from .flags import Backbone, callback, with_callbacks
from .rows import EPOCHS, NUM_TRAIN, Numbers, Regression, Rows
from .schedules import OF_GRADIENTS

OWN = "tests.lightning.habits.reported"


def own(name: str, **arguments: Any) -> dict[str, Any]:
    return {"class_path": f"{OWN}.{name}", "init_args": arguments}


# ---- callbacks and flags -------------------------------------------------------------------------


class StepMetrics(Regression):
    """Logs each step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss_of(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("batch", float(batch_idx))
        return loss


LINES: list[list[Any]] = []


class Ledger(Logger):
    """A logger of a user's, which keeps what it gets."""

    @property
    def name(self) -> str:
        return "ledger"

    @property
    def version(self) -> str:
        return "0"

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        own = {name: float(one) for name, one in metrics.items() if "/" not in name}
        if own:
            LINES.append([step, sorted([name, value] for name, value in own.items())])


class KeepsLines(Callback):
    """Saves the lines of the logger, so that a resumed run has all of them."""

    def state_dict(self) -> Any:
        return {"lines": [repr(line[0]) + str([n for n, _ in line[1]]) for line in LINES]}

    def load_state_dict(self, state_dict: Any) -> None:
        lines = [
            [int(text.partition("[")[0]), [[n, 0.0] for n in eval(text[text.index("[") :])]]
            for text in state_dict["lines"]
        ]
        LINES[:] = lines


class SavesByHand(Callback):
    """Calls `trainer.save_checkpoint`, as pages on checkpoints show."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(f"{self.folder}/epoch{trainer.current_epoch}.ckpt")


class SavesWeightsByTorch(SavesByHand):
    """Calls `torch.save` on rank 0 with the weights."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        weights = pl_module.state_dict()
        if trainer.is_global_zero:
            path = f"{self.folder}/weights{trainer.current_epoch}.ckpt"
            import os

            os.makedirs(self.folder, exist_ok=True)
            torch.save(weights, path)


class KeepsTensors(Callback):
    """A running mean of the loss as a tensor, and a history."""

    def __init__(self) -> None:
        self.mean, self.history = torch.zeros(1), deque(maxlen=3)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.mean = 0.9 * self.mean + 0.1
        self.history.append(np.float32(batch_idx))

    def state_dict(self) -> Any:
        return {"mean": self.mean, "history": [float(each) for each in self.history]}

    def load_state_dict(self, state_dict: Any) -> None:
        self.mean = state_dict["mean"]
        self.history = deque(state_dict["history"], maxlen=3)


class StopsWithin(Callback):
    """Stops in the middle of an epoch."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.current_epoch == 1 and trainer.fit_loop.batch_idx == 3:
            trainer.should_stop = True


class ValidatesByHand(Callback):
    """Runs the validation loop when an epoch starts."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.eval()
        with torch.no_grad():
            losses = [pl_module.loss_of(batch) for batch in trainer.val_dataloaders or ()]
        pl_module.train()
        self.losses = [float(loss) for loss in losses]


class ReadsGradients(Callback):
    """Logs the norm of gradients, as pages on debugging show."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        norms = [p.grad.norm() for p in pl_module.parameters() if p.grad is not None]
        pl_module.log("gradients", float(len(norms)))
        pl_module.log("norm", torch.stack([*map(torch.as_tensor, norms)]).norm())


class NoisyGradients(Callback):
    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        for parameter in pl_module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


class ChangesRates(Callback):
    """Sets the rate when an epoch starts."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = 0.05 / (1 + trainer.current_epoch)


class ClampsWeights(Callback):
    """Clamps weights after a step, as a Wasserstein GAN does."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        with torch.no_grad():
            for parameter in pl_module.parameters():
                parameter.clamp_(-0.3, 0.3)


class Writes(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("epoch")


class SlowWarmup(BackboneFinetuning):
    """Unfreezes at epoch 1 with a rate that grows."""

    def __init__(self) -> None:
        super().__init__(1, lambda epoch: 1.5, backbone_initial_ratio_lr=0.2, train_bn=False)


class ScheduledBackbone(Backbone):
    def configure_optimizers(self) -> Any:
        params = [each for each in self.parameters() if each.requires_grad]
        optimizer = torch.optim.SGD(params, 0.05)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class Graph(Regression):
    """Logs hyperparameters and its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"rate": 0.05, "layers": [4, 8]})
        self.example_input_array = torch.zeros(2, 4)

    def on_train_start(self) -> None:
        for logger in self.loggers:
            logger.log_hyperparams({"more": 1})


class BecomesNotANumber(Regression):
    """A loss that is not a number once."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if self.global_step == 4 else loss


class Diverges(Regression):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", 1.0 + 3.0 * self.current_epoch, sync_dist=True)


class StepsBySchedule(StepMetrics):
    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


FLAGS: dict[str, Habit] = {
    "monitors_momentum": with_callbacks(
        callback(
            "LearningRateMonitor",
            logging_interval="epoch",
            log_momentum=True,
            log_weight_decay=True,
        ),
        trainer={"logger": True},
    ),
    "several_checkpoints": with_callbacks(
        callback("ModelCheckpoint", dirpath="{out}/a", every_n_train_steps=3, save_top_k=-1),
        callback(
            "ModelCheckpoint",
            dirpath="{out}/b",
            monitor="val_loss",
            save_top_k=2,
            save_last=True,
            filename="{epoch:02d}_{val_loss:.3f}",
            auto_insert_metric_name=False,
        ),
        callback(
            "ModelCheckpoint",
            dirpath="{out}/c",
            monitor="train_loss",
            mode="max",
            save_top_k=1,
            save_on_train_epoch_end=True,
        ),
    ),
    "counts_versions": with_callbacks(
        callback("ModelCheckpoint", dirpath="{out}/a", filename="same", save_top_k=-1),
        callback(
            "ModelCheckpoint",
            dirpath="{out}/b",
            filename="same",
            save_top_k=-1,
            every_n_train_steps=4,
            enable_version_counter=False,
        ),
    ),
    "monitors_a_step": with_callbacks(
        callback(
            "ModelCheckpoint",
            dirpath="{out}",
            monitor="loss_step",
            every_n_train_steps=2,
            save_top_k=-1,
        ),
        module="StepMetrics",
        trainer={"log_every_n_steps": 1},
    ),
    "saves_at_validation_within": with_callbacks(
        callback("ModelCheckpoint", dirpath="{out}", monitor="val_loss", save_top_k=-1),
        trainer={"val_check_interval": 2},
    ),
    "keeps_none": with_callbacks(callback("ModelCheckpoint", dirpath="{out}", save_top_k=0)),
    "stops_at_a_threshold": with_callbacks(
        callback("EarlyStopping", monitor="val_loss", stopping_threshold=100.0),
        trainer={"min_epochs": 2},
    ),
    "stops_when_it_diverges": with_callbacks(
        callback("EarlyStopping", monitor="val_loss", divergence_threshold=3.0), module="Diverges"
    ),
    "stops_at_steps": with_callbacks(
        callback("EarlyStopping", monitor="loss_epoch", patience=1, min_delta=10.0),
        module="StepMetrics",
        trainer={"max_epochs": 5},
    ),
    "not_strict": with_callbacks(callback("EarlyStopping", monitor="nothing", strict=False)),
    "saves_by_hand": with_callbacks(own("SavesByHand", folder="{out}")),
    "saves_weights_by_torch": with_callbacks(own("SavesWeightsByTorch", folder="{out}")),
    "keeps_tensors": with_callbacks(own("KeepsTensors")),
    "stops_within": with_callbacks(own("StopsWithin")),
    "stops_within_too_early": with_callbacks(own("StopsWithin"), trainer={"min_epochs": 3}),
    "validates_by_hand": with_callbacks(own("ValidatesByHand")),
    "callback_reads_gradients": with_callbacks(
        own("ReadsGradients"), refused={"zero2": OF_GRADIENTS}
    ),
    "callback_scales_gradients": with_callbacks(
        own("NoisyGradients"), refused={"zero2": OF_GRADIENTS}
    ),
    "callback_changes_rates": with_callbacks(own("ChangesRates")),
    "clamps_weights": with_callbacks(own("ClampsWeights")),
    "writes_predictions": with_callbacks(own("Writes")),
    "finetunes_with_a_schedule": with_callbacks(
        own("SlowWarmup"),
        module="ScheduledBackbone",
        refused={"zero2": "are fixed when training starts"},
        oracle="one",  # as finetunes_a_backbone
    ),
    "averages_every_second": with_callbacks(
        callback("EMAWeightAveraging", decay=0.5, update_every_n_steps=2),
        refused={way: "which shards the model" for way in ("fsdp2", "zero2")},
    ),
    "summarizes": with_callbacks(callback("ModelSummary", max_depth=-1)),
    "logs_a_graph": Habit(
        "Graph",
        trainer=EPOCHS
        | {
            "logger": [
                {
                    "class_path": "lightning.pytorch.loggers.TensorBoardLogger",
                    "init_args": {"save_dir": "{out}logs", "log_graph": True},
                },
                {
                    "class_path": "lightning.pytorch.loggers.CSVLogger",
                    "init_args": {"save_dir": "{out}logs"},
                },
            ]
        },
        refused={"fsdp2": "whose shards torch cannot trace"},
    ),
    "logs_every_seventh": with_callbacks(
        own("KeepsLines"),
        module="StepMetrics",
        why="a logger gets the number of optimizer steps that are done (Lightning: the index of the"
        " newest, 6 after seven), and no metric `epoch`",
        trainer={"log_every_n_steps": 7, "logger": [own("Ledger")]},
    ),
    # No step of a kill: the line of a step follows its checkpoint, in Lightning too.
    "logs_every_fifth_of_two": with_callbacks(
        own("KeepsLines"),
        module="StepMetrics",
        why="a logger gets the number of optimizer steps that are done (Lightning: the index of the"
        " newest, 6 after seven), and no metric `epoch`",
        trainer={"log_every_n_steps": 5, "accumulate_grad_batches": 2, "logger": [own("Ledger")]},
    ),
    "bounded_by_time": Habit(trainer=EPOCHS | {"max_time": "00:01:00:00"}),
    "fast_dev_run": Habit(trainer={"fast_dev_run": True}),
    "precision_of_a_number": Habit(trainer=EPOCHS | {"precision": 32}),
    "precision_by_old_name": Habit(trainer=EPOCHS | {"precision": "bf16"}, tolerance=0.02),
    "benchmarks": Habit(trainer=EPOCHS | {"benchmark": True}),
    "inference_mode_off": Habit(trainer=EPOCHS | {"inference_mode": False}),
    "clips_by_zero": Habit(trainer=EPOCHS | {"gradient_clip_val": 0}),
    "clips_accumulated": Habit(
        trainer=EPOCHS | {"gradient_clip_val": 0.1, "accumulate_grad_batches": 3}
    ),
    "bound_by_no_epoch": Habit(trainer={"max_steps": 9, "max_epochs": None}),
    "validates_nothing_at_all": Habit(
        trainer=EPOCHS | {"limit_val_batches": 0, "num_sanity_val_steps": 0}
    ),
    "loss_not_a_number": Habit(
        "BecomesNotANumber", trainer=EPOCHS, refused={"all": "was not applied: loss nan"}
    ),
    "accumulates_with_a_schedule": with_callbacks(
        {"class_path": "tests.lightning.habits.flags.AccumulatesMore", "init_args": {}},
        module="StepsBySchedule",
        refused={"zero2": "are fixed when training starts"},
    ),
}

# ---- modules -------------------------------------------------------------------------------------


class LogitScale(Regression):
    """A parameter without dimensions, as CLIP's temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.logit_scale.exp()


class Contrastive(Regression):
    """A loss of all ranks' rows, whose gradient goes through `all_gather`."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self(batch["x"])
        gathered = self.all_gather(out, sync_grads=True).reshape(-1, 1)
        targets = self.all_gather(batch["y"]).reshape(-1, 1)
        loss = (gathered - targets).square().mean()
        loss = loss + 0.1 * (gathered - gathered.mean()).abs().mean()
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss


class AverageInBuffers(Regression):
    """An average of each weight, kept in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        for name, parameter in self.net.named_parameters():
            self.register_buffer(f"mean_{name.replace('.', '_')}", parameter.detach().clone())

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        for name, parameter in self.net.named_parameters():
            buffer = getattr(self, f"mean_{name.replace('.', '_')}")
            buffer.mul_(0.9).add_(parameter.detach(), alpha=0.1)


class LazyInInit(Regression):
    """Layers that the first batch sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(1))


class MetricClones(Regression):
    """A collection of metrics for each stage."""

    def __init__(self) -> None:
        super().__init__()
        metrics = torchmetrics.MetricCollection(
            [
                torchmetrics.classification.BinaryAccuracy(),
                torchmetrics.classification.BinaryF1Score(),
                torchmetrics.classification.BinaryAUROC(),
            ]
        )
        self.train_metrics = metrics.clone(prefix="train_")
        self.val_metrics = metrics.clone(prefix="val_", postfix="_x")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        score = self(batch["x"]).sigmoid().flatten()
        target = (batch["y"] > 0).long().flatten()
        self.train_metrics.update(score, target)
        self.log_dict(self.train_metrics, on_step=False, on_epoch=True)
        return F.binary_cross_entropy(score, target.float())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        score = self(batch["x"]).sigmoid().flatten()
        self.val_metrics.update(score, (batch["y"] > 0).long().flatten())

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.val_metrics.compute())
        self.val_metrics.reset()


class HandMetric(Regression):
    """A metric that is computed and reset when the epoch ends."""

    def __init__(self) -> None:
        super().__init__()
        self.error = torchmetrics.MeanSquaredError()
        self.mean = torchmetrics.MeanMetric()
        self.seen = torchmetrics.CatMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.error.update(self(batch["x"]), batch["y"])
        loss = self.loss_of(batch)
        self.mean(loss.detach())
        self.seen.update(batch["row"].float())
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("error", self.error.compute())
        self.log("mean", self.mean.compute())
        self.log("rows", self.seen.compute().sum())
        for metric in (self.error, self.mean, self.seen):
            metric.reset()


class ResetsAtStarts(HandMetric):
    """A metric that is reset when the training and when each epoch starts."""

    def on_train_start(self) -> None:
        self._reset()

    def on_train_epoch_start(self) -> None:
        self._reset()

    def _reset(self) -> None:
        for metric in (self.error, self.mean, self.seen):
            metric.reset()

    def on_train_epoch_end(self) -> None:
        self.log("error", self.error.compute())
        self.log("mean", self.mean.compute())
        self.log("rows", self.seen.compute().sum())


class LogsTypes(Regression):
    """Numbers of many types."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        options: Any = {"on_step": False, "on_epoch": True}
        self.log("int", 3, **options)
        self.log("numpy", float(np.float32(1.5)), **options)
        self.log("double", torch.tensor(1.5, dtype=torch.float64), **options)
        self.log("long", batch["row"].max(), **options)
        self.log("one", loss.detach().reshape(1), **options)
        self.log("bf16", loss.detach().bfloat16(), **options)
        self.log("true", torch.tensor(True), **options)
        self.log("total", 1.0, reduce_fx="sum", sync_dist=True, **options)
        highest = batch["row"].float().max()
        self.log("highest", highest, reduce_fx=torch.max, sync_dist=True, **options)
        self.log("group/name.a-b", 2.0, **options)
        return loss


class NoLoaderNumber(Regression):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        name = f"val_{dataloader_idx}"
        self.log(name, self.loss_of(batch), add_dataloader_idx=False)


class ValidationOutputs(Regression):
    """Outputs that are collected for the end of the validation."""

    def on_validation_epoch_start(self) -> None:
        self.outputs: list[Tensor] = []

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss_of(batch)
        self.outputs.append(loss)
        return {"loss": loss, "rows": batch["row"]}

    def on_validation_epoch_end(self) -> None:
        self.log("val_loss", torch.stack(self.outputs).mean(), sync_dist=True)
        self.log("val_max", torch.stack(self.outputs).max(), reduce_fx="max", sync_dist=True)
        self.outputs.clear()


class ComplexWeights(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.ones(4, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return self.net((torch.fft.fft(x) * self.phase).real)


class SparseRows(Regression):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(NUM_TRAIN, 1, sparse=True)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss + (self.table(batch["row"].flatten()) - batch["y"]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.05)


class Recurrent(Regression):
    """A hidden state that goes from batch to batch, and is saved."""

    hidden: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, 4)

    def on_train_epoch_end(self) -> None:
        self.hidden = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.cell(batch["x"], self.hidden)
        self.hidden = hidden.detach()
        loss = F.mse_loss(self.net(hidden), batch["y"])
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        checkpoint["hidden"] = self.hidden

    def on_load_checkpoint(self, checkpoint: Any) -> None:
        self.hidden = checkpoint["hidden"]


@dataclasses.dataclass
class Pair:
    x: Tensor
    y: Tensor
    row: Tensor
    name: str = "pair"


class Dataclasses(Rows):
    """Batches that are dataclasses."""

    def _loader(self, rows: Any) -> Any:
        return DataLoader(
            rows, self.batch_size, collate_fn=lambda items: Pair(**default_collate(items))
        )

    def train_dataloader(self) -> Any:
        return self._loader(self.train)

    def val_dataloader(self) -> Any:
        return self._loader(self.held_out)


class OfAttributes(Regression):
    def loss_of(self, batch: Any) -> Tensor:
        return F.mse_loss(self(batch.x), batch.y)


Named = namedtuple("Named", "x y row")


class NamedTuples(Dataclasses):
    def _loader(self, rows: Any) -> Any:
        return DataLoader(
            rows, self.batch_size, collate_fn=lambda items: Named(**default_collate(items))
        )


class Encodings(Dataclasses):
    """transformers' BatchEncoding."""

    def _loader(self, rows: Any) -> Any:
        from transformers import BatchEncoding

        return DataLoader(
            rows, self.batch_size, collate_fn=lambda items: BatchEncoding(default_collate(items))
        )


class Graphs:
    """A batch of graphs, as torch_geometric has it: an object with `to`."""

    def __init__(self, x: Tensor, y: Tensor, row: Tensor) -> None:
        self.x, self.y, self.row, self.num_graphs = x, y, row, len(x)

    def to(self, device: Any, *_: Any, **__: Any) -> "Graphs":
        return Graphs(self.x.to(device), self.y.to(device), self.row.to(device))


class OfGraphBatches(OfAttributes):
    """Says how many there are, which nobody can infer."""

    def log(self, *args: Any, **options: Any) -> None:
        super().log(*args, **options, batch_size=2)


class OfGraphs(Dataclasses):
    def _loader(self, rows: Any) -> Any:
        return DataLoader(
            rows, self.batch_size, collate_fn=lambda items: Graphs(**default_collate(items))
        )


class Opaque:
    """A batch without `to`, moved by the module."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y


class Opaques(Dataclasses):
    def _loader(self, rows: Any) -> Any:
        def collate(items: Any) -> Any:
            batch = default_collate(items)
            return Opaque(batch["x"], batch["y"])

        return DataLoader(rows, self.batch_size, collate_fn=collate)


class MovesBatches(OfAttributes):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss_of(batch)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=2)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss_of(batch), sync_dist=True, batch_size=2)

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return Opaque(batch.x.to(device) * 0.5, batch.y.to(device))


class TuplesOfTensors(Rows):
    def train_dataloader(self) -> Any:
        return DataLoader(
            torch.utils.data.TensorDataset(self.train.x, self.train.y), self.batch_size
        )

    def val_dataloader(self) -> Any:
        return DataLoader(
            torch.utils.data.TensorDataset(self.held_out.x, self.held_out.y), self.batch_size
        )


class OfTuples(Regression):
    def loss_of(self, batch: Any) -> Tensor:
        x, y = batch
        return F.mse_loss(self(x), y)


class Dropped(Regression):
    """Dropout, and noise of the module's own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * (1 + 0.1 * random.random() + 0.1 * np.random.rand())


class GradientPenalty(Regression):
    """The gradient of a gradient."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x = batch["x"].clone().requires_grad_()
        out = self(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        loss = F.mse_loss(out, batch["y"]) + 0.1 * slope.square().mean()
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss


class Checkpointed(Regression):
    def forward(self, x: Tensor) -> Tensor:
        return self.net[2](checkpoint(self.net[:2], x, use_reentrant=False))


class Siamese(Regression):
    """Two forward passes in a step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss + 0.1 * (self(batch["x"]) - self(-batch["x"])).square().mean()


class Penalized(Regression):
    """A penalty on the sizes of weights, as written by hand."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss + 0.01 * sum(p.abs().sum() for p in self.net.parameters())


class LogsWeights(Regression):
    def on_train_epoch_end(self) -> None:
        self.log("weight", self.net[0].weight.norm())
        self.log("bias", self.net[0].bias.abs().max())


class KeepsBestWeights(Regression):
    """A copy of the weights with which the validation was best."""

    def on_validation_epoch_end(self) -> None:
        self.best = copy.deepcopy(self.state_dict())

    def on_train_end(self) -> None:
        self.load_state_dict(self.best)


class SavesBestWeights(KeepsBestWeights):
    """The same, in checkpoints too."""

    best: Any = None

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        checkpoint["best"] = self.best

    def on_load_checkpoint(self, checkpoint: Any) -> None:
        self.best = checkpoint["best"]


class TargetNetwork(Regression):
    """A target network that is set to the network every few steps, as in Q-learning."""

    def __init__(self) -> None:
        super().__init__()
        self.target = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step % 4 == 0:
            self.target.load_state_dict(self.net.state_dict())
        loss = super().training_step(batch, batch_idx)
        with torch.no_grad():
            towards = self.target(-batch["x"])
        return loss + 0.1 * (self(batch["x"]) - towards).square().mean()

    def optimizer(self, rate: float = 0.05) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), rate, momentum=0.9)


class ClampsItself(Regression):
    """Clamps weights in `on_train_batch_end`."""

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        for parameter in self.net.parameters():
            parameter.clamp_(-0.3, 0.3)


class NormalizesAfterStep(Regression):
    """Normalizes a weight after each step."""

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        with torch.no_grad():
            self.net[0].weight.div_(2.0)


class WeightNormed(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net[0] = nn.utils.parametrizations.weight_norm(self.net[0])


class SpectralNormed(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net[0] = nn.utils.parametrizations.spectral_norm(self.net[0])


class Unused(Regression):
    """A head that the loss does not need."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(4, 1)


class FrozenNorm(Regression):
    """A part in evaluation mode since the start of training."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        self.part.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.part(x))

    def on_train_start(self) -> None:
        self.part.eval()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), 0.05)


class ManualScheduled(Regression):
    """Manual optimization with accumulation, clipping and two schedules."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, schedules = self.optimizers(), self.lr_schedulers()
        loss = self.loss_of(batch) / 2
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        self.toggle_optimizer(optimizer)
        self.manual_backward(loss)
        if (batch_idx + 1) % 2 == 0:
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
            schedules[0].step()
        self.untoggle_optimizer(optimizer)

    def on_train_epoch_end(self) -> None:
        self.lr_schedulers()[1].step()

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        make = torch.optim.lr_scheduler.ExponentialLR
        return [optimizer], [make(optimizer, 0.95), make(optimizer, 0.5)]


class Learnables(Regression):
    """Parameters in lists and dicts, some with no elements."""

    def __init__(self) -> None:
        super().__init__()
        scales = {"a": nn.Parameter(torch.ones(4)), "b": nn.Parameter(torch.ones(1))}
        self.scales = nn.ParameterDict(scales)
        self.shifts = nn.ParameterList([nn.Parameter(torch.zeros(4)) for _ in range(2)])
        self.empty = nn.Parameter(torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scales["a"] + self.shifts[0] - self.shifts[1]
        return self.net(x) * self.scales["b"] + self.empty.sum()


class UncertaintyWeighted(Regression):
    """Weights of losses that are learned, outside of any `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.log_vars = nn.Parameter(torch.zeros(2))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        one = super().training_step(batch, batch_idx)
        two = self(batch["x"]).abs().mean()
        losses = torch.stack([one, two])
        return ((-self.log_vars).exp() * losses + self.log_vars).sum()


class DoubleParts(Regression):
    """A part in double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0] = self.net[0].double()

    def forward(self, x: Tensor) -> Tensor:
        return self.net[2](self.net[1](self.net[0](x.double())).float())


class ChangesMaxEpochs(Regression):
    """Asks for one more epoch."""

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 1:
            self.trainer.fit_loop.max_epochs = 4


class TracksBest(Regression):
    """The best validation as an attribute, which it saves."""

    best = float("inf")

    def on_validation_epoch_end(self) -> None:
        value = float(self.trainer.callback_metrics["val_loss"])
        if not self.trainer.sanity_checking:
            self.best = min(self.best, value)
        self.log("best", self.best, prog_bar=True)

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        checkpoint["best"] = self.best

    def on_load_checkpoint(self, checkpoint: Any) -> None:
        self.best = checkpoint["best"]


class MinMetric(Regression):
    """The template's way: metrics of the best validation by torchmetrics."""

    def __init__(self) -> None:
        super().__init__()
        self.val_error = torchmetrics.MeanSquaredError()
        self.val_best = torchmetrics.MinMetric()

    def on_train_start(self) -> None:
        self.val_error.reset()
        self.val_best.reset()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.val_error(self(batch["x"]), batch["y"])
        self.log("val_error", self.val_error, on_step=False, on_epoch=True)

    def on_validation_epoch_end(self) -> None:
        self.val_best(self.val_error.compute())
        self.log("val_best", self.val_best.compute(), sync_dist=True)


class LossByEpochNumber(Regression):
    """Annealing by `global_step` and `trainer.num_training_batches`."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        total = self.trainer.max_epochs * self.trainer.num_training_batches
        done = self.current_epoch * self.trainer.num_training_batches + batch_idx
        weight = min(1.0, 2 * done / total)
        self.log("annealed", weight)
        return loss * (0.5 + weight)


class ChangesRateWithin(Regression):
    """Halves the rate in the middle of an epoch, beside a schedule of epochs."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and self.current_epoch == 0:
            for group in self.optimizers().param_groups:
                group["lr"] *= 0.5

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


class StartsAnew(Regression):
    """Sets its weights when training starts."""

    def on_train_start(self) -> None:
        if self.global_step == 0:
            for parameter in self.net.parameters():
                parameter.data.fill_(0.1)


ZERO_MANUAL = {"zero2": "optimizes manually"}
MODULES: dict[str, Habit] = {
    "logit_scale": Habit(
        "LogitScale",
        trainer=EPOCHS,
        refused={way: "is a scalar parameter" for way in ("fsdp2", "zero2")},
    ),
    "contrastive": Habit("Contrastive", "SampledRows", EPOCHS),
    "average_in_buffers": Habit(
        "AverageInBuffers", trainer=EPOCHS, refused={"fsdp2": "its parameters are sharded"}
    ),
    "lazy_in_init": Habit(
        "LazyInInit", trainer=EPOCHS, refused={"all": "which has no shape before the first batch"}
    ),
    "metric_clones": Habit("MetricClones", trainer=EPOCHS),
    "hand_metric": Habit("HandMetric", trainer=EPOCHS),
    "resets_at_starts": Habit("ResetsAtStarts", trainer=EPOCHS),
    "logs_types": Habit("LogsTypes", "SampledRows", EPOCHS),
    "no_loader_number": Habit("NoLoaderNumber", "TwoValidations", EPOCHS),
    "validation_outputs": Habit("ValidationOutputs", trainer=EPOCHS),
    "complex_weights": Habit(
        "ComplexWeights",
        trainer=EPOCHS,
        refused={way: "is a complex parameter" for way in ("fsdp2", "zero2")},
    ),
    "sparse_rows": Habit(
        "SparseRows",
        trainer=EPOCHS,
        refused={way: "has sparse gradients" for way in ("fsdp2", "zero2")},
    ),
    "recurrent": Habit("Recurrent", "SampledRows", EPOCHS),
    "dataclasses": Habit("OfAttributes", "Dataclasses", EPOCHS),
    "named_tuples": Habit("OfAttributes", "NamedTuples", EPOCHS),
    "encodings": Habit("Regression", "Encodings", EPOCHS),
    "graphs": Habit("OfGraphBatches", "OfGraphs", EPOCHS),
    "moves_batches": Habit("MovesBatches", "Opaques", EPOCHS),
    "tuples": Habit("OfTuples", "TuplesOfTensors", EPOCHS),
    "dropped": Habit("Dropped", trainer=EPOCHS, rows_differ=True),
    "gradient_penalty": Habit("GradientPenalty", trainer=EPOCHS),
    "checkpointed": Habit("Checkpointed", trainer=EPOCHS),
    "siamese": Habit("Siamese", trainer=EPOCHS),
    "penalized": Habit("Penalized", trainer=EPOCHS),
    "logs_weights": Habit("LogsWeights", trainer=EPOCHS),
    "saves_best_weights": Habit(
        "SavesBestWeights", trainer=EPOCHS, refused={"fsdp2": "would have a sharded tensor"}
    ),
    "keeps_best_weights": Habit("KeepsBestWeights", trainer=EPOCHS),
    "target_network": Habit("TargetNetwork", trainer=EPOCHS),
    "clamps_itself": Habit("ClampsItself", trainer=EPOCHS),
    "normalizes_after_step": Habit("NormalizesAfterStep", trainer=EPOCHS),
    "weight_normed": Habit("WeightNormed", trainer=EPOCHS),
    "spectral_normed": Habit("SpectralNormed", trainer=EPOCHS),
    "unused": Habit(
        "Unused",
        trainer=EPOCHS,
        impossible="parameters that were not used",
        refused={"ddp": "DDP needs a gradient of each parameter"},
    ),
    "frozen_norm": Habit("FrozenNorm", trainer=EPOCHS),
    "manual_scheduled": Habit("ManualScheduled", trainer=EPOCHS, refused=ZERO_MANUAL),
    "learnables": Habit("Learnables", trainer=EPOCHS, refused={"fsdp2": "without elements"}),
    "uncertainty_weighted": Habit("UncertaintyWeighted", trainer=EPOCHS),
    "double_parts": Habit(
        "DoubleParts",
        trainer=EPOCHS,
        refused={"fsdp2": "cannot gather together", "zero2": "trains in single precision"},
    ),
    "changes_max_epochs": Habit("ChangesMaxEpochs", trainer=EPOCHS),
    "tracks_best": Habit("TracksBest", trainer=EPOCHS),
    "min_metric": Habit("MinMetric", trainer=EPOCHS),
    "changes_rate_within": Habit("ChangesRateWithin", trainer=EPOCHS),
    "starts_anew": Habit("StartsAnew", trainer=EPOCHS),
    "anneals": Habit("LossByEpochNumber", trainer=EPOCHS),
}

# ---- loaders -------------------------------------------------------------------------------------


class Buffered(IterableDataset):
    """A stream that is split by rank and worker, with a shuffle buffer."""

    def __init__(self, rows: Numbers) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        rank, num = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        worker = get_worker_info()
        if worker is not None:
            rank, num = rank * worker.num_workers + worker.id, num * worker.num_workers
        buffer: list[Any] = []
        for row in islice(range(len(self.rows)), rank, None, num):
            buffer.append(self.rows[row])
            if len(buffer) == 4:
                yield buffer.pop(random.randrange(4))
        random.shuffle(buffer)
        yield from buffer


class BufferedByWorkers(Rows):
    def train_dataloader(self) -> Any:
        # gloo's group is unknown in a worker: the rank is given
        return DataLoader(RankBuffered(self.train, self), self.batch_size, num_workers=2)


class RankBuffered(Buffered):
    def __init__(self, rows: Numbers, data: Any) -> None:
        super().__init__(rows)
        trainer = data.trainer
        self.rank, self.num = trainer.global_rank, trainer.world_size

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        at, num = (worker.id, worker.num_workers) if worker else (0, 1)
        buffer: list[Any] = []
        for row in islice(range(len(self.rows)), self.rank * num + at, None, self.num * num):
            buffer.append(self.rows[row])
            if len(buffer) == 4:
                yield buffer.pop(random.randrange(4))
        random.shuffle(buffer)
        yield from buffer


class TooLong(IterableDataset):
    """Says that it has more rows than it has."""

    def __init__(self, rows: Numbers, says: int) -> None:
        self.rows, self.says = rows, says

    def __iter__(self) -> Iterator[Any]:
        rank, num = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        return (self.rows[row] for row in range(rank, len(self.rows), num))

    def __len__(self) -> int:
        return self.says


class LiesLong(Rows):
    def train_dataloader(self) -> Any:
        return DataLoader(TooLong(self.train, 40), self.batch_size)


class LiesShort(Rows):
    def train_dataloader(self) -> Any:
        return DataLoader(TooLong(self.train, 8), self.batch_size)


class WholeBatches(Numbers):
    """A dataset of batches."""

    def __len__(self) -> int:
        return len(self.x) // 2

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        rows = [Numbers.__getitem__(self, 2 * row + each) for each in range(2)]
        return default_collate(rows)


class Unbatched(Rows):
    def setup(self, stage: str) -> None:
        super().setup(stage)
        self.train = WholeBatches(NUM_TRAIN)

    def train_dataloader(self) -> Any:
        return DataLoader(self.train, batch_size=None)


class DropsLast(Rows):
    def setup(self, stage: str) -> None:
        super().setup(stage)
        self.train = Numbers(22)

    def train_dataloader(self) -> Any:
        from .state import InOrder

        return DataLoader(self.train, 4, sampler=InOrder(22), drop_last=True)


class RandomCollate(Rows):
    """Takes a random view of each batch."""

    def train_dataloader(self) -> Any:
        def collate(items: Any) -> Any:
            batch = default_collate(items)
            return batch | {"x": batch["x"] * random.choice([0.5, 1.0]) + 0.1 * np.random.rand()}

        return DataLoader(self.train, self.batch_size, collate_fn=collate)


class RandomCollateOfWorkers(RandomCollate):
    def train_dataloader(self) -> Any:
        loader = super().train_dataloader()
        return DataLoader(
            self.train,
            self.batch_size,
            shuffle=True,
            num_workers=2,
            persistent_workers=True,
            collate_fn=loader.collate_fn,
        )


class Forever:
    """No DataLoader, and no end."""

    def __init__(self, rows: Numbers, size: int) -> None:
        self.rows, self.size = rows, size

    def __iter__(self) -> Iterator[Any]:
        at = 0
        while True:
            rows = [self.rows[(at + each) % len(self.rows)] for each in range(self.size)]
            at += self.size
            yield default_collate(rows)


class Infinite(Rows):
    def train_dataloader(self) -> Any:
        return Forever(self.train, self.batch_size)


class GeneratorShuffled(Rows):
    """Shuffles by a generator of its own."""

    def train_dataloader(self) -> Any:
        draw = torch.Generator().manual_seed(5)
        return DataLoader(self.train, self.batch_size, shuffle=True, generator=draw)


class Concatenated(Rows):
    def train_dataloader(self) -> Any:
        halves = [Subset(self.train, range(10)), Subset(self.train, range(10, 24))]
        return DataLoader(ConcatDataset(halves), self.batch_size)


class ChainedStreams(Rows):
    def train_dataloader(self) -> Any:
        return DataLoader(ChainDataset([TooLong(self.train, 24)] * 2), self.batch_size)


class OfAList(Rows):
    def train_dataloader(self) -> Any:
        return DataLoader([self.train[row] for row in range(NUM_TRAIN)], self.batch_size)


class OtherValidation(Rows):
    """Another validation set in each epoch."""

    def val_dataloader(self) -> Any:
        epoch = self.trainer.current_epoch if self.trainer else 0
        rows = Subset(self.held_out, range(2 * (epoch % 3), 2 * (epoch % 3) + 4))
        return DataLoader(rows, 2)


class CombinedValidation(Rows):
    mode = "max_size"

    def val_dataloader(self) -> Any:
        loaders = {"a": DataLoader(self.held_out, 2), "b": DataLoader(Numbers(4, seed=2), 2)}
        return CombinedLoader(loaders, self.mode)


class OfCombinedValidation(Regression):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        for name, each in batch.items():
            if each is not None:
                self.log(f"val_{name}", self.loss_of(each), batch_size=2, add_dataloader_idx=False)


class GrowingSet(Rows):
    """More rows in each epoch, as active learning adds them."""

    def train_dataloader(self) -> Any:
        epoch = self.trainer.current_epoch if self.trainer else 0
        return DataLoader(Subset(self.train, range(8 * (epoch + 1))), self.batch_size)


class BigBatch(Rows):
    """A batch that is larger than the data."""

    def train_dataloader(self) -> Any:
        return DataLoader(self.train, 64, shuffle=True, drop_last=False)


class NothingLeft(Rows):
    """`drop_last` leaves no batch."""

    def train_dataloader(self) -> Any:
        return DataLoader(self.train, 64, drop_last=True)


BY_ITSELF = ("--trainer.use_distributed_sampler=false",)
LOADERS: dict[str, Habit] = {
    "buffered_by_workers": Habit(
        data="BufferedByWorkers", trainer=EPOCHS, flags=BY_ITSELF, rows_differ=True
    ),
    "lies_long": Habit(data="LiesLong", trainer=EPOCHS, flags=BY_ITSELF),
    "lies_short": Habit(data="LiesShort", trainer=EPOCHS, flags=BY_ITSELF),
    "unbatched": Habit(data="Unbatched", trainer=EPOCHS),
    "drops_last": Habit(data="DropsLast", trainer=EPOCHS),
    "random_collate": Habit(data="RandomCollate", trainer=EPOCHS, rows_differ=True),
    "random_collate_of_workers": Habit(
        data="RandomCollateOfWorkers", trainer=EPOCHS, rows_differ=True
    ),
    "infinite": Habit(
        data="Infinite",
        trainer=EPOCHS | {"limit_train_batches": 5},
        refused={"several": "whose rows cannot be distributed over ranks"},
    ),
    "generator_shuffled": Habit(data="GeneratorShuffled", trainer=EPOCHS, rows_differ=True),
    "concatenated": Habit(data="Concatenated", trainer=EPOCHS),
    "chained_streams": Habit(data="ChainedStreams", trainer=EPOCHS, flags=BY_ITSELF),
    "of_a_list": Habit(data="OfAList", trainer=EPOCHS),
    "other_validation": Habit(
        data="OtherValidation", trainer=EPOCHS | {"reload_dataloaders_every_n_epochs": 1}
    ),
    "combined_validation": Habit("OfCombinedValidation", "CombinedValidation", EPOCHS),
    "growing_set": Habit(
        data="GrowingSet", trainer=EPOCHS | {"reload_dataloaders_every_n_epochs": 1}
    ),
    "big_batch": Habit(
        data="BigBatch", trainer=EPOCHS, refused={"all": "and an optimizer step takes"}
    ),
    "nothing_left": Habit(
        data="NothingLeft", trainer=EPOCHS, refused={"all": "and an optimizer step takes"}
    ),
}

HABITS: dict[str, Habit] = FLAGS | MODULES | LOADERS
