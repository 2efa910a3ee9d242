"""Private names of torch.distributed.pipelining. Verified on torch 2.13; tests/compat/test_names.py
checks them. Where a name is gone: AttributeError or ImportError."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.distributed.pipelining import PipelineStage, _backward


class PatchedStage(PipelineStage):
    """torch's pipeline stage, with two changes.

    Buffers exist only for messages that are in flight. torch (2.13, `_setup_forward_recv_info`)
    allocates buffers for the activations and gradients of all micro-batches before the first step
    and keeps them. Here they are created on the meta device, allocated when a message is awaited,
    and released after the pass that reads it.

    Zero-bubble schedules compute the gradients of inputs first and those of weights in a later
    pass, which runs the nodes that use a weight once more. Weights that this would break
    (`weights_at_once`) get their gradients in the first pass."""

    # Places of `weights_at_once` among the stage's parameters; None: not known yet.
    _at_once: set[int] | None = None

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        with _on_meta(self):
            super()._setup_forward_recv_info(num_microbatches, has_backward)

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        with _on_meta(self):
            super()._setup_backward_recv_info(num_microbatches)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self._set_buffers(self.args_recv_info[fwd_chunk_id], True)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        self._set_buffers(self.grad_recv_info.get(bwd_chunk_id, ()), True)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self._set_buffers(self.args_recv_info[fwd_chunk_id], False)
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        self._set_buffers(self.grad_recv_info.get(bwd_chunk_id, ()), False)

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        if backward_type != "input":
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        outputs, inputs = bwd_kwargs["stage_output"], list(bwd_kwargs["input_values"])
        weights = list(self.submod.parameters())  # FSDP2's: gathered now, in the same order
        if self._at_once is None:
            self._at_once = weights_at_once(outputs, inputs, weights)
        at_once, later = [], []
        for place, weight in enumerate(weights):
            if place in self._at_once:
                at_once.append(weight)
            else:
                later.append(weight)
        gradients, groups = _backward.stage_backward_input(
            outputs, bwd_kwargs["output_grads"], inputs + at_once, iter(later)
        )
        return gradients[: len(inputs)], groups

    def _set_buffers(self, infos: Any, is_needed: bool) -> None:
        for info in infos:
            if info.tensor_meta is not None and not info.is_root_arg:
                meta, info.buffer = info.tensor_meta, None
                if is_needed:
                    options: Any = {"dtype": meta.dtype, "device": self.device}
                    info.buffer = torch.empty_strided(meta.shape, meta.stride, **options)


@contextmanager
def _on_meta(stage: Any) -> Generator[None]:
    device, stage.device = stage.device, torch.device("meta")
    try:
        yield
    finally:
        stage.device = device


def weights_at_once(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], weights: Sequence[Tensor]
) -> set[int]:
    """Returns the places in `weights` of those whose gradients have to be computed with the
    gradients of `inputs`, not in a later pass.

    The later pass runs backward from the nodes between outputs and inputs that use a weight
    (`_backward.get_param_groups`). It cannot

    - run a torch.autograd.Function twice, which may compute all gradients at once and free or
      overwrite what it has saved (text/model/head.py, Liger's kernels)
    - compute a weight that is used twice, one use after the other: it would run all that is between
      them, whose own weights' pass has freed it or will need it (the embedding of multi-token
      prediction)
    - compute weights that share some of their uses: torch 2.13 runs the shared ones twice"""
    roots = _nodes(outputs)
    uses_of = _backward.construct_reverse_graph(roots)
    found: set[int] = set()
    while True:
        starts = _nodes([*inputs, *(weights[place] for place in found)])
        between, _ = _backward.reverse_closure(starts, set(), uses_of)
        uses: dict[int, set[Node]] = {}
        for place, weight in enumerate(weights):
            if place not in found and weight.requires_grad:
                _, uses[place] = _backward.reverse_closure(_nodes([weight]), between, uses_of)
        broken = set()
        for place, nodes in uses.items():
            if any(isinstance(node, BackwardCFunction) for node in nodes):
                broken.add(place)
            elif len(nodes) > 1:
                shares = any(nodes & other and nodes != other for other in uses.values())
                if shares or _follow_each_other(nodes, between):
                    broken.add(place)
        if not broken:
            return found
        found |= broken  # which are inputs from now on: others' uses are nearer to them


def _nodes(tensors: Sequence[Tensor]) -> list[Node]:
    found = []
    for tensor in tensors:
        if tensor.requires_grad:
            node = _backward._get_grad_fn_or_grad_acc(tensor)
            if node is not None:
                found.append(node)
    return found


def _follow_each_other(nodes: set[Node], between: set[Node]) -> bool:
    """Returns whether a backward pass from one of `nodes` reaches another of them."""
    todo = list(nodes)
    done: set[Node] = set()
    while todo:
        for node, _ in todo.pop().next_functions:
            if node in nodes:
                return True
            if node is not None and node in between and node not in done:
                done.add(node)
                todo.append(node)
    return False
