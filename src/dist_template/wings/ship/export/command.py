"""`export`: converts a checkpoint to a folder for transformers, peft or onnxruntime.

One process reads the full checkpoint of any strategy into the model that the configuration builds.
`save_pretrained` writes the folder, because a model's layout in memory differs from the one on disk
(experts are stacked in memory). The folder is loaded again and compared (gate.py).
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

from ....cli.fit import WithoutTrainer
from ....cli.run import verified_checkpoint
from ....errors import InputError, reason, require
from ....project import Project
from .adapter import merge, write_adapter
from .card import write_card
from .gate import Gate
from .onnx import PACKAGES, write_onnx
from .trained import Trained, from_folder, of_run, run_of, trained

DTYPES = {"hf": "float32 bfloat16 float16", "onnx": "float32 float16 int8"}
DTYPES["peft"] = DTYPES["hf"]
ALL = ["float32", "bfloat16", "float16", "int8"]


def main(argv: list[str], project: Project) -> None:
    """Writes the folder that `--output` names.

    Raises:
        InputError: the checkpoint cannot be read or is another model's, the folder is not empty,
            the disk is full, or what was written is not what was trained.
    """
    verb, *flags = argv
    if flags and not flags[0].startswith("-"):  # export RUN, or a checkpoint in one
        config, checkpoint, _ = of_run(flags[0], project, verb)
        flags = [*config, f"--checkpoint={checkpoint}", *flags[1:]]
    cli = Export(project, flags, run=False, verb=verb)
    settings, output = cli.config, Path(cli.config.output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        given = f"--output {str(output)!r}"
        raise InputError(f"{given} exists and is not an empty folder; give another")
    to = chosen_format(cli.model, settings)
    path = verified_checkpoint(settings.checkpoint, "--checkpoint", cli.unfilled)
    found = trained(cli, path, run_of(path))
    with written_at_once(output) as folder:
        proof = write(found, to, settings.dtype, folder)
        write_card(folder, found, f"{to}, {settings.dtype}", proof, settings.license)
    print(f"{path}\n  -> {output}  {to}, {settings.dtype}, {proof}")


class Export(WithoutTrainer):
    """Adds six keys to the keys of fit."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        add, to, forms = parser.add_argument, ["auto", *DTYPES], ["peft", "merged"]
        checkpoint = "Of any strategy; or `last` or `best` of the newest run."
        add("--checkpoint", required=True, help=checkpoint)
        add("--output", required=True, help="The folder to write; it must be new or empty.")
        add("--to", choices=to, default="auto", help="Format. auto: hf, or what --adapter says.")
        add("--dtype", choices=ALL, default=ALL[0], help="Type of the weights in the folder.")
        adapter = "model.adapter as peft's folder, or merged."
        add("--adapter", choices=forms, default="peft", help=adapter)
        add("--license", default="unknown", help="Licence in the model card, as the hub names it.")


def chosen_format(module: Any, settings: Any) -> str:
    """Returns `--to` or its default; refuses what does not go together, or a missing package."""
    has_adapter, to = bool(getattr(module, "adapter", None)), settings.to
    if to == "auto":
        to = "peft" if has_adapter and settings.adapter == "peft" else "hf"
    if to == "peft" and not has_adapter:
        raise InputError("--to peft writes adapters, and model.adapter is null: give hf or onnx")
    if settings.adapter == "merged" and not has_adapter:
        raise InputError("--adapter merged: model.adapter is null, so omit --adapter")
    if settings.dtype not in DTYPES[to].split():
        raise InputError(f"--dtype {settings.dtype} is not possible with --to {to}: give {DTYPES[to]}")
    for package in PACKAGES if to == "onnx" else ():
        require(package, "--to onnx")
    return to


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
        for path in filter(Path.is_file, folder.rglob("*")):
            # safetensors makes files that no other user can read, such as a server's
            path.chmod(0o666 & folder.stat().st_mode)
        folder.rename(output)
    except Exception as error:
        # safetensors and tokenizers write in Rust, and raise errors of their own
        if not (isinstance(error, OSError) or "(os error " in str(error)):
            raise
        raise InputError(f"--output {str(output)!r} cannot be written: {reason(error)}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write(found: Trained, to: str, dtype: str, folder: Path) -> str:
    """Writes model and tokenizer into `folder`; returns in words how they were verified."""
    if found.tokenizer:
        found.tokenizer.save_pretrained(folder)
    if not hasattr(found.model, "save_pretrained"):
        return write_weights(found.model, to, dtype, folder)
    gate = Gate(found)
    if to == "peft":
        adapted = write_adapter(found.module, found.data, getattr(torch, dtype), folder)
        return gate.check(Trained(adapted, found.tokenizer, str(folder)), dtype)
    if getattr(found.module, "adapter", None):
        merge(found.model)
    (write_onnx if to == "onnx" else write_pretrained)(found.model, dtype, folder)
    found.model = found.module.model = None  # one model in memory at a time
    return gate.check(from_folder(str(folder), "--output"), dtype)


def write_pretrained(model: Any, dtype: str, folder: Path) -> None:
    """Writes a transformers model as safetensors."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model.save_pretrained(folder)
    if dtype != "float32":  # transformers knows which weights must stay in float32
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=False)
        model.save_pretrained(folder)


def write_weights(model: nn.Module, to: str, dtype: str, folder: Path) -> str:
    """Writes a model that is not from transformers, as tensors by name."""
    from safetensors.torch import save_model

    name = type(model).__name__
    if to != "hf":
        raise InputError(f"--to {to}: {name} is not from transformers; give hf")
    save_model(model.to(getattr(torch, dtype)), str(folder / "model.safetensors"))
    return f"model.safetensors only: {name} is not from transformers; see build_model in module.py"
