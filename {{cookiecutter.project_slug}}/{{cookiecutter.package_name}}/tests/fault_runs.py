"""Small trainings on the CPU that are made to go wrong on purpose, and healthy ones beside them.

Each takes some seconds and has one fault: in its YAML keys where a person's mistake would be there, else one of
fault_plants.py. test_diagnosis_faults.py has them diagnosed, and expects the right cause first.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

from ..rehearsal.acts import KillAt
from ..rehearsal.record import RunRecord
from ..rehearsal.workers import Workers
from . import fault_plants as plants
from .conftest import CONFIGS
from .test_parallel_parity import MODELS, PauseAfter

LLAMA, DEEPSEEK = (
    f"--model.architecture={MODELS[name]}".replace("hidden_size: 32", "hidden_size: 64") for name in ("llama", "deepseek_v3")
)
QWEN3 = (
    "--model.architecture={model_type: qwen3, hidden_size: 64, intermediate_size: 64, num_hidden_layers: 2,"
    " num_attention_heads: 4, num_key_value_heads: 2, head_dim: 16}"
)
RATE, NO_CLIP, EACH_STEP = "--model.optim.learning_rate", "--trainer.gradient_clip_val=0", "--trainer.log_every_n_steps=1"
DDP = ["--data.micro_batch_size=8", "--trainer.strategy=ddp"]
CHAT = ["--data.tokenizer=Pretrained", "--data.tokenizer.path={chat}"]
SHIFTED = ["--data.tokenizer=Pretrained", "--data.tokenizer.path={shifted}"]
H100 = {"device": "NVIDIA H100 80GB HBM3", "supports_bf16": True, "memory_gib": 79.1}

# Random sentences: there is something to learn, and something that cannot be.
WORDS = {
    "A": "small old quick quiet green heavy bright cold round empty".split(),
    "N": "river stone garden window letter engine bridge farmer doctor child ship forest lamp table road".split(),
    "V": "moves follows finds carries breaks opens paints leaves watches turns".split(),
    "P": "under near behind above across without".split(),
}
SENTENCES = ("the A N V the N.", "the N V the A N P the N.", "P the N the A N V the N.", "one A N V the N P a A N.")


@dataclass(frozen=True)
class Text:
    """Documents of some 400 bytes."""

    name: str = "text"
    documents: int = 300
    edit: Callable[[int], str] = lambda number: sentences(number)

    def write(self, folder: Path) -> str:
        """The pattern that finds them."""
        folder = folder / self.name
        folder.mkdir(parents=True)
        for number in range(self.documents):
            (folder / f"{number:04}.txt").write_text(self.edit(number), encoding="utf-8")
        return f"{folder}/*.txt"


def sentences(seed: int) -> str:
    chance = random.Random(seed)
    words = [word for _ in range(chance.randint(8, 14)) for word in chance.choice(SENTENCES).split()]
    return " ".join(chance.choice(WORDS[w[0]]) + w[1:] if w[0] in WORDS else w for w in words)


def noise(seed: int) -> str:
    """What a damaged file or a wrong encoding gives."""
    return "".join(chr(random.Random(seed * 1000 + i).randint(0x3400, 0x9FFF)) for i in range(200))


TEXT = Text()
CONSTANT = Text("constant", edit=lambda number: "ab" * (150 + number))
FEW = Text("few", documents=10)
SPOILED = Text("spoiled", edit=lambda number: noise(number) if number % 40 == 7 else sentences(number))
TWINS = Text("twins", edit=lambda number: sentences(number // 2) + " again" * (number % 2))


@dataclass(frozen=True)
class Training:
    """A training and what diagnosis must say of it first.

    Args:
        name: Of the run.
        flags: After `Trainings.flags`.
        rule: The first finding's. "": the run is healthy.
        key: The first one that its first cause would change. "": none, the cause is no key's.
        says: Stands in that finding's title, evidence or first cause.
        ranks: Processes.
        text: What it is trained on.
        plant: See fault_plants.py.
        callbacks: Of the first attempts, in turn; with none there is one attempt.
        edit: Changes what the run has written, where this machine cannot have the fault.
        after: Another training, which comes before.
    """

    name: str
    flags: Sequence[str] = ()
    rule: str = ""
    key: str = ""
    says: str = ""
    ranks: int = 1
    text: Text = TEXT
    plant: Callable[[], None] | None = None
    attempts: Sequence[Sequence[Callback]] = ((),)
    edit: Callable[[Path], None] | None = None
    after: str = ""


HEALTHY = [
    Training("llama"),
    Training("deepseek_v3", [DEEPSEEK]),
    Training("qwen3", [QWEN3]),
    Training("accumulation", ["--data.micro_batch_size=4"]),
    Training("stable_decay", ["--model.optim.schedule=warmup_stable_decay"]),
    Training("constant", ["--model.optim.schedule=constant"]),
    Training("plateau", ["--model.optim.schedule=reduce_on_plateau"]),
    Training("ddp", DDP, ranks=2),
    Training("fsdp2", ["--data.micro_batch_size=8", f"--config={CONFIGS}/strategy/fsdp2.yaml"], ranks=2),
    Training("zero2", ["--data.micro_batch_size=8", f"--config={CONFIGS}/strategy/zero2.yaml"], ranks=2),
    Training("resumed", attempts=([PauseAfter(40)], ())),
    Training("short", ["--trainer.max_steps=20", "--trainer.val_check_interval=10"]),
    Training("no_validation", ["--data.validation_share=0"]),
    Training("finetuned", ["--model.pretrained={exported}", "--model.optim.learning_rate=5e-4"], after="llama"),
]

# Names of rules and keys that have changed since: see diagnosis/rules/.
FAULTS = [
    # what is asked of the optimizer
    Training("learning_rate_x100", [f"{RATE}=0.5"], "loss_jumped_at_the_start", RATE[2:]),
    Training("learning_rate_x0.001", [f"{RATE}=5e-6"], "loss_stands_still", RATE[2:]),
    Training("no_warmup", ["--model.pretrained={exported}", "--model.optim.warmup=0", EACH_STEP, "--trainer.max_steps=60"], "loss_jumped_at_the_start", "model.optim.warmup", after="llama"),
    Training("overshooting_schedule", [], "rate_above_peak", "", "scheduler", plant=partial(plants.overshoot_schedule, 50, 3.0)),
    Training("clipped", ["--trainer.gradient_clip_val=0.01"], "clips_most_steps", "trainer.gradient_clip_val"),
    Training("tiny_batch", [QWEN3, "--data.global_batch_size=1", "--data.micro_batch_size=1", "--data.seq_len=8", EACH_STEP,
                            "--trainer.val_check_interval=30", "--trainer.limit_val_batches=20"], "loss_oscillates", "data.global_batch_size"),
    # the model
    Training("frozen", [], "loss_stands_still", "", "frozen", plant=plants.freeze_all_but_norms),
    Training("wide_init", [LLAMA[:-1] + ", initializer_range: 1.0}"], "loss_starts_too_high", "model.architecture.initializer_range"),
    Training("another_tokenizer", ["--model.pretrained={exported}", *SHIFTED], "loss_starts_too_high", "data.tokenizer.path", after="llama"),
    Training("nan", [], "loss_not_finite", "", "model.layers.1.mlp", plant=partial(plants.make_nan, "model.layers.1.mlp", 60)),
    Training("exploding", [NO_CLIP, EACH_STEP], "gradient_explodes", "trainer.gradient_clip_val", plant=partial(plants.burst_gradients, 1e4, (60, 61, 80))),
    Training("drifting_norm", [NO_CLIP, "--model.optim.schedule=constant"], "gradient_norm_drifts", plant=partial(plants.let_gradients_grow, 0.2)),
    Training("router_collapse", [DEEPSEEK], "experts_unused", "", "router", plant=partial(plants.bias_router, [9, 9, 0, 0])),
    Training("dead_expert", [DEEPSEEK], "experts_unused", "", "router", plant=partial(plants.bias_router, [0, 0, 0, -9])),
    # the data
    Training("masked_labels", [], "labels_masked", plant=plants.mask_all_labels),
    Training("mostly_masked_labels", [], "labels_masked", plant=plants.mask_most_labels),
    Training("unshifted_labels", [], "labels_not_shifted", plant=plants.do_not_shift_labels),
    Training("constant_data", [], "data_is_constant", text=CONSTANT),
    Training("bad_documents", [QWEN3, EACH_STEP, "--data.global_batch_size=4", "--data.micro_batch_size=4"], "loss_spikes", "", "samples", text=SPOILED),
    Training("near_duplicates", [], "duplicates_across_splits", text=TWINS),
    Training("template_not_applied", ["--model.pretrained={exported}", *CHAT], "chat_template_missing", after="llama"),
    Training("overfitting", [QWEN3, f"{RATE}=0.01", "--trainer.max_steps=150", "--data.validation_share=0.4"], "overfits", "trainer.max_steps", text=FEW),
    # validation
    Training("rare_validation", ["--trainer.val_check_interval=1000"], "validates_too_rarely", "trainer.val_check_interval"),
    Training("dear_validation", ["--trainer.val_check_interval=2"], "validation_too_dear", "trainer.val_check_interval"),
    Training("starved_validation", ["--data.validation_share=0.005"], "validation_too_small", "data.validation_share"),
    # speed
    Training("slow_rank", DDP, "slow_rank", "", "rank 1", ranks=2, plant=partial(plants.compute_slowly, 0.03, 1)),
    Training("slow_loader", [], "waits_for_data", "data.num_workers", plant=partial(plants.read_slowly, 0.02)),
    Training("fp32_on_gpu", [], "fp32_on_bf16", "trainer.precision", edit=partial(plants.edit_facts, machine=H100)),
    Training("eager_attention", ["--trainer.precision=bf16-true"], "eager_attention", "model.architecture.attn_implementation", edit=partial(plants.edit_facts, machine=H100, model={"attention": "eager"})),
    Training("held_clocks", ["--trainer.precision=bf16-true"], "clocks_held_down", "", "Cooling", edit=partial(plants.edit_metrics, gpu__throttled=1.0, gpu__temperature_c=91.0)),
    Training("tiny_micro_batches", ["--data.micro_batch_size=1"], "tiny_micro_batch", "data.micro_batch_size"),
    # memory
    Training("address_space", ["--data.micro_batch_size=64", "--data.global_batch_size=64", "--data.seq_len=256"], "out_of_memory", "data.micro_batch_size", attempts=([plants.LimitMemory(100)],)),
    Training("cuda_out_of_memory", [], "out_of_memory", "data.micro_batch_size", plant=partial(plants.run_out_in_backward, 10)),
    Training("nearly_full", [], "memory_nearly_full", "data.micro_batch_size", edit=partial(plants.edit_metrics, memory__peak_share=0.97)),
    # the job
    Training("dear_checkpoints", ["--last_checkpoint.every_n_steps=1"], "checkpoint_too_dear", "last_checkpoint.every_n_steps"),
    Training("rare_checkpoints", ["--last_checkpoint.every_n_steps=1000"], "checkpoint_too_rare", "last_checkpoint.every_n_steps",
             attempts=([plants.StopAt(999, 0.03), KillAt(50)], [plants.StopAt(999, 0.03), KillAt(50)], ())),
    Training("out_of_time", ["--trainer.max_steps=20000", "--preemption.max_time=00:00:01:00"], "ends_too_late", "preemption.max_time", attempts=([plants.StopAt(100)],)),
    Training("crash", [], "crashed", "", "KeyError", plant=partial(plants.raise_in_loss, 30, KeyError("logit"))),
]  # fmt: skip


class Trainings:
    """Made once each, in the folder given.

    Args:
        folder: For runs, texts and token caches.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._made: dict[str, Path] = {}
        self._prepared: set[tuple[str, ...]] = set()
        self._patterns: dict[str, str] = {}
        self.records: dict[str, RunRecord] = {}
        self.flags = [
            f"--run.root={folder / 'runs'}", "--run.name=zoo", "--data.source=TextFiles", "--data.tokenizer=Bytes",
            f"--data.cache_dir={folder / 'cache'}", "--data.seq_len=64", "--data.global_batch_size=16",
            "--data.micro_batch_size=16", "--data.validation_share=0.05", "--data.test_share=0", "--data.prompts=[]",
            LLAMA, "--model.optim.learning_rate=5e-3", "--model.optim.warmup=10",
            "--trainer.accelerator=cpu", "--trainer.max_steps=100", "--trainer.log_every_n_steps=2",
            "--trainer.val_check_interval=25", "--trainer.logger=false", "--last_checkpoint.every_n_steps=50",
        ]  # fmt: skip

    def __call__(self, training: Training) -> Path:
        """The folder of that run."""
        if training.name not in self._made:
            self._made[training.name] = self._make(training)
        return self._made[training.name]

    def _make(self, training: Training) -> Path:
        flags = [*self.flags, f"--trainer.devices={training.ranks}", f"--data.source.paths=[{self._text(training.text)}]"]
        flags += [flag.format(**self._made_before(flag, training)) if "={" in flag and ":" not in flag else flag for flag in training.flags]
        self._prepare(flags)
        for number, callbacks in enumerate(training.attempts):
            record = self.folder / "records" / f"{training.name}.{number}"
            with Workers(training.ranks) as workers:
                self.records[training.name] = workers.run(
                    ["fit", *flags], record, callbacks=callbacks, prelude=training.plant, run_id=training.name, timeout_s=120
                )
        run = self.folder / "runs" / "zoo" / training.name
        if training.edit:
            training.edit(run)
        return run

    def _text(self, text: Text) -> str:
        if text.name not in self._patterns:
            self._patterns[text.name] = text.write(self.folder / "texts")
        return self._patterns[text.name]

    def _prepare(self, flags: list[str]) -> None:
        """Tokenize, unless another training's data are the same."""
        kept = [flag for flag in flags if flag.startswith(("--data.source", "--data.tokenizer", "--data.cache_dir", "--data.validation_share", "--data.test_share", "--data.seq_len", "--data.global_batch_size", "--data.micro"))]
        if tuple(kept) not in self._prepared:
            self._prepared.add(tuple(kept))
            with Workers(1) as workers:
                workers.run(["prepare", *kept], self.folder / "records" / f"prepare.{len(self._prepared)}").check()

    def _made_before(self, flag: str, training: Training) -> dict[str, Path]:
        if "{chat}" in flag:
            return {"chat": plants.write_tokenizer(self.folder / "chat", chat_template=plants.CHAT_TEMPLATE)}
        if "{shifted}" in flag:
            return {"shifted": plants.write_tokenizer(self.folder / "shifted", shift=7)}
        source = next(each for each in HEALTHY if each.name == training.after)
        run, output = self(source), self.folder / f"exported-{source.name}"
        if not output.exists():
            ours = [flag for flag in self.flags if not flag.startswith(("--trainer.", "--last_"))]
            ours += [f"--data.source.paths=[{self._text(source.text)}]", f"--checkpoint={run / 'checkpoints'}", f"--output={output}"]
            with Workers(1) as workers:
                workers.run(["export", *ours], self.folder / "records" / f"export.{source.name}").check()
        return {"exported": output}
