"""Names of checkpoints and their `manifest.json`, by which they are verified before loading.

The manifest has format, step, number of ranks, strategy, and the size and CRC-32 of each file. A
CRC-32 detects every change within 32 consecutive bits, and all but one in 4e9 of other changes. It
detects accidents, not attacks; but no code in a checkpoint is run (untrusted.py).

With a store (`run.store`), the entry "checkpoint_store" is the address of the folder of
checkpoints. A file that is missing on this disk is then another node's, or was lost: `agreed`
fetches it where it is read, if the address is one that the user gave (wings/store/hooks.py)."""

import json
import os
import re
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from .. import foreign
from ..errors import Ended, Exit, InputError, reason, shortened
from ..hooks import StoreIsDown

__all__ = ["STORE"]

MANIFEST = "manifest.json"
STORE = "checkpoint_store"  # entry of a manifest: the address of the folder in the store
FORMAT = 1
NAME = re.compile(r"(best-)?step(\d{8,})\.ckpt")
CHUNK = 1 << 22  # bytes read at once: large enough for a disk, small enough for a CPU's cache

# how the names of files end that one rank writes, and not every rank reads
PARTS = (".distcp", "_optim_states.pt")

Files = dict[str, list[int]]  # relative path: [bytes, CRC-32]
# Of a checkpoint whose other files are here, and the names of its parts: those that this rank
# reads. Collective.
Needed = Callable[[Path, set[str]], set[str]]


def name(step: int, best: bool = False) -> str:
    return f"{'best-' if best else ''}step{step:08d}.ckpt"


def step_of(path: Path) -> int:
    """Returns the optimizer step in a checkpoint's name."""
    return int(NAME.fullmatch(path.name)[2])  # ty: ignore[not-subscriptable]


def found(folder: Path) -> list[Path]:
    """Returns the checkpoints in `folder` by their names, newest first; `best-` ones come last."""
    names = os.listdir(folder) if os.path.isdir(folder) else ()  # Path's raise if one is too long
    named = [folder / name for name in names if NAME.fullmatch(name)]
    named.sort(key=lambda path: (path.name.startswith("step"), step_of(path)), reverse=True)
    return named


def ranked(folder: Path, mode: str) -> list[Path]:
    """Returns the undamaged `best-` checkpoints, the best score first; `mode` is "min" or "max"."""
    named = [path for path in found(folder) if path.name.startswith("best") and not torn(path)]
    return sorted(named, key=lambda path: read(path)["score"], reverse=mode == "max")


def is_ours(path: Path) -> bool:
    """Returns whether `path` has a manifest, or should have one by its name."""
    name = re.sub(r"^\.|\.(tmp|old)$", "", path.name)
    return (path / MANIFEST).exists() or NAME.fullmatch(name) is not None


def resolve(path: Path) -> tuple[Path, list[Path]]:
    """Returns (the checkpoint or folder of checkpoints at `path`, the candidates, newest first).
    `path` may be a file in a checkpoint. Another library's checkpoint is no candidate: it has no
    manifest."""
    if (path.parent / MANIFEST).exists():
        path = path.parent
    candidates = found(path)
    if not candidates and is_ours(path):
        candidates = [path]
    return path, candidates


def rendered(manifest: dict[str, Any]) -> str:
    """Returns the manifest's text, with its own CRC-32, so that any change is detected."""
    body = {key: value for key, value in manifest.items() if key != "crc32"}
    return json.dumps(body | {"crc32": zlib.crc32(json.dumps(body).encode())}, indent=1) + "\n"


