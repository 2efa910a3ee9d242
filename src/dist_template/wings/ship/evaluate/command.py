"""`evaluate`: a run's metrics on held-out data, and whether it is better than a baseline."""

import os
import re
from argparse import Namespace

from ....errors import Ended, Exit, InputError, require
from ....project import Flags, Project
from ...ranges import in_range

BASELINE = "run, checkpoint, folder, hub name or start"


def main(argv: list[str], project: Project) -> None:
    """Evaluates the run in `argv` and writes RUN/evaluation/<name>.json and .parquet. Raises
    InputError if a model, a requirement or the data cannot be used, and Ended if a requirement is
    not met."""
    parser = Flags("evaluate")
    parser.add_argument("run", help="a run's folder, or a checkpoint in one")
    parser.add_argument("--name", help="name of the result files; default: split and baseline")
    add_flags(parser)
    run(parser.parse_args(argv[1:]), project)


def add_flags(parser: Flags) -> None:
    """Adds the flags that `promote` has too."""
    add = parser.add_argument
    add("--baseline", help=BASELINE)
    default = "default: test; of a module without test_step or test data, validation"
    add("--split", choices=("validation", "test"), help=default)
    requirement = "such as 'eval/loss better'; else exit code 2"
    add("--require", action="append", default=[], help=requirement)
    add("--tasks", nargs="+", default=[], metavar="NAME", help="tasks of lm-eval to run as well")
    add("--task_folder", help="folder of the tasks' YAML files; default: lm-eval's own")
    template = "put the chat template around the tasks' prompts"
    add("--chat_template", action="store_true", help=template)
    add("--limit", type=in_range(int, 1), help="the first samples of each task; default: all")


def run(given: Namespace, project: Project) -> None:
    if given.tasks:
        require("lm_eval", "tasks", extra="evaluate")
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise InputError("evaluate starts the processes of a run itself: start it once")
    from .paired import failure, parse

    for text in given.require:
        parse(text)
    if given.require and not given.baseline:
        raise InputError(f"--require compares with a --baseline: give one ({BASELINE})")
    from ....cli.fit import WithoutTrainer
    from ....progress import running
    from ..export import trained
    from . import plain

    flags, *_ = trained.of_run(given.run, project, "RUN")
    with running(f"evaluate: reading {given.run}"):
        cli = WithoutTrainer(project, flags, run=False)
    if not plain.is_for_texts(cli):
        split = plain.split_of(given.split, cli)
        return plain.evaluate(given, split, _name(given, split), cli, project)
    require("pandas", "evaluate", extra="evaluate")
    from .evaluation import evaluate

    given.split = given.split or "test"
    comparisons = evaluate(given, _name(given, given.split), cli, project)
    failures = [failure(text, comparisons) for text in given.require]
    if any(failures):
        raise Ended(Exit.BAD_INPUT, "; ".join(filter(None, failures)))


def _name(given: Namespace, split: str) -> str:
    """Returns the name of the files that are written."""
    name = given.name
    if not name:
        name = f"{split}-against-{given.baseline}" if given.baseline else split
    return re.sub(r"[^\w.-]+", "_", name).strip("_")
