"""Ranks that share sequences compute what one process computes, and refuse the rest."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from trainer_dev.data import DataModule
from trainer_dev.module import LanguageModule
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from dist_template import BalanceConfig
from dist_template.compat.transformers import reason_against_sequence_shards
from dist_template.parallel.sequence import share_attention
from dist_template.strategies import MeshStrategy
from dist_template.text import Preferences, known_documents
from tests.support.library import shard_batch
from tests.support.limits import violations_of
from tests.support.parity import SHORT, Trainings, assert_close
from tests.support.tiers import tiers
from tests.support.wings import clean_processes

ROWS, SEQ_LEN, VOCAB = 2, 16, 32
BASE: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": VOCAB,
}  # fmt: skip
GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
LATENT = {
    "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1,
    "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "num_mtp_layers": 0,
}  # fmt: skip
WINDOW = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}
MODELS = {
    "fewer heads of keys than ranks": {"model_type": "llama", **GROUPED, "num_key_value_heads": 1},
    "a window in one layer": {"model_type": "qwen3", **GROUPED, **WINDOW,
        "tie_word_embeddings": True},
    "latent attention and experts": {"model_type": "deepseek_v3", **LATENT},
}  # fmt: skip


def build(**architecture: Any) -> Any:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**BASE | architecture))


def batch(*ends: int) -> dict[str, Any]:
    """Rows with documents that end at `ends` and at the end of a row; some labels do not count."""
    tokens = torch.randint(VOCAB, (2, ROWS, SEQ_LEN), generator=torch.Generator().manual_seed(1))
    tokens[1, :, SEQ_LEN - 5 :] = -100
    edges = sorted({0, *ends, *range(0, ROWS * SEQ_LEN + 1, SEQ_LEN)})
    starts = torch.tensor(edges, dtype=torch.int32)
    positions = torch.cat([torch.arange(length) for length in starts.diff().tolist()])
    found = {"input_ids": tokens[0], "labels": tokens[1], "cu_seq_lens": starts}
    found |= {"position_ids": positions.view(ROWS, SEQ_LEN)}
    return found | {"tokens_per_micro_batch": (tokens[1] != -100).sum()}


def loss_and_gradients(
    architecture: dict[str, Any], batch: dict[str, Any], group: Any = None
) -> list[Tensor]:
    torch.manual_seed(0)
    model = build(**architecture)
    if group is not None:
        share_attention(model, group.size(), group)
        batch = shard_batch(batch, group)
    with known_documents(model, batch) as known:
        tokens, positions = batch["input_ids"], batch["position_ids"]
        logits = model(input_ids=tokens, position_ids=positions, use_cache=False, **known).logits
    logits, labels = logits.flatten(0, 1), batch["labels"].flatten()
    loss = F.cross_entropy(logits, labels, reduction="sum") / batch["tokens_per_micro_batch"]
    loss.backward()
    grads = (torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters())
    found = [loss.detach(), *grads]
    for tensor in found if group is not None else ():
        dist.all_reduce(tensor)
        tensor /= group.size()
    return found


def compare(rank: int, num: int, port: int, cases: list[Any], expected: list[list[Tensor]]) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=num)
    kernel = ALL_ATTENTION_FUNCTIONS["sdpa"]
    for case, tensors in zip(cases, expected, strict=True):
        AttentionInterface.register("sdpa", kernel)
        for got, one in zip(loss_and_gradients(*case, dist.group.WORLD), tensors, strict=True):
            torch.testing.assert_close(got, one, rtol=1e-5, atol=1e-6)
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("num", tiers([2, 4], daily=[2]))
def test_losses_and_gradients_are_those_of_one_process(num: int) -> None:
    """Rows with one document, and with documents that end in a rank's tokens or between two's."""
    cases = [(model, batch(*ends)) for model in MODELS.values() for ends in [(), (5, 8, 27)]]
    expected = [loss_and_gradients(*case) for case in cases]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = clean_processes()
    given = [(rank, num, port, cases, expected) for rank in range(num)]
    ranks = [processes.Process(target=compare, args=each) for each in given]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    assert [each.exitcode for each in ranks] == [0] * num


PRODUCTS = {  # processes, those that read different batches, flags
    "tp": (4, 1, ["tp_size=2"]),
    "ep": (2, 1, ["ep_size=2"]),
    "replicas": (4, 2, ["dp_replicate_size=2"]),
    "four": (4, 1, ["cp_size=4"]),
    "offload": (2, 1, ["cpu_offload=true"]),
    "pipeline": (4, 1, ["pp_size=2"]),
}


PAIRS = [("llama", product) for product in ("tp", "four", "offload", "pipeline")]
PAIRS += [("deepseek_v3", product) for product in ("ep", "replicas", "pipeline")]
DAILY = [("llama", "tp"), ("deepseek_v3", "ep"), ("llama", "pipeline")]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "product"), tiers(PAIRS, DAILY))
def test_a_product_trains_as_one_process(train: Trainings, model: str, product: str) -> None:
    processes, batches, sizes = PRODUCTS[product]
    flags = [f"--trainer.strategy.init_args.{size}" for size in sizes]
    flags += [f"--data.micro_batch_size={4 // batches}", SHORT]
    one, many = train(model, "one", SHORT), train(model, "cp", *flags, processes=processes)
    assert many.loss == pytest.approx(one.loss, rel=1e-6)
    assert many.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)
    assert_close(many.end, one.end, 1e-5)
    assert many.eval()[6] == pytest.approx(one.eval()[6], rel=1e-5)


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
CONVOLUTION = {"layer_types": ["conv", "full_attention"]}
MAMBA = {"num_heads": 8, "head_dim": 8, "n_groups": 1}
REFUSED = [
    ({"model_type": "mamba2", **MAMBA}, "transformers' kernels"),
    ({"model_type": "lfm2", **GROUPED, **CONVOLUTION}, "layers other than attention"),
    ({"model_type": "gpt_oss", **GROUPED}, "transformers' kernels"),  # attention sinks
    ({"model_type": "llama", **GROUPED, "attn_implementation": "eager"}, "transformers' kernels"),
    ({"model_type": "llama", **GROUPED, "rope_parameters": DYNAMIC}, "largest position"),
]


@pytest.mark.parametrize(("architecture", "words"), REFUSED)
def test_a_model_that_combines_tokens_otherwise_is_refused(architecture: Any, words: str) -> None:
    with torch.device("meta"):
        assert words in reason_against_sequence_shards(build(**architecture))


LLAMA_4 = AutoConfig.for_model("llama4_text", num_attention_heads=8)
SIX = AutoConfig.for_model("llama", num_attention_heads=6, hidden_size=36)
OF_SEQUENCES = LanguageModule(balance=BalanceConfig(sequence_loss_coef=1e-4))
IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"cp_size": 3}, "cp_size 3 must divide fsdp_size 8"),
    ({"data": DataModule(seq_len=102)}, "data.seq_len 102 is not a multiple of cp_size 4"),
    ({"cp_size": 8}, "cp_size 8 does not divide the model's 12 attention heads"),
    ({"cp_size": 2, "tp_size": 2, "config": SIX}, "not divide a rank's (tp_size 2) 3 attention"),
    ({"data": DataModule(Preferences(["nowhere"]))}, "would split pairs of data.source"),
    ({"module": OF_SEQUENCES}, "coef needs full sequences"),
    ({"config": None}, "cp_size 4 needs a model of transformers"),
    (
        {"config": LLAMA_4},
        "a layer of it numbers a rank's tokens as if they were all",
    ),  # proof.json
]
TWELVE = AutoConfig.for_model("llama", num_attention_heads=12, hidden_size=768)


@pytest.mark.parametrize(("given", "words"), IMPOSSIBLE, ids=[words for _, words in IMPOSSIBLE])
def test_the_impossible_is_refused_before_the_start(given: dict[str, Any], words: str) -> None:
    sizes: Any = {"cp_size": 4} | {name: size for name, size in given.items() if "size" in name}
    others: Any = {"data": DataModule(), "config": TWELVE} | {
        n: v for n, v in given.items() if n not in sizes
    }
    (sentence,) = violations_of(MeshStrategy(**sizes), **others)
    assert words in sentence
