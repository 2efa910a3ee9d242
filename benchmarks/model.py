"""What a model's own step costs: the loss in chunks, compilation block by block, experts as grouped products.

The loss: a small Llama with a large vocabulary, tied embeddings, one forward and backward. Arms: all logits at once, in
chunks, and both compiled. Targets: the chunks hold at most 0.7 of the memory, at equal speed.

Compilation: the first step of the quickstart's model, its blocks compiled (what `model.blocks.compile` does) against
the whole of it, nothing cached. Target: at most 0.35 of the time.

Experts: the same model's grouped products against a loop over experts, which also waits for the device in each layer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .arms import Clock, Comparison, Sample, compare
from .record import Figure, Options, Result

NAME = "model"
VOCABULARY, ROWS, SEQ_LEN, CHUNK = 32_768, 4, 512, 512


def run(options: Options) -> Result:
    torch.set_num_threads(1)
    loss, peaks = loss_in_chunks(options)
    first, experts = first_step(options), grouped_experts(options)
    figures = [
        Figure("loss in chunks: peak memory over all logits at once", [peaks["chunks"] / peaks["whole"]], at_most=0.7),
        Figure("loss in chunks: speed over all logits at once", loss.speeds("chunks", "whole"), at_least=0.97),
        Figure("the same, both compiled", loss.speeds("chunks, compiled", "whole, compiled"), at_least=0.97),
        Figure("first step: blocks compiled over the whole compiled", first.wall_ratios("blocks"), at_most=0.35),
        Figure("experts: speed of grouped products over a loop", experts.speeds("grouped"), at_least=1),
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
    from trainer_dev.head import sums_over_tokens
    from trainer_dev.module import LanguageModule
    from trainer_dev.tests.test_speed_model import peak_bytes
    from transformers import AutoConfig, AutoModelForCausalLM

    vocabulary = VOCABULARY // 16 if options.quick else VOCABULARY
    config = AutoConfig.for_model(
        "llama", hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=vocabulary, tie_word_embeddings=True,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    tokens = torch.randint(0, vocabulary, (ROWS, SEQ_LEN))
    sums = LanguageModule().sums
    compiled = torch.compile(sums, backend="eager" if options.quick else "inductor")

    def step(sums: Callable[[Tensor, Tensor], tuple[Tensor, ...]], chunk: int | None) -> None:
        def forward() -> Tensor:
            return model(input_ids=tokens, use_cache=False).logits

        model.zero_grad()
        (sums_over_tokens(forward, model, tokens, sums, chunk)[0] / tokens.numel()).backward()

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
    from trainer_dev.parallel.blocks import BlockConfig, wrap_blocks

    inductor.force_disable_caches = True
    inductor.compile_threads = 1  # a pool of processes would be warm for the second arm alone

    def arm(by_blocks: bool) -> Sample:
        torch._dynamo.reset()
        model = quickstart_model()
        call = model
        if options.quick:
            model.forward = torch.compile(model.forward, backend="eager")
        elif by_blocks:
            wrap_blocks(model, BlockConfig(compile=True))
        else:
            call = torch.compile(model)
        clock = Clock()
        clock.start()
        train(call)
        return clock.stop()

    arms = {"blocks": partial(arm, True), "whole": partial(arm, False)}
    comparison = Comparison("first step, compiled, of the quickstart's model", "first step", "whole")
    return compare(comparison, arms, min(options.rounds, 3), warm=False)


def quickstart_model(experts: str = "grouped_mm") -> Any:
    from trainer_dev.module import SMALL_DEEPSEEK_V3
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {**SMALL_DEEPSEEK_V3}
    config = AutoConfig.for_model(fields.pop("model_type"), **fields, vocab_size=2048)
    return AutoModelForCausalLM.from_config(config, experts_implementation=experts).train()


def train(model: Any) -> None:
    """Forward and backward of two rows that hold several documents."""
    tokens, positions = torch.randint(0, 2048, (2, 128)), torch.arange(128).remainder(48).expand(2, 128)
    model(input_ids=tokens, position_ids=positions, use_cache=False).logits.float().logsumexp(-1).mean().backward()


# ---- experts -------------------------------------------------------------------------------------------------------


def grouped_experts(options: Options) -> Comparison:
    models = {"grouped": quickstart_model(), "loop": quickstart_model("eager")}
    arms = {
        name: partial(measured, partial(train, model), 1 if options.quick else 10) for name, model in models.items()
    }
    comparison = Comparison("a mixture of experts, forward and backward", "step", "loop")
    return compare(comparison, arms, options.rounds, warm=not options.quick)
