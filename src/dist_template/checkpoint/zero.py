"""The format of ZeroStrategy: DeepSpeed's folder, in which every rank writes its partitions.

deepspeed.utils.zero_to_fp32 joins the partitions of the fp32 weights, which have one layout under
ZeRO-1 and 2, and another under ZeRO-3. It does not join the optimizer state, which has the same
layouts: here its functions are called with each moment in place of the weights. DeepSpeed's
`ds_to_universal` was rejected: it needs an entry that only DeepSpeed's own loops write, and makes
four files per parameter."""

import contextlib
import io
import os
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor, nn

from .. import weights
from ..compat import deepspeed as compat
from ..layout import full_shape
from .optimizer import State, merge, without_moments
from .protocol import Checkpoint, CheckpointFormat, Copy, Group, Opened, Shapes
from .scatter import tensor_from_rank_zero
from .untrusted import reading

# Entries that DeepSpeed adds to Lightning's.
DEEPSPEEDS_OWN = {
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps",
    "global_steps", "global_samples", "dp_world_size", "mp_world_size",
    "checkpoint_parallel_dimensions", "ds_config", "ds_version",
}  # fmt: skip
TAG = "checkpoint"  # DeepSpeed's folder inside the checkpoint, as Lightning names it


class ZeroFormat(CheckpointFormat[DeepSpeedStrategy]):
    written_by = "ZeroStrategy"
    of_lightning = "DeepSpeedStrategy"

    @staticmethod
    def is_at(path: Path) -> bool:
        return (path / "latest").is_file() and any(path.glob("*/*_model_states.pt"))

    @staticmethod
    def header(path: Path, weights_only: bool | None) -> tuple[Checkpoint, Shapes]:
        with _reading(path) as files:
            main = _load(files.get_model_state_files(_folder(path))[0])
        found: Shapes = {}
        for group in (*main["param_shapes"], main.get("frozen_param_shapes") or {}):
            found |= {name: tuple(shape) for name, shape in group.items()}
        shapes: Shapes = {}
        for name, tensor in main["module"].items():  # under ZeRO-3 its parameters are empty
            original = main["shared_params"].get(name, name)
            shapes[name] = found.get(original, tuple(tensor.shape))
        return _lightnings(main), shapes

    @staticmethod
    def read(path: Path, optimizer: bool) -> Checkpoint:
        out = contextlib.redirect_stdout(io.StringIO())
        with _reading(path) as files, out, contextlib.redirect_stderr(io.StringIO()):
            models = files.get_model_state_files(_folder(path))
            main, optims = _load(models[0]), files.get_optim_files(_folder(path))
            ranks = [_load(file)["optimizer_state_dict"] for file in optims]
            partitions = Partitions(files.parse_model_states(models), ranks)
            checkpoint = _lightnings(main)
            checkpoint["state_dict"] = partitions.weights(main["module"])
            if optimizer and (state := partitions.optimizer_state()) is not None:
                checkpoint["optimizer_states"] = [state]
        return checkpoint

    def save(self, checkpoint: Checkpoint, path: Path) -> None:
        """Writes after DeepSpeed's barriers, at which the other ranks wait: a disk's refusal may be
        raised. Files of NVMe offload are an exception: DeepSpeed copies them between two barriers.
        """
        self._collect(checkpoint, path, lambda state: state)(path)

    def stage(self, checkpoint: Checkpoint, copy: Copy, group: Group) -> Callable[[Path], object]:
        return self._collect(checkpoint, Path("folder"), copy)

    def _collect(self, checkpoint: Checkpoint, path: Path, copy: Copy) -> Callable[[Path], object]:
        """Lets DeepSpeed save under `path`; returns a function that writes this rank's files."""
        engine: Any = self.strategy.deepspeed_engine
        write, files = engine.checkpoint_engine.save, {}

        def keep(state: object, file: Path) -> None:
            files[file.relative_to(path)] = copy(state)

        def write_all(folder: Path) -> None:
            for file, state in files.items():
                (folder / file).parent.mkdir(exist_ok=True)
                write(state, str(folder / file))
            if weights.is_rank_zero():  # as DeepSpeed does, but after all errors were raised
                (folder / "latest").write_text(TAG, encoding="utf-8")

        rest = dict(checkpoint)
        for key in ("state_dict", "optimizer_states"):
            rest.pop(key, None)
        frozen = self.strategy.exclude_frozen_parameters
        with compat.redirected_saves(engine, keep):
            engine.save_checkpoint(path, TAG, rest, save_latest=False, exclude_frozen_parameters=frozen)
        return write_all

    def reads(self, opened: Opened) -> bool:
        """DeepSpeed reads its files for training, on as many ranks, with ZeRO-3 as before."""
        if opened.format is not ZeroFormat or not opened.with_optimizer:
            return False
        names = [file.name for file in Path(_folder(opened.path)).iterdir()]
        ranks = [name for name in names if name.endswith("_optim_states.pt")]
        is_stage_3 = "mp_rank_00_model_states.pt" not in names
        has_same_ranks = len(ranks) == self.strategy.world_size
        return has_same_ranks and is_stage_3 == self.strategy.zero_stage_3

    def load(self, opened: Opened) -> Checkpoint:
        with _reading(opened.path):
            return DeepSpeedStrategy.load_checkpoint(self.strategy, opened.path)

    def set_optimizer_state(
        self, full_weights: Mapping[str, Tensor], meta_states: list[State], states: list[State]
    ) -> None:
        """Sets the engine's fp32 weights too."""
        module = cast(nn.Module, self.strategy.lightning_module)
        parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        engine = self.strategy.deepspeed_engine
        for name, parameter in parameters.items():
            _set(engine, parameter, None, full_weights.get(name))
        for meta in meta_states:
            _create_state(engine.optimizer, parameters, meta)
            for name, parameter in parameters.items():
                full = states[0]["state"].get(name, {}) if states else {}
                for key, value in meta["state"].get(name, {}).items():
                    if isinstance(value, Tensor) and value.is_meta:
                        _set(engine, parameter, key, full.get(key))


