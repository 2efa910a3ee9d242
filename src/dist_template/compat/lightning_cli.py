"""Private names of LightningCLI and of its parser. Verified on lightning 2.6 and jsonargparse 4.53;
tests/compat/test_names.py checks them. Where a name is gone: AttributeError; where
`key_in_progress` finds none of its functions, sentences name the last part of a key alone."""

import inspect
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any, NamedTuple, get_args

from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

TYPES = "jsonargparse._typehints"  # the module whose functions `key_in_progress` knows


class OpenCLI(LightningCLI):
    """LightningCLI with public names for its subclass, without hyperparameters from checkpoints."""

    executes = True  # whether the verb runs, after its objects are made

    def _run_subcommand(self, subcommand: str) -> None:
        if self.executes:
            super()._run_subcommand(subcommand)

    def value(self, config: Any, key: str, default: Any = None) -> Any:
        """Returns `key` of the configuration of the verb that runs."""
        return self._get(config, key, default=default)

    def resolved_config(self) -> dict[str, Any]:
        """Returns the configuration of the verb that runs as plain values."""
        self._dump_config()
        return self.config_dump

    def parser_of(self, subcommand: str | None) -> LightningArgumentParser:
        """Returns the parser of a verb's keys."""
        return self._parser(subcommand)

    def _parse_ckpt_path(self) -> None:
        """Keeps the checkpoint's hyperparameters from overriding the configuration."""


def keys_of(parser: LightningArgumentParser) -> list[Any]:
    """Returns argparse's actions, each with `dest` and `help` (argparse has no public list)."""
    return parser._actions


def takes_null(action: Any) -> bool:
    """Returns whether the type of a key includes null, which jsonargparse accepts for every key."""
    hint = getattr(action, "_typehint", action.type)
    return hint is Any or type(None) in get_args(hint)


def formatter_of(parser: LightningArgumentParser) -> Any:
    """Returns a new formatter of argparse, as `format_help` makes one."""
    return parser._get_formatter()


def wrap_instantiation(
    parser: LightningArgumentParser, key: str, around: Callable[[Callable[[], None], Any], None]
) -> None:
    """Lets `around(instantiate, values)` create the object of a section, where `values[key]` are
    its arguments before, and the object afterwards. jsonargparse's `instantiators` need a call that
    Lightning makes itself."""
    groups: Any = parser.groups
    group = groups[key]
    instantiate = group.instantiate_class
    group.instantiate_class = lambda group, values: around(
        lambda: instantiate(group, values), values
    )


class Key(NamedTuple):
    """The key of a value in a configuration.

    Attributes:
        name: Dotted, as in model.objective or trainer.callbacks[1].
        is_class: Whether the value has `class_path` and `init_args`."""

    name: str = ""
    is_class: bool = False

    def __str__(self) -> str:
        return self.name

    def item(self, position: int) -> "Key":
        """Returns the key of an item of a list."""
        return Key(f"{self.name}[{position}]")

    def argument(self, name: object) -> "Key":
        """Returns the key of an argument, or of a mapping's value. Flags leave `init_args` out; an
        item of a list has no flag, and its arguments are named as in YAML."""
        inside = "init_args." if self.is_class and "[" in self.name else ""
        return Key(f"{self.name}.{inside}{name}".lstrip("."))


def key_in_progress() -> Key:
    """Returns the key whose value jsonargparse reads, or makes an object of, while it calls this
    function. Its messages name a key only within the class that they are about, without a position
    in a list: both are in the local variables of the calls that are in progress."""
    steps: list[tuple[str, Any]] = []
    frame = inspect.currentframe()
    while frame is not None:
        name, values = frame.f_code.co_name, frame.f_locals
        if frame.f_globals.get("__name__") == TYPES:
            if name == "adapt_class_type":
                steps.append(("class", not is_dataclass(values.get("typehint"))))
            elif name == "adapt_typehints" and "n" in values:
                steps.append(("item", values["n"]))
            elif name == "adapt_typehints" and "k" in values:
                steps.append(("argument", values["k"]))
            elif name in ("_check_type", "instantiate_classes"):
                steps.append(("argument", values["self"].dest))
        frame = frame.f_back
    found = Key()
    for kind, value in reversed(steps):
        if kind == "class":
            found = Key(found.name, value)
        else:
            found = found.item(value) if kind == "item" else found.argument(value)
    return found
