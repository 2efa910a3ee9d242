"""The report of one run: readable offline, escaped, without empty plots."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from dist_template.observe.history.run import PlotlyJs
from dist_template.wings.diagnose import History, read_run
from dist_template.wings.diagnose.report import curves, page
from tests.support.plotted import plotted
from tests.support.runs import PROJECT, only_run, run
from tests.support.wings import tables
from tests.support.written import HOSTILE, falling, write_run


class Elements(HTMLParser):
    """What a browser would make of a page: elements with their attributes, and the texts of scripts and others."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.figures = plotted(page)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self._open = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open == "script":
            self.scripts[-1] += data
        else:
            self.text += data


def libraries(made: Elements) -> list[str]:
    """The addresses of scripts in other files."""
    return [
        str(attributes["src"])
        for tag, attributes in made.elements
        if tag == "script" and "src" in attributes
    ]


def report(folder: Path, plotly: PlotlyJs = "shared") -> Elements:
    page.write([folder], folder, plotly)
    return Elements((folder / "report.html").read_text(encoding="utf-8"))


def test_all_runs_share_one_plotly(tmp_path: Path) -> None:
    for place, root in (("runs/a/1", "runs"), ("runs/b/c/2", "runs"), ("copied/3", "runs")):
        name = place.removeprefix("runs/").rpartition("/")[0]
        folder = write_run(tmp_path / place, falling(5), {"run": {"name": name, "root": root}})
        (library,) = libraries(report(folder))
        assert (folder / library).read_text("utf-8").startswith("/**\n* plotly.js v")
        assert (folder / "report.html").stat().st_size < 100_000
    found = {path.relative_to(tmp_path).parent.as_posix() for path in tmp_path.rglob("*.js")}
    assert found == {"runs", "copied/3"}, (
        "a run that was copied out of its root writes nothing outside of itself"
    )
    (tmp_path / "runs/a/1/config.yaml").write_text(
        "run: {name: a, root: runs, plotly: cdn}", "utf-8"
    )
    page.write([tmp_path / "runs/a/1"], tmp_path / "runs/a/1")
    (library,) = libraries(Elements((tmp_path / "runs/a/1/report.html").read_text("utf-8")))
    assert library.startswith("https://cdn.plot.ly/plotly-"), "as the run has it"


