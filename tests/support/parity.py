"""Trainings of one model under every strategy, each run once, for several test modules."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor

from dist_template.wings.rehearse.record import RunRecord
from tests.support.runs import Workers, small
from tests.support.strategies import ARGS, NAMES, flags_of

MODELS = {
    "deepseek_v3": "{model_type: deepseek_v3, hidden_size: 32, intermediate_size: 64,"
    " moe_intermediate_size: 16, num_hidden_layers: 2, num_attention_heads: 2,"
    " num_key_value_heads: 2, q_lora_rank: 16, kv_lora_rank: 16, qk_nope_head_dim: 16,"
    " qk_rope_head_dim: 8, v_head_dim: 16, first_k_dense_replace: 1, n_routed_experts: 4,"
    " num_experts_per_tok: 2, n_group: 1, topk_group: 1, num_mtp_layers: 0}",
    "llama": "{model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,"
    " num_attention_heads: 4, num_key_value_heads: 2, tie_word_embeddings: true}",
}
MODELS["glm_moe_dsa"] = (
    MODELS["deepseek_v3"]
    .replace("deepseek_v3", "glm_moe_dsa")
    .replace("mtp_layers: 0", "mtp_layers: 1, index_topk: 6, index_head_dim: 12, index_n_heads: 3")
)
MODELS["deepseek_v32"] = MODELS["glm_moe_dsa"].replace("glm_moe_dsa", "deepseek_v32")
MODELS["deepseek_v4"] = (
    "{model_type: deepseek_v4, hidden_size: 32, moe_intermediate_size: 16, num_hidden_layers: 3,"
    " num_attention_heads: 2, num_key_value_heads: 1, head_dim: 24, q_lora_rank: 20, o_groups: 2,"
    " o_lora_rank: 12, partial_rotary_factor: 0.3333333333333333, n_routed_experts: 4, hc_mult: 3,"
    " num_experts_per_tok: 2, mlp_layer_types: [hash_moe, moe, moe], sliding_window: 7,"
    " layer_types: [sliding_attention, compressed_sparse_attention, heavily_compressed_attention],"
    " compress_rates: {compressed_sparse_attention: 3, heavily_compressed_attention: 10},"
    " index_topk: 5, index_head_dim: 24, index_n_heads: 3}"
)
MODELS["mtp"] = MODELS["deepseek_v3"].replace("num_mtp_layers: 0", "num_mtp_layers: 2")
# Steps of 8, 8, 8, 12, 16 and 16 rows of 32 tokens, after 0, 256, 512, 768, 1152 and 1664 tokens.
PHASES = {
    "data.global_batch_size": "[{value: 8, until: 256},"
    " {value: 16, until: 1000, shape: linear, multiple: 4}, {value: 16}]",
    "model.optim.learning_rate": "[{value: 0.01, until: 600},"
    " {value: 1.0e-3, until: 1500, shape: cosine}, {value: 5.0e-4}]",
    "model.balance.bias_update_speed": "[{value: 0.01, until: 700}, {value: 0}]",
    "model.mtp.weight": "[{value: 0.3, until: 1000}, {value: 0.1}]",
}
FLAGS = {"mtp": ["--model.loss_chunk=16", *(f"--{key}={each}" for key, each in PHASES.items())]}
FLAGS |= dict.fromkeys(
    ("deepseek_v32", "glm_moe_dsa"), ["--model.mtp.weight=0.3", "--model.loss_chunk=16"]
)
FLAGS["deepseek_v4"] = ["--data.cross_document_attention=true"]
OF_FOUR_RANKS = {"hsdp", "fsdp2_tp", "fsdp2_tp_ep", "pp_fsdp2", "pp_ep"}
PROCESSES = {name: 4 if name in OF_FOUR_RANKS else 2 for name in NAMES}
del PROCESSES["zero3_nvme"]  # needs an NVMe device and the libaio library
GLOBAL_BATCH, ACCUMULATION = 8, 2
STEPS, CLIP = 6, 0.8


def mask_labels() -> None:
    """In each worker: the number of counted labels of a row depends on the sum of its tokens."""
    from dist_template.text.batches.rows import Rows

    read = Rows.__getitems__

    def masked(self: Rows, rows: list[int]) -> dict[str, Tensor]:
        batch = read(self, rows)
        kept = 4 + batch["input_ids"].sum(1) * 7 % 28  # of 32
        batch["labels"][torch.arange(batch["labels"].shape[1]) >= kept[:, None]] = -100
        return batch

    Rows.__getitems__ = masked


def keep_labels() -> None:
    """In each worker: the labels that the data count."""


class PauseAfter(Callback):
    """Stops training after `step`, as a job's time limit does; the schedule does not change."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        trainer.should_stop = trainer.should_stop or trainer.global_step >= self.step


