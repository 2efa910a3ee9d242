"""A backward pass in two passes, gradients of inputs and then of weights, gives autograd's own."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import _backward

from dist_template.compat.pipelining import weights_at_once


class Once(torch.autograd.Function):
    """A product with a weight whose backward pass runs once."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.saved = hidden, weight
        return hidden * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (hidden, weight), ctx.saved = ctx.saved, None
        return gradients[0] * weight, (gradients[0] * hidden).sum(0)


class Stage(nn.Module):
    """Modules of multi-token prediction share an embedding; what they add goes through a linear
    layer. Three weights share their uses in pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 6)
        self.norms = nn.ModuleList([nn.LayerNorm(6), nn.LayerNorm(6)])
        self.layers = nn.ModuleList([nn.Linear(12, 6), nn.Linear(12, 6)])
        self.plain = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.rand(6))
        self.pair = nn.Parameter(torch.rand(6))

    def forward(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        hidden = self.plain(hidden).tanh()
        for norm, layer in zip(self.norms, self.layers, strict=True):
            embedded = norm(self.embedding(tokens)) + self.pair
            hidden = layer(torch.cat([embedded, hidden], -1)).tanh()
        return Once.apply(hidden, self.scale).square().sum()


def test_weights_that_a_second_pass_would_break_get_their_gradients_in_the_first() -> None:
    torch.manual_seed(0)
    stage, tokens = Stage(), torch.tensor([0, 3, 3])
    names = [name for name, _ in stage.named_parameters()]
    weights = list(stage.parameters())
    given = torch.randn(3, 6)
    for _ in range(2):  # gradients of micro-batches accumulate
        stage(given, tokens).backward()
    expected = [weight.grad for weight in weights]
    stage.zero_grad()

    for _ in range(2):
        hidden = given.clone().requires_grad_()
        outputs = [stage(hidden, tokens)]
        found = weights_at_once(outputs, [hidden], weights)
        assert {names[place] for place in found} == {"embedding.weight", "pair", "scale"}
        at_once = [weights[place] for place in found]
        later = [weight for place, weight in enumerate(weights) if place not in found]
        _, groups = _backward.stage_backward_input(outputs, None, [hidden, *at_once], iter(later))
        _backward.stage_backward_weight(iter(weights), groups)
    for name, weight, gradient in zip(names, weights, expected, strict=True):
        torch.testing.assert_close(weight.grad, gradient, msg=name)


def test_a_stage_whose_weights_are_used_once_defers_all_of_them() -> None:
    stage, hidden = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2)), torch.randn(3, 4)
    hidden.requires_grad_()
    assert weights_at_once([stage(hidden)], [hidden], list(stage.parameters())) == set()
