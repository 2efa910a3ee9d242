"""SmolLM2-135M-Instruct is fine-tuned on dialogues by several processes, killed and resumed; it is
taught sums, a fact and source code, evaluated, exported, promoted and served.

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

from benchmarks import learning
from dist_template.wings.rehearse.compare import first_difference
from dist_template.wings.rehearse.interventions import KillAt
from dist_template.wings.rehearse.record import RunRecord
from tests.support import chats, real_weights
from tests.support.real_weights import LORA, assert_in_band
from tests.support.runs import run, run_in_subprocess
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
    # losses; seeds 0 (fsdp2 on two processes), 1 and 2 (one process) gave:
    "validation": (2.34, 2.64),  # 2.4267, 2.5541, 2.5297
    "test": (2.35, 2.66),  # 2.4544, 2.5706, 2.4379
    "start": (2.92, 2.935),  # 2.9268; the split depends on no seed
    # all of fsdp2 on two processes
    "full_in_bf16": (2.36, 2.39),  # 2.3737: no seed matters
    "qlora": (2.55, 2.63),  # 2.5890, 2.5941
    "dpo": (0.67, 0.679),  # from 0.6931: 0.6737, 0.6745, 0.6745
    "kto": (0.476, 0.48),  # from 0.5: 0.4779, 0.4779, 0.4779
    # one process in bf16-mixed: the loss before minus the loss after; one seed
    "lora falls": (1.5, 2.0),  # from 4.408: 1.765
    "dpo-lora falls": (0.15, 0.3),  # from 0.693: 0.237
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
    train: Trainings,
    taught: Path,
    smollm2: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
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
    trained = Trainings(
        tmp_path,
        smollm2 / "model",
        f"""--data.source={source}
        --data.validation_share=0 --data.test_share=0.15 --model.optim.learning_rate=5e-5
        """,
    ).run("code", 16)
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


STEPS, EVERY = 10, 5  # optimizer steps: of a run, between two checkpoints
IN_BF16 = "--model.adapter=null --trainer.precision=bf16-mixed --model.optim.learning_rate=3e-5"
KINDS = {  # source, flags
    "full_in_bf16": ("Chat", IN_BF16),
    "qlora": ("Chat", "--model.adapter.quantize=nf4"),
    "dpo": ("Preferences", "--data.validation_share=0.05 --model.optim.learning_rate=3e-4"),
    "kto": ("Ratings", "--data.validation_share=0.05 --model.preference.loss=kto"),
}
FLAGS = f"""{LORA} --data.validation_share=0.02 --data.test_share=0.06
    --trainer.max_steps={STEPS} --trainer.val_check_interval={STEPS}
    --last_checkpoint.every_n_steps={EVERY}"""


@pytest.fixture(scope="module")
def tune(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    flags = f"{FLAGS} --data.source.paths=[{smollm2}/dialogues.jsonl]"
    return Trainings(tmp_path_factory.mktemp("real"), smollm2 / "model", flags)


@pytest.fixture(scope="module")
def whole(tune: Trainings) -> RunRecord:
    """The run that is never stopped."""
    return tune("fsdp2", "fsdp2").check()


def test_two_processes_reach_the_loss_of_held_out_dialogues(whole: RunRecord) -> None:
    assert [*whole.loss] == [*range(1, STEPS + 1)]
    assert_in_band(BANDS, "validation", whole.eval()[STEPS]["eval/loss"])


def test_a_killed_run_resumes_bit_identically(tune: Trainings, whole: RunRecord) -> None:
    killed = tune("killed", "fsdp2", callbacks=[KillAt(EVERY + 1)])
    assert killed.was_killed, killed.error
    resumed = tune("killed", "fsdp2").check()
    assert resumed.loss == {step: whole.loss[step] for step in range(EVERY + 1, STEPS + 1)}
    assert resumed.eval()[STEPS]["eval/loss"] == whole.eval()[STEPS]["eval/loss"]
    assert whole.end and not first_difference(whole.end, resumed.end)


def test_evaluate_calls_training_better_than_its_start(whole: RunRecord) -> None:
    required = ["--baseline=start", "--require=eval/loss better"]
    ended = run_in_subprocess("evaluate", str(whole.run), *required)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (file,) = whole.run.glob("evaluation/*.json")
    (loss,) = json.loads(file.read_text("utf-8"))["comparisons"]
    assert loss["verdict"] == "better" and loss["high"] < 0, loss
    assert_in_band(BANDS, "start", loss["baseline"])
    assert_in_band(BANDS, "test", loss["run"])


@pytest.mark.parametrize("kind", ["peft", "merged"])
def test_an_export_passes_its_gate(whole: RunRecord, tmp_path: Path, kind: str) -> None:
    given = [str(whole.run), f"--output={tmp_path / kind}", f"--adapter={kind}"]
    assert run("export", *given) == 0


@pytest.mark.parametrize(("strategy", "processes"), [("tp", 3), ("ddp", 2), ("zero3", 2)])
def test_strategies_agree(tune: Trainings, whole: RunRecord, strategy: str, processes: int) -> None:
    short = tune(strategy, strategy, "--trainer.max_steps=3", processes=processes).check()
    same = {step: whole.loss[step] for step in short.loss}
    assert [*short.loss] == [1, 2, 3] and short.loss == pytest.approx(same, rel=1e-4)


def answers(record: Any, other: Any) -> dict[str, Any]:
    """A pair and a rating: the answer of a dialogue, and of another one."""
    *prompt, answer = record["messages"][:2]
    return {"prompt": prompt, "chosen": [answer], "rejected": other["messages"][1:2]}


@pytest.fixture(scope="module")
def paths(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Files by the source that reads them."""
    folder = tmp_path_factory.mktemp("data")
    lines = (smollm2 / "dialogues.jsonl").read_text("utf-8").splitlines()[:400]
    records = [json.loads(line) for line in lines]
    pairs = [answers(*both) for both in zip(records, records[7:], strict=False)]
    pairs = [pair for pair in pairs if pair["chosen"] != pair["rejected"]]
    ratings = [
        {"prompt": pair["prompt"], "completion": pair[kind], "label": kind == "chosen"}
        for pair in pairs
        for kind in ("chosen", "rejected")
    ]
    found = {"Chat": smollm2 / "dialogues.jsonl"}
    found["Preferences"] = chats.write(folder / "pairs.jsonl", pairs)
    found["Ratings"] = chats.write(folder / "ratings.jsonl", ratings)
    return {source: f"--data.source.paths=[{path}]" for source, path in found.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_other_trainings_reach_their_figures(
    smollm2: Path, paths: dict[str, str], tmp_path: Path, kind: str
) -> None:
    source, flags = KINDS[kind]
    given = f"{FLAGS} --data.source={source} {paths[source]} {flags}"
    record = Trainings(tmp_path, smollm2 / "model", given)(kind, "fsdp2").check()
    assert_in_band(BANDS, kind, record.eval()[STEPS]["eval/loss"])


@pytest.mark.parametrize(("method", "seq_len"), [("lora", 256), ("dpo-lora", 128)])
def test_the_defaults_learn_from_150_records(
    smollm2: Path, tmp_path: Path, method: str, seq_len: int
) -> None:
    """Neither a rate nor a batch is given: the product chooses both."""
    given = f"""--methods {method} --seq_len {seq_len} --log {tmp_path}/log.jsonl
        --work {tmp_path}/work --model {smollm2}/model --dialogues {smollm2}/dialogues.jsonl"""
    learning.main(given.split())
    (ended,) = learning.read(tmp_path / "log.jsonl")
    assert ended.steps == ended.steps_of_data >= 20
    assert_in_band(BANDS, f"{method} falls", ended.fall)
