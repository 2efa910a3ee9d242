"""How a model is cut over ranks: what Lightning lacks. place.py is the seam; the strategies are mesh.py and zero.py."""

from __future__ import annotations

from typing import Any


def data_parallel_size(strategy: Any, world_size: int) -> int:
    """How many ranks each see a batch of their own when `strategy` runs on `world_size` ranks.

    Raises:
        InputError: the strategy's sizes do not fit.
    """
    return strategy.sizes(world_size).data_parallel if hasattr(strategy, "sizes") else world_size
