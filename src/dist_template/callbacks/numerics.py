"""The numerics guard: a loss or gradient that is not finite, and a loss spike, change no weight and are written down.

    backward of the last micro-batch   every rank's loss of the step is gathered, beside the backward itself
    gradients reduced and clipped      bad = loss or norm not finite, or loss > limit: computed on the device,
                                       from numbers that all ranks have, so equal on all
    the optimizer's kernel             reads `bad` on the device (`found_inf`, made for fp16) and leaves the step out
    the next step's end                the host reads a copy, made meanwhile, and acts: go on, stop or roll back

So nothing waits for the device, and weights stay finite whatever is configured. An optimizer without `found_inf` (not
fused, or not torch's) costs one read a step instead; under DeepSpeed, which reads the norm anyway, the host decides at
once. The learning rate and the order of samples go on as if the step had been taken.
"""

from __future__ import annotations

import math
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..compat.lightning import accumulates
from ..compat.torch import loss_scale
from ..errors import Ended, Exit, check_least
from ..layout import total_norm
from ..model.any_module import metrics_of, samples_of, tracks_metrics
from ..observe.diagnosis.robust import MAD_TO_SIGMA
from ..project import in_run
from .first_bad import first_bad
from .incidents import INCIDENTS, Seen, add_first_bad, add_jump, read_jumps, write_incident

Policy = Literal["stop", "skip", "roll_back"]


