"""What is logged equals what plain PyTorch computes from the same weights and the same text.

Documents of a packed row go through the model one by one, so there is no mask; AdamW and clipping
are torch's, the schedule is spelled out. And what the buffer of logged values costs."""

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from lightning.pytorch import Callback
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from dist_template.callbacks import Throughput
from dist_template.model.metrics import FOLD, MetricBuffer
from dist_template.observe.history.run import read_lines
from dist_template.wings.history import read_run
from dist_template.wings.rehearse.record import RunRecord
from dist_template.wings.rehearse.recorder import fingerprint
from tests import ROOT
from tests.support.modules import Ops
from tests.support.parity import CLIP, GLOBAL_BATCH, MODELS, Trainings
from tests.support.tiers import tiers

# Of the fixture's trainings.
SEQ_LEN, VOCABULARY, EOS = 32, 257, 256
PEAK, WARMUP, ALL_STEPS, FLOOR, BETAS, EPS, DECAY = 0.01, 5, 20, 0.1, (0.9, 0.95), 1e-8, 0.1
STEPS = 8  # that are computed
PEAK_TFLOPS = 0.25  # that a device is said to have: a CPU has none, and so no MFU


class WithAPeak(Callback):
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        (throughput,) = (each for each in trainer.callbacks if isinstance(each, Throughput))
        throughput._peak_tflops = PEAK_TFLOPS


@pytest.fixture(scope="module", params=tiers(["fsdp2_ep", "zero2"], daily=["fsdp2_ep"]))
def run(request: pytest.FixtureRequest, train: Trainings) -> RunRecord:
    flags = [f"--trainer.max_steps={ALL_STEPS}", "--trainer.val_check_interval=10"]
    return train.run("fit", "deepseek_v3", request.param, *flags, callbacks=[WithAPeak()])


@pytest.mark.slow
def test_loss_norm_and_tokens_equal_an_independent_computation(run: RunRecord, cache: Path) -> None:
    metrics = read_run(run.run).metrics
    loss, norm = zip(*recomputed(run, cache), strict=True)
    steps = range(1, STEPS + 1)
    expected = {
        "train/loss": (loss, 1e-5),
        "train/perplexity": ([math.exp(each) for each in loss], 1e-4),
        "train/grad_norm": (norm, 1e-4),
        "train/learning_rate": ([learning_rate(step - 1) for step in steps], 1e-9),
        "train/tokens": ([step * GLOBAL_BATCH * SEQ_LEN for step in steps], 1e-9),
    }
    for name, (values, tolerance) in expected.items():
        assert metrics[name].steps.tolist() == list(range(1, ALL_STEPS + 1)), name
        assert metrics[name].values[:STEPS].tolist() == pytest.approx(list(values), rel=tolerance)


@pytest.mark.slow
def test_mfu_follows_from_a_clock_and_a_count_of_multiplications(run: RunRecord) -> None:
    """By perf/step_s, and a count of the first checkpoint's weights."""
    metrics = read_run(run.run).metrics
    mfu, speed = metrics["perf/mfu"], metrics["perf/tokens_per_s_per_device"].values
    tflops = speed * operations_of_a_token(run.start) / 1e12
    assert metrics["perf/model_tflops"].values == pytest.approx(tflops, rel=1e-9)
    assert mfu.values == pytest.approx(tflops / PEAK_TFLOPS, rel=1e-9)
    seconds = metrics["perf/step_s"].values[-len(speed) :]
    assert speed * seconds == pytest.approx(GLOBAL_BATCH * SEQ_LEN / 2, rel=1e-6)


@pytest.mark.slow
def test_the_documented_metrics_are_those_that_are_logged(run: RunRecord) -> None:
    """But for a mixture's, for the loss terms of routers, for those of the verb `test`, and for
    NVML's, which tests/callbacks/test_gpu_gauges.py compares."""
    page = (ROOT / "docs" / "metrics.md").read_text("utf-8")
    cells = " ".join(re.findall(r"^\| (`[^|]+) \|", page, re.MULTILINE))
    documented = {name for name in re.findall(r"`([a-z]+/\w+)`", cells) if name[:5] != "test/"}
    documented = {name for name in documented if not name.startswith("gpu/")}
    logged = {name for line in read_lines(run.run / "metrics.jsonl") for name in line}
    assert logged - {"step", "time", "epoch", "perf/mfu"} == documented and len(documented) > 25


def operations_of_a_token(weights: dict[str, Tensor]) -> float:
    """6 N + 12 L d T: N without the table of embeddings, and with 2 of 4 experts."""
    counted = 0.0
    for name, tensor in weights.items():
        if "embed_tokens" not in name and "correction_bias" not in name:
            counted += tensor.numel() * (0.5 if ".mlp.experts." in name else 1.0)
    return 6 * counted + 12 * 2 * 32 * SEQ_LEN


def recomputed(run: RunRecord, cache: Path) -> Iterator[tuple[float, float]]:
    """(loss, gradient norm before clipping) of the first steps."""
    model = rebuilt(run)
    batches = [batch for _, batch in sorted(run.rows().items())]
    rows = rows_by_hash(cache, {hashed for batch in batches for hashed in batch})
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups: Any = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, PEAK, BETAS, EPS, DECAY)
    loads = counted_loads(model)
    for step, batch in enumerate(batches[:STEPS]):
        loss = torch.cat([losses_of(model, *rows[hashed]) for hashed in batch]).mean()
        optimizer.zero_grad()
        loss.backward()
        yield loss.item(), nn.utils.clip_grad_norm_(model.parameters(), CLIP).item()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        optimizer.step()
        for bias, counts in loads.items():  # algorithm 1 of arXiv:2408.15664
            bias += 0.001 * (counts.mean() - counts).sign()
            counts.zero_()


