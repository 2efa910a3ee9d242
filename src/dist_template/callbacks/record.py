"""Writes a run's configuration, environment and facts into its folder, before the first step.

`facts.json` has what is constant in a training: model, data, machine. Diagnosis and report use it.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
import yaml
from lightning.pytorch import Callback

from .. import weights
from ..cluster.environment import environment, memory_limit
from ..compat.transformers import attention_of
from ..model.any_module import data_of, network_of, size_of, typed_attribute
from ..model.balance import Balancer
from ..model.flops import Size, peak, text_config
from ..model.optim import OptimConfig
from ..observe.history.run import CONFIG, DEFAULTS, ENVIRONMENT, FACTS, without_folder
from ..observe.loggers.tensorboard import TensorBoard
from ..parallel import run_strategy
from ..parallel.blocks import BlockConfig
from ..records import GIB, write_atomically


class Record(Callback):
    """Writes the resolved configuration, the environment and the facts, to files and loggers.

    The environment has the git commit and the launch command. A resumed run keeps the earlier files, numbered.

    Args:
        folder: The run's folder.
        config: The resolved configuration, of plain types.
        defaults: Returns the YAML of the same keys with their defaults.
    """

    def __init__(self, folder: Path, config: dict[str, Any], defaults: Callable[[], str]) -> None:
        self.folder = folder
        self.config = config
        self.defaults = defaults

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        write_facts(self.folder, trainer, pl_module)
        if not trainer.is_global_zero:
            return
        config = without_folder(str(self.folder), self.config)  # to run it again with another name
        env = environment()
        text = yaml.safe_dump(config, sort_keys=False)
        write_atomically(self.folder / DEFAULTS, self.defaults())
        write_atomically(self.folder / CONFIG, text, keep_earlier=True)
        write_atomically(self.folder / ENVIRONMENT, json.dumps(env, indent=2), keep_earlier=True)
        facts = json.loads((self.folder / FACTS).read_text("utf-8"))
        for logger in trainer.loggers:
            logger.log_hyperparams(self.config | {"environment": env, "facts": facts})

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for logger in trainer.loggers:
            if trainer.global_step and isinstance(logger, TensorBoard):
                logger.resume(trainer.global_step)


def write_facts(folder: Path, trainer: L.Trainer, module: L.LightningModule) -> None:
    """Writes `facts.json` on rank 0, when the model is on its device. Collective.

    Unknown values are null: a custom model or datamodule may lack what is read here.
    """
    hosts = weights.from_all_ranks(platform.node())
    if not trainer.is_global_zero:
        return
    model = network_of(module)
    balancer = typed_attribute(module, "balancer", Balancer)
    data, size = data_of(trainer), size_of(module)
    flops = size.flops_per_token(data.seq_len) if hasattr(data, "seq_len") else None
    balance = {}
    if balancer:
        balance = {"has_bias": balancer.has_bias, "aux_loss_coef": balancer.aux_loss_coef}
    counts = ("total", "trainable", "in_4_bits", "active", "embedding")
    facts = {
        "parameters": {name: getattr(size, name) for name in counts},
        "model": _model(model, size),
        "balance": balance,
        "data": _data(data),
        "machine": _machine(trainer, hosts),
        "pipeline": run_strategy(trainer.strategy).layers.facts or {},
        "training": _training(trainer, module) | {"flops_per_token": flops},
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / FACTS, json.dumps(facts, indent=2), keep_earlier=True)


def _model(model: Any, size: Size) -> dict[str, Any]:
    config = text_config(model)
    return {
        "class": type(model).__name__.removeprefix("FSDP"),  # torch's fully_shard changes the class
        "model_type": getattr(config, "model_type", None),
        "layers": size.layers,
        "width": size.width,
        "heads": getattr(config, "num_attention_heads", None),
        "experts": size.experts,
        "experts_per_token": size.experts_per_token,
        "vocab_size": getattr(config, "vocab_size", None),
        "attention": attention_of(config),
    }


def _data(data: Any) -> dict[str, Any]:
    sizes = ("seq_len", "global_batch_size", "micro_batch_size", "accumulation")
    facts: dict[str, Any] = {name: getattr(data, name, None) for name in sizes}
    facts["unigram_bits_per_byte"] = getattr(data, "unigram_bits_per_byte", None)
    facts["tokens_per_step"] = None
    if facts["global_batch_size"] and facts["seq_len"]:
        facts["tokens_per_step"] = facts["global_batch_size"] * facts["seq_len"]
    corpus = getattr(data, "corpus", None)
    for split in ("train", "validation", "test"):
        facts[f"{split}_tokens"] = corpus and corpus.num_tokens(split)
    return facts | (data.statistics() if hasattr(data, "statistics") else {})


def _machine(trainer: L.Trainer, hosts: list[str]) -> dict[str, Any]:
    device = trainer.strategy.root_device
    is_cuda = device.type == "cuda"
    name, memory = device.type, memory_limit()
    if is_cuda:
        properties = torch.cuda.get_device_properties(device)
        name, memory = properties.name, properties.total_memory
    return {
        "world_size": trainer.world_size,
        "data_parallel_size": getattr(data_of(trainer), "world_size", None),
        "hosts": hosts,
        "device": name,
        "memory_gib": memory / GIB,  # of one device; of a CPU, for all processes of the host
        "supports_bf16": is_cuda and torch.cuda.is_bf16_supported(including_emulation=False),
        "peak_tflops": peak(name, str(trainer.precision)),  # of one device, in the precision in use
    }


def _training(trainer: L.Trainer, module: Any) -> dict[str, Any]:
    blocks = typed_attribute(module, "blocks", BlockConfig)
    optim = typed_attribute(module, "optim", OptimConfig)
    steps = trainer.estimated_stepping_batches
    return {
        "strategy": type(trainer.strategy).__name__,
        "precision": str(trainer.precision),
        "max_steps": int(steps) if steps != float("inf") else None,
        "clip": trainer.gradient_clip_val,
        "learning_rate": getattr(optim, "learning_rate", None),
        "compiled": getattr(blocks, "compile", None),
        "checkpointing": getattr(blocks, "checkpointing", None),
    }
