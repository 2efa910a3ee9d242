"""Names that a Lightning user gives to `trainer.strategy`, and what they stand for here.

`--trainer.strategy fsdp2` does what `--config strategy/fsdp2` does: the project's file of that name
where there is one, else the library's. The flags after it change the file's arguments. Names of
Lightning that are not listed (ddp, auto, ddp_find_unused_parameters_true …) are Lightning's own."""

import json
from collections.abc import Mapping
from difflib import get_close_matches
from itertools import islice
from typing import Any

from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities import rank_zero_only

from ..errors import InputError
from . import config_file

__all__ = ["check", "expanded", "print_lines", "replaced"]

KEY = "trainer.strategy"
# Lines for `print_lines`. A file is read by the parser of a verb, and again without the defaults.
TAKEN: dict[str, None] = {}
DEEPSPEED = "--deepspeed"  # FILE, as scripts of Hugging Face's Trainer take it
OFFLOAD = {"offload_optimizer": True}
OFFLOAD_ALL = OFFLOAD | {"offload_parameters": True}
NVME = OFFLOAD_ALL | {"offload_optimizer_device": "nvme", "offload_params_device": "nvme"}
CPU = {"cpu_offload": True}

# Name: the file of configs/strategy, and arguments that differ from it. Lightning's names are those
# of its registry: fsdp and deepspeed without more are FSDP2 here, and ZeRO-2 as in Lightning.
NAMES: dict[str, tuple[str, dict[str, Any]]] = {
    "fsdp": ("fsdp2", {}),
    "fsdp_cpu_offload": ("fsdp2", CPU),
    "fsdp2": ("fsdp2", {}),
    "fsdp2_offload": ("fsdp2", CPU),
    "fsdp2_tp": ("fsdp2_tp", {}),
    "hsdp": ("hsdp", {}),
    "zero1": ("zero1", {}),
    "zero2": ("zero2", {}),
    "zero2_offload": ("zero2", OFFLOAD),
    "zero3": ("zero3", {}),
    "zero3_offload": ("zero3", OFFLOAD_ALL),
    "deepspeed": ("zero2", {}),
    "deepspeed_stage_1": ("zero1", {}),
    "deepspeed_stage_1_offload": ("zero1", OFFLOAD),
    "deepspeed_stage_2": ("zero2", {}),
    "deepspeed_stage_2_offload": ("zero2", OFFLOAD),
    "deepspeed_stage_3": ("zero3", {}),
    "deepspeed_stage_3_offload": ("zero3", OFFLOAD_ALL),
    "deepspeed_stage_3_offload_nvme": ("zero3", NVME),
}


def expanded(args: list[str]) -> list[str]:
    """Returns the command line with `--config strategy/FILE` in place of each
    `--trainer.strategy NAME`, at its place, so that later flags change that file's arguments, and
    with ZeroStrategy in place of `--deepspeed FILE`."""
    found: list[str] = []
    words = iter(args)
    for word in words:
        flag, is_joined, name = word.partition("=")
        if flag not in (f"--{KEY}", DEEPSPEED):
            found.append(word)
            continue
        TAKEN.clear()  # of a flag before, which this one replaces
        given = [word] if is_joined else [word, *islice(words, 1)]
        name = name if is_joined else given[-1]
        if flag == DEEPSPEED:
            if is_joined or len(given) == 2:
                strategy = {"class_path": "ZeroStrategy", "init_args": {"config": name}}
                # null first: no argument of an earlier strategy stays
                found += [f"--{KEY}=null", f"--{KEY}={json.dumps(strategy)}"]
                TAKEN[f"{KEY}: ZeroStrategy with --{KEY}.config {name}"] = None
                continue
        if name not in NAMES:
            found += given
            continue
        file, arguments = NAMES[name]
        found += ["--config", f"strategy/{file}"]
        found += [f"--{KEY}.init_args.{key}={_text(value)}" for key, value in arguments.items()]
        TAKEN[_line(name)] = None
    return found


def replaced(content: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the keys of a configuration file with the strategy's class and arguments in place of
    a name in NAMES; None if it has no such name."""
    trainer = content.get("trainer")
    name = trainer.get("strategy") if isinstance(trainer, dict) else content.get(KEY)
    if not isinstance(name, str) or name not in NAMES:
        return None
    file, arguments = NAMES[name]
    strategy = dict(config_file.read(f"strategy/{file}")["trainer"]["strategy"])
    strategy["init_args"] = {**(strategy.get("init_args") or {}), **arguments}
    TAKEN[_line(name)] = None
    if isinstance(trainer, dict):
        return {**content, "trainer": {**trainer, "strategy": strategy}}
    return {**content, KEY: strategy}


def check(strategy: object) -> None:
    """Raises InputError if `trainer.strategy` is a name that neither NAMES nor Lightning has."""
    if not isinstance(strategy, str) or is_name(strategy):
        return
    near = get_close_matches(strategy.lower(), _known(), 1)
    hint = f"did you mean {near[0]}? Or" if near else ""
    allowed = "ddp, fsdp2, zero1, zero2, zero3, a file as in --config strategy/fsdp2"
    raise InputError(
        f"{KEY} {strategy!r} is no strategy; {hint or 'give'} {allowed} (`config list` has all), or"
        " a class path"
    )


def is_name(name: str) -> bool:
    """Returns whether Lightning has a strategy of this name, or NAMES."""
    return name in _known()


def _known() -> set[str]:
    return {"auto", *NAMES, *StrategyRegistry.available_strategies()}


def without_keys(name: str) -> str:
    """Returns the sentence for a `--trainer.strategy.KEY` whose strategy is only a name."""
    return (
        f"{KEY} is the name {name!r}, which takes no --{KEY}.KEY: give --config strategy/FILE or"
        f" --{KEY} NAME first, as in --{KEY} zero3, or {DEEPSPEED} FILE for a DeepSpeed JSON"
    )


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _line(name: str) -> str:
    file, arguments = NAMES[name]
    flags = "".join(f" --{KEY}.{key} {_text(value)}" for key, value in arguments.items())
    return f"{KEY} {name}: --config strategy/{file}{flags}"


def print_lines() -> None:
    """Prints a line for each name that the parser has read, once."""
    for line in TAKEN:
        rank_zero_only(print)(line)
    TAKEN.clear()
