"""Fixture: skips tests that run the device where it cannot work."""

import pytest

import fake_cuda


@pytest.fixture
def device() -> None:
    reason = fake_cuda.refusal()
    if reason:
        pytest.skip(reason)
