"""SmolLM2-135M-Instruct is fine-tuned by several processes, killed, resumed, evaluated, exported.

A figure outside its band in BANDS means that numbers have changed."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support import chats
from tests.support.real_weights import LORA, Trainings, assert_in_band
from tests.support.runs import run, run_in_subprocess
from tests.support.tiers import NIGHTLY
from tests.support.wings import KillAt, RunRecord, first_difference

pytestmark = [*NIGHTLY]
STEPS, EVERY = 10, 5  # optimizer steps: of a run, between two checkpoints
BANDS = {  # of losses; seeds 0 (fsdp2 on two processes), 1 and 2 (one process) gave:
    "validation": (2.34, 2.64),  # 2.4267, 2.5541, 2.5297
    "test": (2.35, 2.66),  # 2.4544, 2.5706, 2.4379
    "start": (2.92, 2.935),  # 2.9268; the split depends on no seed
    # all of fsdp2 on two processes
    "full_in_bf16": (2.36, 2.39),  # 2.3737: no seed matters
    "qlora": (2.55, 2.63),  # 2.5890, 2.5941
    "dpo": (0.67, 0.679),  # from 0.6931: 0.6737, 0.6745, 0.6745
    "kto": (0.476, 0.48),  # from 0.5: 0.4779, 0.4779, 0.4779
}
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
def train(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    flags = f"{FLAGS} --data.source.paths=[{smollm2}/dialogues.jsonl]"
    return Trainings(tmp_path_factory.mktemp("real"), smollm2 / "model", flags)


@pytest.fixture(scope="module")
def whole(train: Trainings) -> RunRecord:
    """The run that is never stopped."""
    return train("fsdp2", "fsdp2").check()


def test_two_processes_reach_the_loss_of_held_out_dialogues(whole: RunRecord) -> None:
    assert [*whole.loss] == [*range(1, STEPS + 1)]
    assert_in_band(BANDS, "validation", whole.eval()[STEPS]["eval/loss"])


def test_a_killed_run_resumes_bit_identically(train: Trainings, whole: RunRecord) -> None:
    killed = train("killed", "fsdp2", callbacks=[KillAt(EVERY + 1)])
    assert killed.was_killed, killed.error
    resumed = train("killed", "fsdp2").check()
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
def test_strategies_train_alike(
    train: Trainings, whole: RunRecord, strategy: str, processes: int
) -> None:
    short = train(strategy, strategy, "--trainer.max_steps=3", processes=processes).check()
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
        for pair in pairs for kind in ("chosen", "rejected")
    ]  # fmt: skip
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
