"""The ranks of MeshStrategy: its mesh of processes, and which batches and random numbers a rank
has."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ...compat.lightning import set_mesh, start_process_group
from ..own_format import OwnFormat
from ..rank_view import DataRank, RankView, T
from .axes import all_axes
from .axes.axis import MeshSizes
from .pipeline.stages import Schedule
from .sequence import shard_batch
from .sizes import data_parallel_size, sequence_parts, sizes_of


class MeshRanks(RankView, OwnFormat, ModelParallelStrategy):
    """What shard.py and the pipeline read of a MeshStrategy, which describes its arguments."""

    arguments: dict[str, Any]
    pp_schedule: Schedule
    tp_plan: dict[str, str] | None
    ep_plan: dict[str, str] | None
    cpu_offload: bool
    mesh_sizes: MeshSizes
    expert_mesh: DeviceMesh
    stages: DeviceMesh  # of a pipeline, (stage, rank of the stage)

    def setup_environment(self) -> None:
        # With offload, gradients are in host memory when they are clipped.
        start_process_group(self, "cpu:gloo,cuda:nccl" if self.cpu_offload else None)
        sizes = self.mesh_sizes = sizes_of(self.arguments, self.world_size)
        dense = [axis.name for axis in all_axes() if axis.adds_ranks]
        set_mesh(self, self._mesh_of({name: sizes[name] for name in dense}))
        self.axes = dict(zip(dense, self.device_mesh.get_coordinate() or (), strict=True))
        efsdp = sizes.fsdp * sizes.tp // sizes.ep
        experts = {"pp": sizes.pp, "dp_replicate": sizes.dp_replicate, "efsdp": efsdp}
        others = {name: sizes[name] for name in dense if name not in ("fsdp", "tp", *experts)}
        self.expert_mesh = self._mesh_of(others | experts | {"ep": sizes.ep})
        if sizes.cp > 1:
            rows = self.world_size // sizes.pp // sizes.cp // sizes.tp
            parts = {"pp": sizes.pp, "batch": rows, "cp": sizes.cp, "tp": sizes.tp}
            self.sequence_group = self._mesh_of(parts).get_group("cp")
        if sizes.pp > 1:
            self.stages = self._mesh_of({"pp": sizes.pp, "of_stage": self.world_size // sizes.pp})

    def _mesh_of(self, sizes: Mapping[str, int]) -> DeviceMesh:
        device = self.root_device.type  # transformers' own function would use a GPU if there is one
        return init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    @property
    def data_rank(self) -> DataRank:
        """Which part of the batches this rank reads: the same if ranks differ in pp, tp or cp."""
        number = self._number_along("reads_own_rows")
        return DataRank(
            number // sequence_parts(self.mesh_sizes), data_parallel_size(self.mesh_sizes)
        )

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        return {"num_replicas": self.data_rank.size, "rank": self.data_rank.rank}

    @property
    def random_rank(self) -> int:
        """Tensor-parallel ranks share a random stream, which drops the same hidden states."""
        return self._number_along("draws_own")

    def _number_along(self, kind: str) -> int:
        """Returns this rank's number among those that differ from it along axes of this kind
        alone."""
        number = 0
        for axis in all_axes():
            if axis.adds_ranks and getattr(axis, kind):
                number = number * self.mesh_sizes[axis.name] + self.axes[axis.name]
        return number

    def shard_batch(self, batch: T) -> T:
        """Returns the rank's part of the sequences of a batch; without cp, the batch."""
        return shard_batch(batch, self.sequence_group) if self.sequence_group else batch

    def batch_to_device(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        return self.shard_batch(super().batch_to_device(batch, device, dataloader_idx))

    @property
    def shards(self) -> bool:
        return self.world_size > 1 or self.cpu_offload
