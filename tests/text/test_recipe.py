"""DeepSeek-V3's recipe: the sections of the report, its small form's run, and longer contexts."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from trainer_dev.data import DataModule
from transformers import AutoConfig, AutoModelForCausalLM

from dist_template import InputError
from dist_template.records import flatten
from dist_template.text import Pretrained, TextFiles, causal_lm, causal_lm_config
from dist_template.text.batches.rows import NOT_COUNTED
from tests import ROOT
from tests.support.parity import MODELS
from tests.support.runs import SHIPPED, Workers, logged, newest, only_run, run

RECIPES = SHIPPED / "recipe"
SECTION = re.compile(r"# (\d\.\d(?:\.\d)?|config\.json)")
ROW = re.compile(r"^\| `([\w.]+)` \| `(.+)` \| (\S+) \|$", re.M)
SCALE, FASTER = 1e8, 10  # of the small form: tokens, learning rates
SIZES = """num_hidden_layers hidden_size initializer_range num_attention_heads
num_key_value_heads qk_nope_head_dim v_head_dim qk_rope_head_dim kv_lora_rank q_lora_rank n_group
topk_group first_k_dense_replace intermediate_size n_routed_experts moe_intermediate_size
num_experts_per_tok""".split()  # what it has smaller
PHASES = ("data.global_batch_size", "model.mtp.weight", "model.balance.bias_update_speed")
RATE, ROPE = "model.optim.learning_rate", "rope_parameters"


def content(name: str) -> dict[str, Any]:
    return yaml.safe_load((RECIPES / f"{name}.yaml").read_text("utf-8"))


def value_of(name: str, path: str) -> Any:
    found: Any = content(name)
    for key in path.split("."):
        found = found[key]
    return found


def sections(name: str) -> dict[str, str]:
    """Key -> section of the report, of each line with both."""
    found, above = {}, list[tuple[int, str]]()
    for line in (RECIPES / f"{name}.yaml").read_text("utf-8").splitlines():
        if key := re.match(r"( *)(\w+):", line):
            above = [(depth, each) for depth, each in above if depth < len(key[1])]
            above.append((len(key[1]), key[2]))
            if section := SECTION.search(line):
                found[".".join(each for _, each in above)] = section[1]
    return found


def test_the_page_has_every_key_with_its_value_and_section() -> None:
    page = (ROOT / "docs" / "plan.md").read_text("utf-8")
    listed = dict[str, tuple[Any, str]]()
    for path, value, section in ROW.findall(page):
        for key, each in flatten({path: yaml.safe_load(value)}).items():
            listed[key] = (each, section)
    assert listed == {
        path: (value_of("deepseek_v3", path), section)
        for path, section in sections("deepseek_v3").items()
    }
    assert len(listed) > 35
    for size, tokens, batch in (("32k", 32_768, 1920), ("128k", 131_072, 480)):
        name = f"deepseek_v3_{size}"
        assert value_of(name, "data.seq_len") == tokens
        assert value_of(name, "data.global_batch_size") == batch
        assert re.search(rf"{tokens:,} .* {batch:,} ", page)


def test_the_small_form_has_the_recipes_mechanisms() -> None:
    """Sizes differ; tokens are divided by SCALE; batches and learning rates keep their ratios."""
    both = ("deepseek_v3", "deepseek_v3_small")
    full, small = (value_of(name, "model.architecture") for name in both)
    assert list(full) == list(small)
    assert {key for key in full if full[key] != small[key]} <= {*SIZES}
    for path in (*PHASES, RATE):
        of_full, of_small = (value_of(name, path) for name in both)
        assert len(of_full) == len(of_small)
        ratio = of_small[0]["value"] / of_full[0]["value"]
        for one, other in zip(of_full, of_small, strict=True):
            assert other["value"] == pytest.approx(one["value"] * ratio)
            assert other.get("shape") == one.get("shape")
            if "until" in one:
                assert other["until"] == pytest.approx(one["until"] / SCALE)
    assert value_of("deepseek_v3_small", "trainer.max_steps") < 150


def flags_of(corpus: Path, cache: Path, folder: Path, *names: str) -> list[str]:
    """The recipe's files, on the tests' corpus."""
    files = [f"--config=recipe/{name}" for name in ("deepseek_v3", *names)]
    data = ["--data.source=TextFiles", f"--data.source.paths=[{corpus}/*.txt]"]
    data += [f"--data.cache_dir={cache}", "--data.validation_share=0.15", "--data.test_share=0.2"]
    return [*files, *data, f"--run.root={folder}/runs", "--run.report=false"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, corpus: Path, cache: Path) -> Path:
    """The small form's run on two processes, and its export."""
    folder = tmp_path_factory.mktemp("recipe")
    flags = flags_of(corpus, cache, folder, "deepseek_v3_small")
    assert not run("prepare", *flags)
    Workers(2).run(["fit", *flags], folder / "record").check()
    found = only_run(folder, "deepseek_v3_small")
    assert not run("export", str(newest(found)), f"--output={folder}/exported")
    return folder


