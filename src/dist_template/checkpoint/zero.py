"""DeepSpeed's checkpoint folder: written, and read as full tensors in one process.

deepspeed.utils.zero_to_fp32 joins the partitions of the fp32 weights, which have one layout under
ZeRO-1 and 2, and another under ZeRO-3. It does not join the optimizer state, which has the same
layouts: here its functions are called with each moment in place of the weights. DeepSpeed's
`ds_to_universal` was rejected: it needs an entry that only DeepSpeed's own loops write, and makes
four files per parameter."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import weights
from ..compat import deepspeed as compat
from ..layout import full_shape
from .optimizer import State, merge, without_moments
from .untrusted import as_data

# Entries that DeepSpeed adds to Lightning's.
DEEPSPEEDS_OWN = {
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps",
    "global_steps", "global_samples", "dp_world_size", "mp_world_size",
    "checkpoint_parallel_dimensions", "ds_config", "ds_version",
}  # fmt: skip
Take = Callable[[Any, Path], None]  # called with a file's content and path
TAG = "checkpoint"  # DeepSpeed's folder inside the checkpoint, as Lightning names it


def save(engine: Any, checkpoint: dict[str, Any], path: Path, without_frozen: bool) -> None:
    """Writes the engine's partitions and the rest of Lightning's checkpoint. Collective.

    If the disk refuses a file, the error is raised after DeepSpeed's barriers, at which the other
    ranks wait. Files of NVMe offload are an exception: DeepSpeed copies them between two barriers.

    Raises:
        OSError: on the rank whose disk refused a file; RuntimeError if torch's writer met it.
    """
    errors: list[OSError | RuntimeError] = []
    write = _writer(engine)

    def attempt(state: Any, file: Path) -> None:
        try:
            write(state, file)
        except (OSError, RuntimeError) as error:
            errors.append(error)

    _collect(engine, checkpoint, path, without_frozen, attempt)
    if errors:
        raise errors[0]
    _write_tag(path)


def staged(
    engine: Any, checkpoint: dict[str, Any], without_frozen: bool, copy: Callable[[Any], Any]
) -> Callable[[Path], None]:
    """Copies the present content of the checkpoint's files. Collective.

    Args:
        engine: DeepSpeed's.
        checkpoint: Lightning's.
        without_frozen: Whether frozen parameters are excluded.
        copy: Returns a copy of a file's content, which training does not change.

    Returns:
        A function that writes the copies into a folder, without a collective.
    """
    files: dict[Path, Any] = {}
    write, nowhere = _writer(engine), Path("folder")

    def keep(state: Any, file: Path) -> None:
        files[file.relative_to(nowhere)] = copy(state)

    def write_all(path: Path) -> None:
        for file, state in files.items():
            write(state, path / file)
        _write_tag(path)

    _collect(engine, checkpoint, nowhere, without_frozen, keep)
    return write_all


def _collect(engine: Any, checkpoint: Any, path: Path, without_frozen: bool, take: Take) -> None:
    """Lets DeepSpeed save under `path`, and passes each of this rank's files to `take`."""
    rest = dict(checkpoint)
    for key in ("state_dict", "optimizer_states"):
        rest.pop(key, None)
    options = {"save_latest": False, "exclude_frozen_parameters": without_frozen}
    with compat.redirected_saves(engine, take):
        engine.save_checkpoint(path, TAG, rest, **options)


def _writer(engine: Any) -> Callable[[Any, Path], None]:
    own = engine.checkpoint_engine.save

    def write(state: Any, file: Path) -> None:
        file.parent.mkdir(exist_ok=True)
        own(state, str(file))

    return write


def _write_tag(path: Path) -> None:
    """Names DeepSpeed's folder, as DeepSpeed does, but after all errors were raised."""
    if weights.is_rank_zero():
        (path / "latest").write_text(TAG, encoding="utf-8")


