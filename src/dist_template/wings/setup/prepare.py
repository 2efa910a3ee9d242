"""`prepare`: tokenizes the data once, in one process, before training."""

import sys

import numpy as np

from ...project import Project

NUM_SHOWN = 3  # documents


def main(argv: list[str], project: Project) -> None:
    """Writes the token cache of a configuration and prints a summary; an existing one is checked.
    Prints the first documents as the model reads them, with marks around what is trained on."""
    from ...cli.fit import WithoutTrainer  # imports torch

    data = WithoutTrainer.of(argv, project).datamodule
    corpus = getattr(data, "prepare", data.prepare_data)()  # Lightning's hook has no token cache
    if corpus is None or not corpus.is_whole("train"):
        return
    start, end = ("\033[32m", "\033[0m") if sys.stdout.isatty() else ("[[", "]]")
    print(f"the first of the train split; {start}trained on{end}:")
    tokens, counted = corpus.tokens("train"), corpus.counted("train")
    starts = corpus.starts("train")
    for first, last in list(zip(starts, starts[1:], strict=False))[:NUM_SHOWN]:
        edges = np.flatnonzero(np.diff(counted[first:last])) + first + 1
        for a, b in zip([first, *edges], [*edges, last], strict=True):
            text = corpus.tokenizer.decode(tokens[a:b])
            print(f"{start}{text}{end}" if counted[a] else text, end="")
        print()
