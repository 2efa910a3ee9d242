"""A measured figure has one source: pages repeat what benchmarks/results and the zoo have written.

A sentence of a page is named with `{}` for each figure; the figures that stand there are compared
with those of the source. README.zh.md is compared with README.md by test_docs_chinese.py.
"""

import re
import statistics
from collections.abc import Iterator

import pytest

from benchmarks.record import RESULTS, read

from .conftest import ROOT

STEP, DIST = "step.json", "dist.json"
NUMBER = r"([\d.,]+\d)"


def page(name: str) -> str:
    return " ".join((ROOT / name).read_text("utf-8").split())


def stated(name: str, sentence: str) -> list[str]:
    """Returns the figures at the places `{}` of a sentence that the page has exactly once."""
    pattern = NUMBER.join(map(re.escape, sentence.split("{}")))
    found = re.findall(pattern, page(name))
    assert len(found) == 1, f"{name} has {len(found)} times: {sentence}"
    return list(found[0]) if isinstance(found[0], tuple) else found


def figure(file: str, what: str, digits: int = 2) -> str:
    """Returns the median of a figure of benchmarks/results."""
    _, result = read(RESULTS / file)
    (one,) = [each for each in result.figures if each.what == what]
    return f"{one.median:.{digits}f}"


def ratio(file: str, title: str, arm: str) -> str:
    """Returns the median over rounds of an arm's CPU time over the reference's."""
    _, result = read(RESULTS / file)
    (one,) = [each for each in result.comparisons if each.title.startswith(title)]
    return f"{statistics.median(one.cpu_ratios(arm)):.2f}"


def proven() -> list[str]:
    """Returns the numbers of right cases and of all, as `python -m zoo` has written them."""
    return stated("docs/models.md", "**{}** of {} cases are right")


def test_the_cases_of_the_zoo_are_those_of_its_table() -> None:
    right, of = (f"{int(number):,}" for number in proven())
    assert stated("README.md", "| {} of {} cases right; the table names the rest") == [right, of]


def test_the_readme_has_the_speeds_that_were_measured() -> None:
    trainer = figure(STEP, "0.1M: speed of project over Trainer")
    hand = figure(STEP, "5M: speed of project over hand")
    sentence = (
        "| {} times the speed of Hugging Face's Trainer at 0.1M parameters, {} times a hand-written"
        " loop's at 5M |"
    )
    assert stated("README.md", sentence) == [trainer, hand]
    data, _ = read(RESULTS / STEP)
    assert f"it is not slower ({data['date']}, two cores)" in page("README.md")


ROWS = {  # of the table "What a step costs": the arm
    "this library, everything on": "project",
    "Hugging Face's Trainer, defaults": "Trainer",
    "Lightning, defaults and four logged values": "Lightning",
}


@pytest.mark.parametrize("row", ROWS)
def test_the_page_of_speed_has_the_ratios_that_were_measured(row: str) -> None:
    models = ("null model", "0.1M model", "5M model")
    measured = [ratio(STEP, title, ROWS[row]) for title in models]
    assert stated("docs/speed.md", f"| {row} | {{}} | {{}} | {{}} |") == measured


def two_processes() -> Iterator[tuple[str, str]]:
    for strategy, name in (("ddp", "DDP"), ("fsdp2", "FSDP2")):
        yield name, figure(DIST, f"{strategy}: the same by CPU time of both ranks", 3)


@pytest.mark.parametrize(("name", "measured"), [*two_processes()])
def test_the_page_of_speed_has_the_figures_of_two_processes(name: str, measured: str) -> None:
    assert re.search(rf"\b{name} {re.escape(measured)} \(", page("docs/speed.md"))


def test_a_page_that_states_another_figure_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.proven", lambda: ["2187", "2504"])
    with pytest.raises(AssertionError):
        test_the_cases_of_the_zoo_are_those_of_its_table()