def read(path: Path, optimizer: bool = True) -> dict[str, Any]:
    """Returns full fp32 weights and the optimizer state by name, as formats.read_full does."""
    if not torch.cuda.is_available():  # else DeepSpeed warns that there is no other accelerator
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.utils import zero_to_fp32

    folder = _folder(path)
    out, err = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
    with as_data(*classes()), out, err:
        main = torch.load(_model_files(folder)[0], map_location="cpu", mmap=True)
        models = zero_to_fp32.parse_model_states(_model_files(folder))
        files = zero_to_fp32.get_optim_files(str(folder))
        ranks = [torch.load(file, map_location="cpu", mmap=True) for file in files]
        partitions = Partitions(models, [rank["optimizer_state_dict"] for rank in ranks])
        checkpoint = {key: value for key, value in main.items() if key not in DEEPSPEEDS_OWN}
        checkpoint["state_dict"] = partitions.weights(main["module"])
        if optimizer and (state := partitions.optimizer_state()) is not None:
            checkpoint["optimizer_states"] = [state]
    return checkpoint


def shape(path: Path) -> tuple[bool, int]:
    """Returns whether ZeRO-3 wrote the folder, and the number of ranks that did."""
    names = [file.name for file in _folder(path).iterdir()]
    num_ranks = sum(name.endswith("_optim_states.pt") for name in names)
    return "mp_rank_00_model_states.pt" not in names, num_ranks


def classes() -> list[type]:
    """Returns the classes in DeepSpeed's files. Unpickling them only sets attributes."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [ZeroStageEnum, LossScaler, DynamicLossScaler, fragment_address]


class Partitions:
    """The content of all ranks' files, joined to full tensors.

    Args:
        models: DeepSpeed's parsed model states.
        ranks: Each rank's optimizer state.
    """

    def __init__(self, models: list[Any], ranks: list[dict[str, Any]]) -> None:
        self.models = models
        self.ranks = ranks
        self.is_stage_3 = "fp32_flat_groups" in ranks[0]
        count = ranks[0]["partition_count"]
        expected = max(count) if isinstance(count, list) else count
        if expected != len(ranks):
            raise ValueError(f"{expected} ranks wrote optimizer states, {len(ranks)} files exist")

    def weights(self, module: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the fp32 weights in the order of `module`, the half-precision weights."""
        full = compat.join_frozen(len(self.ranks), self.models) if self.is_stage_3 else {}
        key = "fp32_flat_groups" if self.is_stage_3 else "single_partition_of_fp32_groups"
        full |= self._join([rank[key] for rank in self.ranks]) | self.models[0].buffers
        for name, original in self.models[0].shared_params:
            if name in module:  # else it is frozen and excluded
                full[name] = full.get(original, module[name])
        return {name: full.get(name, tensor) for name, tensor in module.items()}

    def optimizer_state(self) -> dict[str, Any] | None:
        """Returns the state by name, or None if it is not in the checkpoint (NVMe offload, SGD)."""
        key = "optimizer_state_dict" if self.is_stage_3 else "base_optimizer_state"
        bases = [rank[key] for rank in self.ranks]
        flat = bases[0]["state"]
        moments = [state["exp_avg"] for state in flat.values() if "exp_avg" in state]
        if not flat or not all(moment.numel() for moment in moments):
            return None
        numbers = sorted(flat)
        shapes = self.models[0].param_shapes  # of each group; under ZeRO-3 of each sub-group
        state: dict[str, dict[str, Any]] = {name: {} for group in shapes for name in group}
        for key, value in flat[numbers[0]].items():
            if isinstance(value, Tensor) and value.ndim:
                parts = [[base["state"][number][key] for number in numbers] for base in bases]
                for name, tensor in self._join(parts).items():
                    state[name][key] = tensor
            else:
                for number, group in zip(numbers, shapes, strict=True):
                    for name in group:  # a tensor for each: optimizers increment it in place
                        state[name][key] = torch.tensor(float(flat[number][key]))
        groups = []
        for group in bases[0]["param_groups"]:
            names = [name for number in group["params"] for name in shapes[number]]
            if "step" in group:  # where DeepSpeed's FusedAdam keeps it
                for name in names:
                    state[name]["step"] = torch.tensor(float(group["step"]))
            groups.append(group | {"params": names})
        return {"state": state, "param_groups": groups}

    def _join(self, flat_groups: list[list[Tensor]]) -> dict[str, Tensor]:
        """Returns full tensors by name, joined from each rank's flat partition of each group."""
        paddings = self.ranks[0].get("param_alignment_paddings")
        num_ranks = len(self.ranks)
        full = compat.join_trained(num_ranks, flat_groups, self.models, self.is_stage_3, paddings)
        return {name: tensor.contiguous() for name, tensor in full.items()}


