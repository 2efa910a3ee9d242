"""The report of one run: readable offline, escaped, no empty plots, for three steps as for a hundred thousand."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dist_template.observe.history.metrics import Series
from dist_template.observe.history.run import PlotlyJs
from dist_template.wings.diagnose import read_run
from dist_template.wings.diagnose.report import curves, page
from dist_template.wings.diagnose.report.results import resume
from dist_template.wings.diagnose.report.sections import from_defaults
from tests.support.plotted import plotted
from tests.support.runs import PROJECT, only_run, run
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
    return [str(attributes["src"]) for tag, attributes in made.elements if tag == "script" and "src" in attributes]


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
    assert found == {"runs", "copied/3"}, "a run that was copied out of its root writes nothing outside of itself"
    (tmp_path / "runs/a/1/config.yaml").write_text("run: {name: a, root: runs, plotly: cdn}", "utf-8")
    page.write([tmp_path / "runs/a/1"], tmp_path / "runs/a/1")
    (library,) = libraries(Elements((tmp_path / "runs/a/1/report.html").read_text("utf-8")))
    assert library.startswith("https://cdn.plot.ly/plotly-"), "as the run has it"


def test_an_inline_page_needs_no_other_file(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a" / "1", falling(5))
    assert run("report", str(folder), "--plotly=inline") == 0
    made = Elements((folder / "report.html").read_text(encoding="utf-8"))
    assert not list(tmp_path.rglob("*.js"))
    assert not [a for _, a in made.elements if {"src", "href", "srcset", "data"} & set(a)]
    assert not [tag for tag, _ in made.elements if tag in ("link", "iframe", "object", "base", "form")]


def test_the_load_of_experts_is_drawn_layer_by_layer(tmp_path: Path) -> None:
    loads = {f"moe/layer_{n:02d}/load_max_over_mean": [4.0 - n / 10, 1.1, 1.1] for n in range(9)}
    shown, more = curves.figures([read_run(write_run(tmp_path / "a" / "1", falling(3) | loads))], ["a/1"])
    (drawn,) = (figure for figure in shown if figure.panel.title == "Expert load by layer")
    lines: Any = drawn.data
    assert [line["name"] for line in lines] == [f"layer_{n:02d}" for n in range(9)]
    assert len({(line["line"]["color"], line["line"]["dash"]) for line in lines}) == 9
    assert {line["line"]["color"] for line in lines} <= {*curves.COLOURS} and drawn.layout["showlegend"]
    assert not [figure for figure in more if "layer" in figure.panel.title], "not once more, one by one"


def test_texts_of_a_run_are_escaped(tmp_path: Path) -> None:
    config = {"run": {"name": "a"}, "data": {"prompts": [HOSTILE]}, "model": {HOSTILE: HOSTILE}}
    metrics = falling(5) | {f"train/{HOSTILE}": [1.0, 2.0]}
    folder = write_run(
        tmp_path / "a" / "<b>1", metrics, config, {"data": {}}, host=HOSTILE, packages={HOSTILE: HOSTILE}
    )
    (folder / "samples.txt").write_text(f"--- step 5\n{HOSTILE}\n```\n", encoding="utf-8")
    (folder / "incidents.jsonl").write_text(json.dumps({"step": 3, "kind": HOSTILE}) + "\n", encoding="utf-8")
    (folder / "crash").mkdir()
    crash = {"time": 1.0, "step": 5, "rank": 0, "host": HOSTILE, "error": HOSTILE, "message": HOSTILE}
    (folder / "crash" / "rank0.json").write_text(json.dumps(crash), encoding="utf-8")
    made = report(folder)
    assert not [text for text in made.scripts if HOSTILE in text] and "img" not in [tag for tag, _ in made.elements]
    assert not [a for _, a in made.elements if any(name.startswith("on") for name in a)]
    assert made.text.count(HOSTILE) >= 8, "and all of it can be read"
    plotted = [trace["name"] for plot in made.figures for trace in plot["data"]]
    assert not [name for name in plotted if "<" in name], "plotly takes names for HTML"
    markdown = (folder / "report.md").read_text(encoding="utf-8")
    assert f"````text\n{HOSTILE}\n```\n````" in markdown, "a fence in a sample does not end its block"
    assert "<b>" not in markdown and "<script>" not in re.sub("(`{3,})text\n.*?\n\\1", "", markdown, flags=re.DOTALL)


def test_attributes_and_data_are_escaped(tmp_path: Path) -> None:
    history = read_run(write_run(tmp_path / "a" / "1", falling(3) | {"x/</script><b>": [1.0]}))
    made = Elements(page.page(page.context([history], ["<i>"], [[]], link='"><b>')))
    assert libraries(made) == ['"><b>']
    assert "i" not in [tag for tag, _ in made.elements]
    assert "x/</script><b>" in made.text and len(made.figures) == 5


@pytest.mark.parametrize("steps", [1, 3])
def test_few_points_are_marked_and_a_metric_without_values_has_no_plot(tmp_path: Path, steps: int) -> None:
    metrics = falling(steps) | {"perf/mfu": [math.nan] * steps}
    shown, more = curves.figures([read_run(write_run(tmp_path / "a" / "1", metrics))], ["a/1"])
    titles = [figure.panel.title for figure in (*shown, *more)]
    assert titles == ["Loss", "Learning rate", "Gradient norm", "Throughput"]
    assert all("markers" in str(trace["mode"]) for figure in shown for trace in figure.data)


def test_non_finite_values_are_gaps_and_counted_in_a_sentence(tmp_path: Path) -> None:
    metrics = falling(30)
    metrics["train/loss"][9], metrics["train/loss"][20] = math.nan, math.inf
    folder = write_run(tmp_path / "a" / "1", metrics)
    made = report(folder)
    (loss,) = made.figures[0]["data"]
    assert [i for i, value in enumerate(loss["y"]) if value is None] == [9, 20]
    sentence = "train/loss: 2 of 30 values are not finite, the first at step 10."
    assert sentence in made.text and sentence in (folder / "report.md").read_text(encoding="utf-8")


def test_thinning_keeps_every_spike_and_every_gap() -> None:
    """Against the definition, part by part."""
    values = np.random.default_rng(0).normal(size=10_007)
    values[5_000], values[7_000], values[2_000:2_100] = 99.0, -99.0, math.nan
    steps = np.arange(len(values))
    thinned = curves.thin(Series(steps, values, steps.astype(float)))
    assert len(thinned) <= 2 * curves.BUCKETS and (np.diff(thinned.steps) > 0).all()
    assert np.array_equal(thinned.values, values[thinned.steps], equal_nan=True)
    for part in np.array_split(steps, curves.BUCKETS):
        kept = thinned.values[np.isin(thinned.steps, part)]
        finite = values[part][np.isfinite(values[part])]
        ends = [finite.min(), finite.max()] if len(finite) else []
        assert kept[np.isfinite(kept)].tolist() in (ends, ends[::-1]) and len(kept) > 0
    assert len(curves.thin(Series(steps[:400], values[:400], values[:400]))) == 400


def test_a_hundred_thousand_steps_stay_a_small_file(tmp_path: Path) -> None:
    made = report(write_run(tmp_path / "a" / "1", falling(100_000)))
    assert (tmp_path / "a/1/report.html").stat().st_size < 1e6
    assert max(len(trace["x"]) for plot in made.figures for trace in plot["data"]) <= 2 * curves.BUCKETS


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
    config["trainer"]["strategy"] = {"class_path": "pkg.parallel.ZeroStrategy", "init_args": {"stage": 2}}
    assert from_defaults(read_run(write_run(folder, falling(3), config, defaults))) == [
        ("trainer.max_steps", 7, -1),
        ("trainer.precision", "bf16", None),
        ("trainer.strategy", "ZeroStrategy", "auto"),
        ("trainer.strategy.stage", 2, "–"),
    ]


def test_the_command_resumes_in_the_runs_own_folder(tmp_path: Path) -> None:
    config = {"run": {"name": "a"}, "trainer": {"max_steps": 10}}
    history = read_run(write_run(tmp_path / "a" / "id 1", falling(10), config))
    assert resume(history)[1] == "python -m trainer fit --trainer.max_steps=10", "there is no checkpoint to resume from"
    checkpoint = history.folder / "checkpoints" / "step00000010.ckpt"
    checkpoint.mkdir(parents=True)
    from tests.support.library import manifest

    full = {"format": manifest.FORMAT, "step": 10, "world_size": 1, "strategy": "ddp", "time": 1.0, "files": {}}
    (checkpoint / "manifest.json").write_text(manifest.rendered(full), encoding="utf-8")
    assert resume(history)[1] == "DIST_RUN_ID='id 1' python -m trainer fit --trainer.max_steps 20"
    history.config["trainer"]["max_steps"] = 11
    assert resume(history)[1] == "DIST_RUN_ID='id 1' python -m trainer fit --trainer.max_steps=10"


def test_sections_without_content_are_omitted(tmp_path: Path) -> None:
    made = report(write_run(tmp_path / "a" / "1", {}, command=["python", "-c", "worker"]))
    assert "Continue" not in made.text and "No metric was written." in made.text and made.figures == []


def test_the_tools_start_without_torch(tmp_path: Path) -> None:
    runs = [str(write_run(tmp_path / "a" / name, falling(3))) for name in "12"]
    code = (
        "import sys; from tests.support.line import main; assert main(['compare', *sys.argv[1:]]) == 0;"
        "sys.exit(', '.join({'torch', 'lightning', 'transformers'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code, *runs], cwd=PROJECT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    assert run("report", str(tmp_path)) == 2
    assert "is not the folder of a run" in capfd.readouterr().err


def test_fit_ends_with_a_report(flags: list[str], tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    assert run("fit", *flags, "--run.report=true", "--trainer.max_steps=3") == 0
    folder = only_run(tmp_path)
    made = Elements((folder / "report.html").read_text(encoding="utf-8"))
    assert "finished all 3 steps" in made.text and "Step 3" in made.text, "with its sample"
    assert [len(trace["x"]) for trace in made.figures[0]["data"]] == [3, 2]
    assert made.figures[0]["data"][1]["x"] == [0, 3], "validation before training, and the last one"
    assert ("data.seq_len", 32, 256) in from_defaults(read_run(folder))
    assert "samples.folder" not in [key for key, *_ in from_defaults(read_run(folder))]
    markdown = (folder / "report.md").read_text(encoding="utf-8")
    assert "| data.seq_len | 32 | 256 |" in markdown and "samples.folder" not in markdown
    assert f"report            {folder}/report.html" in capfd.readouterr().out


@pytest.mark.parametrize("broken", [False, True])
def test_a_crash_leaves_a_report_and_no_report_hides_an_error(
    flags: list[str], tmp_path: Path, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    if broken:
        monkeypatch.setattr(page, "page", lambda *_: 1 / 0)
    stop = "tests.support.runs.StopAfter"
    with pytest.raises(RuntimeError, match="stopped by the test"):
        run("fit", *flags, "--run.report=true", f"--trainer.callbacks+={stop}", "--trainer.callbacks.step=4")
    folder, shown = only_run(tmp_path), capfd.readouterr().err
    assert (folder / "report.html").exists() != broken
    assert ("at_run_end of diagnose failed: ZeroDivisionError" in shown) == broken
    if not broken:
        made = Elements((folder / "report.html").read_text(encoding="utf-8"))
        assert "The run crashed at step 4 of 20: RuntimeError on rank 0." in made.text
        assert made.figures[0]["data"][0]["x"] == [1, 2, 3], "what was logged last is in it"
