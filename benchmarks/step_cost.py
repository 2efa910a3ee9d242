"""What the project costs per optimizer step, beside a hand-written loop that records the same.

    make bench

The model is one vector, so the time is the loop's own. All arms run in this process, in a new order each round, on one
thread; a figure is CPU time of the process per optimizer step, the median over rounds with the smallest and largest.
An arm's difference to another is taken within a round. Noise of a round is some percent.

    hand        plain PyTorch: batches, backward, clipping, AdamW, schedule; the same metrics, a JSONL file, a line
    lightning   Lightning's Trainer with `barebones`: the same training, nothing recorded
    unrecorded  `fit` without what measures, writes, shows and diagnoses
    project     `fit` as it is shipped
    project+10  the same with ten more `self.track`
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "build" / "dev"))  # `make dev` has linked the project there, un-rendered
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ["OMP_NUM_THREADS"] = "1"

import lightning as L  # noqa: E402
import psutil  # noqa: E402
import torch  # noqa: E402
import trainer_dev.cli as cli  # noqa: E402
import trainer_dev.module as module  # noqa: E402
from lightning.pytorch import Callback  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from trainer_dev.text.rows import PackedRows  # noqa: E402
from transformers import get_scheduler  # noqa: E402

WARM, STEPS, LOG_EVERY = 100, 600, 10
BATCH, SEQ_LEN, CLIP = 8, 32, 1.0
RECORDING = {"Facts", "Throughput", "Hardware", "Inputs", "Experts", "TrainingLog", "Console", "Messages", "Diagnosis"}
CORPUS = "the quick brown fox jumps over the lazy dog. "


class Null(nn.Module):
    """One vector and nothing to compute with it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))


def null_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return model.weight.sum() * 0.01 + 1.0


class Clock(Callback):
    """CPU seconds of this process from step WARM to step STEPS."""

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step == WARM:
            self.began = time.process_time()
        elif trainer.global_step == STEPS:
            self.per_step_s = (time.process_time() - self.began) / (STEPS - WARM)


