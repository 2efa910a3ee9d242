"""`auto`: the batch and the learning rate of a fine-tuning, and the steps that it prints."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from lightning import LightningDataModule
from trainer_dev.data import DataModule
from trainer_dev.module import LanguageModule
from transformers import LlamaConfig

from dist_template import AdapterConfig, InputError, OptimConfig, TrainingModule
from dist_template.cli.chosen import Choice
from dist_template.text import auto
from dist_template.text.objectives.keys import PREFERENCES
from dist_template.text.objectives.next_token import NextToken
from dist_template.text.objectives.pairs import PreferenceConfig
from tests.support import chats
from tests.support.runs import CONFIGS, Workers, run
from tests.support.strategies import flags_of


@pytest.mark.parametrize(
    ("rows", "epochs", "multiple", "size"),
    [
        (7, 3, 1, 1),  # 150 short conversations: each row is a step
        (23, 3, 1, 1),
        (42, 3, 1, 1),
        (43, 3, 1, 2),  # 129 rows to train on: 64 steps of two
        (2000, 3, 1, 32),
        (10**9, 1, 1, 32),
        (9, 3, 8, 8),  # eight ranks
        (3, 1000, 1, 2),  # many epochs of three rows
        (10, 100, 6, 6),  # eight rows would be twelve
        (2000, 3, 24, 48),  # a multiple of the ranks, although more than the most
        (1, 1, 1, 1),
    ],
)
def test_a_batch_leaves_enough_steps(rows: int, epochs: int, multiple: int, size: int) -> None:
    assert auto.batch_for(rows, epochs, multiple) == size


@pytest.mark.parametrize(
    ("rows", "multiple", "size"), [(97, 1, 1), (98, 1, 2), (96, 1, 4), (30, 6, 6), (20, 6, 6)]
)
def test_a_batch_divides_the_rows_that_a_limit_leaves(rows: int, multiple: int, size: int) -> None:
    """Where nothing divides them, it is the least, and the check of the limit has the sentence."""
    assert auto.batch_for(rows, 3, multiple, divides=True) == size


def rate(width: int = 2000, steps: float = 100, **given: Any) -> float:
    """The rate for a Llama of that width."""
    fields = {"pretrained": "folder", "adapter": None, "preference": PreferenceConfig()}
    data = SimpleNamespace(source=SimpleNamespace(pairs="preference" in given))
    module = SimpleNamespace(**fields | given)
    preference = PREFERENCES[module.preference.loss](module.preference)
    module.objective_for = lambda data: preference if data.source.pairs else NextToken()
    return auto.rate_for(module, data, LlamaConfig(hidden_size=width, num_attention_heads=4), steps)


def test_a_rate_falls_with_the_width_and_is_ten_times_for_adapters() -> None:
    assert rate() == 5e-5 and rate(8192) == pytest.approx(1.7e-5)
    assert rate(adapter=AdapterConfig()) == 5e-4
    assert rate(steps=10) == rate(steps=10_000), "of conversations, steps do not matter"


@pytest.mark.parametrize("loss", ["dpo", "ipo", "simpo", "kto"])
def test_a_preference_moves_as_far_in_few_steps_as_in_many(loss: Any) -> None:
    given = PreferenceConfig(loss=loss)
    steps = [5, 20, 40, 1000, 10**6]
    rates = [rate(steps=each, preference=given) for each in steps]
    assert rates == [1.3e-5, 1.3e-5, 6.3e-6, 1e-6, 1e-6]
    assert rate(steps=0, preference=given) == 1.3e-5, "trainer.max_epochs 0"
    # eight billion parameters, as published: 5e-7 for all weights
    assert rate(4096, 2000, preference=given) == pytest.approx(5e-7, rel=0.2)


@pytest.mark.parametrize("loss", ["reward", "orpo"])
def test_a_reward_model_and_orpo_have_a_third(loss: Any) -> None:
    assert rate(preference=PreferenceConfig(loss=loss), steps=10) == 1.7e-5


def test_there_is_no_rate_for_an_unknown_training() -> None:
    with pytest.raises(InputError, match="model.pretrained is null: give a number"):
        rate(pretrained=None)
    with pytest.raises(InputError, match="needs a model whose configuration has hidden_size"):
        auto.rate_for(SimpleNamespace(pretrained="folder"), None, None, 100)


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    """A fine-tuning of 160 conversations with the defaults of configs/finetune.yaml."""
    model = chats.weights(chats.tokenizer(tmp_path / "model"))
    return f"""--config={CONFIGS}/finetune.yaml --run.root={tmp_path}/runs --run.report=false
        --data.source.paths=[{chats.taught(tmp_path / "chats.jsonl")}] --data.seq_len=128
        --data.cache_dir={tmp_path}/cache --model.pretrained={model} --data.prompts=[]
        --data.tokenizer.path={model} --trainer.limit_val_batches=0 --trainer.accelerator=cpu
        --trainer.logger=false --trainer.enable_progress_bar=false""".split()


def numbers(folder: Path) -> tuple[Any, Any]:
    """The batch and the rate of the only run, in its config.yaml."""
    (path,) = folder.glob("runs/finetune/*/config.yaml")
    written = yaml.safe_load(path.read_text("utf-8"))
    return written["data"]["global_batch_size"], written["model"]["optim"]["learning_rate"]


def test_a_fine_tuning_says_what_it_has_chosen(
    flags: list[str], tmp_path: Path, capfd: Any
) -> None:
    few = ["--trainer.devices=1", "--trainer.max_epochs=2", "--trainer.limit_train_batches=2"]
    few.append("--trainer.max_steps=50")  # the epochs end before
    assert run("fit", *flags, *few) == 0
    shown = capfd.readouterr().out
    batch, rate = numbers(tmp_path)
    assert batch == 1 and f"data.global_batch_size auto: {batch}\n" in shown
    assert f"model.optim.learning_rate auto: {rate:g}\n" in shown
    assert "training has 4 optimizer steps (2 x 2), each of 1 row of 128 tokens\n" in shown
    warned = "warning: 4 optimizer steps, and hardly anything is learned in fewer than 5: give"
    assert f"{warned} more data, or raise trainer.max_epochs (2)\n" in shown, "not the batch"
    assert "finished after step 4\n" in shown


@pytest.mark.slow
def test_a_resume_keeps_what_was_chosen(flags: list[str], tmp_path: Path, capfd: Any) -> None:
    """Two ranks have chosen two rows; one rank alone would choose one, and more steps no less."""
    two = ["--trainer.devices=2", *flags_of("fsdp2"), "--trainer.max_steps=2"]
    assert run("prepare", *flags) == 0
    Workers(2).run(["fit", *flags, *two], tmp_path / "two").check()
    before = numbers(tmp_path)
    assert before[0] == 2
    one = ["--trainer.devices=1", "--trainer.max_steps=3", "--ckpt_path=last"]
    capfd.readouterr()
    assert run("fit", *flags, *one) == 0
    shown = capfd.readouterr().out
    assert numbers(tmp_path) == before and "data.global_batch_size auto: 2\n" in shown
    assert "->" not in shown, "nothing has changed since the checkpoint"
    assert run("validate", *flags[:-4], *flags[-3:], "--trainer.devices=1") == 0
    assert run("fit", *flags, *one[:1], *one[2:], "--data.global_batch_size=4") == 2
    assert "is 4, and 2 in the checkpoint, but the schedule cosine" in capfd.readouterr().err
    assert run("fit", *flags, *one, "--data.micro_batch_size=4") == 2
    sentence = (
        "auto keeps the checkpoint's 2, and these ranks and micro-batches need a multiple of 4"
    )
    assert sentence in capfd.readouterr().err


@pytest.mark.slow
def test_the_steps_of_a_reward_model_are_counted(tmp_path: Path, capfd: Any) -> None:
    """It reads a pair's last tokens too, so fewer pairs fit into a row: two here, else three."""
    model = chats.weights(chats.tokenizer(tmp_path / "model"))
    answers = [{"prompt": "ab", "chosen": f"{i:02}", "rejected": f"{i + 1:02}"} for i in range(24)]
    path = chats.write(tmp_path / "pairs.jsonl", answers)
    given = f"""--config=preferences --run.root={tmp_path}/runs --run.report=false
        --data.source.paths=[{path}] --data.seq_len=27 --data.cache_dir={tmp_path}/cache
        --data.validation_share=0 --data.test_share=0 --data.prompts=[] --trainer.logger=false
        --model.pretrained={model} --data.tokenizer.path={model} --trainer.accelerator=cpu
        --trainer.devices=1 --model.preference.loss="""
    for loss, steps in (("dpo", 8), ("reward", 12)):
        assert run("fit", *(given + loss).split(), f"--run.name={loss}") == 0
        shown = capfd.readouterr().out
        assert f"training has {steps} optimizer steps (1 x {steps})" in shown
        assert f"finished after step {steps}\n" in shown


