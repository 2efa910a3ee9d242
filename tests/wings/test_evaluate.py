"""`evaluate` and `promote`: scores by document under any strategy, baselines, tasks, verdicts."""

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

from dist_template import InputError, Project
from dist_template.text import ByteBPE
from dist_template.text.objectives.mtp import MultiToken
from dist_template.wings.ship.evaluate import evaluation, paired
from dist_template.wings.ship.evaluate.documents import DocumentScores
from dist_template.wings.ship.export.trained import load_trained
from tests.support import runs
from tests.support.parity import FLAGS, MODELS
from tests.support.runs import OURS, Workers, newest, only_run, refused, run
from tests.support.strategies import flags_of, settings_of
from tests.support.tiers import tiers

CALLBACK = f"{DocumentScores.__module__}.DocumentScores"
IN_PROCESSES = evaluation.run_verb


@pytest.fixture(scope="module")
def fitted(request: Any, corpus: Path, cache: Path, tmp_path_factory: Any) -> Path:
    """A run with two checkpoints and more than 20 test documents; a parameter is a model."""
    folder = tmp_path_factory.mktemp("fitted")
    more = ["--data.test_share=0.5", "--last_checkpoint.every_n_steps=10"]
    if model := getattr(request, "param", None):
        more += [f"--model.architecture={MODELS[model]}", *FLAGS.get(model, [])]
    own = [*runs.small(corpus, cache, folder), *more, "--model.optim.learning_rate=0.01"]
    assert run("fit", *own) == 0
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


def half(folder: Path) -> str:
    return f"--baseline={folder / 'checkpoints' / 'step00000010.ckpt'}"


def each(found: dict[str, Any], what: str) -> list[Any]:
    return [one[what] for one in found["comparisons"]]


@pytest.mark.slow
def test_a_run_is_better_than_its_half_and_not_than_itself(trained: Path, capsys: Any) -> None:
    better = "--require=eval/loss better"
    required = [better, "--require=bits_per_byte not worse by 0.0"]
    assert run("evaluate", str(trained), half(trained), *required) == 0
    printed = capsys.readouterr().out
    found, samples = found_in(trained)
    loss = float(re.findall(r"test: loss ([\d.]+)", printed)[0])
    figures = found["models"][0]["figures"]
    assert figures["loss"] == pytest.approx(loss, abs=1e-4), "what `test` says"
    assert each(found, "name") == ["loss", "bits_per_byte"]
    assert each(found, "verdict") == ["better"] * 2 and max(each(found, "high")) < 0
    assert each(found, "sentence")[0] in printed and "95 % interval" in printed
    hashes, first = samples["hash"].nunique(), samples[samples["model"] == 0]
    assert len(samples) == 2 * found["documents"] and hashes == found["documents"] >= 20
    assert first["value"].sum() / first["tokens"].sum() == pytest.approx(loss, abs=1e-4)
    assert (first["bytes"] <= first["tokens"]).all(), "bytes are tokens, and one ends each document"
    shutil.rmtree(trained / "evaluation")

    assert run("evaluate", str(trained), f"--baseline={newest(trained)}", better) == 2
    assert "required 'eval/loss better', but cannot tell with" in capsys.readouterr().err
    found, _ = found_in(trained)
    assert each(found, "verdict") == ["cannot tell"] * 2
    assert not [*trained.glob("evaluation/.*")], "nothing temporary is left"
    before = (trained / "metrics.jsonl").read_bytes()
    assert run("evaluate", str(trained), "--split=validation", "--baseline=start") == 2
    printed = capsys.readouterr()
    assert re.search(r"the validation split has \d+ documents, and 20 are needed", printed.err)
    assert "evaluate: " not in printed.out, "no model was run for it"
    assert (trained / "metrics.jsonl").read_bytes() == before, "no part of the training's curves"