def test_an_inline_page_needs_no_other_file(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a" / "1", falling(5))
    assert run("report", str(folder), "--plotly=inline") == 0
    made = Elements((folder / "report.html").read_text(encoding="utf-8"))
    assert not list(tmp_path.rglob("*.js"))
    assert not [a for _, a in made.elements if {"src", "href", "srcset", "data"} & set(a)]
    assert not [
        tag for tag, _ in made.elements if tag in ("link", "iframe", "object", "base", "form")
    ]


def test_texts_of_a_run_are_escaped(tmp_path: Path) -> None:
    config = {"run": {"name": "a"}, "data": {"prompts": [HOSTILE]}, "model": {HOSTILE: HOSTILE}}
    metrics = falling(5) | {f"train/{HOSTILE}": [1.0, 2.0]}
    folder = write_run(
        tmp_path / "a" / "<b>1",
        metrics,
        config,
        {"data": {}},
        host=HOSTILE,
        packages={HOSTILE: HOSTILE},
    )
    (folder / "incidents.jsonl").write_text(
        json.dumps({"step": 3, "kind": HOSTILE}) + "\n", encoding="utf-8"
    )
    (folder / "crash").mkdir()
    crash = {
        "time": 1.0,
        "step": 5,
        "rank": 0,
        "host": HOSTILE,
        "error": HOSTILE,
        "message": HOSTILE,
    }
    (folder / "crash" / "rank0.json").write_text(json.dumps(crash), encoding="utf-8")
    made = report(folder)
    assert not [text for text in made.scripts if HOSTILE in text] and "img" not in [
        tag for tag, _ in made.elements
    ]
    assert not [a for _, a in made.elements if any(name.startswith("on") for name in a)]
    assert made.text.count(HOSTILE) >= 6, "and all of it can be read"
    plotted = [trace["name"] for plot in made.figures for trace in plot["data"]]
    assert not [name for name in plotted if "<" in name], "plotly takes names for HTML"


def test_attributes_and_data_are_escaped(tmp_path: Path) -> None:
    history = read_run(
        write_run(tmp_path / "a" / "<i>", falling(3) | {"train/</script><b>": [1.0]})
    )
    made = Elements(page.page([history], [[]], link='"><b>'))
    assert libraries(made) == ['"><b>']
    assert "i" not in [tag for tag, _ in made.elements]
    assert "train/</script><b>" in made.text and len(made.figures) == 5


@pytest.mark.parametrize("steps", [1, 3])
def test_few_points_are_marked_and_a_metric_without_values_has_no_plot(
    tmp_path: Path, steps: int
) -> None:
    metrics = falling(steps) | {"perf/mfu": [math.nan] * steps}
    shown = curves.figures([read_run(write_run(tmp_path / "a" / "1", metrics))], ["a/1"])
    assert [title.split()[0] for title in shown] == ["Loss,", "Gradient", "Learning", "Tokens"]
    assert all("markers" in str(trace["mode"]) for traces in shown.values() for trace in traces)


def test_non_finite_values_are_gaps(tmp_path: Path) -> None:
    metrics = falling(30)
    metrics["train/loss"][9], metrics["train/loss"][20] = math.nan, math.inf
    folder = write_run(tmp_path / "a" / "1", metrics)
    made = report(folder)
    (loss,) = made.figures[0]["data"]
    assert [i for i, value in enumerate(loss["y"]) if value is None] == [9, 20]


def test_the_configuration_is_compared_with_the_defaults(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "1"
    defaults = {
        "run": {"name": "a", "root": str(tmp_path)},
        "samples": {"folder": "{run}"},
        "trainer": {"strategy": "auto", "max_steps": -1, "precision": None},
        "data": {"source": {"class_path": "pkg.TextFiles", "init_args": {"paths": []}}, "seed": 0},
    }
    config = json.loads(json.dumps(defaults))
    config["samples"]["folder"] = str(folder)  # as a run writes it, with the folder filled in
    config["trainer"] |= {"max_steps": 7, "precision": "bf16"}
    config["trainer"]["strategy"] = {
        "class_path": "pkg.parallel.ZeroStrategy",
        "init_args": {"stage": 2},
    }
    assert settings(read_run(write_run(folder, falling(3), config, defaults))) == [
        ["trainer.max_steps", "7", "-1"],
        ["trainer.precision", "bf16", "null"],
        ["trainer.strategy", "ZeroStrategy", "auto"],
        ["trainer.strategy.stage", "2", "–"],
    ]


def settings(history: History) -> list[list[str]]:
    (found,) = [
        table.rows for table in tables([history], ["a"]) if table.title == "Settings that differ"
    ]
    return found


def test_sections_without_content_are_omitted(tmp_path: Path) -> None:
    made = report(write_run(tmp_path / "a" / "1", {}, command=["python", "-c", "worker"]))
    assert (
        "Crashes" not in made.text and "No metric was written." in made.text and made.figures == []
    )


def test_the_tools_start_without_torch(tmp_path: Path) -> None:
    runs = [str(write_run(tmp_path / "a" / name, falling(3))) for name in "12"]
    code = (
        "import sys; from tests.support.line import main; assert main(['compare', *sys.argv[1:]]) == 0;"
        "sys.exit(', '.join({'torch', 'lightning', 'transformers'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *runs],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    assert run("report", str(tmp_path)) == 2
    assert "is not the folder of a run" in capfd.readouterr().err


def test_fit_ends_with_a_report(
    flags: list[str], tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    assert run("fit", *flags, "--run.report=true", "--trainer.max_steps=3") == 0
    folder = only_run(tmp_path)
    made = Elements((folder / "report.html").read_text(encoding="utf-8"))
    assert "step 3 of 3" in made.text
    assert [len(trace["x"]) for trace in made.figures[0]["data"]] == [3, 2]
    assert made.figures[0]["data"][1]["x"] == [0, 3], "validation before training, and the last one"
    assert ["data.seq_len", "32", "256"] in settings(
        read_run(folder)
    ) and "samples.folder" not in made.text
    assert f"report            {folder}/report.html" in capfd.readouterr().out


@pytest.mark.parametrize("broken", [False, True])
def test_a_crash_leaves_a_report_and_no_report_hides_an_error(
    flags: list[str],
    tmp_path: Path,
    capfd: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    broken: bool,
) -> None:
    if broken:
        monkeypatch.setattr(page, "page", lambda *_: 1 / 0)
    stop = "tests.support.runs.StopAfter"
    with pytest.raises(RuntimeError, match="stopped by the test"):
        run(
            "fit",
            *flags,
            "--run.report=true",
            f"--trainer.callbacks+={stop}",
            "--trainer.callbacks.step=4",
        )
    folder, shown = only_run(tmp_path), capfd.readouterr().err
    assert (folder / "report.html").exists() != broken
    assert ("at_run_end of diagnose failed: ZeroDivisionError" in shown) == broken
    if not broken:
        made = Elements((folder / "report.html").read_text(encoding="utf-8"))
        assert "step 4 of 20" in made.text and "training crashed: RuntimeError" in made.text
        assert made.figures[0]["data"][0]["x"] == [1, 2, 3], "what was logged last is in it"
