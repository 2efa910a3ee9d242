"""Loss in chunks of tokens: the (B, T, V) logits of a micro-batch are never all in memory.

Logits and their gradients take 12 bytes per token and vocabulary entry: 51 GB for 32,768 tokens and
a vocabulary of 131,072. Here the backbone runs first, and then the output layer on one chunk at a
time: logits, loss and gradients. Only the gradients are stored. The backward pass multiplies them
by the gradient of the sum, one number, so nothing is computed twice (the idea of Liger,
arXiv:2410.10989). The weight's gradient is accumulated in float32; results differ by rounding.

`torch.nn.functional.linear_cross_entropy` (torch 2.13) also computes in chunks, but it returns
cross entropy alone: no accuracy, no customised `loss` or `sums`.

Shapes: B sequences, T tokens of a sequence, D width, V vocabulary, N tokens of a chunk, S sums."""

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ...compat.torch import version_of
from ...errors import InputError
from ...weights import is_partitioned_by_zero
from .reward import HEAD, is_reward_model

Sums = Callable[[Tensor, Tensor], dict[str, Tensor]]


@contextmanager
def without_head(model: Any) -> Generator[Callable[[Tensor], Tensor]]:
    """Inside, a forward pass of `model` returns the output layer's input, (B, T, D).

    The layer's hooks run, so FSDP2 and ZeRO see a normal forward pass. The layer computes one
    token, and a hook returns its input in place of the logits. Yields a function that returns the
    result of the forward pass, its argument; it raises InputError if the logits were changed after
    the layer, because the loss would not contain the change."""
    given: list[Tensor] = []

    def shorten(head: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        given.append(inputs[0])
        return (inputs[0][:, :1],)

    def state(tensor: Tensor) -> tuple[int, int]:  # differs after every operation, without a sync
        version = 0 if tensor.is_inference() else version_of(tensor)
        return tensor.data_ptr(), version

    def unchanged(returned: Tensor) -> Tensor:
        if len(given) != 1 or state(given[0]) != state(returned):
            raise InputError(
                f"{type(model).__name__} changes its logits after the output layer, so the loss"
                " cannot be taken in chunks: set model.loss_chunk null"
            )
        return returned

    def replace(head: nn.Module, inputs: object, logits: object) -> Tensor:
        return given[-1]

    head: Any = head_of(model)
    # the last hook before the layer: FSDP2's and ZeRO's have prepared the input
    before = head.register_forward_pre_hook(shorten)
    # the first hook after it: theirs get the hidden states
    after = head.register_forward_hook(replace, prepend=True)
    try:
        yield unchanged
    finally:
        before.remove()
        after.remove()


class ChunkedLoss(nn.Module):
    """Runs the output layer and `sums` on one chunk of tokens at a time.

    A module without parameters, because ZeRO-3 gathers the "external parameters" of a module around
    its forward and backward pass. It must be in the LightningModule before DeepSpeed's engine is
    created.

    Args:
        model: A model with an output layer (`get_output_embeddings`) or without.
        teacher: Another, whose logits `blend` gets too. None: there is none.
        blend: Maps the sums of a chunk, its logits and labels, and the teacher's logits, to other
            sums.
        sums: Maps logits (1, N, V) and labels (1, N) to sums () by name. The first is minimized;
            the others are metrics without a gradient. Only the output layer's input and weights get
            a gradient from the first.
        size: N. None: all tokens are computed at once."""

    def __init__(
        self,
        model: nn.Module,
        sums: Sums,
        size: int | None,
        teacher: nn.Module | None = None,
        blend: Callable[..., dict[str, Tensor]] | None = None,
    ) -> None:
        super().__init__()
        heads = (head_of(model), head_of(teacher))
        # in a tuple: as submodules their weights would get second names in checkpoints
        self._unregistered: Any = heads
        self.sums, self.size, self.blend = sums, size, blend
        for head in heads:
            if head is None:
                continue
            for weight in head.parameters():
                if is_partitioned_by_zero(weight):
                    import deepspeed

                    deepspeed.zero.register_external_parameter(self, weight)

    def applies_to(self, labels: Tensor) -> bool:
        """Returns whether the micro-batch exceeds a chunk."""
        has_head = self._unregistered[0] is not None
        return has_head and self.size is not None and labels.numel() > self.size

    def forward(
        self, hidden: Tensor, labels: Tensor, expected: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Returns sums by name of `hidden` (B, T, D), of `without_head`, and labels (B, T);
        `expected`: a teacher's."""
        head, of_teacher = self._unregistered
        for layer in (head, of_teacher):
            if isinstance(layer, FSDPModule):
                # no-op if the forward pass kept the weights (transformers' plans do)
                layer.unshard()
        num = 1
        if self.size is not None:
            num = -(-labels.numel() // self.size)
        tensors = [hidden.flatten(0, 1), labels.flatten()]
        if expected is not None:
            tensors.append(expected.flatten(0, 1))
        # of equal size, so that they are compiled for one shape: (1, N, …) of each tensor
        of_tensors = [tensor[None].chunk(num, dim=1) for tensor in tensors]
        chunks = zip(*of_tensors, strict=True)
        names: list[str] = []

        def values(part: Tensor, part_labels: Tensor, *given: Tensor) -> list[Tensor]:
            # without hooks: they ran once for all chunks
            logits = head.forward(part)
            named = self.sums(logits, part_labels)
            if of_teacher is not None:
                with torch.no_grad():
                    given = (of_teacher.forward(*given),)
            if self.blend is not None:
                named = self.blend(named, logits, part_labels, *given)
            names[:] = named
            return list(named.values())

        if torch.is_grad_enabled():
            trained = [weight for weight in head.parameters() if weight.requires_grad]
            totals = _GradientsAtOnce.apply(values, chunks, hidden, *trained)
        else:
            totals = torch.stack([_stacked(values(*chunk)) for chunk in chunks]).sum(0)
        return dict(zip(names, totals.unbind(), strict=True))


def head_of(model: nn.Module | None) -> nn.Module | None:
    """Returns the output layer, or the head of a reward model; None: there is neither."""
    if model is not None and is_reward_model(model):
        return model.get_submodule(HEAD)
    get_head = getattr(model, "get_output_embeddings", None)
    return None if get_head is None else get_head()


def _stacked(values: list[Tensor]) -> Tensor:
    return torch.stack([value.detach().float() for value in values])


class _GradientsAtOnce(torch.autograd.Function):
    """Returns (S,) sums, and computes the gradient of the first in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        sums: Callable[..., list[Tensor]],
        chunks: Iterable[tuple[Tensor, ...]],
        hidden: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        results, of_hidden, of_weights = [], [], []
        with torch.enable_grad():
            for part, *others in chunks:
                part = part.detach().requires_grad_()
                values = sums(part, *others)
                gradient, *gradients = torch.autograd.grad(values[0], [part, *weights])
                results.append(_stacked(values))
                of_hidden.append(gradient)
                if not of_weights:
                    of_weights = [g.float() for g in gradients]
                else:
                    for total, g in zip(of_weights, gradients, strict=True):
                        total += g
        ctx.gradients = torch.cat(of_hidden, dim=1).view_as(hidden), of_weights
        ctx.dtypes = [weight.dtype for weight in weights]
        return torch.stack(results).sum(0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        (of_hidden, of_weights), ctx.gradients = ctx.gradients, None
        pairs = zip(of_weights, ctx.dtypes, strict=True)
        of_weights = [gradient.mul_(upstream[0]).to(dtype) for gradient, dtype in pairs]
        # In float32: rounded to bfloat16, the number would scale all gradients below by up to 0.4 %
        # too much.
        return None, None, (of_hidden.float() * upstream[0]).to(of_hidden.dtype), *of_weights
