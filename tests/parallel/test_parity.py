"""Every strategy trains to the same numbers as one process.

Each training runs once, and several tests read its record. Labels are masked unevenly over rows, so
that a loss averaged per rank or per micro-batch would be detected."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from dist_template.checkpoint.formats import read_full
from tests.support import chats, parity
from tests.support.parity import CLIP, PROCESSES, STEPS, PauseAfter, Trainings
from tests.support.runs import newest
from tests.support.strategies import ARGS
from tests.support.tiers import tiers

pytestmark = pytest.mark.slow
FOR_EXPERTS = {"fsdp2_ep", "fsdp2_tp_ep", "pp_ep"}
COMBINED = {"zero2_offload", "zero3_offload", "fsdp2_tp_ep"}  # of strategies that are here too
DAILY = [("mtp", "pp"), *(("deepseek_v3", name) for name in PROCESSES if name not in COMBINED)]
CASES = [("deepseek_v3", strategy) for strategy in PROCESSES]
CASES += [("llama", strategy) for strategy in PROCESSES if strategy not in FOR_EXPERTS]
CASES += [("deepseek_v4", name) for name in ("ddp", "fsdp2_ep", "pp_ep", "tp", "zero3")]
CASES += [("deepseek_v32", name) for name in PROCESSES if name != "cp"]  # with MTP, as GLM-5
CASES += [("glm_moe_dsa", name) for name in PROCESSES if name != "cp" and name[:2] != "pp"]
CASES += [("mtp", name) for name in PROCESSES]


@pytest.mark.parametrize(("model", "strategy"), tiers(CASES, DAILY))
def test_a_strategy_trains_to_the_numbers_of_one_process(
    train: Trainings, model: str, strategy: str
) -> None:
    one, many = train(model, "one"), train(model, strategy)
    assert sum(norm > CLIP for norm in one.grad_norm.values()) >= 3, "gradients were clipped"
    assert list(one.loss) == list(range(1, STEPS + 1))
    for name, tensor in one.start.items():
        assert torch.equal(tensor, many.start[name]), f"{name}: initial weights are bit-identical"
    parity.assert_trains_alike(many, one)
    rates, expected = (run.metric("train/learning_rate") for run in (many, one))
    assert rates == pytest.approx(expected, rel=1e-12)
    assert list(one.eval()) == [STEPS // 2, STEPS]
    expected, samples = one.rows(), many.rows()
    assert samples.keys() == expected.keys()
    for step in expected:  # their order depends on the ranks
        assert set(samples[step]) == set(expected[step]), "a global batch has the same samples"


@pytest.mark.parametrize("strategy", tiers(["ddp", "fsdp2", "tp", "cp", "pp", "zero3"], daily=[]))
def test_modules_learn_the_answers_of_conversations(train: Trainings, strategy: str) -> None:
    """Several in a row; the labels of questions do not count."""
    folder = train.folder / "chats"
    if not folder.exists():
        chats.taught(chats.tokenizer(folder) / "chats.jsonl")
    given = [f"--data.source.paths=[{folder}/chats.jsonl]", f"--data.tokenizer.path={folder}"]
    given = ["--data.source=Chat", "--data.tokenizer=Pretrained", *given, "--data.seq_len=128"]
    one = train("mtp", "one", *given, prelude=parity.keep_labels)
    many = train("mtp", strategy, *given, prelude=parity.keep_labels)
    parity.assert_trains_alike(many, one)


@pytest.mark.parametrize("strategy", tiers(["one", "fsdp2", "pp", "zero3"], daily=[]))
def test_exported_modules_are_trained_further(
    train: Trainings, strategy: str, tmp_path: Path
) -> None:
    trained = train("mtp", "one")
    given = [f"--checkpoint={newest(trained.run)}", f"--output={tmp_path / 'out'}"]
    train.run("export", "mtp", "one", *given)
    given = [
        f"--model.pretrained={tmp_path / 'out'}",
        "--trainer.max_steps=1",
        "--model.optim.warmup=0",
    ]
    one, many = (train.run("fit", "mtp", name, *given) for name in ("one", strategy))
    for name, tensor in trained.end.items():
        assert torch.equal(many.start[name], tensor), name
    expected = one.metric("train/mtp_loss")
    assert expected[1] < trained.metric("train/mtp_loss")[1] - 0.1, "it starts where it ended"
    assert many.metric("train/mtp_loss") == pytest.approx(expected, rel=1e-6)


LEGS = [
    ("deepseek_v3", "one fsdp2 zero2 tp zero3"),
    ("deepseek_v3", "zero3 tp zero2 fsdp2 one"),
    ("mtp", "pp fsdp2 zero3 cp one"),
]


@pytest.mark.parametrize(("model", "strategies"), tiers(LEGS, daily=LEGS[:1]))
def test_a_training_changes_its_strategy(train: Trainings, model: str, strategies: str) -> None:
    """Weights, moments, schedule and samples: each leg has an uninterrupted training's losses."""
    expected, legs = train(model, "one").loss, strategies.split()
    checkpoint: list[str] = []
    for step, strategy in enumerate(legs, start=1):
        pause = [PauseAfter(step)] if step < len(legs) else []
        leg = train.run("fit", model, strategy, *checkpoint, callbacks=pause)
        steps = [step] if pause else range(step, STEPS + 1)
        assert leg.loss == pytest.approx({s: expected[s] for s in steps}, rel=1e-5), strategy
        checkpoint = [f"--ckpt_path={newest(leg.run)}"]


