"""`evaluate`: scores by document under any strategy, baselines, tasks, verdicts and the gate."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

from dist_template import Project
from dist_template.wings.ship.evaluate import evaluation, paired, tasks
from tests.support.runs import (
    CONFIGS,
    SENTENCES,
    Workers,
    newest,
    only_run,
    run,
    run_in_subprocess,
    small,
)
from tests.support.strategies import flags_of, settings_of
from tests.support.tiers import tiers

CALLBACK = "dist_template.wings.ship.evaluate.documents.DocumentScores"


@pytest.fixture(scope="module")
def fitted(corpus: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two checkpoints and more than 20 test documents."""
    folder = tmp_path_factory.mktemp("fitted")
    more = [
        "--data.test_share=0.5",
        "--last_checkpoint.every_n_steps=10",
        "--model.optim.learning_rate=0.01",
    ]
    assert run("fit", *small(corpus, cache, folder), *more) == 0
    return folder


@pytest.fixture
def trained(fitted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that run; `evaluate` runs `test` in this process."""
    shutil.copytree(fitted, tmp_path, dirs_exist_ok=True)
    config = only_run(tmp_path) / "config.yaml"
    config.write_text(config.read_text().replace(str(fitted), str(tmp_path)))

    def in_this_process(project: Project, argv: list[str]) -> int:
        return run(*argv)

    monkeypatch.setattr(evaluation, "run_verb", in_this_process)
    return only_run(tmp_path)


def found_in(folder: Path) -> tuple[dict[str, Any], pd.DataFrame]:
    """The JSON and the parquet of the only evaluation."""
    (path,) = (folder / "evaluation").glob("*.json")
    return json.loads(path.read_text()), pd.read_parquet(path.with_suffix(".parquet"))


def half(folder: Path) -> Path:
    return folder / "checkpoints" / "step00000010.ckpt"


def test_a_run_is_better_than_its_half_trained_checkpoint_and_no_better_than_itself(
    trained: Path, capsys: Any
) -> None:
    required = ["--require=eval/loss better", "--require=bits_per_byte not worse by 0.0"]
    assert run("evaluate", str(trained), f"--baseline={half(trained)}", *required) == 0
    printed = capsys.readouterr().out
    found, samples = found_in(trained)
    loss = float(re.findall(r"test: loss ([\d.]+)", printed)[0])
    assert found["models"][0]["figures"]["loss"] == pytest.approx(loss, abs=1e-4), (
        "what `test` says"
    )
    assert [each["name"] for each in found["comparisons"]] == ["loss", "bits_per_byte"]
    assert all(each["verdict"] == "better" and each["high"] < 0 for each in found["comparisons"])
    assert found["comparisons"][0]["sentence"] in printed and "95 % interval" in printed
    assert (
        len(samples) == 2 * found["documents"]
        and samples["hash"].nunique() == found["documents"] >= 20
    )
    first = samples[samples["model"] == 0]
    assert first["value"].sum() / first["tokens"].sum() == pytest.approx(loss, abs=1e-4)
    assert (first["bytes"] <= first["tokens"]).all(), "bytes are tokens, and one ends each document"
    shutil.rmtree(trained / "evaluation")

    assert (
        run("evaluate", str(trained), f"--baseline={newest(trained)}", "--require=eval/loss better")
        == 2
    )
    captured = capsys.readouterr()
    assert "required 'eval/loss better', but cannot tell with" in captured.err
    found, _ = found_in(trained)
    assert [each["verdict"] for each in found["comparisons"]] == ["cannot tell", "cannot tell"]
    assert not [*trained.glob("evaluation/.*")], "nothing temporary is left"
    before = (trained / "metrics.jsonl").read_bytes()
    assert run("evaluate", str(trained), "--split=validation", "--baseline=start") == 2
    assert (
        "documents of the validation split in common, and 20 are needed" in capsys.readouterr().err
    )
    assert (trained / "metrics.jsonl").read_bytes() == before, (
        "an evaluation is not part of the training's curves"
    )


def test_a_run_is_better_than_its_start(trained: Path) -> None:
    assert run("evaluate", str(trained), "--baseline=start", "--name=x") == 0
    found, _ = found_in(trained)
    bits = found["comparisons"][1]["baseline"]
    assert 0 < bits < 9 and found["comparisons"][1]["verdict"] == "better"


@pytest.mark.slow
@pytest.mark.parametrize("strategy", tiers(["fsdp2", "tp", "zero3"], daily=["fsdp2", "zero3"]))
def test_two_processes_give_the_scores_of_one(trained: Path, strategy: str, tmp_path: Path) -> None:
    """Another strategy and micro-batch; the same model is not better."""
    scores = {}
    for name, num, more in (
        ("one", 1, []),
        (strategy, 2, [*flags_of(strategy), "--data.micro_batch_size=1"]),
    ):
        callback = json.dumps(
            {"class_path": CALLBACK, "init_args": {"path": str(tmp_path / f"{name}.parquet")}}
        )
        again = [
            f"--config={trained / 'config.yaml'}",
            *more,
            f"--trainer.devices={num}",
            "--trainer.logger=false",
        ]
        argv = [
            "test",
            *again,
            f"--ckpt_path={newest(trained)}",
            f"--trainer.callbacks+={callback}",
        ]
        with Workers(num) as workers:
            workers.run(argv, tmp_path / name).check()
        scores[name] = pd.read_parquet(tmp_path / f"{name}.parquet")
    one, many = scores["one"], scores[strategy]
    assert (one.index == many.index).all() and (one["tokens"] == many["tokens"]).all()
    np.testing.assert_allclose(many["nats"], one["nats"], rtol=1e-5)
    values = (many["nats"].to_numpy(), one["nats"].to_numpy(), one["tokens"].to_numpy())
    assert paired.compare("loss", *values).verdict == "cannot tell"


def folder_of(trained: Path, output: Path, tokenizer: Any = None) -> Path:
    """The run's weights as transformers' folder, perhaps with another tokenizer."""
    from tests.support.runs import OURS
    from tests.support.wings import load_trained

    loaded = load_trained(str(trained), OURS)
    loaded.model.save_pretrained(output)
    (tokenizer or loaded.tokenizer).save_pretrained(output)
    return output


def test_an_exported_folder_and_one_with_another_tokenizer(
    trained: Path, tmp_path: Path, cache: Path, capsys: Any
) -> None:
    from dist_template.text import ByteBPE

    caches = len([*cache.iterdir()])
    assert (
        run(
            "evaluate",
            str(trained),
            f"--baseline={folder_of(trained, tmp_path / 'same')}",
            "--name=x",
        )
        == 0
    )
    found, samples = found_in(trained)
    assert len([*cache.iterdir()]) == caches, "the same tokenizer needs no other token cache"
    assert [each["name"] for each in found["comparisons"]] == ["loss", "bits_per_byte"]
    values = samples.pivot(index="hash", columns="model", values="value")
    np.testing.assert_allclose(values[0], values[1], rtol=1e-5)

    other = folder_of(trained, tmp_path / "other", ByteBPE(257).fit(iter([SENTENCES])))
    argv = ["evaluate", str(trained), f"--baseline={other}", "--name=x"]
    assert run(*argv, "--require=bits_per_byte better") == 0
    found, samples = found_in(trained)
    assert [each["name"] for each in found["comparisons"]] == ["bits_per_byte"], (
        "tokens cannot be compared"
    )
    assert samples.groupby("hash")["bytes"].nunique().max() == 1
    assert run(*argv, "--require=loss better") == 2
    assert "other tokens cannot be compared; give one of bits_per_byte" in capsys.readouterr().err


TASK = """
task: fox
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/fox.json}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
"""


@pytest.mark.slow
def test_tasks_of_lm_eval_join_the_samples(trained: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    questions = [
        {"question": "the quick brown", "choices": [" fox", " zzz"], "answer": n % 2}
        for n in range(30)
    ]
    (tmp_path / "fox.json").write_text("\n".join(map(json.dumps, questions)))
    (tmp_path / "fox.yaml").write_text(TASK.format(folder=tmp_path))
    config = tmp_path / "evaluate.yaml"
    config.write_text(f"tasks: [fox]\ntask_folder: {tmp_path}\n")
    required = ["--require=acc not worse by 0.2"]
    assert (
        run(
            "evaluate", str(trained), f"--baseline={half(trained)}", f"--config={config}", *required
        )
        == 0
    )
    found, samples = found_in(trained)
    assert [each["name"] for each in found["comparisons"]] == ["loss", "bits_per_byte", "fox/acc"]
    assert found["models"][0]["figures"]["fox/acc"] == 0.5, "each answer is right half the time"
    answers = samples[(samples["measure"] == "fox/acc") & (samples["model"] == 0)]
    assert len(answers) == 30 and set(answers["value"]) == {0.0, 1.0}
    assert found["comparisons"][2]["verdict"] == "cannot tell"


def test_the_shipped_file_has_every_key_with_its_default() -> None:
    assert tasks.read(str(CONFIGS / "evaluate.yaml")) == yaml.safe_load(
        (CONFIGS / "evaluate.yaml").read_text()
    )
    assert yaml.safe_load((CONFIGS / "evaluate.yaml").read_text()) == tasks.read(None)


BAD = {
    "a folder that is no model": (
        ["{empty}"],
        "{empty} is not a run folder and contains none; give",
    ),
    "a baseline that is no model": (
        ["{run}", "--baseline={empty}"],
        "{empty} is not a run folder and contains none; give",
    ),
    "unknown syntax": (
        ["{run}", "--baseline=start", "--require=loss lower"],
        "is no requirement: write",
    ),
    "nothing to compare": (
        ["{run}", "--require=loss better"],
        "--require compares with a --baseline",
    ),
    "an unknown key": (["{run}", "--config={key}"], "task"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_in_one_sentence(
    case: str, trained: Path, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "key").write_text("task: [fox]")
    places = {name: tmp_path / name for name in ("empty", "key")} | {"run": trained}
    argv, sentence = BAD[case]
    assert run("evaluate", *(each.format(**places) for each in argv)) == 2
    error = capsys.readouterr().err
    assert sentence.format(**places) in error and error.count("\n") == 1
    assert not (trained / "evaluation").exists(), "nothing is half-written"


def test_a_run_without_a_held_out_split_is_refused(
    trained: Path, corpus: Path, cache: Path, tmp_path: Path, capsys: Any
) -> None:
    more = ["--data.test_share=0", "--trainer.max_steps=2", "--run.name=whole"]
    assert run("fit", *small(corpus, cache, tmp_path), *more) == 0
    capsys.readouterr()
    assert run("evaluate", str(tmp_path / "runs" / "whole"), "--baseline=start") == 2
    error = capsys.readouterr().err
    assert "has an empty test split: give --split, or train with data.test_share" in error


@pytest.mark.slow
def test_processes_of_their_own_run_the_models_strategy(trained: Path) -> None:
    """As a user types it: FSDP2 on two processes, which `evaluate` starts."""
    config = yaml.safe_load((trained / "config.yaml").read_text())
    config["trainer"] |= {"devices": 2, "strategy": settings_of("fsdp2")}
    (trained / "config.yaml").write_text(yaml.safe_dump(config))
    argv = ["evaluate", str(trained), "--baseline=start", "--require=loss not worse by 1"]
    done = run_in_subprocess(*argv)
    assert done.returncode == 0 and "better with" in done.stdout, done.stdout + done.stderr
    found, _ = found_in(trained)
    assert (
        found["models"][0]["figures"]["bits_per_byte"]
        < found["models"][1]["figures"]["bits_per_byte"]
    )
