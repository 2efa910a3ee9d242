"""The verbs: Lightning's four, and entry points of the group `dist_template.verbs`.

The value of an entry point is "module", whose `main(argv, project)` runs the verb, or
"module:function". `--help` shows the first line of the docstring of that module or function.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from importlib.metadata import EntryPoint

from ..errors import first_line
from ..plugins import LIBRARY, file_of, registered
from ..project import Project

GROUP = "dist_template.verbs"
TRAINING = {
    "fit": "trains and validates; resumes with --ckpt_path last",
    "validate": "evaluates a checkpoint on the validation split",
    "test": "evaluates a checkpoint on the test split",
    "predict": "generates texts from data.prompts with a checkpoint",
}


def verbs() -> dict[str, EntryPoint]:
    """Returns every verb: TRAINING's, then the registered ones by name.

    Raises:
        InputError: a verb is registered twice.
    """
    others = registered(GROUP, taken=TRAINING)
    return {verb: EntryPoint(verb, f"{LIBRARY}.cli.fit", GROUP) for verb in TRAINING} | others


def load(verb: EntryPoint) -> Callable[[list[str], Project], None]:
    """Imports the function that runs a verb."""
    loaded = verb.load()
    return loaded if verb.attr else loaded.main


def help_line(verb: EntryPoint) -> str:
    """Returns one line about a verb. Its module is parsed, not imported: it may need torch."""
    if verb.name in TRAINING:
        return TRAINING[verb.name]
    file = file_of(verb.module)
    if file is None:
        return f"(not found: {verb.value})"
    try:
        module = ast.parse(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError) as error:  # starting the verb reports it in full
        return f"(cannot be read: {first_line(error)})"
    text = ast.get_docstring(module) if not verb.attr else None
    for node in module.body:
        if isinstance(node, ast.FunctionDef) and node.name == verb.attr:
            text = ast.get_docstring(node)
    return (text or "").partition("\n")[0].removeprefix(f"`{verb.name}`: ").rstrip(".")
