"""A served model answers OpenAI's API; what is wrong gets a 4xx and does no harm; SIGTERM ends it cleanly."""

from __future__ import annotations

import concurrent.futures
import json
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.serving import LIMITS, Server, chat_model

KEY, SECRET = "a key", "what the prompt says"
MESSAGES: Any = [{"role": "user", "content": SECRET}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
FLAGS = [f"--{flag}={value}" for flag, value in LIMITS.items()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    server = Server(folder, folder.parent / "log", *FLAGS, "--api_key_env=KEY_OF_A_TEST", KEY_OF_A_TEST=KEY)
    yield server
    server.stop(signal.SIGKILL)


@pytest.fixture(scope="module")
def client(server: Server) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)


def post(server: Server, path: str, **options: Any) -> httpx.Response:
    return httpx.post(server.url + path, headers={"Authorization": f"Bearer {KEY}"}, timeout=30, **options)


# ---- answers -------------------------------------------------------------------------------------------------------


def test_an_openai_client_reads_whole_answers_and_streams(client: Any, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    asked: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert whole.choices[0].message.content == text and len(chunks) > 5
    used = [answer.usage.completion_tokens for answer in (whole, chunks[-1]) if answer.usage]
    assert used == [24, 24]

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_tensors="pt")
    tokens = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(tokens, skip_special_tokens=True) == text, "the served model answers as transformers does"


def test_completions_of_a_text_stream_too_and_the_seed_decides(client: Any) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": "once", "max_tokens": 8, "seed": 3}
    whole = client.completions.create(**asked).choices[0].text
    assert client.completions.create(**asked).choices[0].text == whole
    assert client.completions.create(**asked | {"seed": 4}).choices[0].text != whole, "it samples, as OpenAI's do"
    assert len([chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True)]) > 2
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_a_stream_ends_with_the_mark_that_other_clients_wait_for(server: Server) -> None:
    body = post(server, TEXT, json={"prompt": "a", "max_tokens": 3, "stream": True}).text
    assert body.endswith("\n\ndata: [DONE]\n\n") and '"completion_tokens":3' in body


# ---- bad requests --------------------------------------------------------------------------------------------------

BAD: dict[str, tuple[int, dict[str, Any], str]] = {
    "no JSON": (400, {"content": b'{"prompt": '}, "Invalid JSON"),
    "no object": (400, {"content": b"[1]"}, "should be an object"),
    "nested too deeply": (400, {"content": b"[" * 9_000}, "recursion"),
    "nothing": (400, {"content": b""}, "Invalid JSON"),
    "no text": (400, {"content": b"\xff\xfe\x00"}, "Invalid JSON"),
    "10 MB": (413, {"content": b"x" * 10_000_000}, "over 20000 bytes"),
    "no prompt": (400, {"json": {}}, "prompt: Field required"),
    "an empty prompt": (400, {"json": {"prompt": ""}}, "at least 1 character"),
    "another type": (400, {"json": {"prompt": "a", "max_tokens": "9"}}, "max_tokens: "),
    "a wrong number": (400, {"json": {"prompt": "a", "temperature": -1}}, "temperature: "),
    "another model": (404, {"json": {"prompt": "a", "model": "gpt-4"}}, "'gpt-4' is not served"),
    "a long prompt": (400, {"json": {"prompt": "a" * 600}}, "at most 512 with its prompt; this prompt has 600"),
    "a long answer": (400, {"json": {"prompt": "a", "max_tokens": 65}}, "has at most 64 tokens"),
    "settings of its own": (400, {"json": {"prompt": "a", "generation_config": "{}"}}, "generation_config: "),
    "several answers": (400, {"json": {"prompt": "a", "n": 2}}, "n: "),
    "logprobs, which are not given": (400, {"json": {"prompt": "a", "logprobs": 2}}, "logprobs: "),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_request_gets_a_4xx_and_a_sentence(server: Server, case: str) -> None:
    code, options, told = BAD[case]
    answer = post(server, TEXT, **options)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (code, code, "invalid_request_error")
    assert told in error["message"], error


@pytest.mark.parametrize(
    "messages",
    [[], [{}], [{"role": "user", "content": [{"no": "type"}]}], [{"role": "user", "content": 3}]],
)
def test_bad_messages_get_a_400(server: Server, messages: Any) -> None:
    assert post(server, CHAT, json={"messages": messages}).status_code == 400


def test_routes_and_keys(server: Server) -> None:
    for path in ("/load_model", "/reset", "/v1/responses", "/docs", "/"):
        assert post(server, path, json={"model": "any"}).status_code == 404, path
    assert httpx.get(server.url + CHAT).status_code == 405
    for given in (b"", b"Bearer another", b"Bearer \xff", KEY.encode(), b"bearer " + KEY.encode()):
        refused = httpx.post(server.url + TEXT, json={"prompt": "a"}, headers={b"Authorization": given})
        assert refused.status_code == 401 and refused.headers["www-authenticate"] == "Bearer"
    assert httpx.get(f"{server.url}/v1/models").status_code == 401
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}


def test_a_slow_client_gets_a_408_and_delays_nobody(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as slow:
        head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 100\r\n\r\n"
        slow.sendall(head.encode() + b"{")
        assert post(server, TEXT, json={"prompt": "a", "max_tokens": 2}).status_code == 200
        assert b" 408 " in slow.recv(4096).splitlines()[0]


def test_more_requests_than_allowed_get_a_429(server: Server) -> None:
    def one(_: int) -> httpx.Response:
        return post(server, TEXT, json={"prompt": "a", "max_tokens": 64})

    with concurrent.futures.ThreadPoolExecutor(24) as threads:
        answers = list(threads.map(one, range(48)))
    codes = [answer.status_code for answer in answers]
    assert set(codes) == {200, 429} and codes.count(200) >= LIMITS["max_requests"]
    assert {answer.headers["retry-after"] for answer in answers if answer.status_code == 429} == {"2"}


def test_the_log_and_the_metrics_count_requests_and_tokens_without_prompts(server: Server) -> None:
    before, log = httpx.get(f"{server.url}/metrics").text, server.log()
    post(server, CHAT, json={"messages": MESSAGES, "max_tokens": 5, "temperature": 0})
    line = server.logged(CHAT, len(log))
    assert (line["code"], line["tokens"]["completion"]) == (200, 5)
    assert line["ms"] > 0 and len(line["id"]) == 32 and line["tokens"]["prompt"] > len(SECRET)
    assert SECRET not in json.dumps(server.log())

    def value(page: str, name: str) -> float:
        return next((float(row.split()[-1]) for row in page.splitlines() if row.startswith(f"{name} ")), 0.0)

    after = httpx.get(f"{server.url}/metrics").text
    names = [f'serve_requests_total{{code="200",path="{CHAT}"}}', "serve_seconds_count"]
    names += ['serve_tokens_total{kind="completion"}']
    assert [value(after, name) - value(before, name) for name in names] == [1, 1, 5]
    assert value(after, "serve_in_flight") == 0