SCORED = [
    (model, name) for model in ("llama", "mtp") for name in ("fsdp2", "tp", "zero3", "pp", "cp")
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fitted", "strategy"), tiers(SCORED, [("llama", "fsdp2"), ("mtp", "cp")]), indirect=["fitted"]
)
def test_two_processes_give_the_scores_of_one(trained: Path, strategy: str, tmp_path: Path) -> None:
    """Another strategy and micro-batch; the same model is not better."""
    scores, logged = list[Any](), list[dict[str, float]]()
    for name, num in (("one", 1), (strategy, 2)):
        init = {"path": str(tmp_path / f"{name}.parquet")}
        callback = json.dumps({"class_path": CALLBACK, "init_args": init})
        argv = ["test", f"--config={trained / 'config.yaml'}", f"--trainer.callbacks+={callback}"]
        argv += [*flags_of(strategy), "--data.micro_batch_size=1"] if num > 1 else []
        argv += [f"--trainer.devices={num}", "--trainer.logger=false"]
        argv.append(f"--ckpt_path={newest(trained)}")
        record = Workers(num).run(argv, tmp_path / name).check()
        logged += record.eval("test").values()
        scores.append(pd.read_parquet(tmp_path / f"{name}.parquet"))
    one, many = scores
    assert (one.index == many.index).all() and (one["tokens"] == many["tokens"]).all()
    np.testing.assert_allclose(many["nats"], one["nats"], rtol=1e-5)
    if MultiToken.figures[0] in one:
        figures = [*MultiToken.figures]
        accepted, compared = one[figures].sum()
        assert 0 < accepted < compared and (one[figures] == many[figures]).all(axis=None)
        assert accepted / compared == pytest.approx(logged[0]["test/mtp_acceptance"])
        assert logged[1] == pytest.approx(logged[0], rel=1e-5)
    values = (many["nats"].to_numpy(), one["nats"].to_numpy(), one["tokens"].to_numpy())
    assert paired.compare("loss", *values).verdict == "cannot tell"


@pytest.mark.slow
def test_baselines_of_other_tokens_are_compared_by_bits_per_byte(
    trained: Path, tmp_path: Path, cache: Path, capsys: Any
) -> None:
    loaded, caches = load_trained(str(trained), OURS), len([*cache.iterdir()])
    tokenizers = {"same": loaded.tokenizer, "other": ByteBPE(257).fit(iter([runs.SENTENCES]))}
    for name, tokenizer in tokenizers.items():
        loaded.model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    argv = ["evaluate", str(trained), "--name=x"]
    assert run(*argv, f"--baseline={tmp_path / 'same'}") == 0
    found, samples = found_in(trained)
    assert len([*cache.iterdir()]) == caches, "the same tokenizer needs no other token cache"
    assert each(found, "name") == ["loss", "bits_per_byte"]
    values = samples.pivot(index="hash", columns="model", values="value")
    np.testing.assert_allclose(values[0], values[1], rtol=1e-5)

    argv.append(f"--baseline={tmp_path / 'other'}")
    assert run(*argv, "--require=bits_per_byte better") == 0
    found, samples = found_in(trained)
    assert each(found, "name") == ["bits_per_byte"], "tokens cannot be compared"
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
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


