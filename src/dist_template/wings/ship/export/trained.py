"""Loads a model with its tokenizer in one process: what a run trained, or a Hugging Face folder."""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from ....checkpoint.formats import load_full
from ....cli.config_file import read
from ....cli.fit import WithoutTrainer
from ....cli.run import verified_checkpoint
from ....errors import InputError, reason, require
from ....foreign import size_of
from ....hub import check_reachable, why_not_loaded
from ....observe.history.run import RunFile
from ....progress import running
from ....project import Project
from ....text.model.causal_lm import auto_class
from ....text.model.safetensors_files import larger_than_memory
from ....text.tokenizers import read_tokenizer
from ...diagnose.command import newest
from ...store.hooks import local_copy

OF_FIT = ("trainer", "ckpt_path", "weights_only")  # keys that one process without a Trainer ignores
GRAPH = "model.onnx"  # of a folder of export --to onnx
FILES = ("config.json", "adapter_config.json")  # of folders of transformers and peft


@dataclass
class Trained:
    """A model in evaluation mode on the CPU, and its tokenizer if there is one.

    `path` is the checkpoint, the folder, or the name on the hub. The others are None for a folder:
    the run's folder, the LightningModule without a Trainer, and the prepared data module. Where the
    model is on the meta device, `stored` are its weights in the checkpoint's files."""

    model: Any
    tokenizer: Any
    path: str
    run: Path | None = None
    module: Any = None
    data: Any = None
    stored: dict[str, Any] = field(default_factory=dict)


def load_trained(name: str, project: Project) -> Trained:
    """Loads MODEL, an argument: the folder of a run, whose newest checkpoint is read; a checkpoint
    in one; a folder of `export` or of transformers; or a name on the Hugging Face hub. Raises
    InputError for anything else."""
    if is_pretrained(name):
        return from_folder(name, "MODEL")
    flags, checkpoint, run = of_run(name, project, "MODEL")
    path = verified_checkpoint(checkpoint, "MODEL")
    return trained(WithoutTrainer(project, flags, run=False), path, run)


def is_pretrained(name: str) -> bool:
    """Whether `name` is a folder of transformers or peft, or may be a name on the hub."""
    path = Path(name)
    if any((path / file).is_file() for file in FILES):
        return True
    # A name on the hub has an owner; runs/misspelt is none, where there is a folder runs.
    return not path.exists() and name.count("/") == 1 and not path.parent.exists()


def of_run(name: str, project: Project, key: str) -> tuple[list[str], Path, Path]:
    """Returns the flags with the config.yaml of the run that `name` names or is in, the checkpoint
    or the folder of all, and the run's folder."""
    path = Path(local_copy(name, key))
    if not path.exists():
        allowed = "the folder of a run, a checkpoint, or a Hugging Face folder"
        raise InputError(f"{key} {name!r} does not exist: give {allowed}")
    try:
        run, is_checkpoint = newest(path), False
    except InputError as no_run:
        inside, is_checkpoint = run_of(path), True
        if inside is None and path.is_dir():
            raise
        if inside is None:
            raise InputError(
                f"{key} {name!r} is not in a run's folder, with its {RunFile.CONFIG}"
            ) from no_run
        run = inside
    try:
        size_of(run / RunFile.CONFIG)
    except OSError as error:
        raise InputError(f"{key} {name!r}: {reason(error)}; restore it") from error
    keys = read(str(run / RunFile.CONFIG))
    for section in OF_FIT:
        keys.pop(section, None)
    if isinstance(keys.get("run"), dict):
        # The address is that of whoever wrote the run; who uses the run gives another.
        keys["run"].pop("store", None)
    # jsonargparse reads a mapping in braces as the configuration, not as the name of a file.
    flags = ["--config", yaml.safe_dump(keys, default_flow_style=True)]
    if not is_checkpoint:
        folder = None
        if isinstance(keys.get("last_checkpoint"), dict):
            folder = keys["last_checkpoint"].get("dirpath")
        if not isinstance(folder, str):
            raise InputError(
                f"{key} {name!r}: {run / RunFile.CONFIG} has no last_checkpoint.dirpath; give a"
                " checkpoint of the run"
            )
        path = Path(folder.replace("{run}", str(run)))
    return flags, path, run


def run_of(checkpoint: Path) -> Path | None:
    """Returns the folder of the run that wrote a checkpoint."""
    for folder in checkpoint.absolute().parents:
        if (folder / RunFile.CONFIG).is_file():
            return folder
    return None


def trained(
    cli: WithoutTrainer, path: Path, run: Path | None = None, may_be_stored: bool = False
) -> Trained:
    """Returns the model of a configuration with the weights of the verified checkpoint `path`; with
    `may_be_stored`, on the meta device if it does not fit in memory. Raises InputError if the
    checkpoint is another model's."""
    module, data = cli.model, cli.datamodule
    if not hasattr(module, "build_model"):
        raise InputError(
            f"{type(module).__name__} builds no language model (it has no build_model), and serve,"
            " promote and --tasks are for those: `export` writes its weights, `export --to onnx`"
            " its forward"
        )
    if hasattr(data, "require"):
        data.require()
    torch.manual_seed(torch.initial_seed())
    build = partial(getattr(module, "build_network", module.build_model), data)
    model: Any = larger_than_memory(build) if may_be_stored else None
    if model is None:
        with running(f"building the model of {path.name}"):
            # the base of adapters may be from scratch
            model = getattr(module, "build_on_host", module.build_model)(data)
    module.model = model
    stored = {}
    for name, tensor in load_full(path, module).items():
        stored[name.removeprefix("model.")] = tensor
    tokenizer = getattr(data, "text_tokenizer", None)
    return Trained(model.eval(), tokenizer, str(path), run, module, data, stored)


def from_folder(name: str, key: str) -> Trained:
    """Returns the model and tokenizer of a folder of `export` or transformers, or of the hub."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if (Path(name) / GRAPH).is_file():
        raise InputError(f"{key} {name!r} has an ONNX graph: give a folder of export --to hf")
    kind: Any = AutoModelForCausalLM
    is_adapter = (Path(name) / FILES[1]).is_file()
    if is_adapter:
        require("peft", f"{key} {name!r}", extra="adapters")
        from peft import PeftConfig

        if PeftConfig.from_pretrained(name).task_type == "SEQ_CLS":
            raise InputError(
                f"{key} {name!r} has adapters of a reward model: give a folder of export --adapter"
                " merged"
            )
    check_reachable(name)
    try:
        if not is_adapter:
            kind = auto_class(AutoConfig.from_pretrained(name, trust_remote_code=False))
        with running(f"loading {name}"):
            model = kind.from_pretrained(name, dtype="auto", trust_remote_code=False).eval()
            tokenizer = read_tokenizer(name)
    except Exception as error:  # OSError, ValueError, KeyError, SafetensorError and others
        why = why_not_loaded(name, error)
        raise InputError(f"{key} {name!r} cannot be loaded: {why}") from error
    if tokenizer is None:
        raise InputError(
            f"{key} {name!r} has no files of a tokenizer: give a folder with a tokenizer.json"
        )
    return Trained(model, tokenizer, name)
