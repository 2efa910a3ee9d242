"""What is true of a training from its start to its end, in `facts.json`: diagnosis and report reckon with it."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch import Callback

from .. import weights
from ..cluster.environment import memory_limit
from ..model.balance import Balancer
from ..model.flops import Size, peak, text_config
from ..observe.history.run import FACTS
from ..observe.history.write import write_numbered
from ..text.look import look

GIB = 2**30


class Facts(Callback):
    """Write them on rank 0 when the model is in its place; a resumed run keeps the earlier ones beside them, numbered.

    What is not known is null: a model or datamodule of your own need not have what is asked for here.

    Args:
        folder: The run's folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        hosts = weights.from_all_ranks(platform.node())
        if not trainer.is_global_zero:
            return
        model = getattr(pl_module, "model", pl_module)
        data, size = trainer.datamodule, Size.of(model)
        facts = {
            "parameters": {name: getattr(size, name) for name in ("total", "trainable", "active", "embedding")},
            "model": of_model(model, size),
            "balance": of_balance(getattr(pl_module, "balancer", None)),
            "data": of_data(data),
            "machine": of_machine(trainer, hosts),
            "training": of_training(trainer, pl_module)
            | {"flops_per_token": size.flops_per_token(data.seq_len) if hasattr(data, "seq_len") else None},
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        write_numbered(self.folder / FACTS, json.dumps(facts, indent=2))


def of_model(model: Any, size: Size) -> dict[str, Any]:
    config = text_config(model)
    return {
        "class": type(model).__name__.removeprefix("FSDP"),  # torch's fully_shard gives it a new class
        "model_type": getattr(config, "model_type", None),
        "layers": size.layers,
        "width": size.width,
        "heads": getattr(config, "num_attention_heads", None),
        "experts": size.experts,
        "experts_per_token": size.experts_per_token,
        "vocab_size": getattr(config, "vocab_size", None),
        "attention": getattr(config, "_attn_implementation", None),
    }


def of_balance(balancer: Balancer | None) -> dict[str, Any]:
    return {"has_bias": balancer.has_bias, "aux_loss_coef": balancer.aux_loss_coef} if balancer else {}


def of_data(data: Any) -> dict[str, Any]:
    names = ("seq_len", "global_batch_size", "micro_batch_size", "accumulation", "unigram_bits_per_byte")
    facts = {name: getattr(data, name, None) for name in names}
    corpus = getattr(data, "corpus", None)
    splits = {f"{split}_tokens": corpus and corpus.num_tokens(split) for split in ("train", "validation", "test")}
    tokens = facts["global_batch_size"] and facts["seq_len"] and facts["global_batch_size"] * facts["seq_len"]
    return facts | {"tokens_per_step": tokens} | splits | (look(data) if corpus else {})


def of_machine(trainer: Any, hosts: list[str]) -> dict[str, Any]:
    device = trainer.strategy.root_device
    is_cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_cuda else device.type
    memory = torch.cuda.get_device_properties(device).total_memory if is_cuda else memory_limit()
    tflops, source = peak(name, str(trainer.precision)) or (None, None)
    return {
        "world_size": trainer.world_size,
        "data_parallel_size": getattr(trainer.datamodule, "world_size", None),
        "hosts": hosts,
        "device": name,
        "memory_gib": memory / GIB,  # of one device; of a CPU, for all processes of the host
        "supports_bf16": is_cuda and torch.cuda.is_bf16_supported(including_emulation=False),
        "peak_tflops": tflops,  # of one device, in the precision in use
        "peak_source": source,
    }


def of_training(trainer: L.Trainer, module: Any) -> dict[str, Any]:
    blocks, optim = getattr(module, "blocks", None), getattr(module, "optim", None)
    trainable = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    return {
        "strategy": type(trainer.strategy).__name__,
        "precision": str(trainer.precision),
        "max_steps": int(steps) if (steps := trainer.estimated_stepping_batches) != float("inf") else None,
        "clip": trainer.gradient_clip_val,
        "learning_rate": getattr(optim, "learning_rate", None),
        "compiled": getattr(blocks, "compile", None),
        "checkpointing": getattr(blocks, "checkpointing", None),
        "trainable_names_sample": trainable[:8],
    }
