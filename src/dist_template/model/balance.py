"""Load balancing for a mixture of experts: keeps routers from sending most tokens to a few experts.

The load of an expert is the number of tokens routed to it in one optimizer step, over all ranks and
micro-batches, masked ones too. What activation checkpointing recomputes is not counted again.

    router with                auxiliary-loss-free balancing (arXiv:2408.15664, algorithm 1):
    `e_score_correction_bias`  after each optimizer step, the bias +=
    (DeepSeek-V3, GLM-4.5 …)   `bias_update_speed` x sign(mean load - load)
    router without it          load-balancing loss (arXiv:2101.03961, equation 4): experts x
    (Mixtral, Qwen3-MoE …)     the sum over experts of (load share) x (mean router probability)
    optional, any router       DeepSeek-V3's sequence-wise balance loss (arXiv:2412.19437,
                               equations 17 to 20), router z-loss (arXiv:2202.08906, equation 5)

The load-balancing loss takes the shares of the load from the previous optimizer step's global
batch. Shares of a micro-batch would force every sequence to use all experts (arXiv:2501.11873), and
the result would depend on how the batch is distributed. The first step has uniform shares, so a
gradient of zero.

Shapes: L layers, E experts, N tokens of a micro-batch, B sequences of T tokens."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..by_tokens import NonNegativeByTokens, check_phases, values_of
from ..compat.transformers import wrappers_of_parameters
from ..errors import InputError, check_least
from ..layout import full_shape
from ..processes import from_all_ranks
from ..ranges import NonNegativeFloat
from .flops import find_experts, num_experts, text_config

BIAS = "e_score_correction_bias"


@dataclass
class BalanceConfig:
    """How tokens are balanced over the experts of a mixture of experts. Has no effect on other
    models.

    Args:
        bias_update_speed: How far a router's `e_score_correction_bias` moves after each optimizer
            step, DeepSeek-V3's gamma: 0.001 for its first 14.3 T tokens, then 0 (arXiv:2412.19437,
            section 4.2). 0 is off. Or phases by consumed tokens.
        aux_loss_coef: Weight of the load-balancing loss, summed over layers. null: the model
            configuration's `router_aux_loss_coef` for routers without that bias, 0 for routers with
            it. 0 is off.
        sequence_loss_coef: Weight of DeepSeek-V3's sequence-wise balance loss, summed over layers;
            0.0001 there. 0 is off.
        z_loss_coef: Weight of the router z-loss, summed over layers, which keeps router logits
            small; 0.001 in ST-MoE. 0 is off."""

    bias_update_speed: NonNegativeByTokens = 0.001
    aux_loss_coef: NonNegativeFloat | None = None
    sequence_loss_coef: NonNegativeFloat = 0.0
    z_loss_coef: NonNegativeFloat = 0.0

    def __post_init__(self) -> None:
        check_phases("model.balance.bias_update_speed", self.bias_update_speed)

    def changed(self) -> dict[str, object]:
        """Returns the values that are not the defaults, by name."""
        found = {}
        for each in fields(self):
            value = getattr(self, each.name)
            if value != each.default:
                found[each.name] = value
        return found


@dataclass(eq=False)
class Layer:
    """A mixture-of-experts layer. Its modules are None on the ranks of other pipeline stages."""

    block_name: str  # of the module that contains the router and the experts
    num_experts: int  # on all ranks
    has_router: bool
    has_bias: bool
    experts: nn.Module | None  # stacked; called with the indices of the chosen experts
    router: nn.Module | None
    bias_owner: nn.Module | None  # the module with the buffer BIAS
    # Router logits (N, E) of the newest counted forward pass. They are an attribute of the layer:
    # with one dictionary for all layers torch.compile would compile each block anew.
    logits: Tensor | None = None


def find_layers(model: nn.Module) -> list[Layer]:
    """Returns the mixture-of-experts layers whose tokens can be balanced, in the model's order.

    A layer is found by its experts: one module with stacked weights, as transformers 5 writes them,
    which a forward pass calls with the indices of the chosen experts. Experts of another form are
    not found: nothing counts their tokens. The router is the module beside the experts with a
    weight of one row per expert. Adapters of PEFT may wrap the experts."""
    stacked = {experts for experts in find_experts(model) if hasattr(experts, "is_concatenated")}
    layers = []
    for block_name, block in model.named_modules():
        if wrappers_of_parameters(block):
            continue
        for experts in block.children():
            wrappers = wrappers_of_parameters(experts)
            base = wrappers[-1].base_layer if wrappers else experts
            if base in stacked:
                router = _router_in(block, num_experts(base))
                bias_owner = _bias_owner_in(block)
                layer = Layer(
                    block_name,
                    num_experts=num_experts(base),
                    has_router=router is not None,
                    has_bias=bias_owner is not None,
                    experts=experts,
                    router=router,
                    bias_owner=bias_owner,
                )
                layers.append(layer)
    return layers


def _router_in(block: nn.Module, num_rows: int) -> nn.Module | None:
    """Returns the first child with a matrix of `num_rows` rows of its own."""
    for module in block.children():
        for parameter in module.parameters(recurse=False):
            shape = full_shape(parameter)
            if len(shape) == 2 and shape[0] == num_rows:
                return module
    return None


def _bias_owner_in(block: nn.Module) -> nn.Module | None:
    """Returns the first module of the block that has the buffer BIAS."""
    for module in block.modules():
        if BIAS in dict(module.named_buffers("", False)):
            return module
    return None


class Balancer:
    """The loss terms and the bias update of a model's routers; callbacks/experts.py attaches it.

    Args:
        model: Already placed on the machine.
        config: The keys under `model.balance`.
        group: The ranks of a pipeline. None: every rank has all layers.
        sequence_group: The ranks that share each sequence. None: a rank has full sequences.

    Raises InputError if a coefficient is negative, or set for a model without routers."""

    def __init__(
        self,
        model: nn.Module,
        config: BalanceConfig,
        group: dist.ProcessGroup | None = None,
        sequence_group: dist.ProcessGroup | None = None,
    ) -> None:
        for key, value in vars(config).items():
            if value is not None:
                check_least("model.balance", **{key: (min(values_of(value)), 0.0)})
        self.config, self._sequence_group = config, sequence_group
        # Of the present step: callbacks/experts.py changes it by consumed tokens.
        self.bias_update_speed = max(values_of(config.bias_update_speed))
        self.layers = find_layers(model)
        if group is not None:  # the layers of all stages, in the order of their numbers
            no_modules = {"experts": None, "router": None, "bias_owner": None}
            described = [replace(layer, **no_modules) for layer in self.layers]
            by_name: dict[str, Layer] = {}
            for of_stage in from_all_ranks(described, group):
                by_name |= {layer.block_name: layer for layer in of_stage}
            # This rank's own have their modules.
            by_name |= {layer.block_name: layer for layer in self.layers}
            self.layers = sorted(by_name.values(), key=_layer_numbers)
        self.counts_now = False  # whether the forward pass that runs now is counted
        self._arriving: tuple[Tensor, dist.Work | None] | None = None
        self._model_config = text_config(model)
        coef = config.aux_loss_coef
        is_default = coef is None
        if coef is None:
            coef = getattr(self._model_config, "router_aux_loss_coef", None)
        self._aux: list[int] = []  # indices of the layers with a load-balancing loss
        for i, layer in enumerate(self.layers):
            # By default, layers that the bias balances have no such loss.
            has_loss = not is_default or (layer.has_router and not layer.has_bias)
            if coef and has_loss:
                self._aux.append(i)
        self.aux_loss_coef = coef if coef and self._aux else 0.0
        self.has_bias = any(layer.has_bias for layer in self.layers)
        self.needs_shares = bool(self._aux)
        # The loads of every step, not only of those that are logged.
        self.needs_loads = self.needs_shares or (self.has_bias and self.bias_update_speed > 0)
        if self.layers and all(layer.has_router for layer in self.layers):
            return
        for key in ("aux_loss_coef", "sequence_loss_coef", "z_loss_coef"):
            value = getattr(config, key)
            if value:
                raise InputError(
                    f"model.balance.{key} is {value}, but no router was found in every"
                    f" mixture-of-experts layer of {type(model).__name__}; set it to 0"
                )

    def attach(self, device: torch.device) -> list[RemovableHandle]:
        """Registers the hooks that count loads and keep router logits; returns their handles."""
        numbers = [[layer.num_experts] for layer in self.layers]
        self._num_experts = torch.tensor(numbers, device=device, dtype=torch.float32)
        width = max(layer.num_experts for layer in self.layers)
        # This rank's loads in this optimizer step; the last column is for indices without an
        # expert.
        self.loads = torch.zeros(len(self.layers), width + 1, device=device)
        # Each expert's share of all ranks' load in the previous step.
        self.shares = torch.zeros(len(self.layers), width, device=device)
        keeps_all = bool(self.config.sequence_loss_coef or self.config.z_loss_coef)
        handles = []
        for i, layer in enumerate(self.layers):
            self.shares[i, : layer.num_experts] = 1 / layer.num_experts
            if layer.experts is not None:
                register, count = layer.experts.register_forward_pre_hook, self._count(i)
                handles.append(register(count, prepend=True, with_kwargs=True))
            if layer.router is not None and (keeps_all or i in self._aux):
                handles.append(layer.router.register_forward_hook(self._keep_logits(layer)))
        return handles

    def _count(self, i: int) -> Callable[..., None]:
        loads = self.loads[i]

        def count(experts: nn.Module, args: tuple[object], kwargs: dict[str, object]) -> None:
            if self.counts_now:
                for chosen in (*args, *kwargs.values()):  # (N, experts per token), of integers
                    if isinstance(chosen, Tensor) and not chosen.is_floating_point():
                        ones = loads.new_ones(()).expand(chosen.numel())
                        loads.scatter_add_(0, chosen.reshape(-1), ones)
                        return

        return count

    def _keep_logits(self, layer: Layer) -> Callable[..., None]:
        def keep(router: nn.Module, args: object, output: Tensor | tuple[Tensor, ...]) -> None:
            if self.counts_now:  # transformers' routers return their logits first
                for each in (output,) if isinstance(output, Tensor) else output:
                    if each.shape[-1] == layer.num_experts and each.is_floating_point():
                        layer.logits = each
                        return

        return keep

    def losses(self, batch: dict[str, Tensor]) -> Iterator[tuple[str, float, Tensor]]:
        """Yields (metric, weight, value ()) of each loss term of the newest forward pass. A value
        is the mean over layers and over the tokens of the micro-batch."""
        config = self.config
        aux, sequence, z = [], [], []
        for i, layer in enumerate(self.layers):
            logits, layer.logits = layer.logits, None
            if logits is None:
                continue
            if i in self._aux:  # 1 where the load is even, at most experts / experts per token
                mean = probabilities(layer, logits).mean(0)
                shares = self.shares[i, : layer.num_experts]
                aux.append(layer.num_experts * (shares * mean).sum())
            if config.sequence_loss_coef:
                sequence.append(self._sequence_loss(layer, logits, len(batch["input_ids"])))
            if config.z_loss_coef:
                z.append(logits.float().logsumexp(-1).square().mean())
        for name, coef, values in (
            ("moe/aux_loss", self.aux_loss_coef, aux),
            ("moe/sequence_loss", config.sequence_loss_coef, sequence),
            ("moe/z_loss", config.z_loss_coef, z),
        ):
            if values:
                yield name, coef * len(values), torch.stack(values).mean()

    def _sequence_loss(self, layer: Layer, logits: Tensor, num_sequences: int) -> Tensor:
        """() over shares per sequence, of the experts with the highest scores without the bias.
        Ranks that share sequences have the choices of all tokens and the scores of their own: the
        mean over ranks is the loss."""
        scores = probabilities(layer, logits).unflatten(0, (num_sequences, -1))  # (B, T, E)
        top_k = self._model_config.num_experts_per_tok
        chosen = scores.detach().topk(top_k, dim=-1).indices.flatten(1)  # (B, T x top_k)
        ones = scores.new_ones(()).expand(chosen.shape)
        counts = torch.zeros_like(scores[:, 0]).scatter_add_(1, chosen, ones)
        group = self._sequence_group
        if group is not None:
            dist.all_reduce(counts.div_(group.size()), group=group)
        return (counts * scores.mean(1)).sum(-1).mean() * scores.shape[-1] / chosen.shape[1]

    def begin_reduction(self) -> None:
        """Starts to sum the loads over ranks; call before the last micro-batch's backward pass."""
        loads = self.loads[:, :-1].clone()
        work = dist.all_reduce(loads, async_op=True) if dist.is_initialized() else None
        self._arriving = loads, work

    @torch.no_grad()
    def finish_step(self, skipped: Tensor | None) -> None:
        """Moves the biases and updates the shares; nothing moves if `skipped`, (), is 1: the
        optimizer step was skipped on all ranks. None: no step is ever skipped."""
        if self._arriving is None:
            return
        (loads, work), self._arriving = self._arriving, None
        if work is not None:
            work.wait()  # on a GPU the stream waits, not the host
        total = loads.sum(1, keepdim=True)
        moves = self.bias_update_speed * torch.sign(total / self._num_experts - loads)
        shares = loads / total.clamp(min=1)
        if skipped is not None:
            moves = torch.where(skipped > 0, 0.0, moves)
            shares = torch.where(skipped > 0, self.shares, shares)
        self.shares.copy_(shares)
        for i, layer in enumerate(self.layers):
            if layer.bias_owner is not None:
                getattr(layer.bias_owner, BIAS).add_(moves[i, : layer.num_experts])


def probabilities(layer: Layer, logits: Tensor) -> Tensor:
    """Returns a router's probabilities (N, E): normalised sigmoids if it has a bias (DeepSeek-V3),
    else a softmax."""
    if not layer.has_bias:
        return logits.float().softmax(-1)
    scores = logits.float().sigmoid()
    return scores / scores.sum(-1, keepdim=True)


def _layer_numbers(layer: Layer) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", layer.block_name)]
