"""Keys that a module does not read, because it has its own code in place of the method that does.

A run whose configuration says `model.optim.learning_rate: 0.01` and that trains at another rate is
worse than one that does not start. What the module's own code reads is found in its source text: a
key counts as read if its name occurs there, or if the object that has it is passed on."""

import inspect
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

from ...model.any_module import typed_attribute
from ...model.balance import BalanceConfig
from ...parallel.configured import overrides
from ...parallel.mesh.plans import EXPERTS
from ...parallel.own_code import code_of
from .machine import Setup


class Reader(NamedTuple):
    """The method of this library that reads some keys of `model`.

    Attributes:
        hook: Its name.
        keys: The arguments of the module that it reads.
        through: What the library has for code in its place to use them by."""

    hook: str
    keys: tuple[str, ...]
    through: tuple[str, ...] = ()


NO_EXPERTS = "the model has no experts"
READERS = (
    Reader("configure_optimizers", ("optim",)),
    Reader("configure_model", ("blocks",), ("place",)),
    Reader("configure_model", ("balance",), ("Balancer",)),
    Reader("training_step", ("loss_chunk",), ("sums_of", "chunked_loss")),
    Reader("build_network", ("adapter",), ("add_adapters",)),
    Reader("generate", ("sample_tokens", "sample_temperature")),
)
# Arguments of the Trainer that Lightning passes to a hook.
PASSED = {"configure_gradient_clipping": ("gradient_clip_val", "gradient_clip_algorithm")}


def keys_of_replaced_methods(setup: Setup) -> Iterator[str]:
    """Yields a sentence for each key that is set and that the module's own code does not read."""
    if not setup.trains:
        return
    module = setup.module
    code = code_of(type(module))
    if code is None:
        return
    name = type(module).__name__
    of_objective = Reader(
        "training_step", getattr(type(module), "objective_keys", ()), ("sums_of",)
    )
    for reader in (*READERS, of_objective):
        if not setup.overrides(reader.hook) or code.extends(reader.hook):
            continue
        if any(each in code.names for each in reader.through):
            continue
        for key in reader.keys:
            if not code.passes_on(key):
                for path, value in _set_values(module, key, setup.typed):
                    last = path.rpartition(".")[2]
                    if last not in code.names:
                        yield (
                            f"model.{path} is {value!r} and has no effect: {name} has its own"
                            f" {reader.hook}, which does not read it; use self.{path} there, or"
                            " remove the key"
                        )
    for hook, keys in PASSED.items():
        if not setup.overrides(hook) or code.extends(hook):
            continue
        for key in keys:
            if setup.trainer.get(key) is not None and key not in code.read_names(hook):
                yield (
                    f"trainer.{key} is {setup.trainer[key]!r} and has no effect: {name} has its own"
                    f" {hook}, which does not read it; use it there, or remove the key"
                )


def typed_in_vain(setup: Setup) -> Iterator[str]:
    """Yields a sentence for each flag of the command line that has no effect in this training,
    whatever its value: one that is its default, too."""
    if not setup.trains:
        return
    for key, why in _in_vain(setup):
        if key in setup.typed:
            yield f"{key} has no effect ({why}): remove the flag"


def notes(setup: Setup) -> Iterator[str]:
    """Yields a line for each value of a file that has no effect on this model: such a file is for
    several models, and a flag for one."""
    given = typed_attribute(setup.module, "balance", BalanceConfig)
    if given is None or not has_no_experts(setup):
        return
    for name, value in given.changed().items():
        if f"model.balance.{name}" not in setup.typed:
            yield f"note: model.balance.{name} {value} has no effect: {NO_EXPERTS}"


def _in_vain(setup: Setup) -> Iterator[tuple[str, str]]:
    """Yields keys that this training does not read, each with the reason."""
    if has_no_experts(setup):
        for each in fields(BalanceConfig):
            yield f"model.balance.{each.name}", NO_EXPERTS
    optim = setup.optim
    if optim is None:
        return
    if optim.lr_scheduler_class:
        for name in ("schedule", "warmup"):
            yield f"model.optim.{name}", "--lr_scheduler replaces the schedule and its warm-up"
    elif isinstance(optim.learning_rate, list):
        yield "model.optim.schedule", "model.optim.learning_rate has phases"
    if chosen := optim.optimizer_class:
        name = chosen["class_path"].rpartition(".")[2]
        for key, argument in (("learning_rate", "lr"), ("weight_decay", "weight_decay")):
            flag = f"--optimizer.{argument}"
            if flag.removeprefix("--") in setup.typed:
                yield f"model.optim.{key}", f"{flag} replaces it"
            elif argument not in chosen["init_args"]:
                yield f"model.optim.{key}", f"--optimizer {name} takes no {argument}"


def has_no_experts(setup: Setup) -> bool:
    """Returns whether the model's configuration is known, and has no mixture of experts."""
    config = setup.text_config
    return config is not None and not any(getattr(config, name, None) for name in EXPERTS)


def class_without_effect(module: Any, flag: str) -> str:
    """Returns why --optimizer or --lr_scheduler has no effect, because the module has its own
    `configure_optimizers`; "" if it has one."""
    code, hook = code_of(type(module)), "configure_optimizers"
    if not overrides(module, hook) or code is None or code.extends(hook):
        return ""
    if code.passes_on("optim") or {"chosen", f"{flag}_class"} & code.names:
        return ""
    return (
        f"--{flag} has no effect: {type(module).__name__} has its own {hook}, which chooses the"
        f" {flag}; edit it, or remove the flag"
    )


def _set_values(
    module: Any, key: str, typed: frozenset[str] = frozenset()
) -> Iterator[tuple[str, object]]:
    """Yields path and value of what is not the default of the module's argument `key`, or typed."""
    if not hasattr(module, key) or not _is_ours(module, key):
        return
    value, default = getattr(module, key), _default(type(module), key)
    if not is_dataclass(value):
        if value != default or f"model.{key}" in typed:
            yield key, value
        return
    if default is None:
        default = type(value)()
    for each in fields(value):
        given = getattr(value, each.name)
        is_typed = f"model.{key}.{each.name}" in typed
        if each.init and (is_typed or given != getattr(default, each.name, given)):
            yield f"{key}.{each.name}", given


def _is_ours(module: Any, key: str) -> bool:
    """Returns whether the argument `key` of the module is this library's; a user's own may have the
    same name."""
    library = __name__.partition(".")[0]
    if type(getattr(module, key)).__module__.partition(".")[0] == library:
        return True
    ours = [each for each in type(module).__mro__ if each.__module__.partition(".")[0] == library]
    return any(key in inspect.signature(each).parameters for each in ours)


def _default(kind: type, key: str) -> object:
    """Returns the default of an argument of a class's constructor, or of a base's."""
    for each in kind.__mro__:
        if "__init__" in vars(each):
            found = inspect.signature(each).parameters.get(key)
            if found is not None:
                return found.default
    return None
