"""Distillation: the divergence from a teacher, in chunks of tokens, under every strategy."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, DeepseekV3ForCausalLM, LlamaForCausalLM

from dist_template.text.distillation import DistillationConfig, blended
from tests.support import chats, pairs
from tests.support.library import NOT_COUNTED
from tests.support.parity import MODELS, Trainings
from tests.support.runs import logged, newest, run
from tests.support.strategies import flags_of
from tests.support.tiers import tiers

DIVERGENCE = 0.5  # the other half is cross-entropy


def test_the_objective_is_the_blend_of_cross_entropy_and_divergence() -> None:
    """By torch's own kl_div; the teacher's vocabulary is padded, one label does not count."""
    torch.manual_seed(0)
    logits, expected, labels = torch.randn(1, 5, 7), torch.randn(1, 5, 9), torch.arange(5)[None]
    labels[0, 3] = NOT_COUNTED
    sums = {"loss": torch.tensor(3.0), "token_accuracy": torch.tensor(2)}
    got = blended(DistillationConfig("t", 0.3, 2.0), sums, logits, expected, labels)
    kept = (labels != NOT_COUNTED)[0]
    student, teacher = ((each[0, kept, :7] / 2).log_softmax(-1) for each in (logits, expected))
    divergence = F.kl_div(student, teacher, log_target=True, reduction="sum")
    assert list(got) == ["objective", "divergence", "loss", "token_accuracy"]
    assert got["divergence"].item() == pytest.approx(divergence.item(), rel=1e-6)
    assert got["objective"].item() == pytest.approx(0.7 * 3 + 0.3 * 4 * divergence.item(), rel=1e-6)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A teacher's flags; beside it is one with experts, for expert parallelism."""
    folder = tmp_path_factory.mktemp("distillation") / "llama"
    pairs.save_llama(folder, 260)  # 3 rows more than there are tokens
    config = AutoConfig.for_model(**yaml.safe_load(MODELS["deepseek_v3"]), vocab_size=257)
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder.with_name("deepseek_v3"))
    return [f"--model.distillation.teacher={folder}", f"--model.distillation.weight={DIVERGENCE}"]


CHUNKS = ["--model.loss_chunk=24"]
CASES: list[Any] = [("llama", each, []) for each in ("ddp", "fsdp2", "tp", "zero2", "zero3")]
CASES += [("deepseek_v3", "fsdp2_ep", [])]
CASES += [("llama", each, CHUNKS) for each in ("one", "fsdp2", "zero3")]
DAILY = [("llama", "fsdp2", []), ("llama", "one", CHUNKS)]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "strategy", "chunks"), tiers(CASES, DAILY))
def test_the_losses_are_one_processs(
    model: str, strategy: str, chunks: list[str], train: Trainings, teacher: list[str]
) -> None:
    teacher = [flag.replace("/llama", f"/{model}") for flag in teacher]
    one, many = train(model, "one", *teacher), train(model, strategy, *teacher, *chunks)
    for name in ("objective", "divergence", "loss"):
        expected, got = (logged(each.run, f"train/{name}") for each in (one, many))
        assert got == pytest.approx(expected, rel=2e-6), name
    assert many.grad_norm == pytest.approx(one.grad_norm, rel=1e-4)
    plain = train(model, "one").loss
    assert one.loss[1] == pytest.approx(plain[1], rel=1e-6) and one.loss[4] != plain[4]


@pytest.mark.nightly
def test_a_student_reaches_its_one_teacher(train: Trainings, teacher: Any, tmp_path: Path) -> None:
    alone = [teacher[0], "--model.distillation.weight=1", "--trainer.max_steps=40"]
    first = train("llama", "fsdp2", *alone)
    divergence = logged(first.run, "train/divergence")
    assert divergence[40] < 0.5 * divergence[1]
    torch.manual_seed(1)
    pairs.save_llama(tmp_path / "other", 257)
    other = [f"--model.distillation.teacher={tmp_path / 'other'}", *alone[1:]]
    with pytest.raises(RuntimeError, match="reference model"):
        train("llama", "fsdp2", *other, f"--ckpt_path={newest(first.run)}")


@pytest.mark.slow
def test_bad_input_is_one_sentence(flags: list[str], tmp_path: Path, capfd: Any) -> None:
    pairs.save_llama(tmp_path / "small", 99)
    pairs.save_llama(tmp_path / "tokens", 300)
    chats.tokenizer(tmp_path / "tokens")
    chats.write(tmp_path / "pairs.jsonl", pairs.RECORDS)
    of_pairs = ["--data.source=Preferences", f"--data.source.paths=[{tmp_path}/pairs.jsonl]"]
    cases: dict[str, list[str]] = {
        "nowhere' cannot be loaded": [f"{tmp_path}/nowhere"],
        "small' has another vocabulary (99 tokens) than data.tokenizer": [f"{tmp_path}/small"],
        "tokens' has another vocabulary (300 tokens) than": [f"{tmp_path}/tokens"],
        "data.source yields pairs: remove one": [f"{tmp_path}/small", *of_pairs],
        "distillation does not work in a pipeline": ["x", *flags_of("pp"), "--trainer.devices=2"],
        "distillation.weight is 1.5; give a share": ["x", "--model.distillation.weight=1.5"],
        "distillation.temperature is 0.0; give more": ["x", "--model.distillation.temperature=0"],
    }
    for sentence, (name, *more) in cases.items():
        assert run("fit", *flags, f"--model.distillation.teacher={name}", *more) == 2, sentence
        assert sentence in capfd.readouterr().err


def test_a_model_without_an_output_layer_is_refused(
    flags: list[str], teacher: list[str], monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    cases = {"the model (": LlamaForCausalLM, "/deepseek_v3' (": DeepseekV3ForCausalLM}
    for named, model in cases.items():
        with monkeypatch.context() as patched:
            patched.setattr(model, "get_output_embeddings", lambda _: None)
            assert run("fit", *flags, teacher[0].replace("/llama", "/deepseek_v3")) == 2, named
        sentence = f"{named}{model.__name__}) has no output layer (get_output_embeddings), so its"
        assert sentence in capfd.readouterr().err