def project(folder: Path, extra: int = 0, records: bool = True) -> float:
    """`fit`, on one CPU process."""

    def training_step(self: Any, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = null_loss(self.model, batch)
        self.track("train/loss", loss)
        self.track("train/token_accuracy", loss)
        for number in range(extra):
            self.track(f"train/more_{number}", loss)
        return loss

    module.LanguageModule.build_model = lambda self, data: Null()
    module.LanguageModule.training_step = training_step
    clock = Clock()
    os.environ.pop("DIST_RUN_ID", None)

    class Clocked(cli.CLI):
        def instantiate_trainer(self, **kwargs: Any) -> L.Trainer:
            trainer = super().instantiate_trainer(**kwargs)
            if not records:
                trainer.callbacks = [each for each in trainer.callbacks if type(each).__name__ not in RECORDING]
                trainer.loggers = []
            trainer.callbacks.append(clock)
            return trainer

    flags = f"""--run.root {folder / "runs"} --data.source TextFiles --data.source.paths [{folder}/*.txt]
        --data.tokenizer Bytes --data.cache_dir {folder / "cache"} --data.seq_len {SEQ_LEN} --data.prompts []
        --data.global_batch_size {BATCH} --data.micro_batch_size {BATCH} --data.validation_share 0 --data.test_share 0
        --trainer.accelerator cpu --trainer.devices 1 --trainer.max_steps {STEPS}
        --trainer.log_every_n_steps {LOG_EVERY} --last_checkpoint.every_n_steps 100000"""
    Clocked(args=["fit", *flags.split()], run=True)
    return clock.per_step_s


def lightning(folder: Path) -> float:
    """Lightning alone: no logger, no callback but the clock."""

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Null()

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            return null_loss(self.model, batch)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), fused=True)
            scheduler = get_scheduler("cosine", optimizer, 20, STEPS)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    class Batches(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            return batches(folder)

    clock = Clock()
    trainer = L.Trainer(
        accelerator="cpu", devices=1, max_steps=STEPS, barebones=True, gradient_clip_val=CLIP, callbacks=[clock]
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(Batches(), batch_size=None))
    return clock.per_step_s


def hand(folder: Path) -> float:
    """What an engineer writes who wants these numbers and no framework."""
    model = Null()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scheduler = get_scheduler("cosine", optimizer, 20, STEPS)
    process = psutil.Process()
    sums = torch.zeros(4)
    window = last = time.perf_counter()
    waited = began = 0.0
    with (folder / "hand.jsonl").open("a", encoding="utf-8") as file:
        for step, batch in enumerate(batches(folder), start=1):
            waited += time.perf_counter() - last
            optimizer.zero_grad()
            loss = null_loss(model, batch)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            scheduler.step()
            sums += torch.stack([loss.detach(), loss.detach(), norm, (norm > CLIP).float()])
            last = time.perf_counter()
            if step % LOG_EVERY == 0:
                loss_mean, accuracy, norm_mean, clipped = (sums / LOG_EVERY).tolist()
                seconds = last - window
                metrics = {"train/loss": loss_mean, "train/perplexity": math.exp(loss_mean), "train/accuracy": accuracy}
                metrics |= {"train/grad_norm": norm_mean, "health/clipped_share": clipped}
                metrics |= {"train/learning_rate": scheduler.get_last_lr()[0], "train/tokens": step * BATCH * SEQ_LEN}
                metrics |= {"perf/step_s": seconds / LOG_EVERY, "perf/data_wait_share": waited / seconds}
                metrics |= {"perf/tokens_per_s": LOG_EVERY * BATCH * SEQ_LEN / seconds}
                metrics |= {"memory/allocated_gib": process.memory_info().rss / 2**30}
                file.write(json.dumps({"step": step, "time": time.time(), **metrics}) + "\n")
                print("  ".join(f"{name} {value:.4g}" for name, value in metrics.items()))
                sums.zero_()
                window, waited = last, 0.0
            if step == WARM:
                began = time.process_time()
    return (time.process_time() - began) / (STEPS - WARM)


def batches(folder: Path) -> Any:
    """STEPS of them, from the same cache that `fit` reads, in a random order."""
    import numpy as np

    (path,) = folder.glob("cache/*/train.bin")
    rows = PackedRows(np.memmap(path, dtype=np.uint16, mode="r"), SEQ_LEN, eos_token_id=256)
    order = [random.sample(range(len(rows)), BATCH) for _ in range(STEPS)]
    return (rows.__getitems__(each) for each in order)


ARMS: dict[str, Callable[[Path], float]] = {
    "hand": hand,
    "lightning": lightning,
    "unrecorded": lambda folder: project(folder, records=False),
    "project": project,
    "project+10": lambda folder: project(folder, extra=10),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    times: dict[str, list[float]] = {name: [] for name in ARMS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in range(40):
            (folder / f"{number}.txt").write_text(f"{number} {CORPUS * 40}", encoding="utf-8")
        quietly(project, folder)  # makes the cache, and warms up what is imported late
        for _ in range(rounds):
            for arm in random.sample(sorted(ARMS), len(ARMS)):
                times[arm].append(quietly(ARMS[arm], folder) * 1e6)
    print(f"CPU time per optimizer step, µs: median of {rounds} rounds (smallest to largest); {STEPS} steps,")
    print(f"metrics every {LOG_EVERY}; torch {torch.__version__}, lightning {L.__version__}, 1 thread")
    for arm, values in times.items():
        print(f"  {arm:<12}{described(values)}")
    pairs = (("project", "unrecorded"), ("project", "hand"), ("project", "lightning"), ("project+10", "project"))
    for more, less in pairs:
        differences = [a - b for a, b in zip(times[more], times[less], strict=True)]
        print(f"  {more} - {less}: {described(differences)}")


def described(values: list[float]) -> str:
    return f"{statistics.median(values):7.0f} ({min(values):.0f} to {max(values):.0f})"


def quietly(arm: Callable[[Path], float], folder: Path) -> float:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return arm(folder)


if __name__ == "__main__":
    main()
