"""Loads a model with its tokenizer in one process: what a run trained, or a Hugging Face folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from ...checkpoint.commit import agreed
from ...checkpoint.formats import format_of, read_full
from ...checkpoint.frozen import exclude_frozen
from ...checkpoint.manifest import meant
from ...cli.config_file import read, with_classes_of_the_library
from ...cli.fit import WithoutTrainer
from ...cli.run import check_checkpoint, fill_placeholders
from ...errors import InputError, reason, require
from ...observe.history.run import CONFIG
from ...project import Project
from ..diagnose import newest

OF_FIT = ("trainer", "ckpt_path", "weights_only")  # keys that one process without a Trainer ignores
FILES = ("config.json", "adapter_config.json")  # of folders of transformers and peft


@dataclass
class Trained:
    """A model in evaluation mode, on the CPU.

    Args:
        model: The network: of transformers, or what the module's `build_model` returns.
        tokenizer: None if neither the data module nor the folder has one.
        path: The verified checkpoint, the folder, or the name on the hub.
        run: The run's folder; None for a folder of transformers or peft.
        module: The LightningModule, without a Trainer; None likewise.
        data: The prepared data module, with the held-out splits; None likewise.
    """

    model: Any
    tokenizer: Any
    path: str
    run: Path | None = None
    module: Any = None
    data: Any = None


def load_trained(name: str, project: Project, key: str = "MODEL") -> Trained:
    """Loads what `name` names: the folder of a run, whose newest checkpoint is read; a checkpoint
    in one; a Hugging Face folder; or a name on the Hugging Face hub.

    Args:
        name: As the user gave it.
        project: The user's project, whose classes the run's config.yaml names.
        key: The flag or argument to name in an error.

    Raises:
        InputError: it is none of them, or it cannot be loaded.
    """
    path = Path(name)
    is_on_hub = not path.exists() and name.count("/") == 1 and not path.parent.exists()
    if is_on_hub or any((path / file).is_file() for file in FILES):
        return _from_folder(name, key)
    if not path.exists():
        allowed = "the folder of a run, a checkpoint, or a Hugging Face folder"
        raise InputError(f"{key} {name!r} does not exist: give {allowed}")
    if is_checkpoint := bool(meant(path)[1] or format_of(path)):
        run = next((one for one in path.absolute().parents if (one / CONFIG).is_file()), None)
        if run is None:
            raise InputError(f"{key} {name!r} is not in a run's folder, with its {CONFIG}")
    else:
        run = newest(path)
    cli = parsed(run, project)
    if not is_checkpoint:
        path = Path(fill_placeholders(cli.unfilled.last_checkpoint.dirpath, run))
    check_checkpoint(path, key)
    return trained(cli, agreed(path), run)


def parsed(run: Path, project: Project) -> WithoutTrainer:
    """Returns the objects that the config.yaml of a run describes, without a Trainer."""
    keys = {key: value for key, value in read(str(run / CONFIG)).items() if key not in OF_FIT}
    text = yaml.safe_dump(with_classes_of_the_library(keys, project.package))
    return WithoutTrainer(project, ["--config", text], run=False)


def trained(cli: WithoutTrainer, path: Path, run: Path | None = None) -> Trained:
    """Returns the model of a configuration with the weights of the verified checkpoint `path`."""
    module, data = cli.model, cli.datamodule
    if hasattr(data, "require"):
        data.require()
    model = trained_model(module, data, path)
    tokenizer = getattr(data, "text_tokenizer", None)
    return Trained(model, tokenizer, str(path), run, module, data)


def trained_model(module: Any, data: Any, path: Path) -> nn.Module:
    """Returns `module.model`, built for `data`, with the weights of `path`, in evaluation mode.

    Raises:
        InputError: the checkpoint is another model's.
    """
    if not hasattr(module, "build_model"):
        raise InputError(f"{type(module).__name__} has no build_model to export")
    torch.manual_seed(torch.initial_seed())  # the base of adapters may be made from scratch
    module.model = getattr(module, "build_with_adapters", module.build_model)(data)
    if getattr(module, "frozen_base", None):
        exclude_frozen(module)
    module.load_state_dict(read_full(path, module)["state_dict"], strict=True)
    return module.model.eval()


def _from_folder(name: str, key: str) -> Trained:
    """Returns the model and tokenizer of a folder of transformers or peft, or of the hub."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if (Path(name) / FILES[1]).is_file():
        require("peft", f"{key} {name!r}")
    safe: Any = {"trust_remote_code": False}
    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype="auto", **safe)
        tokenizer = AutoTokenizer.from_pretrained(name, **safe)
    except Exception as error:  # OSError, ValueError, KeyError, SafetensorError and others
        raise InputError(f"{key} {name!r} cannot be loaded: {reason(error)}") from error
    return Trained(model.eval(), tokenizer, name)
