"""Each case of device_cases.py is reported by its kind, its operation and its line."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from processes import run

import fake_cuda

CASES = Path(__file__).with_name("device_cases.py")
NAMES = re.findall(r"^@reports\(.*\)\ndef (\w+)", CASES.read_text("utf-8"), re.MULTILINE)
OF_SOUND_CODE = {"KERNEL", "H2D_PINNED"}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    reason = fake_cuda.refusal()
    if reason:
        pytest.skip(reason)
    done = run(tmp_path_factory.mktemp("device"), str(CASES))
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert [*found] == NAMES
    return found


@pytest.mark.parametrize("name", NAMES)
def test_the_device_reports(name: str, reported: dict[str, Any]) -> None:
    case = reported[name]
    events = case["events"]
    if not case["line"]:
        assert {event["kind"] for event in events} <= OF_SOUND_CODE, events
        return
    named = [
        event
        for event in events
        if event["kind"] == case["kind"]
        and case["operation"] in event["operation"]
        and f"device_cases.py:{case['line']} {name}" in event["place"]
    ]
    assert named, events
