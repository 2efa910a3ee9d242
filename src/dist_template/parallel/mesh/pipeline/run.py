"""Runs the steps of a model that is divided into pipeline stages, by a schedule of torch.

A step, from top to bottom (`Pipeline.training_step`; docs/strategies/pipeline.md draws it):

1  Lightning hands over the micro-batches of `accumulate_grad_batches` one by one. They are queued,
   and all but the last return a loss of 0.
2  With the last one, torch's schedule runs forward and backward passes of this rank's stages, and
   sends hidden states and their gradients (torch.distributed.pipelining).
3  A forward pass of a stage is the user's `training_step`: on the last stage to its loss, on the
   others until the model ends, where StageEnd leaves it (division.py).
4  Gradients that FSDP2 has accumulated are reduced once, and a tied weight's copies summed.
5  Every rank returns the sum of the losses, which Lightning's backward pass does not follow.

In validation a batch moves through the stages while the next one follows. Other calls of the model
(generate) run stage by stage, and every rank gets the output."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ....compat import wrap_method
from ....compat.lightning import accumulates
from ....compat.torch import reduce_pipeline_gradients, tree_leaves, tree_map
from ....errors import InputError
from ....layout import joint_norm, layout, local_shard
from ....processes import from_all_ranks
from ...rank_view import LocalModel, T
from ..ranks import MeshRanks
from .division import Division, StageEnd
from .schedule import SCHEDULES, AddedLoss, Stage, unreduced
from .stages import ONE_STAGE, StageFacts

Args = tuple[object, ...]  # of a step
Shapes = tuple[object, ...]


class Pipeline(LocalModel):
    """This rank's part of a pipeline; `model` is divided, sharded, and on its device."""

    def __init__(
        self, model: nn.Module, division: Division, strategy: MeshRanks, facts: StageFacts
    ) -> None:
        self.model, self.division, self.running = model, division, division.stage
        self.module: Any = strategy.lightning_module
        self.device, self.facts = strategy.root_device, facts
        self.schedule, self.num_stages = strategy.pp_schedule, len(division.bounds)
        self.here = list(division.modules)  # numbers of this rank's stages
        self.has_last = self.num_stages - 1 in self.here
        self.group = strategy.device_mesh.get_group("pp")  # for collectives
        # NCCL would run messages and collectives of one group one after the other.
        self.messages = strategy.stages.get_group("pp")
        if self.messages is dist.group.WORLD:  # a mesh takes it where a dimension has all ranks
            self.messages = dist.new_group()
        self.batch_group = strategy.stages.get_group("of_stage")
        self.rank_of: dict[int, int] = {}  # of each stage
        ranks = dist.get_process_group_ranks(self.group)
        for rank, stages in zip(ranks, facts["stages"], strict=True):
            self.rank_of |= dict.fromkeys(stages, rank)
        self.last = self.rank_of[self.num_stages - 1]
        self._ends = None  # this rank's pair of a first and a last stage, if they are on two ranks
        if self.last != self.rank_of[0]:
            for pair in strategy.stages.mesh[[0, -1]].T.tolist():
                group = dist.new_group(pair)  # of all ranks, in one order
                if dist.get_rank() in pair:
                    self._ends = group
        self._queue: list[Args] = []  # arguments of `training_step`, by micro-batch
        self._schedules: dict[Shapes, tuple[Any, list[Stage]]] = {}
        self._hidden: dict[
            tuple[int, Shapes], tuple[torch.Size, torch.dtype]
        ] = {}  # shape and type that a stage gets
        self._sending: list[tuple[dist.Work, Tensor]] = []
        self._kept: Tensor | None = None  # what a stage gives the next one on this rank
        if generation := getattr(model, "generation_config", None):
            generation.use_cache = False  # a rank has the cache of its own blocks alone
        division.gate(model)
        wrap_method(model, "forward", self._run_all_stages)

    def __str__(self) -> str:
        numbers = ", ".join(str(stage + 1) for stage in self.here)
        return f"pipeline stage{'s' * (len(self.here) > 1)} {numbers} of {self.num_stages}, "

    # ---- a training step -------------------------------------------------------------------------

    def training_step(self, step: Callable[..., Any], args: Args) -> Tensor:
        """Returns () the sum of the losses of all micro-batches on the last one, 0 on the
        others."""
        self._queue.append(args)
        loss = torch.zeros((), device=self.device, requires_grad=True)
        if accumulates(self.module.trainer):
            return loss
        queue, self._queue = self._queue, []
        num, balancer = len(queue), self.module.balancer
        counts, balancer.counts_now = balancer.counts_now, False
        schedule, stages = self._schedule_of(step, queue)

        def forward(stage: Stage, number: int, received: Tensor | None) -> Tensor:
            balancer.counts_now, self.running.micro_batch = counts, number
            try:
                with self._stage(stage.stage_index, received):
                    output = step(*queue[number])
                if isinstance(output, dict):
                    output = output["loss"]
                return output / num
            except StageEnd:
                return self._with_losses(queue[number][0], num)
            finally:
                balancer.counts_now = False

        for stage in stages:
            stage.run = forward
        losses: list[Tensor] = []
        numbers = torch.arange(num)
        inputs = [numbers] * (0 in self.here)
        units = [unit for unit in self.model.modules() if isinstance(unit, FSDPModule)]
        try:
            with unreduced(units):
                schedule.step(*inputs, target=numbers, losses=losses, return_outputs=False)
        except RuntimeError as error:  # torch puts the arguments' tensors into an error of its own
            if error.__cause__ is not None and "failed to run forward" in str(error):
                raise error.__cause__ from None
            raise
        if units:
            reduce_pipeline_gradients(self.model)
        self._sum_shared()
        balancer.counts_now = counts
        total = torch.zeros((), device=self.device)
        if self.has_last:
            total = torch.stack([each.detach() for each in losses]).sum() * num
        dist.broadcast(total, self.last, self.group)
        return total.requires_grad_()

    def _with_losses(self, batch: object, num: int) -> Tensor:
        """Returns the stage's hidden states with the losses of its routers, which the last stage
        does not see."""
        hidden, loss = self.running.sent, torch.zeros((), device=self.device)
        assert hidden is not None
        for name, weight, value in self.module.balancer.losses(batch):
            self.module.track(name, value)
            loss = loss + weight * value
        return AddedLoss.apply(hidden, (loss / num).float() if loss.requires_grad else None)

    def _schedule_of(
        self, step: Callable[..., object], queue: list[Args]
    ) -> tuple[Any, list[Stage]]:
        """Returns torch's schedule and this rank's stages, made once for a number of micro-batches
        and their shapes."""
        first = shapes_of(queue[0])
        for args in queue:
            if (shapes := shapes_of(args)) != first:
                raise InputError(
                    f"a pipeline needs micro-batches of equal shapes, not {first} and {shapes}:"
                    " pack or pad the rows"
                )
        key = (len(queue), first)
        if key in self._schedules:
            return self._schedules[key]
        # A forward pass sends each stage's output with its shape, which torch needs.
        with torch.no_grad(), torch.random.fork_rng([self.device] * (self.device.type == "cuda")):
            self._run_stages(step, queue[0], runs_last=False)
        for old in [each for each in self._schedules if each[0] != len(queue)]:  # a growing batch
            del self._schedules[old]
        stages = [Stage(self, number, first) for number in self.here]
        options: dict[str, Any] = {"loss_fn": lambda loss, _: loss, "scale_grads": False}
        made = SCHEDULES[self.schedule](
            stages[0] if self.schedule in ONE_STAGE else stages, len(queue), **options
        )
        self._schedules[key] = made, stages
        return made, stages

    def _sum_shared(self) -> None:
        """Sums the gradients of the copies of a tied parameter."""
        for parameter in self.division.shared:
            gradient = parameter.grad
            if gradient is None:  # it is frozen, on both ranks
                continue
            # Under tensor parallelism an embedding's is replicated, and its parameter sharded.
            if isinstance(gradient, DTensor):
                gradient = gradient.redistribute(placements=layout(parameter)[1])
                parameter.grad = gradient
            dist.all_reduce(local_shard(gradient), group=self._ends)

    def norm(self, parameters: list[nn.Parameter]) -> Tensor:
        """Returns () the 2-norm of the gradients of all stages, a tied parameter's once."""
        if self.has_last:
            counted = set(map(id, self.division.shared))
            parameters = [p for p in parameters if id(p) not in counted]
        norm = joint_norm(parameters)
        square = torch.zeros((), device=self.device) if norm is None else norm.float().square()
        dist.all_reduce(square, group=self.group)
        return square.sqrt()

    # ---- forward passes alone --------------------------------------------------------------------

    def evaluate(self, step: Callable[..., T], args: Args) -> T | None:
        """Runs a validation or test step; on the last stage alone if the module's sums are there.
        Otherwise every rank runs the whole step, on the output of the last stage."""
        if getattr(self.module, "sums_on_last_stage", False):
            return self._run_stages(step, args)
        return step(*args)

    @torch.no_grad()
    def forward_only(self, step: Callable[..., T], args: Args) -> T | None:
        return self._run_stages(step, args)

    def _run_stages(self, step: Callable[..., T], args: Args, runs_last: bool = True) -> T | None:
        """Runs `step` stage by stage; returns its result on the last stage, None elsewhere."""
        key = shapes_of(args)
        for stage in self.here:
            received = self._receive(stage, key)
            if stage == self.num_stages - 1 and not runs_last:
                return None
            try:
                with self._stage(stage, received):
                    return step(*args)
            except StageEnd:
                self._send(stage, key)
        return None

    def _run_all_stages(
        self, forward: Callable[..., object], *args: object, **kwargs: object
    ) -> object:
        """Outside of a step, a call of the model runs all stages and returns the last one's output
        on every rank."""
        if self.running.is_active:
            return forward(*args, **kwargs)
        key, output = ("whole", shapes_of((args, kwargs))), None
        for stage in self.here:
            received = self._receive(stage, key)
            with self._stage(stage, received, ends_step=False):
                output = forward(*args, **kwargs)
            if stage < self.num_stages - 1:
                self._send(stage, key)
        # The other ranks' outputs have tensors of other shapes.
        tensors = [leaf.contiguous() for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        sent = []
        for place, (shape, dtype) in enumerate(
            self.from_last(lambda: [(t.shape, t.dtype) for t in tensors])
        ):
            sent.append(
                tensors[place]
                if self.has_last
                else torch.empty(shape, dtype=dtype, device=self.device)
            )
            dist.broadcast(sent[-1], self.last, self.group)
        received = iter(sent)
        return tree_map(lambda leaf: next(received) if isinstance(leaf, Tensor) else leaf, output)

    def _stage(
        self, stage: int, received: Tensor | None, ends_step: bool = True
    ) -> AbstractContextManager[None]:
        return self.running.running(self.division.bounds[stage], received, ends_step)

    def _receive(self, stage: int, key: Shapes) -> Tensor | None:
        """Returns what the stage before has sent, for a batch of the shapes `key`."""
        if stage == 0:
            return None
        if stage - 1 in self.here:
            received, self._kept = self._kept, None
            return received
        source = self.rank_of[stage - 1]
        if (stage, key) not in self._hidden:
            box: list[Any] = [None]
            dist.recv_object_list(box, source, self.messages)
            self._hidden[stage, key] = box[0]
        received = torch.empty_like(self.hidden_of(stage, key), device=self.device).detach()
        dist.recv(received, source, self.messages)
        return received

    def _send(self, stage: int, key: Shapes) -> None:
        assert self.running.sent is not None
        hidden = self.running.sent.detach().contiguous()
        is_known = (stage + 1, key) in self._hidden
        self._hidden[stage + 1, key] = found = hidden.shape, hidden.dtype
        if stage + 1 in self.here:
            self._kept = hidden
            return
        target = self.rank_of[stage + 1]
        if not is_known:
            dist.send_object_list([found], target, self.messages)
        for work, _ in self._sending:  # the one before
            work.wait()
        work = dist.isend(hidden, target, self.messages)
        assert work is not None
        self._sending = [(work, hidden)]

    def hidden_of(self, stage: int, key: Shapes) -> Tensor:
        """Returns what `stage` receives in a batch of the shapes `key`, on the meta device."""
        shape, dtype = self._hidden[stage, key]
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)

    # ---- answers ---------------------------------------------------------------------------------

    def from_last(self, compute: Callable[[], T]) -> T:
        """Returns what the ranks of the last stage compute, plain types, on every rank."""
        box: list[Any] = [self.has_last and compute()]
        dist.broadcast_object_list(box, self.last, self.group)
        return box[0]

    def all_names(self, names: list[str]) -> list[str]:
        return list(dict.fromkeys(sum(from_all_ranks(names, self.group), [])))

    def micro_batch_of_pass(self, newest: int) -> int | None:
        if not self.running.is_inside:
            return None
        return self.running.micro_batch

    def first_block_of_pass(self) -> int | None:
        return self.running.start if self.running.is_inside else None


def shapes_of(args: object) -> Shapes:
    """Returns the shapes of the tensors of a batch that has rows; hidden states follow from them.
    Vectors are left out, such as the first tokens of packed documents."""
    tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
    return tuple(tuple(tensor.shape) for tensor in tensors if tensor.dim() > 1)
