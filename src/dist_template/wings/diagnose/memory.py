"""The figures of a run on which its memory depends, with its keys or with changed ones; no torch.

`parallel/estimates/` has the formulas; tests/wings/diagnose/test_diagnosis_memory.py compares them with tensors."""

from __future__ import annotations

from typing import Any

from ...observe.history.run import History
from ...parallel import estimates
from ...parallel.configured import ARGS
from ...parallel.estimates.facts import Facts
from ...parallel.estimates.plain import FILES
from ...records import GIB

STRATEGY = f"{ARGS}."
Changes = dict[str, Any]  # key of the configuration: its value


class Estimate:
    """The memory of a rank, by facts.json, with its parameters.total, and the configuration with `changes` of keys."""

    def __init__(self, history: History, changes: Changes | None = None) -> None:
        self._history, self._changes = history, changes or {}
        self.sharding, self.facts = self._sharding(), self._facts()

    def parts(self) -> dict[str, float]:
        """Returns all parts; in backward, the gradients of one block's activations are added."""
        parts = self.sharding.memory(self.facts)
        parts["activations"] += parts.pop("backward")
        return parts

    def state(self) -> dict[str, float]:
        """Returns weights, gradients, optimizer state and their buffers."""
        return self.sharding.state(self.facts)

    def _key(self, path: str, default: Any = None) -> Any:
        return self._changes.get(path, self._history.key(path, default))

    def _fact(self, path: str) -> int:
        return self._history.fact(path) or 0

    def _sharding(self) -> estimates.Estimate:
        strategy = FILES.get(self._changes.get("config", "")) or self._key("trainer.strategy")
        if not isinstance(strategy, dict):
            return estimates.estimate_of(strategy or "auto")
        arguments: Any = strategy.get("init_args")
        given: dict[str, Any] = dict(arguments or {})
        for key, value in self._changes.items():
            if key.startswith(STRATEGY):
                given[key.removeprefix(STRATEGY)] = value
        return estimates.estimate_of({**strategy, "init_args": given})

    def _facts(self) -> Facts:
        total = self._fact("parameters.total")
        return Facts(
            world_size=self._fact("machine.world_size") or 1,
            parameters=total,
            trainable=self._fact("parameters.trainable") or total,
            in_4_bits=self._fact("parameters.in_4_bits"),
            embedding=self._fact("parameters.embedding"),
            layers=max(self._fact("model.layers"), 1),
            width=self._fact("model.width"),
            vocab_size=self._fact("model.vocab_size"),
            precision=str(self._key("trainer.precision") or "32-true"),
            checkpointing=self._key("model.blocks.checkpointing", "none"),
            micro_batch_size=self._key("data.micro_batch_size", 1),
            seq_len=self._key("data.seq_len", 0),
            global_batch_size=self._key("data.global_batch_size", 0),
            loss_chunk=self._key("model.loss_chunk"),
            on_host=self._history.fact("machine.device", "cpu") == "cpu",
            pipeline=self._history.fact("pipeline") or None,
        )


def as_size(size: float) -> str:
    return f"{size / GIB:.3g} GiB" if size >= GIB / 10 else f"{size / 2**20:.3g} MiB"
