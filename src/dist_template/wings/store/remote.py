"""A store: transfers by fsspec, which are verified, and errors in a sentence without credentials."""

import hashlib
import os
import re
import secrets
import time
import zlib
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Any, TypeVar

import fsspec

from ...cluster.redaction import redacted_command
from ...errors import InputError, reason, require

SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|PW|CREDENTIAL", re.IGNORECASE)  # names of variables
CHECKPOINTS, MANIFEST = "checkpoints", "manifest.json"  # names of checkpoint/
UPLOADS: dict[Path, Callable[[], None]] = {}  # by the runs' folders, on rank 0: uploads the files that have changed
T = TypeVar("T")


class StoreError(Exception):
    """The store refused a request, or has something else than was sent. The message has no credentials."""

    def __init__(self, message: str, is_missing: bool = False) -> None:
        super().__init__(message)
        self.is_missing = is_missing


class Remote:
    """An object or a folder in a store. Options of the file system come from the environment only (AWS_*, FSSPEC_*).

    Raises InputError if the `address`, which was given as `key`, has credentials or cannot be used."""

    def __init__(self, address: str, key: str = "run.store") -> None:
        self.protocol, _, self.path = address.rstrip("/").partition("://")
        if re.search(r"[@?#]", address):
            raise InputError(
                f"{key} has a user, a password or a query, which would be recorded: give {self.protocol}://bucket/prefix,"
                " and the credentials in the environment, such as AWS_ACCESS_KEY_ID, or in the provider's own file"
            )
        if not self.path or ".." in self.path.split("/"):
            raise InputError(f"{key} {address!r} is not the address of a store: give one such as s3://bucket/prefix")
        if self.protocol == "s3":
            require("s3fs", f"{key} {address!r}", extra="store")
        options = {"auto_mkdir": True} if self.protocol == "file" else {}
        try:
            self.files: Any = fsspec.filesystem(self.protocol, use_listings_cache=False, **options)
        except (ImportError, ValueError) as error:
            raise InputError(f"{key} {address!r} cannot be used: {cause(error)}; give another") from None
        self.key, self.address = key, address.rstrip("/")

    def __truediv__(self, name: str) -> "Remote":
        if ".." in name.split("/"):  # an object's name becomes the name of a file
            raise StoreError(f"{name!r} is not the name of a file in a run")
        below = copy(self)
        below.path, below.address = f"{self.path}/{name}", f"{self.address}/{name}"
        return below

    def check(self) -> None:
        """Writes, lists and deletes an object. Raises InputError if the store refuses."""
        probe, needed = self / f".probe-{secrets.token_hex(8)}", "a bucket in which you may list, write and delete"
        try:
            probe.write(b"probe")
            self.names()
            probe.remove()
        except StoreError as error:
            raise InputError(f"{self.key} {self.address!r} cannot be used: {error}; give {needed}") from None

    def names(self) -> list[str]:
        """Returns the names in this folder, in order; none if it does not exist."""
        found = attempted(lambda: self.files.ls(self.address, detail=False), [])
        return sorted(name.rstrip("/").rpartition("/")[2] for name in found)

    def sizes(self) -> dict[str, int]:
        """Returns the size of each object below this folder, by its path in it."""
        found = attempted(lambda: self.files.find(self.address, detail=True), {})
        return {name.partition(f"{self.path}/")[2]: entry["size"] for name, entry in found.items()}

    def read(self) -> bytes:
        """Returns the object's content, which is empty if there is no object."""
        return attempted(lambda: self.files.cat_file(self.address), b"")

    def write(self, content: bytes) -> None:
        attempted(lambda: self.files.pipe_file(self.address, content))
        self._verify(len(content), lambda: content)

    def put(self, file: Path) -> None:
        attempted(lambda: self.files.put_file(str(file), self.address))
        self._verify(file.stat().st_size, file.read_bytes)

    def get(self, file: Path) -> None:
        """Downloads the object; `file` is there completely or not at all."""
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f".{file.name}.{secrets.token_hex(4)}.tmp")
        try:
            attempted(lambda: self.files.get_file(self.address, str(temporary)))
            os.replace(temporary, file)
        finally:
            temporary.unlink(missing_ok=True)

    def remove(self) -> None:
        """Deletes the object or the folder, if there is one."""
        attempted(lambda: self.files.rm(self.address, recursive=True), None)

    def _verify(self, size: int, content: Callable[[], bytes]) -> None:
        """Compares the size and, of an S3 object in one part, the MD5. S3 itself verifies parts when it gets them."""
        info = attempted(lambda: self.files.info(self.address))
        etag, wrong = str(info.get("ETag", "")).strip('"'), info["size"] != size
        if not wrong and re.fullmatch(r"[0-9a-f]{32}", etag) and etag != hashlib.md5(sent := content()).hexdigest():
            wrong = zlib.crc32(self.read()) != zlib.crc32(sent)  # an encrypted object's ETag is no MD5
        if wrong:
            raise StoreError(f"of {self.path} it has other bytes than it accepted ({info['size']} of {size})")


def attempted(call: Callable[[], T], missing: Any = StoreError) -> T:
    """Returns what `call` returns, or `missing` if that is given and there is no object. Raises StoreError for all
    other errors: each file system has classes of its own."""
    try:
        return call()
    except Exception as error:
        is_missing = isinstance(error, FileNotFoundError)
        if is_missing and missing is not StoreError:
            return missing
        raise StoreError(cause(error), is_missing) from None


def retried(call: Callable[[], T], until: float, wait_s: float = 0.5) -> T:
    """Calls again after a StoreError, after longer and longer waits, until the time.monotonic() `until`."""
    while True:
        try:
            return call()
        except StoreError as error:
            if error.is_missing or time.monotonic() + wait_s > until:
                raise
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, 60.0)


def cause(error: BaseException) -> str:
    """Returns the error's first sentence, without queries, passwords and the values of secret variables."""
    text = re.sub(r"\?\S+", "", f"{type(error).__name__}: {reason(error)}")
    for name, value in os.environ.items():
        if SECRET.search(name) and len(value) > 3:
            text = text.replace(value, "(not recorded)")
    return redacted_command([text])[0]
