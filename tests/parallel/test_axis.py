"""An axis that the library does not know is one class, and a file of keys."""

from collections.abc import Iterator
from typing import Any

import pytest

from dist_template.cli.limits import Machine
from dist_template.parallel import mesh_sizes
from dist_template.parallel.estimates import estimate_of
from dist_template.parallel.estimates.facts import Facts, Sent
from dist_template.parallel.shrunk import shrunk
from tests.support.limits import violations_of


class MirrorAxis(mesh_sizes.Axis):
    """Ranks that repeat each other's work, and compare a checksum of their gradients."""

    name = "mirror"
    draws_own = False
    is_proven = False

    def buffers(self, facts: Facts) -> dict[str, float]:
        return {"checksums": 8.0 * facts.layers}

    def refusals(self, setup: Any) -> Iterator[str]:
        if self.size > 2:
            yield f"mirror_size {self.size}: two mirrors are enough"

    def traffic(self, facts: Facts) -> Iterator[Sent]:
        yield Sent("all_reduce", facts.layers, 8, self.size, self.size)


MIRRORED = {"class_path": "MeshStrategy", "dict_kwargs": {"mirror_size": 4}}
FACTS = Facts(world_size=4, parameters=10**6, trainable=10**6, layers=8, global_batch_size=8)


@pytest.fixture
def mirrors() -> Iterator[None]:
    mesh_sizes.AXES.append(MirrorAxis)
    yield
    mesh_sizes.AXES.remove(MirrorAxis)


@pytest.mark.usefixtures("mirrors")
def test_a_new_axis_has_sizes_refusals_memory_messages_and_a_small_form() -> None:
    sharding: Any = estimate_of(MIRRORED)
    others = dict.fromkeys(("pp", "dp_replicate", "tp", "ep", "cp"), 1)
    assert sharding.sizes(8) == others | {"fsdp": 2, "mirror": 4}
    assert sharding.data_parallel(8) == 2 and sharding.axes(8) == ["fsdp"]
    assert violations_of(MIRRORED, Machine("cuda", 8)) == ["mirror_size 4: two mirrors are enough"]
    refused = violations_of(MIRRORED, Machine("cuda", 6))
    assert any("mirror_size 4 does not make 6" in each for each in refused)
    memory, alone = sharding.memory(FACTS), estimate_of("ddp").memory(FACTS)
    assert memory["weights"] == alone["weights"] and memory["checksums"] == 64
    sent = [one for one in sharding.traffic(FACTS) if one.size == 8]
    assert sent == [Sent("all_reduce", 8, 8, 4, 4)]
    small = shrunk(MIRRORED)
    assert (small.arguments["mirror_size"], small.processes, small.data_parallel) == (2, 4, 2)
    half = shrunk({**MIRRORED, "dict_kwargs": {"mirror_size": 2, "fsdp_size": 1}}, 1)
    assert (half.arguments["mirror_size"], half.processes) == (1, 1)
