"""A served model stops when a request's time is over or SIGTERM arrives; what cannot be served is refused."""

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

from dist_template.wings.ship.serve import app as serving
from tests.support.runs import only_run, run
from tests.support.serving import Server, ask, chat_model, made

KEY, SECRET = "a key", "what the prompt says"
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("models") / "tiny")


# ---- time ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_ends_when_its_time_is_over_and_its_generation_too(folder: Path, stream: bool) -> None:
    """Without the second, abandoned requests would keep the model from the next one."""
    app = made(folder, timeout_s=0.3, max_tokens=3000)

    async def both() -> tuple[tuple[int, bytes], float, tuple[int, bytes]]:
        await app.warm_up()
        late = await ask(app, TEXT, {"prompt": "a", "max_tokens": 3000, "temperature": 0, "stream": stream})
        start = time.monotonic()
        app.given.timeout_s = 20.0
        following = await ask(app, TEXT, {"prompt": "a", "max_tokens": 2})
        return late, time.monotonic() - start, following

    (code, body), seconds, (next_code, _) = asyncio.run(both())
    assert code == (200 if stream else 504) and next_code == 200
    last = json.loads(body.decode().strip().rpartition("data: ")[2])
    assert last["error"] == {"message": "the time for this request is over", "type": "server_error", "code": 504}
    assert seconds < 1, "3,000 tokens take longer"


def test_it_is_not_ready_before_the_first_generation_and_not_when_it_stops(folder: Path) -> None:
    app = made(folder)

    async def states() -> list[int]:
        codes = [(await ask(app, path))[0] for path in ("/health", "/ready")]
        codes += [(await ask(app, TEXT, {"prompt": "a", "max_tokens": 1}))[0]]
        await app.warm_up()
        codes += [(await ask(app, "/ready"))[0], (await ask(app, TEXT, {"prompt": "a", "max_tokens": 1}))[0]]
        app.drain()
        return codes + [(await ask(app, path))[0] for path in ("/health", "/ready")]

    assert asyncio.run(states()) == [200, 503, 503, 200, 200, 200, 503]


