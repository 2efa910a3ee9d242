"""Waits of tests, the only place where a test compares a clock with a limit.

A limit here ends a test that would never end; it is no measurement. A busy machine may take twenty
times as long as an idle one, so limits are minutes."""

import threading
import time
from collections.abc import Callable
from typing import Any

LIMIT_S = 200.0  # below pytest's own, which would end all tests of a worker


def until(
    condition: Callable[[], Any],
    why: str | Callable[[], str] = "it did not happen",
    limit_s: float = LIMIT_S,
    poll_s: float = 0.05,
) -> Any:
    """Returns the first true value of `condition`. Fails with `why` after `limit_s`."""
    ends = time.monotonic() + limit_s
    while not (found := condition()):
        if time.monotonic() > ends:
            raise AssertionError(why if isinstance(why, str) else why())
        time.sleep(poll_s)
    return found


def returns(function: Callable[..., object], *args: object, why: str) -> None:
    """Calls `function` in a thread. Fails with `why` if it waits for what never comes."""
    failed: list[BaseException] = []

    def call() -> None:
        try:
            function(*args)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    if failed:
        raise failed[0]
    assert not thread.is_alive(), why
