"""The numerics guard: skips optimizer steps with a non-finite loss or gradient, or a loss spike.

    gradients reduced and clipped       gathers all ranks' losses and norms, and computes on the
                                        device whether the step is anomalous: one is not finite, or
                                        the mean loss is above a limit. All ranks skip it or none
    the optimizer's kernel              skips the step where `found_inf` is 1, torch's flag for fp16
    end of the next step                the host reads a copy and continues or stops

The host never waits for the device, unless the optimizer does not support `found_inf` (not fused,
or not torch's) or is DeepSpeed's, which reads the norm itself. The learning rate schedule and the
order of samples continue as if the step had been taken.

Buffers that a forward pass writes, such as BatchNorm's running statistics, have the step's numbers
before it is known to be anomalous. Where such steps are skipped, buffers.py restores them."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor

from .. import processes
from ..compat.lightning import replace_clipping
from ..compat.steps import StepCallback
from ..compat.torch import loss_scale, mark_overflow
from ..errors import Ended, Exit, InputError, check_least
from ..layout import total_norm
from ..model.any_module import metrics_of, tracks_metrics
from ..observe.history.run import RunFile
from ..project import in_run
from ..ranges import Folder, NonNegativeFloat, PositiveInt, Range
from ..records import write_atomically
from .buffers import (
    StepBuffers,
    damaged,
    infinite_buffers,
    is_finite,
    saved_buffers,
    saved_parameters,
)
from .first_bad import MicroBatch, find_first_bad

MAD_TO_SIGMA = 1.4826  # median absolute deviation to standard deviation, of a normal distribution
MOST_SEARCHES = 3  # of an attempt for the first non-finite number: each takes about a step
Policy = Literal["stop", "skip"]


@dataclass
class StepCheck:
    """The figures that decide whether an optimizer step is anomalous."""

    # (2 * ranks + 2,): each rank's loss and norm (-1: not computed), then limit and is anomalous
    values: Tensor
    arrived: Any = None  # a CUDA event
    step: int = 0
    rows: Any = ()  # of this rank, one list for each micro-batch
    micro_batches: Any = ()  # of this rank: MicroBatch, for the search of first_bad.py

    @classmethod
    def copy(cls, values: Tensor) -> StepCheck:
        """Starts a copy to the host, without waiting for the device."""
        if values.device.type != "cuda":
            return cls(values.cpu())
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return cls(host, event)

    def arrive(self) -> None:
        """Waits for the copy, which started a step ago, and reads it without a device sync."""
        if self.arrived is not None:
            self.arrived.synchronize()
        *figures, self.limit, is_anomalous = self.values.numpy().tolist()
        self.losses, self.norms = figures[::2], figures[1::2]
        self.norm = max(self.norms)
        if any(map(math.isnan, self.norms)):
            self.norm = math.nan
        self.is_anomalous = bool(is_anomalous)
        self.loss = sum(self.losses) / len(self.losses)
        self.is_spike = self.is_anomalous and math.isfinite(self.loss) and self.norm < math.inf

    @property
    def suspects(self) -> list[int]:
        """The ranks whose own loss is anomalous; else those whose reduced gradient is and should
        equal the others'. None if all of them are."""
        highest = max(self.losses) if self.is_spike else math.inf
        of_loss = [rank for rank, loss in enumerate(self.losses) if not loss < highest]
        of_norm = [rank for rank, norm in enumerate(self.norms) if not math.isfinite(norm)]
        if of_loss:
            return of_loss
        return of_norm if len(of_norm) < len(self.norms) else []


