"""Counters of the service in Prometheus' text format (version 0.0.4), without its client library:
the labels are paths and status codes, which need no escapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """Counts answered requests, their seconds and their tokens.

    It is changed and read by the thread of the event loop alone."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._requests: Counter[tuple[str, int]] = Counter()  # (path, status code)
        self._tokens = Counter(prompt=0, completion=0)
        self._seconds, self._answers = 0.0, 0  # of answers with a status below 400

    def count(self, path: str, code: int, seconds: float, tokens: dict[str, int]) -> None:
        """Adds one answer."""
        self._requests[path, code] += 1
        self._tokens.update(tokens)
        if code < 400:
            self._seconds += seconds
            self._answers += 1

    def text(self, is_ready: bool, running: int) -> str:
        """Returns all metrics, one sample a line; `running` requests have a slot."""
        by_code = {}
        for (path, code), number in sorted(self._requests.items()):
            by_code[f'{{path="{path}",code="{code}"}}'] = number
        tokens = {f'{{kind="{kind}"}}': number for kind, number in self._tokens.items()}
        seconds = {"_sum": self._seconds, "_count": self._answers}

        text = _family("serve_requests_total", "counter", "Requests by path and status", by_code)
        meaning = "Seconds to the end of an answer; refused and failed requests are not in it"
        text += _family("serve_request_seconds", "summary", meaning, seconds)
        text += _family("serve_tokens_total", "counter", "Tokens of prompts and answers", tokens)
        meaning = "Requests that are being answered or wait for the model"
        text += _family("serve_running_requests", "gauge", meaning, {"": running})
        meaning = "--max_requests: one more is answered with 429"
        text += _family("serve_max_requests", "gauge", meaning, {"": self._max_requests})
        text += _family("serve_ready", "gauge", "1 if /ready answers 200", {"": int(is_ready)})
        return text


def _family(name: str, kind: str, meaning: str, samples: Mapping[str, float]) -> str:
    """Returns the lines of one metric; keys of `samples` follow its name: a suffix or labels."""
    lines = f"# HELP {name} {meaning}\n# TYPE {name} {kind}\n"
    for rest, value in samples.items():
        lines += f"{name}{rest} {value}\n"
    return lines
