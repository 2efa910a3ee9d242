"""Estimates every strategy that a configuration and a machine allow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...cli.limits.machine import Machine as Described
from ...cli.limits.machine import Setup
from ...errors import InputError
from ...observe.history.run import History
from .activations import Activations
from .blueprint import Blueprint
from .candidates import Candidate, candidates
from .estimate import Machine, Planned

MOST_ROWS = 64  # of a micro-batch


class Planner:
    """Estimates a module's training, without its data and weights.

    Args:
        module: The configuration's module.
        data: The data module, of which only sizes are read.
        trainer: The Trainer's keyword arguments.
        described: Accelerator and precision.

    Raises:
        InputError: the model is not known.
    """

    def __init__(self, module: Any, data: Any, trainer: Any, described: Described) -> None:
        self.data, self._trainer, self._described = data, trainer, described
        self.blueprint, self._module = Blueprint(module, data), module
        masks, on_gpu = getattr(data, "cross_document_attention", None) is False, self._on_gpu
        self._activations = Activations(self.blueprint, masks, on_gpu)
        self._config = module.build_config(self.blueprint.data)

    @property
    def _on_gpu(self) -> bool:
        return self._described.accelerator != "cpu"

    def options(self, machine: Machine) -> list[Planned]:
        """Returns the best micro-batch and checkpointing of each strategy, the best first.

        Raises:
            InputError: `fit` accepts no strategy.
        """
        nodes, devices, batch = machine.nodes, machine.devices, self.data.global_batch_size
        kind, precision = self._described.accelerator, self._described.precision
        described = Described(kind, devices, nodes, precision)
        setup = Setup(described, self._trainer, self._module, self.data, self._config, trains=True)
        refused, found = [], []
        for candidate in candidates(nodes, devices):
            tp = (candidate.arguments or {}).get("tp_size", 1)
            rows, left = divmod(batch * tp, nodes * devices)
            if why := candidate.refusal(setup):
                refused.append(why)
            elif rows and not left:
                sizes = [2**n for n in range(MOST_ROWS.bit_length()) if rows % 2**n == 0]
                made = [(size, mode) for size in sizes for mode in ("none", "full")]
                every = [self.option(candidate, machine, *each) for each in made]
                found.append(min(every, key=lambda option: option.order))
        if not found:
            refused.append(
                f"data.global_batch_size {batch} is not a multiple of {nodes} x {devices} devices:"
                " edit it"
            )
            raise InputError(refused[0])
        return sorted(found, key=lambda option: option.order)

    def option(self, candidate: Candidate, machine: Machine, rows: int, mode: str) -> Planned:
        """Returns the estimate with micro-batches of `rows` sequences."""
        data = self.data
        sizes = {"seq_len": data.seq_len, "global_batch_size": data.global_batch_size}
        config = {
            "trainer": {"strategy": candidate.spec, "precision": self._described.precision},
            "data": sizes | {"micro_batch_size": rows},
            "model": {"blocks": {"checkpointing": mode}, "loss_chunk": self._module.loss_chunk},
        }
        ranks, device = machine.nodes * machine.devices, "cuda" if self._on_gpu else "cpu"
        facts = self.blueprint.facts | {"machine": {"world_size": ranks, "device": device}}
        history = History(Path(), config=config, facts=facts)
        return Planned(history, self._activations, machine, candidate)
