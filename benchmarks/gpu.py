"""One NVIDIA GPU: model FLOPs utilization, tokens per second and peak memory, beside a tuned loop and the peers.

First the roofline: the bf16 matrix products of that GPU, large and in each model's own shape. Then each model, in
bf16-mixed (weights and AdamW in fp32), compiled block by block, no checkpointing, rows without boundaries between
documents, so that every arm has flash attention: by hand; by the project as shipped; by Hugging Face's Trainer with its
defaults, and with `torch_compile`; litgpt's model in the hand-written loop, where litgpt is installed. `plan`: the
project without compile, whose peak memory and time are set against what the verb `plan` predicts from the roofline. MFU
counts 6 N + 12 L d T operations a token (PaLM's convention) over the peak of `flops.py`.

Targets: MFU of 0.45 for Llama-3.2-1B's shape at 4,096 tokens (published for 1 to 1.3 B: 0.38 to 0.40), 0.35 for 125M at
2,048, 0.46 for 3B at 4,096; a mixture of experts with its figure told. 0.985 of the hand-written loop's speed, 1.25 of
the Trainer's, 1.02 of the Trainer's with compile. `--quick` runs every line of it on a CPU at small sizes.

torchtitan 0.3.0 installs, but its trainer takes its data and its launch from its own configuration: it is no arm here.
"""

from __future__ import annotations

import gc
import importlib.util
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from trainer_dev.module import LanguageModule

from dist_template.cli.limits.machine import Machine as Described
from dist_template.model.flops import Size, peak
from dist_template.text.batches.rows import PackedRows
from dist_template.tools.plan.candidates import Candidate
from dist_template.tools.plan.estimate import Machine, Planned
from dist_template.tools.plan.planner import Planner

from .arms import Comparison, Sample, compare
from .loops import hand, project, trainer
from .loops.task import Task, prepare
from .record import Figure, Options, Result

NAME = "gpu"
COMPILE = torch.compile


@dataclass(frozen=True)
class Model:
    """What is trained, and the least MFU that it should reach; None: the figure is told."""

    architecture: dict[str, Any]
    seq_len: int
    micro_batch: int
    mfu: float | None = None


def llama(width: int, inner: int, layers: int, heads: int, kv_heads: int, vocabulary: int) -> dict[str, Any]:
    return {
        "model_type": "llama", "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocabulary,
        "tie_word_embeddings": True,
    }  # fmt: skip


