"""Operations and parameters, recomputed from the published architectures."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from dist_template.model.flops import Size, peak
from tests.support.modules import on_meta

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
    ("NVIDIA H200", "bf16-mixed"): 989.4, ("NVIDIA H100 80GB HBM3", "bf16-true"): 989.4,
    ("NVIDIA H100 PCIe", "bf16-mixed"): 756, ("NVIDIA A100-SXM4-80GB", "16-mixed"): 312,
    ("NVIDIA H200", "32-true"): None, ("NVIDIA H100", "bf16-mixed"): None,
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16-mixed"): None, ("cpu", "bf16-mixed"): None,
}  # fmt: skip


def test_only_a_known_device_has_a_peak() -> None:
    assert {given: peak(*given) for given in PEAKS} == PEAKS
