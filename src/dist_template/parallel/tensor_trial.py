"""A forward pass of one tensor-parallel rank without memory, before a model is distributed.

transformers' plans forget parameters, such as the query and key norms of GLM-4-MoE and Phi, or the activation of
Apertus. Every rank has all of such a parameter, and only the rank's features use it: without a rule each rank steps its
replica with its own gradient. Here the full model runs on the meta device, and hooks give its modules the shapes of a
rank. The graph of the pass shows where a gradient is complete, and where it is partial, one rank's term of a sum:

    colwise     its output's gradient is partial; the plan sums its input's
    rowwise     its output's gradient is complete; its input's is partial

A parameter between the two has a partial gradient. One before the heads, such as a norm of latent
attention, has a complete one, which a sum would multiply."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import Node

from ..compat.parallel_styles import STYLE
from ..compat.torch import tree_leaves, tree_map
from ..compat.transformers import needs_values
from ..errors import reason

T = TypeVar("T")
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
PARTIAL, COMPLETE = "partial", "complete"
COLWISE = {"colwise", "packed_colwise"}
# Style: the gradients inside of a module and of its input. None: that of the output.
GRADIENTS: dict[str, tuple[str, str | None]] = {
    **dict.fromkeys(COLWISE, (PARTIAL, COMPLETE)),
    "rowwise": (COMPLETE, PARTIAL),
    "moe_tp_experts": (PARTIAL, COMPLETE),
    "all_reduce": (PARTIAL, None),
    **dict.fromkeys(("rowwise_split_input", "colwise_gather_output"), (COMPLETE, COMPLETE)),
    **dict.fromkeys(("embedding_rowwise", "embedding_colwise"), (COMPLETE, COMPLETE)),
    **dict.fromkeys(("mla_kv_a_proj", "ep_dispatch_experts"), (COMPLETE, COMPLETE)),
}
REPLICATED = GRADIENTS.keys() - COLWISE - {"mla_kv_a_proj"}  # all ranks need the same gradient
# Styles of modules that say nothing about the gradients of their own parameters
NO_RULE = {"", "local_params", "replicate", "all_reduce", "moe_tp_experts", "moe_identity_expert"}


def missing_rules(model: nn.Module, plan: dict[str, str], size: int, run: Callable[[], object]) -> dict[str, str]:
    """Returns the rules that `plan` lacks: names of modules whose parameters have partial
    gradients, and the style that sums these.

    Args:
        model: On the meta device, not distributed.
        plan: Styles by names of modules and parameters.
        size: Ranks of a tensor-parallel group.
        run: Runs `model` on the meta device and returns its output.

    Raises:
        ValueError: the shapes of a rank do not fit together, or no rule makes a gradient complete.
    """
    trial = _Trial(model, plan, size)
    try:
        with trial.shapes_of_a_rank(), torch.enable_grad():
            kinds = trial.gradients(run())
    except ValueError:
        raise
    except Exception as error:
        if not needs_values(error):
            raise ValueError(f"a forward pass with tp_size {size} fails ({reason(error)})") from error
        kinds = trial.guessed(reason(error))
    rules: dict[str, str] = {}
    for name, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            path, found = f"{name}.{own}", kinds.get(id(parameter), set())
            style = trial.style(path) or trial.style(name)
            if PARTIAL in found and style in NO_RULE:
                rules[pattern_of(name)] = STYLE
            if COMPLETE in found and STYLE in (style, rules.get(pattern_of(name))):
                raise ValueError(f"the gradient of {path} is complete, and {STYLE} multiplies it")
            if PARTIAL in found and style in NO_RULE and trial.style(name):
                raise ValueError(f"no rule of the plan sums the gradient of {path}")
    return rules


def pattern_of(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


class _Trial:
    def __init__(self, model: nn.Module, plan: dict[str, str], size: int) -> None:
        self.model, self.plan, self.size = model, plan, size
        self._borders: dict[Node | None, tuple[str, str, bool]] = {}  # by node: name, style, is an output

    def style(self, name: str) -> str:
        """Returns the style of a module or parameter; `*` in the plan is a layer's number."""
        return self.plan.get(name) or self.plan.get(pattern_of(name), "")

    @contextmanager
    def shapes_of_a_rank(self) -> Generator[None]:
        """Inside, colwise layers return 1 / size of their features, and rowwise layers take it."""
        with ExitStack() as stack:
            for name, module in self.model.named_modules():
                style = self.style(name)
                if style == "local_params":
                    for own, shard in self._shards(name, module).items():
                        stack.callback(setattr, module, own, getattr(module, own))
                        setattr(module, own, shard)
                if style in GRADIENTS:
                    enter, leave = partial(self._enter, name, style), partial(self._leave, name, style)
                    stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
                    stack.callback(module.register_forward_hook(leave).remove)
            yield

    def _shards(self, name: str, module: nn.Module) -> dict[str, nn.Parameter]:
        """Returns the rank's shards of a module's own parameters, such as its heads' sinks."""
        shards = {}
        for own, each in module.named_parameters(recurse=False):
            if self.style(f"{name}.{own}") in COLWISE:
                shards[own] = nn.Parameter(each.detach().chunk(self.size, max(-2, -each.dim()))[0])
        return shards

    def _enter(self, name: str, style: str, module: nn.Linear, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        args, kwargs = self._bordered((args, kwargs), name, style, False)
        if style == "rowwise":
            width, given = module.in_features, args[0].shape[-1]
            if given != -(-width // self.size):
                raise ValueError(f"with tp_size {self.size}, {name} is given {given} features of {width}")
            args = (torch.cat([args[0]] * self.size, -1)[..., :width], *args[1:])
        return args, kwargs

    def _leave(self, name: str, style: str, module: nn.Module, args: Args, output: Any) -> object:
        if style in COLWISE:
            output = output.chunk(self.size, -1)[0]
        return self._bordered(output, name, style, True)

    def _bordered(self, tree: T, *border: Any) -> T:
        def bordered(leaf: object) -> object:
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf = _Collective.apply(leaf)
                self._borders[leaf.grad_fn] = border
            return leaf

        return tree_map(bordered, tree)

    def gradients(self, output: object) -> dict[int, set[str]]:
        """Returns, by id of a parameter, the kinds of gradients that it gets from `output`."""
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        todo = [(each.grad_fn, COMPLETE) for each in tensors if each.grad_fn is not None]
        found: dict[int, set[str]] = {}
        seen = set(todo)
        while todo:
            node, kind = todo.pop()
            if border := self._borders.get(node):
                name, style, is_output = border
                if is_output and kind == PARTIAL and style in REPLICATED:
                    raise ValueError(
                        f"with tp_size {self.size} the gradient of the output of {name} ({style}),"
                        " which a rank's features use, would be of this rank alone"
                    )
                kind = GRADIENTS[style][0 if is_output else 1] or kind
            if (parameter := getattr(node, "variable", None)) is not None:
                found.setdefault(id(parameter), set()).add(kind)
            following = {(each, kind) for each, _ in node.next_functions if each is not None} - seen
            seen |= following
            todo += following
        return found

    def guessed(self, why: str) -> dict[int, set[str]]:
        """Refuses parameters without a rule next to heads, where the model cannot be traced."""
        for path, module in self.model.named_modules():
            styles = {self.style(f"{path}.{name}") for name, _ in module.named_children()}
            is_split = {"colwise", "rowwise"} <= styles
            for own, parameter in module.named_parameters() if is_split else ():
                name = f"{path}.{own}"
                style = self.style(name) or self.style(name.rpartition(".")[0])
                if parameter.requires_grad and style in NO_RULE - {"replicate"}:
                    raise ValueError(
                        f"its gradients cannot be traced ({why}), and no rule says whether that of"
                        f" {pattern_of(name)} is complete on each rank (replicate) or to be summed"
                        f" ({STYLE}): set tp_size to 1, or give a rule as tp_plan"
                    )
        return {}


class _Collective(torch.autograd.Function):
    """Returns its input as a collective does: autograd refuses to change it in place."""

    @staticmethod
    def forward(ctx: FunctionCtx, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> Tensor:
        return gradients[0]
