"""The verbs `diagnose`, `report` and `compare`: what they take, print and write; escaped pages."""

import json
import math
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from dist_template import InputError
from dist_template.cluster import run_lock
from dist_template.observe.history.run import read_lines
from dist_template.wings.diagnose import callback as diagnosis
from dist_template.wings.diagnose import expected, read_run
from dist_template.wings.diagnose.report import page
from dist_template.wings.diagnose.report.tables import tables
from dist_template.wings.launch import command as launch
from dist_template.wings.setup.upgrade import read_record
from dist_template.wings.ship.promote import Registry
from tests.support.runs import logged, main, only_run, run
from tests.support.written import HOSTILE, falling, write_run

CONFIG = {"trainer": {"precision": "32-true", "max_steps": 400}}
FACTS = {"machine": {"device": "NVIDIA H200", "supports_bf16": True}}


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "pretrain" / "slow"
    return write_run(folder, falling(400), CONFIG, facts=FACTS)


def test_it_says_what_is_wrong_and_what_to_type(slow: Path, capsys: Any) -> None:
    assert main(["diagnose", str(slow)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{slow}: step 400 of 400: 1 warning\n\nWARNING  training runs in fp32")
    assert "--trainer.precision bf16-mixed" in out and "now 32-true" in out
    assert main(["diagnose", str(slow), str(slow), "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert first == second and first["run"] == str(slow) and first["step"] == 400
    (finding,) = first["findings"]
    assert finding["causes"][0]["changes"][0]["flag"] == "--trainer.precision bf16-mixed"


def test_it_takes_the_newest_run(slow: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    newer = write_run(tmp_path / "runs" / "other" / "newer", falling(400), facts={"machine": {}})
    for path in newer.iterdir():
        os.utime(path, (4e9, 4e9))
    monkeypatch.chdir(tmp_path)
    assert main(["diagnose"]) == 0
    printed = capsys.readouterr().out
    assert "runs/other/newer" in printed and "nothing found: checked " in printed
    (newer / "facts.json").unlink()
    assert main(["diagnose", str(newer)]) == 0 and "facts.json missing" in capsys.readouterr().out
    (newer / "config.yaml").unlink()
    assert main(["diagnose", "runs"]) == 0 and "pretrain/slow" in capsys.readouterr().out
    assert main(["diagnose", str(newer)]) == 2 and "has no config.yaml" in capsys.readouterr().err
    assert main(["diagnose", str(newer.parent)]) == 2
    assert "is not a run folder" in capsys.readouterr().err


LOW = """--model.optim.learning_rate=1e-7 --trainer.limit_val_batches=0 --diagnosis.every_s=0
    --trainer.max_steps=60""".split()


@pytest.mark.slow
def test_a_finding_is_shown_once(flags: Any, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    refresh, calls = diagnosis.History.refresh, list[Any]()

    def stutter(history: Any) -> None:
        calls.append(history)
        if len(calls) == 2:  # the first reads what earlier attempts wrote
            raise OSError("Stale file handle")
        refresh(history)

    monkeypatch.setattr(diagnosis.History, "refresh", stutter)
    assert run("fit", *flags, *LOW) == 0
    out, folder = capsys.readouterr().out, only_run(tmp_path)
    assert "Stale file handle; training continues" in out
    assert out.count("diagnosis: error: the loss does not decrease") == 1
    assert f"diagnose {folder}" in out
    lines = read_lines(folder / diagnosis.FILE)
    (found,) = (line for line in lines if line["rule"] == "loss_not_decreasing")
    assert found["step"] < 60
    assert found["causes"][0]["changes"][0]["key"] == "model.optim.learning_rate"
    errors = logged(folder, "health/errors")
    assert errors[2] == 0 and errors[60] == 1


GOOD: dict[str, dict[str, Any]] = {
    "config.yaml": {"trainer": {"max_steps": 9}, "model": {"optim": {"warmup": 1}}},
    "defaults.yaml": {"trainer": {"max_steps": -1}},
    "facts.json": {"training": {"max_steps": 9}, "parameters": {"active": 5}},
    "environment.json": {"packages": {"torch": "2"}},
    "metrics.jsonl": {"step": 1, "time": 5.0, "train/loss": 2.5},
    "goodput.jsonl": {"attempt": 1.0, "time": 2.0, "from_step": 0, "step": 4, "productive": 1.0},
    "incidents.jsonl": {"step": 3, "kind": "spike", "action": "skip"},
    "crash/rank0.json": {"time": 3.0, "step": 2, "kind": "error", "message": "x"},
    "launch/launch.json": {"on": "slurm", "id": "5", "hosts": [], "ssh": ""},
    "lock.json": {"host": "a", "machine": "b", "pid": 1, "since": 2.0, "parent": 3, "launch": ""},
    ".cruft.json": {"template": "x", "commit": "y", "context": {"cookiecutter": {"a": "b"}}},
}
VALUES: list[Any] = [None, True, -1, 0.5, math.nan, 10**400, "x", [], [1], {}, {"a": {"b": 1}}]
DAMAGES = [b"\xff\xfe\0", b"[" * 20_000, b'{"a": ' * 20_000, b"{]", b"9" * 5_000]
DAMAGES += [b"a: b: c", b"!!int x", b"\t- x\n"]


def damaged(record: dict[str, Any]) -> Iterator[bytes]:
    """Other bytes, another value for the object or for one in it, or a part of the file."""
    text = json.dumps(record).encode()
    yield from DAMAGES
    yield from (text[:end] for end in range(0, len(text), 8))
    changed = [*VALUES, *({key: record[key]} for key in record)]
    changed += [record | {key: value} for key in record for value in VALUES]
    yield from (json.dumps(each).encode() for each in changed)


def read_all(folder: Path) -> None:
    history = read_run(folder)
    expected.progress(history)
    for histories in ([history], [history] * 2):
        tables(histories, [""] * len(histories))


def read_lock(folder: Path) -> None:
    holder = run_lock.read(folder / "lock.json") or {}
    run_lock.refusal(folder / "lock.json", holder, run_lock.this_process())


READERS: list[Callable[[Path], Any]] = [read_all, read_record, read_lock]
READERS.append(lambda folder: launch.read_record(folder / "launch"))
READERS.append(lambda folder: Registry(folder).roll_back())


@pytest.mark.parametrize("name", GOOD)
def test_a_damaged_file_gives_no_traceback(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    for file, record in GOOD.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(json.dumps(record))
    (tmp_path / "latest").symlink_to("v1")
    monkeypatch.setattr(run_lock, "LEASE_S", 0.0)
    for content in damaged(GOOD[name]):
        (tmp_path / name).write_bytes(content)
        for read in READERS:
            try:
                read(tmp_path)
            except InputError as error:
                assert len(str(error)) < 1_000 and "\n" not in str(error), error


def test_what_is_left_of_a_damaged_file_is_read(tmp_path: Path) -> None:
    good = json.dumps(GOOD["metrics.jsonl"])
    bad = ["[]", '{"step": "x", "time": 1}', '{"step": NaN, "time": 1}', "5"]
    lines = [good, *bad, good.replace('"step": 1', '"step": 2')]
    (tmp_path / "metrics.jsonl").write_bytes("\n".join(lines).encode() + b"\n\xff\n")
    loss = read_run(tmp_path).metrics["train/loss"]
    assert loss.steps.tolist() == [1, 2] and math.isclose(loss.values[0], 2.5)


LOSS = "train/loss"


class Elements(HTMLParser):
    """A page: its elements with their attributes, its figures, and its texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.figures = plotted(text)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[bool, str] = {True: "", False: ""}  # in scripts, elsewhere
        self._open = ""
        self.feed(text)
        scripts = [attributes for tag, attributes in self.elements if tag == "script"]
        self.libraries = [str(each["src"]) for each in scripts if "src" in each]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._open = tag

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        self.texts[self._open == "script"] += data


def plotted(page: str) -> list[Any]:
    """The data of each figure, which must be strict JSON."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    decoder = json.JSONDecoder(parse_constant=refuse)
    starts = re.finditer(r'Plotly\.newPlot\(\s*"plot-\d+",\s*', page)
    return [decoder.raw_decode(page, start.end())[0] for start in starts]


def report(folder: Path) -> Elements:
    page.write([folder], folder)
    return Elements((folder / "report.html").read_text(encoding="utf-8"))


def test_all_runs_share_one_plotly(tmp_path: Path) -> None:
    for place, name in (("runs/a/1", "a"), ("runs/b/c/2", "b/c"), ("copied/3", "copied")):
        config = {"run": {"name": name, "root": "runs"}}
        folder = write_run(tmp_path / place, falling(5), config)
        (library,) = report(folder).libraries
        assert (folder / library).read_text("utf-8").startswith("/**\n* plotly.js v")
        assert (folder / "report.html").stat().st_size < 100_000
    found = {path.relative_to(tmp_path).parent.as_posix() for path in tmp_path.rglob("*.js")}
    assert found == {"runs", "copied/3"}, "a copied run writes nothing outside of itself"


def test_a_report_without_its_script_has_its_curves(tmp_path: Path) -> None:
    """A page that was moved alone: what a browser shows then is in the page itself."""
    broken = falling(500)
    broken[LOSS][100:200] = [math.nan] * 100
    config = {"run": {"name": "a", "root": "runs"}}
    folder = write_run(tmp_path / "runs" / "a" / "1", broken | {"eval/loss": [5.0]}, config)
    page.write([folder], folder)
    text = (folder / "report.html").read_text(encoding="utf-8")
    figures = re.findall(r"<figure.*?</figure>", text, re.DOTALL)
    plain = re.findall(r'<div class="plain">(<svg.*?</svg>)(<svg>.*?</svg>)</div>', text)
    drawings, axes = ([*map(ElementTree.fromstring, each)] for each in zip(*plain, strict=True))
    assert len(drawings) == len(figures) == len(Elements(text).figures) >= 4
    lines = [[*drawing.iter("polyline")] for drawing in drawings]
    assert all(lines) and len(lines[0]) == 3, "the gap is one, and there is a point"
    single = lines[0].pop()
    assert single.attrib["points"].split() == [single.attrib["points"].split()[0]] * 2
    names = [[name.text for name in axis.iter("tspan")] for axis in axes]
    assert names[0] == ["train/loss", "eval/loss"], "above the curves, not on them"
    for line in sum(lines, []):
        points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
        assert 1 < len(points) <= 201 and points == sorted(points)
        assert all(0 <= x <= 1000 and 0 <= y <= 1000 for x, y in points)
    shown = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert "min.js is not beside this page" in shown and "--plotly inline" in shown
    assert 'if (window.Plotly) document.documentElement.classList.add("has-plotly")' in text
    assert ".has-plotly .plain, html:not(.has-plotly) .plotly-graph-div { display: none; }" in text
    assert "is not beside this page" not in page.page([read_run(folder)], [[]])


def test_an_inline_page_needs_no_other_file(tmp_path: Path, capfd: Any) -> None:
    folder = write_run(tmp_path / "a" / "1", falling(5))
    assert run("report", str(folder), "--plotly=inline") == 0
    made = Elements((folder / "report.html").read_text(encoding="utf-8"))
    assert not list(tmp_path.rglob("*.js"))
    loading = {"src", "href", "srcset", "data"}
    assert not [given for _, given in made.elements if loading & set(given)]
    others = ("link", "iframe", "object", "base", "form")
    assert not [tag for tag, _ in made.elements if tag in others]
    (tmp_path / "none").mkdir()
    assert run("report", str(tmp_path / "none")) == 2
    assert "is not a run folder and contains none" in capfd.readouterr().err


def test_texts_of_a_run_are_escaped(tmp_path: Path) -> None:
    config = {"run": {"name": "a"}, "data": {"prompts": [HOSTILE]}, "model": {HOSTILE: HOSTILE}}
    metrics = falling(5) | {f"train/{HOSTILE}": [1.0, 2.0]}
    others: Any = {"host": HOSTILE, "packages": {HOSTILE: HOSTILE}}
    folder = write_run(tmp_path / "a" / "<b>1", metrics, config, {"data": {}}, **others)
    (folder / "incidents.jsonl").write_text(json.dumps({"step": 3, "kind": HOSTILE}) + "\n")
    (folder / "crash").mkdir()
    crash = {"time": 1.0, "step": 5, "rank": 0, "host": HOSTILE, "error": HOSTILE}
    (folder / "crash" / "rank0.json").write_text(json.dumps(crash), encoding="utf-8")
    made = report(folder)
    assert HOSTILE not in made.texts[True] and "img" not in {tag for tag, _ in made.elements}
    assert not [name for _, given in made.elements for name in given if name.startswith("on")]
    assert made.texts[False].count(HOSTILE) >= 6, "and all of it can be read"
    names = [trace["name"] for traces in made.figures for trace in traces]
    assert not [name for name in names if "<" in name], "plotly takes names for HTML"
    linked = Elements(page.page([read_run(folder)], [[]], link='"><b>'))
    assert linked.libraries == ['"><b>']


def test_non_finite_values_are_gaps_and_a_last_one_is_shown(tmp_path: Path) -> None:
    metrics = falling(30)
    metrics[LOSS][9], metrics[LOSS][20], metrics[LOSS][29] = math.nan, math.inf, math.nan
    config, defaults = ({"data": {"seq_len": length}} for length in (32, 256))
    folder = write_run(tmp_path / "a" / "1", metrics, config, defaults)
    (loss,) = report(folder).figures[0]
    assert [i for i, value in enumerate(loss["y"]) if value is None] == [9, 20, 29]
    assert rows("Results", [folder])[LOSS] == ["nan"]
    assert rows("Settings that differ", [folder])["data.seq_len"] == ["32", "256"]


def rows(title: str, folders: list[Path]) -> dict[str, list[str]]:
    names = [folder.name for folder in folders]
    made = tables([read_run(folder) for folder in folders], names)
    (found,) = [table for table in made if title in table.title]
    return {cells[0]: cells[1:] for cells in found.rows}


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Two that differ in their seed, one with another rate and 2.5 times the tokens a step."""
    made = []
    for number, (rate, seed) in enumerate([(1e-3, 0), (1e-3, 1), (3e-3, 0)]):
        steps, batch = (20, 4096.0) if number < 2 else (10, 8192.0 * 1.25)
        metrics = falling(steps) | {"train/tokens": [batch * (i + 1) for i in range(steps)]}
        metrics[LOSS] = [10.0 - 0.1 * i + number for i in range(steps)]
        config: Any = {"seed_everything": seed, "run": {"name": "x"}}
        config["model"] = {"optim": {"learning_rate": rate}}
        made.append(write_run(tmp_path / "x" / f"r{number}", metrics, config))
    return made


def test_runs_are_compared_at_their_ends_and_at_equal_tokens(runs: list[Path]) -> None:
    """The first two end at 81,920 tokens, the third at 102,400: at step 8 of 10 it has 81,920."""
    first = [10 - 0.1 * 19, 11 - 0.1 * 19]
    final, equal = rows("Results", runs), rows("At 81,920 tokens", runs)
    assert final["optimizer steps"] == ["20", "20", "10"]
    assert final[LOSS] == [f"{value:.5g}" for value in (*first, 12 - 0.1 * 9)]
    assert equal[LOSS] == [f"{value:.5g}" for value in (*first, 12 - 0.1 * 7)]


def test_report_and_compare_take_the_folder_of_runs(runs: list[Path], tmp_path: Path) -> None:
    """As the other verbs do: its newest run, and not a page about none."""
    for age, folder in enumerate(runs):
        for file in folder.iterdir():
            os.utime(file, (1e9 - age, 1e9 - age))
    assert run("report", str(tmp_path / "x")) == 0
    assert (runs[0] / "report.html").exists() and not (tmp_path / "x" / "report.html").exists()
    other = write_run(tmp_path / "y" / "r0", falling(5))
    assert run("compare", str(tmp_path / "x"), str(tmp_path / "y")) == 0
    assert other.name in (tmp_path / "report.html").read_text("utf-8")


def test_compare_prints_what_differs(runs: list[Path], tmp_path: Path, capfd: Any) -> None:
    assert run("compare", *map(str, runs)) == 0
    shown = capfd.readouterr().out
    lines = [line.split() for line in shown.splitlines()]
    assert ["seed_everything", "0", "1", "0"] in lines
    assert ["model.optim.learning_rate", "0.001", "0.001", "0.003"] in lines
    assert "run.name" not in shown and (tmp_path / "x/report.html").exists()
    assert run("compare", str(runs[0])) == 2
    assert run("compare", str(runs[0]), f"{runs[0].parent}/../x/r0") == 2
    error = capfd.readouterr().err
    assert "got one run" in error and "given twice" in error


NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
HEADLESS = "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run"
OFFLINE = "--host-resolver-rules=MAP * ~NOTFOUND"


@pytest.mark.browser
@pytest.mark.slow
def test_a_moved_report_is_drawn_offline_at_a_phones_width(tmp_path: Path) -> None:
    if BROWSER is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is installed")
    broken = falling(300)
    broken[LOSS][100:200] = [math.nan] * 100
    config = {"run": {"name": "a", "root": "runs"}}
    hostile = falling(3) | {"eval/loss": [5.0]}
    runs = [write_run(tmp_path / "runs" / "a" / "<b>1", hostile, config, host=HOSTILE)]
    runs += [write_run(tmp_path / "runs" / "a" / "2", falling(20_000), config)]
    runs += [write_run(tmp_path / "runs" / "a" / "3", broken, config)]
    page.write(runs, runs[0])
    (tmp_path / "runs").rename(tmp_path / "elsewhere")
    moved = tmp_path / "elsewhere" / "a" / "<b>1" / "report.html"
    command = [BROWSER, *HEADLESS.split(), OFFLINE, f"--user-data-dir={tmp_path / 'profile'}"]
    command += "--enable-logging=stderr --virtual-time-budget=4000 --window-size=500,900".split()
    command += ["--dump-dom", moved.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    plots = re.findall(r'<div class="plot[^>]*>(.*?)</figure>', done.stdout, re.DOTALL)
    drawn = [len(re.findall(r'class="(?:js-line|point)" [^>]*d="M', plot)) for plot in plots]
    assert len(drawn) == 4 and min(drawn) >= 3, drawn
    widths = re.findall(r'class="main-svg"[^>]* width="([\d.]+)"', done.stdout)
    assert widths and max(map(float, widths)) <= 500


def test_names_of_a_stranger_do_not_turn_a_page_around(tmp_path: Path) -> None:
    """Marks of direction and invisible letters are shown as codes, in curves and tables too."""
    folder = tmp_path / "a" / "b"
    (folder / "crash").mkdir(parents=True)
    name, message = "my/\u202eevil", "\u2066rm\u200f \U000e0041 <script>alert(1)</script>"
    lines = [{"step": step, "time": 1.0, name: 1.0 / step} for step in range(1, 9)]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    crash = {"time": 1.0, "rank": 0, "error": "ValueError", "message": message, "step": 3}
    (folder / "crash" / "rank0.json").write_text(json.dumps(crash))
    page.write([folder], folder, "cdn")
    text = (folder / "report.html").read_text("utf-8")
    assert not set(text) & set("\u202e\u2066\u200f\U000e0041") and "<script>alert" not in text
    assert r"my/\u202eevil" in text and r"\u2066rm\u200f \U000e0041 &lt;script&gt;" in text
