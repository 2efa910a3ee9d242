"""Small trainings on the CPU, each with one planted fault, and healthy ones.

The fault is in the configuration where a user's error would be there, else a function below plants
it in every worker. recorded.py keeps the history of each."""

import itertools
import json
import random
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any

import psutil
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from trainer_dev.module import LanguageModule

from dist_template.model import training_module
from dist_template.text.batches.rows import PackedRows
from dist_template.wings.rehearse.interventions import KillAt
from dist_template.wings.rehearse.record import RunRecord
from tests.support.faults import future_leaks, replaces
from tests.support.runs import Workers

H100 = {"device": "NVIDIA H100 80GB HBM3", "supports_bf16": True, "memory_gib": 79.1}

# ---- what is planted -----------------------------------------------------------------------------


def changes(name: str, owner: Any = LanguageModule) -> Callable[[Callable], Callable[[], None]]:
    """Makes a fault of a function (self, result) that changes what the method `name` returns."""

    def decorate(change: Callable) -> Callable[[], None]:
        def method(old: Callable, self: Any, *args: Any) -> Any:
            return change(self, old(self, *args))

        return wraps(change)(replaces(name, owner)(method))

    return decorate


@changes("__getitems__", PackedRows)
def mask_all_labels(rows: Any, batch: dict[str, Any]) -> dict[str, Any]:
    return batch | {"labels": torch.full_like(batch["labels"], -100)}


@changes("__getitems__", PackedRows)
def shuffle_labels(rows: Any, batch: dict[str, Any]) -> dict[str, Any]:
    labels = batch["labels"]
    return batch | {"labels": labels.flatten()[torch.randperm(labels.numel())].view_as(labels)}


@changes("__getitems__", PackedRows)
def take_inputs_for_labels(rows: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """As for transformers' models, which shift the labels themselves."""
    return batch | {"labels": batch["input_ids"].clone()}


@changes("__getitems__", PackedRows)
def read_slowly(rows: Any, batch: dict[str, Any]) -> dict[str, Any]:
    time.sleep(0.02)
    return batch


@changes("build_model")
def freeze_all_but_norms(self: Any, model: nn.Module) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name.endswith("norm.weight")
    return model


def bias_router(biases: Sequence[float]) -> None:
    """Sets the experts' biases, as in a DeepSeek-V3 router that has learned to choose few."""

    def bias(self: Any, model: nn.Module) -> nn.Module:
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.tensor(biases))
        return model

    changes("build_model")(bias)()


@changes("build_model")
def collapse_router(self: Any, model: nn.Module) -> nn.Module:
    """All embeddings share a direction, by which the routers choose two experts."""
    for name, parameter in model.named_parameters():
        if name.endswith("embed_tokens.weight"):
            parameter.data += 0.05
        if name.endswith("mlp.gate.weight"):
            parameter.data[:2] += 0.01
            parameter.data[2:] -= 0.01
    return model


