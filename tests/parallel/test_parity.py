"""Every strategy trains to the same numbers as one process.

Each training runs once, on CPU processes, and several tests look at what it recorded. Labels are masked unevenly over
rows, so that a loss averaged per rank or per micro-batch would show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor
from transformers import AutoModelForCausalLM

from dist_template.checkpoint.formats import read_full
from dist_template.rehearsal.record import RunRecord
from tests.support.runs import Workers, newest
from tests.support.strategies import NAMES, flags_of
from tests.support.tiers import tiers

MODELS = {
    "deepseek_v3": "{model_type: deepseek_v3, hidden_size: 32, intermediate_size: 64, moe_intermediate_size: 16,"
    " num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 2, q_lora_rank: 16, kv_lora_rank: 16,"
    " qk_nope_head_dim: 16, qk_rope_head_dim: 8, v_head_dim: 16, first_k_dense_replace: 1, n_routed_experts: 4,"
    " num_experts_per_tok: 2, n_group: 1, topk_group: 1, num_mtp_layers: 0}",
    "llama": "{model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4,"
    " num_key_value_heads: 2, tie_word_embeddings: true}",
}
PROCESSES = dict.fromkeys(NAMES, 2)
PROCESSES |= {"hsdp": 4, "fsdp2_tp": 4, "fsdp2_tp_ep": 4}
del PROCESSES["zero3_nvme"]  # needs an NVMe device and the libaio library
FOR_EXPERTS = {"fsdp2_ep", "fsdp2_tp_ep"}
SHARDING = ["ddp", "fsdp2", "tp", "fsdp2_ep", "zero2", "zero3"]  # one of each kind
CASES = [
    pytest.param("deepseek_v3", strategy, marks=() if strategy == "fsdp2" else pytest.mark.slow)
    for strategy in PROCESSES
] + tiers([("llama", strategy) for strategy in PROCESSES if strategy not in FOR_EXPERTS], daily=())
GLOBAL_BATCH, ACCUMULATION = 8, 2
CLIP = 0.8


def mask_labels() -> None:
    """In each worker: how many of a row's labels count follows from the sum of its tokens."""
    from dist_template.text.rows import PackedRows

    read = PackedRows.__getitems__

    def masked(self: PackedRows, rows: list[int]) -> dict[str, Tensor]:
        batch = read(self, rows)
        kept = 4 + batch["input_ids"].sum(1) * 7 % 28  # of 32
        batch["labels"][torch.arange(batch["labels"].shape[1]) >= kept[:, None]] = -100
        return batch

    PackedRows.__getitems__ = masked


