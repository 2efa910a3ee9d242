"""`upgrade`: merges what changed in the template since the project was generated from it.

The template is rendered twice with the project's answers, at the recorded and at the new version,
and git cherry-picks the difference, so that conflicts are ordinary ones (docs/upgrade.md)."""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import InputError, first_line, require
from ...project import Flags, Project

RECORD = ".cruft.json"  # in cruft's format; the template's hook post_gen_project.py writes it


def main(argv: list[str], project: Project) -> None:
    """Merges the template's new version as one commit. Raises InputError if there are conflicts."""
    flags = Flags("upgrade", description=__doc__)
    flags.add_argument(
        "--to", help="a tag or commit; default: the newest release, else the last commit"
    )
    flags.add_argument(
        "--trust", action="store_true", help="run the template's hooks on this machine"
    )
    given = flags.parse_args(argv[1:])
    require("cookiecutter", "upgrade", extra="upgrade")
    root = project.folder.absolute().parent
    record = read_record(root)
    address = record["template"]  # anybody who may edit the record could name another one
    print(f"the template is {address}", flush=True)
    if not given.trust:
        why = "give --trust (`make upgrade TRUST=1`) if you trust this address, or edit it there"
        raise InputError(f"upgrade runs the hooks of {address}, which {RECORD} names: {why}")
    with tempfile.TemporaryDirectory(prefix="upgrade-") as name:
        clone = Path(name, "template")
        _git(root, "clone", "--quiet", "--", address, str(clone))
        tags = _git(clone, "tag", "--list", "--sort=-version:refname").split()
        releases = [tag for tag in tags if re.fullmatch(r"v\d+\.\d+\.\d+", tag)]
        old = record.get("checkout")
        if not old:
            old = record["commit"]
        new = given.to
        if not new:
            new = releases[0] if releases else _git(clone, "rev-parse", "HEAD")
        commits = []
        for version in (record["commit"], new):
            revision = f"{version}^{{commit}}"
            commit = _git(clone, "rev-parse", "--verify", revision, check=False)
            if not commit:
                raise InputError(
                    f"the template {address} has no {version}: edit {RECORD}, or give another TO"
                )
            commits.append(commit)
        is_newest = commits[0] == commits[1]
        if not given.to:  # a project of the last commit has passed the newest release
            is_newest |= commits[1] == _git(clone, "merge-base", *commits, check=False)
        if is_newest:
            print(f"nothing to upgrade: {address} has nothing newer than {old}")
            return
        before = _commit(root, record, old, commits[0], Path(name, "old"))
        if new not in tags:  # the project pins the library by this name
            new = commits[1]
        after = _commit(root, record, new, commits[1], Path(name, "new"), "-p", before)
    picking = ("cherry-pick", "--keep-redundant-commits", "-X", "no-renames", after)
    done = _git(root, *picking, check=False)
    names = _git(root, "diff", "--name-only", "--diff-filter=U", "--relative").splitlines()
    if not names and not done:
        _git(root, "cherry-pick", after)  # raises InputError with git's reason
    for name in names[:]:
        # The template has removed the file, and the user has edited it.
        if not _git(root, "ls-tree", after, name):
            _git(root, "add", "--", name)
            print(f"{name}: your edits stay")
            names.remove(name)
    if not done and not names:  # no conflict is left
        done = _git(root, "-c", "core.editor=true", "cherry-pick", "--continue")
    if done:
        print(f"upgraded from {old} to {new} in one commit: `git show --stat` lists it")
        return
    why = (
        "edit and `git add` these, then `git cherry-pick --continue` and `make setup` (--abort"
        " undoes the upgrade)"
    )
    raise InputError(f"upgraded from {old} to {new} with conflicts in {', '.join(names)}: {why}")


def read_record(root: Path) -> dict[str, Any]:
    """Returns the record of a project without uncommitted changes. Raises InputError otherwise."""
    try:
        record = json.loads((root / RECORD).read_text(encoding="utf-8"))
        if not (record["template"] and record["commit"] and record["context"]["cookiecutter"]):
            raise ValueError("it has no template, commit or answers")
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        what = f"{root / RECORD}, the record of the template's version and the answers,"
        raise InputError(f"{what} cannot be read: {first_line(error)}") from error
    # raises InputError if the project is not committed
    _git(root, "cat-file", "-e", f"HEAD:./{RECORD}")
    changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    if changed:
        name = changed.splitlines()[0].split(maxsplit=1)[-1]
        raise InputError(f"{name} has uncommitted changes: commit or stash them, then upgrade")
    return record


def _commit(
    root: Path, record: dict[str, Any], version: str, commit: str, out: Path, *parent: str
) -> str:
    """Renders a version; returns a commit of it, on no branch. Raises InputError if it fails."""
    clone = out.parent / "template"
    _git(clone, "checkout", "--quiet", "--detach", commit)
    command = [sys.executable, "-m", "cookiecutter", "--no-input", "--default-config"]
    command += ["--checkout", version]
    command += ["--output-dir", f"{out}/new", "--", str(clone), f"_origin={record['template']}"]
    command += [f"{key}={value}" for key, value in record["context"]["cookiecutter"].items()]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        why = " ".join(done.stderr.strip().splitlines()[-1:])
        raise InputError(f"{record['template']} at {version} cannot be generated again: {why}")
    place = out / "tree" / _git(root, "rev-parse", "--show-prefix")
    place.parent.mkdir(parents=True, exist_ok=True)
    next((out / "new").iterdir()).rename(place)
    where = {
        "GIT_DIR": _git(root, "rev-parse", "--absolute-git-dir"),
        "GIT_INDEX_FILE": f"{out}/index",
    }
    _git(out / "tree", "--work-tree=.", "add", "--all", "--force", ".", env=where)
    tree = _git(out / "tree", "write-tree", env=where)
    return _git(root, "commit-tree", tree, *parent, "-m", f"Upgrade to {version} of the template")


def _git(
    where: Path, *arguments: str, check: bool = True, env: Mapping[str, str] | None = None
) -> str:
    """Returns what git prints in the folder `where`, or "" if it fails without `check`."""
    command = ["git", "-C", str(where), *arguments]
    variables = dict(os.environ)
    if env is not None:
        variables |= env
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    if check and done.returncode:
        raise InputError(f"`git {' '.join(arguments[:-1])}` fails: {' '.join(done.stderr.split())}")
    return "" if done.returncode else done.stdout.strip()
