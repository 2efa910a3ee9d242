"""`export`: converts a checkpoint to a folder for transformers or peft, or to ONNX.

One process reads a checkpoint of any strategy into the model that the configuration builds, if it
fits in memory. The weights are written a few at a time, in transformers' layout on disk, which
differs from the one in memory (experts are stacked there). The folder is read again and compared
(gate.py)."""

import re
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
from ....progress import running
from ....project import Project, program
from ....text.model.safetensors_files import write_weights as write_pretrained
from ....text.objectives.keys import kinds
from ....text.objectives.objective import objective_for
from . import plain_module
from .adapter import merge, write_adapter
from .card import write_card
from .gate import SHAPES, Gate
from .onnx import DTYPES as DTYPES_OF_ONNX
from .onnx import OnnxModel, require_packages, write_onnx
from .trained import Trained, from_folder, of_run, run_of, trained

FORMATS = ("hf", "onnx", "safetensors")
DTYPES = ("float32", "bfloat16", "float16", "int8")
DTYPES_OF = {"hf": DTYPES[:3], "onnx": DTYPES_OF_ONNX, "safetensors": DTYPES[:3]}
SAVED_MODEL = (
    "--to {}: TensorFlow's SavedModel is not written: give --to onnx, or --to hf and make a program"
    " that runs without the model's code of the folder (`docs evaluate` has the line)"
)


def main(argv: list[str], project: Project) -> None:
    """Writes the folder that `--output` names. Raises InputError if the checkpoint cannot be read
    or is another model's, the folder is not empty, the disk is full, or what was written is not
    what was trained."""
    verb, *flags = argv
    if flags and not flags[0].startswith("-"):  # export RUN, or a checkpoint in one
        config, checkpoint, _ = of_run(flags[0], project, verb)
        flags = [*config, f"--checkpoint={checkpoint}", *flags[1:]]
    cli = Export(project, flags, run=False, verb=verb)
    settings, output = cli.config, Path(cli.config.output)
    builds = hasattr(cli.model, "build_model")
    if settings.to is None:
        settings.to = "hf" if builds else "safetensors"
    _check_format(settings.to, settings.dtype)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InputError(
            f"--output {str(output)!r} exists and is not an empty folder; give another"
        )
    if not re.fullmatch(r"[1-9]\d*[KMGT]B", settings.max_shard_size):
        raise InputError(
            f"--max_shard_size is {settings.max_shard_size!r}: give a number with KB, MB, GB or TB"
        )
    path = verified_checkpoint(settings.checkpoint, "--checkpoint", cli.unfilled)
    if settings.to == "onnx" and plain_module.is_plain(cli.model):
        return _write_plain(cli, path, output)
    if settings.to == "safetensors":
        if not builds:
            return _write_weights(cli, path, output)
        if not plain_module.is_plain(cli.model):
            raise InputError(
                "--to safetensors is for modules that build no model of transformers: --to hf"
                " writes safetensors with the files that transformers reads"
            )
        settings.to = "hf"  # writes the weights alone of such a model
    if settings.to == "hf" and not builds:
        raise InputError(
            f"--to hf is for language models, and {type(cli.model).__name__} builds none: give"
            " --to safetensors for its weights, or --to onnx for its forward"
        )
    may_be_stored = settings.to == "hf" and not getattr(cli.model, "adapter", None)
    found = trained(cli, path, run_of(path), may_be_stored)
    with written_at_once(output) as folder:
        objective = objective_for(cli.model, cli.datamodule)
        part = None if objective is None else objective.part
        if part is not None and not (settings[part.name] and settings.to == "hf"):
            leave_out(part.name, found)
        if settings.to == "onnx":
            form, proof = write_graph(found, settings.dtype, folder)
        else:
            merged, size = settings.adapter == "merged", settings.max_shard_size
            form, proof = write(found, merged, settings.dtype, folder, size)
        write_card(folder, found, form, proof, settings.license)
    print(f"{path}\n  -> {output}  {form}, {proof}")


