"""Optimizers and their schedules."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedules
from torch.optim import swa_utils

from ..arms import RANKS, Habit
from .rows import EPOCHS, Regression


class PerStep(Regression):
    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        schedule = schedules.CosineAnnealingLR(optimizer, 20)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class PerEpoch(Regression):
    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        return [optimizer], [schedules.StepLR(optimizer, 1, 0.5)]


class EveryThird(Regression):
    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        schedule = schedules.ExponentialLR(optimizer, 0.8)
        return [optimizer], [{"scheduler": schedule, "interval": "step", "frequency": 3}]


class WarmupThenPlateau(Regression):
    """Two schedules of one optimizer, per step and per epoch."""

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(0.1)
        warmup = schedules.LinearLR(optimizer, 0.25, total_iters=8)
        plateau = schedules.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return [optimizer], [
            {"scheduler": warmup, "interval": "step"},
            {"scheduler": plateau, "interval": "epoch", "monitor": "val_loss"},
        ]


class PlateauThenWarmup(WarmupThenPlateau):
    """The same two, in the other order."""

    def configure_optimizers(self) -> Any:
        optimizers, both = super().configure_optimizers()
        return optimizers, both[::-1]


class WarmupThenDecay(Regression):
    """Two chainable schedules, per step and per epoch."""

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(0.1)
        warmup = schedules.LinearLR(optimizer, 0.25, total_iters=8)
        decay = schedules.ExponentialLR(optimizer, 0.7)
        return [optimizer], [
            {"scheduler": warmup, "interval": "step"},
            {"scheduler": decay, "interval": "epoch"},
        ]


class Plateau(Regression):
    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        schedule = schedules.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "monitor": "train_loss"},
        }


class OneCycle(Regression):
    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        total = self.trainer.estimated_stepping_batches
        schedule = schedules.OneCycleLR(optimizer, 0.1, total_steps=int(total))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Sequential(Regression):
    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        parts = [
            schedules.LinearLR(optimizer, 0.1, total_iters=4),
            schedules.CosineAnnealingLR(optimizer, 10),
        ]
        schedule = schedules.SequentialLR(optimizer, parts, milestones=[4])
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class WarmRestarts(Regression):
    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        schedule = schedules.CosineAnnealingWarmRestarts(optimizer, 4, 2)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class NumpyLambda(Regression):
    """A rate by numpy: the numbers in the schedule's and the optimizer's state are numpy's."""

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        schedule = schedules.LambdaLR(
            optimizer, lambda step: np.interp(step, [0, 6, 18], [0.1, 1.0, 0.1])
        )
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class OwnSchedulerStep(PerStep):
    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step()
        for group in scheduler.optimizer.param_groups:
            group["lr"] = max(group["lr"], 0.01)


class TwoOptimizers(Regression):
    """Manual optimization of two optimizers with a schedule each."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        for optimizer in (first, second):
            optimizer.zero_grad()
        self.manual_backward(self.loss_of(batch))
        first.step()
        if batch_idx % 2:
            second.step()
        for schedule in self.lr_schedulers():
            schedule.step()

    def configure_optimizers(self) -> Any:
        first = torch.optim.SGD(self.net[0].parameters(), 0.05, momentum=0.9)
        second = torch.optim.Adam(self.net[2].parameters(), 0.01)
        rates = [schedules.StepLR(first, 4, 0.5), schedules.ExponentialLR(second, 0.9)]
        return [first, second], rates


class Unfreezes(Regression):
    """The first layer is trained from the second epoch on."""

    def on_train_epoch_start(self) -> None:
        self.net[0].requires_grad_(self.current_epoch >= 1)


class OwnClipping(Regression):
    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


class Lbfgs(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), 0.1, max_iter=3)


class PlateauByStep(Regression):
    """A plateau that looks at the batch's loss after every fourth batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss_of(batch)
        self.log("step_loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        schedule = schedules.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": schedule,
                "monitor": "step_loss",
                "interval": "step",
                "frequency": 4,
            },
        }


class PlateauOfNothing(PlateauByStep):
    """A metric that is never logged, and `strict` is false: the plateau is never stepped."""

    def configure_optimizers(self) -> Any:
        found = super().configure_optimizers()
        found["lr_scheduler"] |= {"monitor": "elsewhere", "strict": False}
        return found


