"""Names of the hub where it cannot be reached: one sentence, at once, with the way of a folder."""

import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from dist_template import hub
from tests.support.runs import refused


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> str:
    """The hub's address is one where nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "_unreachable", [])
    monkeypatch.setattr(hub, "_asked", set())
    monkeypatch.setenv(hub.OFFLINE, "")
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    return f"127.0.0.1:{port}"


@pytest.mark.parametrize(
    ("key", "given"),
    [
        ("model.pretrained", ["--model.pretrained=org/none"]),
        ("data.tokenizer.path", ["--data.tokenizer=Pretrained", "--data.tokenizer.path=org/none"]),
    ],
)
def test_a_hub_without_network_is_one_sentence(
    key: str, given: list[str], flags: list[str], unreachable: str, capfd: Any
) -> None:
    said = refused("fit", [*flags, *given], capfd)
    assert f"{key} 'org/none' cannot be loaded: 127.0.0.1 cannot be reached" in said
    assert "give a local folder" in said and "hf download org/none --local-dir FOLDER" in said
    assert "Retrying" not in said


def test_the_hub_is_asked_once_and_not_for_folders(
    unreachable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.check_reachable(str(tmp_path))
    assert not hub._unreachable and not constants.HF_HUB_OFFLINE, "a folder needs no network"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
        accepting = threading.Thread(target=server.accept)
        accepting.start()
        hub.check_reachable("org/some")
        accepting.join(10)
    assert not hub._unreachable and not constants.HF_HUB_OFFLINE, "it is reachable"
    hub.check_reachable("org/other")  # now it is gone, and was asked before
    assert not hub._unreachable
    assert hub.why_not_loaded("org/some", OSError("no such model. More")) == "no such model"
