"""Pairs are read and stay together; distillation: the divergence from a teacher, in chunks."""

import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from trainer_dev.data import DataModule
from trainer_dev.module import LanguageModule
from transformers import AutoConfig, AutoModelForCausalLM, DeepseekV3ForCausalLM, LlamaForCausalLM

from dist_template import InputError
from dist_template.callbacks import global_order
from dist_template.checkpoint import manifest
from dist_template.text import Mixture, Preferences, Ratings
from dist_template.text.batches.rows import NOT_COUNTED, PAIRS, PairRows
from dist_template.text.model.kernels import BOUNDS
from dist_template.text.objectives.distillation import Distillation, DistillationConfig
from dist_template.text.objectives.keys import PREFERENCES
from dist_template.text.objectives.pairs import PreferenceConfig
from dist_template.text.objectives.ratings import Distance
from tests.support import chats, pairs
from tests.support.chats import messages, write
from tests.support.parity import MODELS, Trainings
from tests.support.runs import logged, newest, only_run, run
from tests.support.strategies import flags_of
from tests.support.tiers import tiers

PROMPT, GOOD, BAD_ANSWER = ("user", "One?"), ("assistant", "Uno."), ("assistant", "Due.")
IN_MESSAGES = {"chosen": messages(GOOD), "rejected": messages(BAD_ANSWER)}
IN_MESSAGES["prompt"] = messages(PROMPT)
read = partial(chats.read, source=Preferences)
prepared = partial(chats.prepared, source=Preferences, seq_len=64)


def test_messages_may_be_answers_or_full_conversations(tmp_path: Path) -> None:
    full = {"chosen": messages(PROMPT, GOOD), "rejected": messages(PROMPT, BAD_ANSWER)}
    shapes = [IN_MESSAGES, full, full | {"prompt": "One?"}, IN_MESSAGES | {"prompt": "One?"}]
    for number, record in enumerate(shapes):
        assert read(write(tmp_path / f"{number}.jsonl", [record])) == [IN_MESSAGES]


TEXTS = {"prompt": "a ", "chosen": "b", "rejected": "c"}
WRONG: dict[str, Any] = {
    "needs chosen and rejected": {"prompt": "a", "chosen": "b"},
    "needs prompt, chosen and rejected in one form": {"chosen": "b", "rejected": "c"},
    "two different answers": TEXTS | {"rejected": "b"},
    "in one form: texts, or lists of messages": TEXTS | {"rejected": messages(GOOD)},
    "in one form": {"prompt": {"a": 1}, "chosen": {"a": 2}, "rejected": {"a": 3}},
}


def test_a_wrong_pair_is_one_sentence_with_file_and_line(tmp_path: Path) -> None:
    chats.check_refused(tmp_path / "bad.jsonl", TEXTS, WRONG, Preferences)


def sequences(data: DataModule, batch: dict[str, Any]) -> list[list[tuple[str, str]]]:
    """Each pair of a batch: (all inputs, labels that count) of chosen and rejected, decoded."""
    decode = data.text_tokenizer.decode
    inputs, labels = batch["input_ids"].flatten(), batch["labels"].flatten()
    found = []
    for edges in batch[PAIRS].tolist():
        spans = [slice(a, b) for a, b in zip(edges[:2], edges[1:3], strict=True)]
        counted = [labels[span][labels[span] != NOT_COUNTED] for span in spans]
        found.append([(decode(inputs[s]), decode(c)) for s, c in zip(spans, counted, strict=True)])
    return found


def test_a_pair_is_two_sequences_of_one_row_that_are_apart(tmp_path: Path) -> None:
    data = prepared(tmp_path, pairs.LENGTHS)
    rows = data.rows_of("train")
    numbers = [*range(len(rows)), global_order.PADDING]
    batch = rows.__getitems__(numbers)
    expected = {
        tuple((one["prompt"] + one[key], one[key] + "<|im_end|>") for key in ("chosen", "rejected"))
        for one in pairs.LENGTHS
    }
    assert {tuple(pair) for pair in sequences(data, batch)} == expected
    assert len(batch[PAIRS]) == len(pairs.LENGTHS), "a padding row has none"
    assert {*batch[PAIRS][:, :3].flatten().tolist()} <= {*batch[BOUNDS].tolist()}
    for a, b, c, _ in batch[PAIRS].tolist():
        assert a // 64 == (c - 1) // 64, "in one row"
        assert batch["position_ids"].flatten()[a:c].tolist() == [*range(b - a), *range(c - b)]


