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
from transformers import AutoConfig, AutoModelForCausalLM

from dist_template import InputError
from dist_template.text import causal_lm, causal_lm_config
from tests import ROOT
from tests.support.runs import SHIPPED, Workers, logged, newest, only_run, run

RECIPES = SHIPPED / "recipe"
SECTION = re.compile(r"# (\d\.\d(?:\.\d)?|config\.json)")
ROW = re.compile(r"^\| `([\w.]+)` \| `(.+)` \| (\S+) \|$", re.M)
SCALE, FASTER = 1e8, 10  # of the small form: tokens, learning rates
SIZES = {  # what it has smaller
    *"num_hidden_layers hidden_size initializer_range num_attention_heads num_key_value_heads".split(),
    *"qk_nope_head_dim v_head_dim qk_rope_head_dim kv_lora_rank q_lora_rank n_group topk_group".split(),
    *"first_k_dense_replace intermediate_size n_routed_experts moe_intermediate_size".split(),
    "num_experts_per_tok",
}
PHASES = ("data.global_batch_size", "model.mtp.weight", "model.balance.bias_update_speed")
RATE = "model.optim.learning_rate"


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
        read = yaml.safe_load(value)
        for key, each in read.items() if isinstance(read, dict) else [("", read)]:
            listed[f"{path}.{key}".strip(".")] = (each, section)
    assert listed == {
        path: (value_of("deepseek_v3", path), section)
        for path, section in sections("deepseek_v3").items()
    }
    assert len(listed) > 35
    for name, tokens, batch in (("deepseek_v3_32k", 32_768, 1920), ("deepseek_v3_128k", 131_072, 480)):
        assert value_of(name, "data.seq_len") == tokens
        assert value_of(name, "data.global_batch_size") == batch
        assert re.search(rf"{tokens:,} .* {batch:,} ", page)


def test_the_small_form_has_the_recipes_mechanisms() -> None:
    """Sizes differ; tokens are divided by SCALE; batches and learning rates keep their ratios."""
    full, small = (value_of(name, "model.architecture") for name in ("deepseek_v3", "deepseek_v3_small"))
    assert list(full) == list(small)
    assert {key for key in full if full[key] != small[key]} <= SIZES
    for path in (*PHASES, RATE):
        of_full, of_small = value_of("deepseek_v3", path), value_of("deepseek_v3_small", path)
        assert len(of_full) == len(of_small)
        ratio = of_small[0]["value"] / of_full[0]["value"]
        for one, other in zip(of_full, of_small, strict=True):
            assert other["value"] == pytest.approx(one["value"] * ratio)
            assert other.get("shape") == one.get("shape")
            if "until" in one:
                assert other["until"] == pytest.approx(one["until"] / SCALE)
    steps = value_of("deepseek_v3_small", "trainer.max_steps")
    assert steps < 150


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

    def by_tokens(metric: str, before: bool = True) -> dict[float, float]:
        """Tokens consumed before a step, or after it -> value at the step."""
        counts = logged(found, "train/tokens") | {0: 0.0}
        return {counts[step - before]: value for step, value in logged(found, metric).items()}

    batches = logged(found, "train/global_batch_size")
    assert [*dict.fromkeys(batches.values())] == [4, 8, 12, 16, 20]
    assert sum(batches.values()) * 64 == logged(found, "train/tokens")[123] >= 148_000
    for metric, early, late, until in (
        ("train/mtp_weight", 0.3, 0.1, 100_000),
        ("moe/bias_update_speed", 0.003, 0.0, 143_000),
    ):
        for tokens, value in by_tokens(metric).items():
            assert value == (early if tokens < until else late), (metric, tokens)
    rates = by_tokens("train/learning_rate", before=False)  # of the next step
    constant = [rate for tokens, rate in rates.items() if 10_000 < tokens < 100_000]
    falling = [rate for tokens, rate in rates.items() if 100_000 <= tokens < 143_000]
    last = {tokens: round(rate, 7) for tokens, rate in rates.items() if tokens >= 143_000}
    assert {*constant} == {2.2e-3} and rates[256] == pytest.approx(2.2e-3 / 5)
    assert falling == sorted(falling, reverse=True) and len({*falling}) > 20
    assert {*last.values()} == {2.2e-4, 7.3e-5} and all(
        (rate == 2.2e-4) == (tokens < 146_330) for tokens, rate in last.items()
    )
    for metric in ("train/loss", "train/mtp_loss", "eval/loss", "eval/mtp_loss"):
        series = [*logged(found, metric).values()]
        assert series[-1] < 0.6 * series[0], metric
    assert min(logged(found, "moe/sequence_loss").values()) >= 0.99
