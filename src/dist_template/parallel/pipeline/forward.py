"""Forward passes through all stages: of a validation step, and of a call of the model outside of a
step, such as `generate`'s."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...compat.torch import tree_leaves, tree_map
from ...weights import from_all_ranks
from .division import Division, StageEnd


class ForwardPasses:
    """This rank's part of a pipeline.

    Args:
        model: Divided, sharded, on its device.
        division: Its stages.
        strategy: A MeshStrategy.
    """

    def __init__(self, model: nn.Module, division: Division, strategy: Any) -> None:
        self.model, self.division, self.position = model, division, division.position
        self.module, self.device = strategy.lightning_module, strategy.root_device
        self.schedule, self.num_stages = strategy.sharding.pp_schedule, len(division.bounds)
        self.own = list(division.parts)
        self.group = strategy.device_mesh.get_group("pp")  # for collectives
        # NCCL would run messages and collectives of one group one after the other.
        self.messages = strategy.stages.get_group("pp")
        if self.messages is dist.group.WORLD:  # a mesh takes it where a dimension has all ranks
            self.messages = dist.new_group()
        ranks = dist.get_process_group_ranks(self.group)
        pairs = zip(ranks, division.facts["stages"], strict=True)
        self.rank_of = {stage: rank for rank, stages in pairs for stage in stages}
        self.last = self.rank_of[self.num_stages - 1]
        self._outlines: dict[Any, tuple[Any, torch.dtype]] = {}  # of what a stage receives
        self._sending: list[Any] = []
        if generation := getattr(model, "generation_config", None):
            generation.use_cache = False  # a rank has the cache of its own blocks alone
        division.gate(model)
        model.forward = self._whole(model.forward)

    def __str__(self) -> str:
        numbers = ", ".join(str(stage + 1) for stage in self.own)
        return f"stage{'s' * (len(self.own) > 1)} {numbers} of {self.num_stages}"

    @property
    def has_last(self) -> bool:
        return self.num_stages - 1 in self.own

    def forward_only(self, step: Any, args: Any, key: Any = None, runs_last: bool = True) -> Any:
        """Runs `step` stage by stage; returns its result on the last stage, None elsewhere."""
        key = key or shapes_of(args)
        for stage in self.own:
            received = self._receive(stage, key)
            if stage == self.num_stages - 1 and not runs_last:
                return None
            try:
                with self._at(stage, received, raises=True):
                    return step(*args)
            except StageEnd:
                self._send(stage, key, self.position.sent)
        return None

    def evaluate(self, step: Callable[..., Any], *args: Any) -> Any:
        """Runs a validation or test step; on the last stage alone if the module's sums are there.

        Otherwise every rank runs the whole step, on the output of the last stage.
        """
        if getattr(self.module, "sums_on_last_stage", False):
            return self.forward_only(step, args)
        return step(*args)

    def from_last(self, compute: Callable[[], Any]) -> Any:
        """Returns what the ranks of the last stage compute, plain types, on every rank."""
        box = [compute() if self.has_last else None]
        dist.broadcast_object_list(box, self.last, self.group)
        return box[0]

    def names_of_stages(self, own: list[str]) -> list[str]:
        """Returns the names that any stage has, in one order on every rank."""
        return list(dict.fromkeys(sum(from_all_ranks(own, self.group), [])))

    def _whole(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Outside of a step, a call of the model runs all stages and returns the last one's output
        everywhere."""

        @functools.wraps(forward)
        def whole(*args: Any, **kwargs: Any) -> Any:
            if self.position.is_active:
                return forward(*args, **kwargs)
            key, output = ("whole", shapes_of((args, kwargs))), None
            for stage in self.own:
                received = self._receive(stage, key)
                with self._at(stage, received, raises=False):
                    output = forward(*args, **kwargs)
                if stage < self.num_stages - 1:
                    self._send(stage, key, self.position.sent)
            return self._replicated(output)

        return whole

    def _replicated(self, output: Any) -> Any:
        """Returns the last stage's `output`: the other ranks' have tensors of other shapes."""
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        outlines = self.from_last(lambda: [(t.shape, t.dtype) for t in tensors])
        if self.has_last:
            sent = [tensor.contiguous() for tensor in tensors]
        else:
            sent = [torch.empty(s, dtype=d, device=self.device) for s, d in outlines]
        for tensor in sent:
            dist.broadcast(tensor, self.last, self.group)
        received = iter(sent)
        return tree_map(lambda leaf: next(received) if isinstance(leaf, Tensor) else leaf, output)

    def _receive(self, stage: int, key: Any) -> Tensor | None:
        if stage == 0:
            return None
        source = self.rank_of[stage - 1]
        if stage - 1 in self.own:
            return self._kept
        if (stage, key) not in self._outlines:
            box: list[Any] = [None]
            dist.recv_object_list(box, source, self.messages)
            self._outlines[stage, key] = box[0]
        shape, dtype = self._outlines[stage, key]
        received = torch.empty(shape, dtype=dtype, device=self.device)
        dist.recv(received, source, self.messages)
        return received

    def _send(self, stage: int, key: Any, hidden: Any) -> None:
        hidden = hidden.detach().contiguous()
        is_known = (stage + 1, key) in self._outlines
        self._outlines[stage + 1, key] = found = hidden.shape, hidden.dtype
        if stage + 1 in self.own:
            self._kept = hidden
            return
        target = self.rank_of[stage + 1]
        if not is_known:
            dist.send_object_list([found], target, self.messages)
        for work, _ in self._sending:  # the one before
            work.wait()
        self._sending = [(dist.isend(hidden, target, self.messages), hidden)]

    def outline_of(self, stage: int, key: Any) -> Tensor:
        """Returns what `stage` receives in a batch of the shapes `key`, on the meta device."""
        shape, dtype = self._outlines[stage, key]
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)

    @contextmanager
    def _at(self, stage: int, received: Tensor | None, raises: bool) -> Generator[None]:
        self.position.enter(self.division.bounds[stage], received, raises)
        try:
            yield
        finally:
            self.position.leave()


def shapes_of(args: Any) -> tuple[Any, ...]:
    """Returns the shapes of the tensors of a batch that has rows; hidden states follow from them.

    Vectors are left out, such as the first tokens of packed documents.
    """
    tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
    return tuple(tuple(tensor.shape) for tensor in tensors if tensor.dim() > 1)
