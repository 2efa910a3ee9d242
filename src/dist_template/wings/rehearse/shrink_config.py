"""Shrinks a production configuration to a few CPU processes, without changing what is checked.

Unchanged: the user's module and data module, all callbacks, the strategy with its plans, clipping,
schedule, activation checkpointing, accumulation. Reduced: mesh, batch, model. Replaced: the
text is generated (unless --keep_data), precision is fp32 to make results comparable, no loggers.
"""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...parallel.shrunk import shrunk as shrunk_strategy
from ...text.model.causal_lm import EXTRA
from .shrink_model import dropouts, shrink_architecture

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SEQ_LEN, MICRO_BATCH_SIZE, ACCUMULATION = 32, 2, 2
DROPOUT = 0.1  # for kill and resume, so that a lost random state has an effect
WORDS = "rank step batch shard expert token gradient loss mesh layer weight seed node norm".split()
Config = dict[str, Any]  # keys and values as in YAML
StrategySpec = str | Config  # the entry trainer.strategy


@dataclass
class Small:
    """The small configuration."""

    config: Config  # each training changes some of it
    processes: int  # ranks of the chosen strategy
    data_parallel: int  # data-parallel ranks among them
    steps: int  # optimizer steps of an uninterrupted training
    stages: int = 1  # of the pipeline; a micro-batch and a block for each
    dropouts: list[str] = field(default_factory=list)  # probabilities in model.architecture
    notes: list[str] = field(default_factory=list)  # differences from production, a sentence each

    @property
    def strategy(self) -> StrategySpec:
        return self.config["trainer"]["strategy"]

    @property
    def accumulation(self) -> int:
        return max(ACCUMULATION, self.stages)

    @property
    def is_text(self) -> bool:
        """Whether the datamodule derives the accumulation; a plain one leaves it to the Trainer."""
        return "micro_batch_size" in self.config["data"]

    def variant(
        self,
        processes: int,
        strategy: StrategySpec,
        data_parallel: int | None = None,
        is_big: bool = False,
    ) -> Config:
        """Returns the same training under another strategy, with the same global batch.

        `data_parallel` ranks, None: all, have different batches. `is_big`: the global batch is one
        micro-batch.
        """
        config = copy.deepcopy(self.config)
        data, trainer = config["data"], config["trainer"]
        batches = self.accumulation * self.data_parallel
        per_rank = 1 if is_big else batches // (data_parallel or processes)
        trainer |= {"devices": processes, "strategy": strategy}
        trainer["limit_val_batches"] = per_rank  # the same rows
        if self.is_text:
            data["micro_batch_size"] = data["global_batch_size"] if is_big else MICRO_BATCH_SIZE
        else:
            trainer["accumulate_grad_batches"] = per_rank
            if is_big:
                data["batch_size"] *= batches
        return config

    def with_dropout(self) -> Config:
        """Returns the training with dropout, if the architecture has fields for it."""
        config = copy.deepcopy(self.config)
        if self.dropouts:
            config["model"]["architecture"] |= dict.fromkeys(self.dropouts, DROPOUT)
        return config


