"""Runs the training step of a pipeline, by a schedule of torch.

torch.distributed.pipelining has the schedules and the messages between stages. It runs a module on
chunks of one tensor; here each stage runs the user's whole `training_step` on a micro-batch: on the
last stage to its loss, on the others until the model ends. The micro-batches are those of
`accumulate_grad_batches`: Lightning hands them over one by one, and the last one starts the
schedule.

    weights        sharded by FSDP2 inside a stage are gathered once per optimizer step, and their
                   gradients reduced once (ZeRO-1), as torch's schedules do
    tied weights   the first and the last stage have a copy each and sum their gradients
    validation     a batch moves through the stages while the next one follows; the sums of
                   TextModule stay on the last stage until the split ends
    other calls    (generate) run stage by stage, and every rank gets the model's output
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ...compat.lightning import accumulates
from ...compat.torch import reduce_pipeline_gradients
from ...errors import InputError
from ...layout import layout, local_shard, total_norm
from .costs import ONE_STAGE
from .division import Division, StageEnd
from .forward import ForwardPasses, shapes_of
from .partition import bounds_between, facts_of
from .schedule import (
    SCHEDULES,
    Stage,
    own_error,
    unreduced,
    with_losses,
)


def divide(model: nn.Module, strategy: Any) -> Division:
    """Divides `model` by a MeshStrategy's keys, in place.

    Raises:
        InputError: it has too few blocks, or cannot be divided.
    """
    keys = strategy.sharding
    settings = keys.pp_schedule, keys.pp_stages_per_rank, keys.pp_layers
    facts = facts_of(model, strategy.mesh_sizes.pp, *settings)
    own = facts["stages"][strategy.stages.get_local_rank("pp")]
    return Division(model, bounds_between(facts["blocks"]), own, facts)


class Pipeline(ForwardPasses):
    """This rank's part of a pipeline.

    Args:
        model: Divided, sharded, on its device.
        division: Its stages.
        strategy: A MeshStrategy.
    """

    def __init__(self, model: nn.Module, division: Division, strategy: Any) -> None:
        super().__init__(model, division, strategy)
        self._steps: list[Any] = []  # the arguments of `training_step`, one micro-batch each
        self._schedules: dict[Any, tuple[Any, list[Stage]]] = {}
        self.clocks: dict[int, Any] = {}  # by own stage: what times its passes, if anything does
        self._ends = None
        ends = strategy.stages.mesh[[0, -1]].T.tolist()
        for pair in ends if self.last != self.rank_of[0] else ():
            group = dist.new_group(pair)  # of all ranks, in one order
            self._ends = group if dist.get_rank() in pair else self._ends

    def start_clocks(self, make: Callable[[], Any]) -> list[Any]:
        """Times the passes of each of this rank's stages by a clock that `make` returns."""
        self.clocks.update((stage, make()) for stage in self.own)
        return [*self.clocks.values()]

    # ---- training --------------------------------------------------------------------------------

    def training_step(self, step: Callable[..., Any], args: Any) -> Tensor:
        """Returns () the sum of the losses of all micro-batches on the last one, 0 on the others.

        Args:
            step: Runs the module's `training_step` on a micro-batch.
            args: The arguments of `step`.
        """
        self._steps.append(args)
        loss = torch.zeros((), device=self.device)
        if accumulates(self.module.trainer):
            return loss.requires_grad_()
        steps, self._steps = self._steps, []
        num, balancer = len(steps), self.module.balancer
        counts, balancer.counts_now = balancer.counts_now, False
        schedule, stages = self._schedule_of(step, steps)

        def forward(stage: Stage, number: int, received: Tensor | None) -> Tensor:
            balancer.counts_now, self.position.micro_batch = counts, number
            try:
                with self._at(stage.stage_index, received, raises=True):
                    output = step(*steps[number])
                return (output["loss"] if isinstance(output, dict) else output) / num
            except StageEnd:
                return with_losses(self.position.sent, self.module, steps[number][0], num)
            finally:
                balancer.counts_now = False

        for stage in stages:
            stage.run = forward
        losses: list[Tensor] = []
        numbers = torch.arange(num)
        units = [unit for unit in self.model.modules() if isinstance(unit, FSDPModule)]
        with unreduced(units), own_error():
            inputs = [numbers] if 0 in self.own else []
            schedule.step(*inputs, target=numbers, losses=losses, return_outputs=False)
        if units:
            reduce_pipeline_gradients(self.model)
        self._sum_shared()
        balancer.counts_now = counts
        if self.has_last:
            loss = torch.stack([each.detach() for each in losses]).sum() * num
        dist.broadcast(loss, self.last, self.group)
        return loss.requires_grad_()

    def _schedule_of(self, step: Any, steps: list[Any]) -> tuple[Any, list[Stage]]:
        shapes = [shapes_of(args) for args in steps]
        if any(shape != shapes[0] for shape in shapes):
            raise InputError(
                f"a pipeline needs micro-batches of equal shapes, not {shapes[0]} and"
                f" {next(s for s in shapes if s != shapes[0])}: pack or pad the rows"
            )
        key = (len(steps), shapes[0])
        if key not in self._schedules:
            self._measure(step, steps[0], shapes[0])
            kind = SCHEDULES[self.schedule]
            stages = [Stage(self, number, shapes[0]) for number in self.own]
            given: Any = stages[0] if self.schedule in ONE_STAGE else stages
            try:
                schedule = kind(given, len(steps), lambda loss, _: loss, scale_grads=False)
            except ValueError as error:
                raise InputError(f"pp_schedule {self.schedule}: {error}") from error
            self._schedules[key] = schedule, stages
        return self._schedules[key]

    def _measure(self, step: Any, args: Any, key: Any) -> None:
        """Runs a forward pass that sends each stage's output with its shape, which torch needs."""
        with torch.no_grad(), torch.random.fork_rng(_generators(self.device)):
            self.forward_only(step, args, key, runs_last=False)

    def _sum_shared(self) -> None:
        """Sums the gradients of the copies of a tied parameter."""
        for parameter in self.division.shared:
            gradient: Any = parameter.grad
            if gradient is None:  # it is frozen, on both ranks
                continue
            # Under tensor parallelism an embedding's is replicated, and its parameter sharded.
            if isinstance(gradient, DTensor):
                gradient = gradient.redistribute(placements=layout(parameter)[1])
                parameter.grad = gradient
            dist.all_reduce(local_shard(gradient), group=self._ends)

    def norm(self, parameters: list[nn.Parameter]) -> Tensor:
        """Returns () the 2-norm of the gradients of all stages, a tied parameter's once."""
        counted = {id(p) for p in self.division.shared} if self.has_last else set()
        gradients = [p.grad for p in parameters if p.grad is not None and id(p) not in counted]
        square = torch.zeros((), device=self.device)
        if gradients:
            square = total_norm(gradients).float().square()
        dist.all_reduce(square, group=self.group)
        return square.sqrt()


def _generators(device: torch.device) -> list[torch.device]:
    return [device] if device.type == "cuda" else []
