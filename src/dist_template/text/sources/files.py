"""Opens the files of a source, compressed or not, and decodes text strictly: what is no text in
the encoding that is named is refused, with the file's name and the position.

An ending names the compression: .gz, .bz2, .xz, .zst, and .zip of one file. Python 3.14 reads .zst
by itself and earlier ones do not; pyarrow, which Parquet needs anyway, reads it on all of them,
refuses a cut file and reads all frames of one (zstandard's reader ends at the first frame, and a
cut file ends early there without an error)."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import zipfile
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, BinaryIO

from ...errors import InputError, require

BLOCK_BYTES = 2**20  # of a text, at a time
STREAM_BYTES = 2**16  # read at a time from a compressed file
MARKS = (  # UTF-32's before UTF-16's, which begin alike
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
MAGIC = {  # first bytes: the ending by which the file would be read, or what it is
    b"\x1f\x8b": ".gz",
    b"BZh": ".bz2",
    b"\xfd7zXZ\x00": ".xz",
    b"\x28\xb5\x2f\xfd": ".zst",
    b"PK\x03\x04": ".zip",
}
FOREIGN = {
    b"%PDF-": "is a PDF, which is not read as text: convert it",
    b"PAR1": "is a Parquet table: give it a name that ends in .parquet",
}
POINTER = b"version https://git-lfs.github.com/spec/"


def _zstd(path: Path) -> BinaryIO:
    require("pyarrow", f"{path} of data.source", extra="datasets")
    import pyarrow

    # as any stream of bytes, which pyarrow's own types do not say; it reads no lines itself
    raw: Any = pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd")
    return io.BufferedReader(raw)


class _Streams(io.RawIOBase):
    """Decompresses all streams of a file, one after the other. Python's own readers of .bz2 and
    .xz end without an error where a further stream is damaged; this one raises."""

    def __init__(self, file: BinaryIO, new: Callable[[], Any]) -> None:
        self._file, self._new = file, new
        self._stream = new()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            if self._stream.eof:
                data = self._start_of_next()
                if not data:
                    return 0
                self._stream = self._new()
            elif self._stream.needs_input:
                data = self._file.read(STREAM_BYTES)
                if not data:
                    raise EOFError("Compressed file ended before the end-of-stream marker")
            else:
                data = b""  # it has more of what it was given
            plain = self._stream.decompress(data, max_length=len(buffer))
            if plain:
                buffer[: len(plain)] = plain
                return len(plain)

    def _start_of_next(self) -> bytes:
        """Returns the first bytes of the next stream; b"": there is none. Zeros between streams
        are padding."""
        data = self._stream.unused_data.lstrip(b"\0")
        while not data:
            block = self._file.read(STREAM_BYTES)
            if not block:
                return b""
            data = block.lstrip(b"\0")
        return data

    def close(self) -> None:
        self._file.close()
        super().close()


def _gzip(path: Path) -> BinaryIO:
    return io.BufferedReader(gzip.open(path))


def _bz2(path: Path) -> BinaryIO:
    return io.BufferedReader(_Streams(path.open("rb"), bz2.BZ2Decompressor))


def _xz(path: Path) -> BinaryIO:
    return io.BufferedReader(_Streams(path.open("rb"), lzma.LZMADecompressor))


ADVICE = (
    "Name data.source.encoding, such as latin-1 or cp1252, or convert the file; if it is no text,"
    " remove it from data.source.paths"
)


def _zip(path: Path) -> BinaryIO:
    archive = zipfile.ZipFile(path)
    names = [entry.filename for entry in archive.infolist() if not entry.is_dir()]
    if len(names) != 1:
        raise wrong(path, f"holds {len(names)} files: a .zip is read if it holds one; unpack it")
    member: Any = archive.open(names[0])
    return io.BufferedReader(member)


COMPRESSED: dict[str, Callable[[Path], BinaryIO]] = {
    ".gz": _gzip,
    ".bz2": _bz2,
    ".xz": _xz,
    ".zst": _zstd,
    ".zip": _zip,
}


def wrong(name: str | Path, what: str) -> InputError:
    """Returns the error for a record or file: what is wrong with it, and what to do."""
    return InputError(f"{name} of data.source {what}")


def check_pointer(path: Path, start: bytes) -> None:
    """Raises InputError if a file begins as Git LFS's placeholders of large files do."""
    if start.startswith(POINTER):
        raise wrong(path, "is a pointer of Git LFS without its content: run `git lfs pull`")