class Export(WithoutTrainer):
    """Adds its own keys to the keys of fit."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        parser.usage = (
            f"{program('export')} RUN --output FOLDER [--KEY VALUE]…\n\n"
            "RUN: a run's folder, runs/<name>/<id>, or a checkpoint in one. In place of it:"
            " --config FILE… --checkpoint CHECKPOINT"
        )
        add, checkpoint = (
            parser.add_argument,
            "Of any strategy; or `last` or `best` of the newest run.",
        )
        add("--checkpoint", required=True, help=checkpoint)
        add("--output", required=True, help="The folder to write; it must be new or empty.")
        to = (
            "hf: safetensors for transformers, or peft's. onnx: a graph for onnxruntime."
            " safetensors: the weights of any other module. Default: hf, or else safetensors."
        )
        add("--to", default=None, help=to)
        dtype = "Type of the weights in the folder; int8 with --to onnx alone."
        add("--dtype", choices=DTYPES, default=DTYPES[0], help=dtype)
        add(
            "--adapter",
            choices=["peft", "merged"],
            default="peft",
            help="peft's folder, or merged into the base. --to onnx merges.",
        )
        for kind in kinds():
            if kind.part is not None:
                add(f"--{kind.part.name}", type=bool, default=True, help=kind.part.help)
        add(
            "--max_shard_size",
            default="50GB",
            help="Largest file of weights, such as 5GB; default: transformers'.",
        )
        add("--license", default="unknown", help="Licence in the model card, as the hub names it.")


def leave_out(name: str, found: Trained) -> None:
    """Removes a submodule from a trained network, and its weights from those that are stored."""
    delattr(found.model, name)
    kept = {}
    for key, tensor in found.stored.items():
        if not key.startswith(f"{name}."):
            kept[key] = tensor
    found.stored = kept


@contextmanager
def written_at_once(output: Path) -> Generator[Path]:
    """Yields a temporary folder, which is renamed to `output` on success and removed otherwise.
    Raises InputError if the disk is full, or the folder cannot be written."""
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


def write_graph(found: Trained, dtype: str, folder: Path) -> tuple[str, str]:
    """Writes an ONNX graph and the tokenizer into `folder`; returns in words its form and how it
    was verified."""
    model, name = found.model, type(found.model).__name__
    if not hasattr(model, "save_pretrained"):
        raise InputError(f"--to onnx: {name} of build_model is not from transformers: give --to hf")
    if found.tokenizer:
        found.tokenizer.save_pretrained(folder)
    gate = Gate(found, SHAPES)
    if getattr(found.module, "adapter", None):
        merge(model)
    with running(f"export: {name} to ONNX"):
        write_onnx(model, dtype, folder)
    del model
    found.model = found.module.model = None  # one model in memory at a time
    try:
        with running("export: loading the graph"):
            graph = _of_graph(folder)
        proof = gate.check(graph, dtype)
    except RuntimeError as error:  # onnxruntime's errors derive from it, or are of pybind11
        raise InputError(
            f"--to onnx: the graph of {name} does not run in onnxruntime"
            f" ({reason(error)}): give --to hf"
        ) from error
    form = f"onnx, {dtype}" if graph.model.cache else f"onnx, {dtype}, without a cache"
    return form, proof


def _write_plain(cli: WithoutTrainer, checkpoint: Path, output: Path) -> None:
    """Writes the graph of a LightningModule that builds no model of transformers, and its card."""
    module, data, settings = cli.model, cli.datamodule, cli.config
    if settings.dtype != "float32":
        raise InputError(
            f"--dtype {settings.dtype} is for models of transformers: a plain module keeps its"
            " types; give --dtype float32"
        )
    with written_at_once(output) as folder:
        exported = plain_module.write_plain(module, data, checkpoint, folder)
        found = Trained(module, None, str(checkpoint), run_of(checkpoint), module, data)
        code = plain_module.example(exported)
        write_card(folder, found, "onnx", exported.verified, settings.license, code)
    print(f"{checkpoint}\n  -> {output}  onnx, {exported.verified}")


def _write_weights(cli: WithoutTrainer, checkpoint: Path, output: Path) -> None:
    """Writes the weights of a LightningModule that builds no model, and a card with the lines that
    load them."""
    module, data, settings = cli.model, cli.datamodule, cli.config
    with written_at_once(output) as folder:
        proof = plain_module.write_weights(module, checkpoint, settings.dtype, folder)
        found = Trained(module, None, str(checkpoint), run_of(checkpoint), module, data)
        form, code = f"safetensors, {settings.dtype}", plain_module.loading(module)
        write_card(folder, found, form, proof, settings.license, code)
    print(f"{checkpoint}\n  -> {output}  {form}, {proof}")


def _of_graph(folder: Path) -> Trained:
    from transformers import AutoTokenizer

    tokenizer = None
    if (folder / "tokenizer_config.json").is_file():
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    return Trained(OnnxModel(folder), tokenizer, str(folder))


def _check_format(to: Any, dtype: str) -> None:
    """Raises InputError if the format or its type is none, or a package of it is not installed."""
    if re.fullmatch("saved_?model|tf|tensorflow", to, re.IGNORECASE):
        raise InputError(SAVED_MODEL.format(to))
    if to not in FORMATS:
        raise InputError(f"--to is {to!r}: give {' or '.join(FORMATS)}")
    if dtype not in DTYPES_OF[to]:
        allowed = ", ".join(DTYPES_OF[to])
        raise InputError(f"--dtype {dtype} is not possible with --to {to}: give {allowed}")
    if to == "onnx":
        require_packages()


def write(
    found: Trained, merged: bool, dtype: str, folder: Path, size: str = "50GB"
) -> tuple[str, str]:
    """Writes model and tokenizer into `folder`; returns in words its form and how it was
    verified."""
    model, has_adapter = found.model, bool(getattr(found.module, "adapter", None))
    if found.tokenizer:
        found.tokenizer.save_pretrained(folder)
    if not hasattr(model, "save_pretrained"):
        with running("export: writing model.safetensors"):
            save_model(model.to(getattr(torch, dtype)), str(folder / "model.safetensors"))
        why = f"{type(model).__name__} is not from transformers; see build_model in module.py"
        return f"safetensors, {dtype}", f"model.safetensors only: {why}"
    gate = Gate(found)
    if has_adapter and not merged:
        with running("export: writing adapters, and loading them on their base"):
            adapted = write_adapter(found.module, found.data, getattr(torch, dtype), folder)
        return f"peft, {dtype}", gate.check(Trained(adapted, found.tokenizer, str(folder)), dtype)
    if has_adapter:
        with running("export: merging adapters"):
            merge(model)
    write_pretrained(
        model, dict(found.stored or model.state_dict()), getattr(torch, dtype), size, folder
    )
    if found.stored:
        return f"hf, {dtype}", gate.check_weights(found, dtype, folder)
    return f"hf, {dtype}", gate.check(from_folder(str(folder), "--output"), dtype)
