"""What a request says is in the prompt that the chat template writes, or the request is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from transformers.cli.serving.utils import Modality

from dist_template.compat.transformers_serving import _Chat
from dist_template.wings.ship.serve.conversation import fit_to_template
from dist_template.wings.ship.serve.fields import Refused
from tests.support import chats

USER = {"role": "user", "content": "Is it raining there?"}
ARGUMENTS = json.dumps({"city": "Rome"})
CALL = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {}}}
TALK: list[Any] = [
    USER,
    {"role": "assistant", "content": "Let me look.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "22 degrees"},
]


def prompt(folder: Path, family: str, template: str | None, body: dict[str, Any]) -> str:
    """The prompt that a model answers, by the handler's messages."""
    tokenizer: Any = AutoTokenizer.from_pretrained(chats.tokenizer(folder, family, template))
    fit_to_template(body, tokenizer)
    messages = _Chat.get_processor_inputs_from_messages(body["messages"], Modality.LLM)
    return tokenizer.apply_chat_template(
        messages, tools=body.get("tools"), tokenize=False, add_generation_prompt=True
    )


@pytest.mark.parametrize("family", ["qwen2_5", "qwen3", "gemma4_v5", "glm4moe"])
def test_text_beside_a_call_and_its_arguments_reach_the_model(family: str, tmp_path: Path) -> None:
    """OpenAI's clients send arguments as text, which some templates would encode again."""
    text = prompt(tmp_path, family, None, {"messages": TALK, "tools": [TOOL]})
    for said in ("Let me look.", "22 degrees", "Rome", "city", "Is it raining there?"):
        assert said in text, said
    assert text.count("get_weather") >= 2 and '\\"city' not in text


LOST: dict[str, Any] = {
    "the tool get_weather": {"messages": [USER], "tools": [TOOL]},
    "the call get_weather in message 2": {"messages": TALK},
    "the text of message 2 (narrator)": {
        "messages": [USER, {"role": "narrator", "content": "Later."}]
    },
    "the text of message 1 (tool)": {"messages": [TALK[2]]},
}
USERS = (
    "{% for m in messages %}{% if m.role in ('user', 'assistant') %}{{ m.role }}: {{ m.content }}\n"
    "{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("lost", LOST)
def test_what_the_template_does_not_write_is_refused(lost: str, tmp_path: Path) -> None:
    with pytest.raises(Refused) as caught:
        prompt(tmp_path, "qwen3", USERS, dict(LOST[lost]))
    assert f"does not write {lost}; remove it" in str(caught.value)


def test_a_content_in_parts_is_given_as_the_template_reads_it(tmp_path: Path) -> None:
    in_parts = USERS.replace("{{ m.content }}", "{% for p in m.content %}{{ p.text }}{% endfor %}")
    body: Any = {"messages": [USER | {"content": [{"type": "text", "text": "One?"}]}]}
    assert prompt(tmp_path, "qwen3", in_parts, body) == "user: One?"
