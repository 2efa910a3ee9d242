"""Even work: the slowest rank's work over the mean, and what it does to the time of two processes.

Rows of packed text have equally many tokens, and attention's work differs; conversations that are not packed differ in
tokens. Each is measured on 8 and 64 ranks, 16 samples per rank and step: in order, balanced within the global batch
(callbacks/equal_work.py), and grouped by length (sorted over 50 global batches, as transformers' `group_by_length`),
which changes what a step is made of. A step's work on a rank is the sum over its samples, and the slowest rank sets
its time.

Two processes train a transformer on sequences of 64 and 512 tokens, one in a forward, 8 in a step.

Targets: balanced, the slowest rank has at most 1.05 of the mean; two processes gain 1.1 in speed.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from trainer_dev.data import DataModule

from dist_template.callbacks.equal_work import assign
from dist_template.callbacks.global_order import GlobalOrder, permutation
from dist_template.text.batches.rows import ATTENTION_TOKENS
from dist_template.text.sources.documents import StandardLibrary, TextFiles
from dist_template.text.tokenizers import ByteBPE

from .arms import Comparison, Sample, quiet
from .ranks import on_ranks
from .record import Figure, Options, Result

NAME = "balance"
PER_RANK, ACCUMULATION = 16, 4  # samples of a rank and step, in so many micro-batches
SEQ_LEN, ROW = 8192, 4096  # tokens of a row: of files, of conversations
GROUPED = 50  # global batches that are sorted together
SHORT, LONG = 64, 512


def run(options: Options) -> Result:
    result = Result(NAME)
    kinds = {"rows of Python files, attention alone": _of_files(options.quick)}
    lengths = np.random.default_rng(0).lognormal(6.0, 0.8, 1024 * 10 if options.quick else 1024 * 100)
    lengths = np.minimum(lengths, ROW)  # a longer conversation is cut
    kinds["conversations, tokens"] = lengths
    kinds["conversations, tokens and attention"] = lengths + lengths**2 / ATTENTION_TOKENS
    for name, costs in kinds.items():
        for ranks in (8, 64):
            result.figures += _figures(name, costs, ranks)
    comparison = Comparison(f"Two processes, lengths {SHORT} and {LONG}", "optimizer step", "in order")
    comparison.samples = {"in order": [], "balanced": []}
    for _ in range(options.rounds):
        for arm, samples in comparison.samples.items():
            steps = 2 if options.quick else 20
            ranks = on_ranks(2, partial(_train, balanced=arm == "balanced", steps=steps))
            slowest = np.max([cpu_s for cpu_s, _ in ranks], axis=0)  # (steps,)
            samples.append(Sample(float(slowest.mean()), max(wall_s for _, wall_s in ranks)))
    result.comparisons.append(comparison)
    ratios = [1 / ratio for ratio in comparison.cpu_ratios("balanced")]
    result.figures.append(
        Figure("two processes: speed by balancing, by the slowest rank's CPU time", ratios, at_least=1.1)
    )
    result.notes.append("CPU time of two processes: the slowest rank's forward and backward of each step, summed.")
    return result


def _figures(name: str, costs: np.ndarray, ranks: int) -> list[Figure]:
    size = ranks * PER_RANK
    order = permutation(len(costs), 0, 0)[: len(costs) // size * size].astype(np.int64)
    batches = costs[order].reshape(-1, size)
    grouped = [np.sort(costs[order][at : at + GROUPED * size]) for at in range(0, len(order), GROUPED * size)]
    arms = {
        "in order": [batch.reshape(ranks, -1) for batch in batches],
        "balanced": [_balanced(batch, ranks) for batch in batches],
        "grouped by length": [batch.reshape(ranks, -1) for batch in np.concatenate(grouped).reshape(-1, size)],
    }
    figures = []
    for arm, steps in arms.items():
        slowest = sum(step.sum(1).max() for step in steps) / sum(step.sum(1).mean() for step in steps)
        most = 1.05 if arm == "balanced" else None
        figures.append(Figure(f"{name}, {ranks} ranks, {arm}: slowest over mean", [float(slowest)], at_most=most))
    return figures


def _balanced(batch: np.ndarray, ranks: int) -> np.ndarray:
    count = PER_RANK // ACCUMULATION
    assigned = assign(batch, ACCUMULATION, [count] * ranks, [1.0] * ranks)
    return batch[np.array(assigned).reshape(ranks, -1)]


def _of_files(is_quick: bool) -> np.ndarray:
    """Attention's work of each row of the standard library's files."""
    source = StandardLibrary()
    seq_len = SEQ_LEN
    if is_quick:
        source, seq_len = TextFiles([str(path) for path in source.files()[:40]]), 64
    with tempfile.TemporaryDirectory() as folder, quiet():
        data = DataModule(source, ByteBPE(2048), seq_len, 1, 1, validation_share=0.0, test_share=0.0, cache_dir=folder)
        data.prepare()
        rows = data.rows_of("train")
        costs = rows.work([*range(len(rows))]) - seq_len
    return np.tile(costs, 1 + 1024 // len(costs)) if len(costs) < 1024 else costs


# ---- two processes ---------------------------------------------------------------------------------------------------


def _train(balanced: bool, steps: int) -> tuple[list[float], float]:
    """This rank's CPU seconds in each optimizer step, and wall seconds of one; gradients are averaged at its end."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
    layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    lengths = np.random.default_rng(0).permutation([SHORT, LONG] * 512)
    order = iter(GlobalOrder(1024, 8, 1, dist.get_rank(), 2, costs=lengths.__getitem__ if balanced else None))
    _step(layers, lengths, order)
    dist.barrier()
    began = time.perf_counter()
    cpu_s = [_step(layers, lengths, order) for _ in range(steps)]
    dist.barrier()
    return cpu_s, (time.perf_counter() - began) / steps


def _step(layers: nn.Module, lengths: np.ndarray, order: Iterator[list[int]]) -> float:
    layers.zero_grad()
    began = time.process_time()
    for _ in range(4):
        (sample,) = next(order)
        layers(torch.ones(1, int(lengths[sample]), 128)).square().mean().backward()
    cpu_s = time.process_time() - began
    for parameter in layers.parameters():
        dist.all_reduce(parameter.grad)
    return cpu_s