class PlateauByHand(Regression):
    """A plateau in manual optimization, after the documentation."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss_of(batch)
        self.manual_backward(loss)
        optimizer.step()
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)

    def on_train_epoch_end(self) -> None:
        schedule: Any = self.lr_schedulers()
        schedule.step(self.trainer.callback_metrics["val_loss"])

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        return [optimizer], [schedules.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)]


class OneCycleOfBetas(Regression):
    """Changes AdamW's betas with the rate."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 0.01)
        total = int(self.trainer.estimated_stepping_batches)
        schedule = schedules.OneCycleLR(optimizer, 0.05, total_steps=total, cycle_momentum=True)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Cyclic(Regression):
    """Changes SGD's momentum with the rate."""

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        schedule = schedules.CyclicLR(optimizer, 0.01, 0.1, 3, 5, mode="triangular2")
        return [optimizer], [{"scheduler": schedule, "interval": "step", "name": "cycle"}]


class Chained(Regression):
    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(0.1)
        parts = [
            schedules.ConstantLR(optimizer, 0.5, total_iters=5),
            schedules.ExponentialLR(optimizer, 0.95),
        ]
        schedule = schedules.ChainedScheduler(parts, optimizer=optimizer)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class HalvesAfterEach:
    """A rate that depends on how often it was asked: a callable object with state."""

    def __init__(self) -> None:
        self.factor = 1.0

    def __call__(self, step: int) -> float:
        self.factor *= 0.97
        return self.factor


class LambdaOfAnObject(Regression):
    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        schedule = schedules.LambdaLR(optimizer, HalvesAfterEach())
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Multiplicative(Regression):
    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        schedule = schedules.MultiplicativeLR(optimizer, lambda step: 0.9)
        return [optimizer], [schedule]


class EverySecondEpoch(Regression):
    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        schedule = schedules.ExponentialLR(optimizer, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "epoch", "frequency": 2}]


class DecayThenWarmup(WarmupThenDecay):
    """Two chainable schedules, per epoch and per step."""

    def configure_optimizers(self) -> Any:
        optimizers, both = super().configure_optimizers()
        return optimizers, both[::-1]


