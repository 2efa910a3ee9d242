from __future__ import annotations
import json
from pathlib import Path
from typing import Any
import pytest
from tests.support.memory import State, Allocated
from tests.support.runs import Workers, run, only_run
from tests.support.strategies import flags_of, settings_of
from dist_template.tools.plan.estimate import Machine
from dist_template.tools.plan.planner import Planner
from dist_template.tools.plan.candidates import Candidate
from trainer_dev.module import LanguageModule, SMALL_DEEPSEEK_V3
from types import SimpleNamespace

LLAMA: dict[str, Any] = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2}
MOE = {"model_type": "qwen3_moe", "hidden_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
CASES = [("ddp", LLAMA, "32-true", "none", 2), ("ddp", LLAMA, "bf16-mixed", "none", 2),("ddp", LLAMA, "32-true", "full", 2),
 ("fsdp2", LLAMA, "32-true", "none", 2),("fsdp2", LLAMA, "bf16-mixed", "none", 2),("fsdp2", LLAMA, "32-true", "full", 2), ("fsdp2", LLAMA, "bf16-true", "none", 2),
 ("zero1", LLAMA, "bf16-mixed", "none", 2),("zero2", LLAMA, "32-true", "none", 2),("zero3", LLAMA, "bf16-mixed", "none", 2),("zero3", LLAMA, "32-true", "none", 2),
 ("tp", LLAMA, "32-true", "none", 2), ("fsdp2_ep", MOE, "32-true", "none", 2), ("fsdp2", MOE, "bf16-mixed", "none", 2), ("fsdp2_ep", MOE, "bf16-mixed", "none", 2),("fsdp2_offload", LLAMA, "32-true", "none", 2),("zero2_offload", LLAMA, "32-true", "none", 2),
 ("ddp", LLAMA, "32-true", "selective", 2),("fsdp2", LLAMA, "bf16-mixed", "full", 2),]
@pytest.mark.parametrize("n", range(len(CASES)))
def test_cal(flags, tmp_path, n, request):
    strategy, arch, precision, mode, ranks = CASES[n]
    extra = ["--data.seq_len=256", "--data.micro_batch_size=4", "--data.global_batch_size=16","--data.validation_share=0.0","--data.test_share=0.0"]
    flags = [f for f in flags if "architecture" not in f] + extra
    run("prepare", *flags)
    text = "{" + ", ".join(f"{k}: {v}" for k, v in arch.items()) + "}"
    flags += [*flags_of(strategy), f"--trainer.devices={ranks}", f"--model.architecture={text}", "--trainer.max_steps=3", "--trainer.limit_val_batches=0", f"--trainer.precision={precision}", f"--model.blocks.checkpointing={mode}"]
    if strategy == "tp": flags += ["--data.global_batch_size=8"]
    with Workers(ranks) as workers:
        workers.run(["fit", *flags], tmp_path / "record", callbacks=[State(tmp_path), Allocated(tmp_path)]).check()
    import torch
    module = LanguageModule(architecture=arch | {"vocab_size": 257})
    module.blocks.checkpointing = "none"
    data = SimpleNamespace(seq_len=256, global_batch_size=8 if strategy=="tp" else 16)
    p = Planner(module, data, {}, precision, on_gpu=False)
    planned = p.option(Candidate(strategy, "", {}, settings_of(strategy)), Machine(1, ranks, 1e12, 0, 0, 1, 1), 4, mode).planned
    parts = planned.parts()
    state = sum(parts[k] for k in ("weights", "gradients", "optimizer state"))
    rest = {k: v / 2**20 for k, v in parts.items() if k not in ("weights", "gradients", "optimizer state", "allowance")}
    for r in range(1):
        m = json.loads((tmp_path / f"state{r}.json").read_text()); a = json.loads((tmp_path / f"allocated{r}.json").read_text())
        tot = sum(v for k, v in rest.items() if k not in ("logits", "backward")) + max(rest["logits"], rest["backward"])
        print(f"\n@@ {strategy} {arch['model_type']} {precision} {mode} state {state/m:.3f} rest measured {a/2**20:.1f} predicted {tot:.1f} ratio {tot*2**20/a:.3f}", {k: round(v,1) for k,v in rest.items()})
