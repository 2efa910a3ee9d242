"""`python -m <package> VERB …`: runs the verb's module, and reports errors in the user's input in one sentence.

This module imports nothing heavy, so that `--help` answers at once, and a verb imports only what it needs.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from pathlib import Path

from ..cluster import signals
from ..cluster.exit import exit_process, skip_finalization
from ..cluster.messages import MESSAGES
from ..cluster.watchdog import START_TIMEOUT_S, WATCHDOG
from ..errors import Ended, Exit, InputError, another_rank_is_gone, local_rank, reason
from ..project import Project

# torch reads this variable at its first allocation: tensors of 2 MiB and more in host memory then get huge pages.
# Otherwise a 20 MB buffer that is allocated in each step costs 5,000 page faults, and glibc 2.36 fragments: 2.3 GB more
# after 300 steps of ZeRO-2 on CPUs (docs/speed.md).
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

LIBRARY = __name__.split(".")[0]
FIT = "cli.fit"  # of the verbs that train or evaluate
VERBS = {  # verb: (module with `main(argv, project)`, what it does)
    "fit": (FIT, "train and validate; resumes with --ckpt_path last"),
    "validate": (FIT, "evaluate a checkpoint on the validation split"),
    "test": (FIT, "evaluate a checkpoint on the test split"),
    "predict": (FIT, "generate texts from data.prompts with a checkpoint"),
    "prepare": ("tools.prepare", "tokenize the data once, in one process, into the cache that training reads"),
    "doctor": ("tools.doctor", "check this machine for problems that would stop a training"),
    "rehearse": ("tools.rehearse", "check a cluster's configuration on this machine's CPU, in minutes"),
    "bench": ("tools.bench", "measure how fast your module trains on this device, and which flags make it faster"),
    "export": ("tools.export", "convert a checkpoint of any strategy to a Hugging Face folder, and verify it"),
    "diagnose": ("tools.diagnose", "report what is wrong with a run, the evidence, and which flag to change"),
    "report": ("tools.report", "write a page about one or more runs: findings, curves, configuration, samples"),
    "compare": ("tools.report", "compare two or more runs: configuration and results"),
    "deepspeed-config": ("tools.deepspeed_config", "print the DeepSpeed JSON of a configuration"),
}


NEEDED = ("torch", "lightning", "transformers", "jsonargparse", "numpy", "yaml")  # by every verb


def usage(program: str) -> str:
    verbs = "\n".join(f"  {verb:<18} {what}" for verb, (_, what) in VERBS.items())
    return f"""usage: python -m {program} VERB [--config FILE]… [--KEY VALUE]…

verbs:
{verbs}

Files given with --config compose from left to right; a --KEY VALUE after them overrides.
  python -m {program} fit --config configs/quickstart.yaml
  python -m {program} fit --config configs/pretrain.yaml --config configs/strategy/ddp.yaml --trainer.max_steps 100
  python -m {program} fit --config configs/quickstart.yaml --print_config     what would run, every key resolved
  python -m {program} VERB --help                                             every key: meaning, unit, off value

Documentation: docs/index.md.
Set TRACEBACK=1 to see the Python traceback behind an error."""


def main(module: str, data: str, package: str | None, argv: list[str] | None = None) -> int:
    """Runs the command line of a project in a process of its own; returns the exit code.

    Args:
        module: The LightningModule as "module:Class"; a leading dot means inside `package`. Imported when needed.
        data: The LightningDataModule, likewise.
        package: The project's package.
        argv: A verb and its flags. None: those of this process.
    """
    project, argv = Project(package or "", module, data), sys.argv[1:] if argv is None else argv
    skip_finalization()
    if VERBS.get(" ".join(argv[:1]), ("",))[0] == FIT:
        signals.listen()
    code = command(argv, project)
    signals.ignore()
    exit_process(code)
    return code


def run(argv: list[str], project: Project) -> int:
    """Run a verb; returns the exit code. What is nobody's mistake is raised, for `command` to tell."""
    project.start()
    program = project.package
    if not argv or argv[0] in ("-h", "--help"):
        print(usage(program))
        return Exit.DONE if argv else Exit.BAD_INPUT
    verb = argv[0]
    if verb not in VERBS:
        print(f"error: {verb!r} is not a verb of {program}; allowed are {', '.join(VERBS)}.", file=sys.stderr)
        return Exit.BAD_INPUT
    if lacking := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        print(f"error: {_no_environment(project, verb, lacking)}", file=sys.stderr)
        return Exit.BAD_INPUT
    if VERBS[verb][0] == FIT:
        MESSAGES.listen()
        WATCHDOG.start(START_TIMEOUT_S)  # of many processes that import from a file server, one may never come back
    try:
        if VERBS[verb][0] in (FIT, "tools.prepare"):
            from . import config_errors

            config_errors.check(argv)
        importlib.import_module(f"{LIBRARY}.{VERBS[verb][0]}").main(argv, project)
        return Exit.DONE
    except (InputError, Ended) as error:
        if os.environ.get("TRACEBACK", "0") != "0":
            traceback.print_exc()
        if local_rank() == (error.local_rank if isinstance(error, Ended) else 0):
            print(f"error: {error}" if isinstance(error, InputError) else f"\n{error}", file=sys.stderr)
        return error.code if isinstance(error, Ended) else Exit.BAD_INPUT
    except RuntimeError as error:
        from ..observe.diagnosis.crash import record_of

        if record_of(error) or not another_rank_is_gone(error) or os.environ.get("TRACEBACK", "0") != "0":
            raise  # with a record, the error is a consequence of destroying the process group
        print(f"rank {os.environ.get('RANK', '0')}: another rank is gone ({reason(error)})", file=sys.stderr)
        return Exit.FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return Exit.INTERRUPTED
    finally:
        WATCHDOG.stop()


def _no_environment(project: Project, verb: str, lacking: list[str]) -> str:
    """Explains how to activate the environment, for a Python without the dependencies."""
    folder = project.folder.absolute().parent
    environment = next((one for one in (Path(".venv"), folder / ".venv") if (one / "bin" / "python").exists()), None)
    if environment is None or environment.absolute() == Path(sys.prefix).absolute():
        cure = f"`make setup` in {folder} builds the environment .venv, `source .venv/bin/activate` activates it"
    else:
        cure = f"`source {environment}/bin/activate`, or start {environment}/bin/python -m {project.package} {verb}"
    return f"{sys.executable} has no {', '.join(lacking)}: activate the project's environment: {cure}"


def command(argv: list[str], project: Project) -> int:
    """Runs a verb; an unexpected error is reported with a diagnosis instead of a traceback."""
    try:
        return run(argv, project)
    except Exception as error:
        from ..observe.diagnosis import crash

        return crash.print_crash(error)