class Transformers(Regression):
    """The schedule of transformers, a LambdaLR of a partial."""

    def configure_optimizers(self) -> Any:
        from transformers import get_cosine_schedule_with_warmup

        optimizer = torch.optim.AdamW(self.parameters(), 0.02)
        total = int(self.trainer.estimated_stepping_batches)
        schedule = get_cosine_schedule_with_warmup(optimizer, total // 4, total)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class OwnSchedule(schedules.LRScheduler):
    """A user's subclass, with state of its own."""

    def __init__(self, optimizer: Any, span: int) -> None:
        self.span, self.visited = span, 0
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        self.visited += 1
        return [rate * (1 - self.visited % self.span / self.span / 2) for rate in self.base_lrs]


class OwnScheduleClass(Regression):
    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        return [optimizer], [{"scheduler": OwnSchedule(optimizer, 5), "interval": "step"}]


class Groups(Regression):
    """Two groups with rates of their own, as in fine-tuning, and a schedule of both."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(
            [
                {"params": self.net[0].parameters(), "lr": 0.01},
                {"params": self.net[2].parameters(), "lr": 0.1, "momentum": 0.5},
            ],
            0.05,
            momentum=0.9,
        )
        schedule = schedules.LambdaLR(optimizer, [lambda n: 0.9**n, lambda n: 1 / (1 + n)])
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class DecayGroups(Regression):
    """Biases are not decayed."""

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.ndim > 1]
        vectors = [p for p in self.parameters() if p.ndim < 2]
        groups = [
            {"params": vectors, "weight_decay": 0.0},
            {"params": matrices, "weight_decay": 0.1},
        ]
        return torch.optim.AdamW(groups, 0.02, fused=True)


class OneInAList(Regression):
    def configure_optimizers(self) -> Any:
        return [self.optimizer()]


class OneInADict(Regression):
    def configure_optimizers(self) -> Any:
        return {"optimizer": self.optimizer()}


class DictInATuple(Regression):
    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        schedule = schedules.ExponentialLR(optimizer, 0.5)
        return ({"optimizer": optimizer, "lr_scheduler": schedule},)


class MonitorBesideThePlateau(Regression):
    """The form in which `monitor` is beside the schedule."""

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        schedule = schedules.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": schedule, "monitor": "val_loss"}


class NoOptimizer(Regression):
    """Nothing is trained; the module collects something."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.mean += 0.5
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return None


class AdamForeach(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.02, amsgrad=True, foreach=True)


class Rms(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.RMSprop(self.parameters(), 0.005, momentum=0.5, centered=True)


class Nesterov(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(
            self.parameters(), 0.03, momentum=0.9, nesterov=True, weight_decay=0.01
        )


class Adafactor(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters(), 0.05)


class SignSgd(torch.optim.Optimizer):
    """A user's own optimizer, element by element, with a count that is no tensor."""

    def __init__(self, params: Any, lr: float = 0.01, decay: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"], state["mean"] = 0, torch.zeros_like(p)
                state["step"] += 1
                state["mean"].mul_(group["decay"]).add_(p.grad, alpha=1 - group["decay"])
                p.add_(state["mean"].sign(), alpha=-group["lr"] / state["step"] ** 0.5)
        return loss


class NormedSgd(SignSgd):
    """Divides each parameter's gradient by its norm."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad / (p.grad.norm() + 1e-8), alpha=-group["lr"])
        return loss


class OwnOptimizer(Regression):
    def configure_optimizers(self) -> Any:
        return SignSgd(self.parameters(), 0.02)


class OwnNormedOptimizer(Regression):
    def configure_optimizers(self) -> Any:
        return NormedSgd(self.parameters(), 0.02)


class WarmupByHand(Regression):
    """`optimizer_step` with a warm-up, as Lightning's documentation shows."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        optimizer.step(closure=optimizer_closure)
        if self.trainer.global_step < 8:
            share = min(1.0, float(self.trainer.global_step + 1) / 8)
            for group in optimizer.param_groups:
                group["lr"] = share * 0.1


class WarmupByHandThenDecay(WarmupByHand):
    """The same with a schedule, which knows nothing of the rate that was set by hand."""

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(0.1)
        return [optimizer], [schedules.StepLR(optimizer, 2, 0.5)]


class SkipsSteps(Regression):
    """`optimizer_step` that steps in every second batch alone, after Lightning's documentation."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None
    ) -> None:
        if batch_idx % 2 == 0:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


class OwnZeroGrad(Regression):
    """Zeroes gradients in place."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class LogsNorms(Regression):
    """Gradient norms by Lightning's function, before clipping."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, norm_type=2))

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.log("rate", optimizer.param_groups[0]["lr"])


class ScalesGradients(Regression):
    """Changes gradients in a hook."""

    def on_after_backward(self) -> None:
        for parameter in self.net[0].parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.1)


class OwnBackward(Regression):
    def backward(self, loss: Any) -> None:
        (0.5 * loss).backward()


class Gan(Regression):
    """Two optimizers that take turns, as in Lightning's documentation."""

    def __init__(self) -> None:
        super().__init__()
        self.judge = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        self.toggle_optimizer(first)
        made = self(batch["x"])
        loss = F.binary_cross_entropy_with_logits(self.judge(made), torch.ones_like(made))
        self.log("g_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        self.manual_backward(loss)
        first.step()
        first.zero_grad()
        self.untoggle_optimizer(first)

        self.toggle_optimizer(second)
        real = F.binary_cross_entropy_with_logits(self.judge(batch["y"]), torch.ones_like(made))
        fake = self.judge(self(batch["x"]).detach())
        fake_loss = F.binary_cross_entropy_with_logits(fake, torch.zeros_like(fake))
        self.manual_backward((real + fake_loss) / 2)
        second.step()
        second.zero_grad()
        self.untoggle_optimizer(second)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.net.parameters(), 0.01, betas=(0.5, 0.999)),
            torch.optim.Adam(self.judge.parameters(), 0.01, betas=(0.5, 0.999)),
        ], []


class ThreeOptimizers(Regression):
    """Manual optimization of three optimizers, all of which step in each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.third = nn.Parameter(torch.ones(1))
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = F.mse_loss(self(batch["x"]) * self.third, batch["y"])
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(self.net[0].parameters(), 0.05),
            torch.optim.Adam(self.net[2].parameters(), 0.01),
            torch.optim.Adagrad([self.third], 0.1),
        ]


class AccumulatesByHand(Regression):
    """Manual optimization with accumulation and clipping of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.loss_of(batch) / 2)
        if (batch_idx + 1) % 2 == 0:
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()
            optimizer.zero_grad()


class Wasserstein(Regression):
    """A Wasserstein GAN: several steps of the critic, whose backward pass is differentiated and
    whose weights are clamped; the generator's layers are a list, with a scale that is read."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(4))
        self.judge = nn.ModuleList([nn.Linear(4, 6), nn.Linear(6, 1)])
        self.automatic_optimization = False

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.net:
            x = x + torch.tanh(layer(x))
        return x * self.scale

    def judged(self, x: Tensor) -> Tensor:
        return self.judge[1](torch.tanh(self.judge[0](x)))

    def penalty(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.judged(x).sum(), x, create_graph=True)
        return (slope.norm(dim=1) - 1).pow(2).mean()

    def loss_of(self, batch: Any) -> Tensor:
        return -self.judged(self(batch["x"])).mean()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        generator, critic = self.optimizers()
        real = batch["x"] * batch["y"]
        for _ in range(2):
            made = self(batch["x"])  # not detached: toggling keeps the generator's weights
            loss = self.judged(made).mean() - self.judged(real).mean() + self.penalty(real)
            self.toggle_optimizer(critic)
            self.manual_backward(loss)
            critic.step()
            critic.zero_grad()
            self.untoggle_optimizer(critic)
            with torch.no_grad():
                for parameter in self.judge.parameters():
                    parameter.clamp_(-0.3, 0.3)
        self.manual_backward(self.loss_of(batch))
        critic.zero_grad()
        generator.step()
        generator.zero_grad()
        self.scale.data.clamp_(0.95, 1.05)
        self.log("judge_loss", loss, on_step=False, on_epoch=True, sync_dist=True)

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam([*self.net.parameters(), self.scale], 0.05, betas=(0.5, 0.9)),
            torch.optim.Adam(self.judge.parameters(), 0.05, betas=(0.5, 0.9)),
        ]


class TwoBackwardPasses(Regression):
    """One forward pass with two backward passes, and a gradient that is computed between them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 4)])
        self.judge = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
        self.automatic_optimization = False

    def forward(self, x: Tensor) -> Tensor:
        return self.net[1](torch.tanh(self.net[0](x)))

    def loss_of(self, batch: Any) -> Tensor:
        return F.mse_loss(self(batch["x"]), batch["x"])

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        made = self(batch["x"])
        rebuilt = F.mse_loss(made, batch["x"])
        judged = self.judge(made).mean()
        (slope,) = torch.autograd.grad(judged, made, retain_graph=True)
        self.manual_backward(rebuilt, retain_graph=True)
        self.log("slope", slope.sum(), on_step=False, on_epoch=True, sync_dist=True)
        self.manual_backward(judged / 8)
        if (batch_idx + 1) % 2 == 0:
            self.clip_gradients(first, 0.5, "norm")
            first.step()
            second.step()
            first.zero_grad()
            second.zero_grad()

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.net.parameters(), 0.01),
            torch.optim.SGD(self.judge.parameters(), 0.05, momentum=0.9),
        ]