class PauseAfter(Callback):
    """Ends training in good order after `step`, as a job's time limit does; the schedule stays the whole one's."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        trainer.should_stop = trainer.should_stop or trainer.global_step >= self.step


class Trainings:
    """Trainings by what was asked of them, each done once."""

    def __init__(self, folder: Path, flags: list[str]) -> None:
        self.folder = folder
        self.flags = [*flags, "--model.optim.learning_rate=0.01", "--model.optim.warmup=5"]
        self.flags += [f"--trainer.gradient_clip_val={CLIP}", f"--data.global_batch_size={GLOBAL_BATCH}"]
        self._done: dict[tuple[str, ...], RunRecord] = {}
        self._count = 0

    def __call__(self, model: str, strategy: str, *extra: str, **options: Any) -> RunRecord:
        key = (model, strategy, *extra, str(options))
        if key not in self._done:
            self._done[key] = self.run("fit", model, strategy, *extra, **options)
        return self._done[key]

    def test(self, model: str, strategy: str) -> dict[str, float]:
        key = ("test", model, strategy)
        if key not in self._done:
            checkpoint = newest(self(model, strategy).run)
            self._done[key] = self.run("test", model, strategy, f"--ckpt_path={checkpoint}")
        (metrics,) = self._done[key].eval("test").values()
        return metrics

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
        data_parallel = num // (2 if "tp" in strategy else 1)
        flags = [] if strategy == "one" else flags_of(strategy)
        if strategy.startswith("zero3"):  # or so small a model would stay whole on every rank
            flags += ["--trainer.strategy.init_args.param_persistence_threshold=16"]
        flags += [f"--model.architecture={MODELS[model]}", f"--trainer.devices={num}"]
        flags += [f"--data.micro_batch_size={GLOBAL_BATCH // data_parallel // accumulation}"]
        self._count += 1
        name = f"{self._count}-{verb}-{model}-{strategy}"
        argv = [verb, *self.flags, f"--run.name={name}", *flags, *extra]
        with Workers(num) as workers:
            return workers.run(argv, self.folder / name, prelude=prelude or mask_labels, callbacks=callbacks).check()


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory, corpus: Path, cache: Path) -> Iterator[Trainings]:
    folder = tmp_path_factory.mktemp("parity")
    flags = [
        f"--run.root={folder / 'runs'}", "--data.source=TextFiles", f"--data.source.paths=[{corpus}/*.txt]",
        "--data.tokenizer=Bytes", f"--data.cache_dir={cache}", "--data.seq_len=32", "--data.validation_share=0.15",
        "--data.test_share=0.15", "--model.sample_tokens=4", "--trainer.accelerator=cpu", "--trainer.max_steps=20",
        "--trainer.log_every_n_steps=1", "--trainer.val_check_interval=10", "--trainer.logger=false",
    ]  # fmt: skip
    with Workers(1) as workers:
        workers.run(["prepare", *flags], folder / "prepare").check()
    yield Trainings(folder, flags)


@pytest.mark.parametrize(("model", "strategy"), CASES)
def test_a_strategy_trains_to_the_numbers_of_one_process(train: Trainings, model: str, strategy: str) -> None:
    one, many = train(model, "one"), train(model, strategy)
    assert sum(norm > CLIP for norm in one.grad_norm.values()) >= 10, "clipping must have been at work"
    assert list(one.loss) == list(range(1, 21))
    assert many.loss == pytest.approx(one.loss, rel=1e-5)
    assert many.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)
    assert many.learning_rate == pytest.approx(one.learning_rate, rel=1e-12)
    assert_close(many.end, one.end, 1e-5)


@pytest.mark.parametrize(("model", "strategy"), CASES)
def test_initial_weights_are_bit_identical(train: Trainings, model: str, strategy: str) -> None:
    one, many = train(model, "one").start, train(model, strategy).start
    assert one.keys() == many.keys()
    for name in one:
        assert torch.equal(one[name], many[name]), name


@pytest.mark.parametrize(("model", "strategy"), CASES)
def test_validation_covers_every_sample_once(train: Trainings, model: str, strategy: str) -> None:
    one, many = train(model, "one").eval(), train(model, strategy).eval()
    assert list(one) == [10, 20]
    for step, metrics in one.items():
        assert many[step] == pytest.approx(metrics, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", PROCESSES)
def test_every_global_batch_has_the_same_samples(train: Trainings, strategy: str) -> None:
    one, many = train("deepseek_v3", "one").rows(), train("deepseek_v3", strategy).rows()
    assert {step: sorted(row for row, _ in rows) for step, rows in many.items()} == {
        step: sorted(row for row, _ in rows) for step, rows in one.items()
    }


def assert_close(got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        difference = (got[name].float() - tensor.float()).abs().max().item()
        assert difference <= tolerance, f"{name} differs by {difference:.1e}"


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_the_number_of_processes_does_not_matter(train: Trainings, processes: int) -> None:
    one, many = train("llama", "one"), train("llama", "fsdp2", processes=processes)
    assert many.loss == pytest.approx(one.loss, rel=1e-5)
    assert_close(many.end, one.end, 1e-5)


@pytest.mark.slow
def test_accumulation_equals_one_big_batch(train: Trainings) -> None:
    big, small = train("deepseek_v3", "one", accumulation=1), train("deepseek_v3", "one", accumulation=8)
    assert small.loss == pytest.approx(big.loss, rel=1e-5)
    assert small.grad_norm == pytest.approx(big.grad_norm, rel=1e-4)
    assert_close(small.end, big.end, 1e-5)


@pytest.mark.slow
def test_a_training_goes_on_from_strategy_to_strategy(train: Trainings) -> None:
    """Weights, moments, schedule and samples: each leg has the losses of the training that was never stopped."""
    expected = train("deepseek_v3", "one").loss
    legs = ["ddp", "fsdp2", "zero2", "tp", "zero3", "fsdp2_ep", "zero1", "one", "zero3", "ddp"]
    checkpoint: list[str] = []
    for number, strategy in enumerate(legs):
        leg = train.run("fit", "deepseek_v3", strategy, *checkpoint, callbacks=[PauseAfter(2 * number + 2)])
        assert leg.loss == pytest.approx({s: expected[s] for s in (2 * number + 1, 2 * number + 2)}, rel=1e-5), strategy
        checkpoint = [f"--ckpt_path={newest(leg.run)}"]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", tiers(PROCESSES, daily=["ddp", "fsdp2_ep", "zero3"]))
def test_a_checkpoint_is_tested_and_predicted_from(train: Trainings, strategy: str) -> None:
    checkpoint = newest(train("deepseek_v3", strategy).run)
    tested = train.test("deepseek_v3", strategy)
    assert tested == pytest.approx(train.test("deepseek_v3", "one"), rel=1e-5)
    train.run("predict", "deepseek_v3", strategy, f"--ckpt_path={checkpoint}", "--data.prompts=[the]")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", tiers(SHARDING, daily=["fsdp2_ep", "zero3"]))
def test_a_checkpoint_is_exported(train: Trainings, strategy: str, tmp_path: Path) -> None:
    checkpoint = newest(train("deepseek_v3", strategy).run)
    exported = tmp_path / "exported"
    train.run("export", "deepseek_v3", strategy, f"--checkpoint={checkpoint}", f"--output={exported}")
    weights = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).state_dict()
    for name, tensor in train("deepseek_v3", strategy).end.items():
        assert torch.equal(weights[name.removeprefix("model.")], tensor), name


SHORT = "--trainer.max_steps=6"


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp2_ep", "hsdp"])
def test_reducing_gradients_once_changes_no_number(train: Trainings, strategy: str) -> None:
    once = train("deepseek_v3", strategy, "--trainer.strategy.init_args.reduce_each_micro_batch=false", SHORT)
    plain = train("deepseek_v3", "one", SHORT)
    assert once.loss == pytest.approx(plain.loss, rel=1e-5)
    assert once.grad_norm == pytest.approx(plain.grad_norm, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "checkpointing"),
    tiers(
        [*((strategy, "full") for strategy in SHARDING), *((name, "selective") for name in ("fsdp2", "tp", "zero2"))],
        daily=[("fsdp2", "full"), ("zero3", "full"), ("zero2", "selective")],
    ),
)
def test_activation_checkpointing_changes_no_number(train: Trainings, strategy: str, checkpointing: str) -> None:
    flags = [f"--model.blocks.checkpointing={checkpointing}", "--model.blocks.checkpoint_every=2", SHORT]
    plain = train("deepseek_v3", "one", SHORT)
    assert train("deepseek_v3", strategy, *flags).loss == pytest.approx(plain.loss, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["one", "fsdp2", "zero2"])
def test_compiling_the_blocks_changes_no_number(train: Trainings, strategy: str) -> None:
    plain = train("llama", "one", SHORT)
    compiled = train("llama", strategy, "--model.blocks.compile=true", "--model.blocks.checkpointing=full", SHORT)
    assert compiled.loss == pytest.approx(plain.loss, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "strategy"),
    [("llama", "one"), ("llama", "fsdp2_tp"), ("llama", "tp"), ("llama", "zero3"), ("deepseek_v3", "fsdp2")],
)
def test_the_loss_in_chunks_changes_no_number(train: Trainings, model: str, strategy: str) -> None:
    """2 or 4 rows of 32 tokens in chunks of 24, the last one smaller.

    Llama's output layer is tied to the embeddings, in FSDP2's root group; DeepSeek-V3's is in a group with the norm.
    """
    plain, chunked = train(model, "one", SHORT), train(model, strategy, "--model.loss_chunk=24", SHORT)
    assert chunked.loss == pytest.approx(plain.loss, rel=1e-5)
    assert chunked.grad_norm == pytest.approx(plain.grad_norm, rel=1e-4)
    assert_close(chunked.end, plain.end, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", tiers(["one", *SHARDING], daily=["fsdp2", "zero3"]))
def test_bf16_mixed_stays_within_the_rounding_of_bf16(train: Trainings, strategy: str) -> None:
    exact = train("deepseek_v3", "one")
    rounded = train("deepseek_v3", strategy, "--trainer.precision=bf16-mixed")
    assert rounded.loss == pytest.approx(exact.loss, rel=2e-2)  # bf16 keeps 8 bits: 2**-8 = 0.4 % each operation
    kept = read_full(newest(rounded.run))["state_dict"]
    assert all(tensor.dtype == torch.float32 for tensor in kept.values()), "weights are kept in float32"


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp2", "zero3"])
def test_bf16_true_trains(train: Trainings, strategy: str) -> None:
    exact = train("llama", "one")
    rounded = train("llama", strategy, "--trainer.precision=bf16-true")
    assert rounded.loss == pytest.approx(exact.loss, rel=5e-2)
