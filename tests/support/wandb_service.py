"""As much of a WandB server as the client needs for metrics, on loopback; it can go away in the
middle."""

from __future__ import annotations

import gzip
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Service:
    """Keeps what it is sent, by run id, as WandB does: a list of lines, written from an offset
    on."""

    def __init__(self) -> None:
        self.lines: dict[str, list[dict[str, Any]]] = {}
        self.config: dict[str, Any] = {}
        handler = type("Handler", (_Handler,), {"service": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.handle_error = lambda *_: None  # ty: ignore[invalid-assignment]
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self.is_away = False
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, operation: str, given: dict[str, Any]) -> dict[str, Any]:
        run = {"id": "1", "sweepName": None}
        run |= {key: given.get(key) for key in ("name", "displayName")}
        lines = self.lines.get(given.get("name", ""))
        if operation == "RunResumeStatus":
            newest = (lines or [{}])[-1]
            tail = json.dumps([json.dumps(line) for line in (lines or [])[-1:]])
            counts = {"historyLineCount": len(lines or []), "eventsLineCount": 0}
            bucket: dict[str, Any] = (
                run | counts | {"logLineCount": 0, "historyTail": tail, "eventsTail": "[]"}
            )
            bucket |= {"config": json.dumps(self.config), "wandbConfig": '{"t": 1}'}
            bucket |= {"tags": [], "notes": None, "summaryMetrics": json.dumps(newest)}
            found = None if lines is None else bucket
            return {"model": {"id": "1", "name": "p", "entity": {"name": "e"}, "bucket": found}}
        if operation == "UpsertBucket":
            lines = self.lines.setdefault(given["name"], [])
            self.config.update(json.loads(given.get("config") or "{}"))
            project = {"id": "1", "name": "p", "entity": {"id": "1", "name": "e"}}
            bucket = run | {"config": "{}", "historyLineCount": len(lines), "project": project}
            return {"upsertBucket": {"bucket": bucket, "inserted": True}}
        if operation == "CreateRunFiles":
            files = [{"name": name, "uploadUrl": f"{self.url}/upload"} for name in given["files"]]
            return {"createRunFiles": {"runID": "1", "uploadHeaders": [], "files": files}}
        return {}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    service: Service

    def do_POST(self) -> None:
        if self.service.is_away:
            self.close_connection = True
            return
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
        try:
            sent = json.loads(body)
        except ValueError:  # a file, or telemetry
            sent = {}
        answer: dict[str, Any] = {}
        if "query" in sent:
            given = sent.get("variables") or {}
            answer = {"data": self.service.answer(sent.get("operationName", ""), given)}
        elif history := sent.get("files", {}).get("wandb-history.jsonl"):
            lines = self.service.lines.setdefault(self.path.split("/")[-2], [])
            lines[history["offset"] :] = [json.loads(line) for line in history["content"]]
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_PUT = do_GET = do_POST

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass
