"""One NVIDIA GPU: model FLOPs utilization, tokens per second and peak memory, beside a tuned loop and the peers.

First the roofline: the bf16 matrix products of that GPU, large and in each model's own shape. Then each model, in
bf16-mixed (weights and AdamW in fp32), compiled block by block, no checkpointing, rows without boundaries between
documents, so that every arm has flash attention: a hand-written loop; the project as shipped; Hugging Face's Trainer
with its defaults, and with `torch_compile`; litgpt's model in the hand-written loop, where litgpt is installed. `plan`:
the project without compile, whose peak memory and time are compared with the predictions of the verb `plan`. MFU
counts 6 N + 12 L d T operations a token (PaLM's convention) over the peak of `flops.py`.

The micro-batch is the largest whose memory `plan` finds room for. A result is written after each arm, and stays when
the next run measures other models (`--models 125M --arms project,hand`); an arm that runs out of memory is a row.

Targets: MFU of 0.45 for Llama-3.2-1B's shape at 4,096 tokens (published for 1 to 1.3 B: 0.38 to 0.40), 0.35 for 125M at
2,048, 0.46 for 3B at 4,096; a mixture of experts without a target. 0.985 of the hand-written loop's speed, 1.25 of
the Trainer's, 1.02 of the Trainer's with compile. `--quick` runs every line of it on a CPU at small sizes.

torchtitan 0.3.0 installs, but its trainer takes its data and its launch from its own configuration: it is no arm here.
"""

from __future__ import annotations

import gc
import importlib.util
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from trainer_dev.module import LanguageModule

from dist_template.cli.limits.machine import Machine as Described
from dist_template.errors import InputError
from dist_template.model.flops import Size, peak
from dist_template.parallel.estimates import estimate_of
from dist_template.parallel.estimates.candidates import Candidate
from dist_template.wings.plan.estimate import Machine, Planned
from dist_template.wings.plan.planner import Planner

from .arms import Comparison, Sample, quiet
from .gpu_models import MODELS, SMOKE, LitTask, Model, WholeRows
from .loops import hand, project, trainer
from .loops.task import Task, prepare
from .record import Figure, Options, Result, read, write

NAME = "gpu"
COMPILE = torch.compile
TARGETS = (("hand", 0.985), ("Trainer", 1.25), ("Trainer, compiled", 1.02))


@dataclass
class Measured:
    """One model's arms, so far."""

    title: str
    model: Model
    size: Size
    comparison: Comparison
    memory: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))  # GiB, by arm and round
    failed: dict[str, str] = field(default_factory=dict)  # by arm


def run(options: Options) -> Result:
    """Raises SystemExit where there is no GPU, unless every line is only to be run."""
    cuda = torch.cuda.is_available()
    if not cuda and not options.quick:
        raise SystemExit("gpu: there is no NVIDIA GPU here; --quick runs every line on a CPU, and measures nothing")
    result, models = earlier(options), chosen(SMOKE if options.quick else MODELS, options.models, "--models")
    large = 64 if options.quick else 8192
    roofline = Figure(
        f"matrix product {large} x {large} x {large}", [product_tflops((large,) * 3, cuda)], unit="TFLOP/s"
    )
    put(result, [roofline])
    print(f"  {roofline.what}: {roofline.median:.0f} {roofline.unit}", flush=True)
    name = torch.cuda.get_device_name() if cuda else "cpu"
    found = peak(name, "bf16-mixed")
    if not found:
        note(result, f"{name} is not in the table of flops.py: no MFU is reported")
    for title, given in models.items():
        result.figures = [each for each in result.figures if not each.what.startswith(f"{title}: ")]
        model = fitting(given, roofline.median * 1e12) if cuda else given
        if model is None:
            put(result, [Figure(f"{title}: a micro-batch of one row", [], instead="more memory than there is free")])
            continue
        sizes = model.architecture
        shape = (model.micro_batch * model.seq_len, sizes["hidden_size"], sizes["intermediate_size"])
        product = Figure(f"{title}: matrix product {' x '.join(map(str, shape))}", [product_tflops(shape, cuda)])
        put(result, [replace(product, unit="TFLOP/s")])
        size = Size.of(_skeleton(model))
        note(result, f"{title}: {size.total / 1e9:.2f} B parameters, {(size.active or 0) / 1e9:.2f} B active")
        measured = Measured(title, model, size, Comparison(title, "optimizer step", "hand"))

        def keep(measured: Measured = measured) -> None:
            put(result, figures(measured, found[0] if found else None, roofline.median * 1e12, cuda))
            samples = {arm: each for arm, each in measured.comparison.samples.items() if each}
            rounds = min(map(len, samples.values()), default=0)
            whole = {arm: each[:rounds] for arm, each in samples.items()}
            kept = replace(measured.comparison, reference="hand" if "hand" in whole else next(iter(whole), ""))
            result.comparisons = [other for other in result.comparisons if other.title != measured.title]
            if whole:
                result.comparisons.append(replace(kept, samples=whole))
            write(result, options)

        measure(measured, options, cuda, keep)
    return result


