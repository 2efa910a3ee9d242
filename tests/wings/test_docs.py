"""`docs` lists and finds the installed pages."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import pytest

from dist_template.wings.setup import docs
from tests.support.line import OURS, main

DOCS = Path(__file__).parents[2] / "docs"


def test_pages_are_listed_found_and_read(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    assert main(["docs"]) == 0
    listed, pages = "\n" + capsys.readouterr().out, DOCS.rglob("*.md")
    assert all(f"\n{page.relative_to(DOCS).with_suffix('')} " in listed for page in pages)
    for name in ("strategies/zero", "zero", "docs/strategies/zero.md"):
        assert main(["docs", name]) == 0
        assert capsys.readouterr().out.startswith((DOCS / "strategies" / "zero.md").read_text())
    assert main(["docs", "zer"]) == 2 and "there is no page 'zer'" in capsys.readouterr().err
    installed = tmp_path / "lib" / "dist_template" / "wings" / "setup" / "docs.py"
    monkeypatch.setattr(docs, "__file__", str(installed))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(docs.InputError, match="no page is installed here"):
        docs.main(["docs"], OURS)
    place = tmp_path / "share" / "doc" / "dist-template"
    place.mkdir(parents=True)
    (place / "index.md").write_text("# What it is\n")
    docs.main(["docs"], OURS)
    assert capsys.readouterr().out == f"{'index':<26} What it is\n"