@dataclass(eq=False)
class Numerics(StepCallback):
    """Skips anomalous optimizer steps, records them, and stops or continues.

    The window and the limit are those of OLMo-core's SkipStepOptimizer, with median and median
    absolute deviation instead of mean and standard deviation, which a spike in the window would
    increase.

    Args:
        on_non_finite: Reaction to a non-finite loss or gradient: stop (exit code 65, do not retry),
            skip (continue with the next batch).
        on_spike: Reaction to a loss spike: off (spikes are not detected), or one of the above.
        spike_window: Number of recent steps whose losses give the usual loss.
        spike_sigmas: Robust standard deviations above the window's median that make a spike.
        patience: Number of consecutive anomalous steps after which `skip` stops training. Overflows
            of the fp16 loss scaler, which skips such steps itself, are an incident only after so
            many in a row: by then the initial scale of 2**16 has been halved to 1.
        folder: The folder of `incidents.jsonl`."""

    on_non_finite: Policy = "stop"
    on_spike: Literal["off"] | Policy = "off"
    spike_window: Annotated[int, Range(ge=4, le=1_000_000)] = 128
    spike_sigmas: NonNegativeFloat = 6.0
    patience: PositiveInt = 20
    folder: Folder = "{run}"

    def __post_init__(self) -> None:
        check_least(
            "numerics",
            spike_window=(self.spike_window, 4),
            spike_sigmas=(self.spike_sigmas, 0),
            patience=(self.patience, 1),
        )
        for key, usual in (("spike_window", 128), ("spike_sigmas", 6.0)):
            given = getattr(self, key)
            if self.on_spike == "off" and given != usual:
                raise InputError(
                    f"numerics.{key} is {given} and has no effect: numerics.on_spike is off; set it"
                    " to skip or stop, or remove the key"
                )
        self.skipped: Tensor | None = None  # () 1 where the newest step was skipped, on the device
        # the loss of step i is at i % window
        self._recent = torch.full((self.spike_window,), math.nan)
        self._no_limit, self._steps = torch.tensor(math.inf), 0
        self._loss: Tensor | None = None  # () of this rank, over this step's micro-batches so far
        self._check: StepCheck | None = None  # of the current step
        self._pending: StepCheck | None = None  # of the step before, until the host reads it
        self._micro_batches: list[MicroBatch] = []  # of the current step
        self._in_a_row = self._num_skipped = self._num_searches = 0
        self._buffers: StepBuffers | None = None  # where anomalous steps are skipped
        self._ignored: set[str] = set()  # buffers that have infinities at the start, such as masks

    def state_dict(self) -> dict[str, Any]:
        return {"recent": self._recent.cpu(), "steps": self._steps, "left_out": self._num_skipped}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if len(state_dict["recent"]) == self.spike_window:
            self._steps, self._recent = state_dict["steps"], state_dict["recent"].clone()
        self._num_skipped = state_dict.get("left_out", 0)

    def setup(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        self.folder = str(in_run(self.folder, trainer))
        if stage == "fit" and not pl_module.automatic_optimization:
            self._refuse_manual(type(pl_module).__name__)

    def _refuse_manual(self, name: str) -> None:
        """In manual optimization the module steps by itself: no step can be skipped."""
        for key, usual in (("on_non_finite", "stop"), ("on_spike", "off")):
            given = getattr(self, key)
            if given != usual:
                raise InputError(
                    f"numerics.{key} is {given!r} and has no effect: {name} optimizes manually, so"
                    f" its steps are its own; remove the key, or test the loss in training_step"
                )

    # ---- on the device ---------------------------------------------------------------------------

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._recent = self._recent.to(pl_module.device)
        self._no_limit = self._no_limit.to(pl_module.device)
        self._loss = self._check = self._pending = None
        self._micro_batches = []
        self._in_a_row = self._num_searches = 0
        self._num_ranks = trainer.world_size
        self._uses_deepspeed = hasattr(trainer.precision_plugin, "skip_step")
        skips = "skip" in (self.on_non_finite, self.on_spike)
        self._buffers = StepBuffers(pl_module) if skips else None
        self._ignored = infinite_buffers(pl_module)
        replace_clipping(pl_module, partial(self._clip_and_check, trainer, pl_module))

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if pl_module.automatic_optimization:
            if self._buffers is not None and not self._micro_batches:
                self._buffers.keep()
            self._micro_batches.append(MicroBatch(batch, batch_idx))

    def on_before_backward(self, trainer: L.Trainer, pl_module: Any, loss: Tensor) -> None:
        if not pl_module.automatic_optimization:
            return
        loss = loss.detach().float()
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            loss = loss / loss_scale(scaler)
        if self._micro_batches:
            self._micro_batches[-1].loss = loss
        # Lightning has divided the loss by the accumulation.
        self._loss = loss if self._loss is None else self._loss + loss

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if self._uses_deepspeed and pl_module.automatic_optimization:
            skips, _ = self._check_step(torch.zeros((), device=pl_module.device))
            trainer.precision_plugin.skip_step(pl_module, skips)

    def _clip_and_check(self, trainer: Any, module: Any, clip: Any, optimizer: Any, **options: Any):
        if self._loss is None and module.automatic_optimization:
            clip(optimizer, **options)  # each `training_step` of this step returned None
            return
        norm: Any = None
        if not self._uses_deepspeed and not tracks_metrics(module):  # Lightning reports no norm
            norm = total_norm(p.grad for p in module.parameters() if p.grad is not None)
            metrics_of(module).add("train/grad_norm", norm)
        clip(optimizer, **options)
        if self._uses_deepspeed:
            return
        norm = metrics_of(module).newest.pop("train/grad_norm", norm)
        if norm is None:  # a customised module that does not track it
            norm = total_norm(p.grad for p in module.parameters() if p.grad is not None)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        _skip_step(optimizer, *self._check_step(norm), scaler)

    def _check_step(self, norm: Tensor) -> tuple[Tensor, Tensor]:
        """Returns () 1.0 where all ranks must skip the step, () where not for a spike alone."""
        loss, self._loss = self._loss, None
        assert loss is not None
        limit = self._no_limit
        norm = norm.to(loss, non_blocking=True)
        figures = None  # loss and norm of each rank
        if self._num_ranks > 1:
            figures = loss.new_empty(2 * self._num_ranks)
            # On a GPU the stream waits, not the host.
            dist.all_gather_into_tensor(figures, torch.stack([loss, norm]))
            loss, norm = figures[::2].mean(), figures[1::2].amax()  # NaN if one of them is
        both = loss + norm
        self.skipped = torch.nan_to_num(both - both, nan=1.0)  # inf - inf is NaN
        non_finite = self.skipped
        if self.on_spike != "off":  # five kernels
            limit = self._limit()
            self.skipped = self.skipped.maximum((loss > limit).to(loss))
            index = self._steps % self.spike_window
            self._recent[index] = torch.where(loss.isfinite(), loss, math.nan)
        self._steps += 1
        if figures is None:
            kept = torch.stack([loss, norm, limit, self.skipped])
        else:
            kept = torch.cat([figures, torch.stack([limit, self.skipped])])
        self._check = StepCheck.copy(kept)
        if self._buffers is not None:
            self._buffers.restore_where(self.skipped)
        return self.skipped, non_finite

    def _limit(self) -> Tensor:
        """Returns () the highest usual loss. With `dim`, torch's median needs no device sync."""
        if self._steps < self.spike_window // 2:
            return self._no_limit
        median = self._recent.nanmedian(dim=0).values
        deviation = (self._recent - median).abs().nanmedian(dim=0).values
        return median + self.spike_sigmas * MAD_TO_SIGMA * deviation

    # ---- on the host, one step later -------------------------------------------------------------

    def on_step_end(self, trainer: Any, pl_module: Any, *_: object) -> None:
        if self._check is None:
            return
        check, self._check = self._check, None
        check.micro_batches, self._micro_batches = self._micro_batches, []
        check.step = trainer.global_step
        check.rows = getattr(trainer.datamodule, "step_rows", [])
        if self._uses_deepspeed:  # it has read the norm, and may have skipped the step by itself
            overflowed, norm = trainer.precision_plugin.outcome(pl_module)
            if norm >= 0 and not tracks_metrics(pl_module):
                metrics_of(pl_module).add("train/grad_norm", torch.tensor(norm))
            # Each rank's norm, and whether the step is skipped.
            check.values[1:-2:2] = norm
            check.values[-1] = max(check.values[-1], overflowed)
            if overflowed:
                self.skipped = torch.ones((), device=pl_module.device)
        else:
            check, self._pending = self._pending, check
        self._act_on(trainer, pl_module, check)

    def add_metrics(self, trainer: Any, module: Any, metrics: dict[str, float]) -> None:
        metrics["health/skipped_steps"] = self._num_skipped

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: Any, checkpoint: dict) -> None:
        """Acts on the last step and checks the weights: no checkpoint has anomalous weights. Raises
        Ended on all ranks before anything is written."""
        self.on_train_end(trainer, pl_module)
        if not _weights_are_finite(trainer, pl_module, self._ignored):
            what = damaged(pl_module, self._ignored)
            why = "no anomalous step was applied, so something else wrote it"
            if not pl_module.automatic_optimization:
                why = "in manual optimization anomalous steps are applied"
            raise Ended(
                Exit.NON_FINITE,
                f"training stopped: after step {trainer.global_step} {what}: {why}. Nothing is"
                " saved; older checkpoints stay",
            )

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        pending, self._pending = self._pending, None
        self._act_on(trainer, pl_module, pending)

    def teardown(self, trainer: L.Trainer, pl_module: Any, stage: str) -> None:
        vars(pl_module).pop("configure_gradient_clipping", None)
        if stage == "fit":
            for optimizer in trainer.optimizers:
                vars(optimizer).pop("found_inf", None)

    def _act_on(self, trainer: Any, module: Any, check: StepCheck | None) -> None:
        """Records an anomalous step and reacts as configured, equally on all ranks. Raises Ended to
        stop."""
        if check is None:
            return
        check.arrive()
        if check.is_anomalous:
            self._in_a_row += 1
        else:
            self._in_a_row = 0
        has_scaler = getattr(trainer.precision_plugin, "scaler", None) is not None
        if self._uses_deepspeed:
            has_scaler = trainer.precision_plugin.precision.startswith("16")
        # The scaler skips such a step itself.
        is_overflow = has_scaler and math.isfinite(check.loss) and not check.is_spike
        if not check.is_anomalous or (is_overflow and self._in_a_row < self.patience):
            return
        self._num_skipped += 1
        decision = self.on_spike if check.is_spike else self.on_non_finite
        if self._in_a_row >= self.patience:
            decision = "stop"
        local = {"data_parallel_rank": getattr(trainer.datamodule, "rank", 0), "rows": check.rows}
        ranks = []
        for rank, of_rank in enumerate(processes.to_rank_zero(local)):
            ranks.append({"rank": rank, "loss": check.losses[rank], **of_rank})
        incident = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "step": check.step,
            "kind": "spike" if check.is_spike else "non_finite",
            "decision": decision,
            "loss": check.loss,
            "limit": check.limit,
            "gradient_norm": None if check.norm < 0 else check.norm,
            "suspects": check.suspects,
            "first_bad": None,
            "ranks": ranks,
        }
        done = "was skipped" if decision == "skip" else "was not applied"
        sentence = f"step {check.step} {done}: loss {check.loss:.4g}"
        if check.is_spike:
            sentence += f" above {check.limit:.4g}"
        if check.norm >= 0 or math.isnan(check.norm):
            sentence += f", gradient norm {check.norm:.4g}"
        if self._in_a_row >= self.patience:
            sentence += f", {self._in_a_row} anomalous steps in a row (numerics.patience)"
        if check.suspects:
            sentence += f", from rank {', '.join(map(str, check.suspects))}"
        folder = Path(self.folder)
        file = folder / RunFile.INCIDENTS
        if trainer.is_global_zero:
            folder.mkdir(parents=True, exist_ok=True)
            with file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(incident) + "\n")  # with Python's NaN and Infinity
        # The incident is written by then: a search of broken code may hang.
        if not check.is_spike and check.micro_batches and self._num_searches < MOST_SEARCHES:
            self._num_searches += 1
            found = find_first_bad(trainer, module, check.micro_batches)
            sentence += f"; {_describe(found)}"
            if found and trainer.is_global_zero:
                _replace_last_line(file, json.dumps(incident | {"first_bad": found}))
        sentence += f"; see {file}"
        if trainer.is_global_zero:
            print(f"\nnumerics: {sentence}", flush=True)
        if decision == "stop":
            raise Ended(Exit.NON_FINITE, f"training stopped: {sentence}")