def earlier(options: Options) -> Result:
    """What runs for other models have written on this GPU; they are not measured again."""
    path = options.output / f"{NAME}.json"
    if path.exists():
        about, result = read(path)
        if about["machine"]["gpu"] == (torch.cuda.get_device_name() if torch.cuda.is_available() else None):
            return result
    return Result(NAME)


def chosen(things: dict[str, Any], names: str, flag: str) -> dict[str, Any]:
    """Those whose name is, or else has, one of `names`, which commas part; all for ""."""
    found = {} if names else things
    for name in filter(None, (each.strip().lower() for each in names.split(","))):
        exact = {key: value for key, value in things.items() if key.lower() == name}
        found |= exact or {key: value for key, value in things.items() if name in key.lower()}
    if not found:
        raise SystemExit(f"gpu: {flag} {names!r} names none of {', '.join(things)}")
    return found


def put(result: Result, figures: list[Figure]) -> None:
    """Adds figures in place of earlier ones of the same thing."""
    known = {figure.what for figure in figures}
    result.figures = [each for each in result.figures if each.what not in known] + figures


def note(result: Result, text: str) -> None:
    result.notes += [text] * (text not in result.notes)


def figures(measured: Measured, tflops: float | None, roofline: float, cuda: bool) -> list[Figure]:
    """Of all arms that have run: MFU, memory, plan against what was measured, speed of the project over others."""
    title, model, samples = measured.title, measured.model, measured.comparison.samples
    flops = measured.size.flops_per_token(model.seq_len)
    assert flops, "each of these models tells its layers, width and experts"
    found = [Figure(f"{title}: rows in a micro-batch", [model.micro_batch])]
    for arm, why in measured.failed.items():
        found.append(Figure(f"{title}: {arm}", [], instead=why))
    for arm, each in samples.items():
        if not each:
            continue
        speeds = [model.micro_batch * model.seq_len * flops / sample.wall_s / 1e12 for sample in each]
        least = model.mfu if arm == "project" else None
        if tflops:
            found.append(Figure(f"{title}: MFU, {arm}", [speed / tflops for speed in speeds], at_least=least))
        else:
            found.append(Figure(f"{title}: model's operations, {arm}", speeds, unit="TFLOP/s"))
        found.append(Figure(f"{title}: peak memory, {arm}", measured.memory[arm], unit="GiB"))
    if cuda and samples.get("plan"):
        planned = predicted(model, roofline)
        bytes_ = planned.total() - planned.parts()["allowance"]
        ratios = [bytes_ / 2**30 / gib for gib in measured.memory["plan"]]
        found.append(Figure(f"{title}: plan's memory over the measured", ratios))
        ratios = [planned.seconds() / sample.wall_s for sample in samples["plan"]]
        found.append(Figure(f"{title}: plan's time of a step over the measured", ratios))
    for other, least in TARGETS:
        pairs = [*zip(samples.get(other, []), samples.get("project", []), strict=False)]
        if pairs:
            speeds = [theirs.wall_s / ours.wall_s for theirs, ours in pairs]
            found.append(Figure(f"{title}: speed of project over {other}", speeds, at_least=least))
    return found


def fitting(model: Model, roofline: float) -> Model | None:
    """The model with the largest micro-batch, a power of 2, for which `plan` finds memory; None: there is not enough.

    At most four times the given one, which suits 80 GB: more rows are no faster."""
    free = torch.cuda.mem_get_info()[0]
    rows = 4 * model.micro_batch
    while rows:
        candidate = replace(model, micro_batch=rows)
        if predicted(candidate, roofline).total() <= free:
            return candidate
        rows //= 2
    return None


