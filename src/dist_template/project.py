"""A generated project as the library sees it: its package, and the classes of its model and data.

The library does not import a user's package by name: `main` creates a `Project` and passes it
on."""

import argparse
import importlib
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from .errors import InputError

__all__ = ["Flags", "Project", "has_command_line", "is_users", "program"]

_program = __name__.split(".")[0]  # the started package, for messages only


class Choice:
    """Base class of what YAML chooses by `class_path`: errors suggest its subclasses' names."""


@dataclass(frozen=True)
class Project:
    """A user's package. `module` and `data`: "module:Class"; a leading dot: inside the package."""

    package: str  # as in `python -m <package>`
    module: str = ".module:LanguageModule"  # the LightningModule
    data: str = ".data:DataModule"  # the LightningDataModule

    def class_of(self, where: str) -> Any:
        """Imports and returns the class that `module` or `data` names."""
        module, _, name = where.partition(":")
        try:
            return getattr(importlib.import_module(module, self.package), name)
        except SyntaxError as error:
            line = (error.text or "").strip()
            raise InputError(f"{error.filename}:{error.lineno}: {error.msg}: {line}") from error

    @property
    def folder(self) -> Path:
        """The package's own folder."""
        found = importlib.util.find_spec(self.package)
        places = list(found.submodule_search_locations or ()) if found else []
        return Path(places[0]) if places else Path.cwd()

    def start(self) -> None:
        """Makes messages name this project's command line."""
        global _program
        _program = self.package


def program(verb: str | None = None) -> str:
    """Returns the command line of `verb` of the started project."""
    return f"python -m {_program} {verb or 'VERB'}"


class Flags(argparse.ArgumentParser):
    """Parser of a verb's own flags; it refuses a wrong one in a sentence, as other bad input."""

    def __init__(self, verb: str, **options: Any) -> None:
        super().__init__(program(verb), allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; `{self.prog} --help` explains every flag")


def program_name() -> str:
    """Returns the started package, or this library's name."""
    return _program


def has_command_line() -> bool:
    """Returns whether a project was started; else parts are used by a user's own Trainer."""
    return _program != __name__.split(".")[0]


def in_run(path: str | Path, trainer: Any) -> Path:
    """Returns `path` with `{run}` replaced by the Trainer's default_root_dir."""
    return Path(str(path).replace("{run}", trainer.default_root_dir))


def is_users(file: str) -> bool:
    """Returns whether `file` may be the user's: not this library's, not installed, not Python's."""
    library = str(Path(__file__).parent)
    return not file.startswith((library, "<")) and not any(part in file for part in _INSTALLED)


_INSTALLED = ("site-packages", "dist-packages", f"{sys.base_prefix}/lib/python")
