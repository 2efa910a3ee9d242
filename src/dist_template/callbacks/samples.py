"""Generates a text sample after each validation."""

from typing import Any

import lightning as L
import torch
from lightning.pytorch import Callback

from ..model.any_module import data_of
from ..ranges import Folder
from ..run_callback import loggers_of
from .console import only_shows

CONVERSATIONS = 2  # of the validation split


class Samples(Callback):
    """Continues the first of `data.prompts` and appends the text to `samples.txt`.

    For conversations, it answers two held-out ones, next to the reference answers. Every rank
    generates, because a sharded model needs all ranks; rank 0 writes.

    Args:
        folder: The folder of `samples.txt`. null turns samples off."""

    def __init__(self, folder: Folder | None = "{run}") -> None:
        self.folder = folder

    @only_shows
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        data: Any = data_of(trainer)
        prompts = getattr(data, "prompts", [])[:1]  # only datamodules of text have some
        makes_text = not getattr(getattr(pl_module, "active_objective", None), "no_text", "")
        can_generate = prompts and hasattr(pl_module, "generate") and makes_text
        if trainer.sanity_checking or not self.folder or not can_generate:
            return
        decode = data.text_tokenizer.decode
        encode = getattr(data, "encode_prompt", data.text_tokenizer.encode)
        held_out = data.held_out(CONVERSATIONS) if hasattr(data, "held_out") else []
        generate: Any = pl_module.generate
        texts = []
        for ids, reference in held_out or [(encode(prompts[0]), None)]:
            with trainer.precision_plugin.forward_context():  # Lightning opens it for steps alone
                tokens = generate(torch.tensor([ids], device=pl_module.device))
            tokens = tokens[0].tolist()
            text = decode(tokens)
            if reference is not None:
                answer = f"[answer] {decode(tokens[len(ids) :])}"
                text = f"[prompt] {decode(ids)}\n{answer}\n[reference] {decode(reference)}"
            texts.append(text.rstrip())
        text = "\n".join(texts)
        if not trainer.is_global_zero:
            return
        with open(f"{self.folder}/samples.txt", "a", encoding="utf-8") as file:
            file.write(f"--- step {trainer.global_step}\n{text}\n")
        for logger in loggers_of(trainer):
            logger.log_sample(text, trainer.global_step)