@pytest.mark.slow
def test_every_mechanism_acts_in_the_small_forms_run(trained: Path) -> None:
    found = only_run(trained, "deepseek_v3_small")

    def by_tokens(metric: str) -> dict[float, float]:
        """Tokens consumed before a step -> value at the step."""
        counts = logged(found, "train/tokens") | {0: 0.0}
        return {counts[step - 1]: value for step, value in logged(found, metric).items()}

    batches = logged(found, "train/global_batch_size")
    assert [*dict.fromkeys(batches.values())] == [4, 8, 12, 16, 20]
    assert sum(batches.values()) * 64 == logged(found, "train/tokens")[123] >= 148_000
    for metric, early, late, until in (
        ("train/mtp_weight", 0.3, 0.1, 100_000),
        ("moe/bias_update_speed", 0.01, 0.0, 143_000),
    ):
        for tokens, value in by_tokens(metric).items():
            assert value == (early if tokens < until else late), (metric, tokens)
    rates = by_tokens("train/learning_rate")
    constant = [rate for tokens, rate in rates.items() if 10_000 < tokens < 100_000]
    falling = [rate for tokens, rate in rates.items() if 100_000 <= tokens < 143_000]
    last = {tokens: round(rate, 7) for tokens, rate in rates.items() if tokens >= 143_000}
    assert {*constant} == {2.2e-3} and rates[256] == pytest.approx(2.2e-3 / 5)
    assert falling == sorted(falling, reverse=True) and len({*falling}) > 20
    assert {*last.values()} == {2.2e-4, 7.3e-5}
    assert all((rate == 2.2e-4) == (tokens < 146_330) for tokens, rate in last.items())
    for metric in ("train/loss", "train/mtp_loss", "eval/loss", "eval/mtp_loss"):
        series = [*logged(found, metric).values()]
        assert series[-1] < 0.6 * series[0], metric
    assert min(logged(found, "moe/sequence_loss").values()) >= 0.99


LONGER = """
data: {seq_len: 128, global_batch_size: 4, micro_batch_size: 1}
model: {architecture: {max_position_embeddings: 2560, rope_parameters: ROPE}}
trainer:
  max_steps: 2
  val_check_interval: 2
  limit_val_batches: 1.0
  strategy: {class_path: MeshStrategy, init_args: {cp_size: 2}}
"""
YARN = {"rope_type": "yarn", "factor": 40.0, "beta_slow": 1.0, "beta_fast": 32.0}
OF_DEEPSEEK = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}


