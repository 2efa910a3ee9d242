"""A small odd configuration of each causal language model type that transformers registers, by
rule.

`shrink_architecture` of the library keeps the structure of a type's default configuration; here its
sizes become odd (five blocks, groups of three heads, a width that is no power of two), and its
optional switches are tried on and off. Types whose defaults are not complete, or whose sizes have
names of their own, have an entry in `COMPLETED`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from dist_template.model import proof
from dist_template.text.model.causal_lm import causal_lm, causal_lm_config
from dist_template.wings.rehearse.shrink_model import shrink_architecture

SEQ_LEN, NUM_BLOCKS = 32, 5  # five blocks on two stages of one or two parts are uneven
DROPOUTS = ("dropout", "_pdrop", "dropout_prob", "dropout_rate")
# of the tokenizer Bytes: a prime
VOCABULARY = SimpleNamespace(vocab_size=257, eos_token_id=256, seq_len=SEQ_LEN)
MOST_PARAMETERS = 3_000_000
# No powers of two; a rank's half of an expert's width is a multiple of 16 bytes, which torch's
# grouped products need of each stride.
ODD = {
    "hidden_size": 48,
    "intermediate_size": 72,
    "moe_intermediate_size": 24,
    "expert_ffn_hidden_size": 24,
    "shared_expert_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 40,
    "shared_intermediate_size": 40,
    "intermediate_size_mlp": 56,
    "dense_intermediate_size": 56,
    "num_attention_heads": 6,
}
SWITCHES = re.compile(
    r".*(qk_?(layer)?norm|query_key_norm|use_.*norm|bias|sliding_window|sinks?|gate|gated|tie_word_embeddings|"
    r"norm_topk_prob|parallel_(residual|attn|block)|multi_query|new_decoder_architecture|residual_fp32|alibi|rope)"
)
FACTOR = re.compile(r".*(multiplier|scale|scaling|scaling_factor)")
# Numbers that change what a model computes (`proof.NUMBERS`), where they are off: values that have
# an effect in a small model. Where they are on, they are turned off.
NUMBERS = [
    (re.compile(r"clip_qkv|gradient_clipping"), 0.5),
    (re.compile(r".*soft_?cap(ping)?"), 2.0),
    (re.compile(r"sliding_window"), SEQ_LEN // 4),
    (re.compile(r"q_lora_rank"), 12),
    (FACTOR, 0.7),
]
# What a published configuration of the type has and its class does not set, or names in its own
# way.
_GEMMA4 = {
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "layer_types": [*["sliding_attention"] * 4, "full_attention"],
    "sliding_window": 8,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 257,
}
COMPLETED: dict[str, dict[str, Any]] = {
    "codegen": {"n_embd": 48, "n_head": 4, "rotary_dim": 4},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default",
    "rope_theta": 1e4}}},
    # with its 1.0, each step multiplies rounding by ten
    "cpmant": {"dim_ff": 72, "dim_head": 8, "init_std": 0.1},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "falcon_h1": {"mamba_d_ssm": 32},
    "gemma3n_text": _GEMMA4 | {
        "num_kv_shared_layers": 0, "intermediate_size": [72] * 5,
        "activation_sparsity_pattern": [0.5] * 5,
        "laurel_rank": 6, "altup_num_inputs": 2,
    },
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": {key: value for key, value in _GEMMA4.items() if "per_layer" not in key},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_layers": 4, "window_size": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "kimi_linear": {"linear_num_heads": 2, "linear_head_dim": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention", "conv"]},
    "llama4_text": {"floor_scale": 4, "attn_scale": 1.0},  # of rows of 32 tokens, not of 8192
    "longcat_flash": {"qk_head_dim": 24, "head_dim": 8, "num_layers": NUM_BLOCKS},
    "mamba2": {"num_heads": 6, "head_dim": 16, "n_groups": 2, "state_size": 8, "chunk_size": 16},
    "marian": {"decoder_vocab_size": 257, "decoder_start_token_id": 1},
    "ministral": {"head_dim": 8},
    "modernbert-decoder": {"pad_token_id": 0},
    "nemotron_h": {"chunk_size": 16},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
        "indexer_compress_ratio": 2, "ngram_vocab_size_base": 64, "hc_lowrank": 8,
        "ple_embed_dim": 16,
    },
    "reformer": {"is_decoder": True, "axial_pos_shape": [4, 8], "axial_pos_embds_dim": [16, 32]},
    "rembert": {"input_embedding_size": 32, "output_embedding_size": 64},
    "roc_bert": {
        "pronunciation_vocab_size": 37, "shape_vocab_size": 41, "pronunciation_embed_dim": 16,
        "shape_embed_dim": 16,
    },
    "roformer": {"embedding_size": 32},
    "rwkv": {"attention_hidden_size": 48},
    "xlm": {"emb_dim": 48, "n_heads": 6, "n_layers": NUM_BLOCKS},
    "xlstm": {"embedding_dim": 48, "num_blocks": NUM_BLOCKS, "num_heads": 2, "mode": "train"},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_hidden_size": 96, "attention_head_dim": 16, "mamba_dt_rank": 6},
}  # fmt: skip
RANDOM = {
    "phimoe": "its router draws experts at random in training, so that no two trainings are equal"
}
# read per layer; the entry above is the whole configuration
NOT_SHRUNK = ("gemma4_text", "gemma4_unified_text")


def variants(kind: str) -> dict[str, dict[str, Any]]:
    """Returns `model.architecture` of the type with its defaults, and with its switches the other
    way round.

    Raises:
        Exception: the model cannot be built or run on one process; of any class of transformers or
            torch.
    """
    if kind in RANDOM:
        raise ValueError(RANDOM[kind])
    plain = _plain(kind)
    flips = _flips(kind, plain)
    return {"default": plain} | ({"switched": plain | flips} if flips else {})


def parts(kind: str) -> str:
    """Says that a type is made of several models, whose sizes no rule reduces; "" if it is not."""
    from transformers import CONFIG_MAPPING

    others = ", ".join(CONFIG_MAPPING[kind].sub_configs)
    return f"made of several models ({others})" if others else ""


def _plain(kind: str) -> dict[str, Any]:
    """The first of a few rules that gives a model which runs: odd sizes, groups of heads that the
    type refuses."""
    from transformers import CONFIG_MAPPING

    if kind in NOT_SHRUNK:
        base: dict[str, Any] = {"model_type": kind, **COMPLETED[kind]}
    else:
        base = shrink_architecture(CONFIG_MAPPING[kind](), SEQ_LEN, NUM_BLOCKS)
    config_class: Any = CONFIG_MAPPING[kind]
    fields = [
        field.name for field in dataclasses.fields(config_class) if field.name.endswith(DROPOUTS)
    ]
    default = config_class()
    # masks differ by rank
    base |= {name: 0.0 for name in fields if isinstance(getattr(default, name), int | float)}
    alias = config_class.attribute_map
    groups = {"num_key_value_heads": 2} if base.get("num_key_value_heads", 1) != 1 else {}
    if base.get("is_decoder") is False:
        base["is_decoder"] = True  # BERT's relatives attend to both sides otherwise
    odd = {alias.get(name, name): size for name, size in (ODD | groups).items()}
    odd = {name: size for name, size in odd.items() if name in base or name == "head_dim"}
    own = COMPLETED.get(kind, {})
    attempts = [
        base | odd | own,
        base | {name: size for name, size in odd.items() if "intermediate" in name} | own,
        base | own,
    ]
    for attempt in attempts[:-1]:
        if _runs(attempt):
            return attempt
    try_model(attempts[-1])
    return attempts[-1]


def _flips(kind: str, plain: dict[str, Any]) -> dict[str, Any]:
    """The switches of a type that can be turned, all at once where they allow it."""
    config = causal_lm_config(plain, None, None, VOCABULARY)
    found: dict[str, list[Any]] = {}
    for name, value in vars(config).items():
        if isinstance(value, bool) and SWITCHES.fullmatch(name):
            found[name] = [not value]
        elif proof.NUMBERS.fullmatch(name):
            found[name] = [*_other_numbers(name, value)]
    kept: dict[str, Any] = {}
    for name, values in found.items():
        for value in values:
            if _runs(plain | kept | {name: value}):
                kept[name] = value
                break
    return kept


def _other_numbers(name: str, value: Any) -> Iterator[Any]:
    """Yields what turns a number on, or off: the first that the type allows is taken."""
    if not proof.is_on(value):
        yield from (number for pattern, number in NUMBERS if pattern.fullmatch(name))
    elif isinstance(value, list):
        yield [0.0] * len(value)
    else:
        yield None
        if FACTOR.fullmatch(name):
            yield 1.0


def _runs(architecture: dict[str, Any]) -> bool:
    try:
        try_model(architecture)
    except Exception:  # of any class
        return False
    return True


def try_model(architecture: dict[str, Any]) -> None:
    """Builds the model and runs one forward and backward pass.

    Raises:
        ValueError: it is too large: sizes with names of their own have not been reduced.
        Exception: whatever its code raises.
    """
    from transformers import AutoModelForCausalLM

    config = causal_lm_config(architecture, None, None, VOCABULARY)
    with torch.device("meta"):
        number = sum(each.numel() for each in AutoModelForCausalLM.from_config(config).parameters())
    if number > MOST_PARAMETERS:
        raise ValueError(f"{number:,} parameters: it has sizes that no rule reduces")
    model: Any = causal_lm(config, None, VOCABULARY.vocab_size)
    tokens = torch.randint(0, VOCABULARY.vocab_size, (2, SEQ_LEN))
    positions = torch.arange(SEQ_LEN).repeat(2, 1)
    model(
        input_ids=tokens, position_ids=positions, use_cache=False
    ).logits.square().mean().backward()


def configured(architecture: dict[str, Any]) -> Any:
    """Returns transformers' configuration of `architecture`."""
    return causal_lm_config(architecture, None, None, VOCABULARY)


def plans(architecture: dict[str, Any]) -> set[str]:
    """Returns which plans the type has: "tp", "ep"."""
    config = configured(architecture)
    configs = (config, config.get_text_config())
    return {
        kind
        for kind in ("tp", "ep")
        if any(getattr(each, f"base_model_{kind}_plan", None) for each in configs)
    }
