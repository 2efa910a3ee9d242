"""Hooks, metrics, and what a module keeps."""

import copy
import datetime
import enum
from argparse import Namespace
from collections import defaultdict, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchmetrics
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler

from ..arms import Habit
from .flags import NO_GAPS
from .rows import EPOCHS, Numbers, Regression, Rows


class InOrder(Sampler[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size))


class SampledRows(Rows):
    """A sampler of its own, of which a rank has the same rows here and there: what a network
    computes of a rank's batch, as BatchNorm does, can be compared."""

    def train_dataloader(self) -> Any:
        return DataLoader(self.train, self.batch_size, sampler=InOrder(len(self.train)))

    def val_dataloader(self) -> Any:
        return DataLoader(self.held_out, self.batch_size, sampler=InOrder(len(self.held_out)))


class EpochWeight(Regression):
    """A weight of the loss that each epoch sets when it starts: a curriculum."""

    weight = 1.0

    def on_train_epoch_start(self) -> None:
        self.weight = 1.0 / (1 + self.current_epoch)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.weight * super().training_step(batch, batch_idx)


class EpochSums(Regression):
    """A mean over an epoch, kept by hand."""

    def on_train_epoch_start(self) -> None:
        self.sums: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss_of(batch)
        self.sums.append(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("epoch_mean", torch.stack(self.sums).mean(), sync_dist=True)


class StateOfItsOwn(Regression):
    """Saves numpy numbers, arrays and plain containers with the checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.seen = np.float64(1.0), np.zeros(3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.scale = self.scale * 0.99
        self.seen = self.seen + 1
        return float(self.scale) * super().training_step(batch, batch_idx)

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        checkpoint["own"] = {"scale": self.scale, "seen": self.seen, "names": ("a", "b")}

    def on_load_checkpoint(self, checkpoint: Any) -> None:
        self.scale, self.seen = checkpoint["own"]["scale"], checkpoint["own"]["seen"]


class SkipsABatch(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 2 else super().training_step(batch, batch_idx)


class ReturnsDict(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "extra": batch["row"]}


class Normed(Regression):
    """BatchNorm, whose statistics are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))


class Ema(Regression):
    """A buffer that each step changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.average.mul_(0.9).add_(0.1 * batch["y"].mean())
        return loss + 0.1 * (self(batch["x"]).mean() - self.average.detach()).square().sum()


class UnsyncedMetric(Regression):
    """A validation metric without `sync_dist`, as most people write it."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss_of(batch))


class TwoValidations(Rows):
    def val_dataloader(self) -> Any:
        return [DataLoader(self.held_out, 2), DataLoader(Numbers(4, seed=2), 2)]


class ValidatesTwo(Regression):
    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss_of(batch), sync_dist=True)