def run_folder(trainer: Any) -> Path:
    """The run folder of a training, in its process: the recorder of `Workers` knows it."""
    (run,) = (each.run for each in trainer.callbacks if type(each).__name__ == "Recorder")
    return Path(run)


class Trainings:
    """Trainings by their arguments, each run once."""

    def __init__(self, folder: Path, flags: list[str]) -> None:
        self.folder = folder
        self.flags = [*flags, "--model.optim.learning_rate=0.01", "--model.optim.warmup=5"]
        self.flags += [f"--trainer.gradient_clip_val={CLIP}"]
        self.flags += [f"--data.global_batch_size={GLOBAL_BATCH}"]
        self._done: dict[tuple[str, ...], RunRecord] = {}
        self._count = 0

    def __call__(
        self, model: str, strategy: str, *extra: str, verb: str = "fit", **options: Any
    ) -> RunRecord:
        key = (verb, model, strategy, *extra, str(options))
        if key not in self._done:
            self._done[key] = self.run(verb, model, strategy, *extra, **options)
        return self._done[key]

    def run(
        self,
        verb: str,
        model: str,
        strategy: str,
        *extra: str,
        processes: int = 0,
        accumulation: int = ACCUMULATION,
        callbacks: Sequence[Callback] = (),
        prelude: Callable[[], None] | None = None,
    ) -> RunRecord:
        num = processes or PROCESSES.get(strategy, 1)
        data_parallel = num // (2 if any(kind in strategy for kind in ("tp", "cp", "pp")) else 1)
        flags = [] if strategy == "one" else flags_of(strategy)
        if strategy.startswith("zero3"):  # else so small a model would not be sharded
            flags += [f"{ARGS}.param_persistence_threshold=16"]
        flags += [f"--model.architecture={MODELS[model]}", f"--trainer.devices={num}"]
        flags += FLAGS.get(model, [])
        flags += [f"--data.micro_batch_size={GLOBAL_BATCH // data_parallel // accumulation}"]
        self._count += 1
        name = f"{self._count}-{verb}-{model}-{strategy}"
        argv = [verb, *self.flags, f"--run.name={name}", *flags, *extra]
        options: Any = {"prelude": prelude or mask_labels, "callbacks": callbacks}
        return Workers(num).run(argv, self.folder / name, **options).check()


@pytest.fixture(scope="session")
def train(tmp_path_factory: pytest.TempPathFactory, corpus: Path, cache: Path) -> Trainings:
    folder = tmp_path_factory.mktemp("parity")
    flags = [*small(corpus, cache, folder), "--trainer.logger=false"]
    flags += [f"--trainer.max_steps={STEPS}", f"--trainer.val_check_interval={STEPS // 2}"]
    flags += ["--trainer.num_sanity_val_steps=0"]
    Workers(1).run(["prepare", *flags], folder / "prepare").check()
    return Trainings(folder, flags)


def assert_close(got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        difference = (got[name].float() - tensor.float()).abs().max().item()
        assert difference <= tolerance, f"{name} differs by {difference:.1e}"


def assert_trains_alike(many: RunRecord, one: RunRecord) -> None:
    """Losses, gradient norms and validations of each step, and the weights at the end, where Adam
    amplifies rounding in DeepSeek-V4's hyper-connections, whose streams are alike at first."""
    is_of_streams = any(name.endswith("hc.fn") for name in one.end)
    assert many.loss == pytest.approx(one.loss, rel=1e-6)
    assert many.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)
    assert many.eval().keys() == one.eval().keys()
    for step, metrics in one.eval().items():
        assert many.eval()[step] == pytest.approx(metrics, rel=1e-5), "every sample once"
    assert_close(many.end, one.end, 2e-4 if is_of_streams else 1e-5)
