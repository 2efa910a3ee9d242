"""Hostile requests to a service, as tables: heads and bodies on a socket, JSON bodies by path."""

import json
import socket
import threading
from argparse import Namespace
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from typing import Any

import httpx

from dist_template.wings.ship.serve.command import http_server
from dist_template.wings.ship.serve.service import Service

CHAT, TEXT, SCORE = "/v1/chat/completions", "/v1/completions", "/pooling"
HEAD = f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = f"{HEAD}Transfer-Encoding: chunked\r\n\r\n"
MEBIBYTE = 1 << 20


@contextmanager
def service(app: Any, given: Namespace) -> Generator[str]:
    """Runs `app` behind the verb's own HTTP server, in a thread; yields its address."""
    listening = socket.create_server(("127.0.0.1", 0))
    served = Service(given.max_requests)
    served.start(app)
    server = http_server(served, given)
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def on_socket(url: str, *parts: bytes | str) -> tuple[int, str]:
    """Sends `parts`, and returns an answer's status and body; (0, "") if there is none."""
    address = httpx.URL(url)
    received = b""
    with closing(socket.create_connection((address.host, address.port or 80), timeout=30)) as peer:
        try:
            for part in parts:
                peer.sendall(part.encode("latin-1") if isinstance(part, str) else part)
            while data := peer.recv(65536):
                received += data
                if is_complete(received):
                    break
        except (ConnectionError, BrokenPipeError):
            pass
    if not received:
        return 0, ""
    head, _, body = received.partition(b"\r\n\r\n")
    return int(head.split()[1]), body.decode()


def is_complete(received: bytes) -> bool:
    head, end, body = received.partition(b"\r\n\r\n")
    lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return bool(end and lengths) and len(body) >= int(lengths[0].split(b":")[1])


