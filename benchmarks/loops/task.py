"""What is trained, on what, for how long: the same for every loop; and the log that the
hand-written ones keep.

Shapes: B sequences of a batch, T tokens of a sequence, V vocabulary.
"""

import json
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dist_template.text.batches.rows import PackedRows

from ..arms import quiet
from ..ranks import Turns

CORPUS = "the quick brown fox jumps over the lazy dog. "
BYTES_EOS, BYTES_VOCABULARY = 256, 257  # of the tokenizer Bytes
HEADS = {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 4}
# 0.1M parameters, of bytes
SMALL = HEADS | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
LARGE = HEADS | {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6}  # 5M


@dataclass(frozen=True)
class Task:
    """One training."""

    folder: Path  # for the corpus, its token cache, and what the loops write
    architecture: dict[str, Any] | None = (
        None  # a transformers configuration, trained from scratch; None: `Null`
    )
    steps: int = 600  # optimizer steps in all
    warm: int = 100  # steps before time is taken
    batch_size: int = 8  # sequences per optimizer step and rank, in one micro-batch
    seq_len: int = 32
    log_every: int = 10  # optimizer steps between two log lines
    strategy: str = "auto"  # auto (one process), ddp or fsdp2
    device: str = "cpu"  # cpu or cuda
    precision: str = "32-true"  # 32-true or bf16-mixed
    compile: bool = False  # each block with torch.compile
    flags: tuple[str, ...] = ()  # more of `fit`'s flags, for the project alone
    turns: Turns | None = None  # of the arms, after the first `warm` steps
    clip: float = 1.0
    learning_rate: float = 3e-4
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    checkpoint_every: int = 100_000  # due, but not within the steps

    def build(self) -> nn.Module:
        """The model, on the CPU, in float32, with the same weights in every process."""
        if self.architecture is None:
            return Null()
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(0)
        fields = {
            "vocab_size": BYTES_VOCABULARY,
            "max_position_embeddings": self.seq_len,
        } | self.architecture
        config = AutoConfig.for_model(**fields)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()

    @property
    def rows(self) -> PackedRows:
        """All rows of the token cache, which `fit` reads as well."""
        (path,) = self.folder.glob("cache/*/train.bin")
        return PackedRows(np.memmap(path, dtype=np.uint16, mode="r"), self.seq_len, BYTES_EOS)

    def batches(self, rank: int = 0) -> Iterator[dict[str, Tensor]]:
        """`steps` of this rank, in a random order: `input_ids`, `labels`, `position_ids`, (B, T)
        each."""
        rows, draw = self.rows, random.Random(rank)
        for _ in range(self.steps):
            yield inputs_of(rows.__getitems__(draw.sample(range(len(rows)), self.batch_size)))

    @property
    def warmup(self) -> int:
        """Steps in which the learning rate rises."""
        return max(1, self.steps // 20)

    def optimizer(self, model: nn.Module) -> torch.optim.AdamW:
        """Weight decay on matrices alone."""
        matrices = [p for p in model.parameters() if p.ndim >= 2]
        others = [p for p in model.parameters() if p.ndim < 2]
        groups = [
            {"params": matrices, "weight_decay": self.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        return torch.optim.AdamW(groups, lr=self.learning_rate, betas=self.betas, fused=True)

    def schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        from transformers import get_scheduler

        least = {"min_lr_rate": 0.1}
        return get_scheduler(
            "cosine_with_min_lr",
            optimizer,
            self.warmup,
            self.steps,
            scheduler_specific_kwargs=least,
        )


class Null(nn.Module):
    """One vector and nothing to compute with it: a step takes what the loop takes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, **batch: Tensor) -> Tensor:
        return self.weight.sum() * 0.01 + 1.0


def inputs_of(batch: Any) -> dict[str, Tensor]:
    """Without what the project alone makes use of."""
    return {name: batch[name] for name in ("input_ids", "labels", "position_ids")}


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """() mean cross entropy, in nats, and () share of tokens predicted right."""
    output = model(
        input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False
    )
    if isinstance(output, Tensor):  # Null's
        return output, output.detach()
    # (B*T, V) and (B*T,)
    logits, labels = (output.logits.float().flatten(0, 1), batch["labels"].flatten())
    return F.cross_entropy(logits, labels), (logits.detach().argmax(-1) == labels).float().mean()


@dataclass
class Log:
    """What an engineer writes who wants these numbers and no framework: nothing is read between log
    steps."""

    task: Task
    name: str
    rank: int = 0
    ranks: int = 1

    def __post_init__(self) -> None:
        self.sums = torch.zeros(4, device=self.task.device)
        self.process = psutil.Process()
        self.window = self.ready = time.perf_counter()
        self.waited = 0.0
        self.file = (
            (self.task.folder / f"{self.name}.jsonl").open("w", encoding="utf-8")
            if self.rank == 0
            else None
        )

    def fetched(self) -> None:
        """A batch has come."""
        self.waited += time.perf_counter() - self.ready

    def add(self, loss: Tensor, accuracy: Tensor, norm: Tensor) -> None:
        """Of one step, each ()."""
        self.sums += torch.stack([loss.detach(), accuracy, norm, (norm > self.task.clip).float()])
        self.ready = time.perf_counter()

    def write(self, step: int, learning_rate: float) -> None:
        if self.ranks > 1:
            dist.all_reduce(self.sums)
        loss, accuracy, norm, clipped = (self.sums / (self.task.log_every * self.ranks)).tolist()
        seconds = self.ready - self.window
        tokens = self.task.batch_size * self.task.seq_len * self.ranks
        metrics = {
            "train/loss": loss,
            "train/token_accuracy": accuracy,
            "train/grad_norm": norm,
            "train/learning_rate": learning_rate,
            "train/tokens": step * tokens,
            "health/clipped_share": clipped,
            "perf/tokens_per_s": self.task.log_every * tokens / seconds,
            "perf/data_wait_share": self.waited / seconds,
            "memory/allocated_gib": self.process.memory_info().rss / 2**30,
        }
        if self.file:
            self.file.write(json.dumps({"step": step, "time": time.time(), **metrics}) + "\n")
            self.file.flush()
            print("  ".join(f"{name} {value:.4g}" for name, value in metrics.items()))
        self.sums.zero_()
        self.window, self.waited = self.ready, 0.0


def prepare(task: Task, texts: int = 40) -> None:
    """Writes the corpus, and tokenizes it as `prepare` does."""
    from dist_template.wings.setup import prepare as tool
    from tests.support.line import OURS

    task.folder.mkdir(parents=True, exist_ok=True)
    for number in range(texts):
        (task.folder / f"{number}.txt").write_text(f"{number} {CORPUS * 40}", encoding="utf-8")
    with quiet():
        tool.main(["prepare", *data_flags(task)], OURS)


def data_flags(task: Task, ranks: int = 1) -> list[str]:
    """`fit`'s, for the same rows, all of them for training."""
    return [
        "--data.source=TextFiles",
        f"--data.source.paths=[{task.folder}/*.txt]",
        "--data.tokenizer=Bytes",
        f"--data.cache_dir={task.folder / 'cache'}",
        f"--data.seq_len={task.seq_len}",
        f"--data.global_batch_size={task.batch_size * ranks}",
        f"--data.micro_batch_size={task.batch_size}",
        "--data.validation_share=0",
        "--data.test_share=0",
        "--data.prompts=[]",
    ]


def place_in_world() -> tuple[int, int]:
    """This process's rank, and the number of ranks, as a launcher would have said."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
