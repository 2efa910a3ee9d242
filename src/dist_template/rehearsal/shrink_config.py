"""Shrinks a production configuration to a few CPU processes, without changing what is checked.

Kept: the user's module and data module, all callbacks, the strategy with its plans, clipping, schedule, activation
checkpointing, gradient accumulation. Reduced: each mesh size above 1 becomes 2; the batch; the model (shrink_model.py).
Replaced: the text is generated (unless --keep_data), precision is fp32 to make results comparable, loggers are off.
"""

from __future__ import annotations

import copy
import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..model.architecture_keys import EXTRA
from ..parallel import data_parallel_size
from .shrink_model import dropouts, shrink_architecture

MAX_PROCESSES = 4
SEQ_LEN, MICRO_BATCH_SIZE, ACCUMULATION = 32, 2, 2
DROPOUT = 0.1  # for kill and resume, so that a lost random state has an effect
WORDS = "rank step batch shard expert token gradient loss mesh layer weight seed node norm head cache row epoch".split()
PERSISTENT = 64  # elements: ZeRO-3 keeps norms unsharded, and shards matrices
MESH = ("dp_replicate_size", "fsdp_size", "tp_size")


@dataclass
class Small:
    """The small configuration.

    Args:
        config: Keys and values as in YAML; each training changes some.
        processes: Ranks of the chosen strategy.
        data_parallel: Data-parallel ranks among them.
        steps: Optimizer steps of an uninterrupted training.
        dropouts: Fields of `model.architecture` that are dropout probabilities.
        notes: Differences from production, a sentence each.
    """

    config: dict[str, Any]
    processes: int
    data_parallel: int
    steps: int
    dropouts: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def strategy(self) -> Any:
        return self.config["trainer"]["strategy"]

    @property
    def is_text(self) -> bool:
        """Whether the datamodule derives the accumulation; a plain one leaves it to the Trainer."""
        return "micro_batch_size" in self.config["data"]

    def variant(
        self, processes: int, strategy: Any, data_parallel: int | None = None, is_big: bool = False
    ) -> dict[str, Any]:
        """Returns the same training on `processes` under another strategy, with the same global batch.

        Args:
            processes: Ranks.
            strategy: The entry in the configuration.
            data_parallel: Ranks that see a batch of their own. None: all.
            is_big: The global batch is one micro-batch.
        """
        config = copy.deepcopy(self.config)
        config["trainer"] |= {"devices": processes, "strategy": strategy}
        data, batches = config["data"], ACCUMULATION * self.data_parallel
        if self.is_text:
            data["micro_batch_size"] = data["global_batch_size"] if is_big else MICRO_BATCH_SIZE
        elif is_big:
            data["batch_size"] *= batches
            config["trainer"]["accumulate_grad_batches"] = 1
        else:
            config["trainer"]["accumulate_grad_batches"] = batches // (data_parallel or processes)
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
    strategy: Any,
    folder: Path,
    steps: int = 6,
    processes: int | None = None,
    keep_data: bool = False,
) -> Small:
    """Shrinks `given`.

    Args:
        given: The production configuration with every key resolved.
        model_config: Its transformers configuration; None if the module builds another kind of model.
        strategy: Its strategy, instantiated, or the strategy's name.
        folder: Destination of the generated text and of all runs.
        steps: Optimizer steps of an uninterrupted training.
        processes: Ranks; None: the minimum for the strategy.
        keep_data: Keeps the configured source and tokenizer.

    Raises:
        InputError: the strategy does not work on `processes`.
    """
    config = copy.deepcopy(given)
    notes: list[str] = []
    spec, num = fold_strategy(config["trainer"]["strategy"], strategy, processes, notes)
    data_parallel = data_parallel_size(_folded(strategy, spec), num)
    config["run"] |= {"root": str(folder / "runs"), "name": "rehearsal", "report": False}
    _shrink_trainer(config["trainer"], spec, num, steps)
    small = Small(config, num, data_parallel, steps, notes=notes)
    if small.is_text:
        _shrink_data(config["data"], folder, MICRO_BATCH_SIZE * data_parallel * ACCUMULATION, keep_data, steps)
    else:
        config["trainer"]["accumulate_grad_batches"] = ACCUMULATION
        notes.append("data has no micro_batch_size: its samples and batches are those that are given")
    _shrink_model(config["model"], model_config, config["data"].get("seq_len", SEQ_LEN), small)
    chunk = given["model"].get("loss_chunk")
    if chunk and given["data"]["micro_batch_size"] * given["data"]["seq_len"] > chunk:
        config["model"]["loss_chunk"] = config["data"]["seq_len"]  # so that the loss is computed in chunks here too
    if "watchdog" in config:
        config["watchdog"] |= {"timeout_s": 0, "start_timeout_s": 0}  # worker.py detects hangs itself
    if "every_n_steps" in config.get("last_checkpoint", {}):
        # Synchronous: it must be complete when the kill follows a few steps later.
        config["last_checkpoint"] |= {"every_n_steps": checkpoint_step(steps), "asynchronous": False}
    return small


