"""Shrinks a transformers architecture: few narrow layers and few experts, with the same structure.

It keeps every kind of layer (dense and sparse, full and sliding attention), grouped heads, expert
groups and tied embeddings. Heads and experts stay divisible by 2, the small size of tensor and
expert parallelism. Fields have transformers' standard names, which a configuration's
`attribute_map` translates."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Fields = dict[str, Any]  # of a transformers configuration
NUM_EXPERTS = 4
SIZES = {  # field: maximum; fields that a configuration lacks are skipped
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "head_dim": 16,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_inner": 64,
    "ffn_dim": 64,
    "ffn_hidden_size": 64,
    "word_embed_proj_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "num_mtp_layers": 1,
    "num_nextn_predict_layers": 1,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "zero_expert_num": 2,
    "expert_ffn_hidden_size": 16,
    "shared_intermediate_size": 32,
    "rotary_dim": 8,
    "lru_width": 32,
    "attention_window_size": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_chunk_size": 16,
    "d_model": 32,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "d_kv": 16,
    "d_ff": 64,
    "dff": 64,
    "intermediate_size_mlp": 64,
    "dense_intermediate_size": 64,
    "router_hidden_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "swa_num_attention_heads": 4,
    "swa_head_dim": 16,
    "swa_num_key_value_heads": 2,
    "o_lora_rank": 16,
    "num_layers_per_stack": 2,
    "num_layers": 2,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
}
# Numbers of tokens that a layer looks back on, or selects: where they exceed the sequence, nothing
# is left out.
WINDOWS = (
    "sliding_window",
    "sliding_window_size",
    "attention_chunk_size",
    "keep_window_size",
    "index_topk",
)
EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")
OF_INDICES = ("layers", "idxs")  # names of lists that have the numbers of some layers
NOT_KEPT = {"vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "transformers_version"}


def shrink_architecture(config: PretrainedConfig, seq_len: int, min_layers: int = 2) -> Fields:
    """Returns the fields of a small architecture with the structure of `config`."""
    known = {field.name for field in dataclasses.fields(config)}
    window = max(1, seq_len // 4)
    small: Fields = {}
    small |= _at_most(config, SIZES)
    small |= _heads(config) | _layers(config, max(2, min_layers))
    small |= _at_most(config, dict.fromkeys(EXPERTS, NUM_EXPERTS))
    groups = _size(config, "n_group")
    if groups > 1:
        small["n_group"] = 2
        small["topk_group"] = 1 if config.topk_group < groups else 2
    small |= _at_most(config, dict.fromkeys(WINDOWS, window))
    rates = getattr(config, "compress_rates", None)
    if rates:  # DeepSeek-V4's tokens of a compressed entry
        small["compress_rates"] = {name: min(rate, window) for name, rate in rates.items()}
    if _size(config, "max_position_embeddings"):
        small["max_position_embeddings"] = seq_len
    fields: Fields = {"model_type": config.model_type}
    for name, value in config.to_diff_dict().items():
        if name in known and name not in NOT_KEPT:
            fields[name] = value
    for name, value in small.items():
        native = {config.attribute_map.get(name, name), name} & known
        fields |= dict.fromkeys(native, value)
    if "pad_token_id" in known:
        fields["pad_token_id"] = None  # it may exceed the small vocabulary; rows have no padding
    return fields


def _at_most(config: PretrainedConfig, limits: Mapping[str, int]) -> dict[str, int]:
    """Returns the sizes that the configuration has, each at most its limit."""
    small: dict[str, int] = {}
    for name, limit in limits.items():
        size = _size(config, name)
        if size:
            small[name] = min(size, limit)
    return small


def _size(config: PretrainedConfig, name: str) -> int:
    """Returns the value of a field that is a positive whole number; 0 for any other."""
    value = getattr(config, name, None)
    if not isinstance(value, int) or isinstance(value, bool):
        return 0
    return max(value, 0)


def _heads(config: PretrainedConfig) -> dict[str, int]:
    """Returns enough heads for tensor parallelism of size 2, in groups of 2 if they are grouped."""
    heads, given_groups = _size(config, "num_attention_heads"), _size(config, "num_key_value_heads")
    if not heads:
        return {}
    groups = given_groups or heads
    small_groups = min(groups, 2)
    heads_per_group = min(max(heads // groups, 1), 2)
    small = {"num_attention_heads": max(small_groups * heads_per_group, min(heads, 2))}
    if given_groups:
        small["num_key_value_heads"] = small_groups
    return small


def _layers(config: PretrainedConfig, least: int) -> Fields:
    """Returns one layer of each kind, in order, and at least `least` layers.

    Reads what the configuration says of each layer and of some layers, keeps the first layer of
    each kind and, until they are enough, the last ones, and numbers them anew."""
    depth = _size(config, "num_hidden_layers")
    if not depth:
        return {}
    per_layer: dict[str, list] = {}  # such as layer_types
    some_layers: dict[str, list[int]] = {}  # such as Llama-4's moe_layers
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if not isinstance(value, list) or field.name == "mlp_only_layers":
            continue
        # A list of one value for each layer may be called so too; numbers of layers ascend.
        if field.name.endswith(OF_INDICES) and value == sorted(set(value) & set(range(depth))):
            some_layers[field.name] = value
        elif len(value) == depth:
            per_layer[field.name] = value
    num_dense = getattr(config, "first_k_dense_replace", None)
    step = getattr(config, "decoder_sparse_step", None) or 1
    dense = set(range(depth)) - set(range(step - 1, depth, step))
    dense |= set(getattr(config, "mlp_only_layers", None) or ())

    first: dict[tuple, int] = {}  # kind of layer: its first layer
    for layer in range(depth):
        kind = [values[layer] for values in per_layer.values()]
        for numbers in (*some_layers.values(), dense, range(num_dense or 0)):
            kind.append(layer in numbers)
        first.setdefault(tuple(kind), layer)
    kept = set(first.values())
    for layer in range(depth - 1, 0, -1):
        if len(kept) < least:
            kept.add(layer)
    numbering = {layer: number for number, layer in enumerate(sorted(kept))}

    small: Fields = {"num_hidden_layers": len(kept)}
    for name, values in per_layer.items():
        small[name] = [values[layer] for layer in numbering]
    for name, numbers in some_layers.items():
        small[name] = [numbering[layer] for layer in numbers if layer in kept]
    if num_dense is not None:
        small["first_k_dense_replace"] = len(kept & set(range(num_dense)))
    if hasattr(config, "mlp_only_layers"):
        small["mlp_only_layers"] = [numbering[layer] for layer in sorted(kept & dense)]
        small["decoder_sparse_step"] = 1
    return small
