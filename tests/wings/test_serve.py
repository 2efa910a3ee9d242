"""A served model answers OpenAI's API; what is wrong gets a 4xx and does no harm."""

import argparse
import asyncio
import concurrent.futures
import json
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from dist_template.wings.ship.serve.app import App
from dist_template.wings.ship.serve.service import Service
from tests.support.chats import TAGGED, tokenizer
from tests.support.runs import only_run, refused, run
from tests.support.serving import Server
from tests.support.waiting import until

KEY, SECRET = "a key", "what the prompt says"
MESSAGES: Any = [{"role": "user", "content": SECRET}]
CHAT, TEXT, SCORE = "/v1/chat/completions", "/v1/completions", "/pooling"
LIMITS = {"max_tokens": 64, "max_requests": 4, "grace_s": 3.0}
PAGES: Any = {"allow_origin": [], "allow_host": []}
FLAGS = [f"--{flag}={value}" for flag, value in LIMITS.items()]


def chat_model(folder: Path, positions: int = 512) -> Path:
    """Saves a small Llama with a chat template. It says something else at each token."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens: Any = AutoTokenizer.from_pretrained(tokenizer(folder, "qwen3", TAGGED))
    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "max_position_embeddings": positions}
    sizes |= {"vocab_size": len(tokens), "eos_token_id": tokens.eos_token_id}
    LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.5)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    key: Any = {"KEY_OF_A_TEST": KEY}
    server = Server(folder, folder.parent / "log", *FLAGS, "--api_key_env=KEY_OF_A_TEST", **key)
    yield server
    server.stop(signal.SIGKILL)


@pytest.fixture(scope="module")
def client(server: Server) -> Any:
    import openai  # here: the server's process imports this file

    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)


def post(server: Server, path: str, **options: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {KEY}"}
    return httpx.post(server.url + path, headers=headers, timeout=30, **options)


@pytest.mark.slow
def test_an_openai_client_reads_whole_answers_and_streams(client: Any, folder: Path) -> None:
    asked: Any = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 24}
    whole = client.chat.completions.create(**asked)
    asked |= {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(**asked))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert whole.choices[0].message.content == text and len(chunks) > 5
    used = [answer.usage.completion_tokens for answer in (whole, chunks[-1]) if answer.usage]
    assert used == [24, 24]

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    options: Any = {"add_generation_prompt": True, "return_tensors": "pt"}
    prompt = tokenizer.apply_chat_template(MESSAGES, **options)
    tokens = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0]
    answer = tokenizer.decode(tokens[prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer == text, "the served model answers as transformers does"


@pytest.mark.slow
def test_completions_of_a_text_stream_too_and_the_seed_decides(client: Any, server: Server) -> None:
    asked: Any = {"model": "tiny", "prompt": "once", "max_tokens": 8}
    answers = [client.completions.create(**asked, seed=seed) for seed in (3, 3, 4)]
    one, same, other = (answer.choices[0].text for answer in answers)
    assert one == same != other, "it samples, as OpenAI's do"
    assert [model.id for model in client.models.list()] == ["tiny"]
    body = post(server, TEXT, json=asked | {"stream": True}).text
    assert body.count("data: ") > 3 and '"completion_tokens":8' in body
    assert body.endswith("\n\ndata: [DONE]\n\n"), "other clients wait for the mark"


def fields(**given: Any) -> dict[str, Any]:
    return {"json": {"prompt": "a", **given}}


BAD: dict[str, tuple[int, dict[str, Any], str]] = {
    "no JSON": (400, {"content": b'{"prompt": '}, "JSONDecodeError"),
    "no object": (400, {"content": b"[1]"}, "has to be an object"),
    "nested too deeply": (400, {"content": b"[" * 90_000}, "Recursion"),
    "no text": (400, {"content": b"\xff\xfe\x00"}, "cannot be answered"),
    "10 MB": (413, {"content": b"x" * 10_000_000}, "over 1048576 bytes"),
    "another type": (400, fields(max_tokens="many"), "give a whole number"),
    "another model": (400, fields(model="gpt-4"), "pinned to 'tiny'; requested 'gpt-4'"),
    "an unknown field": (422, fields(prompts=3), "Unexpected fields"),
    "a long prompt": (400, fields(prompt="a" * 600), "600 tokens, and the model has 512 positions"),
    "another generation_config": (400, fields(generation_config="{}"), "generation_config"),
    "a stop that is no text": (400, fields(stop=3), "cannot be answered"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_request_gets_a_4xx_and_a_sentence(server: Server, case: str) -> None:
    code, options, sentence = BAD[case]
    answer = post(server, TEXT, **options)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (code, code)
    assert error["type"] == "invalid_request_error" and sentence in error["message"], error


def test_messages_are_read_or_get_a_400(server: Server) -> None:
    user, function = {"role": "user"}, {"name": "f", "arguments": "{}"}
    call = {"id": "1", "type": "function", "function": function}
    broken = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "["}}]}
    no_type, no_text = user | {"content": [{"no": "type"}]}, user | {"content": 3}
    for turns in ([{}], [no_type], [no_text], 5, [broken]):
        answer = post(server, CHAT, json={"messages": turns})
        assert answer.status_code == 400, turns
        assert "cannot be answered" in answer.json()["error"]["message"], answer.text
    parts: Any = [user | {"content": [{"type": "text", "text": SECRET}]}]
    parts += [{"role": "assistant", "content": "yes", "annotations": []}, *MESSAGES]
    parts += [{"role": "tool", "tool_call_id": "1", "content": "3"}]
    answer = post(server, CHAT, json={"messages": parts, "max_tokens": 2})
    assert answer.status_code == 200, answer.text
    calls = {"messages": [*parts, {"role": "assistant", "content": None, "tool_calls": [call]}]}
    tools = {"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": "f"}}]}
    for body, lost in ((calls, "the call f in message 5"), (tools, "the tool f")):
        answer = post(server, CHAT, json=body)
        sentence = f"the model's chat template does not write {lost}; remove it"
        assert answer.status_code == 400 and sentence in answer.json()["error"]["message"]


def test_small_temperatures_are_greedy_and_no_stop_strings_are_none(server: Server) -> None:
    asked = {"prompt": "a", "max_tokens": 6, "stop": []}
    given = [asked | {"temperature": temperature} for temperature in (0, 1e-300, 0.009)]
    texts = {post(server, TEXT, json=each).json()["choices"][0]["text"] for each in given}
    assert len(texts) == 1
    streams = [post(server, TEXT, json=each | {"stream": True}).text for each in given]
    assert all(one.endswith("data: [DONE]\n\n") and "error" not in one for one in streams)


def test_other_routes_and_requests_without_the_key_are_refused(server: Server) -> None:
    for path in ("/load_model", "/reset", "/v1/responses", "/docs", "/"):
        assert post(server, path, json={"model": "any"}).status_code == 404, path
    assert httpx.get(server.url + CHAT).status_code == 401
    for given in (b"", b"Bearer another", b"Bearer \xff", KEY.encode(), b"bearer " + KEY.encode()):
        headers = {b"Authorization": given}
        refused = httpx.post(server.url + TEXT, json={"prompt": "a"}, headers=headers)
        assert refused.status_code == 401 and "API key" in refused.json()["error"]["message"]
    assert httpx.get(f"{server.url}/v1/models").status_code == 401
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}


@pytest.mark.slow
def test_more_requests_than_allowed_get_a_429(server: Server) -> None:
    def one(_: int) -> int:
        return post(server, TEXT, json={"prompt": "a", "max_tokens": 64}).status_code

    with concurrent.futures.ThreadPoolExecutor(24) as threads:
        codes = list(threads.map(one, range(48)))
    assert set(codes) == {200, 429} and codes.count(200) >= LIMITS["max_requests"]


def answer(app: Any, path: str, body: Any = None, key: str = "") -> httpx.Response:
    """What an application answers: to a POST of `body`, or to a GET."""
    options: Any = {"transport": httpx.ASGITransport(app), "base_url": "http://tiny"}

    async def post() -> httpx.Response:
        async with httpx.AsyncClient(
            **options, headers={"Authorization": f"Bearer {key}"}
        ) as client:
            return await (client.get(path) if body is None else client.post(path, json=body))

    return asyncio.run(post())


def test_an_error_of_a_generation_is_a_500(folder: Path, monkeypatch: Any) -> None:
    def failing(*_: Any, **__: Any) -> None:
        raise RuntimeError('no "logits"')

    parts: Any = (AutoModelForCausalLM, AutoTokenizer)
    model, tokens = (part.from_pretrained(folder) for part in parts)
    app = App(model, tokens, "", argparse.Namespace(name="tiny", **LIMITS, **PAGES))
    monkeypatch.setattr(LlamaForCausalLM, "forward", failing)

    with pytest.raises(RuntimeError, match="logits"):  # the server logs it
        answer(app, TEXT, {"prompt": "a", "max_tokens": 1})
    streamed = answer(app, TEXT, {"prompt": "a", "max_tokens": 1, "stream": True}).text
    error = json.loads(streamed.strip().rpartition("data: ")[2])["error"]
    assert error == {"message": 'no "logits', "type": "server_error", "code": 500}


def samples(text: str) -> dict[str, float]:
    """Values of Prometheus' text format; each sample's metric has a HELP and a TYPE before it."""
    found: dict[str, float] = {}
    families = set[str]()
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            families.add(line.split()[2])
        elif not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            family = name.partition("{")[0]
            assert family in families or family.rpartition("_")[0] in families, line
            found[name] = float(value)
    assert text.endswith("\n") and text.count("# HELP") == len(families)
    return found


def test_a_service_reports_readiness_and_metrics(folder: Path) -> None:
    service = Service(int(LIMITS["max_requests"]))

    def get(path: str) -> httpx.Response:
        return answer(service, path)

    def metrics() -> dict[str, float]:
        return samples(get("/metrics").text)

    assert get("/health").status_code == 200, "it lives, and loads the model"
    assert (get("/ready").status_code, get("/ready").json()) == (503, {"status": "loading"})
    early = answer(service, TEXT, {"prompt": "a"})
    assert early.status_code == 503 and "being loaded" in early.json()["error"]["message"]
    assert metrics()["serve_ready"] == 0

    parts: Any = (AutoModelForCausalLM, AutoTokenizer)
    model, tokens = (part.from_pretrained(folder) for part in parts)
    service.start(App(model, tokens, KEY, argparse.Namespace(name="tiny", **LIMITS, **PAGES)))
    assert (get("/ready").status_code, get("/ready").json()) == (200, {"status": "ready"})
    for given in ({"prompt": "once", "max_tokens": 5}, {"prompt": "a", "max_tokens": "many"}):
        answer(service, TEXT, given | {"temperature": 0}, KEY)
    answer(service, TEXT, {"prompt": "a", "max_tokens": 7, "stream": True}, KEY)
    assert answer(service, "/any/../path", {}, KEY).status_code == 404
    assert get("/metrics").headers["content-type"].startswith("text/plain; version=0.0.4")
    found = metrics()
    requests = {name: value for name, value in found.items() if "requests_total" in name}
    expected = {(TEXT, 200): 2, (TEXT, 400): 1, (TEXT, 503): 1, ("other", 404): 1}
    assert requests == {
        f'serve_requests_total{{path="{path}",code="{code}"}}': number
        for (path, code), number in expected.items()
    }
    size = len(tokens("once")["input_ids"]) + len(tokens("a")["input_ids"])
    assert found['serve_tokens_total{kind="prompt"}'] == size
    assert found['serve_tokens_total{kind="completion"}'] == 5 + 7
    assert found["serve_request_seconds_count"] == 2 and found["serve_request_seconds_sum"] > 0
    assert found["serve_running_requests"] == 0 and found["serve_ready"] == 1
    assert found["serve_max_requests"] == LIMITS["max_requests"]

    server: Any = SimpleNamespace(should_exit=False)
    service.stop(server, grace_s=60)
    assert (get("/ready").status_code, get("/ready").json()) == (503, {"status": "stopping"})
    while not server.should_exit:
        time.sleep(0.01)  # no request runs, so it does not wait for the grace


SCORED: dict[str, dict[str, Any]] = {
    "input": {"input": ["one", "two<|im_end|>"]},
    "messages": {"messages": [*MESSAGES, {"role": "assistant", "content": "yes"}]},
}
UNSCORED = {
    "a text or 1 to 64 texts": {"input": [3]},
    "messages or input, one of them": {"inputs": "a"},
    "700 tokens, and the model has 512 positions": {"input": "a" * 699},
    "the model is 'tiny'; requested 'gpt-4'": {"input": "a", "model": "gpt-4"},
}


def test_a_reward_model_scores_and_generates_nothing(folder: Path, tmp_path: Path) -> None:
    config = LlamaConfig.from_pretrained(folder, num_labels=1, pad_token_id=0)
    transformers.LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    tokens: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    given = argparse.Namespace(name="tiny", **LIMITS, **PAGES)
    writer = AutoModelForCausalLM.from_pretrained(folder)
    apps = [App(one, tokens, KEY, given) for one in (model, writer)]

    def ask(path: str, body: Any, app: App = apps[0], key: str = KEY) -> tuple[int, Any]:
        found = answer(app, path, body, key)
        return found.status_code, found.json()

    (code, texts), (_, turns) = (ask(SCORE, body) for body in SCORED.values())
    texts, turns = texts["data"], turns["data"]
    assert code == 200 and [each["index"] for each in texts] == [0, 1]
    rendered = tokens.apply_chat_template(SCORED["messages"]["messages"], tokenize=False)
    scored = ["one<|im_end|>", "two<|im_end|>", rendered]
    for text, found in zip(scored, texts + turns, strict=True):
        reward = model(**tokens(text, return_tensors="pt")).logits
        assert found["data"] == pytest.approx(reward[0].tolist(), abs=1e-6)
    for sentence, body in UNSCORED.items():
        code, found = ask(SCORE, body)
        assert code == 400 and sentence in found["error"]["message"], found
    for path in (CHAT, TEXT):
        code, found = ask(path, {"prompt": "a"})
        assert code == 400 and "tiny scores answers and generates none" in str(found)
    code, found = ask(SCORE, SCORED["input"], apps[1])
    assert code == 400 and "tiny generates answers and scores none" in str(found)
    assert ask(SCORE, SCORED["input"], key="another")[0] == 401


@pytest.mark.slow
def test_a_request_given_up_frees_the_model_and_sigterm_ends_a_stream(tmp_path: Path) -> None:
    """90,000 tokens take minutes; the process ends with 0."""
    model = chat_model(tmp_path / "long", positions=100_000)
    limits = ("--max_tokens=90000", "--grace_s=2", "--max_requests=1")
    server, log = Server(model, tmp_path / "log", *limits), tmp_path / "log"
    asked = fields(max_tokens=90_000, temperature=0)
    streamed: Any = fields(max_tokens=90_000, temperature=0, stream=True) | {"timeout": 30}

    def is_free() -> bool:
        def code() -> int:
            return httpx.post(server.url + TEXT, **fields(max_tokens=1), timeout=60).status_code

        return until(lambda: (found := code()) != 429 and found) == 200

    with pytest.raises(httpx.ReadTimeout):
        httpx.post(server.url + TEXT, **asked, timeout=0.5)
    assert is_free()
    with httpx.stream("POST", server.url + TEXT, **streamed) as answer:
        next(answer.iter_text())
    assert is_free()

    with httpx.stream("POST", server.url + TEXT, **streamed) as answer:
        texts = answer.iter_text()
        next(texts)
        server.process.terminate()
        while (ready := httpx.get(f"{server.url}/ready")).status_code == 200:
            time.sleep(0.01)  # until the signal has arrived
        assert (ready.status_code, ready.json()) == (503, {"status": "stopping"})
        late = httpx.post(server.url + TEXT, **fields(max_tokens=1))
        assert late.status_code == 503 and "is stopping" in late.json()["error"]["message"]
        assert "".join(texts).endswith("data: [DONE]\n\n"), "the stream was ended"
    server.process.join(10)
    assert server.process.exitcode == 0 and "Traceback" not in log.read_text(), log.read_text()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health")


@pytest.mark.slow
def test_a_run_is_served_and_a_fault_is_refused(flags: Any, tmp_path: Path, capfd: Any) -> None:
    assert run("fit", *flags, "--trainer.max_steps=2", "--trainer.limit_val_batches=0") == 0
    trained = only_run(tmp_path)
    server = Server(trained, tmp_path / "log", "--name=mine")
    answer = httpx.post(server.url + TEXT, json={"prompt": "the", "max_tokens": 3}).json()
    assert answer["model"] == "mine" and answer["usage"]["completion_tokens"] == 3
    messages = [{"role": "user", "content": SECRET}]
    assert "chat template" in httpx.post(server.url + CHAT, json={"messages": messages}).text
    assert {*server.states} == {"loading", "ready"}, "not ready while it exports and compares"
    assert server.stop() == 0
    assert "largest difference to the trained model's logits" in (tmp_path / "log").read_text()

    (exported,) = (trained / "export").iterdir()
    file, name = exported / "model.safetensors", "model.layers.1.self_attn.o_proj.weight"
    state = load_file(file)
    save_file(state | {name: state[name].T.contiguous()}, file, metadata={"format": "pt"})
    error = refused("serve", [str(trained), "--port=0"], capfd)
    assert "not what was trained" in error, "a fault exits before the port listens"


def test_what_cannot_be_served_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: Any, capfd: Any
) -> None:
    def error(model: Path, port: int = 0) -> str:
        return refused("serve", [str(model), f"--port={port}"], capfd)

    assert "does not exist" in error(tmp_path / "nowhere")
    assert "is not a run folder" in error(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        in_use = error(folder, port)
    assert f"--port {port} cannot be used" in in_use and "in use" in in_use
    alone = chat_model(tmp_path / "alone")
    for file in alone.glob("tokenizer*"):
        file.unlink()
    assert "alone" in error(alone)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    assert "needs the package fastapi: pip install 'transformers[serving]'" in error(folder)
