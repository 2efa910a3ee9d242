"""Optimizer state by parameter name: the form into which all checkpoints are converted.

    {"state": {name: {"step": (), "exp_avg": like the parameter, …}},
     "param_groups": [{"params": [name, …], "lr": …, …}, …]}

torch's optimizers number their parameters in the order of their groups, which can differ between
strategies. The callback `ParameterNames` therefore writes the names into checkpoints, and numbers
the state again when it is loaded."""

from collections.abc import Iterable, Mapping
from copy import deepcopy
from itertools import chain
from typing import Any

import lightning as L
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BaseFinetuning, WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..errors import InputError
from .frozen import KEY, REFERENCE

State = dict[str, Any]
OWN_RATES = "own_rates"  # in checkpoints
ANEW = "starts_optimizer_anew"  # a module's attribute: an accepted other class reads no state

# Settings of the optimizer's kernel depend on the machine, not on the run.
KERNELS = {"fused", "foreach", "capturable", "differentiable"}
# Entries of a torch scheduler's state with one value per parameter group.
PER_GROUP = {"base_lrs", "_last_lr", "lr_lambdas", "min_lrs"}


def is_by_name(state: State) -> bool:
    groups = state.get("param_groups", ())  # a module without an optimizer has none
    return any(isinstance(name, str) for group in groups for name in group["params"])


def by_name(numbered: State, names: list[str]) -> State:
    """Converts the result of `Optimizer.state_dict`, in which parameter n is `names[n]`."""
    groups = []
    for group in numbered.get("param_groups", ()):
        groups.append(group | {"params": [names[number] for number in group["params"]]})
    state = {names[number]: values for number, values in numbered.get("state", {}).items()}
    return {"state": state, "param_groups": groups}


def by_name_from_flat(flat: Mapping[str, object], names: Iterable[str]) -> State:
    """Converts torch's flattened form: `state.<name>.exp_avg`, `param_groups.<name>.lr`. That form
    has no groups; parameters with equal settings become one."""
    known = set(names)
    state: State = {}
    settings: dict[str, dict[str, object]] = {}
    for key, value in flat.items():
        part, _, rest = key.partition(".")
        name, _, field = rest.rpartition(".")
        if name not in known:
            raise ValueError(f"its optimizer state {key!r} belongs to none of its weights")
        entries = {"state": state, "param_groups": settings}[part]
        entries.setdefault(name, {})[field] = value
    groups: list[State] = []
    for name, of_parameter in settings.items():
        for group in groups:
            if _settings(group) == of_parameter:
                group["params"].append(name)
                break
        else:
            groups.append(of_parameter | {"params": [name]})
    return {"state": state, "param_groups": groups}


def _settings(group: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in group.items() if key != "params"}


def numbered(named: State, groups: list[list[str]], settings: list[State]) -> State:
    """Returns the state for `Optimizer.load_state_dict`, in these groups of names and settings."""
    without_moments(named, groups)
    merged: list[State] = []
    state: dict[int, object] = {}
    number = 0
    for names, present in zip(groups, settings, strict=True):
        numbers = range(number, number + len(names))
        merged.append(merge(named, names, present) | {"params": list(numbers)})
        for name in names:
            if name in named["state"]:
                state[number] = named["state"][name]
            number += 1
    return {"state": state, "param_groups": merged}


def without_moments(named: State, groups: list[list[str]]) -> set[str]:
    """Returns the parameters without state in the checkpoint: they never had a gradient. Raises
    InputError if the checkpoint's optimizer did not have one of the parameters."""
    trained = set().union(*(group["params"] for group in named["param_groups"]))
    missing = set().union(*groups) - set(named["state"])
    added = sorted(missing - trained)
    if added:
        raise InputError(
            f"--ckpt_path: the checkpoint has no optimizer state for {added[0]} ({len(added)} such"
            " parameters); resume with the same trainable parameters, or start a new run from its"
            " weights"
        )
    return missing


def merge(named: State, group: list[str], present: State) -> State:
    """Returns a group's settings: those in `named` of its first parameter, else in `present`."""
    merged = _settings(present)
    for saved in named["param_groups"]:
        if group[0] in saved["params"]:
            for key in merged.keys() & saved.keys() - KERNELS:
                merged[key] = saved[key]
            break
    return merged


def _are_of_schedule(schedule: Any) -> bool:
    """Returns whether the optimizer has the rates that the schedule has set."""
    if not hasattr(schedule, "get_last_lr"):  # a class of the user's, which the module steps
        return True
    rates = [float(group["lr"]) for group in schedule.optimizer.param_groups]
    return rates == [float(rate) for rate in schedule.get_last_lr()]


