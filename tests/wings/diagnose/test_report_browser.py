"""The report in a real browser: plots are drawn, nothing is complained about, and nothing is fetched."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from dist_template.wings.diagnose.report import page as pages
from tests.support.written import HOSTILE, falling, write_run

pytestmark = pytest.mark.browser

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)


def opened(page: Path, profile: Path, *flags: str) -> tuple[str, list[str]]:
    """Returns the document after some seconds, and the console's messages; there is no network."""
    if BROWSER is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is installed")
    command = [
        BROWSER,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
    ]
    command += [
        f"--user-data-dir={profile}",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        "--enable-logging=stderr",
    ]
    command += ["--virtual-time-budget=4000", *flags, "--dump-dom", page.absolute().as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def drawn(document: str) -> list[int]:
    """Of each plot: how many lines or points it shows."""
    plots = re.findall(r'<div class="plot[^>]*>(.*?)</figure>', document, re.DOTALL)
    return [len(re.findall(r'class="(?:js-line|point)" [^>]*d="M', plot)) for plot in plots]


def test_every_plot_of_three_steps_shows_its_points(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a" / "<b>1", falling(3) | {"eval/loss": [5.0]}, host=HOSTILE)
    pages.write([folder], folder)
    document, console = opened(folder / "report.html", tmp_path / "profile")
    assert console == []
    assert "<title>a/&lt;b&gt;1</title>" in document, "no script of the run's has changed it"
    assert drawn(document) == [
        4 + 2 + 2,
        4,
        4,
        4,
    ]  # a line, three points; in the first a validation, a legend


@pytest.mark.slow
def test_a_long_run_and_one_with_gaps_at_a_phones_width(tmp_path: Path) -> None:
    broken = falling(300)
    broken["train/loss"][100:200] = [math.nan] * 100
    runs = [
        write_run(tmp_path / "a" / "1", falling(20_000)),
        write_run(tmp_path / "a" / "2", broken),
    ]
    pages.write(runs, tmp_path)
    document, console = opened(
        tmp_path / "report.html", tmp_path / "profile", "--window-size=500,900"
    )
    assert console == [] and len(drawn(document)) == 4 and min(drawn(document)) >= 2
    widths = [
        float(width) for width in re.findall(r'class="main-svg"[^>]* width="([\d.]+)"', document)
    ]
    assert widths and max(widths) <= 500


@pytest.mark.slow
def test_a_moved_root_has_its_plotly(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path / "runs" / "a" / "1", falling(3), {"run": {"name": "a", "root": "runs"}}
    )
    pages.write([folder], folder)
    (tmp_path / "runs").rename(tmp_path / "elsewhere")
    page = tmp_path / "elsewhere" / "a" / "1" / "report.html"
    assert drawn(opened(page, tmp_path / "profile")[0]) == [4, 4, 4, 4]
