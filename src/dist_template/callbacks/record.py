"""Writes a run's configuration, environment and facts into its folder, before the first step.

1  All ranks exchange their hosts and count the steps, which sets up the loaders.
2  Rank 0 collects the facts: model, data, machine, strategy.
3  It writes facts.json, the configuration with its defaults, and the environment; a resumed run
   keeps the earlier files, numbered.
4  The loggers get all of it.

`facts.json` has what is constant in a training: model, data, machine. Diagnosis and report use
it."""

import inspect
import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
import yaml
from lightning.pytorch import Callback

from .. import processes
from ..by_tokens import values_of
from ..cluster.environment import environment
from ..model.any_module import data_of, network_of, size_of, typed_attribute
from ..model.balance import Balancer
from ..model.flops import peak, text_config
from ..model.proof import waits_of
from ..observe.history.run import RunFile, without_folder
from ..parallel import rank_view
from ..records import write_atomically
from ..run_callback import loggers_of

Facts = dict[str, Any]


class Record(Callback):
    """Writes the resolved configuration, the environment and the facts, to files and loggers.

    The environment has the git commit and the launch command. A resumed run keeps the earlier
    files, numbered.

    Args:
        folder: The run's folder.
        config: The resolved configuration, of plain types.
        defaults: Returns the YAML of the same keys with their defaults."""

    def __init__(self, folder: Path, config: dict[str, Any], defaults: Callable[[], str]) -> None:
        self.folder = folder
        self.config = config
        self.defaults = defaults

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        facts = write_facts(self.folder, trainer, pl_module)
        if not trainer.is_global_zero:
            return
        # Without the folder's name, so that it can be run again with another one.
        config = without_folder(str(self.folder), self.config)
        config_text = yaml.safe_dump(config, sort_keys=False)
        env = environment()
        env_text = json.dumps(env, indent=2)
        write_atomically(self.folder / RunFile.DEFAULTS, self.defaults())
        write_atomically(self.folder / RunFile.CONFIG, config_text, keep_earlier=True)
        write_atomically(self.folder / RunFile.ENVIRONMENT, env_text, keep_earlier=True)
        for logger in trainer.loggers:
            logger.log_hyperparams(self.config | {"environment": env, "facts": facts})

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.global_step:
            for logger in loggers_of(trainer):
                logger.on_resume(trainer.global_step)


def write_facts(folder: Path, trainer: L.Trainer, module: L.LightningModule) -> Facts:
    """Writes `facts.json` on rank 0, when the model is on its device, and returns its content.
    Collective. Unknown values are null: a custom model or datamodule may lack what is read here."""
    hosts = processes.to_rank_zero(platform.node())
    if module.automatic_optimization:
        # May set up the loaders, with a barrier of all ranks.
        steps = trainer.estimated_stepping_batches
    elif trainer.max_steps >= 0:
        # `estimated_stepping_batches` counts batches, in each of which a module that optimizes
        # manually may take several steps, or none.
        steps = trainer.max_steps
    else:
        steps = float("inf")
    if not trainer.is_global_zero:
        return {}
    model, data, size = network_of(module), data_of(trainer), size_of(module)
    config, balancer = text_config(model), typed_attribute(module, "balancer", Balancer)
    balance = {}
    if balancer:
        balance = {"has_bias": balancer.has_bias, "aux_loss_coef": balancer.aux_loss_coef}
    flops_per_token = None
    if hasattr(data, "seq_len"):
        flops_per_token = size.flops_per_token(data.seq_len)
    pipeline = rank_view(trainer.strategy).layers.facts
    counts = ("total", "trainable", "in_4_bits", "matrices", "active", "embedding")
    facts = {
        "parameters": {name: getattr(size, name) for name in counts},
        "model": {
            # torch's fully_shard changes the class.
            "class": type(model).__name__.removeprefix("FSDP"),
            "model_type": getattr(config, "model_type", None),
            "layers": size.layers,
            "predicted": size.predicted,
            "width": size.width,
            "experts": size.experts,
            "experts_per_token": size.experts_per_token,
            "vocab_size": getattr(config, "vocab_size", None),
        },
        "balance": balance,
        "objective": _objective(module),
        "data": _data(data),
        "machine": _machine(trainer, hosts),
        "pipeline": pipeline if pipeline else {},
        "training": {
            "strategy": type(trainer.strategy).__name__,
            "precision": str(trainer.precision),
            "max_steps": int(steps) if steps != float("inf") else None,
            "flops_per_token": flops_per_token,
            "optimizers": _optimizers(trainer),
            "is_manual": not module.automatic_optimization,
            "waits": waits_of(Path(inspect.getfile(type(module))).parent),
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / RunFile.FACTS, json.dumps(facts, indent=2), keep_earlier=True)
    return facts


def _optimizers(trainer: L.Trainer) -> list[str]:
    """Returns the classes of the optimizers, without DeepSpeed's wrappers."""
    found = []
    for optimizer in trainer.optimizers:
        inner = getattr(optimizer, "optimizer", None)
        is_wrapped = isinstance(inner, torch.optim.Optimizer)
        found.append(type(inner if is_wrapped else optimizer).__name__)
    return found


def _objective(module: Any) -> Facts:
    """Returns what a language model learns, of which memory and some diagnoses depend."""
    facts = getattr(module, "objective_facts", None)
    return facts() if callable(facts) else {}


def _data(data: Any) -> Facts:
    seq_len = getattr(data, "seq_len", None)
    facts: Facts = {"seq_len": seq_len, "accumulation": getattr(data, "accumulation", None)}
    facts["tokens_per_step"] = facts["train_tokens"] = None
    size = getattr(data, "global_batch_size", None)
    if size and seq_len:
        # Of phases by consumed tokens, the largest.
        facts["tokens_per_step"] = int(max(values_of(size))) * seq_len
    corpus = getattr(data, "corpus", None)
    if corpus is not None:
        facts["train_tokens"] = corpus.num_tokens("train")
    baselines = getattr(data, "label_baselines", None)
    if isinstance(baselines, dict):
        facts |= baselines
    return facts


def _machine(trainer: L.Trainer, hosts: list[str]) -> Facts:
    device = trainer.strategy.root_device
    name, has_bf16 = device.type, False
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return {
        "world_size": trainer.world_size,
        "hosts": hosts,
        "device": name,
        "supports_bf16": has_bf16,
        "peak_tflops": peak(name, str(trainer.precision)),  # of one device, in the precision in use
    }