def shrink(
    given: Config,
    model_config: PretrainedConfig | None,
    folder: Path,
    steps: int = 6,
    processes: int | None = None,
    keep_data: bool = False,
) -> Small:
    """Returns the small configuration of `given`, the production one with every key resolved.

    `folder` is the destination of text and runs. `keep_data` keeps the configured source and tokenizer. Raises
    InputError if the strategy does not work on `processes`; None: the fewest that it needs.
    """
    config = copy.deepcopy(given)
    spec = config["trainer"]["strategy"]
    shrunk = shrunk_strategy(spec, processes)
    num, notes = shrunk.processes, shrunk.notes
    small = Small(config, num, shrunk.data_parallel, steps, shrunk.stages, notes=notes)
    if isinstance(spec, dict):
        spec["init_args"] = shrunk.arguments
        if "process_group_backend" in shrunk.arguments:
            shrunk.arguments["process_group_backend"] = None  # the default of a CPU
    elif spec == "auto":
        spec = "ddp"
    config["run"] |= {"root": str(folder / "runs"), "name": "rehearsal", "report": False}
    config["trainer"] |= {
        "accelerator": "cpu", "devices": num, "num_nodes": 1, "precision": "32-true",
        "strategy": spec, "max_steps": steps, "max_epochs": None, "max_time": None,
        "min_steps": None, "min_epochs": None, "limit_train_batches": None,
        "val_check_interval": max(1, steps // 2), "limit_val_batches": small.accumulation,
        "num_sanity_val_steps": 0, "logger": False, "log_every_n_steps": 1, "profiler": None,
    }  # fmt: skip
    if small.is_text:
        _shrink_data(small, folder, keep_data)
    else:
        config["trainer"]["accumulate_grad_batches"] = small.accumulation
        notes.append("data has no micro_batch_size: its samples and batches stay as they are")
    _shrink_model(small, model_config, given)
    _shrink_callbacks(config, steps)
    return small


def _shrink_data(small: Small, folder: Path, keep_data: bool) -> None:
    data = small.config["data"]
    global_batch_size = MICRO_BATCH_SIZE * small.data_parallel * small.accumulation
    values: Config = {
        "seq_len": min(data["seq_len"], SEQ_LEN),
        "global_batch_size": global_batch_size,
        "micro_batch_size": MICRO_BATCH_SIZE,
        "num_workers": min(data.get("num_workers", 0), 1),
        "prompts": data.get("prompts", [])[:1],
    }
    if not keep_data:
        texts = folder.absolute() / "texts"
        write_texts(texts, size=3 * small.steps * global_batch_size * SEQ_LEN)
        source = {"paths": [f"{texts}/*.txt"], "separator": "\n"}
        values["source"] = {"class_path": "TextFiles", "init_args": source}
        values |= {"tokenizer": {"class_path": "Bytes"}, "cache_dir": str(folder / "cache")}
        values |= {"validation_share": 0.1, "test_share": 0.1}
    data |= {key: values[key] for key in values.keys() & data.keys()}  # a data module may lack some


def write_texts(folder: Path, size: int) -> None:
    """Writes a deterministic text of `size` bytes whose lines are documents.

    Most documents are shorter than a row, so that leakage between documents has an effect.
    """
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    lines: list[str] = []
    while size > 0:
        num_words = draw.choice((1, 1, 2, 3, 6))
        words = (f"{draw.choice(WORDS)}{draw.randrange(1000)}" for _ in range(num_words))
        lines.append(" ".join(words))
        size -= len(lines[-1]) + 1
    (folder / "texts.txt").write_text("\n".join(lines), encoding="utf-8")


def _shrink_model(small: Small, model_config: PretrainedConfig | None, given: Config) -> None:
    model, data, notes = small.config["model"], small.config["data"], small.notes
    if model_config is None:
        notes.append("the model is not built from model.architecture: it keeps its size")
    else:
        if model.get("pretrained"):
            model["pretrained"] = None
            notes.append("model.pretrained: a small model with random weights")
        architecture = model.get("architecture") or {}
        extra = {EXTRA: architecture[EXTRA]} if EXTRA in architecture else {}
        seq_len = data.get("seq_len", SEQ_LEN)
        small.dropouts = dropouts(model_config)
        model["architecture"] = shrink_architecture(model_config, seq_len, small.stages) | extra
        model["architecture"] |= dict.fromkeys(small.dropouts, 0.0)
        if any(getattr(model_config, name) for name in small.dropouts):
            notes.append("dropout is off except for resume: masks differ between ranks")
    if isinstance(model.get("optim"), dict):
        warmup = model["optim"].get("warmup", 0)
        model["optim"] |= {"learning_rate": 3e-3, "warmup": 2 if warmup >= 1 else warmup}
    if (adapter := model.get("adapter") or {}).get("dropout"):
        adapter["dropout"] = 0.0
        notes.append("model.adapter.dropout is off: masks differ between ranks")
    if model.get("blocks", {}).get("compile"):
        model["blocks"]["compile"] = False
        notes.append("model.blocks.compile is off: it takes minutes on a CPU")
    chunk = model.get("loss_chunk")
    if chunk and given["data"]["micro_batch_size"] * given["data"]["seq_len"] > chunk:
        model["loss_chunk"] = data["seq_len"]  # still computes it in chunks
    smaller = {"loss_kernel": "torch", "sample_tokens": 4}  # Liger's kernels need a GPU
    model |= {key: smaller[key] for key in smaller if key in model}


def _shrink_callbacks(config: Config, steps: int) -> None:
    if "watchdog" in config:
        config["watchdog"] |= {"timeout_s": 0, "start_timeout_s": 0}  # worker.py detects hangs
    if "replicas" in config:
        config["replicas"]["ignore"] = ["*"]  # a check compares them, and names the cause
    for key in ("last_checkpoint", "best_checkpoint"):
        if "dirpath" in config.get(key, {}):
            config[key]["dirpath"] = "{run}/checkpoints"
    if "every_n_steps" in config.get("last_checkpoint", {}):
        # Synchronous: it must be complete when the kill follows a few steps later.
        every = {"every_n_steps": checkpoint_step(steps), "keep": steps, "asynchronous": False}
        config["last_checkpoint"] |= every


def checkpoint_step(steps: int) -> int:
    """Returns the step of the first checkpoint; the kill follows some steps later."""
    return max(1, steps * 3 // 8)