class ParameterNames(Callback):
    """Writes parameter names into checkpoints, and numbers the state that is loaded by name."""

    def __init__(self) -> None:
        self._loaded: State = {}
        self._num_groups: list[int] = []  # of each optimizer, at the start
        self._own_rates: list[int] = []  # schedules whose optimizer has other rates than they say

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: State
    ) -> None:
        now = [len(one.param_groups) for one in trainer.optimizers]
        adds = any(isinstance(each, BaseFinetuning) for each in trainer.callbacks)  # ty: ignore[missing-attribute]
        if self._num_groups not in ([], now) and not adds:  # Lightning's callback restores them
            raise InputError(
                f"the optimizer had {sum(self._num_groups)} parameter groups at the start and has"
                f" {sum(now)} now, which no resumed training could load: make all groups in"
                " configure_optimizers, with lr 0 until they are to be trained"
            )
        if trainer.strategy.lightning_restore_optimizer:  # other formats have names
            checkpoint["parameter_names"] = []
            for optimizer in trainer.optimizers:
                names = list(chain.from_iterable(groups_of(pl_module, optimizer)))
                checkpoint["parameter_names"].append(names)
        own_rates = []
        for number, config in enumerate(trainer.lr_scheduler_configs):
            if not _are_of_schedule(config.scheduler):
                own_rates.append(number)
        if own_rates:
            checkpoint[OWN_RATES] = own_rates
        for key in (KEY, REFERENCE):
            base = getattr(pl_module, key, None)
            if base:
                checkpoint[key] = base

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: State
    ) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            return
        averages = any(isinstance(each, WeightAveraging) for each in trainer.callbacks)  # ty: ignore[missing-attribute]
        if "averaging_state" in checkpoint and not averages:
            raise InputError(
                "the checkpoint's weights are averages of the callback WeightAveraging, with"
                " which training cannot continue: give --trainer.callbacks that callback again,"
                " on one device or under DDP"
            )
        if getattr(pl_module, ANEW, False):
            checkpoint["optimizer_states"] = []
        self._own_rates = checkpoint.get(OWN_RATES, [])
        self._loaded = checkpoint
        self._fit_to(trainer, pl_module)
        if trainer.strategy.lightning_restore_optimizer and not checkpoint.get("optimizer_states"):
            report_missing_moments()

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._num_groups = [len(one.param_groups) for one in trainer.optimizers]
        self._fit_to(trainer, pl_module)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Sets the learning rates: a loaded schedule would set them only at its next step. Where
        several schedules change one optimizer, or the module steps them or sets rates itself, or
        a hook or a callback had set a rate since the newest step of its schedule, none of them
        knows the rate: the optimizer's own state has it."""
        hooks = ("lr_scheduler_step", "optimizer_step")
        is_own = any(is_overridden(hook, pl_module, L.LightningModule) for hook in hooks)
        if is_own or not pl_module.automatic_optimization:
            return
        schedules = [config.scheduler for config in trainer.lr_scheduler_configs]
        for number, schedule in enumerate(schedules):
            of_optimizer = [one for one in schedules if one.optimizer is schedule.optimizer]
            if number in self._own_rates or len(of_optimizer) > 1:
                continue
            groups, rates = schedule.optimizer.param_groups, schedule.get_last_lr()
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate

    def _fit_to(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Rewrites the loaded state for the optimizers; some strategies load before they exist."""
        if not self._loaded or not trainer.optimizers:
            return
        states = self._loaded.get("optimizer_states", [])
        for index, (state, optimizer) in enumerate(zip(states, trainer.optimizers, strict=False)):
            if is_by_name(state):
                groups = groups_of(module, optimizer)
                states[index] = numbered(state, groups, optimizer.param_groups)
        schedules = self._loaded.get("lr_schedulers", [])
        for schedule, config in zip(schedules, trainer.lr_scheduler_configs, strict=False):
            if isinstance(config.scheduler, LRScheduler):  # else it loads what it has saved
                _fit_schedule(schedule, len(config.scheduler.optimizer.param_groups))
        self._loaded = {}


def restore_groups(module: L.LightningModule, checkpoint: State) -> None:
    """Adds the parameter groups that finetuning callbacks had added before the checkpoint was
    written. Lightning (2.6.6) does so in their `on_fit_start`, which it calls before it loads a
    checkpoint into shards: groups and moments would be lost."""
    trainer: Any = module.trainer
    for callback in trainer.callbacks:
        state = checkpoint.get("callbacks", {}).get(callback.state_key)
        if state and isinstance(callback, BaseFinetuning):
            callback.load_state_dict(deepcopy(state))
            BaseFinetuning.on_fit_start(callback, trainer, module)


@rank_zero_only
def report_missing_moments() -> None:
    print("note: the checkpoint has no optimizer state to load; the moments start from zero")


def groups_of(module: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """Returns the names of an optimizer's parameters, one list per group."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    return [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]


def _fit_schedule(schedule: State, count: int) -> None:
    """Changes a scheduler's state to `count` groups: some entries have a value per group."""
    schedule.setdefault("lr_lambdas", [])  # LambdaLR reads it from another class's state too
    for key in PER_GROUP & schedule.keys():
        values = schedule[key]
        if len(values) in (0, count):
            continue
        if any(value != values[0] for value in values):
            raise InputError(
                f"--ckpt_path: the learning-rate schedule's {key} differs between {len(values)}"
                f" parameter groups, and this strategy has {count}; resume under the strategy that"
                " wrote the checkpoint"
            )
        schedule[key] = values[:1] * count