class Numerics(Callback):
    """Leave out bad optimizer steps, tell of them in `incidents.jsonl`, and stop, skip or roll back.

    `roll_back` ends training with the code that asks for a restart; the restart resumes from the newest checkpoint,
    which is from before the incident, and never reads the samples again that it came with (`jumps.json`). PaLM did so
    by hand (arXiv:2204.02311, section 5.1). Window and sigmas are OLMo-core's (SkipStepOptimizer: 128 steps, 6 sigma,
    silent for the first half of a window); median and median absolute deviation take the place of mean and standard
    deviation, which a spike in the window would inflate.

    Args:
        on_non_finite: What follows a loss or gradient that is not finite: stop (exit code 65, do not retry), skip (go
            on with the next batch), roll_back.
        on_spike: What follows a loss spike: off (nothing is looked for), or as above.
        spike_window: Steps whose losses tell what is usual.
        spike_sigmas: A loss this many robust standard deviations above the window's median is a spike.
        patience: Bad steps in a row after which skipping ends in stopping. With fp16, whose loss scaler overflows now
            and then and leaves that step out itself, so many overflows in a row make an incident: the first scale,
            2**16, has been halved down to 1 by then.
        jump_steps: Steps of samples that a roll back jumps, the bad one first. PaLM jumped 200 to 500.
        max_roll_backs: Roll backs to one and the same checkpoint; one more stops training.
        folder: Where `incidents.jsonl` and `jumps.json` are.
    """

    def __init__(
        self,
        on_non_finite: Policy = "stop",
        on_spike: Literal["off"] | Policy = "off",
        spike_window: int = 128,
        spike_sigmas: float = 6.0,
        patience: int = 20,
        jump_steps: int = 1,
        max_roll_backs: int = 3,
        folder: str = "{run}",
    ) -> None:
        least = {"spike_window": (spike_window, 4), "spike_sigmas": (spike_sigmas, 0), "patience": (patience, 1)}
        least |= {"jump_steps": (jump_steps, 1), "max_roll_backs": (max_roll_backs, 0)}
        check_least("numerics", **least)
        self.on_non_finite = on_non_finite
        self.on_spike = on_spike
        self.spike_window = spike_window
        self.spike_sigmas = spike_sigmas
        self.patience = patience
        self.jump_steps = jump_steps
        self.max_roll_backs = max_roll_backs
        self.folder = folder
        self._recent = deque(torch.full((spike_window,), math.nan).unbind(), spike_window)  # losses (), the newest last
        self._steps = 0
        self._no_limit = torch.tensor(math.inf)
        self._loss: Tensor | None = None  # () this rank's, of the window's micro-batches so far
        self._decided: Seen | None = None  # of the step that is being taken
        self._pending: Seen | None = None  # of the step before, until the host has looked
        self._batches: list[Any] = []  # of the step that is being taken, kept until the host has looked
        self._has_looked = False  # where bad numbers begin: once, it costs about a step
        self.skipped: Tensor | None = None  # () 1 where the newest optimizer step was skipped, on the device
        self._in_a_row = self._first_step = self._left_out = 0
        self._norms: list[float] = []  # of the steps that the host has looked at since the last log step

    def state_dict(self) -> dict[str, Any]:
        """`recent` is a ring: step i of this training at i % window."""
        return {"recent": self._window().cpu().roll(self._steps), "steps": self._steps, "left_out": self._left_out}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if len(state_dict["recent"]) == self.spike_window:
            self._steps = state_dict["steps"]
            self._recent.extend(state_dict["recent"].roll(-self._steps).unbind())
        self._left_out = state_dict.get("left_out", 0)

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        self.folder = str(in_run(self.folder, trainer))

    # ---- on the device ---------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._recent.extend([loss.to(pl_module.device) for loss in self._recent])
        self._no_limit = self._no_limit.to(pl_module.device)
        self._loss = self._decided = self._pending = None
        self._in_a_row, self._first_step = 0, trainer.global_step
        self._rolled_back: list[dict[str, int]] = trainer.strategy.broadcast(read_jumps(Path(self.folder)))
        if self._rolled_back:
            if samples := samples_of(trainer):
                samples.jump([(each["start"], each["end"]) for each in self._rolled_back])
        self._leaves_it_to_zero = hasattr(trainer.precision_plugin, "leave_out")
        # Lightning calls no hook between clipping, which computes the norm, and the optimizer's kernel.
        pl_module.configure_gradient_clipping = partial(
            self._clip_and_decide, trainer, pl_module, pl_module.configure_gradient_clipping
        )

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if pl_module.automatic_optimization:
            self._batches.append(batch)

    def on_before_backward(self, trainer: L.Trainer, pl_module: Any, loss: Tensor) -> None:
        if not pl_module.automatic_optimization:
            return
        loss = loss.detach().float()
        if scaler := getattr(trainer.precision_plugin, "scaler", None):
            loss = loss / loss_scale(scaler)
        self._loss = loss if self._loss is None else self._loss + loss  # Lightning has divided by the accumulation
        if not accumulates(trainer):
            self._losses, self._gathering, self._loss = self._loss, None, None
            if trainer.world_size > 1:
                self._sent = self._losses.reshape(1)  # kept until it is sent
                self._losses = self._sent.new_empty(trainer.world_size)
                self._gathering = dist.all_gather_into_tensor(self._losses, self._sent, async_op=True)

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: Any) -> None:
        if self._leaves_it_to_zero and pl_module.automatic_optimization:  # DeepSpeed looks at the norm in its own step
            bad = self._decide(torch.zeros((), device=pl_module.device))
            trainer.precision_plugin.leave_out(pl_module, bad)  # ty: ignore[missing-attribute]

    def _clip_and_decide(self, trainer: Any, module: Any, clip: Any, optimizer: Any, **options: Any) -> None:
        if not tracks_metrics(module) and not self._leaves_it_to_zero:  # Lightning's own clipping reports no norm
            metrics_of(module).add("train/grad_norm", _norm_of(module))
        clip(optimizer, **options)
        if self._leaves_it_to_zero:
            return
        norm = metrics_of(module).newest.pop("train/grad_norm", None)
        if norm is None:  # an edited module that does not track it
            norm = _norm_of(module)
        bad = self._decide(norm)
        _leave_out(optimizer, bad, scaler=getattr(trainer.precision_plugin, "scaler", None))

    def _decide(self, norm: Tensor) -> Tensor:
        """() 1.0 where the step must be left out. Starts the copy that the host will read."""
        if self._gathering is not None:
            self._gathering.wait()  # on a GPU the stream waits, not the host
        loss = self._losses.mean() if self._losses.dim() else self._losses
        norm = norm.to(loss, non_blocking=True)
        limit = self._limit()
        both = loss + norm
        bad = torch.nan_to_num(both - both, nan=1.0)  # x - x is 0, NaN where x is not finite
        if limit is not self._no_limit:
            bad = torch.maximum(bad, (loss > limit).to(bad))
        self._recent.append(loss)
        self._steps += 1
        judged, several = [norm, limit, bad], self._losses.dim()
        values = torch.cat([self._losses, torch.stack(judged)]) if several else torch.stack([loss, *judged])
        self._decided, self.skipped = Seen.copy(values), bad
        return bad

    def _limit(self) -> Tensor:
        """() what a loss may be at most. With `dim` torch finds the median without a read on the host."""
        if self.on_spike == "off" or self._steps < self.spike_window // 2:
            return self._no_limit
        recent = self._window()
        median = recent.nanmedian(dim=0).values
        spread = (recent - median).abs().nanmedian(dim=0).values
        return median + self.spike_sigmas * MAD_TO_SIGMA * spread

    def _window(self) -> Tensor:
        """(spike_window,) the recent losses, the oldest first; NaN where there was none, or none that is finite."""
        recent = torch.stack(tuple(self._recent))
        return torch.where(recent.isfinite(), recent, math.nan)

    # ---- on the host, one step later -------------------------------------------------------------------------------

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if accumulates(trainer) or self._decided is None:
            return
        data: Any = trainer.datamodule  # ty: ignore[missing-attribute]
        decided, self._decided = self._decided, None
        decided.batches, self._batches = self._batches, []
        decided.step, decided.rows = trainer.global_step, getattr(data, "window_rows", [])
        decided.consumed = samples.consumed_samples if (samples := samples_of(trainer)) else 0
        if self._leaves_it_to_zero:
            overflowed, norm = trainer.precision_plugin.outcome(pl_module)  # ty: ignore[missing-attribute]
            if norm >= 0 and not tracks_metrics(pl_module):
                metrics_of(pl_module).add("train/grad_norm", torch.tensor(norm))
            decided.values[-3], decided.values[-1] = norm, max(decided.values[-1], overflowed)
            self.skipped = torch.ones((), device=pl_module.device) if overflowed else self.skipped
            self._act_on(trainer, pl_module, decided)
        else:
            before, self._pending = self._pending, decided
            self._act_on(trainer, pl_module, before)

    def on_log_step(self, trainer: Any, module: Any, metrics: dict[str, float]) -> None:
        metrics["health/skipped_steps"] = self._left_out
        if self._norms and trainer.gradient_clip_val and trainer.gradient_clip_algorithm != "value":
            clipped = sum(norm > trainer.gradient_clip_val for norm in self._norms)
            metrics["health/clipped_share"] = clipped / len(self._norms)
        self._norms = []

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """A checkpoint is from before an incident or from after it was dealt with, and its weights are finite.

        Raises:
            Ended: it would not be; on all ranks, before anything is written.
        """
        self.on_train_end(trainer, pl_module)
        if not _are_finite(trainer, pl_module):
            raise Ended(
                Exit.NON_FINITE,
                f"the weights after step {trainer.global_step} are not finite, though no such step was taken: something"
                f" else has written them. No checkpoint of them is kept; the older ones are in {self.folder}",
            )

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        pending, self._pending = self._pending, None
        self._act_on(trainer, pl_module, pending)

    def teardown(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        vars(pl_module).pop("configure_gradient_clipping", None)
        for optimizer in trainer.optimizers if stage == "fit" else ():
            vars(optimizer).pop("found_inf", None)

    def _act_on(self, trainer: Any, module: Any, seen: Seen | None) -> None:
        """Go on, or write down a bad step and do as configured; the same on all ranks.

        Raises:
            Ended: by `stop` or `roll_back`.
        """
        if seen is None:
            return
        seen.arrive()
        self._norms.append(seen.norm)
        self._in_a_row = self._in_a_row + 1 if seen.bad else 0
        is_the_scalers = seen.bad and self._scales_loss(trainer) and math.isfinite(seen.loss) and not seen.is_spike
        if not seen.bad or (is_the_scalers and self._in_a_row < self.patience):
            return
        self._left_out += 1
        decision = self._decision(seen)
        found, incident = None, write_incident(Path(self.folder), seen, decision, trainer.datamodule)
        if seen.batches and not seen.is_spike and not self._has_looked:
            self._has_looked = True
            found = first_bad(trainer, module, seen.batches)
            add_first_bad(Path(self.folder), incident, found)
        told = f"; the first bad {found['what']} is that of {found['module']}" if found else ""
        sentence = f"{seen}{told}; see {self.folder}/{INCIDENTS}"
        if trainer.is_global_zero:
            print(f"\nnumerics: {sentence}", flush=True)
        if decision == "stop":
            raise Ended(Exit.NON_FINITE, f"training stopped: {sentence}")
        if decision == "roll_back":
            if samples := samples_of(trainer):
                add_jump(Path(self.folder), seen, self.jump_steps, self._first_step, samples)
            raise Ended(Exit.HUNG, "rolling back: a restart goes on from the newest checkpoint, without those samples")

    def _decision(self, seen: Seen) -> str:
        decision = self.on_spike if seen.is_spike else self.on_non_finite
        rolled_back = sum(each["from_step"] == self._first_step for each in self._rolled_back)
        if decision == "skip" and self._in_a_row >= self.patience:
            return "stop"
        return "stop" if decision == "roll_back" and rolled_back >= self.max_roll_backs else decision

    def _scales_loss(self, trainer: Any) -> bool:
        """Whether a loss scaler is at work, which leaves out a step whenever its scale is too high."""
        precision = trainer.precision_plugin
        zero = self._leaves_it_to_zero and precision.precision.startswith("16")
        return zero or getattr(precision, "scaler", None) is not None


def _leave_out(optimizer: Any, bad: Tensor, scaler: Any) -> None:
    """Have `optimizer` leave out the step that it is in, where `bad`, a () tensor on the device, is 1."""
    first = next(p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
    on_device = all(group.get("fused") for group in optimizer.param_groups) and first.device.type != "mps"
    if on_device and scaler is None:
        optimizer.found_inf = bad
    elif on_device:  # the scaler sets `found_inf` itself, from what it sees in the gradients
        first.add_(torch.where(bad > 0, math.inf, 0.0).to(first.dtype))
    elif bad.item():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None  # every optimizer of torch passes over such a parameter


def _norm_of(module: nn.Module) -> Tensor:
    return total_norm(p.grad for p in module.parameters() if p.grad is not None)


def _are_finite(trainer: Any, module: nn.Module) -> bool:
    """Whether all weights are, of all ranks; one read on the host."""
    parts = [p.to_local() if isinstance(p, DTensor) else getattr(p, "ds_tensor", p) for p in module.parameters()]
    # Of what is not finite no sum is; the largest value, by torch 2.13, takes a CPU eight times as long.
    sums = torch.stack([part.detach().sum(dtype=torch.float32) for part in parts])
    finite = sums.isfinite().all().float().to(trainer.strategy.root_device)
    return bool(trainer.strategy.reduce(finite, reduce_op="min").item())
