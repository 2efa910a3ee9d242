"""What a strategy sends in an optimizer step, from the model's shapes and the number of ranks alone: the library's
formulas (`Estimate.traffic`), for a model on the meta device.

NCCL may take trees in place of rings, which send as many bytes. Left out is what does not grow with
the model: the count of tokens, the gradient norm, votes, metrics at log steps; and a model's buffers.
`tests/template/test_traffic.py` compares these numbers with the collectives of two and four processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from dist_template.parallel.estimates import estimate_of
from dist_template.parallel.estimates.facts import Sent
from dist_template.text.model.facts import facts_of


@dataclass(frozen=True)
class Setting:
    """Where a model trains, and how.

    Args:
        ranks: Processes.
        tokens: Of a micro-batch on one rank.
        accumulation: Micro-batches per optimizer step.
        node: Ranks that hold one replica under HSDP, and share matrices, experts or sequences under tp, ep and cp.
        stages: Of a pipeline, one per rank.
        half: Precision bf16-mixed in place of 32-true.
        reduces_each: FSDP2's `reduce_each_micro_batch`.
    """

    ranks: int
    tokens: int
    accumulation: int = 1
    node: int = 8
    stages: int = 2
    half: bool = True
    reduces_each: bool = True

    @property
    def shared(self) -> int:
        return min(self.ranks, self.node)


STRATEGIES: dict[str, Callable[[Setting], dict[str, Any] | int | None]] = {  # by their files in configs/strategy/
    "ddp": lambda at: None,
    "fsdp2": lambda at: {},
    "hsdp": lambda at: {"dp_replicate_size": at.ranks // at.shared},
    "tp": lambda at: {"fsdp_size": 1, "tp_size": at.ranks},
    "fsdp2_tp": lambda at: {"tp_size": at.shared},
    "fsdp2_ep": lambda at: {"ep_size": at.shared},
    "fsdp2_tp_ep": lambda at: {"tp_size": at.shared, "ep_size": at.shared},
    "cp": lambda at: {"cp_size": at.shared},
    "pp": lambda at: {"pp_size": at.stages, "fsdp_size": 1, "dp_replicate_size": "auto"},
    "pp_fsdp2": lambda at: {"pp_size": at.stages},
    "pp_ep": lambda at: {"pp_size": at.stages, "ep_size": min(at.ranks // at.stages, at.node)},
    "zero1": lambda at: 1,
    "zero2": lambda at: 2,
    "zero3": lambda at: 3,
}


def traffic(name: str, model: nn.Module, at: Setting) -> Iterator[Sent]:
    """Yields what a rank sends in an optimizer step under one of `STRATEGIES`."""
    given = STRATEGIES[name](at)
    strategy: Any = "ddp" if given is None else {"class_path": "ZeroStrategy", "init_args": {"stage": given}}
    if isinstance(given, dict):
        strategy = {"class_path": "MeshStrategy", "init_args": {"reduce_each_micro_batch": at.reduces_each, **given}}
    sharding = estimate_of(strategy)
    facts = replace(
        facts_of(model, model)[1],
        world_size=at.ranks,
        precision="bf16-mixed" if at.half else "32-true",
        seq_len=at.tokens * (at.shared if name == "cp" else 1),
        global_batch_size=at.accumulation * sharding.data_parallel(at.ranks),
        pipeline=sharding.stage_facts(model, at.ranks),
    )
    return sharding.traffic(facts)
