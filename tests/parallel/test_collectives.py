"""A training step sends what its strategy must send, and two numbers besides.

Each strategy trains a small model with accumulation, and then, in the same processes, a loop of ten lines trains the
same model by the strategy's own library. What both hand to the process groups is counted.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deepspeed
import pytest
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from dist_template.callbacks import Preemption
from tests.support.collectives import ToGroups
from tests.support.library import optim, total_norm
from tests.support.runs import SMALL_LLAMA, Workers
from tests.support.strategies import flags_of
from tests.support.tiers import tiers

ACCUMULATION, CLIP = 2, 1.0
FIRST, STEPS = 3, 2  # optimizer steps: the first that is counted, how many are; none is a log step
UNITS = 4  # of SMALL_LLAMA under FSDP: embedding, two blocks, norm and head together; the root has nothing of its own
# What a mean over the global batch's counted tokens takes, and the one decision of all ranks whether a step is taken.
OURS = Counter({"allreduce": 1, "allgather_base": 1})


class Collectives(ToGroups):
    """Calls by name, and bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def take(self, name: str, args: Any, kwargs: Any) -> None:
        self.counts[name.strip("_")] += 1
        self.counts["bytes"] += sum(
            each.nbytes for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)
        )


class CountSteps(Callback):
    """Counts STEPS optimizer steps, from a batch's start to a batch's start, then in a hand-written loop."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.mode = Collectives()
        for callback in trainer.callbacks:
            if isinstance(callback, Preemption):
                callback._until_vote = 1000  # it comes once in seconds, not in steps

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == (FIRST - 1) * ACCUMULATION:
            self.batch = batch
            self.mode.__enter__()
        if batch_idx == (FIRST - 1 + STEPS) * ACCUMULATION:
            self.mode.__exit__(None, None, None)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        step, by_hand = HAND[type(trainer.strategy).__name__](trainer, pl_module), Collectives()
        for _ in range(FIRST - 1):  # they also settle how later ones send (buckets, traces)
            step(self.batch)
        with by_hand:
            for _ in range(STEPS):
                step(self.batch)
        for name, counts in (("fit", self.mode.counts), ("hand", by_hand.counts)):
            print(name, json.dumps({kind: count / STEPS for kind, count in counts.items()}))


Step = Callable[[Any], None]


def ddp(trainer: Any, module: Any) -> Step:
    model = DistributedDataParallel(built(module), forward_sync_buffers=False)
    optimizer = optim.build_optimizer(model, module.optim)

    def step(batch: Any) -> None:
        with model.no_sync():
            loss(module, model, batch).backward()
        loss(module, model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return step


def fsdp2(trainer: Any, module: Any) -> Step:
    model: Any = built(module)
    mesh = trainer.strategy.device_mesh
    mesh = (
        mesh["dp_replicate", "fsdp"]
        if trainer.strategy.mesh_sizes.dp_replicate > 1
        else mesh["fsdp"]
    )
    for unit in (model.model.embed_tokens, *model.model.layers):
        fully_shard(unit, mesh=mesh)
    fully_shard([model.model.norm, model.lm_head], mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)
    optimizer = optim.build_optimizer(model, module.optim)

    def step(batch: Any) -> None:
        model.set_requires_gradient_sync(trainer.strategy.reduce_each_micro_batch)
        model.set_requires_all_reduce(False)
        loss(module, model, batch).backward()
        model.set_requires_gradient_sync(True)
        loss(module, model, batch).backward()
        # torch's own sends a number for each parameter
        norm = total_norm(p.grad for p in model.parameters() if p.grad is not None)
        nn.utils.clip_grads_with_norm_(model.parameters(), CLIP, norm)
        optimizer.step()
        optimizer.zero_grad()

    return step


def zero(trainer: Any, module: Any) -> Step:
    model = built(module)
    engine: Any = deepspeed.initialize(
        model=model,
        optimizer=optim.build_optimizer(model, module.optim),
        config=dict(trainer.strategy.config),
    )[0]

    def step(batch: Any) -> None:
        for _ in range(ACCUMULATION):
            engine.backward(loss(module, engine, batch))
            engine.step()

    return step


HAND = {"DDPStrategy": ddp, "MeshStrategy": fsdp2, "ZeroStrategy": zero}


def built(module: Any) -> nn.Module:
    return module.build_model(module.data).train()


def loss(module: Any, model: nn.Module, batch: Any) -> Tensor:
    logits = model(
        input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False
    ).logits
    return module.sums(logits, batch["labels"])["loss"] / batch["tokens_per_micro_batch"]


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Iterator[Any]:
    """A strategy and flags to what a step of `fit`, and a hand-written one, sends: {name of a collective: number}."""
    folder = tmp_path_factory.mktemp("collectives")
    flags = [
        f"--run.root={folder / 'runs'}", "--run.report=false", "--data.source=TextFiles",
        f"--data.source.paths=[{corpus}/*.txt]", "--data.tokenizer=Bytes", f"--data.cache_dir={folder / 'cache'}",
        "--data.seq_len=32", "--data.micro_batch_size=1", "--data.validation_share=0", "--data.test_share=0",
        f"--model.architecture={SMALL_LLAMA}", "--trainer.accelerator=cpu", "--trainer.max_steps=8",
        "--trainer.log_every_n_steps=8", f"--trainer.gradient_clip_val={CLIP}", "--trainer.logger=false",
    ]  # fmt: skip
    with Workers(1) as workers:
        workers.run(["prepare", *flags], folder / "prepare").check()

    def count(strategy: str, *more: str, ranks: int = 2) -> tuple[Counter[str], Counter[str]]:
        argv = ["fit", *flags, *flags_of(strategy), f"--trainer.devices={ranks}", *more]
        argv += [f"--data.global_batch_size={ranks * ACCUMULATION}"]
        record_folder = folder / "-".join([strategy, *(flag.split(".")[-1] for flag in more)])
        with Workers(ranks) as workers:
            record = workers.run(argv, record_folder, callbacks=[CountSteps()]).check()
        lines = dict(
            line.split(" ", 1)
            for line in record.log(0).splitlines()
            if line.startswith(("fit {", "hand {"))
        )
        fit, hand = (Counter(json.loads(lines[name])) for name in ("fit", "hand"))
        assert fit == hand + OURS + Counter(bytes=4 + 8 + 8 * ranks), (
            "a float32, and two that become two a rank"
        )
        return fit, hand

    yield count


def test_ddp_sends_its_gradients_once(counted: Any) -> None:
    _, hand = counted("ddp")
    assert hand.keys() == {"allreduce", "bytes"} and hand["allreduce"] == 1


REDUCED_ONCE = "--trainer.strategy.init_args.reduce_each_micro_batch=false"
CHUNKED = "--model.loss_chunk=16"  # of 32 tokens; the hand-written loop computes them at once


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "times"),
    tiers([([], ACCUMULATION), ([REDUCED_ONCE], 1), ([CHUNKED], ACCUMULATION)],
        daily=[([REDUCED_ONCE], 1)]),
)  # fmt: skip
def test_fsdp2_reduces_as_often_as_configured(counted: Any, more: list[str], times: int) -> None:
    fit, _ = counted("fsdp2", *more)
    assert fit["reduce_scatter_base"] == times * UNITS


@pytest.mark.slow
def test_hsdp_sends_between_its_copies_once(counted: Any) -> None:
    fit, _ = counted("hsdp", ranks=4)
    assert fit["reduce_scatter_base"] == ACCUMULATION * UNITS
    assert fit["allreduce"] == UNITS + 1 + OURS["allreduce"], (
        "gradients between copies, their norm, and ours"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "more"), tiers([(1, []), (2, []), (3, []), (3, [CHUNKED])], daily=[(2, []), (3, [])])
)
def test_zero_sends_what_deepspeed_by_hand_sends(counted: Any, stage: int, more: list[str]) -> None:
    """In stage 3 nothing stays unsharded, and modules that were fetched ahead cause the all-gathers."""
    nothing_kept = (
        ["--trainer.strategy.init_args.param_persistence_threshold=0"] if stage == 3 else []
    )
    _, hand = counted(f"zero{stage}", *nothing_kept, *more)
    assert hand["broadcast"] == 0
