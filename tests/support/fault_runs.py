"""Small trainings on the CPU, each with one planted fault, and healthy ones.

The fault is in the configuration where a user's error would be there, else a function below plants
it in every worker. recorded.py keeps the history of each; test_diagnosis_faults.py expects the
right rule and cause first.
"""

from __future__ import annotations

import itertools
import json
import random
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import psutil
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from tests.support.faults import replaces
from tests.support.library import PackedRows, training_module
from tests.support.runs import Workers
from tests.support.wings import RunRecord

H100 = {"device": "NVIDIA H100 80GB HBM3", "supports_bf16": True, "memory_gib": 79.1}

# ---- what is planted -----------------------------------------------------------------------------


def edit_batches(edit: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    replaces("__getitems__", PackedRows)(lambda read, self, rows: edit(read(self, rows)))()


def edit_loss(edit: Callable[[Any, Tensor], Tensor]) -> None:
    replaces("training_step")(lambda step, self, *args: edit(self, step(self, *args)))()


def edit_model(edit: Callable[[Any], None]) -> None:
    def build_model(build: Any, self: Any, data: Any) -> nn.Module:
        model = build(self, data)
        with torch.no_grad():
            edit(model)
        return model

    replaces("build_model")(build_model)()


def mask_all_labels() -> None:
    edit_batches(lambda batch: batch | {"labels": torch.full_like(batch["labels"], -100)})


def read_slowly(seconds: float) -> None:
    edit_batches(lambda batch: time.sleep(seconds) or batch)


def freeze_all_but_norms() -> None:
    def freeze(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad = name.endswith("norm.weight")

    edit_model(freeze)


def bias_router(biases: Sequence[float]) -> None:
    """Sets the experts' biases, as in a DeepSeek-V3 router that has learned to choose few."""

    def bias(model: nn.Module) -> None:
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.tensor(biases))

    edit_model(bias)


def collapse_router(favoured: int) -> None:
    """All embeddings share a direction, by which the routers choose `favoured` experts."""

    def collapse(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if name.endswith("embed_tokens.weight"):
                parameter += 0.05
            if name.endswith("mlp.gate.weight"):
                parameter[:favoured] += 0.01
                parameter[favoured:] -= 0.01

    edit_model(collapse)


def make_nan(name: str, call: int) -> None:
    """The module returns NaN from its `call`th training forward on."""

    def spoil(model: nn.Module) -> None:
        calls = itertools.count()

        def hook(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            return output * float("nan") if module.training and next(calls) >= call else output

        model.get_submodule(name).register_forward_hook(hook)

    edit_model(spoil)


def detach_loss() -> None:
    edit_loss(lambda self, loss: loss.detach() + 0 * loss)


def leak_memory(mib: int) -> None:
    """Keeps `mib` MiB of every step, as a list of results does; memory is measured each second."""
    kept = []

    def leak(self: Any, loss: Tensor) -> Tensor:
        kept.append(torch.ones(mib * 2**18))
        time.sleep(0.05)
        return loss

    edit_loss(leak)


def raise_in_loss(step: int, error: Exception) -> None:
    def fail(self: Any, loss: Tensor) -> Tensor:
        if self.global_step >= step:
            raise error
        return loss

    edit_loss(fail)


# The CUDA allocator's error.
OUT_OF_MEMORY = """CUDA out of memory. Tried to allocate 1.96 GiB. GPU 0 has a total capacity of \
79.11 GiB of which 1.02 GiB is free. Including non-PyTorch memory, this process has 78.08 GiB \
memory in use. Of the allocated memory 75.90 GiB is allocated by PyTorch, and 1.31 GiB is reserved \
by PyTorch but unallocated."""


def run_out_in_backward(step: int) -> None:
    def fail(gradient: Tensor) -> Tensor:
        raise torch.OutOfMemoryError(OUT_OF_MEMORY)

    def hook(self: Any, loss: Tensor) -> Tensor:
        if self.global_step >= step:
            loss.register_hook(fail)
        return loss

    edit_loss(hook)


def overshoot_schedule(step: int, factor: float) -> None:
    """An edited schedule multiplies the learning rate by `factor` after `step`."""

    def overshot(shape: Callable[[int], float], at: int) -> float:
        return shape(at) * (factor if at > step else 1)

    def build_schedule(build: Any, *args: Any) -> Any:
        built = build(*args)
        scheduler = built["scheduler"]
        scheduler.lr_lambdas = [partial(overshot, shape) for shape in scheduler.lr_lambdas]
        return built

    replaces("build_schedule", training_module)(build_schedule)()


def compute_slowly(seconds: float, rank: int) -> None:
    def slow(forward: Any, self: Any, batch: Any) -> Tensor:
        if self.global_rank == rank:
            time.sleep(seconds)
        return forward(self, batch)

    replaces("forward")(slow)()


class LimitMemory(Callback):
    """Limits the address space of this process to `mib` MiB more than at the start of training."""

    def __init__(self, mib: int) -> None:
        self.mib = mib

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        limit = psutil.Process().memory_info().vms + self.mib * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


class StopAt(Callback):
    """Stops training after `step`, as a time limit does; the schedule covers all steps."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        trainer.should_stop = trainer.should_stop or trainer.global_step >= self.step


def edit_facts(run: Path, **edits: dict[str, Any]) -> None:
    """Writes the facts of a machine with GPUs."""
    path = run / "facts.json"
    facts = json.loads(path.read_text("utf-8"))
    for group, values in edits.items():
        facts[group] = facts.get(group, {}) | values
    path.write_text(json.dumps(facts), "utf-8")


# ---- the trainings' flags ------------------------------------------------------------------------


SIZES = "hidden_size: 64, intermediate_size: 64, num_hidden_layers: 2, "
HEADS = "num_attention_heads: 4, num_key_value_heads: 2, "
LLAMA = f"--model.architecture={{model_type: llama, {SIZES}{HEADS}tie_word_embeddings: true}}"
DEEPSEEK = f"""--model.architecture={{model_type: deepseek_v3, {SIZES}moe_intermediate_size: 16, \
num_attention_heads: 2, num_key_value_heads: 2, q_lora_rank: 16, kv_lora_rank: 16, \
qk_nope_head_dim: 16, qk_rope_head_dim: 8, v_head_dim: 16, first_k_dense_replace: 1, \
n_routed_experts: 4, num_experts_per_tok: 2, n_group: 1, topk_group: 1, num_mtp_layers: 0}}"""
QWEN3 = f"--model.architecture={{model_type: qwen3, {SIZES}{HEADS}head_dim: 16}}"
EXPERTS = "qwen3_moe, moe_intermediate_size: 32, num_experts: 8, num_experts_per_tok: 2,"
QWEN3_MOE = QWEN3.replace("qwen3,", EXPERTS)
SPEED = "--model.balance.bias_update_speed"
RATE, VALIDATE = "--model.optim.learning_rate", "--trainer.val_check_interval"
EACH_STEP = "--trainer.log_every_n_steps=1"
DDP = ["--data.micro_batch_size=8", "--trainer.strategy=ddp"]
EXPORTED = "--model.pretrained={llama}"  # the weights of the healthy training of that name
FSDP2 = ["--data.micro_batch_size=8", "--config=strategy/fsdp2"]
LONG = ["--data.global_batch_size=64", "--data.micro_batch_size=64", "--data.seq_len=256"]
FOUR = ["--data.global_batch_size=4", "--data.micro_batch_size=4"]
EVERY_STEP, EVERY_SECOND = "--last_checkpoint.every_n_steps=1", f"{VALIDATE}=2"

# ---- the text: random sentences, which can be learned in part ------------------------------------

WORDS = {
    "A": "small old quick quiet green heavy bright cold round empty",
    "N": "river stone garden window letter engine bridge farmer doctor child ship forest lamp table"
    " road",
    "V": "moves follows finds carries breaks opens paints leaves watches turns",
    "P": "under near behind above across without",
}
SENTENCES = """the A N V the N.|the N V the A N P the N.|P the N the A N V the N.|\
one A N V the N P a A N.""".split("|")


def sentences(seed: int) -> str:
    """Returns about 400 bytes."""
    chance = random.Random(seed)
    chosen = [chance.choice(SENTENCES).split() for _ in range(chance.randint(8, 14))]
    known = {kind: words.split() for kind, words in WORDS.items()}
    return " ".join(
        chance.choice(known[word[0]]) + word[1:] if word[0] in known else word
        for word in sum(chosen, [])
    )


def noise(seed: int) -> str:
    """Returns what a damaged file or a wrong encoding yields."""
    chance = random.Random(seed)
    return "".join(chr(chance.randint(0x3400, 0x9FFF)) for _ in range(200))


TEXTS: dict[str, tuple[int, Callable[[int], str]]] = {  # number of documents, and each one's text
    "text": (300, sentences),
    "damaged": (300, lambda number: noise(number) if number % 40 == 7 else sentences(number)),
}

# ---- the trainings -------------------------------------------------------------------------------


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
        plant: A function above.
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
    Training("llama"), Training("deepseek_v3", [DEEPSEEK]), Training("qwen3", [QWEN3]),
    Training("accumulation", ["--data.micro_batch_size=4"]),
    Training("stable_decay", ["--model.optim.schedule=warmup_stable_decay"]),
    Training("constant", ["--model.optim.schedule=constant"]),
    Training("plateau", ["--model.optim.schedule=reduce_on_plateau"]),
    Training("ddp", DDP, ranks=2), Training("fsdp2", FSDP2, ranks=2),
    Training("zero2", ["--data.micro_batch_size=8", "--config=strategy/zero2"], ranks=2),
    Training("resumed", attempts=([StopAt(40)], ())),
    Training("short", ["--trainer.max_steps=20", f"{VALIDATE}=10"]),
    Training("no_validation", ["--data.validation_share=0"]),
    Training("finetuned", [EXPORTED, f"{RATE}=5e-4"]),
]  # fmt: skip

BATCH = "data.micro_batch_size"
FAULTS = [
    # optimizer
    Training("learning_rate_x100", [f"{RATE}=0.5"], "early_loss_jump", RATE[2:]),
    Training("learning_rate_x0.001", [f"{RATE}=5e-6"], "loss_not_decreasing", RATE[2:]),
    Training("no_warmup", [EXPORTED, "--model.optim.warmup=0", EACH_STEP], "early_loss_jump",
             "model.optim.warmup"),
    Training("schedule_x1000", [], "loss_diverges", RATE[2:],
             plant=partial(overshoot_schedule, 50, 1000.0)),
    # model
    Training("frozen", [], "loss_not_decreasing", says="frozen", plant=freeze_all_but_norms),
    Training("detached_loss", [], "loss_not_decreasing", says=".detach()", plant=detach_loss),
    Training("nan", [], "loss_not_finite", says="not finite",
             plant=partial(make_nan, "model.layers.1.mlp", 60)),
    Training("router_collapse", [DEEPSEEK, f"{SPEED}=0"], "experts_unused", SPEED[2:],
             says="router has collapsed", plant=partial(bias_router, [0.9, 0.9, 0, 0])),
    Training("dead_expert", [DEEPSEEK, f"{SPEED}=0"], "experts_unused", SPEED[2:], says="1 of",
             plant=partial(bias_router, [0, 0, 0, -0.9])),
    Training("router_collapse_by_weights", [QWEN3_MOE, "--trainer.max_steps=150"],
             "experts_overloaded", "model.balance.aux_loss_coef", says="too weak",
             plant=partial(collapse_router, 2)),
    # data
    Training("masked_labels", [], "labels_masked", says="mask covers", plant=mask_all_labels),
    Training("damaged_documents", [QWEN3, EACH_STEP, *FOUR], "loss_spikes", says="samples",
             text="damaged"),
    # speed and memory
    Training("slow_rank", DDP, "slow_rank", says="The machine on ", ranks=2,
             plant=partial(compute_slowly, 0.03, 1)),
    Training("slow_loader", [], "waits_for_data", "data.num_workers",
             plant=partial(read_slowly, 0.02)),
    Training("fp32_on_gpu", [], "fp32_on_gpu", "trainer.precision",
             edit=partial(edit_facts, machine=H100)),
    Training("address_space", LONG, "out_of_memory", BATCH, attempts=([LimitMemory(100)],)),
    Training("cuda_out_of_memory", [], "out_of_memory", BATCH,
             plant=partial(run_out_in_backward, 10)),
    Training("leak", [], "memory_grows", says="every step is kept", plant=partial(leak_memory, 4)),
    # job
    Training("expensive_checkpoints", [EVERY_STEP], "checkpoint_overhead_high", EVERY_STEP[2:-2]),
    Training("expensive_validation",
             [EVERY_SECOND, "--data.validation_share=0.2", "--trainer.max_steps=20"],
             "validation_overhead_high", VALIDATE[2:]),
    Training("crash", [], "crashed", says="KeyError: 'logit'",
             plant=partial(raise_in_loss, 30, KeyError("logit"))),
]  # fmt: skip
ALL = [*HEALTHY, *FAULTS]


class Trainings:
    """Runs each training once; runs, texts and token caches are in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.records: dict[str, RunRecord] = {}  # last attempt of each training
        self._prepared: set[tuple[str, ...]] = set()
        self.flags = f"""--run.root={folder / "runs"} --run.report=false --data.source=TextFiles
            --data.tokenizer=Bytes --data.cache_dir={folder / "cache"} --data.seq_len=64
            --data.global_batch_size=16 --data.micro_batch_size=16 --data.validation_share=0.05
            --data.test_share=0 --data.prompts=[] {RATE}=5e-3 --model.optim.warmup=10
            --trainer.accelerator=cpu --trainer.max_steps=100 --trainer.log_every_n_steps=2
            {VALIDATE}=25 --trainer.logger=false --last_checkpoint.every_n_steps=50""".split()
        self.flags.append(LLAMA)

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
        own = self._export() if EXPORTED in training.flags else ""
        exported = f"--model.pretrained={own}"
        flags += [exported if flag == EXPORTED else flag for flag in training.flags]
        self._prepare(flags)
        for number, callbacks in enumerate(training.attempts):
            record = self.folder / "records" / f"{training.name}.{number}"
            options: dict = {"callbacks": callbacks, "prelude": training.plant, "timeout_s": 120}
            options["run_id"] = training.name
            with Workers(training.ranks) as workers:
                self.records[training.name] = workers.run(["fit", *flags], record, **options)

    def _source(self, text: str) -> str:
        folder = self.folder / "texts" / text
        if not folder.exists():
            folder.mkdir(parents=True)
            number_of, document = TEXTS[text]
            for number in range(number_of):
                (folder / f"{number:04}.txt").write_text(document(number), encoding="utf-8")
        return f"--data.source.paths=[{folder}/*.txt]"

    def _prepare(self, flags: list[str]) -> None:
        """Tokenizes the data once for all trainings that share them: ranks do not tokenize."""
        data = tuple(flag for flag in flags if flag.startswith("--data."))
        if data not in self._prepared:
            self._prepared.add(data)
            self._run("prepare", *data)

    def _export(self) -> Path:
        output, source = self.folder / "exported", HEALTHY[0]
        if not output.exists():
            kept = ("--data.", "--model.", "--run.")
            flags = [flag for flag in self.flags if flag.startswith(kept)]
            flags += [self._source(source.text), f"--output={output}"]
            self._run("export", *flags, f"--checkpoint={self(source) / 'checkpoints'}")
        return output

    def _run(self, verb: str, *flags: str) -> None:
        number = len(list((self.folder / "records").glob(f"{verb}.*")))
        with Workers(1) as workers:
            workers.run([verb, *flags], self.folder / "records" / f"{verb}.{number}").check()
