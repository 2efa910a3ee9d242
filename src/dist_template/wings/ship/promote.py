"""`promote`: evaluates a run, exports its model, and registers the export as a new version.

1  `evaluate` compares the run with the version that is served now, or with its own start, and ends
   the verb if a requirement is not met.
2  `export` writes the model into a hidden folder of the registry, and compares it with the run's.
3  The folder is renamed to the next version, and `latest` points to it.

    <registry>/v1/ v2/ …     exported models with version.json; their files never change
    <registry>/v2/withdrawn  exists after a roll-back from v2
    <registry>/latest -> v2  the version that a server loads

Each change is one rename, so that a process that is killed leaves the versions valid."""

import contextlib
import hashlib
import json
import os
import shutil
from argparse import Namespace
from datetime import UTC, datetime
from pathlib import Path

from ...errors import InputError, reason
from ...project import Flags, Project
from ...records import write_atomically
from ..diagnose.command import newest
from .evaluate import command as evaluate
from .export import command as export

AGAINST_START = "eval/loss better"
AGAINST_LATEST = "eval/loss not worse by 0.01"  # nats per token


def main(argv: list[str], project: Project) -> None:
    """Promotes the run in `argv`, or rolls back. Raises InputError if the run, the registry or a
    flag cannot be used, and Ended if a requirement does not hold, or the export differs from the
    trained model."""
    about = f"""Evaluates a run, exports its model, and registers it. Unless
        --baseline and --require are given, it has to be {AGAINST_LATEST!r} against the latest
        version, or {AGAINST_START!r} against the start."""
    parser = Flags("promote", description=about)
    parser.add_argument("run", nargs="?", help="a run's folder, runs/<name>/<id>")
    parser.add_argument("--registry", default="registry", help="folder of the versions")
    parser.add_argument(
        "--roll_back", action="store_true", help="withdraw the latest version, serve the one before"
    )
    evaluate.add_flags(parser)
    given = parser.parse_args(argv[1:], Namespace(name="promotion"))
    if not given.registry.strip():
        raise InputError("--registry is empty; give the folder of the versions")
    registry = Registry(Path(given.registry))
    if given.roll_back:
        if given.run:
            raise InputError(
                f"--roll_back withdraws a version, and takes no run: remove {given.run}"
            )
        withdrawn, latest = registry.roll_back()
        print(f"{withdrawn.name} is withdrawn; {registry.folder / 'latest'} is {latest.name}")
        return
    if not given.run:
        raise InputError("promote needs a run: give runs/<name>/<id>, or --roll_back")
    run, latest = newest(Path(given.run)), registry.latest
    _refuse_others(run, project)
    given.run = str(run)
    if not given.baseline:
        given.baseline = str(latest) if latest else "start"
    if not given.require:
        given.require = [AGAINST_LATEST if latest else AGAINST_START]
    exported = registry.folder / f".{run.name}.{os.getpid()}"
    is_new = not registry.folder.exists()
    try:
        registry.folder.mkdir(parents=True, exist_ok=True)
        evaluate.run(given, project)
        export.main(["export", str(run), "--adapter=merged", "--output", str(exported)], project)
        found = json.loads((run / "evaluation" / "promotion.json").read_text(encoding="utf-8"))
        known = {
            "run": given.run,
            "baseline": given.baseline,
            "required": given.require,
            "figures": found,
        }
        version = registry.add(exported, known)
    except OSError as error:
        raise InputError(f"--registry {given.registry!r}: {reason(error)}; give another") from error
    finally:
        shutil.rmtree(exported, ignore_errors=True)
        if is_new:
            with contextlib.suppress(OSError):  # not empty: it has a version
                registry.folder.rmdir()
    print(f"{version} is the latest version of {registry.folder}")


def _refuse_others(run: Path, project: Project) -> None:
    """Raises InputError for a module that is no language model."""
    from ...cli.fit import WithoutTrainer
    from .evaluate.plain import is_for_texts
    from .export import trained

    flags, *_ = trained.of_run(str(run), project, "RUN")
    cli = WithoutTrainer(project, flags, run=False)
    if not is_for_texts(cli):
        raise InputError(
            "promote registers language models, which it compares by their documents, and"
            f" {type(cli.model).__name__} is not one: `evaluate RUN --baseline OTHER` compares"
            " metrics, and `export RUN` writes weights"
        )


class Registry:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def latest(self) -> Path | None:
        """The folder of the version that is to be served. Raises InputError if `latest`, which
        somebody has changed, leads to none."""
        link = self.folder / "latest"
        if not os.path.lexists(link):
            return None
        version = Path(os.path.realpath(link))
        is_version = version.name in (f"v{number}" for number in self.numbers())
        if not is_version or version.parent != Path(os.path.realpath(self.folder)):
            raise InputError(
                f"{link} leads to {version}, and has to be a link to one of its versions, as v1:"
                f" replace it by `ln -sfn VERSION {link}`"
            )
        return version

    def numbers(self) -> list[int]:
        """Returns the numbers of all versions, sorted."""
        found = []
        for path in self.folder.glob("v*/"):
            number = path.name.removeprefix("v")
            if number.isdecimal():
                found.append(int(number))
        return sorted(found)

    def add(self, exported: Path, facts: dict[str, object]) -> Path:
        """Renames an exported folder on the same disk to the next version, now the latest; returns
        it."""
        digests = {}
        for path in sorted(filter(Path.is_file, exported.rglob("*"))):
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256")
            digests[str(path.relative_to(exported))] = digest.hexdigest()
        time = datetime.now(UTC).isoformat(timespec="seconds")
        known = {"time": time, **facts, "sha256": digests}
        write_atomically(exported / "version.json", json.dumps(known, indent=2))
        folder = exported.rename(self.folder / f"v{max(self.numbers(), default=0) + 1}")
        self._point_to(folder)
        return folder

    def roll_back(self) -> tuple[Path, Path]:
        """Withdraws the latest version; the newest one before it that is not withdrawn replaces it.
        Raises InputError if there is no earlier version."""
        latest = self.latest
        if latest is None:
            raise InputError(f"--registry {str(self.folder)!r} has no version: promote a run first")
        for number in reversed(self.numbers()):
            earlier = self.folder / f"v{number}"
            if number < int(latest.name[1:]) and not (earlier / "withdrawn").exists():
                (latest / "withdrawn").touch()
                self._point_to(earlier)
                return latest, earlier
        raise InputError(f"{latest.name} is the first version that is not withdrawn: promote a run")

    def _point_to(self, folder: Path) -> None:
        link = self.folder / f".latest.{os.getpid()}"
        link.unlink(missing_ok=True)
        link.symlink_to(folder.name)
        link.replace(self.folder / "latest")
