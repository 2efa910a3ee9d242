"""Small trainings on the CPU, each with one planted fault, and healthy ones.

The fault is in the configuration where a user's error would be there, else it is one of fault_plants.py.
recorded.py keeps the history of each; test_diagnosis_faults.py expects the right rule and cause first.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lightning.pytorch import Callback

from tests.support import fault_plants as plants
from tests.support.runs import CONFIGS, Workers
from tests.support.wings import RunRecord

LLAMA = (
    "--model.architecture={model_type: llama, hidden_size: 64, intermediate_size: 64, num_hidden_layers: 2,"
    " num_attention_heads: 4, num_key_value_heads: 2, tie_word_embeddings: true}"
)
DEEPSEEK = (
    "--model.architecture={model_type: deepseek_v3, hidden_size: 64, intermediate_size: 64, moe_intermediate_size: 16,"
    " num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 2, q_lora_rank: 16, kv_lora_rank: 16,"
    " qk_nope_head_dim: 16, qk_rope_head_dim: 8, v_head_dim: 16, first_k_dense_replace: 1, n_routed_experts: 4,"
    " num_experts_per_tok: 2, n_group: 1, topk_group: 1, num_mtp_layers: 0}"
)
QWEN3 = (
    "--model.architecture={model_type: qwen3, hidden_size: 64, intermediate_size: 64, num_hidden_layers: 2,"
    " num_attention_heads: 4, num_key_value_heads: 2, head_dim: 16}"
)
QWEN3_MOE = QWEN3.replace("qwen3,", "qwen3_moe, moe_intermediate_size: 32, num_experts: 8, num_experts_per_tok: 2,")
SPEED = "--model.balance.bias_update_speed"
RATE, CLIP, VALIDATE = "--model.optim.learning_rate", "--trainer.gradient_clip_val", "--trainer.val_check_interval"
EACH_STEP = "--trainer.log_every_n_steps=1"
DDP = ["--data.micro_batch_size=8", "--trainer.strategy=ddp"]
EXPORTED = "--model.pretrained={llama}"  # the weights of the healthy training of that name
PP = [f"--config={CONFIGS}/strategy/pp.yaml"]
LAYERS = "--trainer.strategy.init_args.pp_layers"
SIX = LLAMA.replace("num_hidden_layers: 2", "num_hidden_layers: 6")
FSDP2 = ["--data.micro_batch_size=8", f"--config={CONFIGS}/strategy/fsdp2.yaml"]
LONG = ["--data.global_batch_size=64", "--data.micro_batch_size=64", "--data.seq_len=256"]
FOUR = ["--data.global_batch_size=4", "--data.micro_batch_size=4"]
EVERY_STEP, EVERY_SECOND = "--last_checkpoint.every_n_steps=1", f"{VALIDATE}=2"
ENDLESS = ["--trainer.max_steps=10000000", "--preemption.max_time=00:00:10:00"]

# ---- the text: random sentences, which can be learned in part --------------------------------------------------------

WORDS = {
    "A": "small old quick quiet green heavy bright cold round empty".split(),
    "N": "river stone garden window letter engine bridge farmer doctor child ship forest lamp table road".split(),
    "V": "moves follows finds carries breaks opens paints leaves watches turns".split(),
    "P": "under near behind above across without".split(),
}
SENTENCES = ("the A N V the N.", "the N V the A N P the N.", "P the N the A N V the N.", "one A N V the N P a A N.")


def sentences(seed: int) -> str:
    """Returns about 400 bytes."""
    chance = random.Random(seed)
    words = [word for _ in range(chance.randint(8, 14)) for word in chance.choice(SENTENCES).split()]
    return " ".join(chance.choice(WORDS[word[0]]) + word[1:] if word[0] in WORDS else word for word in words)


def noise(seed: int) -> str:
    """Returns what a damaged file or a wrong encoding yields."""
    chance = random.Random(seed)
    return "".join(chr(chance.randint(0x3400, 0x9FFF)) for _ in range(200))


TEXTS: dict[str, tuple[int, Callable[[int], str]]] = {  # number of documents, and each one's text
    "text": (300, sentences),
    "few": (10, sentences),
    "constant": (300, lambda number: "ab" * (150 + number)),
    "damaged": (300, lambda number: noise(number) if number % 40 == 7 else sentences(number)),
    "twins": (300, lambda number: sentences(number // 2) + " again" * (number % 2)),
}

# ---- the trainings ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Training:
    """A training, and the finding that is expected first.

    Args:
        name: Of the run.
        flags: After `Trainings.flags`.
        rule: Of the first finding. "": the training is healthy.
        key: The first key that its first cause changes. "": that cause has no key.
        says: Is part of the finding's title, evidence or first cause.
        text: A key of TEXTS.
        ranks: Number of processes.
        plant: See fault_plants.py.
        attempts: Callbacks of each attempt.
        edit: Changes the run's folder afterwards, for what this machine cannot have.
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
    Training("resumed", attempts=([plants.StopAt(40)], ())),
    Training("short", ["--trainer.max_steps=20", f"{VALIDATE}=10"]),
    Training("no_validation", ["--data.validation_share=0"]),
    Training("finetuned", [EXPORTED, f"{RATE}=5e-4"]),
]

