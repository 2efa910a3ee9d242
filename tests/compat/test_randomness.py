"""Dropout that is turned off; each test restores what the function replaces."""

import pytest
import torch
from torch import nn

from dist_template.compat import randomness


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> None:
    functional = torch.nn.functional
    for name in (*randomness.DROPOUTS, "scaled_dot_product_attention"):
        monkeypatch.setattr(functional, name, getattr(functional, name))


def test_dropout_is_the_identity_and_noted_where_it_would_have_an_effect() -> None:
    noted: list[str] = []
    randomness.turn_dropout_off(lambda: noted.append("dropout"))
    ones = torch.ones(2, 3, 4, 4)
    for kind in (nn.Dropout, nn.Dropout2d, nn.AlphaDropout, nn.FeatureAlphaDropout):
        assert torch.equal(kind(0.5)(ones), ones)
    assert len(noted) == 4
    attended = nn.functional.scaled_dot_product_attention(ones, ones, ones, dropout_p=0.9)
    assert torch.allclose(attended, ones) and len(noted) == 5
    nn.Dropout(0.5).eval()(ones)
    nn.functional.dropout(ones, 0.0)
    assert len(noted) == 5
