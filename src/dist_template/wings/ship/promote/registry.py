"""A folder of exported models, one for each version.

    <registry>/v1/ v2/ …     exported models with version.json; their files never change
    <registry>/v2/withdrawn  exists after a roll-back from v2
    <registry>/index.json    all versions' version.json, for readers; it is derived from the above
    <registry>/latest -> v2  what a server loads

Each change is one rename, so that a process that is killed leaves the versions valid.
"""

from __future__ import annotations

import json
import os
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ....errors import InputError
from ....records import read_mapping, sha256, write_atomically

FACTS = "version.json"
WITHDRAWN = "withdrawn"


class Registry:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def latest(self) -> Path | None:
        """The folder of the version that is to be served."""
        link = self.folder / "latest"
        return link.resolve() if link.exists() else None

    def numbers(self) -> list[int]:
        """Returns the numbers of all versions, sorted."""
        names = [re.fullmatch(r"v(\d+)", path.name) for path in self.folder.glob("v*/")]
        return sorted(int(name[1]) for name in names if name)

    def versions(self) -> list[dict[str, Any]]:
        """Returns what is known of each version, the oldest first."""
        found = []
        for number in self.numbers():
            folder = self.folder / f"v{number}"
            cure = "restore it, or move the version's folder away"
            facts = read_mapping(folder / FACTS, cure)
            found.append({"version": number, **facts, WITHDRAWN: (folder / WITHDRAWN).exists()})
        return found

    def add(self, exported: Path, facts: dict[str, Any]) -> Path:
        """Renames an exported folder on the same disk to the next version, now the latest.

        Returns:
            The version's folder.
        """
        files = sorted(path for path in exported.rglob("*") if path.is_file())
        digests = {str(path.relative_to(exported)): sha256(path) for path in files}
        facts = {"time": datetime.now(UTC).isoformat(timespec="seconds"), **facts}
        write_atomically(exported / FACTS, json.dumps(facts | {"sha256": digests}, indent=2))
        folder = self._next(exported)
        self._point_to(folder)
        return folder

    def roll_back(self) -> tuple[Path, Path]:
        """Withdraws the latest version; the newest one before it that is not withdrawn replaces it.

        Returns:
            The folders of the withdrawn and of the new latest version.

        Raises:
            InputError: there is no earlier version.
        """
        now = self.latest
        if now is None:
            raise InputError(f"--registry {str(self.folder)!r} has no version: promote a run first")
        usable = [each["version"] for each in self.versions() if not each[WITHDRAWN]]
        earlier = [number for number in usable if number < int(now.name[1:])]
        if not earlier:
            raise InputError(
                f"{now.name} is the first version that is not withdrawn: promote a run"
            )
        (now / WITHDRAWN).touch()
        folder = self.folder / f"v{earlier[-1]}"
        self._point_to(folder)
        return now, folder

    def _next(self, exported: Path) -> Path:
        number = max(self.numbers(), default=0)
        while True:
            number += 1
            folder = self.folder / f"v{number}"
            try:
                return exported.rename(folder)
            except OSError:  # another promotion has taken the number
                if not folder.exists():
                    raise

    def _point_to(self, folder: Path) -> None:
        link = self.folder / f".latest.{os.getpid()}"
        link.unlink(missing_ok=True)
        link.symlink_to(folder.name)
        link.replace(self.folder / "latest")
        written = None
        while written != self.numbers():  # again where another promotion was added meanwhile
            versions = self.versions()
            write_atomically(self.folder / "index.json", json.dumps(versions, indent=2))
            written = [each["version"] for each in versions]