def checkpoint_step(steps: int) -> int:
    """Returns the step of the first checkpoint; the kill follows some steps later."""
    return max(1, steps * 3 // 8)


def _shrink_trainer(trainer: dict[str, Any], spec: Any, num: int, steps: int) -> None:
    trainer |= {"accelerator": "cpu", "devices": num, "num_nodes": 1, "precision": "32-true", "strategy": spec}
    trainer |= {"max_steps": steps, "max_epochs": None, "min_steps": None, "min_epochs": None, "max_time": None}
    trainer |= {"val_check_interval": max(1, steps // 2), "limit_val_batches": 2, "limit_train_batches": None}
    trainer |= {"logger": False, "log_every_n_steps": 1, "profiler": None, "num_sanity_val_steps": 0}


def _shrink_data(data: dict[str, Any], folder: Path, global_batch_size: int, keep: bool, steps: int) -> None:
    small: dict[str, Any] = {
        "seq_len": min(data["seq_len"], SEQ_LEN),
        "global_batch_size": global_batch_size,
        "micro_batch_size": MICRO_BATCH_SIZE,
        "num_workers": min(data.get("num_workers", 0), 1),
        "prompts": data.get("prompts", [])[:1],
    }
    if not keep:
        texts = _write_texts(folder / "texts", rows=2 * steps * global_batch_size, row_bytes=SEQ_LEN)
        paths = [f"{texts.absolute()}/*.txt"]
        source = {"class_path": "TextFiles", "init_args": {"paths": paths, "separator": "\n"}}
        small |= {"source": source, "tokenizer": {"class_path": "Bytes"}, "cache_dir": str(folder / "cache")}
        small |= {"validation_share": 0.1, "test_share": 0.1}
    data |= {key: value for key, value in small.items() if key in data}  # other data modules may lack some keys


def _write_texts(folder: Path, rows: int, row_bytes: int) -> Path:
    """Writes a deterministic text whose lines are documents, enough for `rows` different rows.

    Most documents are shorter than a row, so that leakage between documents has an effect.
    """
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    lines, size = [], 0
    while size < rows * row_bytes * 1.5:
        words = (f"{draw.choice(WORDS)}{draw.randrange(1000)}" for _ in range(draw.choice((1, 1, 2, 3, 6))))
        lines.append(" ".join(words))
        size += len(lines[-1]) + 1
    (folder / "texts.txt").write_text("\n".join(lines), encoding="utf-8")
    return folder


def _shrink_model(model: dict[str, Any], model_config: Any, seq_len: int, small: Small) -> None:
    if model_config is None:
        small.notes.append("the model is not built from model.architecture: it keeps its size")
    else:
        if model.get("pretrained"):
            small.notes.append("model.pretrained is replaced by a small model of its architecture with random weights")
            model["pretrained"] = None
        extra = {key: value for key, value in (model.get("architecture") or {}).items() if key == EXTRA}
        model["architecture"] = shrink_architecture(model_config, seq_len) | extra
        small.dropouts = dropouts(model_config)
        model["architecture"] |= dict.fromkeys(small.dropouts, 0.0)
        if any(getattr(model_config, name) for name in small.dropouts):
            small.notes.append("dropout is off except for kill and resume: random masks differ between ranks")
    if isinstance(model.get("optim"), dict):
        warmup = model["optim"].get("warmup", 0)
        model["optim"] |= {"learning_rate": 3e-3, "warmup": 2 if warmup >= 1 else warmup}
    if model.get("blocks", {}).get("compile"):
        model["blocks"]["compile"] = False
        small.notes.append("model.blocks.compile is off: it takes minutes on a CPU")
    if "sample_tokens" in model:
        model["sample_tokens"] = 4


# ---- the strategy --------------------------------------------------------------------------------------------------


def fold_strategy(spec: Any, strategy: Any, processes: int | None, notes: list[str]) -> tuple[Any, int]:
    """Returns `spec`, the strategy's configuration, for few processes, and their number.

    Raises:
        InputError: `processes` does not fit.
    """
    spec = copy.deepcopy(spec)
    options = spec.get("init_args") or {} if isinstance(spec, dict) else {}
    if "process_group_backend" in options:
        options["process_group_backend"] = None  # the default of a CPU
    if isinstance(options.get("config"), str | dict):
        options["config"] = _without_sizes(options["config"])
    elif "param_persistence_threshold" in options:
        options["param_persistence_threshold"] = PERSISTENT  # by default ZeRO-3 keeps small parameters unsharded
    for name in ("offload_optimizer_device", "offload_params_device"):
        if options.get(name) == "nvme":
            options[name] = "cpu"
            notes.append(f"{name} is host memory here, not NVMe")
    if not hasattr(strategy, "sizes"):
        return ("ddp" if spec == "auto" else spec), processes or 2

    shards_experts = _ranks_per_expert(options, auto=MAX_PROCESSES * _ep(options)) > 1
    for name in (*MESH, "ep_size"):
        options[name] = 2 if isinstance(options[name], int) and options[name] > 1 else options[name]
    auto = 2
    if shards_experts and _ranks_per_expert(options, auto) == 1:  # FSDP of each expert needs ranks too
        auto, options["fsdp_size"] = 4, "auto" if options["fsdp_size"] == "auto" else 4
    num = _num_ranks(options, auto)
    if num > MAX_PROCESSES and options["dp_replicate_size"] != 1:
        options["dp_replicate_size"] = 1
        num = _num_ranks(options, auto)
        notes.append(f"dp_replicate_size is 1: otherwise the small mesh would need {2 * num} processes")
    num = processes or num
    _folded(strategy, spec).sizes(num)  # raises if the number does not fit
    return spec, num


def fewer(small: Small, strategy: Any) -> tuple[Any, int, int]:
    """Returns the small strategy on half of its processes, and how many of these see a batch of their own.

    Data parallelism shrinks first.

    Raises:
        InputError: there is only one process.
    """
    if small.processes < 2:
        raise InputError("one process cannot be halved; give --processes 2 or more")
    num, spec = small.processes // 2, copy.deepcopy(small.strategy)
    if hasattr(strategy, "sizes"):
        options = spec["init_args"]
        name = next(name for name in MESH if options[name] != 1)
        if options[name] != "auto":  # auto adapts
            options[name] //= 2
        sizes = _folded(strategy, spec).sizes(num)
        if options["ep_size"] != "auto":
            options["ep_size"] = min(options["ep_size"], sizes.fsdp * sizes.tp)
    return spec, num, data_parallel_size(_folded(strategy, spec), num)


def _ep(options: dict[str, Any]) -> int:
    return 1 if options["ep_size"] == "auto" else options["ep_size"]


def _ranks_per_expert(options: dict[str, Any], auto: int) -> int:
    """Returns the ranks over which FSDP shards each expert; 1 without expert parallelism. `auto`: value of auto."""
    fsdp, tp = (auto if options[name] == "auto" else options[name] for name in ("fsdp_size", "tp_size"))
    return 1 if options["ep_size"] in (1, "auto") else fsdp * tp // options["ep_size"]


def _num_ranks(options: dict[str, Any], auto: int) -> int:
    product = 1
    for name in MESH:
        product *= auto if options[name] == "auto" else options[name]
    return product


def _folded(strategy: Any, spec: Any) -> Any:
    """Returns a copy of `strategy` with the sizes of `spec`."""
    if not hasattr(strategy, "sizes"):
        return strategy
    folded = copy.copy(strategy)
    for name in (*MESH, "ep_size"):
        setattr(folded, name, spec["init_args"][name])
    return folded


def _without_sizes(config: Any) -> dict[str, Any]:
    """Returns a user's DeepSpeed JSON without batch sizes and precision, and with a small persistence threshold."""
    if isinstance(config, str):
        config = json.loads(Path(config).read_text(encoding="utf-8"))
    changed = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "bf16", "fp16")
    kept = {key: value for key, value in config.items() if key not in changed}
    zero = copy.deepcopy(kept.get("zero_optimization", {}))
    if "stage3_param_persistence_threshold" in zero:
        zero["stage3_param_persistence_threshold"] = PERSISTENT
    for section in (zero.get("offload_optimizer", {}), zero.get("offload_param", {})):
        if section.get("device") == "nvme":
            section["device"] = "cpu"
    return kept | ({"zero_optimization": zero} if zero else {})
