"""The resolved configuration of a training, before anything starts. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import lightning as L

__all__ = ["Configured"]

ARGS = "trainer.strategy.init_args"
LIBRARIES = {__name__.partition(".")[0], "lightning", "pytorch_lightning", "torch"}
NOT_READ_YET: Final = object()  # the model's configuration needs the vocabulary of the data


@dataclass(frozen=True)
class Hardware:
    """What a training runs on; `precision` as Lightning names it: 32-true, bf16-mixed, …"""

    accelerator: str  # cpu, cuda, mps …
    devices: int  # of one node
    num_nodes: int = 1
    precision: str = "32-true"

    @property
    def world_size(self) -> int:
        return self.devices * self.num_nodes


@dataclass(frozen=True)
class Configured:
    """The resolved configuration of a training: the arguments of `limits.violations`."""

    machine: Hardware
    trainer: Mapping[str, Any]
    module: L.LightningModule
    data: Any
    model_config: Any  # transformers' configuration
    trains: bool
    saves_asynchronously: bool = False
    typed: frozenset[str] = frozenset()  # keys that are flags of this command line

    def setting(self, path: str) -> object:
        """Returns `model.<path>`; None if the module has no such setting."""
        value: object = self.module
        for name in path.split("."):
            value = getattr(value, name, None)
        return value

    def overrides(self, hook: str) -> bool:
        """Returns whether a class of the user's has the module's `hook`."""
        return overrides(self.module, hook)

    @property
    def several_passes(self) -> str:
        """Names the objective whose step is more than one forward pass of the network; "" if the
        module's is one."""
        find = getattr(self.module, "objective_for", None)
        objective = find(self.data) if callable(find) else None
        if objective is None or objective.is_one_pass:
            return ""
        return objective.label

    @cached_property
    def callbacks(self) -> list[Any]:
        """The callbacks of trainer.callbacks and of the module."""
        given = self.trainer.get("callbacks") or []
        found = [*given] if isinstance(given, list | tuple) else [given]
        if self.trains and self.overrides("configure_callbacks"):
            try:
                of_module = callbacks_of(self.module)
            except RuntimeError:  # it reads module.trainer, which is attached later
                return found
            found += [*of_module] if isinstance(of_module, list | tuple) else [of_module]
        return found

    @property
    def optimizer(self) -> Mapping[str, str]:
        """What replaces AdamW: class_path and init_args; {} if nothing does."""
        given = self.setting("optim.chosen")
        return given if isinstance(given, Mapping) else {}

    @property
    def text_config(self) -> Any:
        """The language model's part of `model_config`; None if there is none, or not yet."""
        is_known = self.model_config not in (NOT_READ_YET, None)
        return self.model_config.get_text_config() if is_known else None


def without_effect(section: str, given: Any, unread: set[str], why: str) -> Iterator[str]:
    """Yields a sentence for each key in `unread` of `given` that is not its default."""
    default = type(given)()
    for key in sorted(unread):
        if (value := getattr(given, key)) != getattr(default, key):
            yield f"{section}.{key} is {value!r} and has no effect ({why}), or remove the key"


def overrides(module: object, hook: str) -> bool:
    """Returns whether the `hook` of a LightningModule is the user's: not Lightning's nor this
    library's."""
    for kind in type(module).__mro__:
        if hook in vars(kind):
            return is_users(kind)
    return False


def is_users(kind: type) -> bool:
    """Returns whether a class is the user's: not Lightning's, torch's nor this library's."""
    return kind.__module__.partition(".")[0] not in LIBRARIES


def callbacks_of(module: L.LightningModule) -> Any:
    """Returns what the module's `configure_callbacks` returns, and lets Lightning's first call
    return the same: the hook may have effects, and is to run once, as with plain Lightning."""
    kept = vars(module).get("configure_callbacks")
    if isinstance(kept, partial) and kept.func is _hand_over:
        return kept.args[1]
    made = module.configure_callbacks()
    vars(module)["configure_callbacks"] = partial(_hand_over, module, made)
    return made


def _hand_over(module: L.LightningModule, made: Any) -> Any:
    del vars(module)["configure_callbacks"]
    return made