def _describe(found: dict[str, Any] | None) -> str:
    if found is None:
        return "a second forward pass of its batch was finite"
    if found["what"] == "gradient":
        return (
            "its forward pass is finite; first non-finite gradient, in the backward pass: that of"
            f" the output of {found['module']}"
        )
    return f"first non-finite {found['what']}: {found['module']}"


def _replace_last_line(file: Path, line: str) -> None:
    lines = file.read_text(encoding="utf-8").splitlines()
    write_atomically(file, "\n".join([*lines[:-1], line]) + "\n")


def _weights_are_finite(trainer: L.Trainer, module: Any, ignored: set[str]) -> bool:
    """Returns whether what a checkpoint has of all ranks is finite, parameters and buffers but the
    `ignored` ones; one read on the host. Collective."""
    device = trainer.strategy.root_device  # offloaded ones are in host memory
    finite = []
    for name, tensor in (saved_parameters(module) | saved_buffers(module)).items():
        if name not in ignored:
            finite.append(is_finite(tensor).to(device))
    every = torch.stack(finite).all().float()
    return bool(trainer.strategy.reduce(every, reduce_op="min").item())


def _skip_step(optimizer: Any, is_anomalous: Tensor, non_finite: Any, scaler: Any) -> None:
    """Makes `optimizer` skip its current step where `is_anomalous`, () on the device, is 1."""
    parameters = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
    first = next((p.grad for p in parameters if p.grad is not None), None)
    if first is None:
        return  # the module returns no optimizer: Lightning's has no parameters
    is_fused = all(group.get("fused") for group in optimizer.param_groups)
    if is_fused and first.device.type != "mps":
        is_anomalous = is_anomalous.to(first.device)  # the host's: torch would not wait for a copy
        if scaler is None:
            optimizer.found_inf = is_anomalous
        else:  # the scaler sets `found_inf` itself, from the gradients
            first.add_(torch.where(is_anomalous > 0, math.inf, 0.0).to(first.dtype))
    elif is_anomalous.item():
        if scaler is not None and non_finite.item():
            mark_overflow(scaler, optimizer)
        for parameter in parameters:
            parameter.grad = None  # every optimizer of torch ignores such a parameter