# Requests on a socket that are answered at once, each with its status.
MALFORMED: dict[str, tuple[int, tuple[bytes | str, ...]]] = {
    "no HTTP": (400, ("hello\r\n\r\n",)),
    "TLS": (400, (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",)),
    "HTTP/2": (404, ("PRI * HTTP/2.0\r\n\r\n",)),
    "another version": (400, (f"POST {TEXT} HTTP/9.9\r\nHost: a\r\n\r\n",)),
    "no Host": (400, (f"POST {TEXT} HTTP/1.1\r\n\r\n",)),
    "two Hosts": (400, (f"{HEAD}Host: other\r\n\r\n",)),
    "a NUL in a header": (400, (f"{HEAD}X: a\0b\r\n\r\n",)),
    "a header without a name": (400, (f"{HEAD}: a\r\n\r\n",)),
    "a header with a blank": (400, (f"{HEAD}Content-Length : 3\r\n\r\n",)),
    "a folded first header": (400, (f"POST {TEXT} HTTP/1.1\r\n a: b\r\n\r\n",)),
    "a long header": (400, (f"{HEAD}X: {'a' * 100_000}\r\n\r\n",)),
    "many headers": (400, (HEAD + "".join(f"X{n}: {n}\r\n" for n in range(9000)) + "\r\n",)),
    "headers without end": (431, (HEAD, *["X: a\r\n" * 1000] * 20)),
    "a long path": (404, (f"POST /{'a' * 100_000} HTTP/1.1\r\nHost: a\r\n\r\n",)),
    "a length that is no number": (400, (f"{HEAD}Content-Length: ten\r\n\r\n",)),
    "a negative length": (400, (f"{HEAD}Content-Length: -1\r\n\r\n",)),
    "a signed length": (400, (f"{HEAD}Content-Length: +3\r\n\r\n{{}}",)),
    "a length in hex": (400, (f"{HEAD}Content-Length: 0x10\r\n\r\n",)),
    "two lengths": (400, (f"{HEAD}Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",)),
    "a length of 400 MB": (413, (f"{HEAD}Content-Length: 400000000\r\n\r\n", b"x" * MEBIBYTE)),
    "a length of 30 digits": (400, (f"{HEAD}Content-Length: {'9' * 30}\r\n\r\n",)),
    "a length of 20 digits": (413, (f"{HEAD}Content-Length: {'9' * 20}\r\n\r\n",)),
    "an unknown transfer encoding": (400, (f"{HEAD}Transfer-Encoding: gzip\r\n\r\n",)),
    "two transfer encodings": (400, (f"{HEAD}Transfer-Encoding: gzip, chunked\r\n\r\n",)),
    "a chunk without a size": (400, (f"{CHUNKED}hello\r\n",)),
    "a chunk of a negative size": (400, (f"{CHUNKED}-5\r\nhello\r\n",)),
    "a chunk of a huge size": (400, (f"{CHUNKED}{'f' * 40}\r\n",)),
    "a chunk longer than its size": (400, (f"{CHUNKED}2\r\nhello\r\n",)),
    "chunks without end": (413, (CHUNKED, *[b"10000\r\n" + b"x" * 65536 + b"\r\n"] * 40)),
    "chunks of one byte": (400, (CHUNKED, b"1\r\nx\r\n" * (MEBIBYTE + 2))),
    "a compressed body": (415, (f"{HEAD}Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\nab",)),
    "length and chunks": (400, (f"{HEAD}Content-Length: 2\r\n", f"{CHUNKED[len(HEAD):]}{{}}")),
    "an empty body": (400, (f"{HEAD}Content-Length: 0\r\n\r\n",)),
    "no body at all": (400, (f"{HEAD}\r\n",)),
    "GET": (405, (f"GET {TEXT} HTTP/1.1\r\nHost: localhost\r\n\r\n",)),
    "another method": (405, (f"BREW {TEXT} HTTP/1.1\r\nHost: localhost\r\n\r\n",)),
    "CONNECT": (404, ("CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n",)),
    "an upgrade": (400, (f"{HEAD}Connection: upgrade\r\nUpgrade: websocket\r\n\r\n",)),
    "a path with dots": (404, ("POST /v1/../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n",)),
    "a path in bad UTF-8": (404, ("POST /%ff%fe%00 HTTP/1.1\r\nHost: localhost\r\n\r\n",)),
    "a proxy's path": (404, ("POST http://other/v1 HTTP/1.1\r\nHost: localhost\r\n\r\n",)),
    "another Host": (403, (f"POST {TEXT} HTTP/1.1\r\nHost: evil.example\r\n\r\n",)),
    "a Host with a bracket": (403, (f"POST {TEXT} HTTP/1.1\r\nHost: [::1\r\n\r\n",)),
    "another Origin": (403, (f"{HEAD}Origin: https://evil.example\r\nContent-Length: 0\r\n\r\n",)),
    "the Origin of a file": (403, (f"{HEAD}Origin: null\r\nContent-Length: 0\r\n\r\n",)),
    "another method of the models": (
        405, ("DELETE /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n",)
    ),
    "a redirect to another Host": (
        404, (f"GET {SCORE}/ HTTP/1.1\r\nHost: evil.example\r\n\r\n",)
    ),
    "two Origins": (
        400,
        (f"{HEAD}Origin: https://evil.example\r\nOrigin: http://localhost\r\n\r\n",),
    ),
    **{
        f"a Host such as {host}": (403, (f"POST {TEXT} HTTP/1.1\r\nHost: {host}\r\n\r\n",))
        for host in ("a@localhost", "localhost:x", "localhost:80:b.c", "localhost/b.c", "a b")
    },
    "the same Host, rebound": (
        403,
        (f"POST {TEXT} HTTP/1.1\r\nHost: evil.example\r\nOrigin: http://evil.example\r\n\r\n",),
    ),
}  # fmt: skip

# Requests on a socket that stop: (status, parts); the service waits until its deadline.
STALLED: dict[str, tuple[int, tuple[bytes | str, ...]]] = {
    "nothing": (0, ()),
    "half of a head": (408, (HEAD,)),
    "half of a body": (408, (f"{HEAD}Content-Length: 100\r\n\r\n{{",)),
    "one chunk": (408, (f"{CHUNKED}1\r\nx\r\n",)),
    "a wait for 100-continue": (
        100, (f"{HEAD}Content-Length: 100\r\nExpect: 100-continue\r\n\r\n",)
    ),
}  # fmt: skip

DEEP = "[" * 500 + "]" * 500
# JSON documents that are no request, on each path.
NO_REQUEST: dict[str, bytes] = {
    "{}": b"{}",
    "null": b"null",
    "a number": b"3",
    "a text": b'"a"',
    "a list": b"[]",
    "NaN": b"NaN",
    "half of an object": b'{"prompt": ',
    "single quotes": b"{'prompt': 'a'}",
    "a comma too many": b'{"prompt": "a",}',
    "a comment": b'{"prompt": "a"} // a',
    "two documents": b'{"prompt": "a"}{"prompt": "b"}',
    "a byte-order mark": b'\xef\xbb\xbf{"prompt": "a"',
    "bad UTF-8": b'{"prompt": "\xff\xfe"}',
    "UTF-16, cut": '{"prompt": "a'.encode("utf-16"),
    "UTF-7": b"+AHsAIgBwACI",
    "zeros": b"\0" * 1000,
    "deep lists": b"[" * 200_000,
    "deep objects": b'{"a":' * 100_000,
    "a number of a megabyte": b"1" * 1_000_000,
    "an exponent": b'{"prompt": "a", "messages": [], "temperature": 1e99999}',
    "form data": b"prompt=a&max_tokens=3",
    "XML": b'<?xml version="1.0"?><!DOCTYPE a [<!ENTITY b "c">]><a>&b;</a>',
    "a pickle": b"\x80\x04\x95\x00\x00\x00\x00\x00\x00\x00\x00.",
    "a generation_config": b'{"prompt": "a", "messages": [{}], "generation_config": "{}"}',
    "half of a pair": b'{"prompt": "\\ud800", "input": "\\ud800", "messages": [{"role": "user"}]}',
    "a key that is half of a pair": b'{"prompt": "a", "\\udfff": 3}',
}

ODD: list[Any] = [
    float("nan"), float("inf"), -float("inf"), 10**400, -(10**400), 2**63, 2**64, -1, 1.5, True,
    "many", "", "\0", "a" * 5000, [], [1], [[]], {}, {"a": 1}, {"": None}, [None], json.loads(DEEP),
]  # fmt: skip
# Field: the values of ODD that are allowed there, by index.
NUMBERS = ("max_tokens", "temperature", "top_p", "frequency_penalty", "seed")
ALLOWED: dict[str, list[Any]] = {
    "prompt": ["many", "\0"],
    "temperature": [1.5],
    "frequency_penalty": [1.5],
    "stream": [True],
    "suffix": [""],
    "user": ["many", "", "\0", "a" * 5000],
    "stream_options": [],
    "stop": ["many", "", "\0", []],
    "logit_bias": [{}],
    "chat_template_kwargs": [{}, {"a": 1}, {"": None}],
    "tools": [[]],
    "model": [],
    "messages": [],
    "max_tokens": [],
    "top_p": [],
    "seed": [],
}


def is_in(value: Any, values: list[Any]) -> bool:
    return any(type(value) is type(each) and value == each for each in values)


def fields() -> Iterator[tuple[str, str, bytes]]:
    """Yields requests with one odd field: (name, path, body)."""
    for field, allowed in ALLOWED.items():
        for path in (TEXT, CHAT):
            if (path, field) in ((TEXT, "messages"), (CHAT, "prompt"), (CHAT, "suffix")):
                continue
            if path == TEXT and field in ("chat_template_kwargs", "tools"):
                continue
            for index, value in enumerate(ODD):
                if not is_in(value, allowed):
                    asked = {"prompt": "a"} if path == TEXT else {"messages": [USER]}
                    body = json.dumps(asked | {field: value}).encode()
                    yield f"{path}: {field} is {index}: {repr(value)[:30]}", path, body


USER = {"role": "user", "content": "a"}
# Conversations that are none, and templates and fields that a client should not set.
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "no messages": {"messages": []},
    "no role": {"messages": [{"content": "a"}]},
    "a role that is none": {"messages": [{"role": 3, "content": {}}]},
    "a content without type": {"messages": [{"role": "user", "content": [{"no": "type"}]}]},
    "a content that is a number": {"messages": [{"role": "user", "content": 3}]},
    "an image without text": {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
    "arguments that are no JSON": {
        "messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "["}}]}]
    },
    "calls that are none": {"messages": [{"role": "assistant", "tool_calls": 3}]},
    "a template of the client": {
        "messages": [USER],
        "chat_template_kwargs": {"chat_template": "{% for a in range(99999) %}{% endfor %}"},
    },
    "padding": {
        "messages": [USER], "chat_template_kwargs": {"padding": "max_length", "max_length": 10**9}
    },
    "tokenized twice": {"messages": [USER], "chat_template_kwargs": {"tokenize": False}},
    "a bias beyond the vocabulary": {"messages": [USER], "logit_bias": {"999999999": 1}},
    "a bias of a text": {"messages": [USER], "logit_bias": {"a": 1}},
    "a negative bias token": {"messages": [USER], "logit_bias": {"-1": 1}},
    "a bias that is huge": {"messages": [USER], "logit_bias": {"1": 1e308}},
    "an unknown field": {"messages": [USER], "exec": "a"},
    **{
        f"an image, as {kind}": {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]
        }
        for kind, part in {
            "image_url": {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x.png"}},
            "file": {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
            "path": {"type": "image", "path": "/etc/passwd"},
            "sound": {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        }.items()
    },
    "three answers": {"messages": [USER], "n": 3},
    "no answer": {"messages": [USER], "n": 0},
    "probabilities": {"messages": [USER], "logprobs": True, "top_logprobs": 5},
    "JSON alone": {"messages": [USER], "response_format": {"type": "json_object"}},
    "a question without content": {"messages": [{"role": "user", "content": None}]},
    "few words": {"messages": [USER], "verbosity": "low"},
    "stored": {"messages": [USER], "store": True},
    "another tier": {"messages": [USER], "service_tier": "priority"},
    "two limits": {"messages": [USER], "max_tokens": 3, "max_completion_tokens": 4},
    "a tool without a name": {"messages": [USER], "tools": [{"type": "function"}]},
    "a tool of another type": {"messages": [USER], "tools": [{"type": "web_search"}]},
    "no tool, with tools": {
        "messages": [USER],
        "tools": [{"type": "function", "function": {"name": "a"}}],
        "tool_choice": "none",
    },
    "a tool by name": {
        "messages": [USER], "tool_choice": {"type": "function", "function": {"name": "a"}}
    },
    "a tool by force": {"messages": [USER], "tool_choice": "required"},
    "a penalty that is not there": {"messages": [USER], "presence_penalty": 1.5},
    "a role of a megabyte": {"messages": [{"role": "r" * 900_000, "content": "a"}]},
    "tools of a megabyte": {
        "messages": [USER],
        "tools": [{"type": "function", "function": {"name": "a", "description": "b" * 900_000}}],
    },
    "arguments of a megabyte": {
        "messages": [
            {"role": "assistant", "tool_calls": [{"function": {"arguments": {"a": "b" * 900_000}}}]}
        ]
    },
    "a template's value of a megabyte": {
        "messages": [USER], "chat_template_kwargs": {"a": "b" * 900_000}
    },
    "another model": {"messages": [USER], "model": "../../etc/passwd"},
    "1000 stops": {"messages": [USER], "stop": ["a"] * 1000},
    "a megabyte": {"messages": [{"role": "user", "content": "a" * 1_000_000}]},
    "a megabyte in parts": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "b " * 400_000}]}]
    },
    "100,000 messages": {"messages": [{"role": "user"}] * 50_000},
}  # fmt: skip
TEXTS: dict[str, dict[str, Any]] = {
    "an empty prompt": {"prompt": ""},
    "a prompt of a megabyte": {"prompt": "a" * 1_000_000},
    "a prompt of words": {"prompt": "the fox " * 100_000},
    "a prompt of emoji": {"prompt": "🦊" * 80_000},
    "prompts": {"prompt": ["a", "b"]},
    "three answers": {"prompt": "a", "n": 3},
    "the best of many": {"prompt": "a", "best_of": 1_000_000},
    "an echo": {"prompt": "a", "echo": True},
    "a suffix": {"prompt": "a", "suffix": "b"},
    "usage without a stream": {"prompt": "a", "stream_options": {"include_usage": True}},
    "an option of streams that is none": {
        "prompt": "a",
        "stream": True,
        "stream_options": {"interval": 3},
    },
    "an empty stop among others": {"prompt": "a", "stop": ["b", ""]},
    "an empty stop alone": {"prompt": "a", "stop": [""]},
    "probabilities": {"prompt": "a", "logprobs": 5},
    "a long stop": {"prompt": "a", "stop": "a" * 900_000},
    "tokens": {"prompt": [1, 2, 3]},
    "a prompt beside messages": {"prompt": "a", "messages": [USER]},
}


def requests() -> Iterator[tuple[str, str, bytes]]:
    """Yields (name, path, body) of hostile JSON requests: each is to get a 4xx."""
    for path in (TEXT, CHAT, SCORE):
        for name, body in NO_REQUEST.items():
            yield f"{path}: {name}", path, body
    for name, asked in CONVERSATIONS.items():
        yield f"{CHAT}: {name}", CHAT, json.dumps(asked).encode()
    for name, asked in TEXTS.items():
        yield f"{TEXT}: {name}", TEXT, json.dumps(asked).encode()
    yield from fields()
