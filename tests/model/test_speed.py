"""What a step costs, counted: memory, syncs, compilations, FLOPs; what the module computes."""

import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile
from trainer_dev.module import LanguageModule
from transformers import AttentionInterface

from dist_template.model.flops import Size, peak
from dist_template.text.batches.rows import PackedRows
from dist_template.text.model.head import ChunkedLoss, without_head
from dist_template.text.model.kernels import BOUNDS
from tests.support.modules import ARCHITECTURES, TINY, Ops, build, on_meta
from tests.support.parity import MODELS
from tests.support.runs import logged, only_run, run
from tests.support.tiers import tiers


def batch_of(document: int = 5) -> dict[str, Any]:
    """4 rows of 16 tokens in documents of that many."""
    tokens = torch.randint(1, 50, (65,), generator=torch.Generator().manual_seed(0))
    tokens[document - 1 :: document] = 0
    return PackedRows(tokens.numpy(), 16, eos_token_id=0).__getitems__([0, 1, 2, 3])


class Head(nn.Module):
    """An embedding and an output layer with the same weight."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.output = nn.Linear(width, vocabulary, bias=False)
        self.output.weight = self.embedding.weight

    def get_output_embeddings(self) -> nn.Module:
        return self.output

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(torch.tanh(self.embedding(tokens)))


def step(model: nn.Module, tokens: Tensor, chunk: int | None) -> tuple[Tensor, ...]:
    """What `LanguageModule.training_step` does."""
    chunked_loss = ChunkedLoss(model, LanguageModule().sums, chunk)
    if chunked_loss.applies_to(tokens):
        with without_head(model) as result:
            hidden = result(model(tokens))
        sums = chunked_loss(hidden, tokens)
    else:
        sums = LanguageModule().sums(model(tokens), tokens)
    if sums["loss"].requires_grad:
        (sums["loss"] / tokens.numel()).backward()
    return tuple(sums.values())


def peak_bytes(work: Callable[[], Any]) -> int:
    """The most that torch's tensors held at once, kernels' own included, beyond what there was."""
    work()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events, most = list(profiler.profiler.kineto_results.experimental_event_tree()), 0
    while events:
        event = events.pop()
        events += event.children
        if event.tag.name == "Allocation":
            most = max(most, event.extra_fields.total_allocated)
    return most


def test_a_step_in_chunks_holds_less_than_0_7_of_its_memory() -> None:
    model, tokens = Head(8192, 32), torch.randint(0, 8192, (2, 256))

    def work(chunk: int | None) -> None:
        model.zero_grad()
        step(model, tokens, chunk)

    unchunked, chunked = peak_bytes(lambda: work(None)), peak_bytes(lambda: work(64))
    assert unchunked >= 12 * 512 * 8192, "three tensors of (B, T, V) in float32"
    assert chunked <= 0.7 * unchunked  # an eighth of the logits, and the weight's gradient: 0.2


@pytest.mark.parametrize("frozen", [False, True])
def test_chunks_have_the_sums_and_gradients_of_one_piece(frozen: bool) -> None:
    tokens = torch.randint(0, 50, (2, 30), generator=torch.Generator().manual_seed(0))
    model, results = Head(50, 8), []
    if frozen:
        model.output.weight = nn.Parameter(model.output.weight.detach().clone(), False)
    for chunk in (None, 16):
        model.zero_grad()
        sums = step(model, tokens, chunk)
        with torch.inference_mode():
            assert torch.allclose(step(model, tokens, chunk)[0], sums[0])
        gradient: Any = model.embedding.weight.grad
        results.append([*sums, gradient])
    for one, chunked in zip(*results, strict=True):
        assert torch.allclose(one.float(), chunked.float(), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_a_forward_reads_nothing_from_the_device(name: str) -> None:
    module = build(architecture=ARCHITECTURES[name])
    for batch in (batch_of(), batch_of(document=1000)):
        with Ops() as ops:
            module(batch)
        assert ops.reads == []


def test_a_varlen_kernel_gets_the_bounds_that_the_mask_shows() -> None:
    """In place of FlashAttention, which needs a GPU: torch's attention for each document."""

    def varlen(_: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        assert mask is None and options["max_length_q"] == query.shape[2]
        groups = query.shape[1] // key.shape[1]
        every = (query, *(t.repeat_interleave(groups, 1) for t in (key, value)))
        one_row = [t.transpose(0, 1).flatten(1, 2) for t in every]  # (heads, B*T, width)
        lengths, outputs = options["cu_seq_lens_q"].diff().tolist(), []
        for parts in zip(*(t.split(lengths, 1) for t in one_row), strict=True):
            given = [part[None] for part in parts]
            scale = {"is_causal": True, "scale": options["scaling"]}
            outputs.append(F.scaled_dot_product_attention(*given, **scale)[0].transpose(0, 1))
        return torch.cat(outputs).view(query.shape[0], query.shape[2], *query.shape[1::2]), None

    AttentionInterface.register("flash_stand_in", varlen)
    module = build(architecture=ARCHITECTURES["llama"])
    network: Any = module.model
    with torch.no_grad():
        masked = module(batch_of())
        network.config._attn_implementation = "flash_stand_in"
        assert torch.allclose(module(batch_of()), masked, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("model", tiers(sorted(MODELS), daily=["deepseek_v3"]))
def test_blocks_are_compiled_in_two_steps(flags: list[str], monkeypatch: Any, model: str) -> None:
    """The loss in chunks too. By the seed, only the first batch has rows of one document each."""
    graphs: list[int] = []
    training_step = LanguageModule.training_step

    def noted(self: Any, batch: Any, batch_idx: int) -> Tensor:
        graphs.append(counters["stats"]["unique_graphs"])
        return training_step(self, batch, batch_idx)

    monkeypatch.setattr(LanguageModule, "training_step", noted)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    counters.clear()
    options = """--model.blocks.compile=true --model.loss_chunk=64 --data.micro_batch_size=8
        --trainer.max_steps=6 --trainer.log_every_n_steps=3 --trainer.limit_val_batches=0""".split()
    assert run("fit", *flags, *options, f"--model.architecture={MODELS[model]}") == 0
    assert not counters["graph_break"]
    assert graphs[0] == 0 < graphs[1] and set(graphs[2:]) == {graphs[2]}


T = 4096


def test_deepseek_v3_is_counted_as_published() -> None:
    d, vocabulary, layers, dense, heads, expert = 7168, 129280, 61, 3, 128, 3 * 7168 * 2048
    queries = d * 1536 + 1536 + 1536 * heads * (128 + 64)  # through their latent, with its norm
    keys_and_values = d * (512 + 64) + 512 + 512 * heads * (128 + 128)
    attention = queries + keys_and_values + heads * 128 * d  # the output
    every = layers * (attention + 2 * d) + dense * 3 * d * 18432 + d + 2 * vocabulary * d
    sparse = (layers - dense) * 256 * d  # routers
    size = Size.of(on_meta(model_type="deepseek_v3"))
    assert size.total == every + sparse + (layers - dense) * (256 + 1) * expert
    assert size.active == every + sparse + (layers - dense) * (8 + 1) * expert
    assert size.total == pytest.approx(671e9, rel=1e-3)
    assert size.active == pytest.approx(37e9, rel=0.02)
    assert size.embedding == vocabulary * d
    multiplied = size.active - vocabulary * d  # looked up, and another matrix is the output
    assert size.flops_per_token(T) == pytest.approx(6 * multiplied + 12 * layers * d * T, rel=1e-9)


@pytest.mark.parametrize("tied", [False, True])
def test_llama_is_counted_from_its_matrices(tied: bool) -> None:
    d, inner, layers, vocabulary = 4096, 11008, 32, 32000
    size = Size.of(on_meta(model_type="llama", tie_word_embeddings=tied))
    matrices = layers * (4 * d * d + 3 * d * inner + 2 * d) + d + vocabulary * d
    assert size.total == size.active == size.trainable == matrices + (0 if tied else vocabulary * d)
    assert size.flops_per_token(T) == 6 * matrices + 12 * layers * d * T


def test_unknown_numbers_of_a_custom_model_are_none() -> None:
    own: Any = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10, bias=False))
    size = Size.of(own)
    assert (size.total, size.active, size.embedding) == (80, 80, 40)
    assert size.flops_per_token(T) is None and size.layers is None
    own.config = SimpleNamespace(num_experts=4, num_hidden_layers=2, hidden_size=4)
    assert Size.of(own).active is None and Size.of(own).flops_per_token(T) is None


