"""torchrun, with exit codes that say what to do next; launch/torchrun.sh runs it. It takes torchrun's own flags.

    python -m <package>.cluster.torchrun --nproc-per-node=2 --max-restarts=3 -m <package> fit …

torchrun restarts its workers whatever they ended with, and then exits with 1. This one

- restarts no worker that decided to end (errors.DECIDED), and exits with its code;
- with all restarts used, exits with REQUEUE where workers were killed or hung, with FAILED where they failed;
- exits with REQUEUE where the rendezvous, or its host, is gone: nothing on this machine can help;
- hands SIGTERM and SIGUSR1 on to the workers, which save, and exits with their code;
- lets the others end by themselves when one has: torchrun terminates them at once, while they write or save.
"""

from __future__ import annotations

import logging
import os
import platform
import signal
import sys
import threading
import time
from functools import partial
from typing import Any

from ..errors import DECIDED, Exit
from . import signals
from .launch import LAUNCH

if __name__ == "__main__":
    for _number in signals.STOP:  # there is nothing to save until the workers run; then torchrun's handler stands here
        signal.signal(_number, lambda *_: os._exit(Exit.REQUEUE))

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing import api as processes
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher import api as launcher
from torch.distributed.run import parse_args, run

PEERS_S = 3.0  # for the others to say what they saw, once one has failed; none of them can save any more
LOST_S = 20.0  # without an answer from the rendezvous, asked every second, it is lost
# After a restart the other nodes must join within so long: their ranks end first, in SHUTDOWN_TIMEOUT seconds at most.
REJOIN_S = float(os.environ.get("REJOIN_TIMEOUT", "90"))


class Agent(LocalElasticAgent):
    """Watches this node's workers."""

    latest: Agent | None = None  # there is one per launcher

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._lost_at = float("inf")
        self._lost = ""  # what has not come at that time
        self._has_joined = False
        Agent.latest = self
        threading.Thread(target=self._watch_rendezvous, daemon=True).start()

    @property
    def codes(self) -> list[int]:
        """Of the workers that have ended."""
        return [code for worker in self._workers() if (code := worker.poll()) is not None]

    def _workers(self) -> list[Any]:
        """Local rank -> Popen."""
        handlers = getattr(self._pcontext, "subprocess_handlers", {})
        return [handlers[rank].proc for rank in sorted(handlers)]

    @property
    def _decided(self) -> bool:
        return any(code in DECIDED for code in self.codes)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._lost_at = float("inf")
        first = next((rank for rank, worker in enumerate(self._workers()) if worker.poll()), None)
        if first is not None:
            self._let_the_others_end()
            if self._decided:
                self._remaining_restarts = 0
            self._report(worker_group, first)
        result = super()._monitor_workers(worker_group)
        if result.state == WorkerState.HEALTHY:
            self._expect("the rendezvous does not answer", LOST_S)  # torchrun asks it for new nodes next
        return result

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Bounded after a restart: torchrun would wait 10 minutes for a node that a cut link has taken away."""
        if self._has_joined:
            self._expect(f"not all nodes came back within {REJOIN_S:g} s (REJOIN_TIMEOUT)", REJOIN_S)
        super()._rendezvous(worker_group)
        self._lost_at, self._has_joined = float("inf"), True

    def _expect(self, sentence: str, within_s: float) -> None:
        self._lost, self._lost_at = sentence, time.monotonic() + within_s

    def _let_the_others_end(self) -> None:
        workers, begun, told = self._workers(), time.monotonic(), False
        while len(self.codes) < len(workers):
            if Exit.REQUEUE in self.codes and not told:
                told = True
                for worker in workers:  # that one had not begun to train: these may be waiting for it
                    worker.terminate()
            if time.monotonic() - begun > (self._shutdown_timeout if self._decided else PEERS_S):
                for worker in workers:
                    worker.kill()
            time.sleep(0.02)

    def _report(self, worker_group: WorkerGroup, first: int) -> None:
        """What the workers cannot say; where rank 0 decided, it has said why."""
        code, left = self._workers()[first].returncode, self._remaining_restarts
        if self._decided and self._workers()[0].returncode in DECIDED:
            return
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        then = "" if self._decided else f"; restarting, {left - 1} more left" if left else "; no restart is left"
        self._say(f"rank {worker_group.workers[first].global_rank} {how}{then}")

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self._lost_at = float("inf")  # a save, and then the other nodes, may take their time
        super()._shutdown(death_sig, self._shutdown_timeout)  # torchrun itself passes it on sometimes only

    def _watch_rendezvous(self) -> None:
        """A cut link ends no connection: the agent would wait in the store for ever."""
        while time.monotonic() < self._lost_at:
            time.sleep(1)
        self._say(f"{self._lost}; relaunch the same command on every node to resume")
        self._shutdown()
        os._exit(Exit.REQUEUE)

    @staticmethod
    def _say(text: str) -> None:
        print(f"launcher: {text}", file=sys.stderr, flush=True)


def _stop_once(number: int, frame: Any) -> None:
    """A second signal changes nothing: the workers are saving."""
    for again in signals.STOP:
        signal.signal(again, signal.SIG_IGN)
    raise SignalException(f"got {number}", signal.Signals(number))


def _launch(arguments: Any) -> str:
    """The same on all nodes: two launches with one rendezvous are one. On one node the port may be any free one."""
    several = str(arguments.nnodes) != "1"
    return f"{arguments.rdzv_endpoint} {arguments.rdzv_id}" if several else f"{platform.node()} {os.getpid()}"


def _codes() -> list[int]:
    return Agent.latest.codes if Agent.latest else []


def main(argv: list[str]) -> int:
    signals.job_started()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does, with a banner
    if "LOGLEVEL" not in os.environ:
        for name in [n for n in logging.root.manager.loggerDict if n.startswith("torch.distributed.elastic")]:
            logging.getLogger(name).setLevel(logging.CRITICAL)
    vars(launcher)["LocalElasticAgent"] = Agent
    vars(processes)["_terminate_process_handler"] = _stop_once
    # If this launcher is killed, a rank that is stuck in an import is too; one that has begun saves (signals.listen).
    vars(subprocess_handler)["Popen"] = partial(subprocess_handler.Popen, preexec_fn=signals.end_with_parent)
    try:
        arguments = parse_args(argv)
        os.environ[LAUNCH] = _launch(arguments)
        run(arguments)
        return Exit.DONE
    except ChildFailedError:
        return Exit.of_all(_codes())
    except SignalException as stop:
        if stop.sigval == signal.SIGINT:
            return Exit.INTERRUPTED
        code = Exit.of_all(_codes() or [Exit.REQUEUE])
        return Exit.REQUEUE if code == Exit.FAILED else code
    except (RendezvousError, DistError) as error:
        Agent._say(f"the rendezvous is gone ({type(error).__name__}); relaunch the same command to go on")
        return Exit.REQUEUE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