class Target:
    """Sets a DeepSpeed engine's fp32 weights and optimizer state from full tensors of rank 0."""

    def __init__(self, engine: Any, module: nn.Module) -> None:
        self.zero = engine.optimizer
        self.device = engine.device
        self.parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}

    def make_state(self, outline: State) -> None:
        """Creates every moment, as torch does in the first step, and sets the groups' settings.

        Raises:
            InputError: the checkpoint's optimizer did not have one of the parameters.
        """
        without_moments(outline, [list(self.parameters)])
        optimizer, states = self.zero.optimizer, outline["state"]
        for group, names, flat in self._flat_groups():
            group.update(merge(outline, names, group))
            # DeepSpeed has one flat tensor, and one count of steps, for all parameters of a group.
            of_group = [states[name] for name in names if name in states]
            values = next(iter(of_group or states.values()), {})
            is_torchs = type(optimizer).__module__.startswith("torch.")
            steps = {
                key: value.clone().to(flat.device) if is_torchs else int(value)
                for key, value in values.items()
                if not (isinstance(value, Tensor) and value.is_meta)
            }
            moments = {key: torch.zeros_like(flat) for key in values if key not in steps}
            optimizer.state[flat] = moments | steps
            if not is_torchs:
                group |= steps  # where FusedAdam keeps the count
        compat.link_optimizer_state(self.zero)

    def set(self, name: str, key: str | None, full: Tensor | None) -> None:
        """Sets a parameter's moment `key`, or its fp32 weights (None), from `full` of rank 0."""
        from deepspeed import utils

        parameter: Any = self.parameters[name]
        like = torch.empty(full_shape(parameter), device=self.device)
        value = weights.tensor_from_rank_zero(full, like)
        reach = "full"
        if weights.is_partitioned_by_zero(parameter):
            # ZeRO-3's function for full tensors fails if the number of ranks does not divide them.
            reach, size = "local", parameter.ds_tensor.numel()
            num_padding = size * dist.get_world_size() - value.numel()
            padded = nn.functional.pad(value.flatten(), (0, num_padding))
            value = padded[size * dist.get_rank() :][:size]
        if key is None:
            getattr(utils, f"safe_set_{reach}_fp32_param")(parameter, value)
        else:
            getattr(utils, f"safe_set_{reach}_optimizer_state")(parameter, value, key)

    def _flat_groups(self) -> Iterator[tuple[dict[str, Any], list[str], Tensor]]:
        """Yields each parameter group, its parameters' names, and this rank's flat partition."""
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        zero = self.zero
        if hasattr(zero, "fp32_partitioned_groups_flat"):  # ZeRO-3, in sub-groups
            numbers = [zero.sub_group_to_group_id[part] for part in range(len(zero.fp16_groups))]
            parts = zip(numbers, zero.fp16_groups, zero.fp32_partitioned_groups_flat, strict=True)
        elif hasattr(zero, "fp32_groups_flat_partition"):  # ZeRO-1 in bf16 with fp32 gradients
            parts = zip(itertools.count(), zero.bf16_groups, zero.fp32_groups_flat_partition)
        else:
            parts = zip(itertools.count(), zero.bit16_groups, zero.single_partition_of_fp32_groups)
        for number, parameters, flat in parts:
            yield zero.optimizer.param_groups[number], [names[id(p)] for p in parameters], flat


def _folder(path: Path) -> Path:
    return path / (path / "latest").read_text(encoding="utf-8").strip()


def _model_files(folder: Path) -> list[str]:
    from deepspeed.utils import zero_to_fp32

    return zero_to_fp32.get_model_state_files(str(folder))
