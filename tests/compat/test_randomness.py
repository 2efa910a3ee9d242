"""Dropout that is turned off, and observed seeding; each test restores what the functions replace."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from dist_template.compat import randomness


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> None:
    functional = torch.nn.functional
    for name in (*randomness.DROPOUTS, "scaled_dot_product_attention"):
        monkeypatch.setattr(functional, name, getattr(functional, name))
    for _, module, *names in randomness.GENERATORS:
        for name in names:
            monkeypatch.setattr(module, name, getattr(module, name))


def test_dropout_is_the_identity_and_noted_where_it_would_have_an_effect() -> None:
    noted: list[str] = []
    randomness.turn_dropout_off(lambda: noted.append("dropout"))
    ones = torch.ones(2, 3, 4, 4)
    for module in (nn.Dropout(0.5), nn.Dropout2d(0.5), nn.AlphaDropout(0.5), nn.FeatureAlphaDropout(0.5)):
        assert torch.equal(module(ones), ones)
    assert len(noted) == 4
    attended = nn.functional.scaled_dot_product_attention(ones, ones, ones, dropout_p=0.9)
    assert torch.allclose(attended, ones) and len(noted) == 5
    nn.Dropout(0.5).eval()(ones)
    nn.functional.dropout(ones, 0.0)
    assert len(noted) == 5


def test_seeding_is_reported_and_so_is_a_state_that_is_set_back() -> None:
    seen: list[str] = []
    randomness.watch_seeding(lambda name: seen.append(f"seeds {name}"), lambda name: seen.append(f"restores {name}"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    assert seen == [
        "seeds torch.manual_seed",
        "restores torch.manual_seed",
        "seeds random.seed",
        "seeds numpy.random.seed",
    ]
    drawn = torch.rand(1)
    torch.manual_seed(7)
    first = torch.rand(1)
    torch.manual_seed(7)
    assert torch.equal(first, torch.rand(1)) and not torch.equal(first, drawn), "it still seeds"


def test_a_function_that_is_gone_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(randomness, "DROPOUTS", ("dropout4d",))
    with pytest.raises(AttributeError, match="dropout4d"):
        randomness.turn_dropout_off(lambda: None)
