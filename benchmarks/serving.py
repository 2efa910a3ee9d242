"""The verb serve under load: 1,000 requests from 1, 4 and 16 clients, half of them streams.

The model is a Llama of two layers of 64, whose generation costs next to nothing: what is measured is the server, from a
request to the end of its answer, with the client on the same machine. Requests are answered one after another, so
latency grows with the clients and tokens per second do not. Target: no request fails.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from dist_template.wings.values import free_port
from tests.support.serving import chat_model

from . import ROOT
from .record import Figure, Options, Result

NAME = "serving"
LOADS = {1: 200, 4: 300, 16: 500}  # clients: their requests
TOKENS = 16  # of an answer
PATH = "/v1/chat/completions"


def run(options: Options) -> Result:
    result = Result(NAME)
    rounds: dict[int, list[tuple[float, ...]]] = {clients: [] for clients in LOADS}
    with tempfile.TemporaryDirectory() as folder:
        model = chat_model(Path(folder) / "tiny")
        port = free_port()
        argv = [sys.executable, "-m", "trainer_dev", "serve", str(model), "--port", str(port)]
        with (Path(folder) / "log").open("w+") as log:
            server = subprocess.Popen(argv, cwd=ROOT / "build" / "dev", stdout=log, stderr=log)
            try:
                _wait(server, port)
                for _ in range(options.rounds):
                    for clients, requests in LOADS.items():
                        number = clients if options.quick else requests
                        rounds[clients].append(asyncio.run(_load(port, clients, number)))
            finally:
                server.send_signal(signal.SIGTERM)
                code = server.wait(60)
    failures = [sum(rounds[clients][i][-1] for clients in LOADS) for i in range(options.rounds)]
    number = sum(LOADS) if options.quick else sum(LOADS.values())
    result.figures = [
        Figure(f"requests of {number} that failed", failures, at_most=0),
        Figure("exit code after SIGTERM", [code], at_most=0),
    ]
    for clients, found in rounds.items():
        for index, what in enumerate(("median", "95th percentile of", "99th percentile of")):
            times = [each[index] * 1000 for each in found]
            result.figures.append(Figure(f"{clients} clients: {what} latency", times, unit="ms"))
        result.figures.append(Figure(f"{clients} clients: answers", [each[3] for each in found], unit="tokens/s"))
    result.notes = [f"each answer has {TOKENS} tokens; a request has about 30"]
    return result


def _wait(server: subprocess.Popen, port: int) -> None:
    end = time.monotonic() + 120
    while time.monotonic() < end and server.poll() is None:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health", timeout=1).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.2)
    raise RuntimeError(f"the server is not ready, exit code {server.poll()}")


async def _load(port: int, clients: int, requests: int) -> tuple[float, ...]:
    """Returns three percentiles of latency in seconds, tokens per second, and how many requests failed."""
    numbers, seconds, failed = iter(range(requests)), [], 0

    async def client() -> None:
        nonlocal failed
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=120) as session:
            for number in numbers:
                asked: dict[str, Any] = {"messages": [{"role": "user", "content": f"request {number}"}]}
                asked |= {"max_tokens": TOKENS, "stream": number % 2 == 0, "temperature": 0}
                start = time.perf_counter()
                try:
                    answer = await session.post(PATH, json=asked)
                    failed += not (answer.status_code == 200 and f'"completion_tokens":{TOKENS}' in answer.text)
                except httpx.HTTPError:
                    failed += 1
                seconds.append(time.perf_counter() - start)

    start = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    rate = (requests - failed) * TOKENS / (time.perf_counter() - start)
    return (*np.percentile(seconds, (50, 95, 99)), rate, failed)
