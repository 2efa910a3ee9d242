"""`prepare`: tokenizes the data once, in one process, before training; else calls prepare_data."""

import json
import sys
from collections import Counter
from itertools import islice, pairwise
from typing import Any

import numpy as np

from ...project import Project
from ...text.sources.notes import kind_of

NUM_SHOWN, NUM_READ = 3, 100  # documents; among the latter, each kind of turn is looked for


def main(argv: list[str], project: Project) -> None:
    """Writes the token cache of a configuration and prints a summary; an existing one is checked.
    Prints the first documents as the model reads them, with marks around what is trained on."""
    from ...cli.fit import WithoutTrainer  # imports torch

    data = WithoutTrainer.of(argv, project).datamodule
    if not hasattr(data, "prepare"):
        return prepare_other(data)
    corpus = data.prepare()
    if corpus is None or not corpus.is_whole("train"):
        return
    source = next(iter(data.source.parts().values()))
    if hasattr(source, "spans") and not source.pairs:
        return show_turns(source, corpus.tokenizer)
    start, end = ("\033[32m", "\033[0m") if sys.stdout.isatty() else ("[[", "]]")
    for part in ("the first of the train split; ", start, "trained on", end, ":\n"):
        print(part, end="")
    tokens, counted = corpus.tokens("train"), corpus.counted("train")
    starts = corpus.starts("train")
    kept = ((first, last) for first, last in pairwise(starts) if first < last)  # else dropped
    for first, last in islice(kept, NUM_SHOWN):
        edges = np.flatnonzero(np.diff(counted[first:last])) + first + 1
        for a, b in zip([first, *edges], [*edges, last], strict=True):
            text = corpus.tokenizer.decode(tokens[a:b])
            # a colour is written alone: in a text it would be the text's, and shown as a code
            for part in (start, text, end) if counted[a] else (text,):
                print(part, end="")
        print()


def prepare_other(data: Any) -> None:
    """Calls Lightning's hook of data that are no text of this library, and prints what was done."""
    name = type(data).__name__
    import lightning as L

    if type(data).prepare_data is L.LightningDataModule.prepare_data:
        print(f"{name} has no prepare_data: there is nothing to prepare (no text to tokenize)")
        return
    data.prepare_data()
    print(f"{name}.prepare_data has run; it tokenizes no text, so there is no token cache")


def show_turns(source: Any, tokenizer: Any) -> None:
    """Prints the first conversations, and the first with each kind of tokens, with marks and
    numbers."""
    colours = ("\033[32m", "\033[0m"), ("\033[33m", "\033[0m")
    trained, other = colours if sys.stdout.isatty() else (("[[", "]]"), ("((", "))"))
    print("examples, one of each kind: ", end="")
    for part in (trained[0], "trained on", trained[1], ", "):
        print(part, end="")
    for part in (other[0], "an answer that is not", other[1], "\n"):
        print(part, end="")
    seen = set[str]()
    for number, (name, text) in enumerate(islice(source.documents(), NUM_READ)):
        tokens, shown = Counter[str](), list[str]()
        turns = {*map(kind_of, json.loads(text)["messages"])}
        for kind, ids in source.spans(tokenizer, name, text):
            tokens[kind] += len(ids)
            start, end = {"trained on": trained, "of prompts": ("", "")}.get(kind, other)
            shown += [start, tokenizer.decode(ids), end]
        if not shown:  # it was dropped
            continue
        if number < NUM_SHOWN or not tokens.keys() | turns <= seen:
            print(f"{name}, tokens: " + ", ".join(f"{num} {kind}" for kind, num in tokens.items()))
            for part in shown:  # a colour alone, as above
                print(part, end="")
            print()
        seen |= tokens.keys() | turns
