"""Shrinks a production configuration to a few CPU processes, without changing what is checked.

Kept: the user's module and data module, all callbacks, the strategy with its plans, clipping,
schedule, activation checkpointing, accumulation. Reduced: mesh, batch, model. Replaced: the
text is generated (unless --keep_data), precision is fp32 to make results comparable, no loggers.
"""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...model.architecture_keys import EXTRA
from ...parallel import sharding_of
from .shrink_model import dropouts, shrink_architecture

SEQ_LEN, MICRO_BATCH_SIZE, ACCUMULATION = 32, 2, 2
DROPOUT = 0.1  # for kill and resume, so that a lost random state has an effect
WORDS = "rank step batch shard expert token gradient loss mesh layer weight seed node norm".split()


@dataclass
class Small:
    """The small configuration.

    Args:
        config: Keys and values as in YAML; each training changes some.
        processes: Ranks of the chosen strategy.
        data_parallel: Data-parallel ranks among them.
        steps: Optimizer steps of an uninterrupted training.
        stages: Stages of the pipeline; a micro-batch and a block for each.
        dropouts: Fields of `model.architecture` that are dropout probabilities.
        notes: Differences from production, a sentence each.
    """

    config: dict[str, Any]
    processes: int
    data_parallel: int
    steps: int
    stages: int = 1
    dropouts: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def strategy(self) -> Any:
        return self.config["trainer"]["strategy"]

    @property
    def accumulation(self) -> int:
        return max(ACCUMULATION, self.stages)

    @property
    def is_text(self) -> bool:
        """Whether the datamodule derives the accumulation; a plain one leaves it to the Trainer."""
        return "micro_batch_size" in self.config["data"]

    def variant(
        self, processes: int, strategy: Any, data_parallel: int | None = None, is_big: bool = False
    ) -> dict[str, Any]:
        """Returns the same training under another strategy, with the same global batch.

        Args:
            processes: Ranks.
            strategy: The entry in the configuration.
            data_parallel: Ranks that see a batch of their own. None: all.
            is_big: The global batch is one micro-batch.
        """
        config = copy.deepcopy(self.config)
        data, batches = config["data"], self.accumulation * self.data_parallel
        evaluated = 1 if is_big else batches // (data_parallel or processes)
        config["trainer"] |= {"devices": processes, "strategy": strategy}
        config["trainer"]["limit_val_batches"] = evaluated  # the same rows
        if self.is_text:
            data["micro_batch_size"] = data["global_batch_size"] if is_big else MICRO_BATCH_SIZE
        elif is_big:
            data["batch_size"] *= batches
            config["trainer"]["accumulate_grad_batches"] = 1
        else:
            config["trainer"]["accumulate_grad_batches"] = evaluated
        return config

    def with_dropout(self) -> dict[str, Any]:
        """Returns the training with dropout, if the architecture has fields for it."""
        config = copy.deepcopy(self.config)
        if self.dropouts:
            config["model"]["architecture"] |= dict.fromkeys(self.dropouts, DROPOUT)
        return config