PEAKS = {
    ("NVIDIA H200", "bf16-mixed"): 989.4,
    ("NVIDIA H100 80GB HBM3", "bf16-true"): 989.4,
    ("NVIDIA H100 PCIe", "bf16-mixed"): 756,
    ("NVIDIA A100-SXM4-80GB", "16-mixed"): 312,
    ("NVIDIA H200", "32-true"): None,
    ("NVIDIA H100", "bf16-mixed"): None,
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16-mixed"): None,
    ("cpu", "bf16-mixed"): None,
}


def test_only_a_known_device_has_a_peak() -> None:
    assert {given: peak(*given) for given in PEAKS} == PEAKS


TWO_STEPS = ["--trainer.max_steps=2", "--trainer.val_check_interval=2", "--model.optim.warmup=0"]
TWO = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
FOUR = {"intermediate_size": 16, "num_local_experts": 4, "num_key_value_heads": 2, "head_dim": 8}
OF_AFMOE = {"num_experts": 4, "num_experts_per_tok": 2, "num_dense_layers": 1}
WITHOUT_POSITIONS = {  # their masks need no positions, by which transformers knows documents
    "gpt_oss": TWO | FOUR | {"model_type": "gpt_oss"},
    "afmoe": TINY | OF_AFMOE | {"model_type": "afmoe"},
    "falcon": TWO | {"model_type": "falcon"},
    "bloom": {"model_type": "bloom", "hidden_size": 16, "n_layer": 2, "n_head": 2},
}


