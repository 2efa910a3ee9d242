"""`upgrade`: merges what changed in the template since the project was generated from it.

The template is rendered twice with the project's answers, at the recorded and at the new version,
and the difference is cherry-picked: git merges it with the project's edits, and its conflicts are
ordinary ones. docs/upgrade.md compares this with cruft and copier.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.request import url2pathname

from ...errors import InputError, first_line, require
from ...project import Flags, Project

RECORD = ".cruft.json"  # in cruft's format; the template's hook post_gen_project.py writes it
TRUSTED = "dist-template.trusted"  # in git's configuration: an address whose hooks may run
RELEASE = re.compile(r"v\d+\.\d+\.\d+")
Record = dict[str, Any]  # template: its address; commit; checkout; context.cookiecutter: answers
Version = tuple[str, str]  # a tag or commit, by which the library is pinned, and its commit


def main(argv: list[str], project: Project) -> None:
    """Merges the template's new version as one commit. Raises InputError if there are conflicts."""
    flags = Flags("upgrade", description=__doc__)
    what = "a tag, branch or commit of the template, or the address of a newer .zip archive"
    flags.add_argument("--to", help=f"{what}; default: the newest release, else the last commit")
    hooks = "run the template's hooks, programs of its address, on this machine without asking"
    flags.add_argument("--trust", action="store_true", help=hooks)
    given = flags.parse_args(argv[1:])
    require("cookiecutter", "upgrade")
    root = project.folder.absolute().parent
    record = read_record(root)
    _check_trust(root, record["template"], given.trust)
    with tempfile.TemporaryDirectory(prefix="upgrade-") as name:
        old, new = _versions(record, given.to, Path(name))
        if old == new:
            print(f"nothing to upgrade: {record['template']} has nothing newer than {old[0]}")
            return
        before = _commit(root, record, old, Path(name, "old"))
        after = _commit(root, record, new, Path(name, "new"), "-p", before)
    if _git(root, "cherry-pick", "--keep-redundant-commits", after, check=False):
        print(f"upgraded from {old[0]} to {new[0]} in one commit: `git show --stat` lists it")
        return
    names = _git(root, "diff", "--name-only", "--diff-filter=U", "--relative").splitlines()
    if not names:
        _git(root, "cherry-pick", "--abort", check=False)
        raise InputError(f"git changed nothing, `git cherry-pick {after}` says why")
    raise InputError(
        f"upgraded from {old[0]} to {new[0]} with conflicts in {', '.join(names)}: edit and `git"
        " add` these, then `git cherry-pick --continue` and `make setup` (`git cherry-pick"
        " --abort` undoes the upgrade)"
    )


def read_record(root: Path) -> Record:
    """Returns the record of a project without uncommitted changes. Raises InputError otherwise."""
    try:
        record = json.loads((root / RECORD).read_text(encoding="utf-8"))
        if not (record["template"] and record["context"]["cookiecutter"]):
            raise ValueError("it has no template or no answers")
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        what = f"{root / RECORD}, the record of the template's version and the answers,"
        raise InputError(f"{what} cannot be read: {first_line(error)}") from error
    if not _git(root, "ls-tree", "--name-only", "HEAD", RECORD, check=False):
        how = "run `git init`, `git add --all` and `git commit` there"
        raise InputError(f"{root} is not committed to git, which merges the upgrade: {how}")
    if changed := _git(root, "status", "--porcelain", "--untracked-files=no"):
        name = changed.splitlines()[0].split(maxsplit=1)[-1]
        raise InputError(f"{name} has uncommitted changes: commit or stash them, then upgrade")
    return record


def _check_trust(root: Path, address: str, is_given: bool) -> None:
    """Prints the template's address, and asks once for each whether its hooks may run.

    Anybody who may edit the record could name another. The answer is in this clone's git
    configuration, which no commit contains.

    Raises:
        InputError: they may not, or there is no terminal to ask on.
    """
    print(f"the template is {address}", flush=True)
    if is_given or _git(root, "config", "--local", TRUSTED, check=False) == address:
        return
    why = "give --trust (`make upgrade TRUST=1`) if you trust this address, or edit it"
    if sys.stdin.isatty():
        question = "its hooks run on this machine; do you trust this address? [y/N] "
        if input(question).strip().lower() in ("y", "yes"):
            _git(root, "config", "--local", TRUSTED, address)
            return
    raise InputError(f"upgrade runs the hooks of {address}, which {RECORD} names: {why} there")