@pytest.mark.slow
def test_a_longer_context_starts_from_the_phase_before(
    trained: Path, corpus: Path, cache: Path, tmp_path: Path
) -> None:
    """Sequences of twice the length, shared by two ranks, start at transformers' own loss of the
    exported weights with YaRN."""
    own, exported = tmp_path / "longer.yaml", trained / "exported"
    assert OF_DEEPSEEK.items() <= value_of("deepseek_v3_32k", f"model.architecture.{ROPE}").items()
    rope = OF_DEEPSEEK | {"original_max_position_embeddings": 64}
    own.write_text(LONGER.replace("ROPE", json.dumps(rope)), "utf-8")
    flags = flags_of(corpus, cache, tmp_path, "deepseek_v3_small", "deepseek_v3_32k")
    flags += [f"--config={own}", f"--model.pretrained={exported}"]
    flags += [f"--data.tokenizer.path={exported}"]
    assert not run("prepare", *flags)
    Workers(2).run(["fit", *flags], tmp_path / "record").check()
    options: Any = {"max_position_embeddings": 2560, ROPE: rope | {"rope_theta": 10_000.0}}
    model = AutoModelForCausalLM.from_pretrained(exported, **options).eval()
    shares: Any = {"validation_share": 0.15, "test_share": 0.2}
    names, tokenizer = TextFiles([f"{corpus}/*.txt"]), Pretrained(str(exported))
    data = DataModule(names, tokenizer, 128, 4, cache_dir=str(cache), **shares)
    tokens = torch.from_numpy(data.require().tokens("validation").astype("int64"))
    rows = torch.cat([tokens.unfold(0, 129, 128), tokens[None, -129:]])  # the last overlaps
    labels = rows[:, 1:].clone()
    labels[-1, : -(len(tokens) - 1) % 128] = NOT_COUNTED
    with torch.no_grad():
        logits = model(rows[:, :-1], use_cache=False).logits
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=NOT_COUNTED).item()
    found = only_run(tmp_path, "deepseek_v3_32k")
    assert len(rows) > 3 and logged(found, "eval/loss")[0] == pytest.approx(loss, rel=1e-5)
    before = logged(only_run(trained, "deepseek_v3_small"), "eval/loss")
    assert logged(found, "eval/loss")[0] < 0.7 * before[0], "it starts from trained weights"


@pytest.fixture(params=["deepseek_v3", "glm", "llama"])
def weights(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Weights of 64 positions, with a base of their own; glm rotates half of a head."""
    torch.manual_seed(0)
    fields = yaml.safe_load(MODELS.get(request.param, MODELS["llama"])) | {"vocab_size": 64}
    fields |= {"model_type": request.param, "max_position_embeddings": 64, "pad_token_id": None}
    config = AutoConfig.for_model(**fields, **{ROPE: {"rope_theta": 5e3, "rope_type": "default"}})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    return tmp_path


DATA: Any = SimpleNamespace(vocab_size=64, eos_token_id=1, seq_len=256)


def test_rope_parameters_replace_the_weights_own(weights: Path) -> None:
    rope = OF_DEEPSEEK if "deepseek" in (weights / "config.json").read_text() else YARN
    config = causal_lm_config({ROPE: rope}, str(weights), None, DATA)
    before = AutoConfig.from_pretrained(weights).rope_parameters
    given = before | rope | {"original_max_position_embeddings": 64}
    options: Any = {"max_position_embeddings": 256, ROPE: given}
    expected = AutoModelForCausalLM.from_pretrained(weights, **options).eval()
    tokens = torch.randint(64, (2, 256))
    with torch.no_grad():
        logits = causal_lm(config, str(weights), 64).eval()(tokens).logits
        assert torch.equal(logits, expected(tokens).logits)
        assert not torch.equal(logits, AutoModelForCausalLM.from_pretrained(weights)(tokens).logits)
    assert config.max_position_embeddings == 256


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"hidden_size": 48}, "hidden_size is 48, and the weights of model.pretrained have 32"),
        ({"model_type": "gpt2"}, "only rope_parameters and max_position_embeddings may differ"),
        ({ROPE: 40}, "rope_parameters is 40, and the weights"),
        ({ROPE: {"rope_type": "yann"}}, "give `rope_type`, one of default, dynamic, linear"),
        ({ROPE: {"rope_type": "yarn"}}, "Missing required keys"),
    ],
)
def test_other_fields_are_refused_with_weights(weights: Path, given: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        causal_lm_config({ROPE: YARN} | given, str(weights), None, DATA)
