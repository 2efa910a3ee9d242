"""What a model's own step costs: the loss in chunks, compilation block by block, experts as grouped products.

The loss: a small Llama with a large vocabulary, tied embeddings, one forward and backward. Arms: all logits at once, in
chunks, and both compiled. Targets: the chunks hold at most 0.7 of the memory, at equal speed.

Compilation: the first step of a Llama of 16 blocks, as many as Llama-3.2-1B has. These compiled, which is what
`model.blocks.compile` does, against the whole model, nothing cached; CPU time, the C++ compiler's with it. Target: at
most 0.35. The share falls with the number of blocks: equal ones are compiled once.

Experts: the quickstart's grouped products against a loop over experts, which also waits for the device in each layer.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from .arms import Clock, Comparison, Sample, compare
from .record import Figure, Options, Result

NAME = "model"
LLAMA = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
VOCABULARY, ROWS, SEQ_LEN, CHUNK = 32_768, 4, 512, 512


def run(options: Options) -> Result:
    torch.set_num_threads(1)
    with patch.object(torch, "compile", partial(torch.compile, backend="eager" if options.quick else "inductor")):
        return measure(options)


def measure(options: Options) -> Result:
    loss, peaks = loss_in_chunks(options)
    first, experts = first_step(options), grouped_experts(options)
    figures = [
        Figure("loss in chunks: peak memory over all logits at once", [peaks["chunks"] / peaks["whole"]], at_most=0.7),
        Figure(
            "loss in chunks: speed over all logits at once, by CPU time",
            loss.cpu_ratios("whole", "chunks"),
            at_least=0.97,
        ),
        Figure("the same, both compiled", loss.cpu_ratios("whole, compiled", "chunks, compiled"), at_least=0.97),
        Figure("first step: blocks compiled over the whole compiled", first.cpu_ratios("blocks"), at_most=0.35),
        Figure("experts: speed of grouped products over a loop", experts.cpu_ratios("loop", "grouped"), at_least=1),
    ]
    notes = ["peak memory: bytes that torch's tensors hold at most, its kernels' own included, weights left out"]
    return Result(NAME, [loss, first, experts], figures, notes)


def measured(work: Callable[[], Any], times: int) -> Sample:
    work()
    clock = Clock()
    clock.start()
    for _ in range(times):
        work()
    return clock.stop(times)


# ---- the loss ------------------------------------------------------------------------------------------------------


def loss_in_chunks(options: Options) -> tuple[Comparison, dict[str, int]]:
    """The comparison, and each arm's bytes."""
    from trainer_dev.module import LanguageModule
    from transformers import AutoConfig, AutoModelForCausalLM

    from dist_template.text.model.head import ChunkedLoss
    from tests.support.modules import hidden_states
    from tests.support.operations import peak_bytes

    vocabulary = VOCABULARY // 16 if options.quick else VOCABULARY
    config = AutoConfig.for_model(
        "llama", hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=vocabulary, tie_word_embeddings=True,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    tokens = torch.randint(0, vocabulary, (ROWS, SEQ_LEN))
    sums = LanguageModule().sums
    compiled = torch.compile(sums)

    def step(sums: Callable[[Tensor, Tensor], dict[str, Tensor]], chunk: int | None) -> None:
        def forward() -> Tensor:
            return model(input_ids=tokens, use_cache=False).logits

        model.zero_grad()
        chunked_loss = ChunkedLoss(model, sums, chunk)
        if chunk:
            loss = chunked_loss(hidden_states(model, forward), tokens)["loss"]
        else:
            loss = sums(forward(), tokens)["loss"]
        (loss / tokens.numel()).backward()

    steps = {
        "whole": partial(step, sums, None),
        "chunks": partial(step, sums, CHUNK),
        "whole, compiled": partial(step, compiled, None),
        "chunks, compiled": partial(step, compiled, CHUNK),
    }
    peaks = {name: peak_bytes(work) for name, work in steps.items()}
    arms = {name: partial(measured, work, 1 if options.quick else 3) for name, work in steps.items()}
    title = f"loss of {tokens.numel()} tokens, vocabulary {vocabulary}, chunks of {CHUNK}, forward and backward"
    return compare(Comparison(title, "step", "whole"), arms, options.rounds, warm=not options.quick), peaks


# ---- compilation ---------------------------------------------------------------------------------------------------


def first_step(options: Options) -> Comparison:
    from torch._inductor import config as inductor

    from dist_template.parallel.blocks import BlockConfig, wrap_blocks

    inductor.force_disable_caches = True
    inductor.compile_threads = 1  # a pool of processes would be warm for the second arm alone
    torch.compile(lambda x: x.sin().sum())(torch.ones(8, requires_grad=True)).backward()  # the compiler's own start

    def arm(by_blocks: bool) -> Sample:
        torch._dynamo.reset()
        model = model_of(LLAMA | ({"num_hidden_layers": 2} if options.quick else {}))
        call = model
        if by_blocks:
            wrap_blocks(model, BlockConfig(compile=True))
        else:
            call = torch.compile(model)
        cpu, wall = cpu_s(), time.perf_counter()
        train(call)
        return Sample(cpu_s() - cpu, time.perf_counter() - wall)

    arms = {"blocks": partial(arm, True), "whole": partial(arm, False)}
    comparison = Comparison(f"{LLAMA['num_hidden_layers']} blocks, nothing compiled before", "first step", "whole")
    return compare(comparison, arms, min(options.rounds, 2), warm=False)


def cpu_s() -> float:
    """Of this process and those it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def model_of(architecture: dict[str, Any], **options: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**architecture, vocab_size=2048)
    return AutoModelForCausalLM.from_config(config, **options).train()


def train(model: Any) -> None:
    """Forward and backward of two rows that hold several documents."""
    tokens, positions = torch.randint(0, 2048, (2, 128)), torch.arange(128).remainder(48).expand(2, 128)
    model(input_ids=tokens, position_ids=positions, use_cache=False).logits.float().logsumexp(-1).mean().backward()


# ---- experts -------------------------------------------------------------------------------------------------------


def grouped_experts(options: Options) -> Comparison:
    from trainer_dev.module import SMALL_DEEPSEEK_V3

    implementations = {"grouped": "grouped_mm", "loop": "eager"}
    models = {name: model_of(SMALL_DEEPSEEK_V3, experts_implementation=each) for name, each in implementations.items()}
    arms = {
        name: partial(measured, partial(train, model), 1 if options.quick else 10) for name, model in models.items()
    }
    comparison = Comparison("a mixture of experts, forward and backward", "step", "loop")
    return compare(comparison, arms, options.rounds, warm=not options.quick)
