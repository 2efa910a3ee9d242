"""LoRA adapters: a frozen model learns low-rank updates of some of its matrices (peft).

`add_adapters` runs where the model is built, before it is sharded. transformers' tensor and expert
plans name the matrices, which adapters move: `q_proj` becomes `q_proj.base_layer`. The plans are
rewritten, and each pair of adapter matrices is sharded like the matrix that it changes.

    style of the matrix    its weight    lora_A (rank, in)    lora_B (out, rank) colwise
    rows          replicated           rows rowwise                columns       columns
    replicated experts                by expert     by expert            by expert packed_colwise
    rows          replicated           replicated, each rank takes its rows"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from torch import nn

from ...compat.transformers import wrappers_of_parameters
from ...errors import InputError, check_least, reason, require
from ...ranges import PositiveFloat, Range, ShareBelowOne
from .head import head_of
from .reward import HEAD, is_reward_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ALL_LINEAR = "all-linear"
INDEX = re.compile(r"\.\d+(?=\.|$)")  # of a layer; plans have .* there
CONV1D = "Conv1D"  # GPT-2's linear layer: its weight is (in, out) (transformers.pytorch_utils)
PACKED = "packed_colwise"  # FSDP2 cannot shard its interleaved rows once more
# Modules that read a layer's weight without calling it bypass its adapter: Mamba's mixers, which
# have a parameter D, and AltUp of Gemma 3n.
ONLY_READ = {"D": ["out_proj", "dt_proj"], "correction_coefs": ["correction_coefs"]}
# peft takes these names for the stacked experts of a mixture, whatever else has them.
OF_EXPERTS = {"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3", "gate"}


@dataclass
class AdapterConfig:
    """LoRA adapters; everything else in the model is frozen.

    Args:
        targets: Names of the linear layers and stacked expert parameters that get an adapter, such
            as [q_proj, v_proj]; a longer name (layers.0.self_attn.q_proj) selects one layer.
            all-linear: all of them but the output layer, routers, and layers whose weight a kernel
            reads (out_proj of Mamba).
        rank: Width of the adapters.
        alpha: Scale of the update: alpha / rank, or with rslora alpha / sqrt(rank).
        dropout: Dropout probability of an adapter's input. 0: off, as it must be for experts.
        rslora: Scale by the square root of the rank, which keeps large ranks stable.
        dora: Learn the length of each output row besides its direction (DoRA); not under tensor
            parallelism and not for experts.
        trainable: Names of modules that are trained in full besides, such as [embed_tokens,
            lm_head, norm].
        quantize: nf4 stores the frozen linear layers, but for the output layer and stacked experts,
            in 4 bits with double quantization (QLoRA); not under tensor parallelism. null: off."""

    targets: list[str] | Literal["all-linear"] = ALL_LINEAR
    rank: Annotated[int, Range(ge=1, le=65_536)] = 8
    alpha: PositiveFloat = 16.0
    dropout: ShareBelowOne = 0.0
    rslora: bool = False
    dora: bool = False
    trainable: list[str] = field(default_factory=list)
    quantize: Literal["nf4"] | None = None


def add_adapters(model: Any, config: AdapterConfig) -> PreTrainedModel:
    """Returns `model`, frozen, with trainable adapters. Raises InputError if peft is not installed,
    a name matches nothing, or peft refuses the settings."""
    require("peft", "model.adapter", extra="adapters")
    from peft import LoraConfig

    if not hasattr(model, "add_adapter"):
        raise InputError(
            f"model.adapter needs a model of transformers, not {type(model).__name__}: set it to"
            " null"
        )
    check_least("model.adapter", rank=(config.rank, 1), dropout=(config.dropout, 0.0))
    known = {name for name, module in model.named_modules() if list(module.parameters())}
    trained: list[nn.Module] = []
    for wanted in config.trainable:
        for name in _matching("trainable", wanted, known):
            trained.append(model.get_submodule(name))
    if is_reward_model(model):
        trained.append(model.get_submodule(HEAD))  # it is new
    modules, parameters = _targets(model, config)
    if config.dora and parameters:
        raise InputError(
            f"model.adapter.dora true does not work on stacked experts ({', '.join(parameters)}):"
            " set it to false, or give model.adapter.targets without them"
        )
    lora = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # ty: ignore[invalid-argument-type]
        lora_dropout=config.dropout,
        use_rslora=config.rslora,
        use_dora=config.dora,
        fan_in_fan_out=CONV1D in [type(layer).__name__ for layer in model.modules()],
        target_modules=modules,
        target_parameters=parameters,
        task_type="SEQ_CLS" if is_reward_model(model) else "CAUSAL_LM",
    )
    try:
        model.add_adapter(lora)
    except (NotImplementedError, ValueError) as error:
        raise InputError(f"model.adapter: {reason(error)}") from error
    for module in trained:
        module.requires_grad_(True)
    _rewrite_plans(model)
    return model


def _targets(model: PreTrainedModel, config: AdapterConfig) -> tuple[list[str], list[str]]:
    """Returns the names of `targets` that are linear layers, and those that are stacked experts."""
    layers, head = dict(model.named_modules()), head_of(model)
    linear = set[str]()
    for name, layer in layers.items():
        # some routers derive from nn.Linear, with a forward pass of their own
        is_linear = isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward
        if layer is not head and (is_linear or type(layer).__name__ in (CONV1D, "FalconLinear")):
            linear.add(name)
    stacked = set[str]()
    for name, parameter in model.named_parameters():
        owner = type(layers[name.rpartition(".")[0]]).__name__
        if parameter.ndim == 3 and "Experts" in owner:
            stacked.add(name)
    if not linear | stacked:
        name = type(model).__name__
        raise InputError(
            f"model.adapter: {name} has neither linear layers nor stacked experts: set it to null"
        )
    if config.targets == ALL_LINEAR:
        for name, layer in layers.items():
            if stacked and _short(name) in OF_EXPERTS:
                linear.discard(name)
            for sign, only_read in ONLY_READ.items():
                if hasattr(layer, sign):
                    for inner in only_read:
                        linear.discard(f"{name}.{inner}")
        # peft takes a short name for all modules that end with it
        ends_of_others = {_short(name) for name in layers.keys() - linear}
        names = set[str]()
        for name in linear:
            short = _short(name)
            names.add(name if short in ends_of_others else short)
        return sorted(names), sorted(set(map(_short, stacked)))
    modules: list[str] = []
    parameters: list[str] = []
    for target in config.targets:
        matched = _matching("targets", target, linear | stacked)
        if linear.isdisjoint(matched):
            parameters.append(target)
        else:
            modules.append(target)
    return modules, parameters


def _short(name: str) -> str:
    """Returns the last part of a name, or the full name if other layers end with it (0, weight)."""
    last = name.rpartition(".")[2]
    if last.isdigit() or last == "weight":
        return name
    return last


def _matching(key: str, wanted: str, names: set[str]) -> list[str]:
    """Returns the names that are `wanted` or end with it, such as layers.0.self_attn.q_proj."""
    matched = [name for name in names if f".{name}".endswith(f".{wanted}")]
    if not matched:
        short = sorted({name.rpartition(".")[2] for name in names if name})
        near = difflib.get_close_matches(wanted, short, n=3, cutoff=0.4)
        if not near:
            near = short[:5]
        known = f"the nearest names: {', '.join(near) or 'none'}"
        raise InputError(f"model.adapter.{key} has {wanted!r}, which this model does not; {known}")
    return matched


def _rewrite_plans(model: PreTrainedModel) -> None:
    """Renames what adapters moved in the tensor and expert plans, and adds their matrices."""
    from ...compat.parallel_styles import register_expert_adapters

    tp_plan, ep_plan = dict(model.tp_plan or {}), dict(model.ep_plan or {})
    for name, module in model.named_modules():
        if not hasattr(module, "lora_A"):
            continue
        path = INDEX.sub(".*", name)
        a, b = f"{path}.lora_A.default", f"{path}.lora_B.default"
        wrappers = wrappers_of_parameters(module)
        if wrappers:  # stacked experts: one wrapper around the other for each parameter
            outer = re.sub(r"(\.base_layer)+$", "", path)
            base = path + ".base_layer" * len(wrappers)
            for plan in (tp_plan, ep_plan):
                for rule in list(plan):
                    owner, _, last = rule.rpartition(".")
                    if owner == outer:
                        plan[f"{base}.{last}"] = plan.pop(rule)
            matrix = f"{base}.{wrappers[0].parameter_name}"
            style = tp_plan.get(matrix)
            if style and style != PACKED:
                sharded = a if style == "rowwise" else b
                tp_plan[f"{sharded}.weight"] = style
            style = ep_plan.get(matrix)
            if style:
                rank = wrappers[0].r["default"]
                ep_plan[f"{a}.weight"] = style
                ep_plan[f"{b}.weight"] = register_expert_adapters(rank)
        else:
            style = tp_plan.get(path) or ""
            if style.startswith(("colwise", "packed", "rowwise")):
                del tp_plan[path]
                sharded = a if style.startswith("rowwise") else b
                tp_plan[f"{path}.base_layer"] = style
                tp_plan[sharded] = style
    model.tp_plan, model.ep_plan = tp_plan, ep_plan


def proof_axes(config: AdapterConfig) -> list[str]:
    """Names adapters in the table of proven models: "lora", with the values that differ."""
    default = AdapterConfig()
    others = []
    for key in ("targets", "dora", "trainable", "quantize"):  # each value needs its own proof
        value = getattr(config, key)
        if value != getattr(default, key):
            others.append(f"{key} {value}")
    if others:
        return ["lora with " + ", ".join(others)]
    return ["lora"]
