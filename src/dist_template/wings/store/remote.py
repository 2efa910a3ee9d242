"""A store: transfers by fsspec, which are verified and repeated, and errors in a sentence without
credentials."""

import errno
import hashlib
import inspect
import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Collection
from copy import copy
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import fsspec

from ...cluster.redaction import redacted_command
from ...cluster.watchdog import WATCHDOG
from ...errors import InputError, is_disk_full, reason, require, shortened
from ...foreign import MOST_BYTES, inside, name_fault

SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|PW|CREDENTIAL", re.IGNORECASE)  # names of variables
CHECKPOINTS, MANIFEST = "checkpoints", "manifest.json"  # names of checkpoint/
UPLOADS: dict[
    Path, Callable[[], None]
] = {}  # by the runs' folders, on rank 0: uploads the files that have changed
PAGE = re.compile(rb"(\xef\xbb\xbf)?\s*<(!doctype\s+html|html|head|body)\b", re.IGNORECASE)
# What only a person can change: no permission, no such bucket, no package, a wrong address.
LASTING = (
    PermissionError,
    FileNotFoundError,
    ImportError,
    NotImplementedError,
    TypeError,
    ValueError,
)
LASTING_NUMBERS = (  # s3fs gives them to S3's codes: a request, a bucket's name or region is wrong
    errno.EINVAL,
    errno.ENAMETOOLONG,
    errno.ENOSYS,
    errno.EPERM,
    getattr(errno, "EREMCHG", errno.EINVAL),  # of Linux
    errno.EROFS,
)
LASTING_NAMES = "NoCredentials|PartialCredentials|ParamValidation|InvalidBucket|NoAuth|Unauthorized"
T = TypeVar("T")


class StoreDown(InputError):
    """The store did not answer, for as long as requests were repeated."""


class Page(OSError):
    """A page of HTML came in place of an object: of a proxy that wants a login, or is down."""


def _required(kind: type) -> list[str]:
    """Returns the arguments without which a file system of fsspec cannot be made. An attempt would
    leave half an object, whose destructor prints a traceback (ftp)."""
    return [
        name
        for name, argument in [*inspect.signature(kind.__init__).parameters.items()][1:]
        if argument.default is argument.empty
        and argument.kind in (argument.POSITIONAL_OR_KEYWORD, argument.KEYWORD_ONLY)
    ]