class AllMetrics(Regression):
    """`self.log` in every way that the documentation shows, most of them without `sync_dist`."""

    def __init__(self) -> None:
        super().__init__()
        self.error = torchmetrics.MeanSquaredError()
        self.several = torchmetrics.MetricCollection(
            {"mae": torchmetrics.MeanAbsoluteError(), "mse": torchmetrics.MeanSquaredError()},
            prefix="val_",
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("forked", loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        rows = batch["row"].float()
        self.log("last", rows.max(), on_step=False, on_epoch=True, reduce_fx=max, sync_dist=True)
        self.log("first", rows.min(), on_step=False, on_epoch=True, reduce_fx="min", sync_dist=True)
        self.log("number", batch_idx, on_step=False, on_epoch=True, logger=False)
        self.error(self(batch["x"]), batch["y"])
        self.log("train_error", self.error, on_step=False, on_epoch=True)
        self.log_dict({"a": loss, "b": 2.0}, on_step=False, on_epoch=True, batch_size=3)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("val_mean", self.loss_of(batch))
        self.log("val_integer", batch["row"].sum())
        self.log("val_weighted", self.loss_of(batch), batch_size=batch_idx + 1)
        self.several.update(self(batch["x"]), batch["y"])
        self.log_dict(self.several)

    def on_validation_epoch_end(self) -> None:
        self.log("val_at_end", float(self.current_epoch))

    def on_train_start(self) -> None:
        self.log("at_start", 1.0)

    def on_after_backward(self) -> None:
        self.log("after_backward", 2.0)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("before_step", 3.0, on_epoch=True)

    def on_train_epoch_end(self) -> None:
        self.log("epoch_seen", float(self.trainer.callback_metrics["train_loss"]))


class RankMetrics(Regression):
    """Metrics that differ by rank, of some ranks alone, or read by one rank alone."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.loss_of(batch))
        self.log("val_rank", float(self.global_rank))
        self.log("val_highest", float(self.global_rank), reduce_fx="max")
        self.log("val_lowest", float(self.global_rank), reduce_fx=min)
        self.log("val_total", 1.0, reduce_fx="sum")
        if self.global_rank == self.trainer.world_size - 1:
            self.log("val_of_last", 7.0)
            if batch_idx == 0:
                self.log("val_uneven", 1.0)
        if self.global_rank == 0:
            self.log("val_of_first", 5.0, rank_zero_only=True)

    def on_validation_epoch_end(self) -> None:
        if self.global_rank == 0:  # alone: no other rank answers
            self.seen = {name: float(v) for name, v in self.trainer.callback_metrics.items()}

    def on_train_epoch_end(self) -> None:
        self.log("train_rank", float(self.global_rank))


class Everything(enum.IntEnum):
    ONE = 1


class KeepsEverything(Regression):
    """Hyperparameters and a state of many types; `setup` needs what was loaded."""

    def __init__(self, rate: float = 0.05, paths: Any = (Path("a"),), options: Any = None) -> None:
        super().__init__()
        self.loss_function = nn.MSELoss()
        self.options = options or Namespace(scale=np.float32(1.0), level=Everything.ONE)
        self.save_hyperparameters({"rate": rate, "paths": [*paths], "options": self.options})
        self.history: Any = deque(maxlen=5)
        self.counts: Any = defaultdict(list)
        self.started = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)
        self.generator = torch.Generator().manual_seed(3)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.history.append(np.float64(batch_idx))
        self.counts[self.current_epoch].append(batch_idx)
        noise = torch.rand((), generator=self.generator)
        self.log("history", float(sum(self.history)), on_step=False, on_epoch=True)
        self.log("counted", float(sum(map(len, self.counts.values()))))
        return super().training_step(batch, batch_idx) * (1 + 0.1 * noise)

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        checkpoint["own"] = {
            "history": self.history,
            "counts": self.counts,
            "started": self.started,
            "path": Path("runs"),
            "seen": {Path("a"), Path("b")},
            "generator": self.generator.get_state(),
            "type": torch.float16,
        }

    def on_load_checkpoint(self, checkpoint: Any) -> None:
        own = checkpoint["own"]
        assert own["started"] == self.started and own["path"] == Path("runs")
        assert own["seen"] == {Path("a"), Path("b")} and own["type"] is torch.float16
        assert checkpoint["hyper_parameters"]["options"].level == 1
        self.history, self.counts = own["history"], own["counts"]
        self.generator.set_state(own["generator"])


class KeepsParts(Regression):
    """A frozen teacher, an average of the network, tied weights, buffers that are not saved, and a
    part with a state of its own."""

    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.steps = 0
            self.newest = deque([np.float64(0)], maxlen=2)
            self.begun = datetime.datetime(2026, 1, 2)

        def get_extra_state(self) -> Any:
            return {"steps": self.steps, "newest": self.newest, "begun": self.begun}

        def set_extra_state(self, state: Any) -> None:
            self.steps, self.newest, self.begun = state.values()
            assert self.newest.maxlen == 2 and self.begun == datetime.datetime(2026, 1, 2)

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(4, 8)
        self.second.weight = self.net[0].weight
        self.teacher = copy.deepcopy(self.net).requires_grad_(False).eval()
        self.average = copy.deepcopy(self.net).requires_grad_(False)
        self.counter = self.Counter()
        self.register_buffer("scale", torch.ones(4), persistent=False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.counter.steps += 1
        self.counter.newest.append(np.float64(self.counter.steps))
        self.log("steps", float(self.counter.steps), on_step=False, on_epoch=True)
        with torch.no_grad():
            towards = self.teacher(batch["x"] * self.scale)
        close = (self(batch["x"]) - towards).square().mean()
        return (
            super().training_step(batch, batch_idx)
            + 0.1 * close
            + self.second(batch["x"]).square().mean()
        )

    def optimizer(self, rate: float = 0.05) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], rate)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.follow()

    @torch.no_grad()
    def follow(self) -> None:
        for mine, own in zip(self.average.parameters(), self.net.parameters(), strict=True):
            mine.mul_(0.9).add_(own, alpha=0.1)


class FollowsLate(KeepsParts):
    """Updates its average in the last hook of a batch."""

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        Regression.optimizer_step(self, *args, **kwargs)

    def on_train_batch_end(self, *_: Any) -> None:
        self.follow()


class BuiltLater(Regression):
    """Makes its layers in `configure_model`, as Lightning advises for large models."""

    def __init__(self) -> None:
        super().__init__()
        del self.net
        self.net = None

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(7)
            self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


class BuiltInSetup(Regression):
    """Makes its layers when the data are known, some of them lazily."""

    def __init__(self) -> None:
        super().__init__()
        del self.net

    def setup(self, stage: str) -> None:
        torch.manual_seed(7)
        rows = self.trainer.datamodule.train
        self.net = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(1))
        self.net(rows.x[:1])


class OwnStateDict(KeepsParts):
    """Leaves the teacher out of the checkpoint, as is done with pretrained parts."""

    strict_loading = False

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        kept = super().state_dict(*args, **kwargs)
        return {name: value for name, value in kept.items() if "teacher" not in name}

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.teacher = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.teacher.requires_grad_(False)


class CompiledPart(Regression):
    """Compiles its network in `__init__`, so that its names have a prefix."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.compile(self.net, backend="eager")


class KeepingRows(Rows):
    """A data module with a state, which its batches depend on."""

    drawn = 0

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.trainer.training:
            self.drawn += 1
            batch["y"] = batch["y"] * (1 + 0.01 * self.drawn)
        return batch

    def state_dict(self) -> Any:
        return {"drawn": np.int64(self.drawn), "path": Path("rows")}

    def load_state_dict(self, state_dict: Any) -> None:
        assert state_dict["path"] == Path("rows")
        self.drawn = state_dict["drawn"]


class SumsOfRanks(SampledRows):
    """A data module whose state is of its rank: a sum of what it has seen."""

    total = 0.0

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        if self.trainer.training:
            self.total += batch["x"].mean().item()
            batch["y"] = batch["y"] + 0.1 * self.total
        return batch

    def state_dict(self) -> Any:
        return {"total": self.total}

    def load_state_dict(self, state_dict: Any) -> None:
        self.total = state_dict["total"]


class NoiseOfRanks(Callback):
    """A callback whose state is of its rank: a generator's, whose noise it adds to gradients."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.generator = torch.Generator().manual_seed(trainer.global_rank)

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        scale = 1 + 0.1 * torch.rand((), generator=self.generator).item()
        pl_module.log("scale", scale, on_step=False, on_epoch=True, sync_dist=True)

    def state_dict(self) -> Any:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state_dict: Any) -> None:
        self.generator.set_state(state_dict["generator"])


class SkipsTheRest(Regression):
    """Ends its second epoch early, by -1."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if self.current_epoch == 1 and batch_idx == 3 else None


class StopsItself(Regression):
    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 1:
            self.trainer.should_stop = True


class ReadsTrainer(Regression):
    """Reads what people read from the Trainer, some of it on rank 0 alone."""

    def on_train_start(self) -> None:
        self.total = float(self.trainer.estimated_stepping_batches)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        trainer = self.trainer
        rows = self.all_gather(batch["row"])
        self.log("gathered", float(rows.numel()), on_step=False, on_epoch=True)
        self.log("batches", float(trainer.num_training_batches), on_step=False, on_epoch=True)
        self.log("total", self.total, on_step=False, on_epoch=True)
        self.log("epochs", float(trainer.max_epochs), on_step=False, on_epoch=True)
        self.log("is_last", float(trainer.is_last_batch), on_step=False, on_epoch=True)
        self.log("world", float(trainer.world_size), on_step=False, on_epoch=True)
        self.log("step", float(self.global_step), on_step=False, on_epoch=True)
        self.log("index", float(trainer.fit_loop.batch_idx), on_step=False, on_epoch=True)
        self.log("rows", float(len(trainer.datamodule.train)), on_step=False, on_epoch=True)
        self.print("batch", batch_idx)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        assert self.trainer.log_dir is not None  # on all ranks: it broadcasts
        if self.trainer.is_global_zero and self.logger:  # alone, for which plain Lightning hangs
            assert "train_loss" in self.trainer.callback_metrics
            assert self.trainer.train_dataloader is not None and self.trainer.val_dataloaders
            assert self.trainer.num_val_batches
            self.logger.experiment.add_scalar("own", 1.0, self.global_step)
            self.logger.log_metrics({"own2": 1.0})

    def on_validation_epoch_end(self) -> None:
        if self.logger and self.trainer.is_global_zero and not self.trainer.sanity_checking:
            self.seen = float(self.trainer.callback_metrics["val_loss"])


class ReturnsNothing(Regression):
    """Manual optimization, which returns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


def recording(base: type, who: str, hooks: str) -> type:
    """Returns a subclass of `base` whose hooks append their names to `base`'s list `calls`."""

    def recorded(name: str) -> Any:
        def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            CALLS.append(f"{who}.{name}")
            return getattr(super(kind, self), name)(*args, **kwargs)

        return hook

    kind = type(f"Recording{who}", (base,), {name: recorded(name) for name in hooks.split()})
    return kind


CALLS: list[str] = []  # of the process, in order
OF_FIT = """setup teardown on_fit_start on_fit_end on_sanity_check_start on_sanity_check_end
    on_train_start on_train_end on_train_epoch_start on_train_epoch_end on_train_batch_start
    on_train_batch_end on_validation_start on_validation_end on_validation_epoch_start
    on_validation_epoch_end on_validation_batch_start on_validation_batch_end on_before_backward
    on_after_backward on_before_optimizer_step on_before_zero_grad"""
# Not backward and configure_gradient_clipping: DeepSpeed's engine has its own.
OF_MODULE = """prepare_data configure_optimizers configure_callbacks optimizer_step
    optimizer_zero_grad training_step validation_step forward on_validation_model_eval
    on_validation_model_train on_validation_model_zero_grad"""
# Not train_dataloader: it is asked for before the start, so that the number of steps is known.
OF_DATA = """prepare_data setup teardown val_dataloader on_before_batch_transfer
    transfer_batch_to_device on_after_batch_transfer"""
OF_SANITY_CHECK = "on_sanity_check_start on_sanity_check_end"
EachCallbackHook = recording(Callback, "callback", OF_FIT)


class CallsItsCallback(Regression):
    def configure_callbacks(self) -> Any:
        return [EachCallbackHook()]

    def setup(self, stage: str) -> None:
        self.hook_calls = CALLS


EachModuleHook = recording(
    CallsItsCallback, "module", OF_FIT.replace(OF_SANITY_CHECK, "") + OF_MODULE
)
EachDataHook = recording(Rows, "data", OF_DATA)

HABITS: dict[str, Habit] = {
    "each_hook": Habit("EachModuleHook", "EachDataHook", {"max_epochs": 2}),
    "all_metrics": Habit("AllMetrics", trainer=EPOCHS),
    "keeps_everything": Habit("KeepsEverything", trainer=EPOCHS),
    "keeps_parts": Habit("KeepsParts", trainer=EPOCHS),
    "follows_late": Habit("FollowsLate", trainer=EPOCHS),
    "built_in_configure_model": Habit("BuiltLater", trainer=EPOCHS),
    "built_in_setup": Habit("BuiltInSetup", trainer=EPOCHS),
    "own_state_dict": Habit("OwnStateDict", trainer=EPOCHS),
    "compiled_part": Habit(
        "CompiledPart", trainer=EPOCHS, refused={"fsdp2": "compile it in place"}
    ),
    "state_of_the_data": Habit("Regression", "KeepingRows", EPOCHS),
    "states_of_ranks": Habit(
        "Regression",
        "SumsOfRanks",
        EPOCHS,
        ({"class_path": "tests.lightning.habits.state.NoiseOfRanks", "init_args": {}},),
    ),
    "skips_the_rest": Habit(
        "SkipsTheRest",
        trainer=EPOCHS,
        why="the rows that are left when -1 ends an epoch come first in the next one, so that none"
        " is trained on less often; Lightning begins with the first row again",
    ),
    "stops_itself": Habit("StopsItself", trainer=EPOCHS),
    "reads_trainer": Habit("ReadsTrainer", trainer=EPOCHS),
    "returns_nothing": Habit(
        "ReturnsNothing", trainer=EPOCHS, refused={"zero2": "optimizes manually"}
    ),
    "epoch_weight": Habit("EpochWeight", trainer=EPOCHS),
    "epoch_sums": Habit("EpochSums", trainer=EPOCHS),
    "state_of_its_own": Habit("StateOfItsOwn", trainer=EPOCHS),
    "skips_a_batch": Habit("SkipsABatch", trainer=EPOCHS, refused=NO_GAPS),
    "returns_dict": Habit("ReturnsDict", trainer=EPOCHS),
    "batch_norm": Habit("Normed", "SampledRows", EPOCHS),
    "buffer": Habit("Ema", "SampledRows", EPOCHS),
    "unsynced_metric": Habit("UnsyncedMetric", trainer=EPOCHS),
    "two_validations": Habit("ValidatesTwo", "TwoValidations", EPOCHS),
}
