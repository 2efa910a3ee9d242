"""Optimizer state by the parameters' names, the one form that every strategy's checkpoint can be brought into.

    {"state": {name: {"step": (), "exp_avg": like the parameter, …}},
     "param_groups": [{"params": [name, …], "lr": …, …}, …]}

torch's optimizers number their parameters instead, in the order of their groups, which need not be the same under every
strategy. Hence `ParameterNames`, which writes the names into checkpoints and finds them again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import lightning as L
from lightning.pytorch import Callback
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only
from torch import nn
from torch.optim import Optimizer

from ..errors import InputError

State = dict[str, Any]

# Which kernel an optimizer runs on belongs to the machine, not to the run.
KERNELS = {"fused", "foreach", "capturable", "differentiable"}
# What torch's schedulers keep once for each group of parameters.
PER_GROUP = {"base_lrs", "_last_lr", "lr_lambdas", "min_lrs"}


def is_by_name(state: Mapping[str, Any]) -> bool:
    return any(isinstance(parameter, str) for group in state["param_groups"] for parameter in group["params"])


def by_name(numbered: Mapping[str, Any], names: list[str]) -> State:
    """The state as `Optimizer.state_dict` gives it, parameter n being `names[n]`."""
    groups = [g | {"params": [names[number] for number in g["params"]]} for g in numbered["param_groups"]]
    return {"state": {names[number]: state for number, state in numbered["state"].items()}, "param_groups": groups}


def by_name_from_flat(flat: Mapping[str, Any], names: Iterable[str]) -> State:
    """The state as torch's flattened form gives it: `state.<name>.exp_avg`, `param_groups.<name>.lr`.

    It has lost the groups; parameters of equal settings make one.
    """
    known = set(names)
    found: dict[str, dict[str, dict[str, Any]]] = {"state": {}, "param_groups": {}}
    for key, value in flat.items():
        part, _, rest = key.partition(".")
        name, _, field = rest.rpartition(".")
        if name not in known:
            raise ValueError(f"its optimizer state {key!r} belongs to none of its weights")
        found[part].setdefault(name, {})[field] = value
    groups: list[dict[str, Any]] = []
    for name, settings in found["param_groups"].items():
        group = next((g for g in groups if {k: v for k, v in g.items() if k != "params"} == settings), None)
        if group is None:
            groups.append(group := settings | {"params": []})
        group["params"].append(name)
    return {"state": found["state"], "param_groups": groups}


def numbered(named: State, groups: list[list[str]], settings: list[dict[str, Any]]) -> State:
    """The state for `Optimizer.load_state_dict` of an optimizer with these groups of names and present settings.

    Raises:
        InputError: a parameter was not the checkpoint's optimizer's.
    """
    without_moments(named, groups)
    names = [name for group in groups for name in group]
    counted = iter(range(len(names)))
    merged = [
        merge(named, group, present) | {"params": [next(counted) for _ in group]}
        for group, present in zip(groups, settings, strict=True)
    ]
    state = {n: named["state"][name] for n, name in enumerate(names) if name in named["state"]}
    return {"state": state, "param_groups": merged}


def without_moments(named: State, groups: list[list[str]]) -> set[str]:
    """Returns the parameters that had no gradient before the checkpoint: its optimizer has them, and no state of them.

    Raises:
        InputError: a parameter was not the checkpoint's optimizer's.
    """
    trained = {name for group in named["param_groups"] for name in group["params"]}
    missing = [name for group in groups for name in group if name not in named["state"]]
    if added := [name for name in missing if name not in trained]:
        raise InputError(
            f"--ckpt_path: the checkpoint has no optimizer state for {added[0]} ({len(added)} such parameters);"
            " resume with the parameters that were trained before, or export it and start anew with model.pretrained"
        )
    return set(missing)


def merge(named: State, group: list[str], present: Mapping[str, Any]) -> dict[str, Any]:
    """A group's settings: what the checkpoint says of its first parameter, and `present` where it says nothing."""
    saved = next((g for g in named["param_groups"] if group[0] in g["params"]), {})
    return {k: saved[k] if k in saved and k not in KERNELS else v for k, v in present.items() if k != "params"}


class ParameterNames(Callback):
    """Names the parameters in checkpoints that number them, and finds by name what another strategy has saved."""

    def __init__(self) -> None:
        self._loaded: dict[str, Any] = {}

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.strategy.lightning_restore_optimizer:  # the others name them in their own ways
            checkpoint["parameter_names"] = [sum(groups_of(pl_module, o), []) for o in trainer.optimizers]

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self._loaded = checkpoint
            self._fit_to(trainer, pl_module)
            if trainer.strategy.lightning_restore_optimizer and not checkpoint.get("optimizer_states"):
                tell_that_it_starts_anew()

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._fit_to(trainer, pl_module)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """A schedule that is loaded writes no learning rate before its next step."""
        for config in trainer.lr_scheduler_configs:
            scheduler = config.scheduler
            for group, rate in zip(scheduler.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
                group["lr"] = rate

    def _fit_to(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Rewrite what was loaded, in place, for the optimizers; some strategies load before there are any."""
        if not self._loaded or not trainer.optimizers:
            return
        states = self._loaded.get("optimizer_states", [])
        for index, (state, optimizer) in enumerate(zip(states, trainer.optimizers, strict=False)):
            if is_by_name(state):
                states[index] = numbered(state, groups_of(module, optimizer), optimizer.param_groups)
        schedules = self._loaded.get("lr_schedulers", [])
        for index, (state, config) in enumerate(zip(schedules, trainer.lr_scheduler_configs, strict=False)):
            schedules[index] = _for_groups(state, len(config.scheduler.optimizer.param_groups))
        self._loaded = {}


@rank_zero_only
def tell_that_it_starts_anew() -> None:
    print("note: the checkpoint holds no optimizer state that can be carried over here; the moments start from zero")


def groups_of(module: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """The names of an optimizer's parameters, group by group."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    return [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]


def _for_groups(schedule: dict[str, Any], count: int) -> dict[str, Any]:
    """A scheduler's state for an optimizer of `count` groups: it keeps some values once for each.

    Raises:
        InputError: the groups have values of their own, and there are more or fewer groups now.
    """
    fitted = dict(schedule)
    for key, values in schedule.items():
        if key in PER_GROUP and len(values) != count:
            if any(value != values[0] for value in values):
                raise InputError(
                    f"--ckpt_path: the learning-rate schedule's {key} differs between {len(values)} parameter groups,"
                    f" and under this strategy there are {count}; resume under the strategy that wrote the checkpoint"
                )
            fitted[key] = values[:1] * count
    return fitted
