"""Adapters that are empty after ZeRO-3: peft and DeepSpeed in one process, then this project's
export in two."""

from __future__ import annotations

import peft
from shared import LLAMA, built_under_zero3, exported_adapter, plain_llama, show, strategy


def adapted() -> peft.PeftModel:
    return peft.get_peft_model(plain_llama(), peft.LoraConfig(target_modules=["q_proj"]))


if __name__ == "__main__":
    sizes = [
        tensor.numel()
        for tensor in peft.get_peft_model_state_dict(built_under_zero3(adapted)).values()
    ]
    adapter = [
        f"--model.architecture={LLAMA}",
        "--model.adapter.targets=[q_proj]",
        strategy("zero3"),
    ]
    saved, _ = exported_adapter(str(sizes), *adapter)
    elements = [tensor.numel() for tensor in saved.values()]
    norm = sum(tensor.norm().item() for name, tensor in saved.items() if "lora_B" in name)
    holds = not sum(sizes) and all(elements) and norm > 0
    show(f"elements of the saved adapters: {sizes}", f"{elements}, norm of B {norm:.2g}", holds)
