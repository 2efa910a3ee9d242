"""A small hub on the loopback address: it accepts or refuses a repository, and keeps what is
committed."""

import base64
import json
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest
from huggingface_hub import constants

TOKEN, OWNER = "hf_of_the_owner", "me"
NO_RIGHTS = "You don't have the rights to create a model under this namespace"


class Hub(BaseHTTPRequestHandler):
    """The requests of `create_repo` and `upload_folder`; all names but the owner's are refused."""

    files: dict[str, bytes]
    created: list[dict[str, Any]]

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def answer(self, content: Any, status: int = 200, **headers: str) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self.answer({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        where = f"http://{self.headers['Host']}"
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            self.answer({}, 401, X_Error_Message="Invalid username or password.")
        elif self.path == "/api/repos/create":
            given = json.loads(body)
            self.created.append(given)
            if given["organization"] == OWNER:
                self.answer({"url": f"{where}/{OWNER}/{given['name']}"})
            else:
                self.answer({}, 403, X_Error_Message=NO_RIGHTS)
        elif self.path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            files = [{"path": each["path"]} for each in json.loads(body)["files"]]
            more = {"uploadMode": "regular", "shouldIgnore": False}
            self.answer({"files": [each | more for each in files]})
        else:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    value = line["value"]
                    self.files[value["path"]] = base64.b64decode(value["content"])
            self.answer({"commitUrl": f"{where}/{OWNER}/x/commit/1", "commitOid": "1"})


@contextmanager
def hub(monkeypatch: pytest.MonkeyPatch) -> Generator[type[Hub]]:
    """Yields what the hub has got; the client of this process takes it for the real one."""
    handler = type("Got", (Hub,), {"files": {}, "created": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    try:
        yield handler
    finally:
        server.shutdown()
        server.server_close()
