"""The verbs: Lightning's four, and entry points of the group `dist_template.verbs`.

The value of an entry point is "module", whose `main(argv, project)` runs the verb, or
"module:function". `--help` shows the first line of the docstring of that module or function.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import EntryPoint
from pathlib import Path

from ..errors import InputError
from ..plugins import LIBRARY, registered
from ..project import Project

GROUP = "dist_template.verbs"
TRAINING = {
    "fit": "trains and validates; resumes with --ckpt_path last",
    "validate": "evaluates a checkpoint on the validation split",
    "test": "evaluates a checkpoint on the test split",
    "predict": "generates texts from data.prompts with a checkpoint",
}


def verbs() -> dict[str, EntryPoint]:
    """Returns every verb: those of TRAINING, then the registered ones by name.

    Raises:
        InputError: a package registers a verb of TRAINING, or two packages register one verb.
    """
    others = registered(GROUP)
    for verb in TRAINING:
        if verb in others:
            raise InputError(
                f"{others[verb].value} is registered as the verb {verb!r}, which {LIBRARY} has:"
                f" rename its entry point of {GROUP}"
            )
    return {verb: EntryPoint(verb, f"{LIBRARY}.cli.fit", GROUP) for verb in TRAINING} | others


def load(verb: EntryPoint) -> Callable[[list[str], Project], None]:
    """Imports the function that runs a verb."""
    loaded = verb.load()
    return loaded if verb.attr else loaded.main


def help_line(verb: EntryPoint) -> str:
    """Returns one line about a verb. Its module is parsed, not imported: it may need torch."""
    if verb.name in TRAINING:
        return TRAINING[verb.name]
    spec = _find(verb.module)
    if spec is None or not spec.origin:
        return f"(not found: {verb.value})"
    module = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    text = ast.get_docstring(module) if not verb.attr else None
    for node in module.body:
        if isinstance(node, ast.FunctionDef) and node.name == verb.attr:
            text = ast.get_docstring(node)
    return (text or "").partition("\n")[0].removeprefix(f"`{verb.name}`: ").rstrip(".")


def _find(module: str) -> ModuleSpec | None:
    """Finds a module without importing the packages that contain it."""
    name, *rest = module.split(".")
    spec = importlib.util.find_spec(name)
    for part in rest:
        name = f"{name}.{part}"
        spec = PathFinder.find_spec(name, spec.submodule_search_locations) if spec else None
    return spec
