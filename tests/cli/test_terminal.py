"""Output is plain text: what a run, a store or a plugin says cannot steer the terminal."""

import io
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import rich.console
from tqdm import tqdm

from dist_template.terminal import PlainText, allow_styles, plain_output
from tests import PROJECT
from tests.support.extras import write_metadata
from tests.support.line import PACKAGE
from tests.support.runs import main

TITLE = "\x1b]0;owned\a"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


SHOWN = {
    f"a{TITLE}b": r"a\x1b]0;owned\x07b",
    "a\rb\bc": r"a\rb\x08c",
    "\x9b2J": r"\x9b2J",  # the same sequence in one byte, of C1
    "\u202eabc\u2066": r"\u202eabc\u2066",
    "a\u200fb\u061cc": r"a\u200fb\u061cc",
    "zero\u200bwidth\ufeff": r"zero\u200bwidth\ufeff",
    "a\U000e0041": r"a\U000e0041",  # a letter that no font shows
    "👩\u200d💻 می\u200cخواهم": "👩\u200d💻 می\u200cخواهم",
    "half \ud800": r"half \ud800",
    "tabs\tand\nlines\r\n": "tabs\tand\nlines\n",
    "Ärger 日本語 🙂 e\u0301": "Ärger 日本語 🙂 e\u0301",
}


@pytest.mark.parametrize("text", SHOWN, ids=ascii)
@pytest.mark.parametrize("kind", [io.StringIO, Terminal])
def test_control_characters_are_shown_as_codes(text: str, kind: Any) -> None:
    stream = kind()
    print(text, end="", file=PlainText(stream))
    assert stream.getvalue() == SHOWN[text]


def test_progress_bars_and_the_console_are_as_without_it() -> None:
    def shown(file: Any) -> None:
        for outer in tqdm(range(2), file=file, ascii=True, bar_format="{n}"):
            for _ in tqdm(range(2), file=file, ascii=True, bar_format="{n}", leave=False):
                file.write(f"\r\x1b[Kstep {outer}")
        for part in ("\x1b[32m", "trained on", "\x1b[0m"):  # the verb prepare
            file.write(part)

    one, other = Terminal(), Terminal()
    shown(one)
    shown(PlainText(other))
    assert other.getvalue() == one.getvalue() and "\x1b[A" in one.getvalue()


def test_a_log_file_gets_no_sequence_at_all() -> None:
    stream = io.StringIO()
    for text in ("\r\x1b[Kstep", "\x1b[A", "\x1b[32m"):
        PlainText(stream).write(text)
    assert "\x1b" not in stream.getvalue()


def test_the_streams_are_put_back() -> None:
    before = sys.stdout, sys.stderr
    with pytest.raises(ValueError, match="x"), plain_output(), plain_output():
        assert isinstance(sys.stdout, PlainText) and not isinstance(sys.stdout.stream, PlainText)
        raise ValueError("x")
    assert (sys.stdout, sys.stderr) == before


def test_an_output_that_is_closed_at_the_start_is_no_traceback() -> None:
    for closed in (">&-", "2>&-", ">&- 2>&-"):
        words = f"{shlex.quote(sys.executable)} -m {PACKAGE} docs {closed}"
        done = subprocess.run(
            ["bash", "-c", words], cwd=PROJECT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr


def test_a_plugins_help_line_is_plain(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    code = repr(f"{TITLE} does things").replace("'", '"""')
    (tmp_path / "verb_of_a_stranger.py").write_text(code)
    write_metadata(tmp_path, "stranger", {"dist_template.verbs": {"odd": "verb_of_a_stranger"}})
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert r"\x1b]0;owned\x07 does things" in printed and "\x1b" not in printed


def test_a_bar_of_rich_has_its_styles_and_no_more() -> None:
    stream, before = Terminal(), (sys.stdout, sys.stderr)
    sys.stdout = stream
    try:
        with plain_output():
            allow_styles()
            console = rich.console.Console(file=sys.stdout, force_terminal=True, width=40)
            console.print("[red]epoch[/red] 1")
            print(f"\x1b[?25l{TITLE}\x1b[1A\x1b[2K\rx")
    finally:
        sys.stdout, sys.stderr = before
    shown = stream.getvalue()
    assert "\x1b[31mepoch\x1b[0m" in shown
    assert r"\x1b]0;owned\x07" in shown and "\x1b[1A\x1b[2K\rx" in shown
