"""The format of ZeroStrategy: DeepSpeed's folder, in which every rank writes its partitions.

The partitions of the fp32 weights and of each moment have one layout under ZeRO-1 and 2, and
another under ZeRO-3. `Partitions` computes where a tensor's elements are, so that slices can be
read. deepspeed.utils.zero_to_fp32 joins all weights in memory, without the moments. DeepSpeed's
`ds_to_universal` needs an entry that only DeepSpeed's own loops write, and makes four files per
parameter."""

import contextlib
import math
import os
from collections.abc import Callable, Generator, Mapping
from functools import cache, partial
from itertools import repeat
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import lightning as L
import numpy as np
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor, nn

from ... import processes, weights
from ...checkpoint.formats import StrategyFormat, reads_optimizer
from ...checkpoint.manifest import MANIFEST, read
from ...checkpoint.optimizer import State, merge, without_moments
from ...checkpoint.plain_types import back, plain
from ...checkpoint.protocol import Checkpoint, Copy, Group, Opened, Shapes
from ...checkpoint.stored import Partitioned, flat_range, is_scalar, partition_of
from ...checkpoint.untrusted import reading
from ...compat import deepspeed as compat
from ...compat.torch import tree_map
from ...layout import full_shape

# Entries that DeepSpeed adds to Lightning's.
DEEPSPEEDS_OWN = {
    "module",
    "buffer_names",
    "optimizer",
    "param_shapes",
    "frozen_param_shapes",
    "shared_params",
    "frozen_param_fragments",
    "lr_scheduler",
    "data_sampler",
    "random_ltd",
    "skipped_steps",
    "global_steps",
    "global_samples",
    "dp_world_size",
    "mp_world_size",
    "checkpoint_parallel_dimensions",
    "ds_config",
    "ds_version",
}
TAG = "checkpoint"  # DeepSpeed's folder inside the checkpoint, as Lightning names it


