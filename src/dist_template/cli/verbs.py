"""The verbs: Lightning's four, and entry points of the group `dist_template.verbs`.

The value of an entry point is "module", whose `main(argv, project)` runs the verb, or
"module:function". `--help` shows the first line of the docstring of that module or function."""

import ast
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint

from ..errors import first_line, shortened
from ..plugins import LIBRARY, OURS, Plugin, PluginError, file_of, registered
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

    point: Plugin

    def load(self) -> Callable[[list[str], Project], None]:
        """Imports the function that runs the verb. Raises InputError if another package's cannot be
        imported or is no function."""
        loaded = self.point.load()
        function = loaded if self.point.attr else getattr(loaded, "main", None)
        if not callable(function):
            what = "is not a function" if self.point.attr else "has no function `main`"
            raise PluginError(f"{self.point.label}: {self.point.value} {what}")
        return function

    def help_line(self) -> str:
        """Returns one line about the verb. Its module is parsed, not imported: it may need
        torch."""
        name, attribute = self.point.name, self.point.attr
        if name in TRAINING:
            return TRAINING[name]
        try:
            file = file_of(self.point.module)
            if file is None:
                return f"(not found: {self.point.value})"
            module = ast.parse(file.read_text(encoding="utf-8"))
        except Exception as error:  # starting the verb reports it in full
            return f"(cannot be read: {first_line(error)})"
        text = ast.get_docstring(module) if not attribute else None
        for node in module.body:
            if isinstance(node, ast.FunctionDef) and node.name == attribute:
                text = ast.get_docstring(node)
        line = (text or "").partition("\n")[0].removeprefix(f"`{name}`: ").rstrip(".")
        return line if self.point.is_ours else shortened(line, 100)


def verbs() -> dict[str, Verb]:
    """Returns every verb: TRAINING's, then the registered ones by name."""
    found = {}
    for verb in TRAINING:
        found[verb] = Verb(Plugin(EntryPoint(verb, f"{LIBRARY}.cli.fit", GROUP), OURS))
    for verb, plugin in sorted(registered(GROUP, taken=TRAINING).items()):
        found[verb] = Verb(plugin)
    return found
