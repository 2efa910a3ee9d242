"""`convert`: any strategy's checkpoint becomes one that a single process, DDP or another torch program reads by itself.

To resume nobody needs it: every strategy reads every format (checkpoint/resume.py). It is for other programs, and for
one file in place of many. It reads the checkpoint whole, in one process, writes it anew, reads that back and compares
everything before it gives it its name. No model is built.

There is no format of ZeRO's to write: its files are cut for one number of ranks and one stage, and ZeroStrategy cuts
the other formats by itself when it loads them, for any.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch.cli import LightningArgumentParser
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path

from ..checkpoint import commit
from ..checkpoint.formats import FILE, META, WRITTEN_BY, format_of, read_full
from ..cli.fit import WithoutTrainer
from ..errors import InputError
from ..project import Project
from ..rehearsal.recorder import fingerprint
from .export import chosen_checkpoint


def main(argv: list[str], project: Project) -> None:
    """Write the checkpoint that `--output` names.

    Raises:
        InputError: there is something already, the checkpoint cannot be read, or the disk is full.
    """
    cli = Convert(project, argv[1:], run=False, verb=argv[0])
    settings = cli.config
    output = Path(settings.output)
    if output.exists():
        raise InputError(f"--output {str(output)!r} exists; give another")
    path = chosen_checkpoint(cli)
    found = format_of(path)
    assert found is not None, "chosen_checkpoint refuses it"
    full = read_full(path)
    write = {"file": write_file, "distributed": write_distributed}[settings.format]
    try:
        aside = commit.begin(output)
        trouble = commit.disk_trouble(lambda: write(full, aside))
        if trouble is None and (where := difference(full, read_full(aside))):
            trouble = f"it reads back as another in {where}"
        about = {"step": full["global_step"], "world_size": 1, "strategy": "convert"}
        commit.finish(output, about, trouble)
    except commit.SaveError as error:
        raise InputError(f"--output {str(output)!r} cannot be written: {error}") from error
    print(f"{path}  {WRITTEN_BY[found]}'s, step {full['global_step']}\n  -> {output}  {settings.format}, same content")


class Convert(WithoutTrainer):
    """The training's keys, for `--checkpoint last`, and three more."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        parser.add_argument(
            "--checkpoint", required=True, help="Any strategy's; or `last`, or `best`: the newest run's."
        )
        parser.add_argument("--output", required=True, help="The checkpoint to write; it must be new.")
        formats = "file: torch.save of one dict. distributed: torch.distributed.checkpoint's, and meta.pt."
        parser.add_argument("--format", choices=["file", "distributed"], required=True, help=formats)


def write_file(full: dict[str, Any], folder: Path) -> None:
    """Lightning's one file; optimizer state by name, for whatever order the optimizer that loads it has."""
    torch.save(full, folder / FILE)


def write_distributed(full: dict[str, Any], folder: Path) -> None:
    """torch's distributed format, in one shard; optimizer state in torch's flattened form."""
    rest = dict(full)
    tensors: dict[str, Any] = {"state_dict": rest.pop("state_dict")}
    for index, named in enumerate(rest.pop("optimizer_states", [])):
        flat = {f"state.{name}.{key}": v for name, values in named["state"].items() for key, v in values.items()}
        for group in named["param_groups"]:
            settings = {key: value for key, value in group.items() if key != "params"}
            flat |= {f"param_groups.{name}.{key}": value for name in group["params"] for key, value in settings.items()}
        tensors[f"optimizer_{index}"] = flat
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is meant
        dcp.save(tensors, checkpoint_id=folder, no_dist=True)
    torch.save(rest, folder / META)


def difference(expected: dict[str, Any], got: dict[str, Any]) -> str:
    """The first place where two checkpoints, as `read_full` gives them, differ; "" if there is none."""
    want, have = _leaves(expected), _leaves(got)
    return next((place for place in want | have if want.get(place) != have.get(place)), "")


def _leaves(checkpoint: dict[str, Any]) -> dict[str, str]:
    """Place: what is there, as a text that is equal for equal bits; of parameter groups, each parameter's settings."""
    states = [{**s, "param_groups": _by_parameter(s)} for s in checkpoint.get("optimizer_states", [])]
    leaves, _ = tree_flatten_with_path(checkpoint | {"optimizer_states": states})
    return {keystr(path): _text(leaf) for path, leaf in leaves}


def _by_parameter(state: dict[str, Any]) -> dict[str, Any]:
    groups = state["param_groups"]
    return {name: {k: v for k, v in group.items() if k != "params"} for group in groups for name in group["params"]}


def _text(leaf: Any) -> str:
    return f"{leaf.dtype} {leaf.shape} {fingerprint(leaf)}" if isinstance(leaf, Tensor) else repr(leaf)