def _create_state(zero: Any, parameters: dict[str, nn.Parameter], meta: State) -> None:
    """Creates every moment, as torch does in the first step, and sets the groups' settings."""
    without_moments(meta, [list(parameters)])
    names_of = {id(parameter): name for name, parameter in parameters.items()}
    states, is_torchs = meta["state"], type(zero.optimizer).__module__.startswith("torch.")
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
        group.update(merge(meta, names, group))
        # DeepSpeed has one flat tensor, and one count of steps, for all parameters of a group.
        saved = next((states[name] for name in names if name in states), None)
        values = saved or next(iter(states.values()), {})
        moments, steps = {}, {}
        for key, value in values.items():
            if isinstance(value, Tensor) and value.is_meta:
                moments[key] = torch.zeros_like(flat)
            else:
                steps[key] = value.clone().to(flat.device) if is_torchs else int(value)
        zero.optimizer.state[flat] = moments | steps
        if not is_torchs:
            group |= steps  # where FusedAdam keeps the count
    compat.link_optimizer_state(zero)


def _set(engine: Any, parameter: Any, key: str | None, full: Tensor | None) -> None:
    """Sets a parameter's moment `key`, or its fp32 weights (None), from `full` of rank 0."""
    from deepspeed import utils

    like = torch.empty(full_shape(parameter), device=engine.device)
    value = tensor_from_rank_zero(full, like)
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


class Partitions:
    """Joins DeepSpeed's parsed model states, and each rank's optimizer state, to full tensors."""

    def __init__(self, models: list[Any], ranks: list[dict[str, Any]]) -> None:
        self.models, self.ranks = models, ranks
        self.is_stage_3 = "fp32_flat_groups" in ranks[0]
        written = ranks[0]["partition_count"]
        expected = max(written) if isinstance(written, list) else written
        if expected != len(ranks):
            raise ValueError(f"{expected} ranks wrote optimizer states, {len(ranks)} files exist")

    def weights(self, module: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the fp32 weights in the order of `module`, the half-precision weights."""
        full: dict[str, Tensor] = {}
        key = "single_partition_of_fp32_groups"
        if self.is_stage_3:
            full, key = compat.join_frozen(len(self.ranks), self.models), "fp32_flat_groups"
        full |= self._join([rank[key] for rank in self.ranks]) | self.models[0].buffers
        for name, original in self.models[0].shared_params:
            if name in module:  # else it is frozen and excluded
                full[name] = full.get(original, module[name])
        return {name: full.get(name, tensor) for name, tensor in module.items()}

    def optimizer_state(self) -> State | None:
        """Returns the state by name, or None if it is not in the checkpoint (NVMe offload, SGD)."""
        key = "optimizer_state_dict" if self.is_stage_3 else "base_optimizer_state"
        bases = [rank[key] for rank in self.ranks]
        flat = bases[0]["state"]
        for entries in flat.values():
            if "exp_avg" in entries and not entries["exp_avg"].numel():
                return None
        if not flat:
            return None
        numbers = sorted(flat)
        shapes = self.models[0].param_shapes  # of each group; under ZeRO-3 of each sub-group
        state: dict[str, dict[str, Any]] = {name: {} for group in shapes for name in group}
        for key, value in flat[numbers[0]].items():
            if isinstance(value, Tensor) and value.ndim:
                parts = [[base["state"][number][key] for number in numbers] for base in bases]
                for name, tensor in self._join(parts).items():
                    state[name][key] = tensor
                continue
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


def _load(file: str) -> dict[str, Any]:
    return torch.load(file, map_location="cpu", mmap=True)


def _lightnings(main: dict[str, Any]) -> Checkpoint:
    """Returns the entries of a model file that are not DeepSpeed's."""
    return {key: value for key, value in main.items() if key not in DEEPSPEEDS_OWN}
