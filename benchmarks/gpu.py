"""One NVIDIA GPU: model FLOPs utilization and peak memory, beside a tuned loop and Hugging Face's
Trainer.

First the roofline: the bf16 matrix products of that GPU. Then each model, in bf16-mixed (weights
and AdamW in fp32), compiled block by block, no checkpointing, rows without boundaries between
documents, so that every arm has flash attention: a hand-written loop; the project as shipped;
Hugging Face's Trainer with its defaults, and with `torch_compile`. `plan`: the project without
compile, whose peak memory and time are compared with the predictions of the verb `plan`. MFU counts
6 N + 12 L d T operations a token (PaLM's convention) over the peak of `flops.py`.

The micro-batch is the largest whose memory `plan` finds room for. A result is written after each
arm, and stays when the next run measures other models (`--models 125M --arms project,hand`); an arm
that runs out of memory is a row.

Targets: MFU of 0.45 for Llama-3.2-1B's shape at 4,096 tokens (published for 1 to 1.3 B: 0.38 to
0.40), 0.35 for 125M at 2,048, 0.46 for 3B at 4,096; a mixture of experts without a target. 0.985 of
the hand-written loop's speed, 1.25 of the Trainer's, 1.02 of the Trainer's with compile. `--quick`
runs every line of it on a CPU at small sizes.
"""

import gc
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from trainer_dev.module import LanguageModule

from dist_template.cli.limits.machine import Machine as Described
from dist_template.errors import InputError
from dist_template.model.flops import Size, peak
from dist_template.parallel.spec import spec_of
from dist_template.parallel.spec.candidates import Candidate
from dist_template.text.batches.rows import PackedRows
from dist_template.wings.plan.estimate import Machine, Planned
from dist_template.wings.plan.planner import Planner

from .arms import Clock, Comparison, Sample, quiet
from .loops import hand, project, trainer
from .loops.task import Task, prepare
from .record import Figure, Options, Result, gpu_name, read, write

NAME = "gpu"
TARGETS = (("hand", 0.985), ("Trainer", 1.25), ("Trainer, compiled", 1.02))


@dataclass
class Model:
    """What is trained, and what its arms took so far."""

    architecture: dict[str, Any]
    seq_len: int
    micro_batch: int
    mfu: float | None = None  # target
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    memory: dict[str, list[float]] = field(default_factory=dict)  # GiB, by arm and round
    failed: dict[str, str] = field(default_factory=dict)  # by arm


def llama(
    width: int, inner: int, layers: int, heads: int, kv_heads: int, vocabulary: int
) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "tie_word_embeddings": True,
    }


EXPERTS = {  # 4.0 B parameters, 1.0 B of them active for a token
    "model_type": "deepseek_v3", "hidden_size": 1536, "intermediate_size": 6144,
    "moe_intermediate_size": 1024,
    "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16,
    "q_lora_rank": 768,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "first_k_dense_replace": 1, "n_routed_experts": 32, "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "n_group": 1, "topk_group": 1, "num_mtp_layers": 0, "vocab_size": 65536,
}  # fmt: skip
MODELS = {
    "Llama-3.2-1B": Model(llama(2048, 8192, 16, 32, 8, 128256), 4096, 8, 0.45),
    "125M": Model(llama(768, 2048, 12, 12, 12, 50304), 2048, 32, 0.35),
    "3B": Model(llama(3072, 8192, 28, 24, 8, 128256), 4096, 2, 0.46),
    "DeepSeek-V3 style, 1B active": Model(EXPERTS, 4096, 1),
}
QUICK = {"Llama-3.2-1B": Model(llama(64, 128, 2, 4, 2, 257), 32, 2, 0.45)}


class WholeRows(Task):
    """Rows whose documents may see each other; `project` gets the same by its flag."""

    @property
    def rows(self) -> PackedRows:
        rows = super().rows
        return PackedRows(
            rows.tokens, self.seq_len, rows.eos_token_id, cross_document_attention=True
        )


