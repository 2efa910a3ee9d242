"""Numeric flags of verbs have a range; another value is one sentence with exit code 2."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import dist_template
from tests.support.line import command

TOOLS = Path(dist_template.__file__).parent / "wings"
SERVE = "--max_tokens=0 --max_tokens=99999999999 --max_requests=0 --grace_s=nan --grace_s=-1"
BAD = {
    "serve MODEL": f"{SERVE} --grace_s=inf --port=99999 --max_tokens=many",
    "plan": "--tflops=0 --tflops=nan --tflops=inf --nodes=0 --nodes=1000000 --devices=99999999999",
    "plan --bandwidth 1": "nan inf 0",
    "sweep --space=lr.yaml": "--trials=0 --trials=-1 --prune_after=-1",
    "rehearse": "--processes=0 --nodes=0 --devices=-1 --nodes=1e3",
}
CASES = [(verb, flag) for verb, flags in BAD.items() for flag in flags.split()]


@pytest.mark.parametrize(("verb", "flag"), CASES, ids=" ".join)
def test_a_number_out_of_range_is_one_sentence(verb: str, flag: str, capsys: Any) -> None:
    assert command([*verb.split(), flag]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and "give" in error
    name, _, value = flag.rpartition("=")
    assert (name or "--bandwidth") in error and f"'{value}'" in error


def test_every_numeric_flag_has_a_range() -> None:
    """argparse's int and float accept -1, nan and 10**12."""
    texts = {path: path.read_text(encoding="utf-8") for path in TOOLS.rglob("*.py")}
    assert [
        path.name for path, text in texts.items() if re.search(r"type=(int|float)\b", text)
    ] == []
