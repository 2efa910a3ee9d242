"""README.md's examples do what it says, and its table has every kind of event."""

import re
from pathlib import Path
from typing import get_args

import pytest
from processes import run

import fake_cuda

PAGE = (Path(__file__).parents[1] / "README.md").read_text("utf-8")
PYTHON = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
PRINTED = re.findall(r"^```text\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider")


def test_the_table_has_every_kind() -> None:
    rows = re.findall(r"^\| (`.*?`) \|", PAGE, re.MULTILINE)
    assert re.findall(r"`(\w+)`", " ".join(rows)) != []
    assert {*re.findall(r"`(\w+)`", " ".join(rows))} == {*get_args(fake_cuda.Kind)}


def test_every_public_name_is_explained() -> None:
    missing = [name for name in fake_cuda.__all__ if f"`{name}" not in PAGE]
    assert missing == []


@pytest.mark.slow
@pytest.mark.usefixtures("device")
def test_the_first_example_prints_the_event(tmp_path: Path) -> None:
    done = run(tmp_path, "first.py", first=PYTHON[0])
    assert done.stdout.endswith(PRINTED[0]), done.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("device")
def test_the_example_of_a_step_fails_at_its_line_and_passes_without_it(tmp_path: Path) -> None:
    failed = run(tmp_path, *PYTEST, "test_step.py", test_step=PYTHON[1])
    assert failed.returncode == 1 and PRINTED[1] in failed.stdout, failed.stdout
    mended = PYTHON[1].replace("loss.item()", "loss.detach()")
    assert mended != PYTHON[1]
    passed = run(tmp_path, *PYTEST, "test_step.py", test_step=mended)
    assert passed.returncode == 0, passed.stdout


@pytest.mark.slow
@pytest.mark.usefixtures("device")
def test_the_example_of_two_ranks_passes(tmp_path: Path) -> None:
    done = run(tmp_path, *PYTEST, "test_ranks.py", test_ranks=PYTHON[2])
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout
