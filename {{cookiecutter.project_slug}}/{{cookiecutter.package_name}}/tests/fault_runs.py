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

LLAMA, DEEPSEEK = (model.replace("hidden_size: 32", "hidden_size: 64") for model in (MODELS["llama"], MODELS["deepseek_v3"]))
QWEN3 = (
    "{model_type: qwen3, hidden_size: 64, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4,"
    " num_key_value_heads: 2, head_dim: 16}"
)

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


TEXT = Text()
CONSTANT = Text("constant", edit=lambda number: "ab" * (150 + number))
FEW = Text("few", documents=16)
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
    Training("deepseek_v3", [f"--model.architecture={DEEPSEEK}"]),
    Training("qwen3", [f"--model.architecture={QWEN3}"]),
    Training("accumulation", ["--data.micro_batch_size=4"]),
    Training("stable_decay", ["--model.optim.schedule=warmup_stable_decay"]),
    Training("constant", ["--model.optim.schedule=constant"]),
    Training("plateau", ["--model.optim.schedule=reduce_on_plateau"]),
    Training("ddp", ["--data.micro_batch_size=8", "--trainer.strategy=ddp"], ranks=2),
    Training("fsdp2", ["--data.micro_batch_size=8", f"--config={CONFIGS}/strategy/fsdp2.yaml"], ranks=2),
    Training("zero2", ["--data.micro_batch_size=8", f"--config={CONFIGS}/strategy/zero2.yaml"], ranks=2),
    Training("resumed", attempts=([PauseAfter(40)], ())),
    Training("short", ["--trainer.max_steps=20", "--trainer.val_check_interval=10"]),
    Training("no_validation", ["--data.validation_share=0"]),
    Training("finetuned", ["--model.pretrained={exported}", "--model.optim.learning_rate=5e-4"], after="llama"),
]

FAULTS = [
    Training("learning_rate_x100", ["--model.optim.learning_rate=0.5"], "", "model.optim.learning_rate"),
    Training("learning_rate_x0.001", ["--model.optim.learning_rate=5e-6"], "", "model.optim.learning_rate"),
    Training("no_warmup", ["--model.optim.learning_rate=0.03", "--model.optim.warmup=0"], "", "model.optim.warmup"),
    Training("masked_labels", plant=plants.mask_all_labels),
    Training("unshifted_labels", plant=plants.do_not_shift_labels),
    Training("constant_data", text=CONSTANT),
    Training("frozen", plant=plants.freeze_all_but_norms),
    Training("exploding", ["--trainer.gradient_clip_val=0", *(
        f"--model.architecture={LLAMA[:-1]}, initializer_range: 1.0}}",)], ),
    Training("nan", plant=partial(plants.make_nan, "model.layers.1.mlp", 30)),
    Training("clipped", ["--trainer.gradient_clip_val=0.01"], "", "trainer.gradient_clip_val"),
    Training("summed_loss", plant=partial(plants.scale_loss, 1000.0)),
    Training("tiny_batch", ["--data.global_batch_size=1", "--data.micro_batch_size=1", "--data.seq_len=16"]),
    Training("overfitting", ["--trainer.max_steps=200", "--model.optim.learning_rate=0.01", "--data.validation_share=0.4"], text=FEW),
    Training("slow_rank", ["--data.micro_batch_size=8", "--trainer.strategy=ddp"], ranks=2, plant=partial(plants.compute_slowly, 0.03, 1)),
    Training("slow_loader", plant=partial(plants.read_slowly, 0.02)),
    Training("rare_validation", ["--trainer.val_check_interval=1000"]),
    Training("dear_validation", ["--trainer.val_check_interval=2"]),
    Training("starved_validation", ["--data.validation_share=0.005"]),
    Training("near_duplicates", text=TWINS),
    Training("router_collapse", [f"--model.architecture={DEEPSEEK}"], plant=partial(plants.bias_router, [9, 9, 0, 0])),
    Training("dead_expert", [f"--model.architecture={DEEPSEEK}"], plant=partial(plants.bias_router, [0, 0, 0, -9])),
    Training("dear_checkpoints", ["--last_checkpoint.every_n_steps=1"]),
    Training("rare_checkpoints", ["--last_checkpoint.every_n_steps=1000"],
             attempts=([plants.StopAt(999, 0.03), KillAt(50)], [plants.StopAt(999, 0.03), KillAt(50)], ())),
    Training("out_of_time", ["--trainer.max_steps=20000", "--preemption.max_time=00:00:01:00"], attempts=([plants.StopAt(100)],)),
    Training("address_space", ["--data.micro_batch_size=64", "--data.global_batch_size=64", "--data.seq_len=256"], attempts=([plants.LimitMemory(100)],)),
    Training("cuda_out_of_memory", plant=partial(plants.run_out_in_backward, 10)),
    Training("drifting_norm", ["--model.optim.schedule=constant", "--trainer.gradient_clip_val=0"], plant=partial(plants.let_gradients_grow, 0.2)),
    Training("overshooting_schedule", plant=partial(plants.overshoot_schedule, 50, 3.0)),
    Training("crash", plant=partial(plants.raise_in_loss, 30, KeyError("logit"))),
    Training("template_not_applied", ["--data.tokenizer=Pretrained", "--data.tokenizer.path={chat}"]),
    Training("another_tokenizer", ["--model.pretrained={exported}", "--data.tokenizer=Pretrained", "--data.tokenizer.path={shifted}"], after="llama"),
]


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
            "--data.micro_batch_size=16", "--data.validation_share=0.03", "--data.test_share=0", "--data.prompts=[]",
            f"--model.architecture={LLAMA}", "--model.optim.learning_rate=5e-3", "--model.optim.warmup=10",
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