def run(options: Options) -> Result:
    """Raises SystemExit where there is no GPU, unless every line is only to be run."""
    cuda = torch.cuda.is_available()
    if not cuda and not options.quick:
        raise SystemExit(
            "gpu: there is no NVIDIA GPU here; --quick runs every line on a CPU, and measures"
            " nothing"
        )
    result, path = Result(NAME), options.output / f"{NAME}.json"
    if path.exists() and read(path)[0]["machine"]["gpu"] == gpu_name():
        result = read(path)[1]  # of other models
    roofline = product_flops(64 if options.quick else 8192, cuda)
    result.put(Figure("matrix product in bf16", [roofline / 1e12], unit="TFLOP/s"))
    for title, model in chosen(
        QUICK if options.quick else MODELS, options.models, "--models"
    ).items():
        result.figures = [each for each in result.figures if not each.what.startswith(f"{title}: ")]
        if cuda and not fit_to_memory(model, roofline):
            result.put(
                Figure(
                    f"{title}: a micro-batch of one row",
                    [],
                    instead="more memory than there is free",
                )
            )
            continue
        measure(title, model, options, partial(keep, title, model, options, result, roofline))
    return result


def chosen(things: dict[str, Any], names: str, flag: str) -> dict[str, Any]:
    """Returns the things that `names`, which commas part, names in full, or else in part; all for
    ""."""
    wanted = [each.strip().lower() for each in names.split(",")]
    found = {key: each for key, each in things.items() if key.lower() in wanted}
    found = found or {
        key: each for key, each in things.items() if any(part in key.lower() for part in wanted)
    }
    if not found:
        raise SystemExit(f"gpu: {flag} {names!r} names none of {', '.join(things)}")
    return found


def keep(title: str, model: Model, options: Options, result: Result, roofline: float) -> None:
    """Writes what has been measured so far."""
    result.put(*figures(title, model, roofline))
    samples = {arm: each for arm, each in model.samples.items() if each}
    rounds = min(map(len, samples.values()), default=0)
    result.comparisons = [other for other in result.comparisons if other.title != title]
    if rounds:
        reference = "hand" if "hand" in samples else next(iter(samples))
        complete = {arm: each[:rounds] for arm, each in samples.items()}
        result.comparisons.append(Comparison(title, "optimizer step", reference, complete))
    write(result, options)


def figures(title: str, model: Model, roofline: float) -> list[Figure]:
    """Of all arms that have run: MFU, memory, plan against what was measured, speed of the project
    over others."""
    with torch.device("meta"):
        flops = Size.of(
            Task(Path(), model.architecture, seq_len=model.seq_len).build()
        ).flops_per_token(model.seq_len)
    assert flops, "each of these models tells its layers, width and experts"
    most, samples = peak(gpu_name() or "cpu", "bf16-mixed"), model.samples
    found = [Figure(f"{title}: rows in a micro-batch", [model.micro_batch])]
    found += [Figure(f"{title}: {arm}", [], instead=why) for arm, why in model.failed.items()]
    for arm in filter(samples.get, samples):
        speeds = [
            model.micro_batch * model.seq_len * flops / sample.wall_s / 1e12
            for sample in samples[arm]
        ]
        found.append(Figure(f"{title}: model's operations, {arm}", speeds, unit="TFLOP/s"))
        if most:
            least = model.mfu if arm == "project" else None
            found.append(
                Figure(f"{title}: MFU, {arm}", [speed / most for speed in speeds], at_least=least)
            )
        found.append(Figure(f"{title}: peak memory, {arm}", model.memory[arm], unit="GiB"))
    if torch.cuda.is_available() and samples.get("plan"):
        planned = predicted(model, roofline)
        gib = (planned.total() - planned.parts()["allowance"]) / 2**30
        times = [planned.seconds() / sample.wall_s for sample in samples["plan"]]
        found.append(
            Figure(
                f"{title}: plan's memory over the measured",
                [gib / each for each in model.memory["plan"]],
            )
        )
        found.append(Figure(f"{title}: plan's time of a step over the measured", times))
    for other, least in TARGETS:
        pairs = zip(samples.get(other, []), samples.get("project", []), strict=False)
        if speeds := [theirs.wall_s / ours.wall_s for theirs, ours in pairs]:
            found.append(Figure(f"{title}: speed of project over {other}", speeds, at_least=least))
    return found