def read(path: Path) -> dict[str, Any]:
    """Returns a checkpoint's manifest.

    Raises:
        ValueError: it is missing, damaged, or of another format; the message says which."""
    try:
        text = foreign.text_of(path / MANIFEST)
        manifest = json.loads(text)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ValueError(f"it has no {MANIFEST}") from error
    except OSError as error:
        raise ValueError(f"its {MANIFEST} cannot be read: {reason(error)}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its {MANIFEST} is damaged") from error
    if not isinstance(manifest, dict) or rendered(manifest) != text or "format" not in manifest:
        raise ValueError(f"its {MANIFEST} is damaged")
    if manifest["format"] != FORMAT:
        raise ValueError(f"its format is {manifest['format']}, and this version reads {FORMAT}")
    if not _has_every_entry(manifest, path.name.startswith("best-")):
        raise ValueError(f"its {MANIFEST} is damaged")
    for file in manifest["files"]:
        if why := foreign.name_fault(file):
            raise ValueError(f"its {MANIFEST} has a file {shortened(repr(file), 200)}: {why}")
        if "/" in file:
            foreign.inside(path, file)  # raises InputError, which is a ValueError
    if NAME.fullmatch(path.name) and manifest.get("step", step_of(path)) != step_of(path):
        raise ValueError(
            f"its manifest says step {manifest['step']}, its name step {step_of(path)}"
        )
    return manifest


def _has_every_entry(manifest: dict[str, Any], has_score: bool) -> bool:
    """Returns whether every entry that is read exists and has the right type."""
    files = manifest.get("files")
    numbers = [manifest.get("time")]
    if has_score:
        numbers.append(manifest.get("score"))
    if not isinstance(files, dict) or not isinstance(manifest.get("fixed_settings", {}), dict):
        return False
    for entry in files.values():
        if not isinstance(entry, list) or len(entry) != 2:
            return False
        numbers += entry
    is_address = isinstance(manifest.get(STORE, ""), str)
    return is_address and all(isinstance(number, int | float) for number in numbers)


# ---- verifying -----------------------------------------------------------------------------------


def torn(path: Path) -> str | None:
    """Returns why `path` is not valid by its manifest and its files' names and sizes, or None."""
    return damage(path, every_byte=False)


def damage(path: Path, every_byte: bool = True, rank: int = 0, ranks: int = 1) -> str | None:
    """Returns why the checkpoint `path` is not valid, or None if it is. With `ranks` above 1, each
    reads a part."""
    try:
        entries = read(path)
    except ValueError as error:
        return str(error)
    files: Files = entries["files"]
    if rank == 0:
        for file in path.rglob("[!.]*"):  # without hidden files such as `.nfs…`
            name = file.relative_to(path).as_posix()
            if name not in (MANIFEST, *files) and file.is_file():
                return f"its {name} is not in its {MANIFEST}"
    for file in list(files)[rank::ranks]:
        size, expected = files[file]
        try:
            if (actual := foreign.size_of(path / file)) != size:
                return f"its {file} has {actual} bytes of {size}"
            if every_byte and crc32(path / file) != expected:
                return f"its {file} is not what was written, by its CRC-32"
        except OSError as error:
            if STORE not in entries or every_byte or not isinstance(error, FileNotFoundError):
                return f"its {file} cannot be read: {reason(error)}"
    return None


