"""Paths of the API, and an error in its form."""

from __future__ import annotations

from starlette.responses import JSONResponse, Response

CHAT, TEXT, SCORE = "/v1/chat/completions", "/v1/completions", "/pooling"
MODELS = "/v1/models"


def error_response(code: int, sentence: str) -> Response:
    """Returns an error in OpenAI's form; a sentence repeats little of what was sent."""
    kind = "invalid_request_error" if code < 500 else "server_error"
    return JSONResponse({"error": {"message": sentence[:300], "type": kind, "code": code}}, code)
