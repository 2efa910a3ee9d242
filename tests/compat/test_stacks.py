"""The functions by which a hang's phase is known exist."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from dist_template.compat import stacks

LIBRARIES = [find_spec(name) for name in ("torch", "lightning.pytorch", "deepspeed")]
FOLDERS = [Path(str(spec.origin)).parent for spec in LIBRARIES if spec]
FOLDERS += [Path(stacks.__file__).parent]
KNOWN = [(part, function) for part, function, _ in stacks.PHASES if part[:1] != "<"]


def sources(part: str) -> list[Path]:
    name = f"/{part.strip('/')}"
    return [path for each in FOLDERS for path in each.rglob("*.py") if name in f"{path}"]


@pytest.mark.parametrize(("part", "function"), KNOWN)
def test_a_phases_function_is_there(part: str, function: str) -> None:
    """Functions without a file are hooks of Lightning."""
    defined = re.compile(rf"^ *def {function or '[a-z_]+'}\(", re.MULTILINE)
    files = sources(part or "lightning/pytorch/")
    assert any(defined.search(file.read_text(encoding="utf-8")) for file in files)


def test_the_places_where_a_rank_waits_are_there() -> None:
    assert [part for part in stacks.WAITING if not sources(part)] == []
