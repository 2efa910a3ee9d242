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

from ..checkpoint import commit
from ..checkpoint.formats import FILE, META, WRITTEN_BY, format_of, read_full
from ..cli import WithoutTrainer
from ..errors import InputError
from .export import chosen_checkpoint


def main(argv: list[str]) -> None:
    """Write the checkpoint that `--output` names.

    Raises:
        InputError: there is something already, the checkpoint cannot be read, or the disk is full.
    """
    cli = Convert(args=argv[1:], run=False)
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
        parser.add_argument("--checkpoint", required=True, help="Any strategy's, or `last`: run.name's newest.")
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


def difference(expected: Any, got: Any, where: str = "it") -> str:
    """The first place where two checkpoints, as `read_full` gives them, differ; "" if there is none."""
    if isinstance(expected, Tensor):
        return "" if isinstance(got, Tensor) and torch.equal(expected, got) and expected.dtype == got.dtype else where
    if isinstance(expected, dict) and "param_groups" in expected:  # groups of equal settings may have become one
        expected, got = ({"state": each["state"], "param_groups": _by_parameter(each)} for each in (expected, got))
    if isinstance(expected, dict):
        if not isinstance(got, dict) or expected.keys() != got.keys():
            return where
        return next(filter(None, (difference(expected[key], got[key], f"{where}.{key}") for key in expected)), "")
    if isinstance(expected, list | tuple):
        if type(expected) is not type(got) or len(expected) != len(got):
            return where
        pairs = zip(expected, got, strict=True)
        return next(filter(None, (difference(*pair, f"{where}.{n}") for n, pair in enumerate(pairs))), "")
    return "" if expected == got or expected != expected else where  # NaN is a value too


def _by_parameter(state: dict[str, Any]) -> dict[str, Any]:
    groups = state["param_groups"]
    return {name: {k: v for k, v in group.items() if k != "params"} for group in groups for name in group["params"]}