def predicted(model: Model, flops: float) -> Planned:
    """What `plan` says of the arm of that name."""
    data = SimpleNamespace(seq_len=model.seq_len, global_batch_size=model.micro_batch, cross_document_attention=True)
    planner = Planner(LanguageModule(architecture=model.architecture), data, {}, Described("cuda", 1, 1, "bf16-mixed"))
    memory = torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else 80e9
    machine = Machine(1, 1, memory, flops, 300e9, 40e9)
    return planner.option(Candidate("one device", "ddp", {}, estimate_of("ddp")), machine, model.micro_batch, "none")


def product_tflops(shape: tuple[int, int, int], cuda: bool) -> float:
    """The fastest of 20 (m, k) x (k, n) in bf16: the roofline."""
    m, k, n = shape
    device = "cuda" if cuda else "cpu"
    left = torch.randn(m, k, device=device, dtype=torch.bfloat16)
    right = torch.randn(k, n, device=device, dtype=torch.bfloat16)
    seconds = []
    for _ in range(25):
        began = _now(cuda)
        left @ right
        seconds.append(_now(cuda) - began)
    return 2 * m * k * n / min(seconds[5:]) / 1e12


def measure(measured: Measured, options: Options, cuda: bool, keep: Callable[[], None]) -> None:
    """Runs the chosen arms in each round, in a new order, and calls `keep` after each."""
    model, samples = measured.model, measured.comparison.samples
    with tempfile.TemporaryDirectory() as folder:
        task = WholeRows(
            Path(folder), model.architecture, 6 if options.quick else 40, 2 if options.quick else 15,
            model.micro_batch, model.seq_len, device="cuda" if cuda else "cpu", precision="bf16-mixed",
            flags=("--data.cross_document_attention=true",),
        )  # fmt: skip
        prepare(task, texts=40 * model.micro_batch)
        fast = replace(task, compile=True)
        arms: dict[str, Callable[[], Sample]] = {
            "project": partial(project.train, fast),
            "hand": partial(hand.train, fast),
            "plan": partial(project.train, task),
            "Trainer": partial(trainer.train, task),
            "Trainer, compiled": partial(trainer.train, fast),
        }
        if importlib.util.find_spec("litgpt") and model.architecture["model_type"] == "llama":
            arms["litgpt's model by hand"] = partial(hand.train, LitTask(**vars(fast)))
        arms = chosen(arms, options.arms, "--arms")
        samples |= {arm: [] for arm in arms}
        for number in range(1, options.rounds + 1):
            for arm in random.sample([*arms], len(arms)):
                if arm in measured.failed:
                    continue
                if sample := attempt(measured, arm, arms[arm], cuda):
                    samples[arm].append(sample)
                outcome = measured.failed.get(arm) or f"{samples[arm][-1].wall_s:.4f} s a step"
                print(f"  {measured.title}: round {number} of {options.rounds}: {arm}: {outcome}", flush=True)
                keep()


def attempt(measured: Measured, arm: str, train: Callable[[], Sample], cuda: bool) -> Sample | None:
    """Runs an arm with nothing left on the device from the one before; None if the memory did not suffice."""
    torch.compiler.reset()
    gc.collect()
    gc.unfreeze()
    gc.enable()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        with quiet(), patch.object(torch, "compile", torch.compile if cuda else traces):
            sample = train()
    except torch.OutOfMemoryError:
        measured.failed[arm] = f"out of memory with {measured.model.micro_batch} rows in a micro-batch"
        return None
    except InputError as error:  # the project's sentence for the same
        measured.failed[arm] = str(error)
        return None
    measured.memory[arm].append(torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0)
    return sample


def traces(function: Any = None, **options: Any) -> Any:
    """torch.compile without its back end, which takes minutes on a CPU."""
    return COMPILE(function, backend="eager")


def _skeleton(model: Model) -> nn.Module:
    with torch.device("meta"):
        return Task(Path(), model.architecture, seq_len=model.seq_len).build()


def _now(cuda: bool) -> float:
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter()
