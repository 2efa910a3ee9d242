"""Load balancing for a mixture of experts: keeps routers from sending most tokens to a few experts.

The load of an expert is the number of tokens routed to it in one optimizer step, over all ranks and
micro-batches. Every routed token counts, also one whose label is masked: it occupies an expert like
any other. Training batches have no padding. What activation checkpointing recomputes is not counted
again.

    router with                auxiliary-loss-free balancing (arXiv:2408.15664, algorithm 1):
    `e_score_correction_bias`  after each optimizer step, the bias +=
    (DeepSeek-V3, GLM-4.5 …)   `bias_update_speed` x sign(mean load - load)
    router without it          load-balancing loss (arXiv:2101.03961, equation 4): experts x
    (Mixtral, Qwen3-MoE …)     the sum over experts of (load share) x (mean router probability)
    optional, any router       DeepSeek-V3's sequence-wise balance loss (arXiv:2412.19437,
                               equations 17 to 20), router z-loss (arXiv:2202.08906, equation 5)

The load-balancing loss takes the shares of the load from the previous optimizer step's global
batch. Shares of a micro-batch would force every sequence to use all experts, which keeps experts
from specialising (arXiv:2501.11873), and the result would depend on how the batch is distributed.
The current global batch's shares are not known before its last micro-batch has been routed. The
first step has uniform shares, so a gradient of zero.

Shapes: L layers, E experts, N tokens of a micro-batch, B sequences of T tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..compat.transformers import wrappers_of_parameters
from ..errors import InputError, check_least
from ..layout import full_shape
from ..weights import from_all_ranks
from .flops import find_experts, num_experts, text_config

BIAS = "e_score_correction_bias"


@dataclass
class BalanceConfig:
    """How tokens are balanced over the experts of a mixture of experts. Has no effect on other
    models.

    Args:
        bias_update_speed: How far a router's `e_score_correction_bias` moves after each optimizer
            step, DeepSeek-V3's gamma: 0.001 for its first 14.3 T tokens, then 0 (arXiv:2412.19437,
            section 4.2). 0 is off.
        aux_loss_coef: Weight of the load-balancing loss, summed over layers. null: the model
            configuration's `router_aux_loss_coef` for routers without that bias, 0 for routers with
            it. 0 is off.
        sequence_loss_coef: Weight of DeepSeek-V3's sequence-wise balance loss, summed over layers;
            0.0001 there. 0 is off.
        z_loss_coef: Weight of the router z-loss, summed over layers, which keeps router logits
            small; 0.001 in ST-MoE. 0 is off.
    """

    bias_update_speed: float = 0.001
    aux_loss_coef: float | None = None
    sequence_loss_coef: float = 0.0
    z_loss_coef: float = 0.0


class Layer(NamedTuple):
    """A mixture-of-experts layer."""

    name: str  # of the module that holds its router and its experts
    experts: nn.Module | None  # stacked, called with the indices of the chosen; None: elsewhere
    num: int  # of experts, of all ranks
    router: nn.Module | None  # None where it was not found
    bias_owner: nn.Module | None  # the module whose buffer BIAS is; None: the router has none


def find_layers(model: nn.Module) -> list[Layer]:
    """The layers whose experts transformers 5 calls with indices; others are not known."""

    def is_router(module: nn.Module, num: int) -> bool:
        shapes = [full_shape(parameter) for parameter in module.parameters(recurse=False)]
        return any(len(shape) == 2 and shape[0] == num for shape in shapes)

    stacked = {experts for experts in find_experts(model) if hasattr(experts, "is_concatenated")}
    layers = []
    for name, block in model.named_modules():
        for experts in () if wrappers_of_parameters(block) else block.children():
            owner = ([experts] + [w.base_layer for w in wrappers_of_parameters(experts)])[-1]
            if owner in stacked:
                num = num_experts(owner)
                router = next((m for m in block.children() if is_router(m, num)), None)
                owners = (m for m in block.modules() if BIAS in dict(m.named_buffers("", False)))
                layers.append(Layer(name, experts, num, router, next(owners, None)))
    return layers


def of_all_stages(own: list[Layer], group: Any) -> list[Layer]:
    """Returns the layers of all stages of a pipeline, in order; those of other ranks are empty."""
    outlines = [
        Layer(x.name, None, x.num, x.router and nn.Identity(), x.bias_owner and nn.Identity())
        for x in own
    ]
    found = {layer.name: layer for each in from_all_ranks(outlines, group) for layer in each}
    found |= {layer.name: layer for layer in own}
    return sorted(found.values(), key=lambda each: [int(n) for n in re.findall(r"\d+", each.name)])


class Kept:
    """Router logits (N, E) of a layer's newest counted forward pass.

    An object for each layer: torch.compile would compile a block anew for each key of a common
    dictionary.
    """

    logits: Tensor | None = None


class Balancer:
    """The loss terms and the bias update of a model's routers.

    callbacks/experts.py attaches it to the model and says when a step begins and ends.

    Args:
        model: Already placed on the machine.
        config: The keys under `model.balance`.
        group: The ranks of a pipeline. None: the model is whole.

    Raises:
        InputError: a coefficient is negative, or set for a model without routers.
    """

    def __init__(self, model: nn.Module, config: BalanceConfig, group: Any = None) -> None:
        set_here = {key: value for key, value in vars(config).items() if value is not None}
        check_least("model.balance", **{key: (value, 0.0) for key, value in set_here.items()})
        self.config = config
        self.layers = find_layers(model)
        if group is not None:
            self.layers = of_all_stages(self.layers, group)
        self.counts_now = False  # whether the forward pass that runs now is counted
        self._kept = [Kept() for _ in self.layers]
        self._arriving: tuple[Tensor, Any] | None = None
        self._model_config = text_config(model)
        configured = getattr(self._model_config, "router_aux_loss_coef", None) or 0.0
        numbers = range(len(self.layers))
        routers = [layer.router is not None for layer in self.layers]
        if config.aux_loss_coef is None:
            without_bias = [i for i in numbers if self.layers[i].bias_owner is None and routers[i]]
            self._aux = without_bias if configured else []
        else:
            self._aux = [i for i in numbers if config.aux_loss_coef]
        self.aux_loss_coef = (config.aux_loss_coef or configured) if self._aux else 0.0
        with_bias = [i for i in numbers if self.layers[i].bias_owner is not None]
        self.has_bias = bool(with_bias)
        self._biased = with_bias if config.bias_update_speed else []
        self.needs_shares = bool(self._aux)
        self.needs_loads = bool(self._aux or self._biased)  # of every optimizer step
        names = ("aux_loss_coef", "sequence_loss_coef", "z_loss_coef")
        name = next((name for name in names if getattr(config, name)), None)
        if name and not (routers and all(routers)):
            raise InputError(
                f"model.balance.{name} is {getattr(config, name)}, but no router was found in every"
                f" mixture-of-experts layer of {type(model).__name__}; set it to 0"
            )

    # ---- counting --------------------------------------------------------------------------------

    def attach(self, device: torch.device) -> list[Any]:
        """Registers the hooks that count loads and keep router logits; returns their handles."""
        # the last: an index that stands for no expert
        width = max(layer.num for layer in self.layers) + 1
        # of this rank, in this optimizer step
        self.loads = torch.zeros(len(self.layers), width, device=device)
        numbers = [[layer.num] for layer in self.layers]
        self._num = torch.tensor(numbers, device=device, dtype=torch.float32)
        # of the newest step's load, all ranks'
        self.shares = torch.zeros(len(self.layers), width - 1, device=device)
        for row, layer in zip(self.shares, self.layers, strict=True):
            row[: layer.num] = 1 / layer.num
        handles = []
        keeps_all = bool(self.config.sequence_loss_coef or self.config.z_loss_coef)
        for i, layer in enumerate(self.layers):
            count = self._counting_hook(self.loads[i])
            if layer.experts is None:
                continue
            register = layer.experts.register_forward_pre_hook
            handles.append(register(count, prepend=True, with_kwargs=True))
            if layer.router is not None and (keeps_all or i in self._aux):
                keep = self._keeping_hook(self._kept[i], layer.num)
                handles.append(layer.router.register_forward_hook(keep))
        return handles

    def _counting_hook(self, loads: Tensor) -> Any:
        def count(experts: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self.counts_now:
                tensors = (each for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
                # (N, chosen ones)
                chosen = next(tensor for tensor in tensors if not tensor.is_floating_point())
                loads.scatter_add_(0, chosen.reshape(-1), loads.new_ones(()).expand(chosen.numel()))

        return count

    def _keeping_hook(self, kept: Kept, num: int) -> Any:
        def keep(router: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if self.counts_now:  # transformers' routers return their logits first
                outputs = (output,) if isinstance(output, Tensor) else output
                kept.logits = next(
                    each for each in outputs if each.shape[-1] == num and each.is_floating_point()
                )

        return keep

    # ---- the loss terms --------------------------------------------------------------------------

    def losses(self, batch: dict[str, Tensor]) -> Iterator[tuple[str, float, Tensor]]:
        """Yields (metric, weight, value ()) of each loss term of the newest forward pass.

        A value is the mean over layers and over the tokens of the micro-batch. Micro-batches have
        equally many, so the mean over ranks and accumulation is the global batch's.
        """
        logits = {i: kept.logits for i, kept in enumerate(self._kept) if kept.logits is not None}
        for i in logits:
            self._kept[i].logits = None
        if not logits:
            return
        if self._aux:
            values = [self._aux_loss(i, logits[i]) for i in self._aux if i in logits]
            yield "moe/aux_loss", self.aux_loss_coef * len(values), torch.stack(values).mean()
        if self.config.sequence_loss_coef:
            num, coef = len(batch["input_ids"]), self.config.sequence_loss_coef
            values = [self._sequence_loss(i, each, num) for i, each in logits.items()]
            yield "moe/sequence_loss", coef * len(values), torch.stack(values).mean()
        if self.config.z_loss_coef:
            values = [each.float().logsumexp(-1).square().mean() for each in logits.values()]
            yield "moe/z_loss", self.config.z_loss_coef * len(values), torch.stack(values).mean()

    def _aux_loss(self, i: int, logits: Tensor) -> Tensor:
        """() 1 where the load is even, at most experts / experts per token."""
        num = self.layers[i].num
        return num * (self.shares[i, :num] * self._probabilities(i, logits).mean(0)).sum()

    def _sequence_loss(self, i: int, logits: Tensor, num_sequences: int) -> Tensor:
        """() over shares per sequence, of the experts with the highest scores without the bias."""
        scores = self._probabilities(i, logits).unflatten(0, (num_sequences, -1))  # (B, T, E)
        top_k = self._model_config.num_experts_per_tok
        chosen = scores.detach().topk(top_k, dim=-1).indices.flatten(1)  # (B, T x top_k)
        ones = scores.new_ones(()).expand(chosen.shape)
        counts = torch.zeros_like(scores[:, 0]).scatter_add_(1, chosen, ones)
        return (counts * scores.mean(1)).sum(-1).mean() * scores.shape[-1] / chosen.shape[1]

    def _probabilities(self, i: int, logits: Tensor) -> Tensor:
        """(N, E), sums of 1: a softmax, or normalised sigmoids if there is a bias (DeepSeek-V3)."""
        if self.layers[i].bias_owner is None:
            return logits.float().softmax(-1)
        scores = logits.float().sigmoid()
        return scores / scores.sum(-1, keepdim=True)

    # ---- the end of an optimizer step ------------------------------------------------------------

    def begin_reduction(self) -> None:
        """Starts to sum the loads over ranks; call before the last micro-batch's backward pass."""
        loads = self.loads[:, :-1].clone()
        work = dist.all_reduce(loads, async_op=True) if dist.is_initialized() else None
        self._arriving = loads, work

    @torch.no_grad()
    def finish_step(self, skipped: Tensor | None) -> None:
        """Moves the biases and renews the shares.

        Args:
            skipped: () 1 where the optimizer step was skipped, on all ranks: then nothing moves.
                None: it never is.
        """
        if self._arriving is None:
            return
        (loads, work), self._arriving = self._arriving, None
        if work is not None:
            work.wait()  # on a GPU the stream waits, not the host
        total = loads.sum(1, keepdim=True)
        moves = self.config.bias_update_speed * torch.sign(total / self._num - loads)
        shares = loads / total.clamp(min=1)
        if skipped is not None:
            moves = torch.where(skipped > 0, 0.0, moves)
            shares = torch.where(skipped > 0, self.shares, shares)
        self.shares.copy_(shares)
        for i in self._biased:
            layer = self.layers[i]
            if layer.experts is None:
                continue
            getattr(layer.bias_owner, BIAS).add_(moves[i, : layer.num])
