"""Hostile requests get a 4xx and a sentence, take no slot, and the service still answers."""

import concurrent.futures
import copy
import importlib
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from dist_template.text.tokenizers import encode_prompt
from dist_template.wings.ship.serve import admission
from dist_template.wings.ship.serve.app import App
from dist_template.wings.ship.serve.command import flags
from dist_template.wings.ship.serve.fields import FIELDS, NEUTRAL
from tests.support import hostile_requests as attacks
from tests.support.chats import TAGGED, tokenizer
from tests.support.hostile_requests import CHAT, CHUNKED, HEAD, SCORE, TEXT, on_socket

DEADLINE_S = 0.5
JSON_REQUESTS = list(attacks.requests())


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    folder = tmp_path_factory.mktemp("tiny")
    tokens: Any = AutoTokenizer.from_pretrained(tokenizer(folder, "qwen3", TAGGED))
    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "max_position_embeddings": 512}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=len(tokens))), tokens


def started(parts: tuple[Any, Any], *given: str, key: str = "") -> Any:
    options = flags(["model", "--name=tiny", "--max_tokens=4", "--max_requests=2", *given])
    return attacks.service(App(*parts, key, options), options)


@pytest.fixture
def url(parts: tuple[Any, Any]) -> Iterator[str]:
    with started(parts) as address:
        yield address


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines that a test can wait for."""
    for name in ("HEAD_S", "REST_S"):
        monkeypatch.setattr(f"dist_template.compat.uvicorn.{name}", DEADLINE_S)
    monkeypatch.setattr(admission, "BODY_S", DEADLINE_S)


def answers(url: str) -> bool:
    answer = httpx.post(url + TEXT, json={"prompt": "a", "max_tokens": 1}, timeout=60)
    return answer.status_code == 200 and httpx.get(f"{url}/health").status_code == 200


def is_sentence(text: str) -> bool:
    error = json.loads(text)["error"]
    return error["type"] == "invalid_request_error" and "\n" not in error["message"].strip()


def attack(url: str, malformed: Any, asked: Any) -> list[str]:
    """Sends hostile requests, and returns those that were answered otherwise than they should."""
    found = []
    for name, (status, sent) in malformed.items():
        code, text = on_socket(url, *sent)
        if code != status or not is_sentence(text):
            found.append(f"{name}: {code} {text[:200]}")
    with httpx.Client(base_url=url, timeout=60) as client:
        for name, path, body in asked:
            answer = client.post(path, content=body)
            if not 400 <= answer.status_code < 500 or not is_sentence(answer.text):
                found.append(f"{name}: {answer.status_code} {answer.text[:200]}")
    return found


def test_hostile_requests_get_a_4xx_and_a_sentence(url: str, capfd: Any) -> None:
    malformed = dict(list(attacks.MALFORMED.items())[::3])
    assert attack(url, malformed, JSON_REQUESTS[::12]) == []
    assert answers(url) and "Traceback" not in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.nightly
def test_500_hostile_requests_do_no_harm(url: str, capfd: Any) -> None:
    assert len(attacks.MALFORMED) + len(JSON_REQUESTS) >= 500
    assert attack(url, attacks.MALFORMED, JSON_REQUESTS) == []
    metrics = httpx.get(f"{url}/metrics").text
    assert 'code="5' not in metrics and "serve_running_requests 0" in metrics
    assert answers(url) and "Traceback" not in capfd.readouterr().err


def test_an_empty_object_and_an_empty_prompt_get_a_400(url: str) -> None:
    for path, body, sentence in (
        (TEXT, {}, "prompt is missing; give a text"),
        (CHAT, {}, "messages is missing; give a list of messages"),
        (TEXT, {"prompt": ""}, "the prompt has no tokens"),
        (TEXT, {"prompt": "a", "max_tokens": True}, "max_tokens is true; give a whole number"),
        (SCORE, {}, "POST /v1/chat/completions"),
    ):
        answer = httpx.post(url + path, json=body)
        assert answer.status_code == 400 and sentence in answer.json()["error"]["message"]


@pytest.mark.usefixtures("short")
def test_slow_clients_are_ended_and_delay_nobody(parts: tuple[Any, Any], capfd: Any) -> None:
    """Four times as many as there are slots; without deadlines they would stay for ever."""
    with started(parts) as url, concurrent.futures.ThreadPoolExecutor(40) as threads:
        given = list(attacks.STALLED.values()) * 2
        waiting = [threads.submit(on_socket, url, *sent) for _, sent in given]
        time.sleep(DEADLINE_S / 5)
        assert answers(url), "they have no slot"
        found = [one.result()[0] for one in waiting]
        assert found == [status for status, _ in given]
        assert answers(url)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.usefixtures("short")
def test_a_body_without_end_is_read_to_its_limit_alone(url: str) -> None:
    """The refusal comes while the client still sends; then the connection is closed."""
    sent = 0

    def body() -> Iterator[bytes]:
        nonlocal sent
        while sent < 400_000_000:
            sent += 1 << 16
            yield b"x" * (1 << 16)

    with pytest.raises(httpx.RequestError):
        # httpx sends all before it reads; it is cut off
        raise_unless_413(httpx.post(url + TEXT, content=body(), timeout=30))
    assert sent < 400_000_000
    code, text = on_socket(url, CHUNKED, *[b"10000\r\n" + b"x" * 65536 + b"\r\n"] * 20)
    assert code == 413 and "over 1048576 bytes" in text
    assert answers(url)


def raise_unless_413(answer: httpx.Response) -> None:
    """httpx reads the refusal after an error in writing, if the system has kept it."""
    assert answer.status_code == 413
    raise httpx.WriteError("refused")


def test_other_requests_are_answered_while_a_long_text_is_tokenized(
    parts: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens = parts
    entered, go = threading.Event(), threading.Event()
    plain = type(tokens).__call__

    def slow(self: Any, *given: Any, **named: Any) -> Any:
        if given[0] == "slow":
            entered.set()
            assert go.wait(30)
        return plain(self, *given, **named)

    monkeypatch.setattr(type(tokens), "__call__", slow)
    with started((model, tokens)) as url, concurrent.futures.ThreadPoolExecutor(1) as threads:
        asked = threads.submit(httpx.post, url + TEXT, json={"prompt": "slow", "max_tokens": 1})
        assert entered.wait(30) and answers(url)
        go.set()
        assert asked.result().status_code == 200


def test_a_text_that_cannot_fit_is_not_tokenized(url: str, monkeypatch: Any, parts: Any) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("tokenized")

    monkeypatch.setattr(type(parts[1]), "__call__", never)
    answer = httpx.post(url + TEXT, json={"prompt": "a" * 900_000})
    assert answer.status_code == 400 and "the text has 900000 characters" in answer.text


def test_pages_and_names_of_others_need_a_flag_or_the_key(parts: tuple[Any, Any]) -> None:
    page, name = "https://chat.example.org", "serve.example.org:8000"
    body = {"prompt": "a", "max_tokens": 1}

    def code(url: str, **headers: str) -> int:
        return httpx.post(url + TEXT, json=body, headers=headers).status_code

    with started(parts) as url:
        own = url.removeprefix("http://")
        for allowed in ({}, {"Origin": url}, {"Host": "[::1]:8000"}, {"Host": "10.0.0.3"}):
            assert code(url, **allowed) == 200, allowed
        assert code(url, Host="localhost:8000", Origin="http://localhost:8000") == 200
        assert code(url, Host="serve") == 200, "a container's name"
        foreign = ({"Origin": page}, {"Origin": "null"}, {"Host": name}, {"Host": "127.0.0.1.a.b"})
        for refused in (*foreign, {"Host": name, "Origin": f"http://{name}"}):
            assert code(url, **refused) == 403, refused
        assert code(url, Host=own, Origin="http://localhost:3000") == 403, "another port's page"
    with started(parts, f"--allow_origin={page}", "--allow_host=serve.example.org") as url:
        assert code(url, Origin=page) == code(url, Host=name) == 200
        asked = {"Origin": page, "Access-Control-Request-Method": "POST"}
        preflight = httpx.options(url + TEXT, headers=asked)
        assert preflight.headers["access-control-allow-origin"] == page
        assert code(url, Origin="https://other.example.org") == 403
    with started(parts, key="a key") as url:
        assert code(url, Origin=page, Host=name, Authorization="Bearer a key") == 200
        assert code(url, Origin=page) == 401


def test_a_chunk_that_breaks_after_its_request_has_an_answer_ends_the_connection(
    url: str, capfd: Any
) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 4, "stream": True})
    length = len(body)
    later = f"{HEAD}Content-Length: {length}\r\n\r\n{body}" + "broken\r\n\r\n"
    code, text = on_socket(url, later)
    assert code == 200 and "[DONE]" in text
    assert answers(url) and "Traceback" not in capfd.readouterr().err


def test_fields_with_their_neutral_values_are_no_fault(url: str) -> None:
    """Clients send them by default."""
    user = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    shared: dict[str, Any] = {"max_tokens": 1, "n": 1, "presence_penalty": 0.0, "user": "me"}
    texts = {"prompt": "a", "best_of": 1, "echo": False, "suffix": "", **shared}
    chat: dict[str, Any] = {
        "messages": user,
        "logprobs": False,
        "top_logprobs": 0,
        "tool_choice": "none",
        "logit_bias": {},
    }
    chat |= {"verbosity": "medium", "store": False, "service_tier": "auto", "metadata": {}}
    chat |= {"response_format": {"type": "text"}, "parallel_tool_calls": True, **shared}
    assert httpx.post(url + TEXT, json=texts, timeout=60).status_code == 200
    assert httpx.post(url + CHAT, json=chat, timeout=60).status_code == 200
    refused = httpx.post(url + CHAT, json=chat | {"n": True}, timeout=60)
    assert refused.status_code == 400 and "n true is not supported; remove it" in refused.text


def test_a_stop_of_more_tokens_than_are_searched_ends_an_answer(parts: tuple[Any, Any]) -> None:
    model, tokens = parts
    asked = {"prompt": "a", "max_tokens": 120, "temperature": 0}
    with started(parts, "--max_tokens=120") as url:
        plain = httpx.post(url + TEXT, json=asked, timeout=60).json()
        text = plain["choices"][0]["text"]
        stop = text[2:102]
        assert len(tokens(stop)["input_ids"]) > 64, "more than WINDOW"
        ended = httpx.post(url + TEXT, json=asked | {"stop": stop}, timeout=60).json()
        most = plain["usage"]["completion_tokens"]
        assert ended["usage"]["completion_tokens"] < most


@pytest.mark.parametrize("kind", ["chat_completion.Chat", "completion."])
def test_each_field_of_openai_is_read_or_has_a_value_without_effect(kind: str) -> None:
    """Of the fields that transformers' handlers let pass, by OpenAI's own types."""
    file, _, prefix = kind.partition(".")
    module = importlib.import_module(f"transformers.cli.serving.{file}")
    known = getattr(module, f"{prefix}CompletionHandler")._valid_params_class.__mutable_keys__
    assert len(known) > 15 and known <= {*FIELDS, *NEUTRAL, "generation_config"}


def test_a_bias_decides_the_answer_of_a_text_too(url: str, parts: tuple[Any, Any]) -> None:
    (token,) = parts[1].encode("Z")
    shared: dict[str, Any] = {"max_tokens": 3, "temperature": 0, "logit_bias": {str(token): 100}}
    for path, asked in ((TEXT, {"prompt": "a"}), (CHAT, {"messages": [attacks.USER]})):
        (choice,) = httpx.post(url + path, json=asked | shared).json()["choices"]
        assert (choice.get("text") or choice["message"]["content"]) == "ZZZ"


def test_a_prompt_is_not_ended_by_the_tokenizer(parts: tuple[Any, Any]) -> None:
    """It starts with BOS as in training, and has no EOS of a tokenizer that appends one."""
    model, tokens = parts
    tokens = copy.deepcopy(tokens)
    tokens.bos_token = tokens.eos_token
    tokens.add_bos_token, tokens.add_eos_token = True, True
    assert len(tokens("ab")["input_ids"]) == 4
    seen: list[int] = []

    def note(module: Any, given: Any, named: Any) -> None:
        seen.extend(named["input_ids"][0].tolist())

    with started((model, tokens)) as address:
        handle = model.register_forward_pre_hook(note, with_kwargs=True)
        asked = {"prompt": "ab", "max_tokens": 1}
        answer = httpx.post(address + TEXT, json=asked, timeout=30)
        handle.remove()
        assert answer.json()["usage"]["prompt_tokens"] == 3
        assert httpx.post(address + TEXT, json={"prompt": "", "max_tokens": 1}).status_code == 200
    assert seen == encode_prompt(tokens, "ab") == [tokens.bos_token_id, *tokens.encode("ab")[1:3]]
