"""Private names of torch's elastic agent, which torchrun runs. Verified on torch 2.13; tests/compat/test_names.py
checks them. Where one is gone, creating the agent, or its first call, raises AttributeError.

torchrun restarts workers whatever their exit codes are, without a hook before the restart."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import api as processes
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
from torch.distributed.launcher import api as launcher


class OpenAgent(LocalElasticAgent):
    """torch's agent with public names for its subclass: `monitor`, `rendezvous`, `shut_down`."""

    def workers(self) -> list[Any]:
        """Returns Popen objects by local rank."""
        handlers = getattr(self._pcontext, "subprocess_handlers", {})
        return [handlers[rank].proc for rank in sorted(handlers)]

    @property
    def shutdown_timeout_s(self) -> float:
        """How long workers may take to exit after SIGTERM."""
        return self._shutdown_timeout

    @property
    def restarts_left(self) -> int:
        """How often failed workers are still restarted."""
        return self._remaining_restarts

    def allow_no_restart(self) -> None:
        """Makes the next failure the last."""
        self._remaining_restarts = 0

    def monitor(self, worker_group: WorkerGroup) -> RunResult:
        """Reports the state of the workers; called every 0.1 s."""
        return super()._monitor_workers(worker_group)

    def rendezvous(self, worker_group: WorkerGroup) -> None:
        """Waits for all nodes, before the workers are started and after each restart."""
        super()._rendezvous(worker_group)

    def shut_down(self, death_sig: signal.Signals = signal.SIGTERM) -> None:
        """Ends the workers; torchrun itself uses its timeout only in some of the calls."""
        super()._shutdown(death_sig, self._shutdown_timeout)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        return self.monitor(worker_group)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self.rendezvous(worker_group)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        self.shut_down(death_sig)


def use(agent: type[OpenAgent], on_signal: Callable[[int, Any], None], preexec_fn: Callable[[], None]) -> None:
    """Lets torchrun in this process create this agent, handle signals by `on_signal`, and call
    `preexec_fn` in each new worker."""
    vars(launcher)["LocalElasticAgent"] = agent
    vars(processes)["_terminate_process_handler"] = on_signal
    vars(subprocess_handler)["Popen"] = partial(subprocess_handler.Popen, preexec_fn=preexec_fn)
