"""The output layer and the loss, some tokens at a time: the (B, T, V) logits of a micro-batch never exist.

With a large vocabulary logits and what backward makes of them, 12 bytes each, outweigh the rest of a step: 51 GB for
32,768 tokens and a vocabulary of 131,072. Here the output layer is called as ever, once, so that FSDP2's and ZeRO's
hooks around it gather its weight once; inside of that call it computes, for one chunk after the other, logits, loss
and at once the gradients. These are all that is kept: a sum of losses has one gradient to come, a number by which
backward multiplies. So nothing is computed twice, three matrix products as without chunks (the idea of Liger's
fused_linear_cross_entropy, arXiv:2410.10989; its kernels need a GPU, this is plain torch, which reads nothing on the
host; Liger reads two numbers). `model.loss_kernel liger` takes Liger's own, in the same place.

Weights' gradients are added up over chunks in float32. Results differ from whole logits by rounding.

Shapes: B sequences, T tokens, N tokens of a chunk, D width, V vocabulary, S sums.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor, nn

from ..errors import InputError

Sums = Callable[[Tensor, Tensor], dict[str, Tensor]]
Kernel = Literal["torch", "liger"]


def check_kernel(kernel: Kernel, device: torch.device) -> None:
    """Before a model is built.

    Raises:
        InputError: Liger is not installed, or has no kernels for `device`.
    """
    if kernel == "liger" and not find_spec("liger_kernel"):
        raise InputError("model.loss_kernel liger is a package of its own: pip install -e '.[liger]', or set torch")
    if kernel == "liger" and device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":  # Triton's, for tests
        raise InputError("model.loss_kernel liger needs a GPU: set torch, whose chunks need none")


def sums_over_tokens(
    forward: Callable[[], Tensor],
    model: nn.Module,
    labels: Tensor,
    sums: Sums,
    chunk: int | None,
    kernel: Kernel = "torch",
) -> dict[str, Tensor]:
    """`sums` over all tokens of a micro-batch, in chunks where it has more tokens than `chunk`.

    Args:
        forward: Runs `model` and returns its logits, (B, T, V).
        model: One without an output layer of its own (`get_output_embeddings`) is not cut into chunks.
        labels: (B, T).
        sums: Of logits (1, N, V) and labels (1, N), to () each by name. The first is minimized; the others are metrics
            and get no gradient. What the first depends on beside the output layer's input and weights has none either.
        chunk: N. None: all at once.
        kernel: liger computes cross entropy and right guesses itself, in chunks of its choice, and asks no `sums`.

    Raises:
        InputError: the model does something with the logits after its output layer; or has none, which Liger needs.
    """
    names = ["loss", "token_accuracy"]  # Liger's

    def values(logits: Tensor, of_it: Tensor) -> tuple[Tensor, ...]:
        named = sums(logits, of_it)
        names[:] = named
        minimized, *metrics = named.values()
        # Nothing keeps a graph that backward does not free; a count has none, and `detach` is an operation.
        return minimized, *(metric.detach() if metric.requires_grad else metric for metric in metrics)

    if kernel == "torch" and (not chunk or labels.numel() <= chunk):
        return _named(names, values(forward(), labels))
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    if kernel == "liger" and not hasattr(head, "weight"):
        raise InputError(f"model.loss_kernel liger needs an output layer, {type(model).__name__} has none: set torch")
    if head is None:
        return _named(names, values(forward(), labels))
    layer, kept, states, size = head.forward, [], [], chunk or labels.numel()

    def in_chunks(hidden: Tensor) -> Tensor:
        result = _by_liger(head, hidden, labels) if kernel == "liger" else by_torch(hidden)
        kept.append(result)  # alive, so that no other tensor gets its address
        states.append(_state(result))
        return result

    def by_torch(hidden: Tensor) -> Tensor:
        num = -(-labels.numel() // size)  # of equal size: compiled sums are compiled for one shape
        rows = hidden.reshape(1, -1, hidden.shape[-1]).chunk(num, dim=1)
        parts = zip(rows, labels.reshape(1, -1).chunk(num, dim=1), strict=True)
        trained = [p for p in head.parameters() if p.requires_grad]
        if torch.is_grad_enabled():
            return _GradientsAtOnce.apply(lambda part, of_it: values(layer(part), of_it), parts, hidden, *trained)
        return _total(values(layer(part), of_it) for part, of_it in parts)

    with patch.object(head, "forward", in_chunks):
        returned = forward()
    if states != [_state(returned)]:
        raise InputError(
            f"{type(model).__name__} changes its logits after the output layer, so the loss cannot be taken in chunks:"
            " set model.loss_chunk null and model.loss_kernel torch"
        )
    return _named(names, returned.unbind())


def _named(names: list[str], values: Iterable[Tensor]) -> dict[str, Tensor]:
    return dict(zip(names, values, strict=True))


def _by_liger(head: Any, hidden: Tensor, labels: Tensor) -> Tensor:
    """(2,) the loss, and right guesses, which have no gradient."""
    from liger_kernel.transformers import functional  # ty: ignore[import-not-found]

    flat = labels.flatten()
    options = {"reduction": "sum", "accum_dtype": torch.float32, "return_predicted_tokens": True}
    told = functional.liger_fused_linear_cross_entropy(
        hidden.flatten(0, -2), head.weight, flat, getattr(head, "bias", None), **options
    )
    return torch.stack([told.loss, (told.predicted_tokens == flat).sum().to(told.loss)])


def _total(results: Iterable[tuple[Tensor, ...]]) -> Tensor:
    """(S,) in float32, of all chunks."""
    return torch.stack([torch.stack([each.float() for each in sums]) for sums in results]).sum(0)


def _state(tensor: Tensor) -> tuple[int, int]:
    """Another after every operation: address and version, because to look at values is to wait for the device."""
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version


class _GradientsAtOnce(torch.autograd.Function):
    """(S,) sums of which only the first has a gradient, computed on the way."""

    @staticmethod
    def forward(ctx: Any, sums: Any, parts: Any, hidden: Tensor, *weights: Tensor) -> Tensor:
        results, of_hidden, of_weights = [], [], []
        with torch.enable_grad():
            for part, labels in parts:
                part = part.detach().requires_grad_()
                results.append(sums(part, labels))
                gradient, *gradients = torch.autograd.grad(results[-1][0], [part, *weights])
                of_hidden.append(gradient)
                if not of_weights:
                    of_weights = [g.float() for g in gradients]
                else:
                    for of_all, g in zip(of_weights, gradients, strict=True):
                        of_all += g
        ctx.gradients = torch.cat(of_hidden, dim=1).view_as(hidden), of_weights
        ctx.dtypes = [weight.dtype for weight in weights]
        return _total(results).detach()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> Any:
        (of_hidden, of_weights), ctx.gradients = ctx.gradients, None
        of_weights = [g.mul_(upstream[0]).to(dtype) for g, dtype in zip(of_weights, ctx.dtypes, strict=True)]
        # In float32: rounded to bfloat16, the number would scale all gradients below by up to 0.4 % too much.
        return None, None, (of_hidden.float() * upstream[0]).to(of_hidden.dtype), *of_weights
