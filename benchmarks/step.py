"""What a training loop costs per optimizer step, on one process.

Arms: a hand-written loop of torch; the project as shipped; Hugging Face's Trainer with its
defaults. Models: one vector, whose step takes what the loop takes; Llamas of 0.1M and 5M
parameters.

Targets: with the vector, the project adds at most what Hugging Face's Trainer adds to the
hand-written loop; 0.1M runs at 0.88 of the hand-written loop's speed at least, and faster than
Hugging Face's Trainer; 5M at 0.98.
"""

import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from .arms import Arm, Comparison, compare
from .loops import hand, project, trainer
from .loops.task import LARGE, SMALL, Task, prepare
from .record import Figure, Options, Result

NAME = "step"
LOOPS = {"hand": hand, "project": project, "Trainer": trainer}
MODELS = {  # steps (the first do not count), sequences, tokens of each
    "null": (None, 2600, 100, 8, 32),  # some seconds: what is kept back for one of them counts too
    "0.1M": (SMALL, 460, 60, 8, 64),
    "5M": (LARGE, 34, 4, 4, 64),
}


def run(options: Options) -> Result:
    torch.set_num_threads(1)
    result = Result(NAME)
    with tempfile.TemporaryDirectory() as folder:
        for name, (architecture, steps, warm, batch_size, seq_len) in MODELS.items():
            task = Task(Path(folder), architecture, steps, warm, batch_size, seq_len)
            if options.quick:
                task = replace(task, steps=4, warm=1, batch_size=2, seq_len=16, log_every=2)
            prepare(task)
            arms: dict[str, Arm] = {arm: partial(loop.train, task) for arm, loop in LOOPS.items()}
            comparison = Comparison(f"{name} model", "optimizer step", "hand")
            result.comparisons.append(
                compare(comparison, arms, options.rounds, warm=not options.quick)
            )
    null, small, large = result.comparisons
    pairs = zip(null.cpu_added("project"), null.cpu_added("Trainer"), strict=True)
    result.figures = [
        Figure(
            "null: CPU time added to hand, project over Trainer",
            [a / b for a, b in pairs],
            at_most=1,
        ),
        Figure(
            "0.1M: speed of project over hand, by CPU time",
            small.cpu_ratios("hand", "project"),
            at_least=0.88,
        ),
        Figure(
            "0.1M: speed of project over Trainer",
            small.cpu_ratios("Trainer", "project"),
            at_least=1,
        ),
        Figure(
            "5M: speed of project over hand", large.cpu_ratios("hand", "project"), at_least=0.98
        ),
    ]
    return result
