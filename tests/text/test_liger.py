"""Liger's kernel computes the same numbers as the chunks. Triton's interpreter needs no GPU.

The variable must be set before anything imports Triton; without it only the errors are tested:

    pip install --no-deps liger-kernel triton
    TRITON_INTERPRET=1 pytest tests/template/test_liger.py
"""

from __future__ import annotations

import os
from functools import partial

import pytest
import torch
from trainer_dev.module import LanguageModule

from dist_template import InputError
from dist_template.text.model import head
from tests.support.modules import Head, hidden_states
from tests.support.parity import SHORT, Trainings, assert_close

LIGER = "--model.loss_kernel=liger"
CPU = torch.device("cpu")


@pytest.fixture
def liger() -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("set TRITON_INTERPRET=1")
    pytest.importorskip("liger_kernel")


@pytest.mark.parametrize(("bias", "vocabulary"), [(False, 50), (True, 300)])
def test_liger_returns_the_sums_and_gradients_of_torch(liger: None, bias: bool, vocabulary: int) -> None:
    tokens = torch.randint(0, 50, (2, 30), generator=torch.Generator().manual_seed(0))
    labels = tokens.masked_fill(tokens % 7 == 0, -100)
    found = []
    for kernel in ("torch", "liger"):
        torch.manual_seed(0)
        model = Head(vocabulary, 8)
        if bias:
            model.output.bias = torch.nn.Parameter(torch.randn(vocabulary))
        chunked_loss = head.ChunkedLoss(model, LanguageModule().sums, None, kernel)
        forward = partial(model, tokens)
        loss, hits = chunked_loss(hidden_states(model, forward), labels).values()
        (loss / 17).backward()
        with torch.no_grad():
            evaluated, _ = chunked_loss(hidden_states(model, forward), labels).values()
        assert torch.allclose(loss, evaluated)
        found.append((loss, hits, *(p.grad for p in model.parameters())))
    for of_torch, of_liger in zip(*found, strict=True):
        assert torch.allclose(of_torch.float(), of_liger.float(), rtol=1e-5, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["one", "fsdp2", "zero3"])
def test_training_with_liger_gives_the_numbers_of_the_chunks(liger: None, train: Trainings, strategy: str) -> None:
    plain, fused = train("llama", "one", SHORT), train("llama", strategy, LIGER, SHORT)
    assert fused.loss == pytest.approx(plain.loss, rel=1e-5)
    assert fused.grad_norm == pytest.approx(plain.grad_norm, rel=1e-4)
    assert_close(fused.end, plain.end, 1e-5)


def test_liger_is_refused_without_its_package_a_gpu_or_an_output_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    head.check_kernel("torch", CPU)
    monkeypatch.setattr(head, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'dist-template\[liger\]', or set torch"):
        head.check_kernel("liger", CPU)
    monkeypatch.setattr(head, "find_spec", lambda name: name)
    with pytest.raises(InputError, match="loss_kernel liger needs a GPU: set torch"):
        head.check_kernel("liger", CPU)
    with pytest.raises(InputError, match="needs an output layer, Linear has none: set torch"):
        head.ChunkedLoss(torch.nn.Linear(2, 2), LanguageModule().sums, None, "liger")
