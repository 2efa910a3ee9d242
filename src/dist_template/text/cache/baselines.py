"""What predictors without a model reach on the labels that count, by which a loss is judged.

A unigram model knows how often each label occurs, and nothing of what is before it. Its loss, the
entropy of the labels, is what a model reaches whose labels do not follow from its inputs."""

import bz2
import math
from collections.abc import Iterable

import numpy as np

SAMPLE_BYTES, PIECES = 900_000, 16  # a block of bzip2, which takes 0.1 s; from all over a split
DIGITS = 6  # of a figure: nodes of other processors, with caches of their own, agree
Baselines = dict[str, float]  # of one source: a figure by its name


def unigram(counts: np.ndarray) -> Baselines:
    """Returns the number of labels, and of a unigram model the loss in nats per label and the
    accuracy. `counts` (vocabulary,) says how often each token is a label that counts."""
    num_labels = int(counts.sum())
    if not num_labels:
        return {"labels": 0}
    shares = counts[counts > 0] / num_labels
    return {
        "labels": num_labels,
        "unigram_loss": round(float(-(shares * np.log(shares)).sum()), DIGITS),
        "unigram_accuracy": round(float(shares.max()), DIGITS),
    }


def weighted(sources: Iterable[tuple[Baselines, float, int]]) -> Baselines:
    """Returns the means over sources, by each one's share of the labels, and the labels per token
    that is read. A model that reaches the means knows the source of a text besides. {} if no source
    has labels. `sources`: figures, share of the tokens that are read, and number of tokens."""
    shares = []
    num_read = 0.0
    for figures, share, tokens in sources:
        num_read += share
        # A sample has a fixed number of tokens, and not all of them are labels.
        labels = share * figures["labels"] / max(1, tokens)
        if labels:
            shares.append((figures, labels))
    total = sum(labels for _, labels in shares)
    if not total:
        return {}
    means = {"labels_per_token": total / num_read}
    for name in sorted(shares[0][0].keys() - {"labels"}):
        means[name] = sum(figures[name] * labels for figures, labels in shares) / total
    return means


def compressed(tokens: np.ndarray, counted: np.ndarray | None = None) -> float:
    """Returns the nats per label that bzip2 needs for a sample of the labels, beside the tokens
    that do not count: nearly 0 where texts repeat each other or follow a pattern. Models reach a
    quarter of it on natural text, after much training. `counted` says which tokens are labels;
    None: all are."""
    size = max(1, SAMPLE_BYTES // tokens.itemsize // PIECES)
    starts = np.linspace(0, max(0, len(tokens) - size), PIECES).astype(int)
    if len(tokens) <= size * PIECES:
        starts, size = np.zeros(1, dtype=int), len(tokens)
    pieces = np.concatenate([tokens[start : start + size] for start in starts])
    labels = np.ones(len(pieces), dtype=bool)
    if counted is not None:
        labels = np.concatenate([counted[start : start + size] for start in starts])
    if not labels.any():
        return 0.0
    others = len(bz2.compress(pieces[~labels].tobytes()))
    num_bytes = len(bz2.compress(pieces.tobytes())) - others
    return round(max(0.0, num_bytes * 8 * math.log(2) / int(labels.sum())), DIGITS)
