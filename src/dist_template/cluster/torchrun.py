"""torchrun with exit codes for schedulers; launch/torchrun.sh runs it with torchrun's flags.

    python -m dist_template.cluster.torchrun --nproc-per-node=2 --max-restarts=3 -m <package> fit …

torchrun restarts its workers whatever they exit with, and then exits with 1. This launcher, by
compat/torchrun.py,

- does not restart workers that exited by decision (errors.DECIDED), and exits with their code;
- without restarts left, exits with REQUEUE if workers were killed or hung, else with FAILED;
- exits with REQUEUE if the rendezvous or its host is lost: a restart on this machine cannot help;
- passes SIGTERM and SIGUSR1 to the workers, which save, and exits with their code;
- lets the other workers exit when one has: torchrun terminates them while they write or save."""

import logging
import os
import platform
import signal
import sys

from ..errors import Exit
from ..lazy import without_collections
from . import signals
from .launch import Variable

if __name__ == "__main__":
    for _number in signals.STOP:  # nothing to save until torchrun installs its own handler
        signal.signal(_number, lambda *_: os._exit(Exit.REQUEUE))

with without_collections():
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import parse_args, run

    from ..compat.torchrun import Agent, report, use_agent


def codes() -> list[int]:
    return [code for agent in Agent.instances for code in agent.codes]


def _stop_once(number: int, frame: object) -> None:
    """Handles the first signal; a second one is ignored while the workers save."""
    signals.ignore()
    raise SignalException(f"got {number}", signal.Signals(number))


def main(argv: list[str]) -> int:
    signals.job_started()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does, without its banner
    if "LOGLEVEL" not in os.environ:
        for name in list(logging.root.manager.loggerDict):
            if name.startswith("torch.distributed.elastic"):
                logging.getLogger(name).setLevel(logging.CRITICAL)
    # If this launcher is killed, so is a rank that hangs in an import; a rank that trains saves
    # (signals.listen).
    use_agent(on_signal=_stop_once, preexec_fn=signals.end_with_parent)
    try:
        arguments = parse_args(argv)
        # an identifier of this launch, the same on all nodes
        os.environ[Variable.LAUNCH] = f"{arguments.rdzv_endpoint} {arguments.rdzv_id}"
        if str(arguments.nnodes) == "1":
            os.environ[Variable.LAUNCH] = f"{platform.node()} {os.getpid()}"
        run(arguments)
        return Exit.DONE
    except ChildFailedError:
        return Exit.of_all(codes())
    except SignalException as stop:
        if stop.sigval == signal.SIGINT:
            return Exit.INTERRUPTED
        found = codes()
        code = Exit.of_all(found) if found else Exit.REQUEUE
        if code == Exit.FAILED:
            return Exit.REQUEUE
        return code
    except (RendezvousError, DistError) as error:
        report(f"the rendezvous is lost ({type(error).__name__})")
        return Exit.REQUEUE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
