"""Files as they are on disks: compressed, in other encodings, cut, pretty-printed; each is read to
the last byte, or refused with the reason."""

import bz2
import gzip
import json
import lzma
import os
import random
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dist_template import InputError
from dist_template.text import Jsonl, StandardLibrary, TextFiles
from dist_template.text.sources import documents, files, json_files
from dist_template.text.sources.records import records_of

LINES = b'{"text": "a"}\n{"text": "b"}\n'
TEXT = "é one\n\ntwo 😀\n\nthree"


def zstd(data: bytes) -> bytes:
    import pyarrow

    return pyarrow.compress(data, codec="zstd", asbytes=True)


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstd,
}


def texts(path: Path) -> list[Any]:
    return [record["text"] for _, record in records_of(path, ["text"])]


def refusal(read: Callable[..., object], *given: Any) -> str:
    with pytest.raises(InputError) as caught:
        read(*given)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def parts(path: Path, *given: Any) -> list[str]:
    return [text for _, text in TextFiles([str(path)], *given).documents()]


@pytest.mark.parametrize("ending", COMPRESS)
def test_every_compression_is_read_whole_or_refused(tmp_path: Path, ending: str) -> None:
    path, packed = tmp_path / f"a.jsonl{ending}", COMPRESS[ending](LINES)
    path.write_bytes(packed)
    assert texts(path) == ["a", "b"]
    path.write_bytes(packed + packed)
    assert texts(path) == ["a", "b"] * 2, "all streams of a file"
    (tmp_path / f"a.txt{ending}").write_bytes(COMPRESS[ending](TEXT.encode()))
    assert parts(tmp_path / f"a.txt{ending}") == [TEXT]
    for harmed in (packed[:-1], packed[:-5], packed + packed[:-5], packed + b"hello"):
        path.write_bytes(harmed)
        assert "cannot be read" in refusal(texts, path), harmed
        assert "cannot be read" in refusal(parts, path), "as text, too"
    path.write_bytes(b"")
    assert f"is empty, so it is no {ending} file" in refusal(texts, path)
    path.write_bytes(LINES)
    assert f"is not compressed, though its name says {ending}" in refusal(texts, path)
    path = tmp_path / "b.jsonl"
    path.write_bytes(packed)
    assert f"is compressed as {ending}: give it a name that ends so" in refusal(texts, path)
    assert f"is compressed as {ending}" in refusal(parts, path)


def test_a_damaged_stream_of_many_loses_nothing_silently(tmp_path: Path) -> None:
    """Python's bz2 and lzma end there without an error."""
    for ending in (".bz2", ".xz"):
        one, path = COMPRESS[ending](LINES), tmp_path / f"a.jsonl{ending}"
        harmed = bytearray(one * 3)
        harmed[len(one)] ^= 4  # the magic of the second
        path.write_bytes(harmed)
        assert "cannot be read after record" in refusal(texts, path)
    (tmp_path / "a.jsonl.xz").write_bytes(lzma.compress(LINES) + bytes(8) + lzma.compress(LINES))
    assert texts(tmp_path / "a.jsonl.xz") == ["a", "b"] * 2, "padding is allowed"