def test_accumulation_by_the_trainer_replaces_auto(
    flags: list[str], tmp_path: Path, capfd: Any
) -> None:
    more = ["--trainer.devices=1", "--trainer.max_steps=1", "--trainer.accumulate_grad_batches=3"]
    assert run("fit", *flags, *more, "--model.optim.learning_rate=0.001") == 0
    assert numbers(tmp_path) == (3, 0.001)
    assert "data.global_batch_size is 3 (before: auto)" in capfd.readouterr().out
    other = run("fit", *flags, "--optimizer=SGD")
    assert other == 2 and "auto is a rate of AdamW: give --optimizer.lr" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("more", "steps"),
    [
        ("--trainer.fast_dev_run=1 --data.global_batch_size=4", 1),  # ends within a step
        ("--trainer.fast_dev_run=3 --data.global_batch_size=2", 2),
        ("--trainer.limit_train_batches=3", 9),  # 129 rows have 64 steps of two, which do not fit
        ("--trainer.limit_train_batches=0.5", 63),  # of a half of them one row is a step
        ("--trainer.max_epochs=0", 0),
    ],
)
def test_as_many_steps_are_trained_as_are_said(
    flags: list[str], capfd: Any, more: str, steps: int
) -> None:
    assert run("fit", *flags, "--trainer.devices=1", *more.split()) == 0
    shown = capfd.readouterr().out
    assert f"training has {steps} optimizer step{'s' * (steps != 1)} (" in shown
    assert f"finished after step {steps}\n" in shown


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (
            ["--data.global_batch_size=[{value: 2, until: 512}, {value: 4}]"],
            "set trainer.max_steps",
        ),
        (["--data.global_batch_size=4", "--trainer.limit_train_batches=6"], "give a multiple of 4"),
    ],
)
def test_no_steps_are_said_of_a_training_that_is_refused(
    flags: list[str], capfd: Any, more: list[str], sentence: str
) -> None:
    assert run("fit", *flags, "--trainer.devices=1", *more) == 2
    shown = capfd.readouterr()
    assert sentence in shown.err and "optimizer steps" not in shown.out