@changes("build_model")
def make_nan(self: Any, model: Any) -> nn.Module:
    """The second block's MLP returns NaN from its 61st training forward on."""
    calls = itertools.count()

    def hook(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return output * float("nan") if module.training and next(calls) >= 60 else output

    model.model.layers[1].mlp.register_forward_hook(hook)
    return model


@changes("training_step")
def detach_loss(self: Any, loss: Tensor) -> Tensor:
    return loss.detach() + 0 * loss


@changes("training_step")
def leak_memory(self: Any, loss: Tensor) -> Tensor:
    """Keeps 4 MiB of every step, as a list of results does; memory is measured each second."""
    self.kept = [*getattr(self, "kept", []), torch.ones(2**20)]
    time.sleep(0.05)
    return loss


def raise_in_loss(step: int, error: Exception) -> None:
    def fail(self: Any, loss: Tensor) -> Tensor:
        if self.global_step >= step:
            raise error
        return loss

    changes("training_step")(fail)()


# The CUDA allocator's error.
OUT_OF_MEMORY = """CUDA out of memory. Tried to allocate 1.96 GiB. GPU 0 has a total capacity of \
79.11 GiB of which 1.02 GiB is free. Including non-PyTorch memory, this process has 78.08 GiB \
memory in use. Of the allocated memory 75.90 GiB is allocated by PyTorch, and 1.31 GiB is reserved \
by PyTorch but unallocated."""


@changes("build_schedule", training_module)
def overshoot_schedule(optimizer: Any, built: dict[str, Any]) -> dict[str, Any]:
    """An edited schedule multiplies the learning rate by 1000 after step 50."""

    def overshot(shape: Callable[[int], float], at: int) -> float:
        return shape(at) * (1000 if at > 50 else 1)

    scheduler = built["scheduler"]
    scheduler.lr_lambdas = [partial(overshot, shape) for shape in scheduler.lr_lambdas]
    return built


@changes("forward")
def compute_slowly(self: Any, logits: Tensor) -> Tensor:
    time.sleep(0.03 * self.global_rank)
    return logits


@replaces("on_train_start")
def limit_memory(*_: Any) -> None:
    """Limits this process's address space to 100 MiB more than at the start of training."""
    limit = psutil.Process().memory_info().vms + 100 * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


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
BF16 = "--trainer.precision=bf16-mixed"
HALF_HELD_OUT = ["--data.validation_share=0.4", f"{VALIDATE}=15"]
ONE = ["--data.global_batch_size=1", "--data.micro_batch_size=1", "--data.seq_len=16"]
CONSTANT = "--model.optim.schedule=constant"
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


FEW = 10  # documents of "few"; others have 300
TEXTS: dict[str, Callable[[int], str]] = {
    "text": sentences,
    "few": sentences,
    "damaged": lambda number: noise(number) if number % 40 == 7 else sentences(number),
}

# ---- the trainings -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Training:
    """A training, and the finding that is expected first."""

    name: str  # of the run
    flags: Sequence[str] = ()  # after `Trainings.flags`
    rule: str = ""  # of the first finding; "": the training is healthy
    key: str = ""  # the first key that its first cause changes; "": that cause has none
    says: str = ""  # part of the finding's title, evidence or first cause
    text: str = "text"  # a key of TEXTS
    ranks: int = 1
    plant: Callable[[], None] | None = None  # a function above
    attempts: Sequence[Sequence[Callback]] = ((),)  # callbacks of each attempt
    machine: dict[str, Any] | None = None  # facts in the run's folder of what this machine lacks
    # metrics of every log step in the run's folder, of what this machine lacks
    measured: dict[str, float] | None = None


HEALTHY = [
    Training("llama"),
    Training("deepseek_v3", [DEEPSEEK]),
    Training("qwen3", [QWEN3]),
    Training("accumulation", ["--data.micro_batch_size=4"]),
    Training("stable_decay", ["--model.optim.schedule=warmup_stable_decay"]),
    Training("constant", ["--model.optim.schedule=constant"]),
    Training("plateau", ["--lr_scheduler=ReduceLROnPlateau", "--lr_scheduler.monitor=eval/loss"]),
    Training("ddp", DDP, ranks=2),
    Training("fsdp2", FSDP2, ranks=2),
    Training("zero2", ["--data.micro_batch_size=8", "--config=strategy/zero2"], ranks=2),
    Training("resumed", ["--last_checkpoint.every_n_steps=20"], attempts=([KillAt(50)], ())),
    Training("short", ["--trainer.max_steps=20", f"{VALIDATE}=10"]),
    Training("no_validation", ["--data.validation_share=0"]),
    Training("finetuned", [EXPORTED, f"{RATE}=5e-4"]),
]

ODD = ["--data.seq_len=50", "--data.global_batch_size=12", "--data.micro_batch_size=6"]
VARIANTS: list[list[str]] = [[], [QWEN3], [DEEPSEEK], ODD, [EACH_STEP, QWEN3, CONSTANT]]
SEEDS = [
    Training(
        f"seed_{seed:02}",
        [f"--seed_everything={seed}", f"--data.seed={seed}", *VARIANTS[seed % len(VARIANTS)]],
    )
    for seed in range(20)
]
HEALTHY += SEEDS

BATCH = "data.micro_batch_size"
FAULTS = [
    # optimizer
    Training("learning_rate_x100", [f"{RATE}=0.5"], "no_better_than_unigram", RATE[2:]),
    Training("learning_rate_x100_recovers", [QWEN3, f"{RATE}=0.5"], "early_loss_jump", RATE[2:]),
    Training("learning_rate_x0.001", [f"{RATE}=5e-6"], "loss_not_decreasing", RATE[2:]),
    Training("no_warmup", [EXPORTED, "--model.optim.warmup=0", EACH_STEP], "early_loss_jump",
             "model.optim.warmup"),
    Training("schedule_x1000", [], "loss_diverges", RATE[2:], plant=overshoot_schedule),
    # model
    Training("frozen", [], "loss_not_decreasing", says="frozen", plant=freeze_all_but_norms),
    Training("detached_loss", [], "loss_not_decreasing", says=".detach()", plant=detach_loss),
    Training("nan", [], "loss_not_finite", says="not finite", plant=make_nan),
    Training("router_collapse", [DEEPSEEK, f"{SPEED}=0"], "experts_unused", SPEED[2:],
             says="router has collapsed", plant=partial(bias_router, [0.9, 0.9, 0, 0])),
    Training("dead_expert", [DEEPSEEK, f"{SPEED}=0"], "experts_unused", SPEED[2:], says="1 of",
             plant=partial(bias_router, [0, 0, 0, -0.9])),
    Training("router_collapse_by_weights", [QWEN3_MOE, "--trainer.max_steps=150"],
             "experts_overloaded", "model.balance.aux_loss_coef", says="too weak",
             plant=collapse_router),
    # data
    Training("masked_labels", [], "labels_masked", says="mask covers", plant=mask_all_labels),
    Training("shuffled_labels", [], "no_better_than_unigram", says="shuffled labels",
             plant=shuffle_labels),
    Training("future_leak", [], "too_good_to_be_true", says="passes", plant=future_leaks),
    Training("unshifted_labels", [], "too_good_to_be_true", says="not shifted",
             plant=take_inputs_for_labels),
    Training("damaged_documents", [QWEN3, EACH_STEP, *FOUR], "loss_spikes", says="samples",
             text="damaged"),
    Training("overfitting", [QWEN3, f"{RATE}=0.01", "--trainer.max_steps=150", *HALF_HELD_OUT],
             "overfits", "config", says="stop early", text="few"),
    Training("oscillating", [QWEN3, f"{RATE}=0.2", CONSTANT, *ONE, EACH_STEP], "loss_oscillates",
             RATE[2:], says="swings"),
    # speed and memory
    Training("idle_gpu", [BF16], "gpu_utilization_low", "data.num_workers",
             says="training waits for data", plant=read_slowly, machine=H100,
             measured={"gpu/utilization": 0.31, "memory/peak_share": 0.8}),
    Training("eager_attention", [BF16, "--model.attention=eager"], "gpu_compute_slow",
             "model.attention", says="sdpa", machine=H100,
             measured={"gpu/utilization": 0.97, "perf/mfu": 0.11, "memory/peak_share": 0.8}),
    Training("nearly_full", [], "memory_nearly_full", BATCH,
             measured={"memory/peak_share": 0.97}),
    Training("slow_rank", DDP, "slow_rank", says="The machine on ", ranks=2, plant=compute_slowly),
    Training("slow_loader", [], "waits_for_data", "data.num_workers", plant=read_slowly),
    Training("fp32_on_gpu", [], "fp32_on_gpu", "trainer.precision", machine=H100),
    Training("address_space", LONG, "out_of_memory", BATCH, plant=limit_memory),
    Training("cuda_out_of_memory", [], "out_of_memory", BATCH,
             plant=partial(raise_in_loss, 10, torch.OutOfMemoryError(OUT_OF_MEMORY))),
    Training("leak", [], "memory_grows", says="every step is kept", plant=leak_memory),
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
            if training.machine:
                path = run / "facts.json"
                facts = json.loads(path.read_text("utf-8"))
                facts["machine"] = facts.get("machine", {}) | training.machine
                path.write_text(json.dumps(facts), "utf-8")
            if training.measured:
                self._measure(run / "metrics.jsonl", training.measured)
        return run

    def _measure(self, path: Path, measured: dict[str, float]) -> None:
        lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        for line in lines:
            if "train/loss" in line:
                line.update(measured)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")

    def _make(self, training: Training) -> None:
        flags = [*self.flags, f"--trainer.devices={training.ranks}", self._source(training.text)]
        if any(flag.startswith("--lr_scheduler") for flag in training.flags):  # it has none
            flags = [flag for flag in flags if not flag.startswith("--model.optim.warmup")]
        if EXPORTED in training.flags:
            self._export()
        flags += [flag.replace("{llama}", f"{self.folder}/exported") for flag in training.flags]
        data = tuple(flag for flag in flags if flag.startswith("--data."))
        if data not in self._prepared:  # ranks do not tokenize
            self._prepared.add(data)
            self._run(f"prepare.{len(self._prepared)}", "prepare", *data).check()
        for number, callbacks in enumerate(training.attempts):
            options: Any = {"callbacks": callbacks, "prelude": training.plant, "timeout_s": 120}
            options |= {"ranks": training.ranks, "run_id": training.name}
            record = self._run(f"{training.name}.{number}", "fit", *flags, **options)
            self.records[training.name] = record

    def _source(self, text: str) -> str:
        folder = self.folder / "texts" / text
        if not folder.exists():
            folder.mkdir(parents=True)
            for number in range(FEW if text == "few" else 300):
                (folder / f"{number:04}.txt").write_text(TEXTS[text](number), encoding="utf-8")
        return f"--data.source.paths=[{folder}/*.txt]"

    def _export(self) -> None:
        output, source = self.folder / "exported", HEALTHY[0]
        if not output.exists():
            ours = ("--data.", "--model.", "--run.")
            flags = [flag for flag in self.flags if flag.startswith(ours)]
            flags += [self._source(source.text), f"--output={output}"]
            flags.append(f"--checkpoint={self(source) / 'checkpoints'}")
            self._run("export", "export", *flags).check()

    def _run(self, name: str, *argv: str, ranks: int = 1, **options: Any) -> RunRecord:
        return Workers(ranks).run(argv, self.folder / "records" / name, **options)