@pytest.mark.parametrize("strategy", tiers(PROCESSES, daily=["fsdp2_ep", "zero3"]))
def test_a_checkpoint_serves_every_verb(train: Trainings, strategy: str, tmp_path: Path) -> None:
    trained, exported, metrics = train("deepseek_v3", strategy), tmp_path / "exported", []
    for name in ("one", strategy):
        checkpoint = f"--ckpt_path={newest(train('deepseek_v3', name).run)}"
        metrics += train("deepseek_v3", name, checkpoint, verb="test").eval("test").values()
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-5)
    train.run("predict", "deepseek_v3", strategy, checkpoint, "--data.prompts=[the]")
    given = [checkpoint.replace("ckpt_path", "checkpoint"), f"--output={exported}"]
    train.run("export", "deepseek_v3", strategy, *given)
    weights = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).state_dict()
    given = ["--model.architecture={}", f"--model.pretrained={exported}"]
    started = train.run("fit", "deepseek_v3", strategy, *given, callbacks=[PauseAfter(1)]).start
    for name, tensor in trained.end.items():
        assert torch.equal(weights[name.removeprefix("model.")], tensor), name
        assert torch.equal(started[name], tensor), f"{name} is read from files in every division"


BLOCKS = "--model.blocks."
FULL = [f"{BLOCKS}checkpointing=full", f"{BLOCKS}checkpoint_every=2"]
COMPILED = [f"{BLOCKS}compile=true", f"{BLOCKS}checkpointing=full"]
ONCE, CHUNKS = [f"{ARGS}.reduce_each_micro_batch=false"], ["--model.loss_chunk=24"]
IN_PART, MIXED = [f"{BLOCKS}checkpointing=selective"], ["--trainer.precision=bf16-mixed"]
SHARDING = ["ddp", "tp", "fsdp2_ep", "zero2", "zero3"]
# 2 or 4 rows of 32 tokens, the last chunk smaller; Llama's output layer is tied.
OPTIONS = {  # model, flags, tolerance of the loss, strategies in `make test`, others
    "reduced once, recomputed, chunks": (
        "deepseek_v3",
        ONCE + FULL + CHUNKS,
        1e-5,
        ["fsdp2"],
        ["fsdp2_ep", "hsdp"],
    ),
    "recomputed": ("deepseek_v3", FULL, 1e-5, [], SHARDING),
    "recomputed, chunks": ("llama", FULL + CHUNKS, 1e-5, ["zero3"], ["cp"]),
    "in part": ("deepseek_v3", IN_PART, 1e-5, [], ["fsdp2", "zero2"]),
    "in part, chunks": ("llama", IN_PART + CHUNKS, 1e-5, ["cp", "tp"], ["one", "fsdp2_tp"]),
    "compiled": ("llama", COMPILED, 1e-5, ["zero2"], ["one", "fsdp2", "cp"]),
    # bf16 keeps 8 bits: 2**-8 = 0.4 % each operation
    "bf16-mixed": ("deepseek_v3", MIXED, 2e-2, ["fsdp2"], ["one", *SHARDING]),
    "bf16-true": ("llama", ["--trainer.precision=bf16-true"], 5e-2, ["zero3"], ["fsdp2"]),
}
DAILY_WITH = [(name, strategy) for name, option in OPTIONS.items() for strategy in option[3]]
WITH = [(name, strategy) for name, option in OPTIONS.items() for strategy in option[3] + option[4]]


@pytest.mark.parametrize(("option", "strategy"), tiers(WITH, DAILY_WITH))
def test_an_option_changes_no_number(train: Trainings, option: str, strategy: str) -> None:
    model, flags, tolerance, *_ = OPTIONS[option]
    plain, changed = train(model, "one"), train(model, strategy, *flags)
    assert changed.loss == pytest.approx(plain.loss, rel=tolerance)
    if tolerance < 1e-4:
        assert changed.grad_norm == pytest.approx(plain.grad_norm, rel=1e-4)
    if option == "bf16-mixed":
        kept = read_full(newest(changed.run))["state_dict"]
        assert {tensor.dtype for tensor in kept.values()} == {torch.float32}, "weights stay so"
