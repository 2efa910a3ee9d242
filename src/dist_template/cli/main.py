"""`python -m <package> VERB …`: runs the verb's module, and reports bad input in one sentence.

1  Signals are handled from the first moment of a training on (`main`).
2  The verb, the environment variables of launchers, the folder and the installed packages are
   checked, then the keys, without torch (`_start`).
3  The verb's module is imported and called.
4  An error becomes a sentence and an exit code (`_run`), or the few lines of a crash (`command`).

It imports nothing heavy, so that `--help` answers at once."""

import importlib.util
import os
import re
import sys
import time
import traceback
from contextlib import nullcontext
from difflib import get_close_matches

from ..cluster import signals
from ..cluster.exit import exit_process, is_output_closed, skip_finalization
from ..cluster.launch import check_environment
from ..cluster.messages import hide_warnings
from ..cluster.watchdog import START_TIMEOUT_S, WATCHDOG
from ..errors import (
    Ended,
    Exit,
    InputError,
    another_rank_is_gone,
    first_line,
    local_rank,
    reason,
    shortened,
)
from ..lazy import without_collections
from ..project import Project
from ..terminal import open_streams, plain_output
from .verbs import TRAINING, verbs

ALONE_S = 3.0  # rank 0 has ended by then, if it has the same error

# Tensors of 2 MiB and more in host memory get huge pages; torch reads this at its first allocation.
# Otherwise a 20 MB buffer that is allocated in each step costs 5,000 page faults, and glibc 2.36
# fragments: 2.3 GB more after 300 steps of ZeRO-2 on CPUs (docs/speed.md).
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

HELP = ("-h", "--help")
NEEDED = ("torch", "lightning", "transformers", "jsonargparse", "numpy", "yaml")  # by every verb


def usage(program: str) -> str:
    lines = "\n".join(f"  {verb:<18} {known.help_line()}" for verb, known in verbs().items())
    return f"""usage: python -m {program} VERB [--config FILE]… [--KEY VALUE]…

verbs:
{lines}

Files given with --config compose from left to right; a --KEY VALUE after them overrides.
  python -m {program} fit --config configs/quickstart.yaml
  python -m {program} fit --config configs/quickstart.yaml --trainer.max_steps 100
  python -m {program} fit --config configs/quickstart.yaml --print_config     every key resolved
  python -m {program} fit --help [SECTION]                                    every key explained
  python -m {program} VERB --help                                             a verb's own flags

Documentation: python -m {program} docs.
Set TRACEBACK=1 to see the Python traceback behind an error."""


def main(module: str, data: str, package: str | None, argv: list[str] | None = None) -> int:
    """Runs the command line of a project, `package`, in a process of its own; returns the exit
    code. `module` is the LightningModule as "module:Class", imported when needed; a leading dot
    means inside `package`. `data` is the LightningDataModule, likewise, and `argv` a verb and its
    flags; None: sys.argv."""
    open_streams()
    if re.fullmatch(r"--local[-_]rank=\d+", "".join(sys.argv[1:2])):
        del sys.argv[1]  # the deepspeed launcher writes it before the verb, and sets LOCAL_RANK too
    project = Project("" if package is None else package, module, data)
    if argv is None:
        argv = sys.argv[1:]
    skip_finalization()
    if not sys.stderr.isatty():  # transformers' progress bars too
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if argv and argv[0] in TRAINING:
        signals.listen()
    code = command(argv, project)
    signals.ignore()
    exit_process(code)
    return code


def run(argv: list[str], project: Project) -> int:
    """Runs a verb; returns the exit code. Raises errors other than bad input."""
    with plain_output():
        return _run(argv, project)