def test_a_pair_longer_than_a_row_is_dropped_and_counted(tmp_path: Path) -> None:
    data = prepared(tmp_path, [TEXTS, TEXTS | {"rejected": "d" * 60}, TEXTS | {"prompt": "a" * 99}])
    packing = data.rows_of("train").packing
    assert (packing.num_cut, packing.num_dropped, len(packing.documents)) == (0, 2, 1)
    with pytest.raises(InputError, match="which fill 0 sequences of data.seq_len 8"):
        prepared(tmp_path, [TEXTS | {"rejected": "d" * 60}], seq_len=8)


def test_attention_across_documents_and_a_hidden_answer_are_refused(tmp_path: Path) -> None:
    data = prepared(tmp_path, [TEXTS], across=True)
    with pytest.raises(InputError, match="cross_document_attention lets a pair's second answer"):
        data.check(1)
    hides = chats.UNTAGGED.replace("m.role == 'assistant'", "false").replace("{{ m.content }}", "")
    said = r"a.jsonl:1 of data.source says what the chat template .* the text of message 1 \(user\)"
    with pytest.raises(InputError, match=said):
        prepared(tmp_path, [IN_MESSAGES], hides)


RATED = [{"prompt": f"{i} ", "completion": "ab"[i % 2] * 3, "label": i > 4} for i in range(9)]
UNRATED: dict[str, Any] = {
    "needs label, true or false, and has 1": [RATED[0] | {"label": 1}],
    "needs prompt and completion in one form": [RATED[0] | {"completion": messages(GOOD)[0]}],
    "only answers of label false: give both kinds": RATED[:3],
    "has the only answer among its neighbours": [RATED[0], RATED[0] | {"label": True}],
}


def test_rated_answers_are_stored_with_another_answer(tmp_path: Path) -> None:
    """The last before it that differs, around the batch; and whether it was found good."""
    data = prepared(tmp_path, RATED, source=Ratings)
    rows = data.rows_of("train")
    batch = rows.__getitems__([*range(len(rows))])
    counted = [(pair[0][1][:3], pair[1][1][:3]) for pair in sequences(data, batch)]
    assert sorted(counted) == [("aaa", "bbb")] * 5 + [("bbb", "aaa")] * 4
    assert batch[PAIRS][:, 3].sum() == 4
    for sentence, records in UNRATED.items():
        with pytest.raises(InputError, match=sentence):
            prepared(tmp_path / "wrong", records, source=Ratings)


def test_pairs_and_rated_answers_are_not_mixed(tmp_path: Path) -> None:
    """DPO would train an answer against another record's."""
    sources = {"a": Preferences(["a.jsonl"]), "b": Ratings(["b.jsonl"])}
    with pytest.raises(InputError, match="or ratings: train on one after the other"):
        Mixture(sources, {"a": 1.0, "b": 1.0})
    assert Mixture({"b": sources["b"]}, {"b": 1.0}).ratings, "as kto asks"