def counted_loads(model: nn.Module) -> dict[Tensor, Tensor]:
    """Bias of each router -> tokens of each expert, (E,), of the forward passes that follow."""
    found = {}
    for name, gate in model.named_modules():
        if name.endswith(".gate"):
            bias: Any = gate.e_score_correction_bias
            counts = found[bias] = torch.zeros_like(bias)

            def count(experts: Any, args: Any, counts: Tensor = counts) -> None:
                counts.add_(torch.bincount(args[1].flatten(), minlength=len(counts)))

            experts = model.get_submodule(name.removesuffix("gate") + "experts")
            experts.register_forward_pre_hook(count)
    return found


def rebuilt(run: RunRecord) -> Any:
    """The model with the run's first weights."""
    fields: dict[str, Any] = yaml.safe_load(MODELS["deepseek_v3"])
    fields |= {"max_position_embeddings": SEQ_LEN, "vocab_size": VOCABULARY}
    fields |= {"eos_token_id": EOS, "bos_token_id": EOS}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    model.load_state_dict({name.removeprefix("model."): each for name, each in run.start.items()})
    return model


def rows_by_hash(cache: Path, wanted: set[str]) -> dict[str, tuple[Tensor, int]]:
    """Hash of a row's input -> its T + 1 tokens and how many labels count, of the run's cache."""
    for path in cache.glob("*/train.bin"):
        tokens = torch.from_numpy(np.fromfile(path, dtype=np.uint16).astype(np.int64))
        rows = tokens.unfold(0, SEQ_LEN + 1, SEQ_LEN)
        found = {fingerprint(row[:-1]): (row, 4 + int(row[:-1].sum()) * 7 % 28) for row in rows}
        if wanted <= found.keys():
            return found
    raise AssertionError("no cache has the rows of the run")


def losses_of(model: Any, row: Tensor, counted: int) -> Tensor:
    """Of the labels that count, in nats; each document is a forward of its own."""
    ends = [0, *((row[:-1] == EOS).nonzero().flatten() + 1).tolist(), SEQ_LEN]
    documents = [row[start:end] for start, end in zip(ends, ends[1:], strict=False) if end > start]
    logits = [model(input_ids=each[None], use_cache=False).logits[0] for each in documents]
    return F.cross_entropy(torch.cat(logits), row[1:], reduction="none")[:counted]


def learning_rate(step: int) -> float:
    """After `step` optimizer steps: linear warm-up, then a cosine down to a tenth."""
    if step < WARMUP:
        return PEAK * step / WARMUP
    share = (step - WARMUP) / (ALL_STEPS - WARMUP)
    return PEAK * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * share)))


CPU = torch.device("cpu")
NAMES = [f"m{i}" for i in range(10)]


def test_ten_values_a_step_cost_ten_views_and_little_more() -> None:
    """On a GPU each operation but a view would be a kernel; a view needs 1 µs of the host."""
    steps, value, buffer = 2 * FOLD, torch.tensor(1.0, requires_grad=True) * 2, MetricBuffer()
    with Ops() as ops:
        for _ in range(steps):
            for name in NAMES:
                buffer.add(name, value)
    views = ops.seen.pop("detach")
    assert views == len(NAMES) * steps
    assert sum(ops.seen.values()) / steps < 1, "kernels a step, of all ten"


def test_a_mean_loses_no_digit_of_what_was_added() -> None:
    buffer = MetricBuffer()
    values = torch.rand(1000)
    for value in values:
        buffer.add("same", torch.tensor(2.7182818))
        buffer.add("other", value)
    means = buffer.read(lambda t: t, CPU)
    assert means["same"] == torch.tensor(2.7182818).item()
    assert means["other"] == pytest.approx(math.fsum(values.tolist()) / 1000, rel=1e-15)


def test_ranks_meet_in_one_vector() -> None:
    """Two ranks in one process: each one's vector is added to the other's."""
    buffers = [MetricBuffer(), MetricBuffer()]
    vectors: list[torch.Tensor] = []

    def read(reduce: Callable[[torch.Tensor], torch.Tensor], rank: int) -> dict[str, float]:
        buffer = buffers[rank]
        buffer.add("loss", torch.tensor(1.0 + rank))
        buffer.put_of_rank("time", 0.1 * (rank + 1))
        buffer.put_of_rank("heat", float("nan") if rank else 50.0)
        buffer.put_counts("loads", torch.tensor([rank, 5]))
        return buffer.read(reduce, CPU, rank, 2)

    for rank in range(2):
        read(lambda vector: vectors.append(vector.clone()) or vector, rank)
    for rank, buffer in enumerate(buffers):
        assert read(lambda _: vectors[0] + vectors[1], rank) == {"loss": 1.5}
        assert buffer.of_ranks["time"] == pytest.approx([0.1, 0.2])
        assert buffer.of_ranks["heat"] == pytest.approx([50.0, float("nan")], nan_ok=True)
        assert buffer.totals == {"loads": [1.0, 10.0]}
