"""The axes of MeshStrategy's mesh, outermost first; a package adds its own by an entry point.

dense parameters    (pp, dp_replicate, fsdp, tp)
experts             (pp, dp_replicate, efsdp, ep),  efsdp = fsdp x tp / ep
sequences           cp neighbours along fsdp share each sequence"""

from ....plugins import loaded
from .axis import Axis
from .expert import ExpertAxis
from .pipeline import PipelineAxis
from .replica import ReplicaAxis
from .sequence import SequenceAxis
from .shard import ShardAxis
from .tensor import TensorAxis

__all__ = ["AXES", "Axis", "ReplicaAxis", "SequenceAxis", "TensorAxis", "all_axes"]

GROUP = "dist_template.axes"  # entry points: an axis's name, and its class
AXES: tuple[type[Axis], ...] = (
    PipelineAxis,
    ReplicaAxis,
    ShardAxis,
    TensorAxis,
    ExpertAxis,
    SequenceAxis,
)


def is_axis(value: object) -> bool:
    """a subclass of dist_template.parallel.mesh.axes.Axis with a name"""
    return isinstance(value, type) and issubclass(value, Axis) and bool(value.name)


def all_axes() -> list[type[Axis]]:
    """Returns the library's axes, then the project's and packages'."""
    return [*AXES, *loaded(GROUP, is_axis).values()]
