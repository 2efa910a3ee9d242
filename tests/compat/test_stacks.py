"""The functions by which a hang's phase is known exist."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from dist_template.compat import stacks

ROOTS = ("torch", "lightning/pytorch", "deepspeed", "dist_template/compat")


def sources(part: str) -> list[Path]:
    """The files of a library whose path contains `part`."""
    found = []
    for root in ROOTS:
        spec = importlib.util.find_spec(root.split("/")[0])
        folder = Path(spec.origin or "").parent.joinpath(*root.split("/")[1:]) if spec else Path()
        name = f"/{part.strip('/')}"
        found += [path for path in folder.rglob("*.py") if name in f"{path}"]
    return found


@pytest.mark.parametrize(
    ("part", "function"),
    [(part, function) for part, function, _ in stacks.PHASES if part[:1] != "<"],
)
def test_a_phases_function_is_there(part: str, function: str) -> None:
    """Functions without a file are hooks of Lightning, or torch's."""
    files = (
        sources(part or ".py")
        if part
        else [*sources("lightning/pytorch"), *sources("torch/distributed"), *OURS]
    )
    defined = re.compile(rf"^ *def {function or '[a-z_]+'}\(", re.MULTILINE)
    assert any(defined.search(file.read_text(encoding="utf-8")) for file in files), (part, function)


OURS = sources("dist_template/compat")


def test_the_places_where_a_rank_waits_are_there() -> None:
    assert [part for part in stacks.WAITING if not sources(part)] == []
    assert sources("torch/gone/") == []
