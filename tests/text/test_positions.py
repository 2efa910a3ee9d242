"""Positions of packed documents in models that count the tokens of a row.

transformers itself is the reference: each document of a row has the logits, and all of them
together have the gradients, that its model computes for the documents one by one."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dist_template import BlockConfig
from dist_template.parallel.blocks import wrap_blocks
from dist_template.text import causal_lm, causal_lm_config, known_documents
from dist_template.wings.rehearse.interventions import LeakageTest

LENGTHS = [[7, 3, 11], [1, 15, 5]]  # of the documents of each row
T = 21
DATA = SimpleNamespace(vocab_size=101, eos_token_id=100, seq_len=T)
WIDTHS = {"d_model": 24, "decoder_layers": 2, "decoder_attention_heads": 3, "decoder_ffn_dim": 40}
OF_BART = {
    **WIDTHS,
    "encoder_layers": 1,
    "encoder_attention_heads": 3,
    "encoder_ffn_dim": 40,
    "is_decoder": True,
    "pad_token_id": 0,
}
DROPOUTS = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0)
BARTS = [
    "bart",
    "bigbird_pegasus",
    "blenderbot",
    "blenderbot-small",
    "marian",
    "mbart",
    "mvp",
    "pegasus",
    "plbart",
    "trocr",
]
LLAMA_4 = {
    "model_type": "llama4_text",
    "hidden_size": 24,
    "intermediate_size": 40,
    "intermediate_size_mlp": 40,
    "num_hidden_layers": 4,  # the fourth has no rotary embedding
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "num_local_experts": 2,
    "attention_chunk_size": 64,
    "attn_temperature_tuning": True,
    "floor_scale": 3,
    "attn_scale": 1.0,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    kind: {"model_type": kind, **OF_BART, **DROPOUTS, "attention_type": "original_full"}
    if kind == "bigbird_pegasus"
    else {"model_type": kind, **OF_BART, **DROPOUTS}
    for kind in BARTS
}
ARCHITECTURES["trocr"] = {"model_type": "trocr", **WIDTHS, **DROPOUTS, "is_decoder": True}
ARCHITECTURES["trocr_sines"] = ARCHITECTURES["trocr"] | {"use_learned_position_embeddings": False}
ARCHITECTURES["llama4"] = LLAMA_4


def built(kind: str, **fields: Any) -> Any:
    torch.manual_seed(0)
    config = causal_lm_config(ARCHITECTURES[kind] | fields, None, None, DATA)
    return causal_lm(config, None, DATA.vocab_size)


def packed() -> dict[str, Tensor]:
    positions = [torch.cat([torch.arange(size) for size in row]) for row in LENGTHS]
    sizes = torch.tensor(sum(LENGTHS, []))
    bounds = torch.cat([torch.zeros(1), sizes.cumsum(0)]).int()
    tokens = torch.randint(3, DATA.vocab_size, (len(LENGTHS), T), generator=torch.manual_seed(1))
    return {"input_ids": tokens, "position_ids": torch.stack(positions), "cu_seq_lens": bounds}


def logits_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
    with known_documents(model, batch) as known:
        tokens, positions = batch["input_ids"], batch["position_ids"]
        return model(input_ids=tokens, position_ids=positions, use_cache=False, **known).logits


def documents(batch: dict[str, Tensor]) -> Iterator[tuple[slice, Tensor]]:
    """Where each document is among the B x T tokens, and its tokens (1, N)."""
    for start, end in pairwise(batch["cu_seq_lens"].tolist()):
        yield slice(start, end), batch["input_ids"].flatten()[None, start:end]


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_a_document_of_a_row_has_the_logits_of_the_document_alone(kind: str) -> None:
    model, batch = built(kind).eval(), packed()
    with torch.no_grad():
        got = logits_of(model, batch).flatten(0, 1)
        for where, tokens in documents(batch):
            alone = model(input_ids=tokens, use_cache=False).logits[0]
            torch.testing.assert_close(got[where], alone, atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("kind", ["bart", "llama4"])
def test_two_micro_batches_have_the_gradients_of_their_documents(
    kind: str, checkpointing: Any
) -> None:
    """Blocks of the first micro-batch are recomputed after the second has run."""
    batch = packed()
    turned = {name: each.flip(0) for name, each in batch.items() if name != "cu_seq_lens"}
    sizes = torch.tensor(sum(LENGTHS[::-1], []))
    turned["cu_seq_lens"] = torch.cat([torch.zeros(1), sizes.cumsum(0)]).int()
    model, reference = built(kind).train(), built(kind).train()
    wrap_blocks(model, BlockConfig(checkpointing=checkpointing))
    losses = [logits_of(model, each).square().mean() for each in (batch, turned)]
    sum(losses, torch.zeros(())).backward()
    for _, tokens in documents(batch):
        values = reference(input_ids=tokens, use_cache=False).logits.square()
        (2 * values.sum() / (2 * T * DATA.vocab_size)).backward()
    for (name, got), want in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, atol=1e-7, rtol=1e-4, msg=name)


def test_generation_with_a_cache_is_transformers_own() -> None:
    model, prompt = built("llama4").eval(), torch.randint(3, 90, (1, 8))
    want = model.generate(prompt, max_new_tokens=8, do_sample=False, use_cache=True)
    logits_of(model, packed())  # which prepares the model
    assert model.generate(prompt, max_new_tokens=8, do_sample=False, use_cache=True).equal(want)


class CountsTheRow(nn.Module):
    """A model that adds the embedding of a token's position in its row."""

    def __init__(self, position_in_row: bool) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(101, 8), nn.Embedding(T, 8)
        self.position_in_row = position_in_row

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        positions = batch["position_ids"]
        if self.position_in_row:
            positions = torch.arange(T)
        return self.tokens(batch["input_ids"]) + self.places(positions)


@pytest.mark.parametrize("position_in_row", [True, False])
def test_the_leakage_test_finds_a_document_that_depends_on_its_place(
    tmp_path: Path, position_in_row: bool
) -> None:
    model, batch = CountsTheRow(position_in_row), packed()
    test, trainer = LeakageTest(tmp_path), SimpleNamespace(datamodule=None)
    test.on_train_batch_start(trainer, model, batch, 0)  # ty: ignore[invalid-argument-type]
    model(batch)
    test.on_train_end(trainer, model)  # ty: ignore[invalid-argument-type]
    found = torch.load(tmp_path / "leakage.pt")
    assert found["documents"] == "" and bool(found["place"]) == position_in_row, found
