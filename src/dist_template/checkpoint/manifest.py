"""What a checkpoint's folder is called and holds, told by its `manifest.json`: format, step, ranks, strategy, files.

The manifest has each file's size and CRC-32, which finds every change of up to 32 neighbouring bits, and all others but
for one in 4e9. It guards against accidents, not against someone who means harm; but nothing in a checkpoint can run,
whatever it holds (formats.py).
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..errors import reason

MANIFEST = "manifest.json"
FORMAT = 1
NAME = re.compile(r"(best-)?step(\d{8,})\.ckpt")
CHUNK = 1 << 22  # bytes read at once: large enough for a disk, small enough for a processor's cache

Files = dict[str, list[int]]  # relative path: [bytes, CRC-32]


def name(step: int, best: bool = False) -> str:
    return f"{'best-' if best else ''}step{step:08d}.ckpt"


def step_of(path: Path) -> int:
    """In optimizer steps, from the name."""
    match = NAME.fullmatch(path.name)
    assert match, path
    return int(match[2])


def found(folder: Path) -> list[Path]:
    """What is named as a checkpoint in `folder`, newest step first; the best ones come last."""
    named = [path for path in folder.glob("*step*.ckpt") if NAME.fullmatch(path.name)]
    return sorted(named, key=lambda path: (path.name.startswith("step"), step_of(path)), reverse=True)


def ranked(folder: Path, mode: str) -> list[Path]:
    """The undamaged best checkpoints in `folder` by their score, the best first; `mode` is "min" or "max"."""
    named = [path for path in found(folder) if path.name.startswith("best") and not torn(path)]
    return sorted(named, key=lambda path: read(path)["score"], reverse=mode == "max")


def is_ours(path: Path) -> bool:
    """Whether `path` has a manifest, or should have one by its name."""
    return (path / MANIFEST).exists() or bool(NAME.fullmatch(re.sub(r"^\.|\.(tmp|old)$", "", path.name)))


def rendered(manifest: dict[str, Any]) -> str:
    """The manifest's text, with a hash of itself in it: no byte can change unseen."""
    body = {key: value for key, value in manifest.items() if key != "crc32"}
    return json.dumps(body | {"crc32": zlib.crc32(json.dumps(body).encode())}, indent=1) + "\n"


def read(path: Path) -> dict[str, Any]:
    """A checkpoint's manifest.

    Raises:
        ValueError: it is missing or altered; the message says which.
    """
    try:
        text = (path / MANIFEST).read_text(encoding="utf-8")
        manifest = json.loads(text)
    except OSError as error:
        raise ValueError(f"it has no {MANIFEST}") from error
    except ValueError as error:
        raise ValueError(f"its {MANIFEST} is damaged") from error
    if not isinstance(manifest, dict) or rendered(manifest) != text:
        raise ValueError(f"its {MANIFEST} is damaged")
    if manifest["format"] != FORMAT:
        raise ValueError(f"it is of format {manifest['format']}, and this version reads {FORMAT}")
    if NAME.fullmatch(path.name) and manifest.get("step", step_of(path)) != step_of(path):
        raise ValueError(f"it was written as step {manifest['step']}, and is named otherwise")
    return manifest


def torn(path: Path) -> str | None:
    """Why `path` cannot be valid, by its manifest and the sizes of its files; None where they agree. Reads no file."""
    try:
        files: Files = read(path)["files"]
    except ValueError as error:
        return str(error)
    return wrong_file(path, files, files, every_byte=False)


def wrong_file(path: Path, files: Files, names: Iterable[str], every_byte: bool = True) -> str | None:
    """Which of `names` is not what was written, and how; None where all are."""
    for file in names:
        size, expected = files[file]
        try:
            if (actual := (path / file).stat().st_size) != size:
                return f"its {file} has {actual} bytes of {size}"
            if every_byte and crc32(path / file) != expected:
                return f"its {file} is not what was written, by its CRC-32"
        except OSError as error:
            return f"its {file} cannot be read: {reason(error)}"
    return None


def crc32(path: Path) -> int:
    """Of a file's content: some 2 GB/s on one core, twice as fast as SHA-256."""
    value, buffer = 0, memoryview(bytearray(CHUNK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            value = zlib.crc32(buffer[:count], value)
    return value