@pytest.mark.parametrize("name", sorted(ARCHITECTURES | WITHOUT_POSITIONS))
def test_packed_documents_do_not_see_each_other(name: str) -> None:
    module = build(architecture=(ARCHITECTURES | WITHOUT_POSITIONS)[name]).eval()
    tokens = torch.randint(1, 50, (4, 16), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(6), torch.arange(10)])
    batch = {"input_ids": tokens, "position_ids": torch.arange(16).expand(4, 16).contiguous()}
    packed = batch | {"position_ids": positions.expand(4, 16).contiguous()}
    alone = {key: value[:, 6:] for key, value in packed.items()}
    places = [start for row in range(4) for start in (16 * row, 16 * row + 6)]
    starts = torch.tensor([*places, 64], dtype=torch.int32)
    with torch.no_grad():
        for bounds in ({}, {BOUNDS: starts}):
            assert torch.allclose(module(packed | bounds)[:, 6:], module(alone), atol=1e-5)
        assert not torch.allclose(module(batch)[:, 6:], module(alone), atol=1e-3)


def smoothed(self: Any, logits: Tensor, labels: Tensor, cross_entropy: Tensor) -> Tensor:
    """Label smoothing and z-loss, as users write them."""
    flat, counted = logits.float().flatten(0, 1), labels.flatten() != -100
    smooth = F.cross_entropy(flat, labels.flatten(), reduction="none", label_smoothing=0.2)
    return smooth + 0.1 * flat.logsumexp(-1).square() * counted


@pytest.mark.slow
@pytest.mark.parametrize("chunk", ["null", "16"])
def test_an_edited_objective_leaves_the_reported_cross_entropy_alone(
    flags: list[str], tmp_path: Path, monkeypatch: Any, chunk: str
) -> None:
    """No step changes a weight, so that both runs measure the same model."""
    sums = LanguageModule.sums

    def with_top_5(self: Any, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hits = (logits.topk(5).indices == labels[..., None]).sum()
        return sums(self, logits, labels) | {"top_5_accuracy": hits}

    flags = [*flags, *TWO_STEPS, "--model.optim.learning_rate=1e-20", "--seed_everything=3"]
    flags.append(f"--model.loss_chunk={chunk}")
    assert run("fit", *flags, "--run.name=plain") == 0
    monkeypatch.setattr(LanguageModule, "loss", smoothed)
    monkeypatch.setattr(LanguageModule, "sums", with_top_5)
    assert run("fit", *flags, "--run.name=edited") == 0
    plain, edited = only_run(tmp_path, "plain"), only_run(tmp_path, "edited")
    for name in ("train/loss", "train/perplexity", "eval/loss", "eval/bits_per_byte"):
        assert logged(edited, name) == pytest.approx(logged(plain, name), rel=1e-6), name
    for split in ("train", "eval"):
        assert logged(edited, f"{split}/objective")[2] > 1.5 * logged(edited, f"{split}/loss")[2]
        one, five = (logged(edited, f"{split}/{n}_accuracy")[2] for n in ("token", "top_5"))
        assert one < five < 1
    norms = [logged(each, "train/grad_norm")[2] for each in (plain, edited)]
    assert norms[1] != pytest.approx(norms[0], rel=0.05), "the objective is trained"


@pytest.mark.slow
@pytest.mark.parametrize("model", tiers(["deepseek_v3", "llama"], daily=["deepseek_v3"]))
def test_only_log_steps_read_the_device(flags: list[str], monkeypatch: Any, model: str) -> None:
    """With every callback that always runs. torch does not dispatch `tolist` on a CPU."""
    off = ["--trainer.limit_val_batches=0", "--trainer.logger=false", "--numerics.on_spike=skip"]
    off += ["--last_checkpoint.every_n_steps=1000", "--numerics.spike_window=8"]
    off += ["--numerics.spike_sigmas=1000"]
    to_list = torch.Tensor.tolist

    def reads(steps: int, every: int) -> int:
        with Ops() as ops, monkeypatch.context() as patched:
            noted = lambda tensor: ops.reads.append("tolist") or to_list(tensor)  # noqa: E731
            patched.setattr(torch.Tensor, "tolist", noted)
            sizes = [f"--trainer.max_steps={steps}", f"--trainer.log_every_n_steps={every}"]
            assert run("fit", *flags, *sizes, *off, f"--model.architecture={MODELS[model]}") == 0
        return len(ops.reads)

    ten, five, longer = reads(20, 10), reads(20, 5), reads(40, 10)
    assert five - ten == 2, "20 steps logged every 5 instead of every 10 read twice more"
    assert longer == five, "as many log steps read as often, whatever the number of steps between"