def shrink(
    given: dict[str, Any],
    model_config: Any,
    folder: Path,
    steps: int = 6,
    processes: int | None = None,
    keep_data: bool = False,
) -> Small:
    """Returns the small configuration of `given`.

    Args:
        given: The production configuration with every key resolved.
        model_config: Its transformers configuration; None for another kind of model.
        folder: Destination of the generated text and of all runs.
        steps: Optimizer steps of an uninterrupted training.
        processes: Ranks; None: the minimum for the strategy.
        keep_data: Keeps the configured source and tokenizer.

    Raises:
        InputError: the strategy does not work on `processes`.
    """
    config = copy.deepcopy(given)
    spec = config["trainer"]["strategy"]
    shrunk = sharding_of(spec).shrunk(processes)
    num, notes = shrunk.processes, shrunk.notes
    small = Small(config, num, shrunk.data_parallel, steps, shrunk.stages, notes=notes)
    if isinstance(spec, dict):
        spec["init_args"] = shrunk.arguments
        if "process_group_backend" in shrunk.arguments:
            shrunk.arguments["process_group_backend"] = None  # the default of a CPU
    elif spec == "auto":
        spec = "ddp"
    config["run"] |= {"root": str(folder / "runs"), "name": "rehearsal", "report": False}
    _shrink_trainer(config["trainer"], spec, num, steps)
    config["trainer"]["limit_val_batches"] = small.accumulation
    if small.is_text:
        _shrink_data(small, folder, keep_data)
    else:
        config["trainer"]["accumulate_grad_batches"] = small.accumulation
        notes.append("data has no micro_batch_size: its samples and batches stay as they are")
    _shrink_model(small, model_config)
    chunk = given["model"].get("loss_chunk")
    if chunk and given["data"]["micro_batch_size"] * given["data"]["seq_len"] > chunk:
        config["model"]["loss_chunk"] = config["data"]["seq_len"]  # still computes it in chunks
    if "loss_kernel" in config["model"]:
        config["model"]["loss_kernel"] = "torch"  # Liger's kernels need a GPU
    _shrink_callbacks(config, steps)
    return small


def checkpoint_step(steps: int) -> int:
    """Returns the step of the first checkpoint; the kill follows some steps later."""
    return max(1, steps * 3 // 8)


def _shrink_callbacks(config: dict[str, Any], steps: int) -> None:
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


def _shrink_trainer(trainer: dict[str, Any], spec: Any, num: int, steps: int) -> None:
    trainer |= {"accelerator": "cpu", "devices": num, "num_nodes": 1, "precision": "32-true"}
    trainer |= {"strategy": spec, "max_steps": steps, "max_epochs": None, "max_time": None}
    trainer |= {"min_steps": None, "min_epochs": None, "limit_train_batches": None}
    trainer |= {"val_check_interval": max(1, steps // 2)}
    trainer |= {"num_sanity_val_steps": 0, "logger": False, "log_every_n_steps": 1}
    trainer["profiler"] = None


def _shrink_data(small: Small, folder: Path, keep_data: bool) -> None:
    data = small.config["data"]
    global_batch_size = MICRO_BATCH_SIZE * small.data_parallel * small.accumulation
    values: dict[str, Any] = {
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
    data |= {key: values[key] for key in values if key in data}  # a data module may lack some


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


def _shrink_model(small: Small, model_config: Any) -> None:
    model = small.config["model"]
    if model_config is None:
        small.notes.append("the model is not built from model.architecture: it keeps its size")
    else:
        if model.get("pretrained"):
            model["pretrained"] = None
            small.notes.append("model.pretrained: a small model with random weights")
        seq_len = small.config["data"].get("seq_len", SEQ_LEN)
        own = {k: v for k, v in (model.get("architecture") or {}).items() if k == EXTRA}
        small.dropouts = dropouts(model_config)
        model["architecture"] = shrink_architecture(model_config, seq_len, small.stages) | own
        model["architecture"] |= dict.fromkeys(small.dropouts, 0.0)
        if any(getattr(model_config, name) for name in small.dropouts):
            small.notes.append("dropout is off except for resume: masks differ between ranks")
    if isinstance(model.get("optim"), dict):
        warmup = model["optim"].get("warmup", 0)
        model["optim"] |= {"learning_rate": 3e-3, "warmup": 2 if warmup >= 1 else warmup}
    if (adapter := model.get("adapter") or {}).get("dropout"):
        adapter["dropout"] = 0.0
        small.notes.append("model.adapter.dropout is off: masks differ between ranks")
    if model.get("blocks", {}).get("compile"):
        model["blocks"]["compile"] = False
        small.notes.append("model.blocks.compile is off: it takes minutes on a CPU")
    if "sample_tokens" in model:
        model["sample_tokens"] = 4