def test_prompts_are_logged_where_that_is_asked_for(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    app = made(folder)

    async def one() -> None:
        await app.warm_up()
        await ask(app, TEXT, {"prompt": SECRET, "max_tokens": 1})

    asyncio.run(one())
    assert json.loads(json.loads(capsys.readouterr().out)["request"])["prompt"] == SECRET


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_of_the_model_is_a_500_in_json_and_one_line(
    folder: Path, stream: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    app = made(folder)

    def fails(*_: Any, **__: Any) -> Any:
        raise ValueError('no "logits" ' + "x" * 10_000)

    async def one() -> tuple[int, bytes]:
        await app.warm_up()
        app._model.generate = fails
        return await ask(app, TEXT, {"prompt": SECRET, "max_tokens": 1, "stream": stream})

    code, body = asyncio.run(one())
    assert code == (200 if stream else 500)
    error = json.loads(body.decode().strip().rpartition("data: ")[2])["error"]
    assert error == {"message": "the server failed; its log has the reason", "type": "server_error", "code": 500}
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["code"] == 500 and "logits" in line and len(line) < 1000


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_whose_client_is_gone_is_not_computed_further(
    folder: Path, stream: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    app = made(folder, max_tokens=3000)

    async def both() -> float:
        await app.warm_up()
        gone = {"prompt": "a", "max_tokens": 3000, "temperature": 0, "stream": stream}
        waiting = asyncio.create_task(ask(app, TEXT, gone, gone_after=0.2))
        await asyncio.wait([waiting])
        start = time.monotonic()
        assert (await ask(app, TEXT, {"prompt": "a", "max_tokens": 2}))[0] == 200
        return time.monotonic() - start

    assert asyncio.run(both()) < 1, "3,000 tokens take longer"
    assert [json.loads(line)["code"] for line in capsys.readouterr().out.splitlines()] == [499, 200]


def test_a_large_request_is_read_while_others_are_answered(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app, checked = made(folder), serving.checked

    def slowly(*given: Any) -> Any:
        time.sleep(1)
        return checked(*given)

    async def both() -> tuple[int, float]:
        await app.warm_up()
        monkeypatch.setattr(serving, "checked", slowly)
        large = asyncio.create_task(ask(app, TEXT, {"prompt": "a", "max_tokens": 1}))
        start = time.monotonic()
        await asyncio.sleep(0.1)
        await ask(app, "/health")
        took = time.monotonic() - start
        return (await large)[0], took

    code, took = asyncio.run(both())
    assert code == 200 and took < 0.5


def test_sigterm_in_the_middle_of_a_stream_ends_it_and_the_process_with_0(tmp_path: Path) -> None:
    """Before, a client goes away in the middle of a stream: that frees the model for the next one."""
    model = chat_model(tmp_path / "long", positions=100_000)
    server = Server(model, tmp_path / "log", "--max_tokens=90000", "--grace_s=0.5", "--max_requests=1")
    seen = threading.Event()
    asked = {"prompt": "a", "max_tokens": 90_000, "temperature": 0, "stream": True}  # a sample may end by itself
    with httpx.stream("POST", server.url + TEXT, json=asked, timeout=30) as answer:
        next(answer.iter_text())
    end = time.monotonic() + 10
    while not server.log() and time.monotonic() < end:
        time.sleep(0.02)
    assert httpx.post(server.url + TEXT, json={"prompt": "a", "max_tokens": 1}, timeout=10).status_code == 200

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
        last = reading.result(30).strip().rpartition("data: ")[2]
    assert json.loads(last)["error"]["code"] == 504
    assert [line["code"] for line in server.log()][1:] == [200, 504]
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health")


# ---- what is served ------------------------------------------------------------------------------------------------


@pytest.fixture
def trained(flags: list[str], tmp_path: Path) -> Path:
    assert run("fit", *flags, "--trainer.max_steps=2", "--trainer.limit_val_batches=0") == 0
    return only_run(tmp_path)


@pytest.mark.slow
def test_a_run_is_exported_compared_and_served_and_a_planted_fault_is_refused(
    trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    server = Server(trained, tmp_path / "log", "--name=mine")
    answer = httpx.post(server.url + TEXT, json={"prompt": "the", "max_tokens": 3}).json()
    assert answer["model"] == "mine" and answer["usage"]["completion_tokens"] == 3
    sentence = httpx.post(server.url + CHAT, json={"messages": [{"role": "user", "content": SECRET}]}).text
    assert "has no chat template; use /v1/completions" in sentence
    assert server.stop() == 0
    assert "largest difference to the trained model's logits" in (tmp_path / "log").read_text()

    from safetensors.torch import load_file, save_file

    (exported,) = (trained / "export").iterdir()
    file = exported / "model.safetensors"
    state = load_file(file)
    name = "model.layers.1.self_attn.o_proj.weight"
    save_file(state | {name: state[name].T.contiguous()}, file, metadata={"format": "pt"})
    assert run("serve", str(trained), "--port=0") == 2, "a fault exits before the port listens"
    error = capfd.readouterr().err
    assert error.startswith("error: ") and "not what was trained" in error and error.count("\n") == 1
    assert "layers.1.self_attn" in error


def refused(capfd: pytest.CaptureFixture[str], *flags: str) -> str:
    assert run("serve", *flags) == 2
    error = capfd.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1, error
    return error


def test_what_cannot_be_served_is_refused_in_one_sentence(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert "does not exist" in refused(capfd, str(tmp_path / "nowhere"), "--port=0")
    assert "is not a run folder" in refused(capfd, str(tmp_path), "--port=0")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        in_use = refused(capfd, str(folder), f"--port={port}")
    assert f"--port {port} cannot be used" in in_use and "in use" in in_use
    assert "--port: '99999' is not allowed" in refused(capfd, str(folder), "--port=99999")
    alone = chat_model(tmp_path / "alone")
    for file in alone.glob("tokenizer*"):
        file.unlink()
    assert "alone" in refused(capfd, str(alone), "--port=0")
    monkeypatch.setitem(sys.modules, "fastapi", None)
    error = refused(capfd, str(folder), "--port=0")
    assert "needs the package fastapi: pip install 'dist-template[serve]'" in error