@pytest.mark.parametrize("padding", [None, "<|endoftext|>"])
@pytest.mark.parametrize("kind", ["llama", "deepseek_v3"])
def test_a_reward_is_that_of_transformers(kind: str, padding: str | None, tmp_path: Path) -> None:
    """Of texts: at the last token, EOS, or before it if EOS is the padding."""
    data = prepared(tmp_path, pairs.LENGTHS[:9], seq_len=61)
    if padding:
        data.text_tokenizer.pad_token = padding
    preference = PreferenceConfig(loss="reward")
    architecture = yaml.safe_load(MODELS[kind]) | {"initializer_range": 0.5}
    module = LanguageModule(architecture, preference=preference)
    module.model = module.build_network(data).eval()
    rows = PairRows(data.corpus, "train", 61, reads_ends=True)
    batch = rows.__getitems__([*range(len(rows)), global_order.PADDING])
    module.active_objective = module.objective_for(data)
    values = module.active_objective.values(module, batch)
    found = [values[f"rewards/{key}"].tolist() for key in ("chosen", "rejected")]
    expected: list[Any] = [[], []]
    for pair in sequences(data, batch):
        for rewards, (text, _) in zip(expected, pair, strict=True):
            assert text.endswith("<|im_end|>")
            tokens = data.text_tokenizer(text, return_tensors="pt")["input_ids"]
            reward = module.model(input_ids=tokens).logits.item()
            longer = torch.nn.functional.pad(tokens, (0, 3), value=module.model.config.pad_token_id)
            assert module.model(input_ids=longer).logits.item() == pytest.approx(reward, abs=1e-5)
            rewards.append(reward)
    assert found == [pytest.approx(each, rel=1e-4, abs=1e-5) for each in expected]
    with torch.no_grad(), pytest.raises(InputError, match="scores answers and generates none"):
        module.generate(batch["input_ids"][:1])


def test_a_head_is_new_and_not_every_architecture_has_one(tmp_path: Path) -> None:
    data = prepared(tmp_path, [TEXTS])
    preference, llama = PreferenceConfig(loss="reward"), yaml.safe_load(MODELS["llama"])
    module = LanguageModule(llama | {"hidden_size": 1024}, preference=preference)
    torch.manual_seed(3)
    model: Any = module.build_network(data)
    assert model.score.weight.std().item() == pytest.approx(0.02, rel=0.1), "as the library's"
    model.save_pretrained(tmp_path / "model")
    again: Any = LanguageModule(pretrained=str(tmp_path / "model"), preference=preference)
    assert torch.equal(again.build_network(data).score.weight, model.score.weight)
    with pytest.raises(InputError, match="is a reward model, which scores and has no output layer"):
        LanguageModule(pretrained=str(tmp_path / "model")).build_network(data)
    with pytest.raises(InputError, match="no class with a reward head for olmoe"):
        LanguageModule(llama | {"model_type": "olmoe"}, preference=preference).build_network(data)


@pytest.mark.parametrize("loss", ["dpo", "ipo", "simpo", "orpo", "kto"])
def test_a_key_of_another_loss_is_refused(loss: Any, tmp_path: Path) -> None:
    """It has no effect; with the loss that reads it, it is taken."""
    source = Ratings(["a.jsonl"]) if loss == "kto" else Preferences(["a.jsonl"])
    setup: Any = SimpleNamespace(
        trains=True, data=SimpleNamespace(source=source), model_config=object()
    )
    of = {"margin": "simpo", "desirable_weight": "kto", "undesirable_weight": "kto"}
    for key, reads in of.items():
        given: dict[str, Any] = {"loss": loss, key: 3.0}
        module = LanguageModule(preference=PreferenceConfig(**given))
        found = list(module.refusals(setup))
        sentence = (
            f"model.preference.{key} is 3.0 and has no effect (model.preference.loss is {loss}"
        )
        assert [each.startswith(sentence) for each in found] == [True] * (loss != reads), found


LOSSES = {"dpo": -math.log(1 / (1 + math.exp(-0.5 * (-3.0 + 5.0))))}
LOSSES |= {"ipo": ((-3.0 / 2 + 5.0) - 1.0) ** 2}
ODDS = [math.exp(score) / (1 - math.exp(score)) for score in (-2.0, -7.0)]
LOSSES |= {"orpo": 2.0 + 0.5 * math.log(1 + ODDS[1] / ODDS[0])}
# A bad answer, whose reward is 0.5 (-4 + 1), at a distance of 0
LOSSES |= {"kto": 1 - 1 / (1 + math.exp(-1.5))}
LOSSES |= {"simpo": -math.log(1 / (1 + math.exp(-(0.5 * (-2.0 + 7.0) - 0.5))))}


