"""A served model answers OpenAI's API; what is wrong gets a 4xx and does no harm; SIGTERM ends it cleanly."""

from __future__ import annotations

import concurrent.futures
import signal
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
    server = Server(
        folder, folder.parent / "log", *FLAGS, "--api_key_env=KEY_OF_A_TEST", KEY_OF_A_TEST=KEY
    )
    yield server
    server.stop(signal.SIGKILL)


@pytest.fixture(scope="module")
def client(server: Server) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)


def post(server: Server, path: str, **options: Any) -> httpx.Response:
    return httpx.post(
        server.url + path, headers={"Authorization": f"Bearer {KEY}"}, timeout=30, **options
    )


# ---- answers -------------------------------------------------------------------------------------------------------


def test_an_openai_client_reads_whole_answers_and_streams(client: Any, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": MESSAGES,
        "max_tokens": 24,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**asked)
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert whole.choices[0].message.content == text and len(chunks) > 5
    used = [answer.usage.completion_tokens for answer in (whole, chunks[-1]) if answer.usage]
    assert used == [24, 24]

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(
        MESSAGES, add_generation_prompt=True, return_tensors="pt"
    )
    tokens = model.generate(**prompt, max_new_tokens=24, do_sample=False)[
        0, prompt["input_ids"].shape[1] :
    ]
    assert tokenizer.decode(tokens, skip_special_tokens=True) == text, (
        "the served model answers as transformers does"
    )


def test_completions_of_a_text_stream_too_and_the_seed_decides(client: Any) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": "once", "max_tokens": 8, "seed": 3}
    whole = client.completions.create(**asked).choices[0].text
    assert client.completions.create(**asked).choices[0].text == whole
    assert client.completions.create(**asked | {"seed": 4}).choices[0].text != whole, (
        "it samples, as OpenAI's do"
    )
    assert (
        len([chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True)])
        > 2
    )
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_a_stream_ends_with_the_mark_that_other_clients_wait_for(server: Server) -> None:
    body = post(server, TEXT, json={"prompt": "a", "max_tokens": 3, "stream": True}).text
    assert body.endswith("\n\ndata: [DONE]\n\n") and '"completion_tokens":3' in body


# ---- bad requests --------------------------------------------------------------------------------------------------

BAD: dict[str, tuple[int, dict[str, Any], str]] = {
    "no JSON": (400, {"content": b'{"prompt": '}, "JSONDecodeError"),
    "no object": (400, {"content": b"[1]"}, "has to be an object"),
    "nested too deeply": (400, {"content": b"[" * 90_000}, "Recursion"),
    "nothing": (400, {"content": b""}, "JSONDecodeError"),
    "no text": (400, {"content": b"\xff\xfe\x00"}, "cannot be answered"),
    "10 MB": (413, {"content": b"x" * 10_000_000}, "over 1048576 bytes"),
    "another type": (400, {"json": {"prompt": "a", "max_tokens": "many"}}, "ValueError"),
    "a wrong number": (400, {"json": {"prompt": "a", "temperature": "hot"}}, "cannot be answered"),
    "a wrong penalty": (
        400,
        {"json": {"prompt": "a", "frequency_penalty": -3}},
        "cannot be answered",
    ),
    "another model": (
        400,
        {"json": {"prompt": "a", "model": "gpt-4"}},
        "pinned to 'tiny'; requested 'gpt-4'",
    ),
    "an unknown field": (422, {"json": {"prompt": "a", "prompts": 3}}, "Unexpected fields"),
    "a long prompt": (
        400,
        {"json": {"prompt": "a" * 600}},
        "has 600 tokens, and the model has 512 positions",
    ),
    "another generation_config": (
        400,
        {"json": {"prompt": "a", "generation_config": "{}"}},
        "generation_config",
    ),
    "a stop that is no text": (400, {"json": {"prompt": "a", "stop": 3}}, "cannot be answered"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_request_gets_a_4xx_and_a_sentence(server: Server, case: str) -> None:
    code, options, sentence = BAD[case]
    answer = post(server, TEXT, **options)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (
        code,
        code,
        "invalid_request_error",
    )
    assert sentence in error["message"], error


CALL = {"function": {"name": "f", "arguments": "{}"}}
TURNS: dict[str, Any] = {
    "no role": [{}],
    "no type": [{"role": "user", "content": [{"no": "type"}]}],
    "no text": [{"role": "user", "content": 3}],
    "no list": 5,
    "arguments that are none": [
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "["}}]}
    ],
}


