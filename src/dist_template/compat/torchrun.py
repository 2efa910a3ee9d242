"""torch's elastic agent, which torchrun runs, with exit codes. Verified on torch 2.13;
tests/compat/test_names.py checks the private names. Where one is gone, creating the agent, or its
first call, raises AttributeError.

torchrun restarts workers whatever their exit codes are, without a hook before the restart."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import api as processes
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
from torch.distributed.launcher import api as launcher

from ..errors import DECIDED, Exit

PEERS_S = 3.0  # for the other workers to print their errors after one has failed
LOST_S = 20.0  # the rendezvous is lost if it does not answer for so long


def report(text: str) -> None:
    print(
        f"launcher: {text}; relaunch the same command on every node to resume",
        file=sys.stderr,
        flush=True,
    )


class Agent(LocalElasticAgent):
    """Monitors this node's workers."""

    instances: ClassVar[list[Agent]] = []  # the launcher has at most one

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._deadline = float("inf")  # of the rendezvous's answer
        self._killed: set[int] = set()  # process ids of workers that waited after a failure
        self.instances.append(self)
        threading.Thread(target=self._watch_rendezvous, daemon=True).start()

    def workers(self) -> list[Any]:
        """Returns Popen objects by local rank."""
        handlers = getattr(self._pcontext, "subprocess_handlers", {})
        return [handlers[rank].proc for rank in sorted(handlers)]

    @property
    def codes(self) -> list[int]:
        """Exit codes of the workers that have exited; SIGTERM of those that were killed here."""
        found = []
        for worker in self.workers():
            code = worker.poll()
            if code is not None:
                found.append(-signal.SIGTERM if worker.pid in self._killed else code)
        return found

    @property
    def _decided(self) -> bool:  # by a worker: a restart does not help
        return any(code in DECIDED for code in self.codes)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Reports the state of the workers; called every 0.1 s."""
        self._deadline = float("inf")
        for rank, worker in enumerate(self.workers()):
            if worker.poll():  # the first one that has failed
                self._wait_for_the_others()
                if self._decided:
                    self._remaining_restarts = 0
                self._report(worker_group.workers[rank].global_rank, worker.returncode)
                break
        result = super()._monitor_workers(worker_group)
        if (
            result.state == WorkerState.HEALTHY
        ):  # torchrun queries the rendezvous for new nodes next
            self._deadline = time.monotonic() + LOST_S
        return result

    def _wait_for_the_others(self) -> None:
        workers, start, terminated = self.workers(), time.monotonic(), False
        while len(self.codes) < len(workers):
            if Exit.REQUEUE in self.codes and not terminated:
                terminated = True
                for worker in workers:  # they may wait for the one that exited before training
                    worker.terminate()
            if time.monotonic() - start > (self._shutdown_timeout if self._decided else PEERS_S):
                for worker in workers:
                    if worker.poll() is None:
                        self._killed.add(worker.pid)
                        worker.kill()
            time.sleep(0.02)

    def _report(self, rank: int, code: int) -> None:
        """Prints how the first worker exited, unless rank 0 decided to exit and has printed why."""
        if self._decided and self.workers()[0].returncode in DECIDED:
            return
        left, then = self._remaining_restarts, ""
        how = (
            f"exited with code {code}"
            if code > 0
            else f"was killed by {signal.Signals(-code).name}"
        )
        if not self._decided:
            then = f"; restarting, {left - 1} more left" if left else "; no restart is left"
        print(f"launcher: rank {rank} {how}{then}", file=sys.stderr, flush=True)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self._deadline = float("inf")  # a save may take long
        # torchrun passes its own option only in some cases
        super()._shutdown(death_sig, self._shutdown_timeout)

    def _watch_rendezvous(self) -> None:
        """Exits at the deadline: behind a broken link the agent would wait forever."""
        while time.monotonic() < self._deadline:
            time.sleep(1)
        report("the rendezvous does not answer")
        self._shutdown()
        os._exit(Exit.REQUEUE)


def use_agent(on_signal: Callable[[int, Any], None], preexec_fn: Callable[[], None]) -> None:
    """Lets torchrun in this process create this agent, handle signals by `on_signal`, and call
    `preexec_fn` in each new worker."""
    vars(launcher)["LocalElasticAgent"] = Agent
    vars(processes)["_terminate_process_handler"] = on_signal
    vars(subprocess_handler)["Popen"] = partial(subprocess_handler.Popen, preexec_fn=preexec_fn)
