"""`evaluate`: whether a run is better than a baseline, on the same documents and tasks."""

import os
import re

from ....errors import Ended, Exit, InputError, require
from ....project import Flags, Project

BASELINE = "run, checkpoint, folder, hub name or start"


def main(argv: list[str], project: Project) -> None:
    """Evaluates the run in `argv` and writes RUN/evaluation/<name>.json and .parquet.

    Raises:
        InputError: a model, a requirement or the data cannot be used.
        Ended: a requirement is not met.
    """
    parser = Flags("evaluate")
    parser.add_argument("run", help="a run's folder, or a checkpoint in one")
    parser.add_argument("--baseline", help=BASELINE)
    parser.add_argument("--split", choices=("validation", "test"), default="test")
    parser.add_argument("--require", action="append", default=[], help="such as 'eval/loss better'; else exit code 2")
    parser.add_argument("--config", help="YAML with tasks of lm-eval")
    parser.add_argument("--name", help="of the files; default: the split and the baseline")
    given = parser.parse_args(argv[1:])
    require("pandas", "evaluate", extra="evaluate")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InputError("evaluate starts the processes of a run itself: start it once")

    from .evaluation import evaluate
    from .paired import failure, parse

    for text in given.require:
        parse(text)
    if given.require and not given.baseline:
        raise InputError(f"--require compares with a --baseline: give one ({BASELINE})")
    name = given.name or "-against-".join(filter(None, [given.split, given.baseline]))
    comparisons = evaluate(given, re.sub(r"[^\w.-]+", "_", name).strip("_"), project)
    failures = [failure(text, comparisons) for text in given.require]
    if any(failures):
        raise Ended(Exit.BAD_INPUT, "; ".join(filter(None, failures)))
