"""Private names of LightningCLI and of its parser. Verified on lightning 2.6 and jsonargparse 4.53;
tests/compat/test_names.py checks them. Where a name is gone: AttributeError."""

from collections.abc import Callable
from typing import Any, get_args

from lightning.pytorch.cli import LightningArgumentParser, LightningCLI


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
