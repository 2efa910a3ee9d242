"""Builds a causal language model of transformers, from scratch or from published weights.

Weights are read from safetensors files alone: other formats can run code when they are read.
transformers keeps an unknown key of `model.architecture` as an attribute, so a misspelt one would
have no effect: the configuration class, or its model, has to read each key. Keys under `extra`, for
a model of your own, are passed to the configuration unchecked."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import nn

from ...compat.recording import is_recording
from ...errors import InputError, is_out_of_memory, reason
from ...hub import check_reachable, why_not_loaded
from ...processes import is_rank_zero
from .kernels import Attention, set_attention
from .mtp import NAME as MTP
from .mtp import add_modules
from .published import PublishedWeights
from .reward import has_reward_head

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# of a configuration: least and most
SIZES = {
    "num_hidden_layers": (0, 10_000),
    "hidden_size": (1, 2**31),
    "intermediate_size": (0, 2**31),
    "vocab_size": (1, 2**31),
    "num_attention_heads": (0, 2**20),
}
EXTRA = "extra"  # key of model.architecture
# where code reads a key: as an attribute of a config or text_config, by getattr, or from kwargs
READS = re.compile(r'(?:\b(?:text_)?config(?:\.|, ")|kwargs\.(?:pop|get)\(")(\w+)')
# what may differ from pretrained weights
ROPE, POSITIONS = ("rope_parameters", "max_position_embeddings")


def causal_lm_config(
    architecture: Mapping[str, object],
    pretrained: str | None,
    attention: Attention | None,
    data: Any,
) -> PreTrainedConfig:
    """Returns the transformers configuration; also called before any process starts, to find errors
    early.

    Args:
        architecture: `model_type` and fields of its configuration; with `pretrained`,
            `rope_parameters` of a longer context alone.
        pretrained: A local folder or hub name. None: from scratch.
        attention: The attention kernel. None: the model's default.
        data: Gives `vocab_size`, `eos_token_id` and `seq_len`.

    Raises:
        InputError: there is no such model or architecture."""
    from transformers import AutoConfig

    if pretrained == "":  # as of an environment variable that is not set
        raise InputError("model.pretrained is ''; give a folder or a hub name, or null")
    if pretrained:
        check_reachable(pretrained)
        try:
            config = AutoConfig.from_pretrained(pretrained, trust_remote_code=False)
        except Exception as error:  # its config.json may have anything
            raise _cannot_load(pretrained, error) from error
        _check_sizes(config, f"model.pretrained {pretrained!r}")
        _check_quantization(config, pretrained)
        if ROPE in architecture:
            config = _with_rope(config, architecture, data.seq_len)
        stops = _ids(config.eos_token_id)
        if data.eos_token_id not in stops:  # the tokenizer ends documents or answers with it
            config.eos_token_id = stops + [data.eos_token_id]
        return set_attention(config, attention)
    fields = {POSITIONS: data.seq_len} | checked_fields(architecture)
    fields["eos_token_id"] = data.eos_token_id
    fields["bos_token_id"] = getattr(data, "bos_token_id", data.eos_token_id)
    fields["vocab_size"] = data.vocab_size
    kind: Any = architecture.get("model_type")
    try:
        config = AutoConfig.for_model(kind, **fields)
    except Exception as error:  # each architecture refuses in its own way
        raise InputError(f"model.architecture with model_type {kind!r}: {reason(error)}") from error
    _check_sizes(config, "model.architecture")
    return set_attention(config, attention)


def _check_sizes(config: PreTrainedConfig, where: str) -> None:
    """Raises InputError for a number of layers that would be built for hours, even without memory
    for their weights, and for sizes that torch cannot have."""
    for name, (least, most) in SIZES.items():
        value = getattr(config, name, None)
        if isinstance(value, int) and not least <= value <= most:
            raise InputError(f"{where} has {name} {value}; give {least} to {most:,}")


def _check_quantization(config: PreTrainedConfig, pretrained: str) -> None:
    """Raises InputError for a method of quantization that transformers does not know: it would take
    the weights as they are, or as another's."""
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    given = getattr(config, "quantization_config", None)
    if not isinstance(given, dict):
        return
    method = given.get("quant_method")
    if method not in AUTO_QUANTIZATION_CONFIG_MAPPING:
        raise InputError(
            f"model.pretrained {pretrained!r} cannot be loaded: its quantization_config has the"
            f" method {method!r}, which transformers does not know"
        )


