"""Shrinks a production configuration to a few CPU processes, without changing what is checked.

`shrink` reduces the strategy, then the run and the trainer, the data, the model (shrink_model.py),
and the callbacks whose values depend on these. `Small` has the result and its variants: on one
process, and with steps that log nothing.

Unchanged: the user's module and data module, all callbacks, the strategy with its plans, clipping,
schedule, activation checkpointing, accumulation. Reduced: mesh, batch, model. Replaced: the
text is generated (unless --keep_data), precision is fp32 to make results comparable, no loggers."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from ...errors import InputError
from ...parallel.spec import spec_of
from ...text.model.causal_lm import EXTRA, causal_lm, causal_lm_config
from ...text.objectives.next_token import NextToken
from ...text.objectives.objective import Objective, objective_for
from ...text.tokenizers import Bytes
from .shrink_model import shrink_architecture

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SEQ_LEN, MICRO_BATCH_SIZE = 32, 2
STEPS, SAVED_STEP = 6, 2  # optimizer steps of a training, and of its first checkpoint
NAN_STEP = 5  # of which the gradients are made NaN
OF_TEXT = {"seq_len", "global_batch_size", "micro_batch_size"}  # keys of a PackedText
HANG_S = 60.0  # without progress
WORDS = "rank step batch shard expert token gradient loss mesh layer weight seed node norm".split()
Config = dict[str, Any]  # keys and values as in YAML


@dataclass
class Small:
    """The small configuration."""

    config: Config  # each training changes some of it
    processes: int  # ranks of the chosen strategy
    data_parallel: int  # data-parallel ranks among them
    # Micro-batches of a step, and blocks of the model: one for each stage of a pipeline.
    accumulation: int
    notes: list[str]  # differences from production, a sentence each
    micro_batches: int = 1  # of a step in production
    is_manual: bool = False  # the module steps its optimizers itself, and Lightning accumulates not
    is_plain: bool = False  # the module builds no model of transformers

    @property
    def is_text(self) -> bool:
        """Whether the datamodule derives the accumulation; a plain one leaves it to the Trainer."""
        return self.config["data"].keys() >= OF_TEXT

    def on_one_process(self, is_big: bool = False) -> Config:
        """Returns the same training on one process; with `is_big`, the global batch is one
        micro-batch."""
        config = copy.deepcopy(self.config)
        data, trainer = config["data"], config["trainer"]
        batches = self.accumulation * self.data_parallel
        per_step, larger = batches, 1  # micro-batches, and how much larger each of them is
        if is_big:
            per_step, larger = 1, batches
        # Validation has the same rows.
        trainer |= {"devices": 1, "strategy": "auto", "limit_val_batches": per_step}
        if self.is_text:
            data["micro_batch_size"] = MICRO_BATCH_SIZE * larger
        elif self.is_manual:
            trainer["limit_val_batches"] = 1
            if self.has_batch_size:  # in place of an accumulation
                data["batch_size"] *= batches
        else:
            trainer["accumulate_grad_batches"] = per_step
            if is_big:
                data["batch_size"] *= batches
        return config

    @property
    def has_batch_size(self) -> bool:
        """Whether the datamodule has an argument batch_size, a whole number."""
        return type(self.config["data"].get("batch_size")) is int

    def with_plain_steps(self, accelerator: str) -> Config:
        """Returns the same training with steps that log nothing; a step that is not a number is
        skipped."""
        config = copy.deepcopy(self.config)
        config["trainer"] |= {"accelerator": accelerator, "log_every_n_steps": STEPS // 2}
        config.get("numerics", {})["on_non_finite"] = "skip"
        return config


def shrink(
    given: Config,
    model_config: PretrainedConfig | None,
    folder: Path,
    processes: int | None = None,
    keep_data: bool = False,
    module: object = None,
    data: object = None,
) -> Small:
    """Returns the small configuration of `given`, the production one with every key resolved.

    `folder` is the destination of text and runs. `keep_data` keeps the configured source and
    tokenizer. `module` and `data` are the objects that `given` configures, whose objective is
    rehearsed. Raises InputError if the strategy does not work on `processes`; None: the fewest that
    it needs."""
    objective = objective_for(module, data) or NextToken()
    config = copy.deepcopy(given)
    for section in ("model", "data"):  # of a class without arguments there is none
        config.setdefault(section, {})
    strategy = config["trainer"]["strategy"]
    reduced = spec_of(strategy).reduced(processes)
    notes = reduced.notes
    is_manual = not getattr(module, "automatic_optimization", True)
    small = Small(
        config,
        processes=reduced.processes,
        data_parallel=reduced.data_parallel,
        accumulation=1 if is_manual else max(2, reduced.stages),
        notes=notes,
        is_manual=is_manual,
        is_plain=model_config is None,
    )
    config["run"] |= {
        "root": str(folder / "runs"),
        "name": "rehearsal",
        "report": False,
        "store": None,
    }
    config["trainer"] |= {
        "accelerator": "cpu",
        "devices": reduced.processes,
        "num_nodes": 1,
        "precision": "32-true",
        "strategy": _shrink_strategy(strategy, reduced.arguments),
        "max_steps": STEPS,
        "max_epochs": None,
        "max_time": None,
        "min_steps": None,
        "min_epochs": None,
        "limit_train_batches": None,
        "val_check_interval": STEPS // 2,
        "check_val_every_n_epoch": None,  # an epoch may have fewer steps
        "limit_val_batches": small.accumulation,
        "accumulate_grad_batches": 1 if small.is_text else small.accumulation,
        "num_sanity_val_steps": 0,
        "logger": False,
        "log_every_n_steps": 1,
        "profiler": None,
    }
    if config["trainer"].get("sync_batchnorm"):
        config["trainer"]["sync_batchnorm"] = False
        notes.append("trainer.sync_batchnorm is off: torch computes it on GPUs alone")
    if small.is_text:
        _shrink_data(small, folder, keep_data, objective)
    else:
        notes.append("data has no micro_batch_size: its samples and batches stay as they are")
    _shrink_model(small, model_config, given, objective)
    if model_config is not None:
        _replace_frozen(small, folder.absolute(), keep_data, objective)
    if "watchdog" in config:
        config["watchdog"] |= {"timeout_s": HANG_S, "start_timeout_s": HANG_S}
    if "replicas" in config:
        config["replicas"]["ignore"] = ["*"]  # a check compares them, and names the cause
    for key in ("last_checkpoint", "best_checkpoint"):
        if "dirpath" in config.get(key, {}):
            config[key]["dirpath"] = "{run}/checkpoints"
    if "every_n_steps" in config.get("last_checkpoint", {}):
        # Synchronous: it must be complete when the kill follows a few steps later.
        every = {"every_n_steps": SAVED_STEP, "keep": STEPS, "asynchronous": False}
        config["last_checkpoint"] |= every
    return small


def _shrink_strategy(strategy: Any, arguments: Config) -> Any:
    """Returns the value of trainer.strategy: the class of `strategy` with the reduced arguments, or
    a name."""
    if strategy == "auto":
        return "ddp"
    if not isinstance(strategy, dict):
        return strategy
    # Those that the class's signature does not name, as sizes of a package's axis, stay apart.
    unnamed = strategy.get("dict_kwargs") or {}
    if unnamed:
        strategy["dict_kwargs"] = {name: arguments.pop(name) for name in unnamed}
    if "process_group_backend" in arguments:
        arguments["process_group_backend"] = None  # the default of a CPU
    strategy["init_args"] = arguments
    return strategy


def _shrink_data(small: Small, folder: Path, keep_data: bool, objective: Objective) -> None:
    data = small.config["data"]
    global_batch_size = MICRO_BATCH_SIZE * small.data_parallel * small.accumulation
    sizes: Any = global_batch_size
    phases = data["global_batch_size"]
    if isinstance(phases, list):
        least = min(phase["value"] for phase in phases)
        reduced = []
        for phase in phases:  # the least becomes 1, all others 2
            value = 2 if phase["value"] > least else 1
            reduced.append(phase | {"value": value, "multiple": None})
        sizes = _shrink_phases(small, reduced, 2 * global_batch_size)
    values: Config = {
        "seq_len": min(data["seq_len"], SEQ_LEN),
        "global_batch_size": sizes,
        "micro_batch_size": MICRO_BATCH_SIZE,
        "num_workers": min(data.get("num_workers", 0), 1),
        "prompts": data.get("prompts", [])[:1],
        "rank_speeds": None,  # of production's ranks
    }
    if not keep_data:
        num_rows = 6 * STEPS * global_batch_size
        values["source"] = SOURCES[objective.learns_from](folder.absolute() / "texts", num_rows)
        values |= {"tokenizer": {"class_path": "Bytes"}, "cache_dir": str(folder / "cache")}
        values |= {"validation_share": 0.1, "test_share": 0.1}
    for key in values.keys() & data.keys():  # a data module may lack some
        data[key] = values[key]


def _replace_frozen(small: Small, folder: Path, keep_data: bool, objective: Objective) -> None:
    """Writes a small model with random weights in place of each frozen one, such as a teacher: that
    has the vocabulary of production, and its size. Raises InputError if there is none."""
    model, seq_len = small.config["model"], small.config["data"]["seq_len"]
    for path in objective.frozen_weights:
        section, _, key = path.partition(".")
        try:
            own = causal_lm_config({}, model[section][key], None, SimpleNamespace(eos_token_id=0))
        except InputError as error:
            raise InputError(str(error).replace("model.pretrained", f"model.{path}")) from error
        # its own vocabulary is the tokenizer's, or larger
        vocab_size = own.get_text_config().vocab_size if keep_data else Bytes.vocab_size
        sizes = SimpleNamespace(vocab_size=vocab_size, eos_token_id=0, seq_len=seq_len)
        config = causal_lm_config(model["architecture"], None, None, sizes)
        with torch.random.fork_rng([]):
            torch.manual_seed(1)  # other weights than the trained model's
            frozen: Any = causal_lm(config, None, vocab_size)
        frozen.save_pretrained(folder / key)
        model[section][key] = str(folder / key)
        small.notes.append(f"model.{path}: a small model with random weights")


def _shrink_phases(small: Small, given: Any, most: float | None = None) -> Any:
    """Returns a value (by_tokens.py) whose phases end in the first half of the steps, and whose
    highest is `most`."""
    if not isinstance(given, list):
        return given if most is None else most
    rows = MICRO_BATCH_SIZE * small.data_parallel * small.accumulation
    tokens_per_step = rows * min(small.config["data"]["seq_len"], SEQ_LEN)
    last_until = max(phase["until"] or 1 for phase in given)  # the last phase has none
    of_tokens, of_values = tokens_per_step * STEPS / 2 / last_until, 1.0  # factors
    if most is not None:
        of_values = most / max(phase["value"] for phase in given)
    for phase in given:
        phase["value"] *= of_values
        if phase["until"]:
            phase["until"] *= of_tokens
    return given


def write_texts(folder: Path, num_rows: int) -> Config:
    """Writes a deterministic text of `num_rows` rows whose lines are documents, and returns the
    source. Most documents are shorter than a row, so that leakage between documents has an
    effect."""
    size = num_rows * SEQ_LEN
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    lines: list[str] = []
    while size > 0:
        num_words = draw.choice((1, 1, 2, 3, 6))
        words = (f"{draw.choice(WORDS)}{draw.randrange(1000)}" for _ in range(num_words))
        lines.append(" ".join(words))
        size -= len(lines[-1]) + 1
    (folder / "texts.txt").write_text("\n".join(lines), encoding="utf-8")
    source = {"paths": [f"{folder}/*.txt"], "separator": "\n"}
    return {"class_path": "TextFiles", "init_args": source}


def write_pairs(folder: Path, num_rows: int) -> Config:
    """Writes a pair of answers for each row, and returns the source."""
    records = []
    for prompt, good, bad in _answers(num_rows):
        records.append({"prompt": prompt, "chosen": good, "rejected": bad})
    return {"class_path": "Preferences", "init_args": {"paths": [_write_jsonl(folder, records)]}}


def write_ratings(folder: Path, num_rows: int) -> Config:
    """Writes two rated answers for each row, and returns the source."""
    records = []
    for prompt, good, bad in _answers(num_rows):
        for answer in (good, bad):
            records.append({"prompt": prompt, "completion": answer, "label": answer is good})
    return {"class_path": "Ratings", "init_args": {"paths": [_write_jsonl(folder, records)]}}


SOURCES = {"texts": write_texts, "pairs": write_pairs, "ratings": write_ratings}


def _answers(number: int) -> Iterator[tuple[str, str, str]]:
    """Yields a prompt and two answers of different lengths. Both sequences fill half a row or less,
    in bytes, because pairs are never cut."""
    draw = random.Random(0)
    for index in range(number):
        yield f"{index} ", draw.choice(WORDS), draw.choice(WORDS)[:3]


def _write_jsonl(folder: Path, records: list[Config]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "answers.jsonl"
    path.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    return str(path)


def _shrink_model(
    small: Small, model_config: PretrainedConfig | None, given: Config, objective: Objective
) -> None:
    model, data, notes = small.config["model"], small.config["data"], small.notes
    if model_config is None:
        notes.append("the model is not built from model.architecture: it keeps its size")
    else:
        if model.get("pretrained"):
            model["pretrained"] = None
            notes.append("model.pretrained: a small model with random weights")
        architecture = model.get("architecture") or {}
        seq_len = data.get("seq_len", SEQ_LEN)
        fields = shrink_architecture(model_config, seq_len, small.accumulation)
        if EXTRA in architecture:
            fields[EXTRA] = architecture[EXTRA]
        model["architecture"] = fields
    if isinstance(model.get("optim"), dict):
        _shrink_optim(small, model["optim"])
    for path in ("balance.bias_update_speed", *objective.phases):
        section, _, key = path.partition(".")
        if isinstance(model.get(section), dict) and key in model[section]:
            model[section][key] = _shrink_phases(small, model[section][key])
    blocks = model.get("blocks")
    if isinstance(blocks, dict) and blocks.get("compile"):
        model["blocks"]["compile"] = False
        notes.append("model.blocks.compile is off: it takes minutes on a CPU")
    chunk = model.get("loss_chunk") if small.is_text else None
    if chunk and given["data"]["micro_batch_size"] * given["data"]["seq_len"] > chunk:
        model["loss_chunk"] = data["seq_len"]  # still computes it in chunks
    if "sample_tokens" in model:
        model["sample_tokens"] = 4


def _shrink_optim(small: Small, optim: Config) -> None:
    """Sets a learning rate and a warm-up for few steps, where the keys exist."""
    if "learning_rate" in optim and (small.is_text or isinstance(optim["learning_rate"], float)):
        optim["learning_rate"] = _shrink_phases(small, optim["learning_rate"], 3e-3)
    if "warmup" not in optim:
        return
    if not isinstance(optim["warmup"], int | float):
        optim["warmup"] = 0
    elif optim["warmup"] >= 1:  # steps; below 1 it is a share of all steps
        optim["warmup"] = 2