@pytest.mark.slow
def test_lm_eval_adds_samples(trained: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    question: Any = {"question": "the quick brown", "choices": [" fox", " zzz"]}
    lines = [json.dumps(question | {"answer": n % 2}) for n in range(30)]
    (tmp_path / "fox.json").write_text("\n".join(lines))
    (tmp_path / "fox.yaml").write_text(TASK.format(folder=tmp_path))
    tasks = ["--tasks", "fox", f"--task_folder={tmp_path}"]
    argv = ["evaluate", str(trained), half(trained), *tasks]
    assert run(*argv, "--require=acc not worse by 0.2") == 0
    found, samples = found_in(trained)
    assert each(found, "name") == ["loss", "bits_per_byte", "fox/acc"]
    assert found["models"][0]["figures"]["fox/acc"] == 0.5, "each answer is right half the time"
    answers = samples[(samples["measure"] == "fox/acc") & (samples["model"] == 0)]
    assert len(answers) == 30 and set(answers["value"]) == {0.0, 1.0}
    assert each(found, "verdict")[2] == "cannot tell"
    task = (tmp_path / "fox.yaml").read_text().replace("multiple_choice", "loglikelihood_rolling")
    task = task.replace("acc, aggregation: mean", "bits_per_byte, aggregation: bits_per_byte")
    (tmp_path / "fox.yaml").write_text(task.replace("target: answer", "target: question"))
    assert run("evaluate", str(trained), *tasks) == 2
    assert "fox/bits_per_byte has no number for each sample" in capsys.readouterr().err


BAD = {
    "{empty}": "{empty} is not a run folder and contains none; give",
    "{run} --baseline={empty}": "{empty} is not a run folder and contains none; give",
    "{run} --baseline=start --require=lower": "is no requirement: write",
    "{run} --require=loss&better": "--require compares with a --baseline",
    "{run} --limit=0": "'0' is not allowed, give a whole number from 1",
}


@pytest.mark.parametrize("given", BAD)
def test_bad_input_is_refused(given: str, trained: Path, tmp_path: Path, capfd: Any) -> None:
    (tmp_path / "empty").mkdir()
    places = {"empty": tmp_path / "empty", "run": trained}
    argv = [word.replace("&", " ") for word in given.format(**places).split()]
    assert BAD[given].format(**places) in refused("evaluate", argv, capfd)
    assert not (trained / "evaluation").exists(), "nothing is half-written"


@pytest.mark.slow
def test_processes_of_their_own_run_the_models_strategy(trained: Path, monkeypatch: Any) -> None:
    """As for a user: FSDP2 on two processes, which `evaluate` starts."""
    monkeypatch.setattr(evaluation, "run_verb", IN_PROCESSES)
    config = yaml.safe_load((trained / "config.yaml").read_text())
    config["trainer"] |= {"devices": 2, "strategy": settings_of("fsdp2")}
    (trained / "config.yaml").write_text(yaml.safe_dump(config))
    assert run("evaluate", str(trained)) == 0
    found, samples = found_in(trained)
    assert 0 < found["models"][0]["figures"]["bits_per_byte"] < 9
    assert len(samples) == found["documents"] >= 20


@pytest.mark.slow
def test_a_run_is_promoted_if_it_is_better(trained: Path, tmp_path: Path, capsys: Any) -> None:
    registry = tmp_path / "registry"
    argv = ["promote", str(tmp_path / "runs"), f"--registry={registry}"]
    assert run(*argv) == 0
    known = json.loads((registry / "latest" / "version.json").read_text())
    start = {"run": str(trained), "baseline": "start", "required": ["eval/loss better"]}
    assert known | start == known and known["figures"]["comparisons"][0]["verdict"] == "better"
    assert known["sha256"].keys() >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert run(*argv, "--require=loss better") == 2
    assert "required 'loss better', but cannot tell with" in capsys.readouterr().err
    found = json.loads((trained / "evaluation" / "promotion.json").read_text())
    assert found["models"][1]["model"] == str(registry / "v1"), "not the link, which may change"
    assert sorted(path.name for path in registry.iterdir()) == ["latest", "v1"]


def test_bits_per_byte_are_those_of_text_alone() -> None:
    """Of conversations only some tokens count, and their bytes are not known."""
    table = pd.DataFrame({"nats": [6.0, 2.0], "tokens": [3, 1], "bytes": [12, 4]})
    loss = {"loss": 2.0}
    assert evaluation.figures_of(table, is_whole=True) == loss
    bits = loss | {"bits_per_byte": 0.5 / math.log(2)}
    assert evaluation.figures_of(table, is_whole=False) == pytest.approx(bits)


SIMULATIONS = 200
Measure = tuple[str, np.ndarray, np.ndarray, np.ndarray, bool]


def losses(rng: np.random.Generator, documents: int, shift: float = 0.0) -> Measure:
    """Two models' nats of documents of very unequal lengths, whose difficulty both share."""
    sizes = np.ceil(rng.lognormal(6, 1, documents))
    shared = rng.gamma(4, 0.3, documents)
    run, baseline = (sizes * (shared + rng.normal(0, 0.05, documents)) for _ in range(2))
    return "loss", run + shift * sizes, baseline, sizes, True


def answers(rng: np.random.Generator, questions: int, shift: float = 0.0) -> Measure:
    right = rng.random(questions)
    run = np.where(rng.random(questions) < 0.3, rng.random(questions), right) < 0.6 + shift
    return "acc", run * 1.0, (right < 0.6) * 1.0, np.ones(questions), False


@pytest.mark.parametrize(("make", "sign"), [(losses, -1), (answers, 1)])
def test_no_difference_is_rarely_found_and_a_planted_one_is(make: Any, sign: int) -> None:
    for num in (20, 100):
        rng = np.random.default_rng(1)
        verdicts = [paired.compare(*make(rng, num)).verdict for _ in range(SIMULATIONS)]
        assert verdicts.count("better") <= SIMULATIONS * 0.05
        assert verdicts.count("cannot tell") >= SIMULATIONS * 0.9
    seeds = map(np.random.default_rng, range(20))
    detectable = np.median([paired.compare(*make(rng, 200)).detectable for rng in seeds])
    rng = np.random.default_rng(2)
    planted = [make(rng, 200, sign * detectable) for _ in range(SIMULATIONS)]
    found = [paired.compare(*each).verdict for each in planted]
    assert found.count("better") >= SIMULATIONS * (paired.POWER - 0.1)
    assert found.count("worse") == 0


def test_the_interval_holds_the_planted_difference_and_needs_pairs() -> None:
    rng = np.random.default_rng(3)
    found = [paired.compare(*losses(rng, 100, 0.01)) for _ in range(SIMULATIONS)]
    assert sum(each.low <= 0.01 <= each.high for each in found) >= SIMULATIONS * 0.9
    measure: Any = losses(rng, 100, 0.05)
    name, run, *others = measure
    assert paired.compare(name, run, *others).verdict == "worse"
    assert paired.compare(name, run[::-1], *others).verdict == "cannot tell", "by documents"
    _, run, _, weights, _ = losses(np.random.default_rng(6), 100)
    rounded, better = (paired.compare("loss", run * (1 - by), run, weights) for by in (1e-6, 1e-3))
    assert (rounded.verdict, better.verdict) == ("cannot tell", "better")
    assert better.sentence.startswith("better with 100 samples: loss ")


def test_verdicts_of_tasks_are_corrected_for_their_number() -> None:
    rng = np.random.default_rng(4)
    pair = answers(rng, 300)
    assert paired.compare(*pair, 8).detectable > paired.compare(*pair).detectable
    null = [[paired.compare(*answers(rng, 60), 8) for _ in range(8)] for _ in range(50)]
    assert sum(any(each.verdict == "better" for each in family) for family in null) <= 5


BETTER = (1.0, 1.0, -0.15, -0.2, -0.1, 0.1, "better")
UNKNOWN = (1.0, 1.0, 0.005, -0.02, 0.03, 0.1, "cannot tell")
FOUND = [paired.Comparison("loss", 50, True, *BETTER)]
FOUND.append(paired.Comparison("fox/acc", 50, False, *UNKNOWN))
HOLDS = {"eval/loss better": True, "loss not worse by 0": True, "acc better": False}
HOLDS |= {"acc not worse by 0.03": True, "fox/acc not worse by 0.01": False}


@pytest.mark.parametrize("text", HOLDS)
def test_a_requirement_holds_or_says_why_not(text: str) -> None:
    why = paired.failure(text, FOUND)
    assert (why is None) == HOLDS[text] and (why is None or text in why and "cannot tell" in why)


def test_a_requirement_that_cannot_be_judged_is_refused() -> None:
    for text in ("loss", "loss is better", "loss not worse", "loss not worse by much", ""):
        with pytest.raises(InputError, match="is no requirement: write 'MEASURE better'"):
            paired.parse(text)
    with pytest.raises(InputError, match="give one of loss, fox/acc"):
        paired.failure("exact_match better", FOUND)
    with pytest.raises(InputError, match="other tokens cannot be compared"):
        paired.failure("loss better", FOUND[1:])
