"""Adapters that are empty after ZeRO-3: peft and DeepSpeed in one process, then this project's export in two."""

from __future__ import annotations

import os

import torch
from safetensors.torch import load_file
from shared import DATA, FOLDER, LLAMA, TRAINER, command, show, strategy


def plain() -> list[int]:
    """Elements of each adapter that peft would save."""
    import deepspeed
    import peft
    import transformers

    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29611",
    }
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # or it is compiled, for minutes
    torch.distributed.init_process_group("gloo")
    deepspeed.init_distributed("gloo", verbose=False)
    zero = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    with deepspeed.zero.Init(config_dict_or_path=zero):
        model = peft.get_peft_model(transformers.LlamaForCausalLM(config), peft.LoraConfig(target_modules=["q_proj"]))
    sizes = [tensor.numel() for tensor in peft.get_peft_model_state_dict(model).values()]
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    return sizes


if __name__ == "__main__":
    sizes = plain()
    adapter = [f"--model.architecture={LLAMA}", "--model.adapter.targets=[q_proj]", strategy("zero3")]
    code, printed = command("fit", *DATA, *TRAINER, *adapter)
    runs = sorted(FOLDER.glob("runs/*/*"))
    if code == 0:
        code, printed = command("export", str(runs[0]), "--output", str(FOLDER / "adapter"))
    if code:
        show(f"{sizes}", printed[-3000:], False)
    saved = load_file(FOLDER / "adapter" / "adapter_model.safetensors")
    here, norm = (
        [tensor.numel() for tensor in saved.values()],
        sum(t.norm().item() for n, t in saved.items() if "lora_B" in n),
    )
    show(
        f"elements of the saved adapters: {sizes}",
        f"{here}, norm of B {norm:.2g}",
        not sum(sizes) and all(here) and norm > 0,
    )
