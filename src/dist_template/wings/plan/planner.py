"""Estimates every strategy that a configuration and a machine allow."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import chain
from typing import Any

from ...cli.limits import proven, training
from ...cli.limits.machine import Machine as Described
from ...cli.limits.machine import Setup
from ...errors import InputError, reason
from ...parallel.estimates.candidates import Candidate, candidates
from .estimate import RECOMPUTED, Machine, Planned
from .trace import Traced

MOST_ROWS = 64  # of a micro-batch


class Planner:
    """Estimates the training of a module, by the Trainer's keyword arguments and the precision and
    accelerator of `described`, without data and weights."""

    def __init__(self, module: Any, data: Any, trainer: Any, described: Described) -> None:
        self.data, self._module = data, module
        self._trainer, self._described = trainer, described
        self.traced = Traced(module, data, described.accelerator != "cpu")
        self._config = module.build_config(self.traced.data)
        self._stage_facts = cache(lambda each, world_size: each.sharding.stage_facts(self.traced.model, world_size))
        self.failed: dict[str, list[str]] = {}  # why a trace fails -> the strategies without it

    def options(self, machine: Machine) -> list[Planned]:
        """Returns the best micro-batch, checkpointing and schedule of each strategy, the best first.

        Raises:
            InputError: `fit` accepts no strategy, or no model of one can be traced.
        """
        found = []
        for candidate, rows in self._accepted(machine).items():
            sizes = [2**n for n in range(MOST_ROWS.bit_length()) if rows % 2**n == 0]
            every = self.ranked(candidate, machine, sizes, [*RECOMPUTED])
            found += [option for option in every if option.is_allowed][:1]
        if not found and self.failed:
            raise InputError(f"plan cannot trace this model: {next(iter(self.failed))}")
        shown: dict[str, Planned] = {}
        for option in sorted(found, key=lambda option: option.order):
            shown.setdefault(option.candidate.name, option)
        return [*shown.values()]

    def fits(self, machine: Machine) -> bool:
        accepted = self._accepted(machine)
        return any(o.fits for each in accepted for o in self.ranked(each, machine, [1], ["full"]))

    def ranked(self, candidate: Candidate, machine: Machine, sizes: list[int], modes: list[str]) -> list[Planned]:
        """Returns the estimates for micro-batches of `sizes` sequences and for `modes` of
        checkpointing, the best first; without a mode whose trace fails, as `failed` explains."""
        found: list[Planned] = []
        for mode in modes:
            try:
                every = [self.option(candidate, machine, size, mode) for size in sizes]
                found += sorted(every, key=lambda option: option.order)
            except Exception as error:  # of the model's own code, whose shapes are a rank's
                names, name = self.failed.setdefault(reason(error), []), candidate.name
                name += f" with checkpointing {mode}" * (mode != modes[0])
                names += [name] * (name not in names and candidate.name not in names)
        return sorted(found, key=lambda option: option.order)

    def _accepted(self, machine: Machine) -> dict[Candidate, int]:
        """Returns the strategies that `fit` accepts, and the sequences of a rank in a step.

        Raises:
            InputError: there is none.
        """
        nodes, devices, batch = machine.nodes, machine.devices, self.data.global_batch_size
        described = replace(self._described, devices=devices, num_nodes=nodes)
        refused, accepted = [], {}
        for candidate in candidates(nodes, devices):
            if why := self._refusal(candidate, described):
                refused.append(why)
                continue
            rows, left = divmod(batch, candidate.sharding.data_parallel(nodes * devices))
            if not left and self.option(candidate, machine, 1, "none").is_allowed:
                accepted[candidate] = rows
        if not accepted:
            which = f"data.global_batch_size {batch} is not a multiple of {nodes} x {devices}"
            raise InputError([*refused, f"{which} devices: edit it"][0])
        return accepted

    def _refusal(self, candidate: Candidate, described: Described) -> str:
        """Returns why `fit` would refuse a strategy with any micro-batches; "" if it would not."""
        trainer = {**self._trainer, "strategy": candidate.sharding}
        setup = Setup(described, trainer, self._module, self.data, self._config, trains=False)
        try:
            self._stage_facts(candidate, described.world_size)
        except InputError as error:  # too few blocks
            return str(error)
        checks = (training.precision, training.strategy)
        found = chain.from_iterable(check(setup) for check in checks)
        return next(chain(found, proven.refused(replace(setup, trains=True))), "")

    def option(self, candidate: Candidate, machine: Machine, rows: int, mode: str) -> Planned:
        """Returns the estimate with micro-batches of `rows` sequences."""
        world = machine.nodes * machine.devices
        facts = replace(
            self.traced.facts,
            world_size=world,
            precision=self._described.precision,
            checkpointing=mode,
            micro_batch_size=rows,
            seq_len=self.data.seq_len,
            global_batch_size=self.data.global_batch_size,
            loss_chunk=self._module.loss_chunk,
            on_host=self._described.accelerator == "cpu",
            pipeline=self._stage_facts(candidate, world),
            traced=lambda run: self.traced.activations(rows, *run, mode),
        )
        return Planned(candidate, machine, facts, self.traced.flops_per_token)