def _versions(record: Record, to: str | None, folder: Path) -> tuple[Version, Version]:
    """Clones the template into `folder`; returns the recorded and the new version."""
    address, recorded, clone = record["template"], record.get("commit"), folder / "template"
    if address.endswith(".zip"):
        if not to or not to.endswith(".zip"):
            raise InputError(f"the template is {address}: name a newer archive, TO=<address>.zip")
        return (address, ""), (to, "")
    if not recorded:
        why = f"{address} was no git repository when the project was generated from it"
        raise InputError(f"{why}: write the commit that it was into {RECORD}")
    _git(folder, "clone", "--quiet", "--", address, str(clone))
    tags = _git(clone, "tag", "--list", "--sort=-version:refname").split()
    # the library of a template's folder is the folder's own, whatever is tagged
    releases = []
    if not Path(address).is_dir():
        releases = [*filter(RELEASE.fullmatch, tags)]
    commits, goal = [], to or (releases or ["HEAD"])[0]
    for name, key in ((recorded, RECORD), (goal, "TO")):
        found = ""
        for place in (name, f"origin/{name}"):
            verify = ["rev-parse", "--verify", "-q", f"{place}^{{commit}}"]
            found = found or _git(clone, *verify, check=False)
        if not found:
            where = f"give a tag, branch or commit of it in {key}"
            raise InputError(f"the template {address} has no {name}: {where}")
        commits.append(found)
    old = (record.get("checkout") or recorded, commits[0])
    if not to and _git(clone, "merge-base", *commits, check=False) == commits[1]:
        return old, old
    return old, (goal if goal in tags else commits[1], commits[1])


def _commit(root: Path, record: Record, version: Version, out: Path, *parent: str) -> str:
    """Renders a version; returns a commit of it, on no branch. Raises InputError if it fails."""
    (name, commit), answers = version, []
    if commit:
        template = str(out.parent / "template")
        _git(Path(template), "checkout", "--quiet", "--detach", commit)
        answers.append(f"_origin={record['template']}")
    else:
        template = url2pathname(name.removeprefix("file://")) if "file:" in name else name
    for key, value in record["context"]["cookiecutter"].items():
        answers.append(f"{key}={value}")
    quiet = ["--no-input", "--default-config", "--checkout", name, "--output-dir", f"{out}/new"]
    command = [sys.executable, "-m", "cookiecutter", *quiet, "--", template, *answers]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        why = " ".join(done.stderr.strip().splitlines()[-1:])
        raise InputError(f"{record['template']} at {name} cannot be generated again: {why}")
    place = out / "tree" / _git(root, "rev-parse", "--show-prefix")
    place.parent.mkdir(parents=True, exist_ok=True)
    next((out / "new").iterdir()).rename(place)
    where = {"GIT_DIR": _git(root, "rev-parse", "--absolute-git-dir")}
    where |= {"GIT_INDEX_FILE": f"{out}/index", "GIT_WORK_TREE": f"{out}/tree"}
    _git(out / "tree", "add", "--all", "--force", ".", env=where)
    tree = _git(out / "tree", "write-tree", env=where)
    return _git(root, "commit-tree", tree, *parent, "-m", f"Upgrade to {name} of the template")


def _git(where: Path, *arguments: str, check: bool = True, env: Mapping[str, str] | None = None) -> str:
    """Returns what git prints in the folder `where`, or "" if it fails without `check`."""
    command = ["git", "-C", str(where), *arguments]
    done = subprocess.run(command, env={**os.environ, **(env or {})}, capture_output=True, text=True)
    if check and done.returncode:
        raise InputError(f"`git {' '.join(arguments[:-1])}` fails: {' '.join(done.stderr.split())}")
    return "" if done.returncode else done.stdout.strip()