def crc32(path: Path) -> int:
    """Returns the CRC-32 of a file's content; about 2 GB/s on one core, twice SHA-256's speed."""
    value, buffer = 0, memoryview(bytearray(CHUNK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            value = zlib.crc32(buffer[:count], value)
    return value


def newest(folder: Path) -> Path | None:
    """Returns the newest checkpoint that is not torn, and warns of newer ones that it skips."""
    skipped, valid = [], None
    for path in found(folder):
        if (why := torn(path)) is None:
            valid = path
            break
        skipped.append(f"{path.name} ({why})")
    _warn_of(skipped, valid)
    return valid


def agreed(path: Path, needed: Needed | None = None) -> Path:
    """Returns the checkpoint that all ranks load, verified by all ranks together: `path`, or the
    newest valid one of a folder. Another library's has no manifest and is not verified. Of a
    checkpoint in a store each node gets what its ranks need; None: all. Collective.

    Raises:
        InputError: on all ranks, if `path` is damaged, or all checkpoints in the folder are."""
    from .. import processes  # imports torch; a report reads manifests without it

    path, candidates = processes.broadcast(resolve(path))
    skipped: list[str] = []
    for candidate in candidates:
        stored, of_rank = _stored(candidate), None
        if not stored:
            of_rank = damage(candidate, rank=processes.rank(), ranks=processes.world_size())
        answers = processes.to_rank_zero((of_rank, stored))
        why = next((why for why, _ in answers if why), None)
        if any(of_node != stored for _, of_node in answers):
            why = why or f"its {MANIFEST} differs between nodes"
        why = processes.broadcast(why)
        if stored and why is None:
            why = _fetched(candidate, needed)
        if why is None:
            _warn_of(skipped, candidate)
            return candidate
        skipped.append(f"{candidate.name} ({why})")
    if not candidates:
        return path
    if candidates == [path]:
        raise InputError(
            f"checkpoint {str(path)!r} is damaged: {why}; give another, or `last` for the newest"
            " valid one"
        )
    raise InputError(
        f"{path} holds damaged checkpoints only: {', '.join(skipped)}; move it away to start a new"
        " run"
    )


def _stored(path: Path) -> int | None:
    """Returns the CRC-32 of the manifest of a checkpoint that is, or will be, in a store too; else
    None."""
    try:
        entries = read(path)
        return entries["crc32"] if STORE in entries else None
    except ValueError:
        return None


def _fetched(path: Path, needed: Needed | None) -> str | None:
    """Fetches what is missing or damaged on this rank's disk. Collective. Returns why the
    checkpoint is invalid."""
    from .. import disks, processes

    files: Files = read(path)["files"]
    ranks = disks.peers(path.parent)
    if processes.rank() == ranks[0]:
        for file in path.rglob("[!.]*"):
            if file.is_file() and file.relative_to(path).as_posix() not in (MANIFEST, *files):
                file.unlink()
    parts = {file for file in files if file.endswith(PARTS)}
    why = _complete(path, [file for file in files if file not in parts], ranks)
    if why or not parts:
        return why
    of_ranks = processes.from_all_ranks(needed(path, parts) if needed else parts)
    return _complete(path, sorted(set().union(*(of_ranks[rank] for rank in ranks))), ranks)


def _complete(path: Path, wanted: list[str], ranks: list[int]) -> str | None:
    """Fetches the `wanted` files that this disk lacks, divided among the `ranks` that share it:
    from the store, else from the disk of another node. Collective. Returns why one cannot be had,
    or None."""
    from .. import disks, hooks, processes

    entries, why = read(path), None
    files: Files = entries["files"]
    lacking = _not_intact(path, files, wanted[ranks.index(processes.rank()) :: len(ranks)])
    if lacking:
        address = f"{entries[STORE]}/{path.name}"
        lacking, why = hooks.fetch(address, lacking, path, partial(_not_intact, path, files))
    answers = processes.from_all_ranks((lacking, why))
    lost = sorted({file for lacks, _ in answers for file in lacks})
    of_disks = processes.from_all_ranks(_not_intact(path, files, lost))
    for file in lost:
        source = next((rank for rank, lacks in enumerate(of_disks) if file not in lacks), None)
        if source is None:
            whys = [why for lacks, why in answers if why and file in lacks]
            if down := next((why for why in whys if isinstance(why, StoreIsDown)), None):
                # another checkpoint would be older: the same command loads this one later
                raise Ended(Exit.REQUEUE, f"{path.name}: {down}")
            return [*whys, f"its {file} in the store is not what was written, by its CRC-32"][0]
        disks.pass_file(path / file, files[file][0], source, file in lacking)
    return None


def _not_intact(path: Path, files: Files, names: list[str]) -> list[str]:
    return [name for name in names if not _is_intact(path / name, *files[name])]


def _is_intact(file: Path, size: int, expected: int) -> bool:
    return file.is_file() and file.stat().st_size == size and crc32(file) == expected


def _warn_of(skipped: list[str], loaded: Path | None) -> None:
    if skipped:
        from lightning.pytorch.utilities import rank_zero_warn

        instead = f"{loaded} is used" if loaded else "there is no other"
        rank_zero_warn(f"damaged checkpoints are skipped: {', '.join(skipped)}; {instead}")
