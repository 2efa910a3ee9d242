"""What `gpu` trains: models of four sizes, the same kinds at the size of a test, and litgpt's of the same shapes."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from dist_template.text.batches.rows import PackedRows

from .loops.task import Task


@dataclass(frozen=True)
class Model:
    """What is trained, and the least MFU that it should reach; None: MFU has no target."""

    architecture: dict[str, Any]
    seq_len: int
    micro_batch: int
    mfu: float | None = None


def llama(width: int, inner: int, layers: int, heads: int, kv_heads: int, vocabulary: int) -> dict[str, Any]:
    return {
        "model_type": "llama", "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocabulary,
        "tie_word_embeddings": True,
    }  # fmt: skip


MODELS = {
    "Llama-3.2-1B": Model(llama(2048, 8192, 16, 32, 8, 128256), 4096, 8, 0.45),
    "125M": Model(llama(768, 2048, 12, 12, 12, 50304), 2048, 32, 0.35),
    "3B": Model(llama(3072, 8192, 28, 24, 8, 128256), 4096, 2, 0.46),
    "DeepSeek-V3 style, 1B active": Model(  # 4.0 B parameters, 1.0 B of them active for a token
        {
            "model_type": "deepseek_v3", "hidden_size": 1536, "intermediate_size": 6144, "moe_intermediate_size": 1024,
            "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": 768,
            "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
            "first_k_dense_replace": 1, "n_routed_experts": 32, "num_experts_per_tok": 4, "n_shared_experts": 1,
            "n_group": 1, "topk_group": 1, "num_mtp_layers": 0, "vocab_size": 65536,
        },
        4096, 1,
    ),
}  # fmt: skip
SMOKE = {  # of the same kinds
    "Llama-3.2-1B": Model(llama(64, 128, 2, 4, 2, 257), 32, 2, 0.45),
    "DeepSeek-V3 style, 1B active": Model(
        MODELS["DeepSeek-V3 style, 1B active"].architecture
        | {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2,
           "num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 32, "kv_lora_rank": 32,
           "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "n_routed_experts": 4,
           "num_experts_per_tok": 2, "vocab_size": 257},
        32, 2,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class WholeRows(Task):
    """Rows whose documents may see each other; `project` gets the same by its flag."""

    @property
    def rows(self) -> PackedRows:
        rows = super().rows
        return PackedRows(rows.tokens, self.seq_len, rows.eos_token_id, cross_document_attention=True)


class LitTask(WholeRows):
    """The same training of litgpt's own model, of the same shape."""

    def build(self) -> nn.Module:
        from litgpt.config import Config
        from litgpt.model import GPT

        assert self.architecture
        sizes = self.architecture
        config = Config(
            block_size=self.seq_len, n_layer=sizes["num_hidden_layers"], n_embd=sizes["hidden_size"],
            n_head=sizes["num_attention_heads"], n_query_groups=sizes["num_key_value_heads"],
            intermediate_size=sizes["intermediate_size"], vocab_size=sizes["vocab_size"],
            padded_vocab_size=sizes["vocab_size"], mlp_class_name="LLaMAMLP", norm_class_name="RMSNorm",
            rotary_percentage=1.0, parallel_residual=False, bias=False,
        )  # fmt: skip
        torch.manual_seed(0)
        gpt = GPT(config)
        gpt.lm_head.weight = gpt.transformer.wte.weight  # tied, as in the others
        return LitModel(gpt)


class LitModel(nn.Module):
    """litgpt's model, called as transformers' are."""

    def __init__(self, gpt: Any) -> None:
        super().__init__()
        self.gpt = gpt

    @property
    def model(self) -> Any:
        return SimpleNamespace(layers=self.gpt.transformer.h)

    def forward(self, input_ids: Tensor, position_ids: Tensor, use_cache: bool) -> Any:
        return SimpleNamespace(logits=self.gpt(input_ids))
