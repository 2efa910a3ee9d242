"""`export`: converts a checkpoint to a Hugging Face folder, and verifies its logits.

One process reads the full checkpoint of any strategy into the model that the configuration builds.
`save_pretrained` writes the folder, because a model's layout in memory differs from the one on disk
(experts are stacked in memory). The folder is loaded again and must give bit-identical logits.
"""

from __future__ import annotations

import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.cli import LightningArgumentParser
from torch import nn

from ...checkpoint.commit import agreed
from ...cli.fit import WithoutTrainer
from ...cli.run import check_checkpoint, newest_checkpoint
from ...errors import InputError, reason
from ...project import Project
from .adapter import largest_difference, logits, merged, write_adapter
from .trained import trained


def main(argv: list[str], project: Project) -> None:
    """Writes the folder that `--output` names.

    Raises:
        InputError: the checkpoint cannot be read or is another model's, the folder is not empty, or
            the disk is full.
    """
    cli = Export(project, argv[1:], run=False, verb=argv[0])
    settings = cli.config
    output = Path(settings.output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        given = f"--output {str(output)!r}"
        raise InputError(f"{given} exists and is not an empty folder; give another")
    path = chosen_checkpoint(cli)
    model = trained(cli, path).model
    dtype, has_adapter = getattr(torch, settings.dtype), bool(getattr(cli.model, "adapter", None))
    with written_at_once(output) as folder:
        if has_adapter and settings.adapter == "peft":
            proof = write_adapter(cli.model, cli.datamodule, dtype, folder)
        elif hasattr(model, "save_pretrained"):
            proof = write_pretrained(merged(model) if has_adapter else model, dtype, folder)
        else:
            proof = write_weights(model, dtype, folder)
        if tokenizer := getattr(cli.datamodule, "text_tokenizer", None):
            tokenizer.save_pretrained(folder)
    print(f"{path}\n  -> {output}  {settings.dtype}, {proof}")


class Export(WithoutTrainer):
    """Adds four keys to those of fit."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        checkpoint = "A checkpoint of any strategy; or `last` or `best` of the newest run."
        parser.add_argument("--checkpoint", required=True, help=checkpoint)
        output = "The folder to write; it must be new or empty."
        parser.add_argument("--output", required=True, help=output)
        dtypes, dtype = ["float32", "bfloat16"], "Type of the weights in the folder."
        parser.add_argument("--dtype", choices=dtypes, default="float32", help=dtype)
        forms, form = ["peft", "merged"], "With model.adapter: peft's folder, or merged weights."
        parser.add_argument("--adapter", choices=forms, default="peft", help=form)


def chosen_checkpoint(cli: WithoutTrainer) -> Path:
    """Returns the verified checkpoint that `--checkpoint` names.

    Raises:
        InputError: it does not exist, or it is damaged.
    """
    settings: Any = cli.config
    path = Path(settings.checkpoint)
    if settings.checkpoint in ("last", "best"):
        _, path = newest_checkpoint(settings.checkpoint, cli.unfilled)
    check_checkpoint(path, "--checkpoint")
    return agreed(path)


@contextmanager
def written_at_once(output: Path) -> Generator[Path]:
    """Yields a temporary folder, which is renamed to `output` on success and removed otherwise.

    Raises:
        InputError: the disk is full, or the folder cannot be written.
    """
    folder = output.with_name(f".{output.name}.unfinished")
    shutil.rmtree(folder, ignore_errors=True)  # left by a killed export
    try:
        folder.mkdir(parents=True)
        yield folder
        folder.rename(output)
    except OSError as error:
        raise InputError(f"--output {str(output)!r} cannot be written: {reason(error)}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_pretrained(model: Any, dtype: torch.dtype, folder: Path) -> str:
    """Writes a transformers model and compares its logits; returns the result in words.

    Raises:
        InputError: the written model gives other logits.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()

    def load() -> Any:
        options = {"dtype": dtype, "trust_remote_code": False}
        return AutoModelForCausalLM.from_pretrained(folder, **options).eval()

    trained = logits(model)
    model.save_pretrained(folder)
    if dtype != torch.float32:  # transformers knows which weights must stay in float32
        model = load()
        model.save_pretrained(folder)
    difference = largest_difference(logits(load()), logits(model))
    if difference != 0:
        raise InputError(
            f"the folder's logits differ from the model's by up to {difference:.1e}:"
            f" save_pretrained of {type(model).__name__} does not save all that its forward uses;"
            " see build_model in module.py"
        )
    rounded = largest_difference(logits(model), trained)
    cause = ", by rounding" if rounded else ""
    return f"largest difference to the trained model's logits {rounded:g}{cause}"


def write_weights(model: nn.Module, dtype: torch.dtype, folder: Path) -> str:
    """Writes a model that is not from transformers, as tensors by name."""
    from safetensors.torch import load_model, save_model

    save_model(model.to(dtype), str(folder / "model.safetensors"))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    load_model(model, folder / "model.safetensors")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    name = type(model).__name__
    return f"model.safetensors only: {name} is not from transformers; see build_model in module.py"
