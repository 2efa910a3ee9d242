"""What is logged equals what plain PyTorch computes from the same weights and the same text.

Nothing of the package takes part in the computation: documents of a packed row go through the
model one by one, so there is no mask; AdamW, clipping and the schedule are spelled out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
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
from dist_template.wings.rehearse.recorder import fingerprint
from tests.support.library import read_metrics
from tests.support.parity import CLIP, GLOBAL_BATCH, MODELS, Trainings
from tests.support.tiers import tiers
from tests.support.wings import RunRecord

# Of the fixture's trainings.
SEQ_LEN, VOCABULARY, EOS = 32, 257, 256
PEAK, WARMUP, ALL_STEPS, FLOOR, BETAS, EPS, DECAY = 0.01, 5, 20, 0.1, (0.9, 0.95), 1e-8, 0.1
STEPS = 8  # that are computed


PEAK_TFLOPS = 0.25  # that a device is said to have: a CPU has none, and so no MFU


class WithAPeak(Callback):
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        (throughput,) = (each for each in trainer.callbacks if isinstance(each, Throughput))
        throughput._peak_tflops = PEAK_TFLOPS


@pytest.fixture(
    scope="module", params=tiers(["ddp", "fsdp2_ep", "zero2"], daily=["fsdp2_ep", "zero2"])
)
def run(request: pytest.FixtureRequest, train: Trainings) -> RunRecord:  # noqa: F811
    flags = [f"--trainer.max_steps={ALL_STEPS}", "--trainer.val_check_interval=10"]
    return train.run("fit", "deepseek_v3", request.param, *flags, callbacks=[WithAPeak()])


@pytest.mark.slow
def test_loss_norm_and_tokens_equal_an_independent_computation(run: RunRecord, cache: Path) -> None:
    metrics = read_metrics(run.run)
    loss, norm = zip(*recomputed(run, cache), strict=True)
    steps = range(1, STEPS + 1)
    expected = {
        "train/loss": (loss, 1e-5), "train/perplexity": ([math.exp(each) for each in loss], 1e-4),
        "train/grad_norm": (norm, 1e-4),
        "train/learning_rate": ([learning_rate(step) for step in steps], 1e-9),
        "train/tokens": ([step * GLOBAL_BATCH * SEQ_LEN for step in steps], 1e-9),
    }  # fmt: skip
    for name, (values, tolerance) in expected.items():
        assert metrics[name].steps.tolist() == list(range(1, ALL_STEPS + 1)), name
        assert metrics[name].values[:STEPS].tolist() == pytest.approx(list(values), rel=tolerance)


@pytest.mark.slow
def test_mfu_follows_from_a_clock_and_a_count_of_multiplications(run: RunRecord) -> None:
    """By the clock of metrics.jsonl's lines, and a count of the first checkpoint's weights."""
    metrics = read_metrics(run.run)
    mfu, times = metrics["perf/mfu"], metrics["train/loss"].times
    seconds = dict(zip(range(2, ALL_STEPS + 1), np.diff(times).tolist(), strict=True))
    alone = [
        i for i, step in enumerate(mfu.steps.tolist()) if step > 1 and step % 10 > 1
    ]  # not beside a validation
    per_device = GLOBAL_BATCH * SEQ_LEN / 2 * operations_of_a_token(run.start) / 1e12 / PEAK_TFLOPS
    ratios = [
        mfu.values[i] * seconds[int(mfu.steps[i])] / per_device for i in alone
    ]  # step by step: a busy machine
    assert np.median(ratios) == pytest.approx(1, rel=0.15)  # slows both
    tflops = (
        metrics["perf/tokens_per_s_per_device"].values * operations_of_a_token(run.start) / 1e12
    )
    assert metrics["perf/model_tflops"].values == pytest.approx(tflops, rel=1e-9)
    assert mfu.values == pytest.approx(tflops / PEAK_TFLOPS, rel=1e-9)


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
    batches = [[hashed for hashed, _ in batch] for _, batch in sorted(run.rows().items())]
    rows = rows_by_hash(cache, {hashed for batch in batches for hashed in batch})
    moments = {
        name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in model.named_parameters()
    }
    loads = counted_loads(model)
    for step, batch in enumerate(batches[:STEPS], start=1):
        losses = torch.cat([losses_of(model, *rows[hashed]) for hashed in batch])
        loss = losses.mean()
        model.zero_grad()
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))
        yield loss.item(), norm
        adamw(model, moments, step, min(1.0, CLIP / norm))
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

            model.get_submodule(name.removesuffix("gate") + "experts").register_forward_pre_hook(
                count
            )
    return found


def rebuilt(run: RunRecord) -> Any:
    """The model with the run's first weights."""
    fields: dict[str, Any] = yaml.safe_load(MODELS["deepseek_v3"])
    fields |= {
        "max_position_embeddings": SEQ_LEN, "vocab_size": VOCABULARY, "eos_token_id": EOS,
        "bos_token_id": EOS,
    }  # fmt: skip
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    model.load_state_dict(
        {name.removeprefix("model."): tensor for name, tensor in run.start.items()}
    )
    return model


def rows_by_hash(cache: Path, wanted: set[str]) -> dict[str, tuple[Tensor, int]]:
    """Hash of a row's input -> its T + 1 tokens, and how many of its labels count.

    Of the cache that has all `wanted`: other tests' caches have some of them.
    """
    for path in cache.glob("*/train.bin"):
        tokens = torch.from_numpy(np.fromfile(path, dtype=np.uint16).astype(np.int64))
        rows = [
            tokens[start : start + SEQ_LEN + 1]
            for start in range(0, len(tokens) - SEQ_LEN, SEQ_LEN)
        ]
        found = {fingerprint(row[:-1]): (row, 4 + int(row[:-1].sum()) * 7 % 28) for row in rows}
        if wanted <= found.keys():
            return found
    raise AssertionError("no cache has the rows of the run")


def losses_of(model: Any, row: Tensor, counted: int) -> Tensor:
    """Of the labels that count, in nats; each document is a forward of its own."""
    ends = [0, *((row[:-1] == EOS).nonzero().flatten() + 1).tolist(), SEQ_LEN]
    documents = [row[start:end] for start, end in zip(ends, ends[1:], strict=False) if end > start]
    logits = torch.cat(
        [model(input_ids=document[None], use_cache=False).logits[0] for document in documents]
    )
    return F.cross_entropy(logits, row[1:], reduction="none")[:counted]


def learning_rate(step: int) -> float:
    """After `step` optimizer steps: linear warm-up, then a cosine down to a tenth."""
    if step < WARMUP:
        return PEAK * step / WARMUP
    share = (step - WARMUP) / (ALL_STEPS - WARMUP)
    return PEAK * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * share)))


@torch.no_grad()
def adamw(
    model: nn.Module, moments: dict[str, tuple[Tensor, Tensor]], step: int, factor: float
) -> None:
    """Algorithm 2 of arXiv:1711.05101, on gradients times `factor`; vectors do not decay."""
    rate = learning_rate(step - 1)
    for name, weight in model.named_parameters():
        gradient = (torch.zeros_like(weight) if weight.grad is None else weight.grad) * factor
        first, second = moments[name]
        first.mul_(BETAS[0]).add_(gradient * (1 - BETAS[0]))
        second.mul_(BETAS[1]).add_(gradient.square() * (1 - BETAS[1]))
        weight.mul_(1 - rate * DECAY * (weight.dim() > 1))
        denominator = (second / (1 - BETAS[1] ** step)).sqrt() + EPS
        weight.sub_(rate * first / (1 - BETAS[0] ** step) / denominator)
