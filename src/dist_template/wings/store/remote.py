"""A store: transfers by fsspec, which are verified and repeated, and errors in a sentence without
credentials."""

import hashlib
import os
import re
import secrets
import time
from collections.abc import Callable
from copy import copy
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import fsspec

from ...cluster.redaction import redacted_command
from ...errors import InputError, reason, require

SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|PW|CREDENTIAL", re.IGNORECASE)  # names of variables
CHECKPOINTS, MANIFEST = "checkpoints", "manifest.json"  # names of checkpoint/
UPLOADS: dict[
    Path, Callable[[], None]
] = {}  # by the runs' folders, on rank 0: uploads the files that have changed
T = TypeVar("T")


class Remote:
    """An object or a folder in a store. Options of the file system come from the environment only
    (AWS_*, FSSPEC_*). Raises InputError, without credentials, if the `address`, which was given as
    `key`, is not valid, and if the store refuses a request, which is repeated, after longer and
    longer waits, until the time.monotonic() `until`."""

    def __init__(self, address: str, key: str = "run.store", until: float = 0.0) -> None:
        if not re.fullmatch(
            r"\w+://(?!.*\.\.)[^@?#]+", address
        ):  # the value is not shown, as it may have a password
            raise InputError(
                f"{key} is not an address without user, password, query and '..': give"
                " s3://bucket/prefix, and credentials in the environment, such as"
                " AWS_ACCESS_KEY_ID, or in the provider's own file"
            )
        self.address, self.key, self.until = address.rstrip("/"), key, until
        protocol = address.partition("://")[0]
        if protocol == "s3":
            require("s3fs", f"{key} {address!r}", extra="store")
        options = {"auto_mkdir": True} if protocol == "file" else {}
        try:
            self.files: Any = fsspec.filesystem(protocol, use_listings_cache=False, **options)
        except (ImportError, ValueError) as error:
            raise InputError(
                f"{key} {address!r} cannot be used: {cause(error)}; give another"
            ) from None

    def __truediv__(self, name: str) -> "Remote":
        if ".." in name.split("/"):  # an object's name becomes the name of a file
            raise InputError(f"{name!r} is not the name of a file in a run")
        below = copy(self)
        below.address += f"/{name}"
        return below

    def check(self) -> None:
        """Writes, lists and deletes an object."""
        probe = (self / f".probe-{secrets.token_hex(8)}").address
        for request in (self.files.touch, self.files.ls, self.files.rm):
            self._attempt(partial(request, probe))

    def sizes(self) -> dict[str, int]:
        """Returns the size of each object below this folder, by its path in it; {} if it does not
        exist."""
        found = self._attempt(lambda: self.files.find(self.address, detail=True), {})
        start = self.address.partition("://")[2] + "/"
        return {name.partition(start)[2]: entry["size"] for name, entry in sorted(found.items())}

    def read(self) -> bytes:
        """Returns the object's content, which is empty if there is no object."""
        return self._attempt(lambda: self.files.cat_file(self.address), b"")

    def put(self, file: Path) -> None:
        """Uploads a file, and compares the size and, of an S3 object in one part, the MD5. S3
        itself verifies parts."""

        def send_and_compare() -> None:
            self.files.put_file(str(file), self.address)
            info, size = self.files.info(self.address), file.stat().st_size
            etag, is_same = str(info.get("ETag", "")).strip('"'), info["size"] == size
            if (
                is_same
                and re.fullmatch(r"[0-9a-f]{32}", etag)
                and etag != hashlib.md5(file.read_bytes()).hexdigest()
            ):
                is_same = self.read() == file.read_bytes()  # an encrypted object's ETag is no MD5
            if not is_same:
                raise OSError(f"it has other bytes than it accepted ({info['size']} of {size})")

        self._attempt(send_and_compare)

    def get(self, file: Path) -> None:
        """Downloads the object; `file` is there completely or not at all."""
        file.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".fetch-", dir=file.parent) as folder:
            temporary = Path(folder, ".part")  # a hidden file is no part of a checkpoint
            self._attempt(lambda: self.files.get_file(self.address, str(temporary)))
            temporary.replace(file)

    def remove(self) -> None:
        """Deletes the object or the folder, if there is one."""
        self._attempt(lambda: self.files.rm(self.address, recursive=True), ())

    def _attempt(self, request: Callable[[], T], missing: T | None = None) -> T:
        """Returns the result of `request`, or `missing`, if that is given, where there is no
        object. Raises InputError for all other errors: each file system has classes of its own."""
        wait_s = 0.5
        while True:
            try:
                return request()
            except Exception as error:
                is_missing = isinstance(error, FileNotFoundError)
                if is_missing and missing is not None:
                    return missing
                if is_missing or time.monotonic() + wait_s > self.until:
                    cure = "check the address, and what the credentials permit"
                    raise InputError(
                        f"{self.key} {self.address!r} cannot be used: {cause(error)}; {cure}"
                    ) from None
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, 60.0)


def cause(error: BaseException) -> str:
    """Returns the error's first sentence, without queries, passwords and the values of secret
    variables."""
    text = re.sub(r"\?\S+", "", f"{type(error).__name__}: {reason(error)}")
    for name, value in os.environ.items():
        if SECRET.search(name) and len(value) > 3:
            text = text.replace(value, "(not recorded)")
    return redacted_command([text])[0]