@pytest.mark.parametrize("loss", LOSSES)
def test_the_losses_are_those_of_their_papers(loss: Any) -> None:
    """A chosen answer of 2 tokens and a rejected one of 1, of a model whose logits are given."""
    labels = torch.tensor([[NOT_COUNTED, 0, 0, NOT_COUNTED, 0]])
    policy = torch.tensor([-9.0, -1.0, -3.0, -9.0, -7.0])  # log-probabilities; -9: not counted
    reference = torch.tensor([-1e-9, -0.5, -0.5, -1e-9, -2.0])

    class Module(SimpleNamespace):
        def __call__(self, batch: Any) -> torch.Tensor:
            first = self.model[0]
            return torch.stack([first, torch.log1p(-first.exp())], -1)[None]

    models = [torch.nn.ParameterList([values]) for values in (policy, reference)]
    module = Module(
        model=models[0],
        reference=models[1],
        balancer=SimpleNamespace(counts_now=True),
        adapter=None,
        training=False,
        distance=Distance(),
    )
    batch = {"labels": labels, PAIRS: torch.tensor([[0, 3, 5, 0]])}
    values = PREFERENCES[loss](PreferenceConfig(loss=loss, beta=0.5)).values(module, batch)
    assert values["loss"].item() == pytest.approx(LOSSES[loss], rel=1e-5)
    assert values["rewards/accuracy"].item() == 1
    assert module.model is models[0] and module.balancer.counts_now


DIVERGENCE = 0.5  # the other half is cross-entropy


def test_the_objective_is_the_blend_of_cross_entropy_and_divergence() -> None:
    """By torch's own kl_div; the teacher's vocabulary is padded, one label does not count."""
    torch.manual_seed(0)
    logits, expected, labels = torch.randn(1, 5, 7), torch.randn(1, 5, 9), torch.arange(5)[None]
    labels[0, 3] = NOT_COUNTED
    sums = {"loss": torch.tensor(3.0), "token_accuracy": torch.tensor(2)}
    got = Distillation(DistillationConfig("t", 0.3, 2.0)).with_teacher(
        sums, logits, labels, expected
    )
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
def test_a_teacher_without_tokenizer_files_is_compared_by_its_size(
    flags: list[str], tmp_path: Path, capfd: Any
) -> None:
    """transformers makes up an empty tokenizer for Qwen3, whose tokens would be others; as the
    data's tokenizer, it is refused: it has no token for any text."""
    kind: Any = {"model_type": "qwen3", "hidden_size": 32, "intermediate_size": 64, "head_dim": 16}
    kind |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**kind, vocab_size=257))
    model.save_pretrained(tmp_path / "qwen")
    named = [*flags, f"--model.distillation.teacher={tmp_path}/qwen"]
    short = ["--trainer.max_steps=2", "--trainer.limit_val_batches=0"]
    assert run("fit", *named, *short) == 0
    out = capfd.readouterr().out
    assert "qwen' has no tokenizer that can be read: only the sizes of the vocabularies" in out
    assert (
        run("fit", *flags, "--data.tokenizer=Pretrained", f"--data.tokenizer.path={tmp_path}/qwen")
        == 2
    )
    assert "qwen' has no files of a tokenizer: give a folder with a" in capfd.readouterr().err


def test_a_run_of_ratings_from_before_resumes(flags: list[str], tmp_path: Path) -> None:
    """Its checkpoint has neither its objective's class nor the distance of the step before."""
    given = [flag for flag in flags if not flag.startswith(("--data.source", "--data.tokenizer"))]
    given += [*pairs.flags(tmp_path, pairs.RATED_LENGTHS, "Ratings"), "--data.seq_len=64"]
    given += ["--model.preference.loss=kto"]
    assert run("fit", *given, "--trainer.max_steps=2") == 0
    path = newest(only_run(tmp_path))
    state, entries = path / "checkpoint.pt", manifest.read(path)
    before = torch.load(state, weights_only=True)
    del before["state_dict"]["distance._extra_state"]
    torch.save(before, state)
    del entries["fixed_settings"]["model.objective"]
    entries["files"] = {state.name: [state.stat().st_size, manifest.crc32(state)]}
    (path / "manifest.json").write_text(manifest.rendered(entries))
    assert run("fit", *given, "--trainer.max_steps=4", "--ckpt_path=last") == 0
    assert [*logged(only_run(tmp_path), "train/loss")] == [1, 2, 3, 4]


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
