"""The language module without a Trainer, tiny models with experts, a count of operations."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import torch
import yaml
from torch.utils._python_dispatch import TorchDispatchMode
from trainer_dev.module import SMALL_DEEPSEEK_V3, LanguageModule
from transformers import AutoConfig, AutoModelForCausalLM

from tests.support.runs import SHIPPED

ARCHITECTURES = {"deepseek_v3": SMALL_DEEPSEEK_V3} | {
    path.stem: yaml.safe_load(path.read_text())["model"]["architecture"]
    for path in SHIPPED.glob("model/*.yaml")
}
TINY = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 50,
    "head_dim": 8,
    "max_position_embeddings": 32,
}
DEEPSEEK = TINY | {
    "model_type": "deepseek_v3",
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "head_dim": 4,
}
SPARSE = {
    "deepseek_v3": DEEPSEEK,
    "qwen3_moe": TINY | {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2},
    "mixtral": TINY | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
    "gpt_oss": TINY | {"model_type": "gpt_oss", "num_local_experts": 8, "num_experts_per_tok": 2},
}


def on_meta(**architecture: Any) -> Any:
    """A model of transformers without memory."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**architecture))


class Standalone(LanguageModule):
    """The module with data of fixed size, without a Trainer."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(vocab_size=50, eos_token_id=0, seq_len=16)


def build(seed: int = 0, **options: Any) -> LanguageModule:
    torch.manual_seed(seed)
    module = Standalone(**options)
    module.model = module.build_model(module.data)
    return module


class Ops(TorchDispatchMode):
    """Counts operations, and notes each for which the host waits: for a number, or for a shape."""

    WAITING = (
        "_local_scalar_dense",
        "nonzero",
        "masked_select",
        "_unique2",
        "unique_dim",
        "bincount",
        "equal",
    )

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()
        self.reads: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        self.seen[name] += 1
        self.reads += [name] if name in self.WAITING else []
        return func(*args, **(kwargs or {}))
