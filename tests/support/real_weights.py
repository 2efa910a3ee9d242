"""SmolLM2-135M-Instruct, English dialogues and sums, from packages of the index, in build/."""

import importlib
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from demonstrations import weights
from dist_template.wings.rehearse.record import RunRecord
from tests import ROOT
from tests.support import chats, saves
from tests.support.runs import CONFIGS

MADE = ROOT / "build" / weights.NAME
COMMON = """--run.report=false --data.seq_len=128 --data.micro_batch_size=1
    --data.global_batch_size=2 --model.sample_tokens=4 --model.optim.schedule=constant
    --model.optim.warmup=2 --trainer.max_epochs=-1 --trainer.accelerator=cpu
    --trainer.log_every_n_steps=1 --trainer.logger=false"""
LORA = "--model.adapter.targets=all-linear --model.adapter.rank=16 --model.optim.learning_rate=1e-3"
PINS = ["chatterbot-corpus==1.3.3", "reasoning-gym==0.1.25"]


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """A folder: `model` (weights in float32, tokenizer), {dialogues,sums,asked}.jsonl."""
    try:
        weights.make(MADE / "model")
        if not (MADE / "sums.jsonl").exists():
            with tempfile.TemporaryDirectory(dir=MADE) as temporary:
                packages = Path(temporary)
                weights.install(packages, PINS)
                found = dialogues(packages / "chatterbot_corpus")
                chats.write(MADE / "dialogues.jsonl", found)
                write_sums(packages, MADE)
    except SystemExit as no_index:
        pytest.skip(f"{no_index}")
    return MADE


class Trainings(saves.Trainings):
    """Fine-tunings of `model`, weights with their tokenizer, by further flags."""

    def __init__(self, folder: Path, model: Path, flags: str) -> None:
        given = f"""--config={CONFIGS}/finetune.yaml --run.root={folder}/runs {COMMON}
            --data.cache_dir={folder}/cache --data.tokenizer.path={model}
            --model.pretrained={model} {flags}"""
        super().__init__(folder, given.split())

    def __call__(self, *args: Any, **options: Any) -> RunRecord:
        return super().__call__(*args, **options, timeout_s=800)


def assert_in_band(bands: dict[str, tuple[float, float]], name: str, figure: float) -> None:
    low, high = bands[name]
    assert low <= figure <= high, f"{name}: {figure:.4f} is not within {low} and {high}"


def dialogues(package: Path) -> list[dict[str, Any]]:
    """Returns the English dialogues; drops entries that are no lists, and unanswered last turns."""
    found = []
    for path in sorted(package.glob("data/english/*.yml")):
        for texts in yaml.safe_load(path.read_text("utf-8"))["conversations"]:
            if isinstance(texts, list):
                texts = texts[: len(texts) // 2 * 2]
                roles = ["user", "assistant"] * (len(texts) // 2)
                turns = zip(roles, map(str, texts), strict=True)
                found.append({"messages": chats.messages(*turns)})
    return found


def write_sums(packages: Path, folder: Path) -> None:
    """Writes questions "State the final answer to … 4 - 9 =": `asked.jsonl`, and others."""
    for name in ("reasoning_gym", "reasoning_gym.arithmetic"):  # theirs import other tasks' needs
        package: Any = ModuleType(name)
        package.__path__ = [str(packages.joinpath(*name.split(".")))]
        sys.modules[name] = package
    gym: Any = importlib.import_module("reasoning_gym.arithmetic.chain_sum")
    size = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    asked: set[str] = set()
    for file, seed, num in (("asked", 0, 60), ("sums", 1000, 1000)):
        made = gym.ChainSumDataset(gym.ChainSumConfig(**size, seed=seed, size=num))
        found = {each["question"]: each["answer"] for each in made}
        records = [{"prompt": one, "completion": found[one]} for one in found if one not in asked]
        chats.write(folder / f"{file}.jsonl", records)
        asked = {*found}