class Remote:
    """An object or a folder in a store. Options of the file system come from the environment only
    (AWS_*, FSSPEC_*). Raises InputError, without credentials, if the `address`, which was given as
    `key`, is not valid, and if the store refuses a request, which is repeated, after longer and
    longer waits, until the time.monotonic() `until`. Where `waits_for_answers`, only requests that
    get no answer are repeated, and a line says so. Raises StoreDown if there was none."""

    def __init__(
        self,
        address: str,
        key: str = "run.store",
        until: float = 0.0,
        waits_for_answers: bool = False,
    ) -> None:
        if not re.fullmatch(
            r"\w+://(?!.*\.\.)[^@?#\0-\x1f\x7f]+", address
        ):  # the value is not shown, as it may have a password
            raise InputError(
                f"{key} is not an address without user, password, query and '..': give"
                " s3://bucket/prefix, and credentials in the environment, such as"
                " AWS_ACCESS_KEY_ID, or in the provider's own file"
            )
        protocol, _, path = address.partition("://")
        if protocol in ("file", "local") and not path.startswith(
            "/"
        ):  # each process has its own cwd
            raise InputError(
                f"{key} {address!r} is no absolute path: give {protocol}:///{path} or another"
                " folder that all nodes see"
            )
        self.address, self.key, self.until = address.rstrip("/"), key, until
        self.waits_for_answers = waits_for_answers
        if protocol == "s3":
            require("s3fs", f"{key} {address!r}", extra="store")
        options = {"auto_mkdir": True} if protocol == "file" else {}
        what = f"{key} {address!r} cannot be used"
        try:
            needs = _required(fsspec.get_filesystem_class(protocol))
            if not needs:
                self.files: Any = fsspec.filesystem(protocol, use_listings_cache=False, **options)
        except Exception as error:  # an unknown one, a package that is missing
            raise InputError(f"{what}: {cause(error)}; give another") from None
        if needs:
            why = f"{protocol} needs {' and '.join(needs)}, which an address does not give"
            raise InputError(f"{what}: {why}; give another")

    def __truediv__(self, name: str) -> "Remote":
        if why := name_fault(name):  # an object's name becomes the name of a file
            raise InputError(
                f"{shortened(repr(name), 200)} is not the name of a file in a run: {why}"
            )
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
        exist. Markers of folders are no objects. Skips names that no file in a run can have."""
        found = self._attempt(lambda: self.files.find(self.address, detail=True), {})
        start = self.address.partition("://")[2].rstrip("/") + "/"
        sizes, folders, odd = {}, set[str](), []
        for path, entry in sorted(found.items()):
            name = path.partition(start)[2]
            if entry.get("type", "file") != "file" or not name or name.endswith("/"):
                continue  # a folder, its marker, or on a disk a device
            if name_fault(name):
                odd.append(name)
                continue
            sizes[name] = entry.get("size") or 0
            folders.update(str(parent) for parent in Path(name).parents)
        if odd:
            print(
                f"note: {len(odd)} objects below {self.address} have no names of files, and are"
                f" skipped: {shortened(', '.join(map(repr, odd)), 200)}",
                file=sys.stderr,
            )
        # a marker without its slash is an empty object with the name of a folder
        return {name: size for name, size in sizes.items() if size or name not in folders}

    def read(self) -> bytes:
        """Returns the content of a small object, which is empty if there is no object. Raises
        InputError for one that is too large."""

        def read_start() -> bytes:
            size = self.files.info(self.address).get("size") or 0
            if size > MOST_BYTES:
                raise ValueError(f"it has {size} bytes, and at most {MOST_BYTES} are read")
            content = self.files.cat_file(self.address)
            if PAGE.match(content):
                raise Page("a page of HTML came in its place, as from a proxy")
            return content

        return self._attempt(read_start, b"")

    def write(self, content: bytes, is_new: bool = False) -> None:
        """Writes a small object. With `is_new` raises FileExistsError, or another OSError of the
        store, if there is one and the store can tell."""
        if is_new:
            self.files.pipe_file(self.address, content, mode="create")
        else:
            self._attempt(lambda: self.files.pipe_file(self.address, content))

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
                # an encrypted object's ETag is no MD5
                is_same = self.files.cat_file(self.address) == file.read_bytes()
            if not is_same:
                raise OSError(f"it has other bytes than it accepted ({info['size']} of {size})")

        self._attempt(send_and_compare)

    def get(self, name: str, folder: Path) -> None:
        """Downloads the object `name` of this folder as a file of the local `folder`: it is there
        completely or not at all. Raises InputError if it would be written somewhere else."""
        remote, file = self / name, inside(folder, name)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(prefix=".fetch-", dir=file.parent) as temporary:
                part = Path(temporary, ".part")  # a hidden file is no part of a checkpoint
                remote._attempt(partial(remote._download, part))
                part.replace(file)
        except OSError as error:  # of the disk: the store's are InputErrors
            if is_disk_full(error):
                raise
            raise InputError(
                f"{file} cannot be written: {reason(error)}; move away what is in its place"
            ) from error

    def _download(self, file: Path) -> None:
        self.files.get_file(self.address, str(file))
        with file.open("rb") as stream:
            start = stream.read(512)
        if PAGE.match(start) and not self.address.endswith((".html", ".htm")):
            raise Page("a page of HTML came in its place, as from a proxy")

    def remove(self) -> None:
        """Deletes the object or the folder, if there is one."""
        self._attempt(lambda: self.files.rm(self.address, recursive=True), ())

    def _attempt(self, request: Callable[[], T], missing: T | None = None) -> T:
        """Returns the result of `request`, or `missing`, if that is given, where there is no
        object. Raises InputError for all other errors: each file system has classes of its own."""
        wait_s, has_reported = 0.5, False
        while True:
            try:
                return request()
            except Exception as error:
                is_missing = isinstance(error, FileNotFoundError)
                if is_missing and missing is not None:
                    return missing
                what = f"{self.key} {self.address!r}"
                is_final = is_missing or (self.waits_for_answers and is_lasting(error))
                if is_final or time.monotonic() + wait_s > self.until:
                    kind, cure = StoreDown, "give the same command again when it answers"
                    if is_lasting(error):
                        kind, cure = (
                            InputError,
                            "check the address, and what the credentials permit",
                        )
                    raise kind(f"{what} cannot be used: {cause(error)}; {cure}") from None
                if self.waits_for_answers and not has_reported:
                    rest_s = self.until - time.monotonic()
                    line = f"{what} does not answer ({cause(error)}): trying again"
                    print(f"store: {line} for up to {rest_s:.0f} s", flush=True)
                    has_reported = True
            if self.waits_for_answers:  # before training; an upload must not hide a hang
                WATCHDOG.keep_alive()
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, 10.0 if self.waits_for_answers else 60.0)


def is_lasting(error: BaseException) -> bool:
    """Returns whether a later request would fail in the same way, until a person changes
    something."""
    names = {base.__name__ for base in type(error).__mro__}
    if names & {"ResponseParserError", "JSONDecodeError"}:  # ValueErrors, for a proxy's page
        return False
    if isinstance(error, LASTING) or getattr(error, "errno", None) in LASTING_NUMBERS:
        return True
    return bool(re.search(LASTING_NAMES, " ".join(names)))


def is_below(address: str, folders: Collection[str]) -> bool:
    """Returns whether an address is one of `folders`, or in one of them."""
    return any(address == each or address.startswith(f"{each}/") for each in folders)


def cause(error: BaseException) -> str:
    """Returns the error's first sentence, without queries, passwords and the values of secret
    variables."""
    text = re.sub(r"\?\S+", "", f"{type(error).__name__}: {reason(error)}")
    for name, value in os.environ.items():
        if SECRET.search(name) and len(value) > 3:
            text = text.replace(value, "(not recorded)")
    return redacted_command([text])[0]
