"""Locks that a killed compilation leaves in torch's folder of extensions, and that every later one would wait for."""

from __future__ import annotations

import os
import time
from pathlib import Path

from lightning.pytorch.utilities import rank_zero_warn


def clear_stale_build_locks(quiet_s: float = 120.0) -> None:
    """Remove those whose owner is gone, before anything is compiled.

    A lock that a process of this machine holds open is left alone. One that none does may be another machine's, where
    the folder is shared: it is removed once nothing beside it has changed for `quiet_s` seconds, and waited for until
    then. torch's own wait (torch.utils.file_baton) has no end.
    """
    for lock in build_locks():
        while lock.exists() and not is_open(lock):
            if time.time() - _changed(lock.parent) >= quiet_s:
                rank_zero_warn(f"removed {lock}: a compilation that was killed left it behind")
                lock.unlink(missing_ok=True)
            else:
                time.sleep(min(1.0, quiet_s / 10))


def build_locks() -> list[Path]:
    """All that are there, in use or not."""
    from torch.utils.cpp_extension import get_default_build_root

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    return [*root.glob("*/lock"), *root.glob("*/*/lock")]


def _changed(folder: Path) -> float:
    """When something in `folder` last changed, in seconds since the epoch."""
    return max((path.stat().st_mtime for path in [folder, *folder.iterdir()]), default=0.0)


def is_open(path: Path) -> bool:
    """Whether a process of this machine that we may look at has `path` open, as a build has its lock."""
    import psutil  # DeepSpeed needs it

    for process in psutil.process_iter():
        try:
            if any(file.path == str(path) for file in process.open_files()):
                return True
        except psutil.Error:  # another user's, or over meanwhile
            continue
    return False
