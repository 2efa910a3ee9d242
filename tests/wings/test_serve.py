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
from pydantic import ValidationError

from dist_template.wings.ship.serve.requests import Chat
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
    "more text than positions": (400, {"json": {"prompt": "abc1" * 4000}}, "more than 512 in its 16000 bytes"),
    "a long answer": (400, {"json": {"prompt": "a", "max_tokens": 65}}, "has at most 64 tokens"),
    "another generation_config": (400, {"json": {"prompt": "a", "generation_config": "{}"}}, "generation_config: "),
    "several answers": (400, {"json": {"prompt": "a", "n": 2}}, "n: "),
    "a long stop string": (400, {"json": {"prompt": "a", "stop": "x" * 65}}, "stop.0: String should have at most 64"),
    "an empty stop string": (400, {"json": {"prompt": "a", "stop": ""}}, "stop.0: String should have at least 1"),
    "five stop strings": (400, {"json": {"prompt": "a", "stop": list("abcde")}}, "stop: List should have at most 4"),
    "a stop that is no text": (400, {"json": {"prompt": "a", "stop": 3}}, "stop: "),
    "a long user": (400, {"json": {"prompt": "a", "user": "x" * 257}}, "user: "),
    "options of streams": (400, {"json": {"prompt": "a", "stream_options": {"no": 1}}}, "stream_options.no"),
    "logprobs, which are not given": (400, {"json": {"prompt": "a", "logprobs": 2}}, "logprobs: "),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_request_gets_a_4xx_and_a_sentence(server: Server, case: str) -> None:
    code, options, sentence = BAD[case]
    answer = post(server, TEXT, **options)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (code, code, "invalid_request_error")
    assert sentence in error["message"], error


CALL = {"function": {"name": "f", "arguments": "{}"}}
TURNS: dict[str, tuple[Any, str]] = {
    "none": ([], "messages: List should have at least 1"),
    "no role": ([{}], "messages.0.role: Field required"),
    "another role": ([{"role": "root", "content": "a"}], "messages.0.role: "),
    "no type": ([{"role": "user", "content": [{"no": "type"}]}], "messages.0.content.0.type: Field required"),
    "no text": ([{"role": "user", "content": 3}], "messages.0.content: Input should be a valid array"),
    "an image": (
        [{"role": "user", "content": [{"type": "image_url", "text": ""}]}],
        "messages.0.content.0.type: Input should be 'text'",
    ),
    "129 calls": ([{"role": "assistant", "tool_calls": [CALL] * 129}], "messages.0.tool_calls: "),
    "arguments that are none": (
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "["}}]}],
        "the request: JSONDecodeError",
    ),
}


@pytest.mark.parametrize("case", TURNS)
def test_bad_messages_get_a_400_and_a_sentence(server: Server, case: str) -> None:
    messages, sentence = TURNS[case]
    answer = post(server, CHAT, json={"messages": messages})
    assert answer.status_code == 400 and sentence in answer.json()["error"]["message"], answer.text


def test_1001_messages_are_too_many() -> None:
    assert Chat(messages=MESSAGES * 1000)
    with pytest.raises(ValidationError, match="at most 1000"):
        Chat(messages=MESSAGES * 1001)


def test_messages_of_parts_and_earlier_answers_are_read(server: Server) -> None:
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": SECRET}]}]
    parts += [{"role": "assistant", "content": "yes", "refusal": None, "annotations": []}, *MESSAGES]
    parts += [{"role": "assistant", "content": None, "tool_calls": [CALL | {"id": "1", "type": "function"}]}]
    parts += [{"role": "tool", "tool_call_id": "1", "content": "3"}]
    answer = post(server, CHAT, json={"messages": parts, "max_tokens": 2})
    assert answer.status_code == 200, answer.text


def test_what_is_sent_is_not_repeated(server: Server) -> None:
    seen = len(server.log())
    answer = post(server, TEXT, json={"prompt": "a", "x" * 15_000: 1})
    assert answer.status_code == 400 and len(answer.content) < 600
    assert post(server, "/" + "y" * 8_000).status_code == 404
    lines = [json.dumps(line) for line in server.log()[seen:]]
    assert lines and max(map(len, lines)) < 600


@pytest.mark.parametrize("stream", [False, True])
def test_small_temperatures_are_greedy_and_no_stop_strings_are_none(server: Server, stream: bool) -> None:
    asked = {"prompt": "a", "max_tokens": 6, "stream": stream}
    texts = [post(server, TEXT, json=asked | {"temperature": t, "stop": []}) for t in (0, 1e-300, 0.009)]
    assert [one.status_code for one in texts] == [200] * 3
    assert not stream or all(one.text.endswith("data: [DONE]\n\n") and "error" not in one.text for one in texts)
    assert stream or len({one.json()["choices"][0]["text"] for one in texts}) == 1


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
