"""Fixtures of several files of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.loopback import LACKING, Hosts


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    if LACKING:
        pytest.skip(LACKING)
    with Hosts(tmp_path_factory.mktemp("ssh")) as started:
        yield started