FAULTS = [
    # optimizer
    Training("learning_rate_x100", [f"{RATE}=0.5"], "early_loss_jump", RATE[2:]),
    Training("learning_rate_x0.001", [f"{RATE}=5e-6"], "loss_not_decreasing", RATE[2:]),
    Training("no_warmup", [EXPORTED, "--model.optim.warmup=0", EACH_STEP], "early_loss_jump", "model.optim.warmup"),
    Training("schedule_x1000", [], "loss_diverges", RATE[2:], plant=partial(plants.overshoot_schedule, 50, 1000.0)),
    Training("unclipped", [f"{CLIP}=0", EACH_STEP], "gradient_explodes", CLIP[2:],
             plant=partial(plants.burst_gradients, 1e4, (60, 61, 80))),
    # pipeline
    Training("few_micro_batches", [*PP, "--data.micro_batch_size=8"], "pipeline_waits", "data.micro_batch_size",
             ranks=2),
    Training("uneven_stages", [SIX, *PP, "--data.micro_batch_size=1", f"{RATE}=1e-3", f"{LAYERS}=[5,1]"],
             "uneven_stages", LAYERS[2:], ranks=2),
    # model
    Training("frozen", [], "loss_not_decreasing", says="frozen", plant=plants.freeze_all_but_norms),
    Training("detached_loss", [], "gradient_zero", says=".detach()", plant=plants.detach_loss),
    Training("nan", [], "loss_not_finite", says="model.layers.1.mlp is the first module",
             plant=partial(plants.make_nan, "model.layers.1.mlp", 60)),
    Training("router_collapse", [DEEPSEEK, f"{SPEED}=0"], "experts_unused", SPEED[2:], says="router has collapsed",
             plant=partial(plants.bias_router, [0.9, 0.9, 0, 0])),
    Training("dead_expert", [DEEPSEEK, f"{SPEED}=0"], "experts_unused", SPEED[2:], says="1 of",
             plant=partial(plants.bias_router, [0, 0, 0, -0.9])),
    Training("router_collapse_by_weights", [QWEN3_MOE, "--trainer.max_steps=150"], "experts_overloaded",
             "model.balance.aux_loss_coef", says="too weak", plant=partial(plants.collapse_router, 2)),
    # data
    Training("masked_labels", [], "labels_masked", says="mask covers", plant=plants.mask_all_labels),
    Training("mostly_masked_labels", [], "labels_masked", says="mask covers", plant=plants.mask_most_labels),
    Training("unshifted_labels", [], "labels_not_shifted", says="shifted by one", plant=plants.do_not_shift_labels),
    Training("constant_data", [], "data_constant", says="one text", text="constant"),
    Training("damaged_documents", [QWEN3, EACH_STEP, *FOUR], "loss_spikes", says="samples", text="damaged"),
    Training("near_duplicates", [], "train_validation_overlap", says="Near-duplicate", text="twins"),
    Training("overfitting", [QWEN3, f"{RATE}=0.01", "--trainer.max_steps=150", "--data.validation_share=0.4"],
             "overfits", "trainer.max_steps", text="few"),
    # speed and memory
    Training("slow_rank", DDP, "slow_rank", says="The machine on ", ranks=2,
             plant=partial(plants.compute_slowly, 0.03, 1)),
    Training("slow_loader", [], "waits_for_data", "data.num_workers", plant=partial(plants.read_slowly, 0.02)),
    Training("fp32_on_gpu", [], "fp32_on_gpu", "trainer.precision",
             edit=partial(plants.edit_facts, machine=plants.H100)),
    Training("address_space", LONG, "out_of_memory", "data.micro_batch_size", attempts=([plants.LimitMemory(100)],)),
    Training("cuda_out_of_memory", [], "out_of_memory", "data.micro_batch_size",
             plant=partial(plants.run_out_in_backward, 10)),
    Training("nearly_full", [], "memory_nearly_full", "data.micro_batch_size",
             edit=partial(plants.edit_metrics, name="memory/peak_share", value=0.97)),
    Training("leak", [], "memory_grows", says="every step is kept", plant=partial(plants.leak_memory, 4)),
    # job
    Training("expensive_checkpoints", [EVERY_STEP], "checkpoint_overhead_high", EVERY_STEP[2:-2]),
    Training("expensive_validation", [EVERY_SECOND, "--data.validation_share=0.2", "--trainer.max_steps=20"],
             "validation_overhead_high", VALIDATE[2:]),
    Training("out_of_time", ENDLESS, "time_limit_too_short", "preemption.max_time", attempts=([plants.StopAt(100)],)),
    Training("crash", [], "crashed", says="KeyError: 'logit'",
             plant=partial(plants.raise_in_loss, 30, KeyError("logit"))),
]  # fmt: skip
ALL = [*HEALTHY, *FAULTS]


class Trainings:
    """Runs each training once.

    Args:
        folder: Of runs, texts and token caches.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.records: dict[str, RunRecord] = {}  # last attempt of each training
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
        """Returns the folder of the run."""
        run = self.folder / "runs" / "default" / training.name
        if training.name not in self.records:
            self._make(training)
            if training.edit:
                training.edit(run)
        return run

    def _make(self, training: Training) -> None:
        flags = [*self.flags, f"--trainer.devices={training.ranks}", self._source(training.text)]
        flags += [f"--model.pretrained={self._export()}" if flag == EXPORTED else flag for flag in training.flags]
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
        """Tokenizes the data once for all trainings that share them: ranks of a launcher do not tokenize."""
        data = tuple(flag for flag in flags if flag.startswith("--data."))
        if data not in self._prepared:
            self._prepared.add(data)
            self._run("prepare", *data)

    def _export(self) -> Path:
        output, source = self.folder / "exported", HEALTHY[0]
        if not output.exists():
            flags = [flag for flag in self.flags if flag.startswith(("--data.", "--model.", "--run."))]
            checkpoints = self(source) / "checkpoints"
            self._run("export", *flags, self._source(source.text), f"--checkpoint={checkpoints}", f"--output={output}")
        return output

    def _run(self, verb: str, *flags: str) -> None:
        number = len(list((self.folder / "records").glob(f"{verb}.*")))
        with Workers(1) as workers:
            workers.run([verb, *flags], self.folder / "records" / f"{verb}.{number}").check()