def fit_to_memory(model: Model, roofline: float) -> bool:
    """Sets the largest micro-batch for which `plan` finds memory, at most four times the one for 80
    GB."""
    model.micro_batch *= 4
    while model.micro_batch and predicted(model, roofline).total() > torch.cuda.mem_get_info()[0]:
        model.micro_batch //= 2
    return bool(model.micro_batch)


def predicted(model: Model, flops: float) -> Planned:
    """What `plan` says of the arm of that name."""
    data = SimpleNamespace(
        seq_len=model.seq_len, global_batch_size=model.micro_batch, cross_document_attention=True
    )
    planner = Planner(
        LanguageModule(architecture=model.architecture),
        data,
        {},
        Described("cuda", 1, 1, "bf16-mixed"),
    )
    machine = Machine(1, 1, torch.cuda.mem_get_info()[1], flops, 300e9, 40e9)
    return planner.option(
        Candidate("one device", "ddp", {}, spec_of("ddp")), machine, model.micro_batch, "none"
    )


def product_flops(size: int, cuda: bool) -> float:
    """Operations per second of the fastest of 20 matrix products in bf16."""
    left, right = torch.randn(2, size, size, device="cuda" if cuda else "cpu", dtype=torch.bfloat16)
    clock, wait, seconds = Clock(), torch.cuda.synchronize if cuda else int, []
    for _ in range(25):
        clock.start()
        left @ right
        wait()
        seconds.append(clock.stop().wall_s)
    return 2 * size**3 / min(seconds[5:])


def measure(title: str, model: Model, options: Options, keep: Callable[[], None]) -> None:
    """Runs the chosen arms in each round, in a new order, and calls `keep` after each."""
    cuda = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        task = WholeRows(
            Path(folder),
            model.architecture,
            6 if options.quick else 40,
            2 if options.quick else 15,
            model.micro_batch,
            model.seq_len,
            device="cuda" if cuda else "cpu",
            precision="bf16-mixed",
            flags=("--data.cross_document_attention=true",),
        )
        prepare(task, texts=40 * model.micro_batch)
        fast = replace(task, compile=True)
        arms: dict[str, Callable[[], Sample]] = {
            "project": partial(project.train, fast),
            "hand": partial(hand.train, fast),
            "plan": partial(project.train, task),
            "Trainer": partial(trainer.train, task),
            "Trainer, compiled": partial(trainer.train, fast),
        }
        arms = chosen(arms, options.arms, "--arms")
        model.samples, model.memory = {arm: [] for arm in arms}, {arm: [] for arm in arms}
        for number in range(1, options.rounds + 1):
            for arm in random.sample([*arms], len(arms)):
                if arm not in model.failed:
                    attempt(model, arm, arms[arm], cuda)
                    outcome = (
                        model.failed.get(arm) or f"{model.samples[arm][-1].wall_s:.4f} s a step"
                    )
                    print(
                        f"  {title}: round {number} of {options.rounds}: {arm}: {outcome}",
                        flush=True,
                    )
                    keep()


def attempt(model: Model, arm: str, train: Callable[[], Sample], cuda: bool) -> None:
    """Runs an arm with nothing left on the device from the one before."""
    torch.compiler.reset()
    gc.collect()
    gc.unfreeze()
    gc.enable()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    # minutes on a CPU
    compile_ = torch.compile if cuda else partial(torch.compile, backend="eager")
    try:
        # Without the project's resets of the peak, one for each metric of it.
        with (
            quiet(),
            patch.object(torch, "compile", compile_),
            patch.object(torch.cuda, "reset_peak_memory_stats"),
        ):
            model.samples[arm].append(train())
        model.memory[arm].append(torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0)
    except torch.OutOfMemoryError:
        model.failed[arm] = f"out of memory with {model.micro_batch} rows"
    except InputError as error:  # the project's sentence for the same
        model.failed[arm] = str(error)