class Averaged(Regression):
    """Averages its weights by torch's swa_utils, in the module."""

    def __init__(self) -> None:
        super().__init__()
        self.average = swa_utils.AveragedModel(
            self.net, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9)
        )
        self.average.requires_grad_(False)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.average.update_parameters(self.net)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), 0.05, momentum=0.9)


class FrozenAtFirst(Regression):
    """The first layer is frozen where it is made, and trained from the second epoch on."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.net[0].requires_grad_(True)


class UnfreezesAtAStep(Regression):
    """Frozen where it is made, and unfrozen once, by a hook that is not called again later."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 2:
            self.net[0].requires_grad_(True)


class UnsyncedPlateauByStep(PlateauByStep):
    """The batch's loss without `sync_dist`: each rank has another one."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss_of(batch)
        self.log("step_loss", loss)
        return loss


class OfAPart(Regression):
    """The optimizer has the last layer alone; the first has gradients that nothing clears."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net[2].parameters(), 0.05, momentum=0.9)


class RateOfATensor(Regression):
    """The rate is a tensor, which a schedule changes in place."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), torch.tensor(0.02), foreach=False)
        schedule = schedules.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class ForeignSchedule:
    """Not one of torch's, as timm's: it is stepped by a number and loads what it has saved
    alone."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.number = optimizer, 0

    def step_update(self, number: int) -> None:
        self.number = number
        for group in self.optimizer.param_groups:
            group["lr"] = 0.05 / (1 + number % 7)

    def state_dict(self) -> dict[str, int]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, int]) -> None:
        (self.number,) = state.values()


class OfAnotherLibrary(Regression):
    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        return [optimizer], [{"scheduler": ForeignSchedule(optimizer), "interval": "step"}]

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step_update(self.global_step)


