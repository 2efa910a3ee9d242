"""The verbs: Lightning's four, and entry points of the group `dist_template.verbs`.

The value of an entry point is "module", whose `main(argv, project)` runs the verb, or
"module:function". `--help` shows the first line of the docstring of that module or function."""

import ast
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint

from ..errors import first_line
from ..plugins import LIBRARY, file_of, registered
from ..project import Project

__all__ = ["verbs"]

GROUP = "dist_template.verbs"
TRAINING = {
    "fit": "trains and validates; resumes with --ckpt_path last",
    "validate": "evaluates a checkpoint on the validation split",
    "test": "evaluates a checkpoint on the test split",
    "predict": "generates texts from data.prompts with a checkpoint",
}


@dataclass(frozen=True)
class Verb:
    """A verb of the command line."""

    point: EntryPoint

    def load(self) -> Callable[[list[str], Project], None]:
        """Imports the function that runs the verb."""
        loaded = self.point.load()
        return loaded if self.point.attr else loaded.main

    def help_line(self) -> str:
        """Returns one line about the verb. Its module is parsed, not imported: it may need
        torch."""
        name, attribute = self.point.name, self.point.attr
        if name in TRAINING:
            return TRAINING[name]
        file = file_of(self.point.module)
        if file is None:
            return f"(not found: {self.point.value})"
        try:
            module = ast.parse(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, SyntaxError) as error:  # starting the verb reports it in full
            return f"(cannot be read: {first_line(error)})"
        text = ast.get_docstring(module) if not attribute else None
        for node in module.body:
            if isinstance(node, ast.FunctionDef) and node.name == attribute:
                text = ast.get_docstring(node)
        return (text or "").partition("\n")[0].removeprefix(f"`{name}`: ").rstrip(".")


def verbs() -> dict[str, Verb]:
    """Returns every verb: TRAINING's, then the registered ones by name. Raises InputError if one is
    there twice."""
    found = {verb: Verb(EntryPoint(verb, f"{LIBRARY}.cli.fit", GROUP)) for verb in TRAINING}
    for verb, point in registered(GROUP, taken=TRAINING).items():
        found[verb] = Verb(point)
    return found
