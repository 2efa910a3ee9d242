"""A mask of the assistant's tokens that is all zero: transformers, then the labels of this
project."""

from __future__ import annotations

import json

from shared import DATA, FOLDER, LLAMA, show
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dist_template import Project
from dist_template.testing import batches, build

TEMPLATE = (  # no {% generation %}: most published templates have none
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MESSAGES = [{"role": "user", "content": "Two and two?"}, {"role": "assistant", "content": "Four."}]


def write_tokenizer() -> PreTrainedTokenizerFast:
    letters = {
        letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    backend = Tokenizer(models.BPE(vocab=letters, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", chat_template=TEMPLATE
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.save_pretrained(FOLDER / "tokenizer")
    return tokenizer


if __name__ == "__main__":
    encoded = write_tokenizer().apply_chat_template(
        MESSAGES, return_dict=True, return_assistant_tokens_mask=True
    )
    ones = sum(encoded["assistant_masks"])
    answers = [{"role": "assistant", "content": f"Four, {number}."} for number in range(200)]
    chats = [json.dumps({"messages": [MESSAGES[0], answer]}) for answer in answers]
    (FOLDER / "chats.jsonl").write_text("\n".join(chats))
    source = [
        "--data.source=Chat",
        f"--data.source.paths=[{FOLDER}/chats.jsonl]",
        "--data.tokenizer=Pretrained",
    ]
    rest = [flag for flag in DATA if "source" not in flag and "tokenizer" not in flag]
    flags = [
        *source,
        f"--data.tokenizer.path={FOLDER}/tokenizer",
        *rest,
        f"--model.architecture={LLAMA}",
    ]
    data = build(Project("trainer"), *flags)[1]
    labels = batches(data, 1)[0]["labels"][0]
    text = data.text_tokenizer.decode(labels[labels != -100])
    show(
        f"{ones} of {len(encoded['input_ids'])} tokens count",
        f"these count: {text!r}",
        not ones and "Four" in text,
    )
