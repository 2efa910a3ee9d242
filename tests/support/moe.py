"""Tiny architectures with experts."""

TINY = {
    "hidden_size": 16, "intermediate_size": 32, "moe_intermediate_size": 8, "num_hidden_layers": 4,
    "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 50,
    "max_position_embeddings": 32, "head_dim": 8,
}  # fmt: skip
DEEPSEEK = TINY | {
    "model_type": "deepseek_v3", "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8, "first_k_dense_replace": 1, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1, "head_dim": 4,
}  # fmt: skip
SPARSE = {
    "deepseek_v3": DEEPSEEK,
    "qwen3_moe": TINY | {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2},
    "mixtral": TINY | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
    "gpt_oss": TINY | {"model_type": "gpt_oss", "num_local_experts": 8, "num_experts_per_tok": 2},
}