class ZeroFormat(StrategyFormat[DeepSpeedStrategy]):
    written_by = "ZeroStrategy"
    of_lightning = "DeepSpeedStrategy"

    @staticmethod
    def is_at(path: Path) -> bool:
        return (path / "latest").is_file() and any(path.glob("*/*_model_states.pt"))

    @staticmethod
    def header(path: Path, weights_only: bool | None) -> tuple[Checkpoint, Shapes]:
        with _reading(path) as files:
            main = _load(path, files.get_model_state_files(_folder(path))[0])
        found: Shapes = {}
        for group in (*main["param_shapes"], main.get("frozen_param_shapes") or {}):
            found |= {name: tuple(shape) for name, shape in group.items()}
        shapes: Shapes = {}
        for name, tensor in main["module"].items():  # under ZeRO-3 its parameters are empty
            original = main["shared_params"].get(name, name)
            if isinstance(tensor, Tensor):  # else it is an extra state
                shapes[name] = found.get(original, tuple(tensor.shape))
        return _lightnings(main), shapes

    @staticmethod
    def read(path: Path, optimizer: bool) -> Checkpoint:
        with _reading(path) as files:
            partitions = Partitions(path, files)
            checkpoint = _lightnings(partitions.main)
            checkpoint["state_dict"] = partitions.weights()
            if optimizer and (state := partitions.optimizer_state()) is not None:
                checkpoint["optimizer_states"] = [state]
        return checkpoint

    def save(self, checkpoint: Checkpoint, path: Path) -> None:
        """Writes after DeepSpeed's barriers, at which the other ranks wait: a disk's refusal may be
        raised. Files of NVMe offload are an exception: DeepSpeed copies them between two
        barriers."""
        self._collect(checkpoint, path, lambda state: state)(path)

    def stage(self, checkpoint: Checkpoint, copy: Copy, group: Group) -> Callable[[Path], object]:
        return self._collect(checkpoint, Path("folder"), copy)

    def _collect(self, checkpoint: Checkpoint, path: Path, copy: Copy) -> Callable[[Path], object]:
        """Lets DeepSpeed save under `path`; returns a function that writes this rank's files."""
        engine: Any = self.strategy.deepspeed_engine
        if take_over := getattr(self.strategy, "take_over_weights", None):
            take_over()  # a hook after the newest step may have changed weights
        write, files = engine.checkpoint_engine.save, {}

        def keep(state: Any, file: Path) -> None:
            for name, value in state.get("module", {}).items():
                if not isinstance(value, Tensor):  # an extra state, which is read as data alone
                    state["module"][name] = plain(value, ("state_dict", name))
            # a schedule may have set a rate of NumPy in the optimizer's groups
            files[file.relative_to(path)] = copy(tree_map(_as_number, state))

        def write_all(folder: Path) -> None:
            for file, state in files.items():
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                write(state, str(folder / file))
            if processes.is_rank_zero():  # as DeepSpeed does, but after all errors were raised
                (folder / "latest").write_text(TAG, encoding="utf-8")

        rest = dict(checkpoint)
        for key in ("state_dict", "optimizer_states"):
            rest.pop(key, None)
        frozen = self.strategy.exclude_frozen_parameters
        with compat.redirected_saves(engine, keep):
            engine.save_checkpoint(
                path, TAG, rest, save_latest=False, exclude_frozen_parameters=frozen
            )
        return write_all

    def needed(self, path: Path, parts: set[str]) -> set[str]:
        own = {part for part in parts if f"zero_pp_rank_{self.strategy.global_rank}_mp" in part}
        module = cast(L.LightningModule, self.strategy.lightning_module)
        return (
            own
            if self.is_at(path) and reads_optimizer(module) and self._continues(path, len(parts))
            else parts
        )

    def reads(self, opened: Opened) -> bool:
        """DeepSpeed reads its files for training, on as many ranks, with ZeRO-3 as before."""
        if opened.format is not ZeroFormat or not opened.with_optimizer:
            return False
        if (opened.path / MANIFEST).exists():  # with a store, not every part is on this disk
            names = read(opened.path)["files"]
        else:
            names = [file.name for file in Path(_folder(opened.path)).iterdir()]
        return self._continues(
            opened.path, sum(name.endswith("_optim_states.pt") for name in names)
        )

    def _continues(self, path: Path, number: int) -> bool:
        """Returns whether as many ranks, with ZeRO-3 as before, wrote the checkpoint; `number` have
        a part of it."""
        is_stage_3 = not Path(_folder(path), "mp_rank_00_model_states.pt").exists()
        return number == self.strategy.world_size and is_stage_3 == self.strategy.zero_stage_3

    def load_own(self, opened: Opened) -> Checkpoint:
        with _reading(opened.path), compat.converted_loads(self.strategy.deepspeed_engine, back):
            # of this rank's file, and `opened` of rank 0's
            return back(DeepSpeedStrategy.load_checkpoint(self.strategy, opened.path))

    def set_optimizer_state(self, stored_weights: Mapping[str, Any], states: list[State]) -> None:
        """Sets the engine's fp32 weights too."""
        module = cast(nn.Module, self.strategy.lightning_module)
        parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        engine = self.strategy.deepspeed_engine
        for name, parameter in parameters.items():
            _set(parameter, None, stored_weights[name])
        for state in states:
            _create_state(engine.optimizer, parameters, state)
            for name, parameter in parameters.items():
                for key, value in state["state"].get(name, {}).items():
                    if not is_scalar(value):
                        _set(parameter, key, value)


def _create_state(zero: Any, parameters: dict[str, nn.Parameter], named: State) -> None:
    """Creates every moment, as torch does in the first step, and sets the groups' settings."""
    without_moments(named, [list(parameters)])
    names_of = {id(parameter): name for name, parameter in parameters.items()}
    states, is_torchs = named["state"], type(zero.optimizer).__module__.startswith("torch.")
    if hasattr(zero, "fp32_partitioned_groups_flat"):  # ZeRO-3, in sub-groups
        groups, flats = zero.fp16_groups, zero.fp32_partitioned_groups_flat
    elif hasattr(zero, "fp32_groups_flat_partition"):  # ZeRO-1 in bf16 with fp32 gradients
        groups, flats = zero.bf16_groups, zero.fp32_groups_flat_partition
    else:
        groups, flats = zero.bit16_groups, zero.single_partition_of_fp32_groups
    for index, (members, flat) in enumerate(zip(groups, flats, strict=True)):
        names = [names_of[id(parameter)] for parameter in members]
        number = getattr(zero, "sub_group_to_group_id", {}).get(index, index)
        group = zero.optimizer.param_groups[number]
        group.update(merge(named, names, group))
        # DeepSpeed has one flat tensor, and one count of steps, for all parameters of a group.
        saved = next((states[name] for name in names if name in states), None)
        values = saved or next(iter(states.values()), {})
        moments, steps = {}, {}
        for key, value in values.items():
            if not is_scalar(value):
                moments[key] = torch.zeros_like(flat)
            else:
                steps[key] = value.clone().to(flat.device) if is_torchs else int(value)
        zero.optimizer.state[flat] = moments | steps
        if not is_torchs:
            group |= steps  # where FusedAdam keeps the count
    compat.link_optimizer_state(zero)


