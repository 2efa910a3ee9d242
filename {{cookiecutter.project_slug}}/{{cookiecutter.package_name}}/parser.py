"""How --config files and flags are read: what jsonargparse and Lightning do, in sentences and without surprises."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any, NoReturn

import yaml
from jsonargparse import ActionConfigFile, Namespace
from lightning.pytorch.cli import LightningArgumentParser

from .errors import InputError, is_first_on_node


class Parser(LightningArgumentParser):
    """Says what is wrong in one sentence, instead of behind a page of usage."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if os.environ.get("TRACEBACK", "0") != "0" and ex is not None:
            raise ex
        text = " ".join(message.split())
        text = re.sub(
            r"Expected a dot import path string: (\S+)",
            r"there is no class \1; give one that this package or Lightning has, or module.Class of your own",
            text,
        )
        if is_first_on_node():
            print(f"error: {text}; see --help for every key", file=sys.stderr)
        sys.exit(2)


class ConfigFile(ActionConfigFile):
    """A --config file, whose strategy replaces an earlier one whole.

    jsonargparse would let what both classes know (a timeout; between two of one class, all) go on into the next.
    """

    def __call__(self, parser: Any, cfg: Any, values: Any, option_string: str | None = None) -> None:
        for earlier in cfg.get(self.dest) or ():
            if _folder(earlier) == _folder(values) == "strategy":
                raise InputError(f"--config {earlier} and --config {values} are both a strategy: give one of them")
        if _names_a_strategy(values):
            cfg["trainer.strategy"] = None
        super().__call__(parser, cfg, values, option_string)


def _folder(path: Any) -> str:
    return Path(str(path)).absolute().parent.name


def _names_a_strategy(path: str) -> bool:
    """Whether the file says which strategy, and not only what to change in the one that is."""
    try:
        strategy = yaml.safe_load(Path(path).read_text(encoding="utf-8"))["trainer"]["strategy"]
    except (OSError, yaml.YAMLError, KeyError, TypeError):  # jsonargparse says what is wrong with the file
        return False
    return not isinstance(strategy, dict) or "class_path" in strategy


def as_launched(settings: Namespace) -> None:
    """What a launcher knows better than the YAML, and one clock for two keys."""
    if "LOCAL_WORLD_SIZE" in os.environ:  # torchrun's; with --nnodes=MIN:MAX another one after a restart
        settings.trainer.devices = int(os.environ["LOCAL_WORLD_SIZE"])
        settings.trainer.num_nodes = int(os.environ["WORLD_SIZE"]) // settings.trainer.devices
    if settings.trainer.max_time is not None:  # Lightning would stop between two accumulated micro-batches, and exit 0
        settings.preemption.max_time, settings.trainer.max_time = settings.trainer.max_time, None