@pytest.mark.parametrize("case", TURNS)
def test_bad_messages_get_a_400_and_a_sentence(server: Server, case: str) -> None:
    answer = post(server, CHAT, json={"messages": TURNS[case]})
    assert (
        answer.status_code == 400 and "cannot be answered" in answer.json()["error"]["message"]
    ), answer.text


def test_messages_of_parts_and_earlier_answers_are_read(server: Server) -> None:
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": SECRET}]}]
    parts += [
        {"role": "assistant", "content": "yes", "refusal": None, "annotations": []},
        *MESSAGES,
    ]
    parts += [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [CALL | {"id": "1", "type": "function"}],
        }
    ]
    parts += [{"role": "tool", "tool_call_id": "1", "content": "3"}]
    answer = post(server, CHAT, json={"messages": parts, "max_tokens": 2})
    assert answer.status_code == 200, answer.text


def test_limits_shorten_an_answer(server: Server) -> None:
    for prompt, most in (("a", 64), ("a" * 500, 12)):
        answer = post(
            server, TEXT, json={"prompt": prompt, "max_tokens": 600, "temperature": 0}
        ).json()
        assert (
            answer["usage"]["completion_tokens"] == most
            and answer["choices"][0]["finish_reason"] == "length"
        )


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_ends_at_a_stop_string(client: Any, stream: bool) -> None:
    asked: dict[str, Any] = {"model": "tiny", "prompt": "a", "max_tokens": 40, "temperature": 0}
    full = client.completions.create(**asked).choices[0].text
    found = client.completions.create(**asked, stop=[full[1:4]], stream=stream)
    short = "".join(chunk.choices[0].text for chunk in found) if stream else found.choices[0].text
    assert full.startswith(short) and full[1:4] in short and len(short) < len(full)


@pytest.mark.parametrize("stream", [False, True])
def test_small_temperatures_are_greedy_and_no_stop_strings_are_none(
    server: Server, stream: bool
) -> None:
    asked = {"prompt": "a", "max_tokens": 6, "stream": stream}
    texts = [
        post(server, TEXT, json=asked | {"temperature": t, "stop": []}) for t in (0, 1e-300, 0.009)
    ]
    assert [one.status_code for one in texts] == [200] * 3
    assert not stream or all(
        one.text.endswith("data: [DONE]\n\n") and "error" not in one.text for one in texts
    )
    assert stream or len({one.json()["choices"][0]["text"] for one in texts}) == 1


def test_routes_and_keys(server: Server) -> None:
    for path in ("/load_model", "/reset", "/v1/responses", "/docs", "/"):
        assert post(server, path, json={"model": "any"}).status_code == 404, path
    assert httpx.get(server.url + CHAT).status_code == 401
    for given in (b"", b"Bearer another", b"Bearer \xff", KEY.encode(), b"bearer " + KEY.encode()):
        refused = httpx.post(
            server.url + TEXT, json={"prompt": "a"}, headers={b"Authorization": given}
        )
        assert refused.status_code == 401 and "API key" in refused.json()["error"]["message"]
    assert httpx.get(f"{server.url}/v1/models").status_code == 401
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}


def test_more_requests_than_allowed_get_a_429(server: Server) -> None:
    def one(_: int) -> httpx.Response:
        return post(server, TEXT, json={"prompt": "a", "max_tokens": 64})

    with concurrent.futures.ThreadPoolExecutor(24) as threads:
        answers = list(threads.map(one, range(48)))
    codes = [answer.status_code for answer in answers]
    assert set(codes) == {200, 429} and codes.count(200) >= LIMITS["max_requests"]
