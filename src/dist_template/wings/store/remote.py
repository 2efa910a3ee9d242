"""Access to a store: checks its address, transfers and verifies files, and keeps credentials out of messages."""

import hashlib
import os
import posixpath
import re
import secrets
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import fsspec

from ...cluster.redaction import redacted_command
from ...errors import InputError, reason, require

SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|PW|CREDENTIAL", re.IGNORECASE)  # names of variables
PART = 50 * 2**20  # bytes: s3fs uploads larger files in parts of this size
PACKAGES = {"s3": "s3fs", "s3a": "s3fs"}  # protocol: the package of the extra `store`
CHUNK = 1 << 22
T = TypeVar("T")


class StoreError(Exception):
    """A transfer failed, or what the store holds is not what was sent. The message has no credentials."""


class Remote:
    """A folder in a store. The file system's options come from the environment only (AWS_*, FSSPEC_*).

    Args:
        address: As `run.store`.
        key: Where the user gave it, for messages.

    Raises InputError if the address has credentials, or its protocol is unknown or not installed.
    """

    def __init__(self, address: str, key: str = "run.store") -> None:
        protocol, _, rest = address.partition("://")
        if re.search(r"[@?#]", address):
            raise InputError(
                f"{key} has a user, a password or a query, which would be recorded: give {protocol}://bucket/prefix, and"
                " the credentials in the environment, as AWS_ACCESS_KEY_ID, or in the provider's own file"
            )
        if not rest.strip("/") or ".." in rest.split("/"):
            raise InputError(f"{key} {address!r} is not the address of a store: give one such as s3://bucket/prefix")
        if protocol in PACKAGES:
            require(PACKAGES[protocol], f"{key} {address!r}")
        options = {"auto_mkdir": True} if protocol == "file" else {}
        try:
            self.files: Any = fsspec.filesystem(protocol, use_listings_cache=False, **options)
        except (ImportError, ValueError) as error:
            raise InputError(f"{key} {address!r} cannot be used: {cause(error)}; give another address") from None
        self.address, self.key = address.rstrip("/"), key
        self._has_md5 = True  # until an ETag is not the MD5 of what was sent, as with a customer's own key

    def __truediv__(self, name: str) -> "Remote":
        other = Remote.__new__(Remote)
        vars(other).update(vars(self), address=f"{self.address}/{name}")
        return other

    @property
    def parent(self) -> "Remote":
        other = self / ""
        other.address = self.address.rpartition("/")[0]
        return other

    def check(self, writes: bool) -> None:
        """Raises InputError if the store cannot be listed, or, where the run `writes`, written to and deleted from."""
        try:
            if writes:
                probe = self / f".probe-{secrets.token_hex(8)}"
                probe.write(b"probe")
                probe.remove()
            else:
                self.names()
        except StoreError as error:
            allowed = "a bucket that exists, and credentials that may list, read, write and delete there"
            raise InputError(f"{self.key} {self.address!r} cannot be used: {error}; give {allowed}") from None

    def names(self) -> list[str]:
        """Returns the names in this folder; none if it does not exist."""
        return sorted(posixpath.basename(found["name"].rstrip("/")) for found in self._list())

    def small_files(self) -> dict[str, Any]:
        """Returns the files below this folder by their relative path, without checkpoints, as fsspec describes them."""
        found = {}
        for entry in self._list():
            name = posixpath.basename(entry["name"].rstrip("/"))
            if entry["type"] == "directory" and name != "checkpoints":
                found |= {f"{name}/{below}": each for below, each in (self / name).small_files().items()}
            elif entry["type"] == "file":
                found[name] = entry
        return found

    def _list(self) -> list[dict[str, Any]]:
        def listed() -> list[dict[str, Any]]:
            try:
                return self.files.ls(self.address, detail=True)
            except FileNotFoundError:
                return []

        return attempted(listed)

    def read(self) -> bytes | None:
        """Returns an object's content, or None if there is none."""

        def content() -> bytes | None:
            try:
                return self.files.cat_file(self.address)
            except FileNotFoundError:
                return None

        return attempted(content)

    def write(self, content: bytes) -> None:
        attempted(lambda: self.files.pipe_file(self.address, content))
        self._compare_size(len(content))

    def remove(self) -> None:
        """Deletes the object or folder; nothing happens if there is none."""

        def removed() -> None:
            try:
                self.files.rm(self.address, recursive=True)
            except FileNotFoundError:
                return

        attempted(removed)

    def get(self, file: Path) -> None:
        """Downloads this object as `file`, at once."""
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f".{file.name}.{secrets.token_hex(4)}.tmp")
        try:
            attempted(lambda: self.files.get_file(self.address, str(temporary)))
            os.replace(temporary, file)
        finally:
            temporary.unlink(missing_ok=True)

    def put(self, file: Path) -> None:
        """Uploads `file` as this object, and compares size and, where the store has one, MD5. Raises StoreError."""
        attempted(lambda: self.files.put_file(str(file), self.address))
        info = self._compare_size(file.stat().st_size)
        etag = str(info.get("ETag", "")).strip('"')
        if not self._has_md5 or not re.fullmatch(r"[0-9a-f]{32}(-\d+)?", etag) or etag == _etag(file, "-" in etag):
            return
        self._has_md5 = self._crc32() != _crc32(file)  # a store that encrypts has other ETags: read it once
        if self._has_md5:
            raise StoreError(f"the store has other bytes than {file.name}")

    def _compare_size(self, size: int) -> dict[str, Any]:
        info = attempted(lambda: self.files.info(self.address))
        if info.get("size") != size:
            raise StoreError(f"the store has {info.get('size')} bytes of the {size} that it has accepted")
        return info

    def _crc32(self) -> int:
        def value() -> int:
            with self.files.open(self.address, "rb") as file:
                return _crc32_of(file.read)

        return attempted(value)


def attempted(call: Callable[[], T]) -> T:
    """Returns what `call` returns. Raises StoreError for any error: each store has its own classes."""
    try:
        return call()
    except Exception as error:
        raise StoreError(cause(error)) from None


def retried(call: Callable[[], T], until: float, wait_s: float = 1.0) -> T:
    """Calls again after a StoreError, after longer and longer waits, until the time.monotonic() `until`."""
    while True:
        try:
            return call()
        except StoreError:
            if time.monotonic() + wait_s > until:
                raise
            time.sleep(wait_s)
            wait_s *= 2


def cause(error: BaseException) -> str:
    """Returns the error's first sentence, without the value of any secret variable, user or password."""
    text = reason(error)
    for name, value in os.environ.items():
        if SECRET.search(name) and len(value) > 3:
            text = text.replace(value, "(not recorded)")
    text = re.sub(r"\?\S+", "", text)  # a signed request
    kind = type(error).__name__
    return redacted_command([text if kind in text or isinstance(error, OSError | StoreError) else f"{kind}: {text}"])[0]


def _etag(file: Path, has_parts: bool) -> str:
    """Returns S3's ETag of a file: its MD5, or the MD5 of its parts' MD5s and their number."""
    with file.open("rb") as stream:
        if not has_parts:
            return hashlib.file_digest(stream, "md5").hexdigest()
        parts = []
        while part := stream.read(PART):
            parts.append(hashlib.md5(part).digest())
    return f"{hashlib.md5(b''.join(parts)).hexdigest()}-{len(parts)}"


def _crc32(file: Path) -> int:
    with file.open("rb") as stream:
        return _crc32_of(stream.read)


def _crc32_of(read: Callable[[int], bytes]) -> int:
    value = 0
    while chunk := read(CHUNK):
        value = zlib.crc32(chunk, value)
    return value