def _with_rope(
    config: PreTrainedConfig, architecture: Mapping[str, Any], seq_len: int
) -> PreTrainedConfig:
    """Returns the configuration of weights with the rotary embedding of `architecture`, as YaRN
    extends a context (arXiv:2309.00071). What is not given stays: the base, the rotated share, and
    the length trained before, which transformers would take to be the new one.

    Raises InputError if another field differs from the weights', or the model has no such
    embedding."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    before, rope = getattr(config, ROPE, None) or {}, architecture[ROPE]
    kinds = sorted({"default"}.union(ROPE_INIT_FUNCTIONS))
    is_known = isinstance(rope, dict) and rope.get("rope_type") in kinds
    if "rope_theta" not in before or not is_known:
        raise InputError(
            f"model.architecture.{ROPE} is {rope}, and the weights of model.pretrained have"
            f" {before}: give `rope_type`, one of {', '.join(kinds)}, and its keys, for weights"
            " with one such set"
        )
    for key in sorted(architecture.keys() - {ROPE, POSITIONS}):
        own = getattr(config, key, None)
        if own != architecture[key]:
            raise InputError(
                f"model.architecture.{key} is {architecture[key]!r}, and the weights of"
                f" model.pretrained have {own!r}: only {ROPE} and {POSITIONS} may differ from"
                " theirs; remove it"
            )
    trained = getattr(config, POSITIONS, seq_len)
    kept = {key: before[key] for key in ("rope_theta", "partial_rotary_factor") if key in before}
    if rope.get("rope_type") in ("llama3", "longrope", "yarn"):
        kept[f"original_{POSITIONS}"] = before.get(f"original_{POSITIONS}", trained)
    fields = config.to_dict()
    fields[POSITIONS] = architecture.get(POSITIONS, max(trained, seq_len))
    fields[ROPE] = kept | rope
    try:
        return type(config).from_dict(fields)
    except Exception as error:  # each architecture refuses in its own way
        raise InputError(f"model.architecture.{ROPE} {rope}: {reason(error)}") from error


def causal_lm(config: PreTrainedConfig, pretrained: str | None, vocab_size: int) -> nn.Module:
    """Returns the model of `config` with room for `vocab_size` tokens, in fp32; of a reward model's
    weights, a reward model. Where torch's default device is `meta`, the weights are read later, by
    the ranks that need them."""
    from transformers import GenerationConfig

    kind = auto_class(config)
    is_meta = torch.get_default_device().type == "meta"
    published: PublishedWeights | None = None
    if pretrained and is_recording():
        published = _published(pretrained, kind, config)
    if pretrained and not is_meta:
        try:
            model: Any = kind.from_pretrained(
                pretrained,
                config=config,
                dtype=torch.float32,
                trust_remote_code=False,
                use_safetensors=True,
            )
        except (OSError, ValueError, LookupError, SafetensorError) as error:
            raise _cannot_load(pretrained, error) from error
        # Published embeddings are often padded beyond their tokenizer: only a larger vocabulary
        # needs new rows.
        if model.get_input_embeddings().num_embeddings < vocab_size:
            model.resize_token_embeddings(vocab_size)
    else:
        config.vocab_size = max(config.vocab_size, vocab_size)
        try:
            model = kind.from_config(config, dtype=torch.float32)
        except Exception as error:  # each architecture fails in its own way
            # after an error on the meta device, place() may build it in full
            may_be_built = is_meta and isinstance(error, RuntimeError)
            if may_be_built or is_out_of_memory(error):
                raise
            what = f"model.architecture with model_type {config.model_type!r} cannot be built"
            raise InputError(f"{what}: {type(error).__name__}: {reason(error)}") from error
        _fill_hash_tables(model)
    if published is not None:
        missing = published.write_into(model)
        if missing and len(missing) == len(model.state_dict()):
            raise InputError(
                f"model.pretrained {pretrained!r} cannot be loaded: its files have none of the"
                f" model's {len(missing)} tensors, as {missing[0]}"
            )
        if missing:
            _note(
                f"{pretrained} has no {missing[0]} ({len(missing)} such tensors): they start from"
                " random values"
            )
    if pretrained and model.can_generate():  # not with the weights, which are read later
        with contextlib.suppress(OSError):  # there is no generation_config.json
            model.generation_config = GenerationConfig.from_pretrained(pretrained)
        stops = _ids(model.generation_config.eos_token_id) + _ids(config.eos_token_id)
        model.generation_config.eos_token_id = list(dict.fromkeys(stops))  # each once
    return model


def read_modules(model: Any, pretrained: str) -> None:
    """Lets the modules of multi-token prediction in `model` have the weights in the files of
    `pretrained`, read as the model's own. Raises InputError if they cannot be loaded."""
    if torch.get_default_device().type == "meta" and not is_recording():
        return
    if getattr(model.config, "quantization_config", None):
        raise InputError(
            f"model.mtp: {pretrained} has quantized weights: set null, or give weights in 16 bits"
        )
    kind = auto_class(model.config, with_modules=True)
    published = _published(pretrained, kind, model.config)
    missing = published.write_into(model, f"{MTP}.layers.")
    if missing:
        _note(
            f"{pretrained} has no weights of modules that predict later tokens ({missing[0]},"
            f" {len(missing)} in all): they start from random values"
        )


@cache
def _note(text: str) -> None:
    """Prints a note once, on rank 0: a model that is recorded may be built twice."""
    if is_rank_zero():
        print(f"note: {text}")


