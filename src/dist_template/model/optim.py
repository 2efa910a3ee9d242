"""How parameters are updated: parameter groups, the optimizer, the schedule per optimizer step.

AdamW and a schedule with the values of `transformers.get_scheduler`, by the keys under
`model.optim`; or the classes that `--optimizer` and `--lr_scheduler` name.

1  `build_optimizer` sorts the trainable parameters: matrices with weight decay, vectors and biases
   without, and matrices for Muon.
2  It builds the optimizer, which takes parameters of several layouts apart (`mixed`).
3  `build_schedule` multiplies the peak rate with a share for each step (`_share_of_peak`), or
   builds the class of `--lr_scheduler`."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from pkgutil import resolve_name
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from ..by_tokens import AUTO, Auto, PositiveByTokens, check_phases, value_at, values_of
from ..errors import InputError, is_out_of_memory, reason
from ..layout import by_layout, full_shape
from ..ranges import NonNegativeFloat, PositiveFloat, Share, ShareBelowOne
from .flops import matrices_of

# class_path and init_args, as LightningCLI reads --optimizer and --lr_scheduler.
Class = dict[str, Any]
BEFORE_AUTO = 1e-4  # in place of `auto`, for the checks before the start
MUON = "dist_template.model.muon:MuonWithAdamW"  # imported where it is chosen
OF_ARGUMENTS = (TypeError, ValueError, NotImplementedError)  # whose message alone says enough
Schedule = Literal["cosine", "linear", "constant", "warmup_stable_decay", "inverse_sqrt"]


@dataclass
class OptimConfig:
    """AdamW and its learning-rate schedule; `--optimizer` and `--lr_scheduler` name other classes.

    Args:
        optimizer: muon: matrices by torch.optim.Muon with the update scale of Moonlight
            (arXiv:2502.16982), so that learning_rate and weight_decay are AdamW's; embeddings, the
            output layer, vectors and biases by AdamW.
        learning_rate: Peak learning rate, reached at the end of the warm-up; or phases by consumed
            tokens, which replace `schedule`, and which the warm-up multiplies; or auto, in a
            fine-tuning: by its method, the model's width and the number of steps.
        weight_decay: AdamW's decoupled decay, on matrices alone: biases, norms and other vectors
            have none. 0 is off.
        betas: AdamW's decay rates of the first and the second moment.
        eps: AdamW's term that keeps the denominator from zero.
        schedule: Shape of the learning rate over optimizer steps after the warm-up.
        warmup: Steps of linear warm-up when 1 or more, a share of all steps when below 1. 0 is off.
        min_learning_rate_share: Where cosine and warmup_stable_decay end, as a share of the peak. 0
            decays to zero.
        decay_share: Share of all steps in which warmup_stable_decay falls."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: PositiveByTokens | Auto = 3e-4
    weight_decay: NonNegativeFloat = 0.1
    betas: tuple[ShareBelowOne, ShareBelowOne] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    schedule: Schedule = "cosine"
    warmup: NonNegativeFloat = 0.03
    min_learning_rate_share: Share = 0.1
    decay_share: Share = 0.2
    optimizer_class: Class | None = field(default=None, init=False)  # cli/fit.py sets these two
    lr_scheduler_class: Class | None = field(default=None, init=False)

    @property
    def chosen(self) -> Class | None:
        """What replaces AdamW; None if nothing does."""
        if self.optimizer_class is None and self.optimizer == "muon":
            arguments = {"lr": self.peak, "weight_decay": self.weight_decay}
            return {"class_path": "torch.optim.Muon", "init_args": arguments}
        return self.optimizer_class

    @property
    def uses_muon(self) -> bool:
        chosen = self.chosen
        return chosen is not None and resolve_name(chosen["class_path"]) is torch.optim.Muon

    def __post_init__(self) -> None:
        if self.learning_rate == AUTO:
            return
        check_phases("model.optim.learning_rate", self.learning_rate)
        if isinstance(self.learning_rate, list) and not self.peak:  # the schedule is a share of it
            raise InputError(
                "model.optim.learning_rate is 0 in each phase: give one of them more than 0"
            )

    @property
    def needs_end(self) -> bool:
        """Whether the learning rate follows from the number of all steps."""
        has_phases = isinstance(self.learning_rate, list) or self.lr_scheduler_class is not None
        return not has_phases and self.schedule in ("cosine", "linear", "warmup_stable_decay")

    @property
    def peak(self) -> float:
        """The highest learning rate; of auto, a number for the checks before the start."""
        if self.learning_rate == AUTO:
            return BEFORE_AUTO
        return max(values_of(self.learning_rate))


