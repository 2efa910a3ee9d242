"""Errors in a data source: they end the command before there is a run folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dist_template.errors import Exit
from dist_template.text import Source
from dist_template.text.cache import token_cache
from tests.support.runs import command


@pytest.fixture(autouse=True)
def in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRACEBACK", raising=False)


class Mistaken(Source):
    """Somebody's own, in data.py for instance."""

    def documents(self) -> Iterator[tuple[str, str]]:
        yield "first", "a text\n" * 99
        yield "second", {"body": "a text"}["text"]


@pytest.mark.parametrize("verb", ["fit", "prepare"])
def test_an_error_in_a_source_is_reported_with_its_line(
    verb: str,
    flags: list[str],
    tmp_path: Path,
    capfd: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags = [
        flag
        for flag in flags
        if not flag.startswith(("--data.source.", "--data.cache_dir", "--trainer"))
    ]
    flags = [
        verb, *flags, f"--data.source={__name__}.Mistaken", f"--data.cache_dir={tmp_path}/cache",
    ]  # fmt: skip
    flags += ["--trainer.accelerator=cpu"]
    assert command(flags) == Exit.FAILED
    error = capfd.readouterr().err
    assert "Traceback" not in error and "error: KeyError: 'text'\n" in error
    assert """in documents: yield "second", {"body": "a text"}["text"]\n""" in error
    assert not (tmp_path / "runs").exists()
    monkeypatch.setenv("TRACEBACK", "1")
    assert command(flags) == Exit.FAILED
    assert "Traceback" in capfd.readouterr().err


def test_an_error_of_the_templates_own_before_there_is_a_run_is_a_traceback(
    flags: list[str], tmp_path: Path, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_cache, "json", None)
    assert command(["fit", *flags]) == Exit.FAILED
    error = capfd.readouterr().err
    assert "Traceback" in error and "AttributeError" in error
    assert not (tmp_path / "runs").exists()