def test_the_rate_of_another_optimizer_is_recorded(
    flags: list[str], tmp_path: Path, capfd: Any
) -> None:
    other = ["--optimizer=AdamW", "--optimizer.lr=0.0001", "--trainer.max_steps=1"]
    assert run("fit", *flags, "--trainer.devices=1", *other) == 0
    assert numbers(tmp_path)[1] == 1e-4, "not one that AdamW without it would have"
    assert "learning_rate auto" not in capfd.readouterr().out


def test_a_plain_module_has_no_rate_of_its_own() -> None:
    plain = TrainingModule(OptimConfig(learning_rate="auto"))
    for data in (LightningDataModule(), DataModule()):
        with pytest.raises(InputError, match="is for a TextModule on PackedText, not for Training"):
            list(Choice({}, None, plain, data, None, None, 1).lines())


def test_a_script_gives_numbers() -> None:
    """The rows of a data module of one's own Trainer are known later than its optimizer."""
    with pytest.raises(InputError, match=r"data.global_batch_size auto is chosen by `fit`"):
        DataModule(global_batch_size="auto").check(1)
    trained = LanguageModule(optim=OptimConfig(learning_rate="auto"))
    with pytest.raises(InputError, match=r"model.optim.learning_rate auto is chosen by `fit`"):
        trained.configure_optimizers()