def build_optimizer(
    module: nn.Module,
    config: OptimConfig,
    scaled: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Optimizer:
    """Returns the optimizer of `module`'s trainable parameters; AdamW is fused where torch has such
    a kernel for their device.

    `scaled`: gradients are scaled (fp16 loss scaling). Disables fused AdamW, which would unscale
    them only after clipping; otherwise the precision plugin does it before. `group`: the ranks with
    the same parameters, which share the work of Muon. None: all.

    Raises InputError if nothing is trainable, or the class of `--optimizer` refuses its
    arguments."""
    decayed, not_decayed, of_muon = [], [], []
    fused = not scaled
    chosen = config.chosen
    matrices = matrices_of(module) if config.uses_muon else set()
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.device.type not in ("cpu", "cuda", "xpu", "mps"):
            fused = False
        if parameter in matrices:
            of_muon.append(parameter)
        elif len(full_shape(parameter)) >= 2 and not name.endswith("bias"):
            # Stacked expert biases are matrices by shape, so the name is checked too.
            decayed.append(parameter)
        else:
            not_decayed.append(parameter)
    if not decayed and not not_decayed and not of_muon:
        raise InputError(
            "no parameter of the module requires a gradient, so there is nothing to train; see"
            " module.py"
        )
    kind: type[Optimizer] = torch.optim.AdamW
    arguments: dict[str, Any] = {
        "lr": config.peak,
        "weight_decay": config.weight_decay,
        "betas": config.betas,
        "eps": config.eps,
        "fused": fused,
    }
    if config.uses_muon and not of_muon:
        raise InputError(
            "Muon updates matrices, and no trained parameter is one: set model.optim.optimizer to"
            " adamw"
        )
    if chosen and of_muon:
        kind = resolve_name(MUON)
        arguments |= {"of_muon": of_muon, "options": chosen["init_args"], "group": group}
    elif chosen:
        kind, arguments = resolve_name(chosen["class_path"]), chosen["init_args"]
    groups: list[dict[str, object]] = []
    if decayed:
        groups.append({"params": decayed})
    if not_decayed:
        groups.append({"params": not_decayed})
        if "weight_decay" in arguments:  # a class of `--optimizer` may have none
            groups[-1]["weight_decay"] = 0.0
    if not of_muon and len(by_layout(decayed + not_decayed)) > 1:
        kind = mixed(kind)
    try:
        return kind(groups, **arguments)
    except Exception as error:
        if chosen is not None and not is_out_of_memory(error):
            raise _refused("--optimizer", chosen["class_path"], error) from error
        if isinstance(error, OF_ARGUMENTS):
            raise InputError(f"model.optim: {reason(error)}") from error
        raise


def _refused(flag: str, path: str, error: Exception) -> InputError:
    """Returns the sentence for what the constructor of a user's choice raises."""
    if isinstance(error, InputError):
        return error
    kind = "" if isinstance(error, OF_ARGUMENTS) else f"{type(error).__name__}: "
    what = f"{flag} {path.rpartition('.')[2]}: {kind}{reason(error)}"
    return InputError(f"{what}; give other arguments or another class")


@cache
def mixed(kind: type[Optimizer]) -> type[Optimizer]:
    """Returns `kind`, an optimizer, for parameters with different device meshes or placements: a
    kernel over lists of tensors takes one layout at a time. Outside of a step the parameter groups
    are the same as under every other strategy, so a schedule's state fits them all."""

    def step(self: Any, closure: Callable[[], float] | None = None) -> float | None:
        groups, self.param_groups = self.param_groups, []
        for group in groups:
            for part in by_layout(group["params"]):
                self.param_groups.append(group | {"params": part})
        try:
            return kind.step(self, closure)
        finally:
            self.param_groups = groups

    return type(kind.__name__, (kind,), {"step": step, "__module__": kind.__module__})


def build_schedule(
    optimizer: Optimizer,
    config: OptimConfig,
    num_steps: float,
    batches_per_validation: int | None = None,
    data: Any = None,
) -> dict[str, Any]:
    """Returns Lightning's scheduler entry for `config` over `num_steps` optimizer steps (inf: no
    end is set). ReduceLROnPlateau checks its metric every `batches_per_validation` of a rank; None:
    at the end of each epoch. `data` counts samples, for phases of the learning rate.

    Raises InputError if it counts none, the schedule needs an end and training has none, the
    warm-up is longer than training, or the class of `--lr_scheduler` refuses its arguments."""
    has_phases = isinstance(config.learning_rate, list)
    counts = data is None or hasattr(data, "step_samples")
    if has_phases and (config.lr_scheduler_class or not counts):
        why = "--lr_scheduler" if counts else f"{type(data).__name__}, which does not count tokens"
        raise InputError(
            f"model.optim.learning_rate has phases, which do not work with {why}: give a number"
        )
    if config.lr_scheduler_class:
        return _of_class(config.lr_scheduler_class, optimizer, batches_per_validation, data)
    if num_steps == math.inf and (config.warmup < 1 or config.needs_end):
        raise InputError(
            f"model.optim.schedule {config.schedule!r} with model.optim.warmup {config.warmup}"
            " needs to know how long training is; set trainer.max_steps or trainer.max_epochs"
        )
    warmup_steps = int(config.warmup)
    if config.warmup < 1:
        warmup_steps = int(config.warmup * num_steps)
    if warmup_steps >= num_steps:
        raise InputError(
            f"the warm-up of {warmup_steps} steps is not shorter than training, {num_steps:.0f}"
            " steps; lower model.optim.warmup or raise trainer.max_steps"
        )
    # A partial, as in transformers: LambdaLR's state is compatible with older checkpoints.
    share = partial(
        _share_of_peak, config=config, warmup=warmup_steps, num_steps=num_steps, data=data
    )
    kind = PhasesLR if has_phases else LambdaLR
    return {"scheduler": kind(optimizer, share), "interval": "step"}


def _of_class(
    chosen: Class, optimizer: Optimizer, batches_per_validation: int | None, data: Any
) -> dict[str, Any]:
    """Returns Lightning's scheduler entry for the class of `--lr_scheduler`."""
    kind = resolve_name(chosen["class_path"])
    try:
        scheduler = kind(optimizer, **chosen["init_args"])
    except Exception as error:
        raise _refused("--lr_scheduler", chosen["class_path"], error) from error
    entry: dict[str, Any] = {"scheduler": scheduler, "interval": "step"}
    if not isinstance(scheduler, ReduceLROnPlateau):
        return entry
    if isinstance(getattr(data, "global_batch_size", None), list):
        raise InputError(
            "--lr_scheduler ReduceLROnPlateau does not work with phases of data.global_batch_size"
        )
    entry["monitor"] = getattr(scheduler, "monitor", "eval/loss")
    entry["reduce_on_plateau"] = True
    if batches_per_validation:
        entry["frequency"] = batches_per_validation
    else:
        entry["interval"] = "epoch"
    return entry


class PhasesLR(LambdaLR):
    """Drops base_lrs from its state, so that a resumed run has the peak of its own configuration,
    with phases or without."""

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        del state["base_lrs"]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict | {"base_lrs": self.base_lrs})