def opened(path: Path) -> BinaryIO:
    """Opens a file for reading its bytes, decompressed by its ending. Raises InputError if its
    first bytes are another compression's, an archive's or a pointer of Git LFS, and OSError."""
    with path.open("rb") as file:
        start = file.read(len(POINTER))
    check_pointer(path, start)
    for magic, reason in FOREIGN.items():
        if start.startswith(magic):
            raise wrong(path, reason)
    compression = None  # by the first bytes
    for magic, of_magic in MAGIC.items():
        if start.startswith(magic):
            compression = of_magic
    ending = path.suffix.lower()
    if ending in COMPRESSED:
        is_skipped = ending == ".zst" and start[1:4] == b"\x2a\x4d\x18"  # a frame without data
        if not start:
            raise wrong(path, f"is empty, so it is no {ending} file: was its copy cut? Remove it")
        if compression != ending and not is_skipped:
            what = f"is compressed as {compression}" if compression else "is not compressed"
            raise wrong(path, f"{what}, though its name says {ending}: rename it")
        return COMPRESSED[ending](path)
    if compression == ".zip":  # documents of office programs too
        raise wrong(path, "is a zip archive: unpack or convert it, or name it .zip")
    if compression:
        raise wrong(path, f"is compressed as {compression}: give it a name that ends so")
    return path.open("rb")


def check_encoding(name: str | None) -> None:
    """Raises InputError if `name` is no encoding of text that Python knows."""
    try:
        "".encode(name or "utf-8")
    except (LookupError, ValueError, UnicodeError) as error:
        raise InputError(
            f"data.source.encoding {name!r} is no encoding of text: give one of Python's, such as"
            " utf-8, utf-16, latin-1, cp1252, gb18030 or shift_jis"
        ) from error


def encoding_of(start: bytes, given: str | None) -> str:
    """Returns the encoding of a file that begins with `start`: the one that is given, else that of
    its byte-order mark, else UTF-8."""
    if given:
        return given
    for mark, name in MARKS:
        if start.startswith(mark):
            return name
    return "utf-8"


def text_blocks(
    path: Path, given: str | None = None, size: int = BLOCK_BYTES, advice: str = ADVICE
) -> Generator[str]:
    """Yields the text of a file in blocks of at most `size` bytes, decoded strictly, without a
    byte-order mark. Raises InputError if it is no text, with the position and `advice`."""
    try:
        with opened(path) as file:
            data = file.read(max(size, 4))  # a byte-order mark has at most 4 bytes
            encoding = encoding_of(data, given)
            decoder = codecs.getincrementaldecoder(encoding)()
            position, is_first = 0, True  # position in bytes of the block that is decoded
            while True:
                kept = len(decoder.getstate()[0])  # the bytes before of a character that is cut
                try:
                    text = decoder.decode(data, final=not data)
                except UnicodeDecodeError as error:
                    raise _no_text(path, position - kept, error, given, advice) from error
                except UnicodeError as error:  # UTF-16 by its name needs a mark
                    what = f"is not in data.source.encoding {encoding}: {error}"
                    raise wrong(path, what) from error
                if not given and "\0" in text:
                    raise wrong(
                        path,
                        f"has the character NUL after byte {position}, as a binary file or"
                        f" UTF-16 without a byte-order mark has. {advice}",
                    )
                position += len(data)
                if is_first and text:
                    text, is_first = text.removeprefix("\ufeff"), False
                if text:
                    yield text
                if not data:
                    return
                data = file.read(size)
    except (OSError, EOFError, lzma.LZMAError, zipfile.BadZipFile, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise wrong(path, f"cannot be read: {reason}") from error


def _no_text(
    path: Path, start: int, error: UnicodeDecodeError, given: str | None, advice: str
) -> InputError:
    """Returns the error for bytes that are no text; `start`: of the decoded block in the file."""
    where = f"byte {start + error.start}"
    byte = error.object[error.start : error.start + 1].hex()
    if byte:
        where += f" (0x{byte})"
    if given:
        return wrong(path, f"is not in data.source.encoding {given}: {where}, {error.reason}")
    return wrong(path, f"is not in UTF-8: {where}, {error.reason}. {advice}")
