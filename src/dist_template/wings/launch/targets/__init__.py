"""Targets of `launch`: launchers and schedulers, found by the entry points of GROUP."""

import subprocess
from pathlib import Path
from typing import Any

from ....errors import InputError, first_line
from ....foreign import end_of
from ....plugins import PluginError, contained, registered
from ..job import Job

GROUP = "dist_template.launch_targets"
# on: the target's name; id: the scheduler's of the job, or ""; hosts; ssh, which the user gives
Record = dict[str, Any]


class Target:
    """Base of the launchers and schedulers. `folder` is RUN/launch, `record` is launch.json's
    content.

    `render` returns the files by name, `commands` the commands that start the job, `status` its
    state; `stop` asks the run to save and exit with 75."""

    on_hosts = False  # True: it starts the nodes that `cluster` names; False: a scheduler does
    takes_slots = False  # whether cluster.include and exclude may name slots of a host

    def render(self, job: Job) -> dict[str, str]:
        raise NotImplementedError

    def commands(self, job: Job) -> list[list[str]]:
        raise NotImplementedError

    def check(self, job: Job) -> None:
        """Raises InputError if the job cannot start now; nothing is written yet."""

    def submit(self, job: Job) -> str:
        """Starts the job. Returns the scheduler's identifier, which the command prints by default;
        a launcher returns "" when all processes have ended, and raises Ended by another code than
        0."""
        return ask(*self.commands(job)[0])

    def logs(self, record: Record, folder: Path) -> str:
        """Returns the output of the run: by default, of all `*.log` files in the folder, of long
        ones the end."""
        files = filter(Path.is_file, sorted(folder.glob("*.log")))
        texts = [(file, end_of(file)) for file in files]
        return "\n".join(f"{file}:\n{text}" for file, text in texts)


def ask(*words: str) -> str:
    """Returns what a scheduler's command prints. Raises InputError if it is not here, or fails."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        what = f"there is no {words[0]} on this machine"
        raise InputError(f"{what}; start it where {words[0]} is, or give --dry-run") from error
    if done.returncode:
        raise InputError(f"{words[0]} fails: {first_line(done.stderr)}")
    return done.stdout.rstrip()


def target(name: str) -> Target:
    """Creates the target that is registered as `name`."""
    known = registered(GROUP)
    if name not in known:
        allowed = ", ".join(sorted(known))
        raise InputError(f"{name!r} is no target of launch; allowed are {allowed}")
    plugin = known[name]
    kind = plugin.load()
    with contained(plugin, "cannot be created"):
        made = kind()
    if not isinstance(made, Target):
        raise PluginError(f"{plugin.label} is no Target: {made!r:.100}")
    return made