def _as_number(value: object) -> object:
    return value.item() if isinstance(value, np.generic) else value


def _set(parameter: Any, key: str | None, stored: Any) -> None:
    """Sets this rank's part of a parameter's moment `key`, or of its fp32 weights (None)."""
    from deepspeed import utils

    if weights.is_partitioned_by_zero(parameter):
        # ZeRO-3's function for full tensors fails if the number of ranks does not divide them.
        reach, value = "local", partition_of(parameter, stored)
        value = nn.functional.pad(value, (0, parameter.ds_tensor.numel() - len(value)))
    else:
        reach, value = "full", torch.empty(full_shape(parameter), dtype=stored.dtype)
        start, end = compat.fragment_of(parameter)  # the only part that is read of `value`
        value.view(-1)[start:end] = flat_range(stored, start, end)
    if key is None:
        getattr(utils, f"safe_set_{reach}_fp32_param")(parameter, value)
    else:
        getattr(utils, f"safe_set_{reach}_optimizer_state")(parameter, value, key)


class Partitions:
    """Finds tensors in the files of all ranks, each of which is opened when something of it is
    read."""

    def __init__(self, path: Path, files: ModuleType) -> None:
        self._models = files.get_model_state_files(_folder(path))
        self._optims = files.get_optim_files(_folder(path))
        self._load = cache(partial(_load, path))
        self.main = self._load(self._models[0])
        first = self._optimizer_of(0)
        self.is_stage_3 = "fp32_flat_groups" in first
        written, found = first["partition_count"], len(self._optims)
        expected = max(written) if isinstance(written, list) else written
        if expected != found:
            raise ValueError(f"{expected} ranks wrote optimizer states, {found} files exist")
        self._layout = (
            self._layout_3()
            if self.is_stage_3
            else self._layout_2(first.get("param_alignment_paddings"))
        )

    def weights(self) -> dict[str, Any]:
        """Returns the fp32 weights in the order of the model's own, which may be in half
        precision."""
        module, found = self.main["module"], dict[str, Any]()
        for name, shape in (
            (self.main.get("frozen_param_shapes") or {}).items() if self.is_stage_3 else ()
        ):
            own, parts = self.main["frozen_param_fragments"][name], partial(self._frozen, name)
            found[name] = Partitioned(tuple(shape), own.dtype, parts, own.numel())
        found |= self._tensors(self._weights_of)
        for name in set(self.main["buffer_names"]) & module.keys():
            found[name] = module[name].float() if module[name].is_floating_point() else module[name]
        for name, original in self.main["shared_params"].items():
            if name in module:  # else it is frozen and excluded
                found[name] = found.get(original, module[name])
        return {name: found.get(name, value) for name, value in module.items()}

    def optimizer_state(self) -> State | None:
        """Returns the state by name, or None if it is not in the checkpoint (NVMe offload, SGD)."""
        base = self._base_of(0)
        flat = base["state"]
        for entries in flat.values():
            if "exp_avg" in entries and not entries["exp_avg"].numel():
                return None
        if not flat:
            return None
        numbers = sorted(flat)
        shapes = self.main["param_shapes"]  # of each group; under ZeRO-3 of each sub-group
        state: dict[str, dict[str, Any]] = {name: {} for group in shapes for name in group}
        for key, value in flat[numbers[0]].items():
            if not is_scalar(value):
                for name, tensor in self._tensors(partial(self._moments, numbers, key)).items():
                    state[name][key] = tensor
                continue
            for number, group in zip(numbers, shapes, strict=True):
                for name in group:  # a tensor for each: optimizers increment it in place
                    state[name][key] = torch.tensor(float(flat[number][key]))
        groups = []
        for group in base["param_groups"]:
            names = [name for number in group["params"] for name in shapes[number]]
            if "step" in group:  # where DeepSpeed's FusedAdam keeps it
                for name in names:
                    state[name]["step"] = torch.tensor(float(group["step"]))
            groups.append(group | {"params": names})
        return {"state": state, "param_groups": groups}

    def _tensors(self, parts: Callable[[int], list[Tensor]]) -> dict[str, Partitioned]:
        """Returns tensors like the parameters by name; `parts` returns a rank's flat tensor of each
        group."""
        dtype = parts(0)[0].dtype
        return {name: tensor(dtype=dtype, parts=parts) for name, tensor in self._layout.items()}

    def _layout_3(self) -> dict[str, Callable[..., Partitioned]]:
        """Each parameter is sharded evenly; a rank's partitions of all are one after the other in
        its groups."""
        found, offset = {}, 0
        for group in self.main["param_shapes"]:
            for name, shape in group.items():
                size = -(-math.prod(shape) // len(self._optims))
                found[name] = partial(Partitioned, tuple(shape), size=size, offset=offset)
                offset += size
        _require_all(offset, sum(flat.numel() for flat in self._weights_of(0)))
        return found

    def _layout_2(self, paddings: list[list[int]] | None) -> dict[str, Callable[..., Partitioned]]:
        """The parameters of each group are one after the other, and their flat tensor is sharded
        evenly."""
        found, aligned = {}, 2 * len(self._optims)
        for number, (group, flat) in enumerate(
            zip(self.main["param_shapes"], self._weights_of(0), strict=True)
        ):
            first, size, groups = 0, flat.numel(), (number, number + 1)
            for (name, shape), padding in zip(
                group.items(), paddings[number] if paddings else repeat(0), strict=False
            ):
                found[name] = partial(
                    Partitioned, tuple(shape), size=size, first=first, groups=groups
                )
                first += math.prod(shape) + padding
            _require_all(-(-first // aligned), -(-size * len(self._optims) // aligned))
        return found

    def _optimizer_of(self, rank: int) -> dict[str, Any]:
        return self._load(self._optims[rank])["optimizer_state_dict"]

    def _weights_of(self, rank: int) -> list[Tensor]:
        return self._optimizer_of(rank)[
            "fp32_flat_groups" if self.is_stage_3 else "single_partition_of_fp32_groups"
        ]

    def _base_of(self, rank: int) -> dict[str, Any]:
        return self._optimizer_of(rank)[
            "optimizer_state_dict" if self.is_stage_3 else "base_optimizer_state"
        ]

    def _moments(self, numbers: list[int], key: str, rank: int) -> list[Tensor]:
        return [self._base_of(rank)["state"][number][key] for number in numbers]

    def _frozen(self, name: str, rank: int) -> list[Tensor]:
        return [self._load(self._models[rank])["frozen_param_fragments"][name]]


def _require_all(found: int, expected: int) -> None:
    if found != expected:
        raise ValueError(f"its parameters have {found} elements, and its partitions {expected}")


@contextlib.contextmanager
def _reading(path: Path) -> Generator[ModuleType]:
    """Yields deepspeed.utils.zero_to_fp32. Allows the classes in DeepSpeed's files, whose
    unpickling only sets attributes."""
    if not torch.cuda.is_available():  # else DeepSpeed warns that there is no other accelerator
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils import zero_to_fp32
    from deepspeed.utils.tensor_fragment import fragment_address

    classes: list[type] = [ZeroStageEnum, LossScaler, DynamicLossScaler, fragment_address]
    with reading(path, ZeroFormat.written_by, classes):
        yield zero_to_fp32


def _folder(path: Path) -> str:
    return str(path / (path / "latest").read_text(encoding="utf-8").strip())


def _load(path: Path, file: str) -> dict[str, Any]:
    with _reading(path):
        return torch.load(file, map_location="cpu", mmap=True)


def _lightnings(main: dict[str, Any]) -> Checkpoint:
    """Returns the entries of a model file that are not DeepSpeed's."""
    return {key: value for key, value in main.items() if key not in DEEPSPEEDS_OWN}
