"""Small trainings on the CPU that are made to go wrong on purpose, and healthy ones beside them.

Each takes some seconds and has one fault: in its YAML keys where a person's mistake would be there, else one of
fault_plants.py. test_diagnosis_faults.py has them diagnosed, and expects the right cause first.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lightning.pytorch import Callback

from dist_template.rehearsal.acts import KillAt
from dist_template.rehearsal.record import RunRecord
from tests.parallel.test_parity import MODELS, PauseAfter
from tests.support import fault_plants as plants
from tests.support.runs import CONFIGS, Workers

LLAMA, DEEPSEEK = (
    f"--model.architecture={MODELS[name]}".replace("hidden_size: 32", "hidden_size: 64")
    for name in ("llama", "deepseek_v3")
)
QWEN3 = (
    "--model.architecture={model_type: qwen3, hidden_size: 64, intermediate_size: 64, num_hidden_layers: 2,"
    " num_attention_heads: 4, num_key_value_heads: 2, head_dim: 16}"
)
QWEN3_MOE = QWEN3.replace("qwen3,", "qwen3_moe, moe_intermediate_size: 32, num_experts: 8, num_experts_per_tok: 2,")
SPEED = "--model.balance.bias_update_speed"
WIDE = LLAMA[:-1] + ", initializer_range: 1.0}"
RATE, CLIP, VALIDATE = "--model.optim.learning_rate", "--trainer.gradient_clip_val", "--trainer.val_check_interval"
EACH_STEP = "--trainer.log_every_n_steps=1"
DDP = ["--data.micro_batch_size=8", "--trainer.strategy=ddp"]
EXPORTED = "--model.pretrained={llama}"  # what the healthy training of that name has learned
CHAT = ["--data.tokenizer=Pretrained", "--data.tokenizer.path={chat}"]
SHIFTED = ["--data.tokenizer=Pretrained", "--data.tokenizer.path={shifted}"]
TINY = ["--data.global_batch_size=1", "--data.micro_batch_size=1", "--data.seq_len=8", "--trainer.limit_val_batches=20"]
LONG = ["--data.global_batch_size=64", "--data.micro_batch_size=64", "--data.seq_len=256"]
FOUR = ["--data.global_batch_size=4", "--data.micro_batch_size=4"]
FSDP2 = ["--data.micro_batch_size=8", f"--config={CONFIGS}/strategy/fsdp2.yaml"]
BF16 = "--trainer.precision=bf16-true"

# ---- the text: random sentences; there is something to learn in them, and something that cannot be -------------------

WORDS = {
    "A": "small old quick quiet green heavy bright cold round empty".split(),
    "N": "river stone garden window letter engine bridge farmer doctor child ship forest lamp table road".split(),
    "V": "moves follows finds carries breaks opens paints leaves watches turns".split(),
    "P": "under near behind above across without".split(),
}
SENTENCES = ("the A N V the N.", "the N V the A N P the N.", "P the N the A N V the N.", "one A N V the N P a A N.")


def sentences(seed: int) -> str:
    """Some 400 bytes."""
    chance = random.Random(seed)
    words = [word for _ in range(chance.randint(8, 14)) for word in chance.choice(SENTENCES).split()]
    return " ".join(chance.choice(WORDS[word[0]]) + word[1:] if word[0] in WORDS else word for word in words)


def noise(seed: int) -> str:
    """What a damaged file or a wrong encoding gives."""
    chance = random.Random(seed)
    return "".join(chr(chance.randint(0x3400, 0x9FFF)) for _ in range(200))


TEXTS: dict[str, tuple[int, Callable[[int], str]]] = {  # how many documents, and what each is
    "text": (300, sentences),
    "few": (10, sentences),
    "constant": (300, lambda number: "ab" * (150 + number)),
    "spoiled": (300, lambda number: noise(number) if number % 40 == 7 else sentences(number)),
    "twins": (300, lambda number: sentences(number // 2) + " again" * (number % 2)),
}

# ---- the trainings ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Training:
    """A training, and what diagnosis must say of it first.

    Args:
        name: Of the run.
        flags: After `Trainings.flags`.
        rule: The first finding's. "": the training is healthy.
        key: What its first cause changes first. "": that cause is no key's.
        says: Stands in the finding's title, its evidence or its first cause.
        text: What it is trained on.
        ranks: Processes.
        plant: See fault_plants.py.
        attempts: Callbacks of each attempt.
        edit: Changes what was written, where this machine cannot have the fault.
    """

    name: str
    flags: Sequence[str] = ()
    rule: str = ""
    key: str = ""
    says: str = ""
    text: str = "text"
    ranks: int = 1
    plant: Callable[[], None] | None = None
    attempts: Sequence[Sequence[Callback]] = ((),)
    edit: Callable[[Path], None] | None = None


HEALTHY = [
    Training("llama"),
    Training("deepseek_v3", [DEEPSEEK]),
    Training("qwen3", [QWEN3]),
    Training("accumulation", ["--data.micro_batch_size=4"]),
    Training("stable_decay", ["--model.optim.schedule=warmup_stable_decay"]),
    Training("constant", ["--model.optim.schedule=constant"]),
    Training("plateau", ["--model.optim.schedule=reduce_on_plateau"]),
    Training("ddp", DDP, ranks=2),
    Training("fsdp2", FSDP2, ranks=2),
    Training("zero2", ["--data.micro_batch_size=8", f"--config={CONFIGS}/strategy/zero2.yaml"], ranks=2),
    Training("resumed", attempts=([PauseAfter(40)], ())),
    Training("short", ["--trainer.max_steps=20", f"{VALIDATE}=10"]),
    Training("no_validation", ["--data.validation_share=0"]),
    Training("finetuned", [EXPORTED, f"{RATE}=5e-4"]),
]

_KILLED = [plants.StopAt(999, step_s=0.03), KillAt(50)]  # slow enough for goodput.jsonl, which has a line a second
FAULTS = [
    # the optimizer's settings
    Training("learning_rate_x100", [f"{RATE}=0.5"], "loss_jumped_at_the_start", RATE[2:]),
    Training("learning_rate_x0.001", [f"{RATE}=5e-6"], "loss_stands_still", RATE[2:]),
    Training("no_warmup", [EXPORTED, "--model.optim.warmup=0", EACH_STEP],
             "loss_jumped_at_the_start", "model.optim.warmup"),
    Training("clipped", [f"{CLIP}=0.01"], "clips_most_steps", CLIP[2:]),
    Training("unclipped", [f"{CLIP}=0", EACH_STEP], "gradient_explodes", CLIP[2:],
             plant=partial(plants.burst_gradients, 1e4, (60, 61, 80))),
    Training("tiny_batch", [QWEN3, EACH_STEP, f"{VALIDATE}=30", *TINY], "loss_oscillates", "data.global_batch_size"),
    Training("overshooting_schedule", [], "rate_above_peak", says="scheduler",
             plant=partial(plants.overshoot_schedule, 50, 3.0)),
    Training("drifting_norm", [f"{CLIP}=0", "--model.optim.schedule=constant"], "gradient_norm_drifts", RATE[2:],
             plant=partial(plants.let_gradients_grow, 0.2)),
    # the model
    Training("frozen", [], "loss_stands_still", says="frozen", plant=plants.freeze_all_but_norms),
    Training("wide_weights", [WIDE], "loss_starts_too_high", "model.architecture.initializer_range"),
    Training("another_tokenizer", [EXPORTED, *SHIFTED], "loss_starts_too_high", "data.tokenizer.path"),
    Training("nan", [], "loss_not_finite", says="model.layers.1.mlp is where it begins",
             plant=partial(plants.make_nan, "model.layers.1.mlp", 60)),
    Training("router_collapse", [DEEPSEEK, f"{SPEED}=0"], "experts_unused", SPEED[2:], says="router has collapsed",
             plant=partial(plants.bias_router, [0.9, 0.9, 0, 0])),
    Training("dead_expert", [DEEPSEEK, f"{SPEED}=0"], "experts_unused", SPEED[2:], says="1 of",
             plant=partial(plants.bias_router, [0, 0, 0, -0.9])),
    Training("router_collapse_by_weights", [QWEN3_MOE, "--trainer.max_steps=150"], "experts_overloaded",
             "model.balance.aux_loss_coef", says="weighs too little", plant=partial(plants.collapse_router, 2)),
    # the data
    Training("masked_labels", [], "labels_masked", says="mask covers", plant=plants.mask_all_labels),
    Training("mostly_masked_labels", [], "labels_masked", says="mask covers", plant=plants.mask_most_labels),
    Training("unshifted_labels", [], "labels_not_shifted", says="moved by one", plant=plants.do_not_shift_labels),
    Training("constant_data", [], "data_is_constant", says="one text", text="constant"),
    Training("bad_documents", [QWEN3, EACH_STEP, *FOUR], "loss_spikes", says="samples", text="spoiled"),
    Training("near_duplicates", [], "duplicates_across_splits", says="near-duplicates", text="twins"),
    Training("template_not_applied", [EXPORTED, *CHAT], "chat_template_missing", says="apply_chat_template"),
    Training("overfitting", [QWEN3, f"{RATE}=0.01", "--trainer.max_steps=150", "--data.validation_share=0.4"],
             "overfits", "trainer.max_steps", text="few"),
    # validation
    Training("rare_validation", [f"{VALIDATE}=1000"], "validates_too_rarely", VALIDATE[2:]),
    Training("dear_validation", [f"{VALIDATE}=2", "--data.validation_share=0.2", "--trainer.max_steps=20"],
             "validation_too_dear", VALIDATE[2:]),
    Training("starved_validation", ["--data.validation_share=0.005"], "validation_too_small", "data.validation_share"),
    # speed
    Training("slow_rank", DDP, "slow_rank", says="The machine on ", ranks=2,
             plant=partial(plants.compute_slowly, 0.03, 1)),
    Training("slow_loader", [], "waits_for_data", "data.num_workers", plant=partial(plants.read_slowly, 0.02)),
    Training("tiny_micro_batches", ["--data.micro_batch_size=1"], "tiny_micro_batch", "data.micro_batch_size"),
    Training("fp32_on_gpu", [], "fp32_on_bf16", "trainer.precision",
             edit=partial(plants.edit_facts, machine=plants.H100)),
    Training("eager_attention", [BF16], "eager_attention",
             "model.architecture.attn_implementation",
             edit=partial(plants.edit_facts, machine=plants.H100, model={"attention": "eager"})),
    Training("communication", [BF16, *FSDP2], "waits_for_others", "data.global_batch_size", ranks=2,
             edit=partial(plants.act_as_gpus, gpu__utilization=0.99, perf__mfu=0.06)),
    Training("held_clocks", [], "clocks_held_down", says="Cooling",
             edit=partial(plants.edit_metrics, gpu__throttled=1.0, gpu__temperature_c=91.0)),
    # memory
    Training("address_space", LONG, "out_of_memory", "data.micro_batch_size", attempts=([plants.LimitMemory(100)],)),
    Training("cuda_out_of_memory", [], "out_of_memory", "data.micro_batch_size",
             plant=partial(plants.run_out_in_backward, 10)),
    Training("nearly_full", [], "memory_nearly_full", "data.micro_batch_size",
             edit=partial(plants.edit_metrics, memory__peak_share=0.97)),
    # the job
    Training("dear_checkpoints", ["--last_checkpoint.every_n_steps=1"], "checkpoint_too_dear",
             "last_checkpoint.every_n_steps"),
    Training("rare_checkpoints", ["--last_checkpoint.every_n_steps=1000"], "checkpoint_too_rare",
             "last_checkpoint.every_n_steps", attempts=(_KILLED, _KILLED, ())),
    Training("out_of_time", ["--trainer.max_steps=10000000", "--preemption.max_time=00:00:10:00"], "ends_too_late",
             "preemption.max_time", attempts=([plants.StopAt(100)],)),
    Training("crash", [], "crashed", says="KeyError: 'logit'",
             plant=partial(plants.raise_in_loss, 30, KeyError("logit"))),
]  # fmt: skip


class Trainings:
    """Made once each.

    Args:
        folder: For runs, texts and token caches.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.records: dict[str, RunRecord] = {}  # of each training's last attempt
        self._prepared: set[tuple[str, ...]] = set()
        self.flags = [
            f"--run.root={folder / 'runs'}", "--data.source=TextFiles", "--data.tokenizer=Bytes",
            f"--data.cache_dir={folder / 'cache'}", "--data.seq_len=64", "--data.global_batch_size=16",
            "--data.micro_batch_size=16", "--data.validation_share=0.05", "--data.test_share=0", "--data.prompts=[]",
            LLAMA, f"{RATE}=5e-3", "--model.optim.warmup=10", "--trainer.accelerator=cpu", "--trainer.max_steps=100",
            "--trainer.log_every_n_steps=2", f"{VALIDATE}=25", "--trainer.logger=false",
            "--last_checkpoint.every_n_steps=50", "--run.report=false",
        ]  # fmt: skip

    def __call__(self, training: Training) -> Path:
        """The run's folder."""
        run = self.folder / "runs" / "default" / training.name
        if training.name not in self.records:
            self._make(training)
            if training.edit:
                training.edit(run)
        return run

    def _make(self, training: Training) -> None:
        flags = [*self.flags, f"--trainer.devices={training.ranks}", self._source(training.text)]
        flags += [self._filled(flag) for flag in training.flags]
        self._prepare(flags)
        for number, callbacks in enumerate(training.attempts):
            record = self.folder / "records" / f"{training.name}.{number}"
            options: dict = {"callbacks": callbacks, "prelude": training.plant, "run_id": training.name}
            with Workers(training.ranks) as workers:
                self.records[training.name] = workers.run(["fit", *flags], record, timeout_s=120, **options)

    def _source(self, text: str) -> str:
        folder = self.folder / "texts" / text
        if not folder.exists():
            folder.mkdir(parents=True)
            number_of, document = TEXTS[text]
            for number in range(number_of):
                (folder / f"{number:04}.txt").write_text(document(number), encoding="utf-8")
        return f"--data.source.paths=[{folder}/*.txt]"

    def _prepare(self, flags: list[str]) -> None:
        """Tokenize, unless another training's data are the same: ranks that a launcher has started do not."""
        data = tuple(flag for flag in flags if flag.startswith("--data."))
        if data not in self._prepared:
            self._prepared.add(data)
            self._run("prepare", *data)

    def _filled(self, flag: str) -> str:
        for name, make in {"{llama}": self._export, "{chat}": self._chat, "{shifted}": self._shifted}.items():
            if name in flag:
                flag = flag.replace(name, str(make()))
        return flag

    def _export(self) -> Path:
        output, source = self.folder / "exported", HEALTHY[0]
        if not output.exists():
            flags = [flag for flag in self.flags if flag.startswith(("--data.", "--model.", "--run."))]
            checkpoints = self(source) / "checkpoints"
            self._run("export", *flags, self._source(source.text), f"--checkpoint={checkpoints}", f"--output={output}")
        return output

    def _chat(self) -> Path:
        return plants.write_tokenizer(self.folder / "chat", chat_template=plants.CHAT_TEMPLATE)

    def _shifted(self) -> Path:
        return plants.write_tokenizer(self.folder / "shifted", shift=7)

    def _run(self, verb: str, *flags: str) -> None:
        number = len(list((self.folder / "records").glob(f"{verb}.*")))
        with Workers(1) as workers:
            workers.run([verb, *flags], self.folder / "records" / f"{verb}.{number}").check()