def _share_of_peak(
    step: int, config: OptimConfig, warmup: int, num_steps: float, data: Any = None
) -> float:
    """Returns the learning rate of `step` as a share of the peak.

    The shapes are those of `transformers.optimization`, equal to the bit:
    get_constant_schedule_with_warmup, get_linear_schedule_with_warmup, get_inverse_sqrt_schedule,
    get_cosine_with_min_lr_schedule_with_warmup, and get_wsd_schedule for warmup_stable_decay, whose
    warm-up starts from the floor. They are written here, as that module takes longer to import than
    all else before the first step. Beyond the end of training cosine keeps its floor."""
    if isinstance(config.learning_rate, list):
        consumed = data.consumed_samples * data.seq_len if data else 0
        share = value_at(config.learning_rate, consumed) / config.peak
        if step < warmup:
            share *= step / warmup
        return share
    shape, floor = config.schedule, config.min_learning_rate_share
    is_stable = shape == "warmup_stable_decay"
    if step < warmup and is_stable:
        return step / warmup * (1 - floor) + floor
    if step < warmup:
        return step / warmup
    if shape == "constant":
        return 1.0
    if shape == "inverse_sqrt":
        scale = warmup if warmup else 10_000
        return 1 / math.sqrt((step - warmup + scale) / scale)
    if shape == "linear":
        return max(0.0, (num_steps - step) / (num_steps - warmup))
    # cosine falls from the end of the warm-up on, warmup_stable_decay in its last steps.
    falling = num_steps - warmup
    if is_stable:
        falling = min(max(1, int(config.decay_share * num_steps)), falling)
    fallen = min(max(0.0, (step - (num_steps - falling)) / falling), 1.0)
    return 0.5 * (1 + math.cos(math.pi * fallen)) * (1 - floor) + floor
