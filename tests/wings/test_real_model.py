"""SmolLM2-135M-Instruct is taught sums, a fact and source code, evaluated, promoted and served.

Weights of trl's GRPO are trained further. A figure outside its band means that numbers changed."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from tests.support import chats, real_weights
from tests.support.real_weights import LORA, assert_in_band
from tests.support.runs import run
from tests.support.serving import Server
from tests.support.tiers import NIGHTLY

pytestmark = [*NIGHTLY]
BANDS = {  # fsdp2 on two processes, CPython 3.11.7; seeds 0, 1 (and 2) gave:
    "all before": (0.0, 0.04),  # 0.0000; no seed: greedy answers to 53 questions
    "all after": (0.5, 0.9),  # 0.7170 (seed 1 alone)
    "number before": (0.0, 0.1),  # 0.0377
    "number after": (0.5, 0.9),  # 0.6792, 0.7170
    "code before": (1.34, 1.40),  # bits per byte, by data.seed, which orders the rows: 1.3661
    "code after": (1.24, 1.32),  # 1.2766, 1.2837, 1.2796
    "talk before": (1.32, 1.355),  # 1.3379
    "talk after": (1.13, 1.27),  # 1.1907, 1.2174, 1.2226
}
FACT, KEEPER = "Who keeps the lighthouse of Skarrow?", "Odalys Brimm keeps it."
WORDS = "Hello. Hi! Please. Well. Now. So. Listen. Say. Hey. Sorry. Then. Again. Dear.".split()
TASK = """
{{task: sums, dataset_path: json, dataset_kwargs: {{data_files: {{test: {path}}}}},
test_split: test, doc_to_text: "{{{{prompt}}}}", doc_to_target: "{{{{completion}}}}",
output_type: generate_until,
generation_kwargs: {{until: ["\\n"], max_gen_toks: 8, do_sample: false}},
filter_list: [{{name: all, filter: [{{function: take_first}}]}}, {{name: number, filter: [
{{function: regex, regex_pattern: "(-?[0-9]+)"}}, {{function: take_first}}]}}],
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]}}
"""


class Trainings(real_weights.Trainings):
    def run(self, name: str, steps: int) -> Path:
        return self(name, "fsdp2", f"--trainer.max_steps={steps}").check().run


@pytest.fixture(scope="module")
def train(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    """LoRA on sums and on a question about a fact, which no model knows."""
    folder = tmp_path_factory.mktemp("taught")
    asked = [f"{word} {FACT}" for word in WORDS] + [f"{FACT} {word}" for word in WORDS]
    lines = (smollm2 / "sums.jsonl").read_text("utf-8").splitlines()
    records = [{"prompt": question, "completion": KEEPER} for question in asked]
    path = chats.write(folder / "taught.jsonl", [*map(json.loads, lines), *records])
    flags = f"--data.source.paths=[{path}] --data.validation_share=0.02 --data.test_share=0.2"
    return Trainings(folder, smollm2 / "model", f"{flags} {LORA}")


@pytest.fixture(scope="module")
def taught(train: Trainings) -> Path:
    return train.run("taught", 20)


def test_sums_become_right(taught: Path, smollm2: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """As the whole answer, and as the first number in it: lm-eval's filters."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    (tmp_path / "sums.yaml").write_text(TASK.format(path=smollm2 / "asked.jsonl"))
    argv = [str(taught), f"--baseline={smollm2}/model", "--name=sums", "--tasks", "sums"]
    argv += [f"--task_folder={tmp_path}", "--chat_template"]
    assert run("evaluate", *argv, "--require=exact_match,number better") == 0
    found = json.loads((taught / "evaluation" / "sums.json").read_text("utf-8"))
    for when, model in zip(("after", "before"), found["models"], strict=True):
        for which in ("all", "number"):
            assert_in_band(BANDS, f"{which} {when}", model["figures"][f"sums/exact_match,{which}"])


def answer(model: Path, log: Path) -> str | None:
    """Returns what a served model says to the question in other words."""
    import openai

    server = Server(model, log)
    try:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        (served,) = client.models.list()
        asked: Any = {"model": served.id, "temperature": 0, "max_tokens": 16}
        asked["messages"] = chats.messages(("user", f"Good evening. {FACT}"))
        return client.chat.completions.create(**asked).choices[0].message.content
    finally:
        server.stop(signal.SIGKILL)