def test_a_zip_of_one_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.jsonl", LINES * 100)
    assert texts(path) == ["a", "b"] * 100
    whole = path.read_bytes()
    for harmed in (whole[:-30], whole[:40] + b"~~~" + whole[43:]):
        path.write_bytes(harmed)
        assert "cannot be read" in refusal(texts, path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.jsonl", LINES)
        archive.writestr("b.jsonl", LINES)
    assert "holds 2 files" in refusal(texts, path)


ENCODINGS = ["utf-8-sig", "utf-16", "utf-32"]
MARKS = {"utf-16-be": b"\xfe\xff", "utf-32-be": b"\0\0\xfe\xff"}


@pytest.mark.parametrize("encoding", [*ENCODINGS, *MARKS])
def test_a_byte_order_mark_names_the_encoding(tmp_path: Path, encoding: str) -> None:
    path, mark = tmp_path / "a.txt", MARKS.get(encoding, b"")
    path.write_bytes(mark + TEXT.encode(encoding))
    assert parts(path) == [TEXT] and parts(path, "\n\n") == TEXT.split("\n\n")
    for text in (LINES.decode(), "\n \n" + LINES.decode().replace("\n", "\r\n")):
        path.write_bytes(mark + text.encode(encoding))
        assert texts(path) == ["a", "b"]
    for indent in (None, 2):
        array = json.dumps([{"text": "a"}, {"text": "b"}], indent=indent)
        path.write_bytes(mark + f"\n\r\n {array}\n".encode(encoding))
        assert texts(path) == ["a", "b"]


def test_other_encodings_are_named_or_refused_with_the_position(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    for name, text in (("latin-1", "abc é"), ("cp1252", "“q”"), ("big5", "中文")):
        path.write_bytes(text.encode(name))
        assert parts(path, None, name) == [text]
        found = refusal(parts, path)
        assert str(path) in found and "is not in UTF-8: byte " in found
        assert "data.source.encoding" in found
    path.write_bytes("abc é".encode("latin-1"))
    assert "byte 4 (0xe9)" in refusal(parts, path)
    for name, why in (("utf-16", "does not start with BOM"), ("utf-7", "byte 4 (0xe9)")):
        found = refusal(parts, path, None, name)
        assert f"is not in data.source.encoding {name}" in found and why in found
    for name in ("rot13", "hex", "utf\0", "nope"):
        assert f"data.source.encoding {name!r} is no encoding" in refusal(
            TextFiles, ["a"], None, name
        )
    path.write_bytes("ab".encode("utf-16-le"))
    assert "NUL" in refusal(parts, path) and parts(path, None, "utf-16-le") == ["ab"]
    assert "UTF-16 without a byte-order mark" in refusal(texts, path)
    for data, why in (
        (b"\x89PNG\r\n\x1a\n\0\0", "byte 0 (0x89)"),
        (b"a\0b", "NUL"),
        (b"%PDF-1.7\n", "a PDF"),
        (b"PK\x03\x04", "a zip archive"),  # and documents of office programs
        (b"PAR1", "give it a name that ends in .parquet"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        (b"\xed\xa0\x80", "byte 0 (0xed)"),  # half of a surrogate pair
        ("aé".encode()[:-1], "byte 1 (0xc3), unexpected end"),
    ):
        path.write_bytes(data)
        assert why in refusal(parts, path)


def test_blocks_decide_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    """A block ends within a character, a separator, a mark."""
    path = tmp_path / "a.txt"
    for size in (1, 2, 3, 5, 7):

        def blocks(name: Path, given: str | None = None, size: int = size, **rest: Any) -> Any:
            return files.text_blocks(name, given, size, **rest)

        monkeypatch.setattr(documents, "text_blocks", blocks)
        for encoding in ("utf-8", *ENCODINGS):
            path.write_bytes(TEXT.encode(encoding))
            for separator in ("\n\n", "o", "e\n\n", "😀\n"):
                assert parts(path, separator) == TEXT.split(separator)
        path.write_bytes(b"abcd" * 3 + b"\xff")
        assert "byte 12 (0xff)" in refusal(parts, path)


def test_a_separator_that_is_nowhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"a\r\n\r\nb")
    found = refusal(parts, path, "\n\n")
    assert "CRLF" in found and r"give '\r\n\r\n'" in found
    assert parts(path, "\r\n\r\n") == ["a", "b"]
    path.write_bytes(b"a b")
    assert "is in none of the 1 files" in refusal(parts, path, "\n\n")
    path.write_bytes(b"a\n\nb")
    assert "backslash" in refusal(parts, path, r"\n\n")
    (tmp_path / "b.txt").write_bytes(b"c")  # one document
    assert parts(tmp_path / "*.txt", "\n\n") == ["a", "b", "c"]


def test_links_to_nothing_are_refused(tmp_path: Path) -> None:
    """As of a dataset whose files are elsewhere: they would be lost among others."""
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").symlink_to(tmp_path / "gone")
    assert "b.txt to a file that does not exist" in refusal(parts, tmp_path / "*.txt")
    os.mkfifo(tmp_path / "pipe")
    assert "matches no file" in refusal(parts, tmp_path / "pipe")


def test_the_standard_library_is_utf_8() -> None:
    """Its tokens are the same as when bytes that are no UTF-8 were replaced."""
    for path, text in StandardLibrary().documents():
        assert text.encode() == Path(path).read_bytes()


JSON: dict[str, tuple[bytes, str]] = {
    "an object over several lines": (b'{\n "text": "a"\n}', "does not end in line 1, where it st"),
    "several in one line": (b'{"text": "a"}{"text": "b"}', "several values in line 1: write one"),
    "records in an object": (b'{"data": [{"text": "a"}, {}]}', "'data' holds 2 records"),
    "a comma at the end": (b'[{"text": "a"},\n{"text": "b"},\n]', "comma before the end of its ar"),
    "no comma": (b'[{"text": "a"}\n{"text": "b"}]', "lacks a comma between elements, in line 2"),
    "a comma in an object": (b'{"text": "a"}\n{"text": "b",}\n', "no JSON in line 2, column 14"),
    "two arrays": (b"[]\n[]", "more than one array, in line 2"),
    "a cut array": (b'[{"text": "a"}, {"te', "ends within its array: the file is cut"),
    "a cut line": (b'{"text": "a"}\n{"te', "ends within the value of line 2: the file is cut"),
    "a cut line among others": (b'{"text": "a"\n{"text": "b"}\n', "does not end in line 1"),
    "a key twice": (b'{"text": "a", "text": "b"}', "line 1: the key 'text' is in one object twice"),
    "a key twice, in an array": (b'[{"x": {"y": 1, "y": 1}}]', "the key 'y' is in one object"),
    "lines that end with CR": (b'{"text": "a"}\r{"text": "b"}\r', "lines that end with CR alone"),
    "Latin-1": (b'{"text": "a"}\n{"text": "\xe9"}', "byte 10 (0xe9) of line 2"),
    "Latin-1, in an array": (b'[{"text": "\xe9"}]', "byte 11 (0xe9)"),
    "single quotes": (b"{'text': 'a'}", "no JSON in line 1, column 2: Expecting property name"),
    "a tab in a text": (b'{"text": "a\tb"}', "no JSON in line 1, column 12: Invalid control"),
    "a comment": (b'// a\n{"text": "a"}', "no JSON in line 1, column 1: Expecting value"),
    "a table": (b"text,label\na,b\n", "no JSON in line 1, column 1"),
    "deep lists": (b'{"text": "a", "x": ' + b"[" * 100_000, "line 1: maximum recursion"),
    "a number": (b"3\n", ":1 of data.source is no JSON object but a number"),
    "a list": (b'{"text": "a"}\n[1]\n', ":2 of data.source is no JSON object but a list"),
    "null": (b"null", "is no JSON object but null"),
    "NUL bytes of a file that was not closed": (b'{"text": "a"}\n\0\0\0\n', "no JSON in line 2"),
    "a wrong escape": (b'[{"text": "\\uZZZZ"}]', r"no JSON in line 1: Invalid \uXXXX escape"),
}


@pytest.mark.parametrize("case", JSON)
def test_json_is_refused_with_the_true_reason(tmp_path: Path, case: str) -> None:
    data, why = JSON[case]
    (tmp_path / "a.json").write_bytes(data)
    assert why in refusal(texts, tmp_path / "a.json")


def test_texts_with_odd_line_ends_are_whole(tmp_path: Path) -> None:
    path, odd = tmp_path / "a.jsonl", "a\u2028b\u2029c\x85d\x0be\x1ff"
    for record in ({"text": odd}, {"text": "x" * 3_000_000}, {"text": "", "n": float("nan")}):
        line = json.dumps(record, ensure_ascii=False)
        path.write_text(f"{line}\n{line}", encoding="utf-8")
        assert texts(path) == [record["text"]] * 2
        path.write_text(f"[{line},{line}]", encoding="utf-8")
        assert texts(path) == [record["text"]] * 2
    assert Jsonl([str(path)], "n").field == "n"
    message = refusal(lambda: list(Jsonl([str(path)], "n").documents()))
    assert "a.jsonl:1, which has n, text; n is a number" in message


def test_an_array_is_read_in_blocks_as_python_reads_it(tmp_path: Path, monkeypatch: Any) -> None:
    """Blocks of a byte upwards; and at each place, a file that is cut is refused as such."""
    path = tmp_path / "a.json"
    array = [{"text": 'a"\\\u00e9', "x": [True, False, None, 1.5e10, -0.1]}, {"text": "\u12ab"}]
    for text in (json.dumps(array, indent=1), json.dumps(array, ensure_ascii=False)):
        for size in (1, 2, 7, 50):
            monkeypatch.setattr(json_files, "BLOCK_BYTES", size)
            path.write_text(text, encoding="utf-8")
            assert [record for _, record in records_of(path, ["text"])] == array
            for end in range(1, len(text), 3):
                path.write_text(text[:end], encoding="utf-8")
                assert "the file is cut" in refusal(texts, path), text[:end]
    monkeypatch.undo()
    rng = random.Random(0)
    array = [{"text": "ä" * rng.randrange(300_000) + '"'} for _ in range(20)]
    path.write_text(json.dumps(array), encoding="utf-8")
    assert [record for _, record in records_of(path, ["text"])] == array


def test_tables_with_other_columns_are_refused_with_theirs(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    columns: dict[str, Any] = {
        "a list": [["a"]],
        "null": [None],
        "a number": [1],
        "bytes": [b"a"],
        "an object": [{"x": "a"}],
    }
    path = tmp_path / "a.parquet"
    for kind, column in columns.items():
        parquet.write_table(pyarrow.table({"text": column}), path)
        message = refusal(lambda: list(Jsonl([str(path)]).documents()))
        assert f"a.parquet:1, which has text; text is {kind}" in message
    for given in (pyarrow.large_string(), pyarrow.string_view(), pyarrow.string()):
        column = pyarrow.array(["a", "b"] * 3000, given)
        for name in ("a.parquet", "b.PARQUET"):
            parquet.write_table(pyarrow.table({"text": column}), tmp_path / name)
            assert texts(tmp_path / name) == ["a", "b"] * 3000
    parquet.write_table(pyarrow.table({"body": ["x"]}), tmp_path / "b.PARQUET")
    message = refusal(lambda: list(Jsonl([f"{tmp_path}/*.[pP]*"]).documents()))
    assert "b.PARQUET:1, which has body" in message
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    assert "git lfs pull" in refusal(texts, path)


def test_memory_does_not_grow_with_a_file(tmp_path: Path) -> None:
    """Lines, one array in one line, and documents between separators, of 8 MB each."""
    num, text = 4000, "a" * 2000
    records = [json.dumps({"text": text})] * num
    lines, array, plain = (tmp_path / name for name in ("a.jsonl", "a.json", "a.txt"))
    lines.write_text("\n".join(records))
    array.write_text(f"[{', '.join(records)}]")
    plain.write_text("\n\n".join([text] * num))
    for source in (Jsonl([str(lines)]), Jsonl([str(array)]), TextFiles([str(plain)], "\n\n")):
        tracemalloc.start()
        assert sum(found == text for _, found in source.documents()) == num
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 7 * 2**20, source
