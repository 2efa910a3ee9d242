"""Configuration errors that are found before torch is imported: unreadable files and unknown top-level keys.

The imports take seconds. Every other key is checked after them, by the parser.
"""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

import yaml

from ..errors import InputError
from . import config_file
from .defaults import ALWAYS_ON

TOP_LEVEL = {"trainer", "model", "data", "run", "optimizer", "lr_scheduler", "seed_everything", *ALWAYS_ON}
TOP_LEVEL |= {"config", "help", "print_config", "ckpt_path", "weights_only", "verbose", "return_predictions"}


def check(argv: list[str]) -> None:
    """Checks the flags and files of `argv`, a verb and what follows it.

    Raises:
        InputError: a file cannot be read, or a key is unknown.
    """
    config_file.refuse_variables()
    for key, where in _given(argv[1:]):
        if key not in TOP_LEVEL:
            near = get_close_matches(key, TOP_LEVEL, 1)
            hint = f"; did you mean {near[0]}?" if near else ";"
            raise InputError(f"{where}{key} is not a key of this program{hint} see --help for every key")


def _given(flags: list[str]) -> Iterator[tuple[str, str]]:
    """Yields each top-level key and where it is given, as the beginning of a sentence."""
    for word, following in zip(flags, [*flags[1:], ""], strict=False):
        name, has_value, value = word.lstrip("-").partition("=")
        if not has_value and not following.startswith("--"):
            value = following
        if word == "-c" or name == "config":
            if "://" not in value and not value.startswith("{"):  # jsonargparse reads addresses and mappings itself
                yield from ((str(key), f"--config {value}: ") for key in config_file.read(value))
        elif word.startswith("--"):
            config_file.check_section(name, _parsed(value), f"--{name}")
            yield name.partition(".")[0], "--"


def _parsed(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text