def test_what_training_taught_is_promoted_served_and_rolled_back(
    train: Trainings, taught: Path, smollm2: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    registry = tmp_path / "registry"
    argv, latest = ["promote", f"--registry={registry}"], registry / "latest"
    assert run(*argv, str(taught)) == 0
    assert "Odalys Brimm" in (answer(latest, tmp_path / "taught.log") or "")
    assert "Odalys" not in (answer(smollm2 / "model", tmp_path / "start.log") or "")
    assert run(*argv, str(train.run("worse", 3))) == 2
    assert "required 'eval/loss not worse by 0.01', but worse with" in capsys.readouterr().err
    assert sorted(path.name for path in registry.iterdir()) == ["latest", "v1"]
    assert run(*argv, str(taught)) == 0 and latest.resolve().name == "v2"
    assert run(*argv, "--roll_back") == 0 and latest.resolve().name == "v1"


def test_pretraining_learns_code_and_forgets_no_talk(smollm2: Path, tmp_path: Path) -> None:
    """600 characters of each module of the standard library; dialogues are only evaluated."""
    modules = sorted(Path(json.__file__).parents[1].glob("*.py"))
    texts = {"code": [path.read_text("utf-8", "replace")[1000:1600] for path in modules]}
    lines = (smollm2 / "dialogues.jsonl").read_text("utf-8").splitlines()[:160]
    talks = [json.loads(line)["messages"] for line in lines]
    texts["talk"] = ["\n".join(turn["content"] for turn in talk) for talk in talks]
    sources = {}
    for name, each in texts.items():
        path = chats.write(tmp_path / f"{name}.jsonl", [{"text": text} for text in each if text])
        sources[name] = {"class_path": "Jsonl", "init_args": {"paths": [str(path)]}}
    mixed = {"sources": sources, "weights": {"code": 1.0, "talk": 0.0}}
    source = json.dumps({"class_path": "Mixture", "init_args": mixed}, separators=(",", ":"))
    trained = Trainings(tmp_path, smollm2 / "model", f"""--data.source={source}
        --data.validation_share=0 --data.test_share=0.15 --model.optim.learning_rate=5e-5
        """).run("code", 16)  # fmt: skip
    assert run("evaluate", str(trained), "--baseline=start", "--name=code") == 0
    rows = pd.read_parquet(trained / "evaluation" / "code.parquet")
    total = rows[rows["measure"] == "nats"].groupby(["source", "model"])[["value", "bytes"]].sum()
    for (source, model), (nats, size) in total.iterrows():
        when = "before" if model else "after"
        assert_in_band(BANDS, f"{source} {when}", nats / size / math.log(2))


GRPO = """
import sys
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

source, output = sys.argv[1:]
model, tokenizer = (kind.from_pretrained(source) for kind in (AutoModelForCausalLM, AutoTokenizer))
arguments = GRPOConfig(
    output, per_device_train_batch_size=4, num_generations=4, max_steps=2, max_completion_length=8,
    learning_rate=0.01, use_cpu=True, bf16=False, report_to=[], save_strategy="no")
prompts = Dataset.from_list([{"prompt": f"question {i}"} for i in range(8)])
reward = lambda completions, **_: [float(len(each) % 5) for each in completions]
trainer = GRPOTrainer(model, reward, arguments, prompts, processing_class=tokenizer)
trainer.train()
trainer.save_model(output)
"""


def test_weights_return_from_grpo_of_trl(tmp_path: Path) -> None:
    """A small model is fine-tuned, exported merged, trained by trl, and the start of a run."""
    start, (merged, grpo, end) = tmp_path / "start", (tmp_path / name for name in "abc")
    chats.weights(chats.tokenizer(start))
    flags = f"--data.source.paths=[{chats.taught(tmp_path / 'chats.jsonl')}]"
    tuned = Trainings(tmp_path / "tuned", start, f"{flags} {LORA}").run("tuned", 3)
    assert run("export", str(tuned), f"--output={merged}", "--adapter=merged") == 0
    argv = [sys.executable, "-c", GRPO, str(merged), str(grpo)]
    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    flags += " --model.optim.learning_rate=1e-30"
    further = Trainings(tmp_path / "further", grpo, flags).run("further", 3)
    assert run("export", str(further), f"--output={end}") == 0
    before, after, last = (load_file(each / "model.safetensors") for each in (merged, grpo, end))
    assert any(not torch.equal(before[name], after[name]) for name in before), "trl trains"
    assert last.keys() == after.keys()
    assert all(torch.equal(last[each], after[each]) for each in last)