@torch.no_grad()
def _fill_hash_tables(model: nn.Module) -> None:
    """Draws the experts of each token in DeepSeek-V4's hash routers, each token's all different
    (Roller et al., arXiv:2106.04426). transformers (5.23) leaves the table 0: all tokens would go
    to the first expert."""
    for name, table in model.named_buffers():
        if name.endswith("tid2eid"):
            num_experts = len(model.get_parameter(name.replace("tid2eid", "weight")))
            # the largest of random numbers are as many different experts
            numbers = torch.rand(len(table), num_experts, device=table.device)
            table.copy_(numbers.topk(table.shape[1]).indices)


def freeze_untrained(model: nn.Module) -> list[str]:
    """Freezes modules whose `forward` runs under torch.no_grad or returns whole numbers, and
    returns their names: no gradient reaches them, for which DDP stops and ZeRO decays their
    weights. transformers (5.23) has no loss of the indexers of DeepSeek-V3.2, V4 and GLM-5, which
    choose the attended tokens."""
    frozen: list[str] = []
    for name, module in model.named_modules():
        has_no_gradient = _is_without_gradient(type(module).forward)
        if has_no_gradient and list(module.parameters()):
            module.requires_grad_(False)
            frozen.append(name)
    return frozen


def _is_without_gradient(forward: Any) -> bool:
    # torch.no_grad, as a decorator, is kept in the closure of the function that it returns
    for cell in getattr(forward, "__closure__", None) or ():
        if isinstance(getattr(cell.cell_contents, "__self__", None), torch.no_grad):
            return True
    return getattr(forward, "__annotations__", {}).get("return") is torch.LongTensor


def _published(name: str, kind: Any, config: PreTrainedConfig) -> PublishedWeights:
    if getattr(config, "quantization_config", None):  # transformers' quantizers convert modules too
        raise NotImplementedError(f"{name} has quantized weights")
    try:
        return PublishedWeights(name, kind, config)
    except (OSError, ValueError, LookupError, SafetensorError) as error:
        raise _cannot_load(name, error) from error


def auto_class(config: PreTrainedConfig, with_modules: bool = False) -> Any:
    """Returns transformers' class for the weights of `config`: a language model, or a reward model.
    `with_modules`, its `from_config` adds the modules of multi-token prediction."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    kind: Any = AutoModelForCausalLM
    if has_reward_head(config):
        kind = AutoModelForSequenceClassification
    if not with_modules:
        return kind

    def from_config(*args: Any, **options: Any) -> nn.Module:
        return add_modules(kind.from_config(*args, **options))

    return SimpleNamespace(from_config=from_config)


def _ids(tokens: int | list[int] | None) -> list[int]:
    if tokens is None:
        return []
    if isinstance(tokens, int):
        return [tokens]
    return list(tokens)


def _cannot_load(name: str, error: Exception) -> InputError:
    return InputError(f"model.pretrained {name!r} cannot be loaded: {why_not_loaded(name, error)}")


def checked_fields(architecture: Mapping[str, object]) -> dict[str, object]:
    """Returns the fields of a configuration, including `extra`'s, without `model_type`. Raises
    InputError if neither the configuration class nor the model reads such a key."""
    from transformers import CONFIG_MAPPING

    fields = {key: value for key, value in architecture.items() if key not in ("model_type", EXTRA)}
    extra = architecture.get(EXTRA) or {}
    if not isinstance(extra, dict):
        raise InputError(f"model.architecture.{EXTRA} is {extra!r}; give keys and their values")
    kind = architecture.get("model_type")
    # an unknown type is refused by transformers
    if isinstance(kind, str) and kind in CONFIG_MAPPING:
        config_class = CONFIG_MAPPING[kind]
        known = {field.name for field in dataclasses.fields(config_class)}
        if fields.keys() - known:  # reading the code takes longer than the rest of the check
            known |= _names_in_code(config_class)
        for key in sorted(fields.keys() - known):
            near = get_close_matches(key, known, 1)
            hint = f"did you mean {near[0]}? A" if near else "a"
            raise InputError(
                f"model.architecture.{key} is no field of {config_class.__name__}: {hint} key that"
                f" only your own model reads goes under model.architecture.{EXTRA}"
            )
    return fields | extra


@cache
def _names_in_code(config_class: type[PreTrainedConfig]) -> set[str]:
    """Returns a configuration's aliases and older names, and the keys that only the model's code
    reads: Qwen3-MoE's `head_dim` is no field in transformers 5.23."""
    known = config_class.attribute_map.keys() | set(config_class.attribute_map.values())
    code = ""
    for base in config_class.__mro__:
        if base.__module__.startswith("transformers."):
            code += inspect.getsource(base)
    model = find_spec(config_class.__module__.replace(".configuration_", ".modeling_"))
    if model and model.origin:
        code += Path(model.origin).read_text(encoding="utf-8")
    return known.union(READS.findall(code))
