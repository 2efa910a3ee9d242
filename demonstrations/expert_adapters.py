"""LoRA of fused experts, which older versions of peft lost: peft of today, then this project's
export."""

from __future__ import annotations

import peft
import transformers
from shared import exported_adapter, show

MOE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
}
MOE |= {
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}


def plain() -> list[str]:
    """The adapters of experts that peft would save: none before its fix."""
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(vocab_size=300, **MOE))
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear"))
    return [name for name in peft.get_peft_model_state_dict(adapted) if ".experts" in name]


if __name__ == "__main__":
    named = plain()
    architecture = (
        "{model_type: qwen3_moe, "
        + ", ".join(f"{key}: {value}" for key, value in MOE.items())
        + "}"
    )
    flags = [
        f"--model.architecture={architecture}",
        "--model.adapter.targets=[gate_up_proj, down_proj]",
    ]
    saved, printed = exported_adapter(str(named), *flags)
    experts = {name: tensor for name, tensor in saved.items() if ".experts" in name}
    moved = sum(tensor.abs().sum().item() > 0 for tensor in experts.values())
    said = [line for line in printed.splitlines() if "logits" in line]
    here = f"{moved} of {len(experts)} are not zero; {' '.join(said[-1].split()[3:])}"
    show(
        f"peft {peft.__version__} saves {len(named)} adapters of experts",
        here,
        moved == len(experts) > 0,
    )
