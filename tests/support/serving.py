"""Servers for tests: a process forked from one that has imported torch, and an ASGI client without
one."""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import torch

from dist_template.cli.main import run
from dist_template.wings.ship.serve import app as serving
from tests.support.chats import TAGGED, tokenizer
from tests.support.line import OURS
from tests.support.wings import clean_processes, free_port

LIMITS = {"max_tokens": 64, "max_requests": 4, "grace_s": 3.0}


def chat_model(folder: Path, positions: int = 512) -> Path:
    """A small Llama with a chat template, as it would be exported. It says something else at each
    token."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    tokens: Any = AutoTokenizer.from_pretrained(tokenizer(folder, "qwen3", TAGGED))
    torch.manual_seed(0)
    sizes: Any = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    sizes |= {
        "vocab_size": len(tokens),
        "max_position_embeddings": positions,
        "eos_token_id": tokens.eos_token_id,
    }
    LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.5)).save_pretrained(folder)
    return folder


class Server:
    """`serve` in a process of its own, once it is ready."""

    def __init__(self, model: Path, log: Path, *flags: str, **environment: str) -> None:
        self.port, self._log = free_port(), log
        self.url = f"http://127.0.0.1:{self.port}"
        log.touch()
        argv = ["serve", str(model), f"--port={self.port}", *flags]
        self.process = clean_processes().Process(
            target=_serve, args=(argv, log, os.environ | environment)
        )
        self.process.start()
        end = time.monotonic() + 120
        while not self._is_ready():
            if time.monotonic() > end:
                self.stop(signal.SIGABRT)  # its stack comes into the log
            assert self.process.is_alive(), log.read_text()
            time.sleep(0.05)

    def _is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=1).status_code == 200
        except httpx.HTTPError:
            return False

    def stop(self, number: int = signal.SIGTERM) -> int | None:
        """Sends a signal; returns the exit code."""
        if self.process.is_alive():
            os.kill(self.process.pid or 0, number)
        self.process.join(30)
        return self.process.exitcode


def _serve(argv: list[str], log: Path, environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ |= environment
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    faulthandler.enable()
    code = 1
    try:
        code = run(argv, OURS)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def made(folder: Path, **limits: Any) -> Any:
    """The application of a model, without a server."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    given = argparse.Namespace(**{"name": "tiny"} | LIMITS | limits)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    return serving.App(model, tokenizer, "", given)


async def ask(
    app: Any, path: str, body: Any = None, gone_after: float | None = None, **headers: str
) -> tuple[int, bytes]:
    """Sends one request to an ASGI application; returns the status and the body of its answer.

    The client closes the connection after `gone_after` seconds; the status is 0 without an answer.
    """
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    received, sent = [{"type": "http.request", "body": raw}], []

    async def receive() -> dict[str, Any]:
        if not received:
            await (asyncio.Event().wait() if gone_after is None else asyncio.sleep(gone_after))
            return {"type": "http.disconnect"}
        return received.pop()

    async def send(event: dict[str, Any]) -> None:
        sent.append(event)

    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    method = "GET" if body is None else "POST"
    await app({"type": "http", "method": method, "path": path, "headers": pairs}, receive, send)
    return sent[0]["status"] if sent else 0, b"".join(event.get("body", b"") for event in sent[1:])
