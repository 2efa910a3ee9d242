"""Shards a model over MeshStrategy's mesh: by transformers' plans, or block by block."""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.distributed import fsdp
from torch.distributed.tensor import DTensor

from ... import weights
from ...compat import transformers as compat
from ...errors import InputError, reason
from ...layout import refuse_mixed, refuse_unshardable
from .. import scatter
from ..blocks import find_blocks
from ..configured import ARGS
from .ranks import MeshRanks
from .sequence import share_attention

STYLE = "replicated_with_grad_allreduce"  # transformers' name; compat/parallel_styles.py has ours
EXPERT_PLAN = {"gate_up_proj": "packed_colwise", "down_proj": "rowwise"}  # adapters follow it
# modules that each rank has, whose gradient is a sum, and that plans of transformers (5.23) do not
# name
FORGOTTEN = {
    "apertus": ("mlp.act_fn",),
    "glm4_moe": ("self_attn.q_norm", "self_attn.k_norm"),
    "phi": ("self_attn.q_layernorm", "self_attn.k_layernorm"),
}
# types whose plans leave gradients of activations on one rank
UNSOUND = ("inkling_text", "longcat_flash")
# Modules whose output transformers (5.23) changes in place: under tensor parallelism it is a view
# of a distributed tensor, of which autograd forbids that.
CHANGED_IN_PLACE = {"llama4_text": ("shared_expert",)}
CLIPPED = ("q_proj", "k_proj", "v_proj")  # by `clip_qkv`
# of latent attention: complete on each rank
BEFORE_HEADS = {"q_a_proj", "q_a_layernorm", "kv_a_layernorm", "indexer"}
# Styles of modules that say nothing about the gradients of their own parameters
NO_RULE = {"", "local_params", "all_reduce", "moe_tp_experts", "moe_identity_expert"}

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def shard_module(module: L.LightningModule, strategy: MeshRanks) -> None:
    """Shards the layers that a plain LightningModule has made, with rank 0's weights, unless its
    own `configure_model` has distributed some of them. The module itself is the outermost FSDP
    unit, which its steps gather."""
    if not strategy.shards or any(isinstance(each, DTensor) for each in module.parameters()):
        return
    refuse_unshardable(module, "FSDP2")
    strategy.precision_plugin.convert_module(module)
    module.to("cpu" if strategy.cpu_offload else strategy.root_device)
    tensors = weights.named_tensors(module)
    scatter.from_rank_zero(tensors, tensors)
    shard_by_blocks(module, strategy)
    refuse_mixed(module, lambda each: isinstance(each, fsdp.FSDPModule))
    steps = ["validation_step", "test_step", "predict_step"]
    if module.automatic_optimization:  # else manual.py gathers
        steps.append("training_step")
    for step in steps:
        if is_overridden(step, module):
            fsdp.register_fsdp_forward_method(module, step)


def refuse_adapters(model: PreTrainedModel) -> None:
    """Raises InputError if adapters of experts would be sharded otherwise than their matrices."""
    for name, module in model.named_modules():
        if inner := compat.wrappers_of_parameters(module):
            base = pattern_of(name) + ".base_layer" * len(inner)
            rules = [rule.rpartition(".") for rule in model.tp_plan]
            plan = {
                last: model.tp_plan[f"{base}.{last}"] for path, _, last in rules if path == base
            }
            if plan and plan != EXPERT_PLAN:
                which = (
                    f"adapters of {name} are not sharded by its tensor-parallel plan"
                    f" ({', '.join(plan.values())})"
                )
                raise InputError(f"{which}: name linear layers as model.adapter.targets")


def complete_plan(model: PreTrainedModel, rules: dict[str, str]) -> None:
    """Adds to `model`'s tensor-parallel plan the rules of the gradients that it forgets.

    Every rank has all of a parameter without a rule. Where only the rank's heads or features use
    it, its gradient is one term of a sum, and each rank would step its replica differently. `rules`
    is the plan with the user's changes. Raises InputError if a parameter's gradient is not
    known."""
    refuse_adapters(model)
    names = {module: name for name, module in model.named_modules()}
    missing, forgotten = dict[str, str](), FORGOTTEN.get(model.config.model_type, ())
    with _refusing(model):
        if model.config.model_type in UNSOUND:
            raise ValueError(f"its plan leaves partial gradients: set {ARGS}.tp_size to 1")
        for owners in weights.find_ties(model):
            tied = [names[owner] for owner, _ in owners]
            if 0 < len(rules.keys() & tied) < len(tied):
                which = f"{' and '.join(tied)} share a parameter, and the plan shards one of them"
                raise ValueError(
                    f"{which}: set model.architecture.tie_word_embeddings to false, or give both a"
                    f" rule as {ARGS}.tp_plan"
                )
        for module, path in names.items():
            styles = {_style_of(rules, f"{path}.{name}") for name, _ in module.named_children()}
            if not {"colwise", "rowwise"} <= styles:
                continue
            for name, parameter in module.named_parameters(prefix=path):
                owner, _, own = name.rpartition(".")
                style = _style_of(rules, name) or _style_of(rules, owner)
                if (
                    style not in NO_RULE
                    or not parameter.requires_grad
                    or BEFORE_HEADS & set(owner.split("."))
                ):
                    continue
                if not owner.endswith(forgotten):
                    which = (
                        f"the plan does not say how the gradient of {pattern_of(owner)}.{own} is"
                        " computed"
                    )
                    way_out = f"replicate if it is complete on each rank, {STYLE} if it is a sum"
                    raise ValueError(
                        f"{which}: set {ARGS}.tp_size to 1, or give a rule as {ARGS}.tp_plan"
                        f" ({way_out})"
                    )
                missing[pattern_of(owner)] = STYLE
    model.tp_plan = model.tp_plan | missing  # the dict itself is the class's