def _run(argv: list[str], project: Project) -> int:
    project.start()
    try:
        if len(argv) > 1 and argv[0] in HELP:  # of a verb, or of a section of keys
            argv = [argv[1], "--help"] if argv[1] in verbs() else ["fit", *argv]
        if not argv or argv[0] in HELP:
            print(usage(project.package))
            return Exit.DONE if argv else Exit.BAD_INPUT
        _start(argv, project)
        WATCHDOG.finish()
        return Exit.DONE
    except (InputError, Ended) as error:
        if os.environ.get("TRACEBACK", "0") != "0":
            traceback.print_exc()
        _report(error)
        return error.code if isinstance(error, Ended) else Exit.BAD_INPUT
    except RuntimeError as error:
        from ..observe.crash import record_of

        is_consequence = another_rank_is_gone(error) and not record_of(error)
        if not is_consequence or os.environ.get("TRACEBACK", "0") != "0":
            raise  # with a record, it is a consequence of destroying the process group
        rank = os.environ.get("RANK", "0")
        print(f"rank {rank}: another rank is gone ({reason(error)})", file=sys.stderr)
        return Exit.FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return Exit.INTERRUPTED
    except SystemExit as error:
        # Lightning (2.6.6) handles Ctrl-C in a training, and exits with 1, as after a failure
        if not isinstance(error.__context__, KeyboardInterrupt):
            raise
        return Exit.INTERRUPTED
    finally:
        WATCHDOG.stop()


def _report(error: InputError | Ended) -> None:
    """Prints the sentence once on each node; one of another rank alone, with its rank."""
    sentence = shortened(str(error), 2000)
    if isinstance(error, Ended):
        if local_rank() == error.local_rank:
            print(f"\n{sentence}", file=sys.stderr)
    elif local_rank() == 0:
        print(f"error: {sentence}", file=sys.stderr)
    elif _is_alone():
        rank = os.environ.get("RANK")
        print(f"rank {rank if rank else local_rank()}: error: {sentence}", file=sys.stderr)


def _is_alone() -> bool:
    """Returns whether rank 0, which has started this process, continues while this one has an
    error: what is wrong for all ranks ends it in a moment too, and it prints that."""
    if "LOCAL_WORLD_SIZE" in os.environ:  # another launcher's, whose process is the parent
        return False
    parent, until = os.getppid(), time.monotonic() + ALONE_S
    while time.monotonic() < until:
        if os.getppid() != parent:
            return False
        time.sleep(0.1)
    return True


def _start(argv: list[str], project: Project) -> None:
    """Checks a command line as far as this needs no torch, then imports and runs the verb."""
    verb, known = argv[0], verbs()
    if verb not in known:
        near = get_close_matches(verb, known, 1)
        hint = f"; did you mean {near[0]}?" if near else ";"
        what = f"{verb!r} is not a verb of {project.package}{hint}"
        raise InputError(f"{what} allowed are {', '.join(known)}.")
    check_environment()
    try:
        os.getcwd()  # paths of files and of the run are relative to it
    except OSError as error:
        raise InputError(
            f"the current folder is gone or cannot be read ({error.strerror}): cd into the"
            " project's folder, and start again"
        ) from error
    lacking = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if lacking:
        folder = project.folder.absolute().parent
        cure = f"`make setup` in {folder} builds .venv, `source .venv/bin/activate` activates it"
        raise InputError(f"{sys.executable} has no {', '.join(lacking)}: {cure}")
    if known[verb].point.is_ours:  # others may have keys of their own
        from . import keys  # needs yaml

        keys.check(argv, project)
    if verb in TRAINING:
        hide_warnings()
        WATCHDOG.start(START_TIMEOUT_S)  # an import from a file server may hang
    is_imported = known[verb].point.module in sys.modules
    with nullcontext() if is_imported else without_collections():
        function = known[verb].load()
    try:
        function(argv, project)
    except (InputError, Ended, KeyboardInterrupt):
        raise
    except Exception as error:
        from ..observe.crash import own_lines

        plugin = known[verb].point
        if plugin.is_ours or own_lines(error):  # of the user's own package: the crash has its lines
            raise
        what = f"{type(error).__name__}: {first_line(error)}"
        sentence = f"{plugin.label} fails: {what}; TRACEBACK=1 prints the traceback"
        raise Ended(Exit.FAILED, sentence) from error


def command(argv: list[str], project: Project) -> int:
    """Runs a verb; an unexpected error is reported in a few lines instead of a traceback."""
    with plain_output():
        try:
            return run(argv, project)
        except Exception as error:
            if isinstance(error, BrokenPipeError) and is_output_closed():
                return Exit.CLOSED_PIPE
            from ..observe.crash import print_crash

            return print_crash(error)
