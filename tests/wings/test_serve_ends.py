"""A served model ends in time and with SIGTERM; what cannot be served is refused."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM


from tests.support.runs import only_run, run
from tests.support.serving import Server, ask, chat_model, made

KEY, SECRET = "a key", "what the prompt says"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_of_a_generation_is_a_500(folder: Path, stream: bool, monkeypatch: Any) -> None:
    app = made(folder)

    def failing(*_: Any, **__: Any) -> None:
        raise RuntimeError('no "logits"')

    monkeypatch.setattr(LlamaForCausalLM, "forward", failing)
    asked = ask(app, TEXT, {"prompt": SECRET, "max_tokens": 1, "stream": stream})
    if not stream:  # the server logs it
        with pytest.raises(RuntimeError, match="logits"):
            asyncio.run(asked)
        return
    _, body = asyncio.run(asked)
    error = json.loads(body.decode().strip().rpartition("data: ")[2])["error"]
    assert error == {"message": 'no "logits', "type": "server_error", "code": 500}


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_whose_client_is_gone_is_not_computed_further(folder: Path, stream: bool) -> None:
    app = made(folder, max_tokens=500)

    async def both() -> float:
        gone = {"prompt": "a", "max_tokens": 500, "temperature": 0, "stream": stream}
        assert (await ask(app, TEXT, {"prompt": "a", "max_tokens": 2}))[0] == 200
        waiting = asyncio.create_task(ask(app, TEXT, gone, gone_after=0.2))
        await asyncio.wait([waiting])
        start = time.monotonic()
        assert (await ask(app, TEXT, {"prompt": "a", "max_tokens": 2}))[0] == 200
        return time.monotonic() - start

    assert asyncio.run(both()) < 0.3, "500 tokens take longer"


def test_sigterm_in_the_middle_of_a_stream_ends_it_and_the_process_with_0(tmp_path: Path) -> None:
    """Before, a client goes away in the middle of a stream: that frees the model for the next."""
    model = chat_model(tmp_path / "long", positions=100_000)
    limits = ("--max_tokens=90000", "--grace_s=0.5", "--max_requests=1")
    server, seen = Server(model, tmp_path / "log", *limits), threading.Event()
    asked = {"prompt": "a", "max_tokens": 90_000, "temperature": 0, "stream": True}
    with httpx.stream("POST", server.url + TEXT, json=asked, timeout=30) as answer:
        next(answer.iter_text())
    end, code, short = time.monotonic() + 10, 429, {"prompt": "a", "max_tokens": 1}
    while code == 429 and time.monotonic() < end:
        code = httpx.post(server.url + TEXT, json=short, timeout=10).status_code
    assert code == 200

    def read() -> str:
        text = ""
        with httpx.stream("POST", server.url + TEXT, json=asked, timeout=30) as answer:
            for chunk in answer.iter_text():
                text += chunk
                seen.set()
        return text  # without an error of the connection: the stream was ended

    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        reading = thread.submit(read)
        assert seen.wait(30)
        start = time.monotonic()
        assert server.stop() == 0, (tmp_path / "log").read_text()
        assert time.monotonic() - start < 10
        assert reading.result(30).endswith("data: [DONE]\n\n")
    assert "Traceback" not in (tmp_path / "log").read_text()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health")


# ---- what is served ------------------------------------------------------------------------------


def refused(capfd: Any, *flags: str) -> str:
    assert run("serve", *flags) == 2
    error = capfd.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1, error
    return error


@pytest.mark.slow
def test_a_run_is_exported_compared_and_served_and_a_planted_fault_is_refused(
    flags: list[str], tmp_path: Path, capfd: Any
) -> None:
    assert run("fit", *flags, "--trainer.max_steps=2", "--trainer.limit_val_batches=0") == 0
    trained = only_run(tmp_path)
    server = Server(trained, tmp_path / "log", "--name=mine")
    answer = httpx.post(server.url + TEXT, json={"prompt": "the", "max_tokens": 3}).json()
    assert answer["model"] == "mine" and answer["usage"]["completion_tokens"] == 3
    messages = [{"role": "user", "content": SECRET}]
    assert "chat template" in httpx.post(server.url + CHAT, json={"messages": messages}).text
    assert server.stop() == 0
    assert "largest difference to the trained model's logits" in (tmp_path / "log").read_text()

    (exported,) = (trained / "export").iterdir()
    file, name = exported / "model.safetensors", "model.layers.1.self_attn.o_proj.weight"
    state = load_file(file)
    save_file(state | {name: state[name].T.contiguous()}, file, metadata={"format": "pt"})
    capfd.readouterr()
    error = refused(capfd, str(trained), "--port=0")
    assert "not what was trained" in error, "a fault exits before the port listens"


def test_what_cannot_be_served_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: Any, capfd: Any
) -> None:
    assert "does not exist" in refused(capfd, str(tmp_path / "nowhere"), "--port=0")
    assert "is not a run folder" in refused(capfd, str(tmp_path), "--port=0")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        in_use = refused(capfd, str(folder), f"--port={port}")
    assert f"--port {port} cannot be used" in in_use and "in use" in in_use
    alone = chat_model(tmp_path / "alone")
    for file in alone.glob("tokenizer*"):
        file.unlink()
    assert "alone" in refused(capfd, str(alone), "--port=0")
    monkeypatch.setitem(sys.modules, "fastapi", None)
    error = refused(capfd, str(folder), "--port=0")
    assert "needs the package fastapi: pip install 'dist-template[serve]'" in error