class AddsAGroup(Regression):
    """Adds a group of parameters in training."""

    def on_train_epoch_start(self) -> None:
        (optimizer,) = self.trainer.optimizers
        if self.current_epoch == 1 and len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": list(self.net[0].parameters()), "lr": 0.01})

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net[2].parameters(), 0.05, momentum=0.9)


class TwoWithoutManual(Regression):
    def configure_optimizers(self) -> Any:
        return [self.optimizer(), self.optimizer()]


class OptimizerAndSchedule(Regression):
    """A form that Lightning does not know."""

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        return optimizer, schedules.StepLR(optimizer, 1)


class PlateauWithoutMonitor(Regression):
    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer()
        return [optimizer], [schedules.ReduceLROnPlateau(optimizer)]


class ClipsByHandInManual(AccumulatesByHand):
    """With `trainer.gradient_clip_val`, which Lightning refuses in manual optimization."""


FINDS_UNUSED = "ddp_find_unused_parameters_true"
# Parts of the sentences that refuse.
MANUAL = "optimizes manually (automatic_optimization is False), which does not work under"
UNFROZEN = "in training, and DeepSpeed trains the parameters that are trainable at its start"
NOT_ELEMENT_WISE = "does not work under ZeRO, which flattens parameters"
NOT_ON_SHARDS = "of configure_optimizers does not work under MeshStrategy"
OF_GRADIENTS = "reads gradients, which DeepSpeed keeps to itself"
NONE = "configure_optimizers returns no optimizer"
NO_EFFECT = "which has no effect under ZeRO"


def _manual(module: str, **options: Any) -> Habit:
    return Habit(module, trainer=EPOCHS, refused={"zero2": MANUAL}, **options)