def copy_changed_outputs(model: PreTrainedModel) -> None:
    """Lets the modules whose output the model changes in place return a copy of their own."""
    config = model.config
    changed = CHANGED_IN_PLACE.get(config.model_type, ())
    if getattr(config, "clip_qkv", None) is not None:
        changed += CLIPPED
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in changed:
            module.register_forward_hook(_copied)


def _copied(module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
    return output.clone()


def pattern_of(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _style_of(rules: dict[str, str], name: str) -> str:
    """Returns the style of a module or parameter; `*` in a plan is a layer's number."""
    return rules.get(name) or rules.get(pattern_of(name), "")


def shard_by_plan(model: Any, strategy: MeshRanks) -> None:
    """Shards `model` by its plans of transformers, in place. Raises InputError if they do not allow
    the sizes."""
    from transformers.distributed import DistributedConfig
    from transformers.distributed.utils import TransformersDeviceMesh

    from ...compat.parallel_styles import register_replicated

    register_replicated()
    sizes = strategy.mesh_sizes
    config = DistributedConfig(
        tp_size=sizes.tp,
        fsdp_size=sizes.fsdp,
        dp_replicate_size=sizes.dp_replicate,
        ep_size=sizes.ep,
        tp_plan=strategy.tp_plan,
        ep_plan=strategy.ep_plan,
        fsdp_cpu_offload=strategy.cpu_offload,
        fsdp_mixed_precision=_is_mixed(strategy),
    )
    ties = weights.find_ties(model)
    owners = {owner for tie in ties for owner, _ in tie}
    # Tied parameters must be in one FSDP unit: the root's, if no rule names their modules.
    own = {pattern_of(name) for name, module in model.named_modules() if module not in owners}
    model.fsdp_plan = {name: style for name, style in model.fsdp_plan.items() if name in own}

    weights.untie(ties)  # tensor parallelism needs a parameter in each module
    mesh = TransformersDeviceMesh(strategy.device_mesh, strategy.expert_mesh)
    offload = partial(_offload_policy, strategy)
    with compat.sharding(offload, prepare=lambda: weights.tie(ties)), _refusing(model):
        if (group := strategy.sequence_group) is not None:
            share_attention(model, sizes.cp, group)
        if sizes.tp > 1:
            copy_changed_outputs(model)
        model.maybe_distribute_model(model, config, mesh)
    weights.tie(ties)


def shard_by_blocks(model: nn.Module, strategy: MeshRanks) -> None:
    """Shards each block of `model`, and then the rest of it, in place. Raises InputError if the
    strategy has tensor or expert parallelism, for which there must be a plan."""
    sizes = strategy.mesh_sizes
    with _refusing(model):
        if sizes.tp > 1 or sizes.ep > 1:
            raise ValueError(
                f"it has no tensor or expert plan: set {ARGS}.tp_size and {ARGS}.ep_size to 1"
            )
        if (group := strategy.sequence_group) is not None:
            share_attention(model, sizes.cp, group)
        dimensions = ("dp_replicate", "fsdp") if sizes.dp_replicate > 1 else ("fsdp",)
        options: dict[str, Any] = {
            "mesh": strategy.device_mesh[dimensions],
            "offload_policy": _offload_policy(strategy),
        }
        if _is_mixed(strategy):
            options["mp_policy"] = fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for block in find_blocks(model):
            fsdp.fully_shard(block, **options)
        if isinstance(model, L.LightningModule) and "mp_policy" in options:
            # The inputs of a step include targets, which must not be cast.
            options["mp_policy"] = replace(options["mp_policy"], cast_forward_inputs=False)
        fsdp.fully_shard(model, **options)


def _offload_policy(strategy: MeshRanks) -> fsdp.OffloadPolicy:
    if not strategy.cpu_offload:
        return fsdp.OffloadPolicy()
    return fsdp.CPUOffloadPolicy(pin_memory=strategy.root_device.type == "cuda")


def _is_mixed(strategy: MeshRanks) -> bool:
    """Returns whether weights are gathered in bfloat16, and stored and reduced in float32."""
    return strategy.precision_plugin.precision == "bf16-mixed"


@contextmanager
def _refusing(model: nn.Module) -> Generator[None]:
    try:
        yield
    except ValueError as error:
        raise InputError(
            f"{type(model).__name__} cannot be sharded as configured: {reason(error)}"
        ) from error
