"""`export`: converts a checkpoint to a folder for transformers or peft.

One process reads the full checkpoint of any strategy into the model that the configuration builds.
`save_pretrained` writes the folder, because a model's layout in memory differs from the one on disk
(experts are stacked in memory). The folder is loaded again and compared (gate.py).
"""

import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.cli import LightningArgumentParser
from safetensors.torch import save_model

from ....cli.fit import WithoutTrainer
from ....cli.run import verified_checkpoint
from ....errors import InputError, reason
from ....project import Project
from ....text.model.causal_lm import auto_class
from .adapter import merge, write_adapter
from .card import write_card
from .gate import Gate
from .push import check_name, push
from .trained import Trained, from_folder, of_run, run_of, trained

DTYPES = ("float32", "bfloat16", "float16")


def main(argv: list[str], project: Project) -> None:
    """Writes the folder that `--output` names.

    Raises InputError if the checkpoint cannot be read or is another model's, the folder is not empty, the disk is
    full, what was written is not what was trained, or the hub refuses it."""
    verb, *flags = argv
    if flags and not flags[0].startswith("-"):  # export RUN, or a checkpoint in one
        config, checkpoint, _ = of_run(flags[0], project, verb)
        flags = [*config, f"--checkpoint={checkpoint}", *flags[1:]]
    cli = Export(project, flags, run=False, verb=verb)
    settings, output = cli.config, Path(cli.config.output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InputError(f"--output {str(output)!r} exists and is not an empty folder; give another")
    if settings.push:
        check_name(settings.push)  # before minutes of work
    path = verified_checkpoint(settings.checkpoint, "--checkpoint", cli.unfilled)
    found = trained(cli, path, run_of(path))
    with written_at_once(output) as folder:
        form, proof = write(found, settings.adapter == "merged", settings.dtype, folder)
        write_card(folder, found, form, proof, settings.license)
    print(f"{path}\n  -> {output}  {form}, {proof}")
    if settings.push:
        print(f"  -> {push(output, settings.push)}")


class Export(WithoutTrainer):
    """Adds six keys to the keys of fit."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        add, checkpoint = parser.add_argument, "Of any strategy; or `last` or `best` of the newest run."
        add("--checkpoint", required=True, help=checkpoint)
        add("--output", required=True, help="The folder to write; it must be new or empty.")
        add("--dtype", choices=DTYPES, default=DTYPES[0], help="Type of the weights in the folder.")
        add("--adapter", choices=["peft", "merged"], default="peft", help="peft's folder, or merged into the base.")
        add("--license", default="unknown", help="Licence in the model card, as the hub names it.")
        add("--push", metavar="NAME", help="Repository of the hub, as user/name, that the folder is uploaded to.")


@contextmanager
def written_at_once(output: Path) -> Generator[Path]:
    """Yields a temporary folder, which is renamed to `output` on success and removed otherwise. Raises InputError if
    the disk is full, or the folder cannot be written."""
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


def write(found: Trained, merged: bool, dtype: str, folder: Path) -> tuple[str, str]:
    """Writes model and tokenizer into `folder`; returns in words its form and how it was verified."""
    model, has_adapter = found.model, bool(getattr(found.module, "adapter", None))
    if found.tokenizer:
        found.tokenizer.save_pretrained(folder)
    if not hasattr(model, "save_pretrained"):
        save_model(model.to(getattr(torch, dtype)), str(folder / "model.safetensors"))
        why = f"{type(model).__name__} is not from transformers; see build_model in module.py"
        return f"safetensors, {dtype}", f"model.safetensors only: {why}"
    gate = Gate(found)
    if has_adapter and not merged:
        adapted = write_adapter(found.module, found.data, getattr(torch, dtype), folder)
        return f"peft, {dtype}", gate.check(Trained(adapted, found.tokenizer, str(folder)), dtype)
    if has_adapter:
        merge(model)
    write_pretrained(model, dtype, folder)
    del model
    found.model = found.module.model = None  # one model in memory at a time
    return f"hf, {dtype}", gate.check(from_folder(str(folder), "--output"), dtype)


def write_pretrained(model: Any, dtype: str, folder: Path) -> None:
    """Writes a transformers model as safetensors."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    model.save_pretrained(folder)
    if dtype != "float32":  # transformers knows which weights must stay in float32
        model = auto_class(model.config).from_pretrained(folder, dtype=dtype, trust_remote_code=False)
        model.save_pretrained(folder)
