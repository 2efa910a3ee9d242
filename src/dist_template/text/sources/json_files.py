"""Reads JSON: one value per line, or the elements of one array, which is not held in memory as a
whole. What is no JSON is refused with the line and the reason as people know it: an object over
several lines, several in one line, a comma too many, a cut file.

`json_values` finds the encoding (files.py), then whether the file is an array (`_is_array`), and
reads its elements (`_elements`) or its lines (`_lines`)."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .files import encoding_of, opened, text_blocks, wrong

BLOCK_BYTES = 2**20  # of an array, at a time
BLANK = re.compile(r"[ \t\r\n]*")  # what JSON allows between values
# Ends of a number and of an escape, from where json says that they are wrong.
CUT = re.compile(r"[.eE][-+]?|\\?u?[0-9a-fA-F]{0,4}")
ADVICE = "JSON is UTF-8: convert the file, as by `iconv -f latin1 -t utf-8`"
ONE_PER_LINE = "write one object per line, as by `jq -c .`"


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Returns an object; refuses two values of one key, of which Python would keep the last."""
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} is in one object twice")
    return value


DECODER = json.JSONDecoder(object_pairs_hook=_object)


def json_values(path: Path) -> Iterator[object]:
    """Yields the values of the lines of a file, or the elements of its one array. Raises
    InputError if it is no JSON."""
    with opened(path) as file:
        start = file.read(4)
    if "\0" in start.decode(encoding_of(start, None), errors="replace"):
        raise wrong(path, f"is UTF-16 without a byte-order mark, or binary. {ADVICE}")
    encoding = encoding_of(start, None)
    if _is_array(path, encoding):
        yield from _elements(path)
    else:
        yield from _lines(path, encoding)


def _is_array(path: Path, encoding: str) -> bool:
    """Whether the first character of a file that is neither blank nor its mark opens an array."""
    with io.TextIOWrapper(opened(path), encoding, errors="replace") as file:
        while block := file.read(2**12):
            text = block.removeprefix("\ufeff").lstrip()
            if text:
                return text[0] == "["
    return False


def _lines(path: Path, encoding: str) -> Iterator[object]:
    """Yields the value of each line that is not blank."""
    lines = _decoded(path, encoding)
    for number, line in enumerate(lines, start=1):
        text = line.removeprefix("\ufeff") if number == 1 else line
        if not text.strip():
            continue
        try:
            value = DECODER.decode(text)
        except json.JSONDecodeError as error:
            is_last = not any(after.strip() for after in lines)
            raise wrong(path, _reason(number, text, error, is_last)) from error
        except (ValueError, RecursionError) as error:
            raise wrong(path, f"cannot be read in line {number}: {error}") from error
        yield value


def _decoded(path: Path, encoding: str) -> Iterator[str]:
    """Yields lines, which end with a line feed alone: U+2028 in a text is none."""
    with opened(path) as file:
        if encoding != "utf-8":
            yield from io.TextIOWrapper(file, encoding, newline="\n")
            return
        for number, line in enumerate(file, start=1):
            try:
                yield line.decode()
            except UnicodeDecodeError as error:
                byte = line[error.start : error.start + 1].hex()
                raise wrong(
                    path,
                    f"is not in UTF-8: byte {error.start} (0x{byte}) of line {number},"
                    f" {error.reason}. {ADVICE}",
                ) from error


def _reason(number: int, line: str, error: json.JSONDecodeError, is_last: bool) -> str:
    """Returns what is wrong with a line that is no JSON."""
    rest = line[error.pos :].lstrip()
    if "\r" in line.strip("\r\n"):
        return "has lines that end with CR alone: convert it, as by `tr '\\r' '\\n'`"
    if error.msg.startswith("Extra data") and rest[:1] in ("{", "["):
        return f"has several values in line {number}: {ONE_PER_LINE}"
    is_cut = _is_cut(line.rstrip(), error)
    if is_cut and is_last:
        return f"ends within the value of line {number}: the file is cut"
    if is_cut:
        return f"has a value that does not end in line {number}, where it starts: {ONE_PER_LINE}"
    return f"is no JSON in line {number}, column {error.colno}: {error.msg}"


def _is_cut(text: str, error: json.JSONDecodeError) -> bool:
    """Whether `text` ends within a value: more text could complete it."""
    rest = text[error.pos :].strip()
    words = ("true", "false", "null", "NaN", "Infinity", "-Infinity")
    is_word = any(word.startswith(rest) for word in words)  # "" is the start of one
    return is_word or error.msg.startswith("Unterminated") or CUT.fullmatch(rest) is not None


def _elements(path: Path) -> Iterator[object]:
    """Yields the elements of an array, of which one block and one element are in memory."""
    blocks = text_blocks(path, size=BLOCK_BYTES, advice=ADVICE)
    buffer, at, lines = "", 0, 1  # the number of the buffer's first line
    wanted = "the array"  # then "an element" or, if there is one before, "a comma"; "nothing"
    after_comma = False

    def place() -> str:
        return f"line {lines + buffer.count(chr(10), 0, at)}"

    while True:
        blank: Any = BLANK.match(buffer, at)  # it matches "" too
        at = blank.end()
        if at == len(buffer):
            lines += buffer.count("\n")
            buffer, at = next(blocks, ""), 0
            if not buffer:
                break
            continue
        character = buffer[at]
        if wanted == "the array":
            wanted, at = "an element", at + 1
        elif wanted == "nothing":
            raise wrong(path, f"has more than one array, in {place()}: {ONE_PER_LINE}")
        elif character == "]":
            if after_comma:
                raise wrong(path, f"has a comma before the end of its array, in {place()}")
            wanted, at = "nothing", at + 1
        elif wanted == "a comma":
            if character != ",":
                raise wrong(path, f"lacks a comma between elements, in {place()}")
            wanted, after_comma, at = "an element", True, at + 1
        else:
            try:
                value, at = DECODER.raw_decode(buffer, at)
            except json.JSONDecodeError as error:
                more = ""
                if _is_cut(buffer, error):
                    more = _more(blocks, len(buffer) - at)
                if more:
                    lines += buffer.count("\n", 0, at)
                    buffer, at = buffer[at:] + more, 0
                    continue
                if _is_cut(buffer.rstrip(), error):
                    break
                at = error.pos
                raise wrong(path, f"is no JSON in {place()}: {error.msg}") from error
            except (ValueError, RecursionError) as error:
                raise wrong(path, f"cannot be read in {place()}: {error}") from error
            wanted, after_comma = "a comma", False
            yield value
    if wanted != "nothing":
        raise wrong(path, "ends within its array: the file is cut")


def _more(blocks: Iterator[str], size: int) -> str:
    """Returns as much text again as there is, so that a long element is tried a few times."""
    more = ""
    while len(more) < size:
        block = next(blocks, "")
        if not block:
            break
        more += block
    return more
