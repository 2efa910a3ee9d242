"""torchrun with exit codes for schedulers; launch/torchrun.sh runs it with torchrun's flags.

    python -m dist_template.cluster.torchrun --nproc-per-node=2 --max-restarts=3 -m <package> fit …

torchrun restarts its workers whatever they exit with, and then exits with 1. This launcher

- does not restart workers that exited by decision (errors.DECIDED), and exits with their code;
- without restarts left, exits with REQUEUE if workers were killed or hung, else with FAILED;
- exits with REQUEUE if the rendezvous or its host is lost: a restart on this machine cannot help;
- passes SIGTERM and SIGUSR1 to the workers, which save, and exits with their code;
- lets the other workers exit when one has: torchrun terminates them while they write or save.
"""

from __future__ import annotations

import logging
import os
import platform
import signal
import sys
import threading
import time
from typing import Any, ClassVar

from ..errors import DECIDED, Exit
from ..lazy import without_collections
from . import signals
from .launch import Variable

if __name__ == "__main__":
    for _number in signals.STOP:  # nothing to save until torchrun installs its own handler
        signal.signal(_number, lambda *_: os._exit(Exit.REQUEUE))

with without_collections():
    from torch.distributed import DistError
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.run import parse_args, run

    from ..compat.torchrun import OpenAgent, use

PEERS_S = 3.0  # for the other workers to print their errors after one has failed
LOST_S = 20.0  # the rendezvous is lost if it does not answer for so long
# The other nodes must rejoin within this time after a restart; their ranks first exit, within SHUTDOWN_TIMEOUT.
REJOIN_S = float(os.environ.get("REJOIN_TIMEOUT", "90"))


def report(text: str) -> None:
    print(f"launcher: {text}", file=sys.stderr, flush=True)


class Agent(OpenAgent):
    """Monitors this node's workers."""

    instances: ClassVar[list[Agent]] = []  # the launcher has at most one

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._deadline = float("inf")
        self._overdue = ""  # what has not happened at the deadline
        self._has_joined = False
        self._killed: set[int] = set()  # process ids of workers that waited after a failure
        self.instances.append(self)
        threading.Thread(target=self._watch_rendezvous, daemon=True).start()

    @property
    def codes(self) -> list[int]:
        """Exit codes of the workers that have exited; SIGTERM of those that were killed here."""
        found = []
        for worker in self.workers():
            if (code := worker.poll()) is not None:
                found.append(-signal.SIGTERM if worker.pid in self._killed else code)
        return found

    @property
    def _decided(self) -> bool:  # by a worker: a restart does not help
        return any(code in DECIDED for code in self.codes)

    def monitor(self, worker_group: WorkerGroup) -> RunResult:
        self._deadline = float("inf")
        for rank, worker in enumerate(self.workers()):
            if worker.poll():  # the first one that has failed
                self._wait_for_the_others()
                if self._decided:
                    self.allow_no_restart()
                self._report(worker_group, rank)
                break
        result = super().monitor(worker_group)
        if result.state == WorkerState.HEALTHY:
            # torchrun queries the rendezvous for new nodes next.
            self._set_deadline("the rendezvous does not answer", LOST_S)
        return result

    def rendezvous(self, worker_group: WorkerGroup) -> None:
        """Joins the rendezvous. After a restart torchrun would wait 10 minutes for a lost node."""
        if self._has_joined:
            sentence = f"not all nodes rejoined within {REJOIN_S:g} s (REJOIN_TIMEOUT)"
            self._set_deadline(sentence, REJOIN_S)
        super().rendezvous(worker_group)
        self._deadline, self._has_joined = float("inf"), True

    def _set_deadline(self, sentence: str, within_s: float) -> None:
        self._overdue, self._deadline = sentence, time.monotonic() + within_s

    def _wait_for_the_others(self) -> None:
        workers, start, terminated = self.workers(), time.monotonic(), False
        while len(self.codes) < len(workers):
            if Exit.REQUEUE in self.codes and not terminated:
                terminated = True
                for worker in workers:  # they may wait for the one that exited before training
                    worker.terminate()
            if time.monotonic() - start > (self.shutdown_timeout_s if self._decided else PEERS_S):
                for worker in workers:
                    if worker.poll() is None:
                        self._killed.add(worker.pid)
                        worker.kill()
            time.sleep(0.02)

    def _report(self, worker_group: WorkerGroup, first: int) -> None:
        """Prints how the first worker exited, unless rank 0 decided to exit and has printed why."""
        if self._decided and self.workers()[0].returncode in DECIDED:
            return
        code, left, then = self.workers()[first].returncode, self.restarts_left, ""
        how = f"exited with code {code}"
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        if not self._decided:
            then = f"; restarting, {left - 1} more left" if left else "; no restart is left"
        report(f"rank {worker_group.workers[first].global_rank} {how}{then}")

    def shut_down(self, death_sig: signal.Signals = signal.SIGTERM) -> None:
        self._deadline = float("inf")  # a save, and then the other nodes, may take long
        super().shut_down(death_sig)  # torchrun passes its own option only in some cases

    def _watch_rendezvous(self) -> None:
        """Exits at the deadline: behind a broken link the agent would wait forever."""
        while time.monotonic() < self._deadline:
            time.sleep(1)
        report(f"{self._overdue}; relaunch the same command on every node to resume")
        self.shut_down()
        os._exit(Exit.REQUEUE)


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
    # If this launcher is killed, so is a rank that hangs in an import; a rank that trains saves (signals.listen).
    use(Agent, on_signal=_stop_once, preexec_fn=signals.end_with_parent)
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
        code = Exit.of_all(codes() or [Exit.REQUEUE])
        return Exit.REQUEUE if code == Exit.FAILED else code
    except (RendezvousError, DistError) as error:
        lost = f"the rendezvous is lost ({type(error).__name__})"
        report(f"{lost}; relaunch the same command to resume")
        return Exit.REQUEUE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
