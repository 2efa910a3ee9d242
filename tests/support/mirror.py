"""A package with an axis of its own: one class, its entry point, and mirror.yaml."""

from collections.abc import Iterator
from pathlib import Path

from dist_template.parallel.configured import Configured
from dist_template.parallel.mesh.axes import Axis
from dist_template.parallel.spec.facts import Facts, Sent
from tests.support.extras import write_metadata

FILE = Path(__file__).with_suffix(".yaml")  # a mesh with two mirrors


class MirrorAxis(Axis):
    """Ranks that repeat each other's work, and compare a checksum of their gradients."""

    name = "mirror"
    draws_own = False
    is_proven = False

    def refusals(self, setup: Configured) -> Iterator[str]:
        if self.size > 2:
            yield f"mirror_size {self.size}: two mirrors are enough"

    def buffers(self, facts: Facts) -> dict[str, float]:
        return {"checksums": 8.0 * facts.layers}

    def traffic(self, facts: Facts) -> Iterator[Sent]:
        yield Sent("all_reduce", facts.layers, 8, self.size, self.size)


def install(folder: Path) -> None:
    """Installs the package into `folder`, which is on sys.path."""
    points = {"dist_template.axes": {"mirror": f"{__name__}:MirrorAxis"}}
    write_metadata(folder, "mirror", points)
