"""Estimates every strategy that a configuration and a machine allow.

`options` asks the limits of `fit` which strategies it would accept, estimates each of them with
every micro-batch and every kind of checkpointing, keeps the best one of each, and sorts these."""

from dataclasses import replace
from functools import cache
from typing import Any

from ...cli.limits import Machine as Described
from ...cli.limits import refusal_of_strategy
from ...errors import InputError, reason
from ...parallel.spec.candidates import Candidate
from .estimate import RECOMPUTED, Machine, Planned
from .trace import Traced

MICRO_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)


class Planner:
    """Estimates the training of a module, by the Trainer's keyword arguments and the precision and
    accelerator of `described`, without data and weights."""

    def __init__(self, module: Any, data: Any, trainer: Any, described: Described) -> None:
        self.data, self._module = data, module
        self._trainer, self._described = trainer, described
        self.traced = Traced(module, data, described.accelerator != "cpu")
        self._config = module.build_config(self.traced.data)
        self._stages = cache(self._stage_facts)
        trained = self.traced.facts.parameters
        self._frozen = self.traced.objective.frozen_parameters(module, self.traced.data, trained)
        self.failed: dict[str, str] = {}  # strategy and checkpointing -> why their trace fails

    def options(self, machine: Machine) -> list[Planned]:
        """Returns the best micro-batch, checkpointing and schedule of each strategy, the best
        first."""
        best: dict[str, Planned] = {}
        for candidate, rows in self._accepted(machine).items():
            name = candidate.name
            for micro_batch_size in MICRO_BATCH_SIZES:
                if rows % micro_batch_size:
                    continue
                for option in self.by_checkpointing(candidate, machine, micro_batch_size):
                    if not option.is_allowed:
                        continue
                    if name not in best or option.order < best[name].order:
                        best[name] = option
        if not best:
            first_error = next(iter(self.failed.values()))
            raise InputError(f"plan cannot trace this model: {first_error}")
        # Without the micro-batch: equal strategies stay in the order in which Candidate.of has
        # them, as a sort of Python is stable.
        return sorted(best.values(), key=lambda option: option.order[:3])

    def by_checkpointing(self, candidate: Candidate, machine: Machine, rows: int) -> list[Planned]:
        """Returns the estimates with micro-batches of `rows` sequences; without a checkpointing
        whose trace fails, as `failed` explains."""
        options = []
        for mode in RECOMPUTED:
            option = self.option(candidate, machine, rows, mode)
            try:
                option.total()  # traces the model
                options.append(option)
            except Exception as error:  # of the model's own code, whose shapes are a rank's
                self.failed[f"{candidate.name} with checkpointing {mode}"] = reason(error)
        return options

    def _accepted(self, machine: Machine) -> dict[Candidate, int]:
        """Returns the strategies that `fit` accepts, and the sequences of a rank in a step."""
        nodes, devices = machine.nodes, machine.devices
        batch = self.data.batch_sizes[0]
        described = replace(self._described, devices=devices, num_nodes=nodes)
        refusals: list[str] = []
        accepted: dict[Candidate, int] = {}
        for candidate in Candidate.of(nodes, devices):
            refusal = self._refusal(candidate, described)
            if refusal:
                refusals.append(refusal)
                continue
            rows, remainder = divmod(batch, candidate.spec.data_parallel(nodes * devices))
            if remainder == 0 and self.option(candidate, machine, 1, "none").is_allowed:
                accepted[candidate] = rows
        if accepted:
            return accepted
        if refusals:
            raise InputError(refusals[0])
        raise InputError(
            f"data.global_batch_size {batch} is not a multiple of {nodes} x {devices} devices:"
            " edit it"
        )

    def _stage_facts(self, candidate: Candidate, world_size: int) -> Any:
        """Returns the StageFacts of a pipeline; None without one. Raises InputError if the model
        has too few blocks. `self._stages` keeps the results."""
        return candidate.spec.stage_facts(self.traced.model, world_size)

    def _refusal(self, candidate: Candidate, described: Described) -> str:
        """Returns why `fit` would refuse a strategy with any micro-batches; "" if it would not."""
        trainer = self._trainer | {"strategy": candidate.spec}
        try:
            self._stages(candidate, described.world_size)
        except InputError as error:  # too few blocks
            return str(error)
        return refusal_of_strategy(described, trainer, self._module, self.data, self._config)

    def option(self, candidate: Candidate, machine: Machine, rows: int, mode: str) -> Planned:
        """Returns the estimate with micro-batches of `rows` sequences."""
        world_size = machine.nodes * machine.devices
        multiplied, stored = self._frozen
        loss_chunk = None
        if self.traced.objective.in_chunks:
            loss_chunk = self._module.loss_chunk
        matrices = 0
        if self._module.optim.uses_muon:
            matrices = self.traced.facts.matrices
        facts = replace(
            self.traced.facts,
            world_size=world_size,
            matrices=matrices,
            precision=self._described.precision,
            checkpointing=mode,
            micro_batch_size=rows,
            seq_len=self.data.seq_len,
            global_batch_size=self.data.batch_sizes[1],
            frozen=stored,
            loss_chunk=loss_chunk,
            on_host=self._described.accelerator == "cpu",
            pipeline=self._stages(candidate, world_size),
            traced=lambda run: self.traced.activations(rows, *run, mode),
        )
        # A product of one weight and one activation is two operations.
        return Planned(candidate, machine, facts, self.traced.flops_per_token, 2.0 * multiplied)
