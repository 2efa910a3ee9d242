"""The classes of transformers.cli.serving have the names and parameters that `serve` uses."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from typing import Any

import pytest
import torch
from transformers import PretrainedConfig
from transformers.cli.serving import chat_completion, completion, utils

from dist_template.compat import transformers_serving as serving


@pytest.mark.parametrize(
    "handler", [chat_completion.ChatCompletionHandler, completion.CompletionHandler]
)
def test_handlers_use_nothing_of_a_model_manager_that_ours_lacks(handler: Any) -> None:
    source = inspect.getsource(utils.BaseHandler) + inspect.getsource(handler)
    used = set(re.findall(r"self\.model_manager\.(\w+)", source))
    model: Any = torch.nn.Identity()
    model.config = PretrainedConfig()
    ours = serving.OneModel(model, model, "name", 8)
    assert used and [name for name in used if not hasattr(ours, name)] == []
    assert list(inspect.signature(handler.handle_request).parameters) == [
        "self", "body", "request_id",
    ]  # fmt: skip


def test_generation_takes_its_inputs_third_and_runs_on_the_thread_that_we_set() -> None:
    for function in (
        utils.GenerateManager.generate_streaming,
        utils.GenerateManager.generate_non_streaming,
    ):
        names = list(inspect.signature(function).parameters)
        assert (
            names[:5] == ["self", "model", "processor", "inputs", "gen_config"]
            and names[5] == "request_id"
        )
        assert "{**inputs," in inspect.getsource(function), (
            "further arguments of `generate` pass through inputs"
        )
    assert re.findall(r"self\.(_\w+)\.", inspect.getsource(utils.GenerateManager)) == [
        "_thread",
        "_thread",
    ]


def test_the_event_of_an_error_is_still_the_one_that_is_looked_for() -> None:
    for module in (chat_completion, completion):
        assert 'f\'data: {{"error": "{' in inspect.getsource(module)
    assert serving.FAILED == 'data: {"error"'


def test_a_stream_ends_with_its_mark_or_with_the_error_in_openais_form() -> None:
    async def read(*events: str) -> list[str]:
        async def given():
            for event in events:
                yield event

        return [event async for event in serving._finished(given())]

    assert asyncio.run(read("data: {}\n\n")) == ["data: {}\n\n", "data: [DONE]\n\n"]
    *_, last = asyncio.run(read("data: {}\n\n", 'data: {"error": "a "reason" here"}\n\n'))
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == 'a "reason" here'