MODELS = {
    "Llama-3.2-1B": Model(llama(2048, 8192, 16, 32, 8, 128256), 4096, 8, 0.45),
    "125M": Model(llama(768, 2048, 12, 12, 12, 50304), 2048, 32, 0.35),
    "3B": Model(llama(3072, 8192, 28, 24, 8, 128256), 4096, 2, 0.46),
    "DeepSeek-V3 style, 1B active": Model(  # 4.0 B parameters, 1.0 B of them active for a token
        {
            "model_type": "deepseek_v3", "hidden_size": 1536, "intermediate_size": 6144, "moe_intermediate_size": 1024,
            "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": 768,
            "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
            "first_k_dense_replace": 1, "n_routed_experts": 32, "num_experts_per_tok": 4, "n_shared_experts": 1,
            "n_group": 1, "topk_group": 1, "num_mtp_layers": 0, "vocab_size": 65536,
        },
        4096, 1,
    ),
}  # fmt: skip
SMOKE = {  # of the same kinds
    "Llama-3.2-1B": Model(llama(64, 128, 2, 4, 2, 257), 32, 2, 0.45),
    "DeepSeek-V3 style, 1B active": Model(
        MODELS["DeepSeek-V3 style, 1B active"].architecture
        | {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2,
           "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 32, "kv_lora_rank": 32,
           "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 4,
           "num_experts_per_tok": 2, "vocab_size": 257},
        32, 2,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class WholeRows(Task):
    """Rows whose documents may see each other; `project` gets the same by its flag."""

    @property
    def rows(self) -> PackedRows:
        rows = super().rows
        return PackedRows(rows.tokens, self.seq_len, rows.eos_token_id, cross_document_attention=True)


def run(options: Options) -> Result:
    """Raises SystemExit where there is no GPU, unless every line is only to be run."""
    cuda = torch.cuda.is_available()
    if not cuda and not options.quick:
        raise SystemExit("gpu: there is no NVIDIA GPU here; --quick runs every line on a CPU, and measures nothing")
    result = Result(NAME)
    large = 64 if options.quick else 8192
    roofline = Figure(
        f"matrix product {large} x {large} x {large}", [product_tflops((large,) * 3, cuda)], unit="TFLOP/s"
    )
    result.figures.append(roofline)
    print(f"  {roofline.what}: {roofline.median:.0f} {roofline.unit}", flush=True)
    name = torch.cuda.get_device_name() if cuda else "cpu"
    found = peak(name, "bf16-mixed")
    tflops = found[0] if found else None
    if not tflops:
        result.notes.append(f"{name} is not in the table of flops.py: no MFU is told")
    for title, model in (SMOKE if options.quick else MODELS).items():
        size = Size.of(_skeleton(model))
        rows = model.micro_batch * model.seq_len
        shape = (rows, model.architecture["hidden_size"], model.architecture["intermediate_size"])
        reached = product_tflops(shape, cuda)
        result.figures.append(Figure(f"matrix product {' x '.join(map(str, shape))}", [reached], unit="TFLOP/s"))
        comparison, memory = measure(title, model, options, cuda)
        result.comparisons.append(comparison)
        flops = size.flops_per_token(model.seq_len)
        assert flops, "each of these models tells its layers, width and experts"
        result.notes.append(f"{title}: {size.total / 1e9:.2f} B parameters, {(size.active or 0) / 1e9:.2f} B active")
        for arm, samples in comparison.samples.items():
            speeds = [rows * flops / sample.wall_s / 1e12 for sample in samples]
            least = model.mfu if arm == "project" else None
            if tflops:
                result.figures.append(Figure(f"{title}: MFU, {arm}", [s / tflops for s in speeds], at_least=least))
            else:
                result.figures.append(Figure(f"{title}: model's operations, {arm}", speeds, unit="TFLOP/s"))
            result.figures.append(Figure(f"{title}: peak memory, {arm}", memory[arm], unit="GiB"))
        planned = predicted(model, roofline.median * 1e12)
        if cuda:
            bytes_ = planned.total() - planned.parts()["allowance"]
            ratios = [bytes_ / 2**30 / measured for measured in memory["plan"]]
            result.figures.append(Figure(f"{title}: plan's memory over the measured", ratios))
            ratios = [planned.seconds() / sample.wall_s for sample in comparison.samples["plan"]]
            result.figures.append(Figure(f"{title}: plan's time of a step over the measured", ratios))
        for other, least in (("hand", 0.985), ("Trainer", 1.25), ("Trainer, compiled", 1.02)):
            speeds = comparison.wall_ratios(other, "project")
            result.figures.append(Figure(f"{title}: speed of project over {other}", speeds, at_least=least))
    return result


def predicted(model: Model, flops: float) -> Planned:
    """What `plan` says of the arm of that name."""
    data = SimpleNamespace(
        seq_len=model.seq_len, global_batch_size=model.micro_batch, cross_document_attention=True
    )  # fmt: skip
    planner = Planner(LanguageModule(architecture=model.architecture), data, {}, Described("cuda", 1, 1, "bf16-mixed"))
    machine = Machine(1, 1, 80e9, flops, flops, 300e9, 40e9)
    return planner.option(Candidate("one device", "ddp", {}), machine, model.micro_batch, "none")


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


def measure(title: str, model: Model, options: Options, cuda: bool) -> tuple[Comparison, dict[str, list[float]]]:
    """Times, and peak memory in GiB, of each arm in each round."""
    memory: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        task = WholeRows(
            Path(folder), model.architecture, 6 if options.quick else 40, 2 if options.quick else 15,
            model.micro_batch, model.seq_len, device="cuda" if cuda else "cpu", precision="bf16-mixed",
            flags=("--data.cross_document_attention=true",),
        )  # fmt: skip
        prepare(task, texts=40 * model.micro_batch)
        fast = replace(task, compile=True)
        arms: dict[str, Callable[[], Sample]] = {
            "hand": partial(hand.train, fast),
            "project": partial(project.train, fast),
            "plan": partial(project.train, task),
            "Trainer": partial(trainer.train, task),
            "Trainer, compiled": partial(trainer.train, fast),
        }
        if cuda and importlib.util.find_spec("liger_kernel"):
            by_liger = replace(fast, flags=(*fast.flags, "--model.loss_kernel=liger"))
            arms["project, Liger's loss"] = partial(project.train, by_liger)
        if importlib.util.find_spec("litgpt") and model.architecture["model_type"] == "llama":
            arms["litgpt's model by hand"] = partial(hand.train, LitTask(**vars(fast)))
        alone = {name: partial(remember, arm, memory[name], cuda) for name, arm in arms.items()}
        compiles = torch.compile if cuda else traces
        with patch.object(torch, "compile", compiles):
            return compare(Comparison(title, "optimizer step", "hand"), alone, options.rounds, warm=False), memory


def traces(function: Any = None, **options: Any) -> Any:
    """torch.compile without its back end, which takes minutes on a CPU."""
    return COMPILE(function, backend="eager")


def remember(arm: Callable[[], Sample], memory: list[float], cuda: bool) -> Sample:
    """Run `arm` with nothing left on the device from the one before."""
    torch.compiler.reset()
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    sample = arm()
    memory.append(torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0)
    return sample


def _skeleton(model: Model) -> nn.Module:
    with torch.device("meta"):
        return Task(Path(), model.architecture, seq_len=model.seq_len).build()


def _now(cuda: bool) -> float:
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


class LitTask(WholeRows):
    """The same training of litgpt's own model, of the same shape."""

    def build(self) -> nn.Module:
        from litgpt.config import Config
        from litgpt.model import GPT

        assert self.architecture
        told = self.architecture
        config = Config(
            block_size=self.seq_len, n_layer=told["num_hidden_layers"], n_embd=told["hidden_size"],
            n_head=told["num_attention_heads"], n_query_groups=told["num_key_value_heads"],
            intermediate_size=told["intermediate_size"], vocab_size=told["vocab_size"],
            padded_vocab_size=told["vocab_size"], mlp_class_name="LLaMAMLP", norm_class_name="RMSNorm",
            rotary_percentage=1.0, parallel_residual=False, bias=False,
        )  # fmt: skip
        torch.manual_seed(0)
        gpt = GPT(config)
        gpt.lm_head.weight = gpt.transformer.wte.weight  # tied, as in the others
        return LitModel(gpt)


class LitModel(nn.Module):
    """litgpt's model, called as transformers' are."""

    def __init__(self, gpt: Any) -> None:
        super().__init__()
        self.gpt = gpt

    @property
    def model(self) -> Any:
        return SimpleNamespace(layers=self.gpt.transformer.h)

    def forward(self, input_ids: Tensor, position_ids: Tensor, use_cache: bool) -> Any:
        return SimpleNamespace(logits=self.gpt(input_ids))