HABITS: dict[str, Habit] = {
    "per_step": Habit("PerStep", trainer=EPOCHS),
    "per_epoch": Habit("PerEpoch", trainer=EPOCHS),
    "every_third": Habit("EveryThird", trainer=EPOCHS),
    "every_second_epoch": Habit("EverySecondEpoch", trainer=EPOCHS | {"max_epochs": 5}),
    "warmup_then_plateau": Habit("WarmupThenPlateau", trainer=EPOCHS),
    "plateau_then_warmup": Habit("PlateauThenWarmup", trainer=EPOCHS),
    "warmup_then_decay": Habit("WarmupThenDecay", trainer=EPOCHS),
    "decay_then_warmup": Habit("DecayThenWarmup", trainer=EPOCHS),
    "plateau": Habit("Plateau", trainer=EPOCHS),
    "plateau_by_step": Habit("PlateauByStep", trainer=EPOCHS),
    "unsynced_plateau_by_step": Habit(  # Lightning's ranks would train at different rates
        "UnsyncedPlateauByStep", trainer=EPOCHS, oracle="one", without=("step_loss",)
    ),
    "plateau_of_nothing": Habit("PlateauOfNothing", trainer=EPOCHS),
    "plateau_by_hand": _manual("PlateauByHand"),
    "monitor_beside": Habit("MonitorBesideThePlateau", trainer=EPOCHS),
    "one_cycle": Habit("OneCycle", trainer=EPOCHS),
    "one_cycle_of_betas": Habit("OneCycleOfBetas", trainer=EPOCHS),
    "cyclic": Habit("Cyclic", trainer=EPOCHS),
    "chained": Habit("Chained", trainer=EPOCHS),
    "sequential": Habit("Sequential", trainer=EPOCHS),
    "warm_restarts": Habit("WarmRestarts", trainer=EPOCHS),
    "numpy_lambda": Habit("NumpyLambda", trainer=EPOCHS),
    "lambda_of_an_object": Habit("LambdaOfAnObject", trainer=EPOCHS),
    "multiplicative": Habit("Multiplicative", trainer=EPOCHS),
    "transformers_cosine": Habit("Transformers", trainer=EPOCHS),
    "own_schedule": Habit("OwnScheduleClass", trainer=EPOCHS),
    "own_scheduler_step": Habit("OwnSchedulerStep", trainer=EPOCHS),
    "groups": Habit("Groups", trainer=EPOCHS),
    "decay_groups": Habit("DecayGroups", trainer=EPOCHS),
    "one_in_a_list": Habit("OneInAList", trainer=EPOCHS),
    "one_in_a_dict": Habit("OneInADict", trainer=EPOCHS),
    "dict_in_a_tuple": Habit("DictInATuple", trainer=EPOCHS),
    "no_optimizer": Habit("NoOptimizer", trainer=EPOCHS, refused={"zero2": NONE, "fsdp2": NONE}),
    "adam_foreach": Habit("AdamForeach", trainer=EPOCHS),
    "rms": Habit("Rms", trainer=EPOCHS),
    "nesterov": Habit("Nesterov", trainer=EPOCHS),
    "adafactor": Habit(
        "Adafactor", trainer=EPOCHS, refused={"zero2": NOT_ELEMENT_WISE, "fsdp2": NOT_ON_SHARDS}
    ),
    "lbfgs": Habit(
        "Lbfgs",
        trainer=EPOCHS,
        tolerance=3e-3,  # by a last bit that differs, 1e-4 after 36 searches
        refused={"fsdp2": NOT_ON_SHARDS, "zero2": NOT_ELEMENT_WISE},
    ),
    "own_optimizer": Habit("OwnOptimizer", trainer=EPOCHS),
    "own_normed_optimizer": Habit(
        "OwnNormedOptimizer", trainer=EPOCHS, refused={"zero2": NOT_ELEMENT_WISE}
    ),
    "warmup_by_hand": Habit("WarmupByHand", trainer=EPOCHS),
    "warmup_by_hand_then_decay": Habit("WarmupByHandThenDecay", trainer=EPOCHS),
    "skips_steps": Habit("SkipsSteps", trainer=EPOCHS),
    "own_zero_grad": Habit("OwnZeroGrad", trainer=EPOCHS),
    "logs_norms": Habit(
        "LogsNorms",
        trainer=EPOCHS | {"gradient_clip_val": 0.1},
        refused={"zero2": OF_GRADIENTS, "fsdp2": "calls grad_norm"},
    ),
    "scales_gradients": Habit("ScalesGradients", trainer=EPOCHS, refused={"zero2": OF_GRADIENTS}),
    "own_clipping": Habit("OwnClipping", trainer=EPOCHS, refused={"zero2": NO_EFFECT}),
    "own_backward": Habit("OwnBackward", trainer=EPOCHS, refused={"zero2": NO_EFFECT}),
    "of_a_part": Habit("OfAPart", trainer=EPOCHS | {"gradient_clip_val": 0.5}),
    "rate_of_a_tensor": Habit("RateOfATensor", trainer=EPOCHS),
    "of_another_library": Habit("OfAnotherLibrary", trainer=EPOCHS),
    "adds_a_group": Habit(
        "AddsAGroup",
        trainer=EPOCHS,
        refused=dict.fromkeys(RANKS, "parameter groups at the start")
        | {"zero2": "groups are fixed when training starts"},
    ),
    "two_without_manual": Habit(
        "TwoWithoutManual",
        trainer=EPOCHS,
        refused=dict.fromkeys(RANKS, "TwoWithoutManual.configure_optimizers: "),
    ),
    "optimizer_and_schedule": Habit(
        "OptimizerAndSchedule",
        trainer=EPOCHS,
        refused=dict.fromkeys(RANKS, "OptimizerAndSchedule.configure_optimizers: "),
    ),
    "plateau_without_monitor": Habit(
        "PlateauWithoutMonitor",
        trainer=EPOCHS,
        refused=dict.fromkeys(RANKS, "PlateauWithoutMonitor.configure_optimizers: "),
    ),
    "clip_in_manual": Habit(
        "ClipsByHandInManual",
        trainer=EPOCHS | {"gradient_clip_val": 0.5},
        refused=dict.fromkeys(RANKS, "gradient_clip_val") | {"zero2": "optimizes manually"},
    ),
    "two_optimizers": _manual("TwoOptimizers"),
    "three_optimizers": _manual("ThreeOptimizers"),
    "gan": _manual("Gan", oracle=FINDS_UNUSED),
    "wasserstein": _manual("Wasserstein", oracle=FINDS_UNUSED),
    "two_backward_passes": _manual("TwoBackwardPasses", oracle=FINDS_UNUSED),
    "accumulates_by_hand": _manual("AccumulatesByHand"),
    "averaged": Habit("Averaged", trainer=EPOCHS),
    "unfreezes": Habit("Unfreezes", trainer=EPOCHS, refused={"zero2": UNFROZEN}, oracle="one"),
    "unfreezes_at_a_step": Habit(
        "UnfreezesAtAStep", trainer=EPOCHS, refused={"zero2": UNFROZEN}, oracle="one"
    ),
    "frozen_at_first": Habit(  # DDP alone would let each rank train the layer for itself
        "FrozenAtFirst", trainer=EPOCHS, refused={"zero2": UNFROZEN}, oracle="one"
    ),
}
