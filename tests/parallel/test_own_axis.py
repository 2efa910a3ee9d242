"""An axis of another package: a class and a YAML; a mesh is built with it, planned and reduced."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dist_template import plugins
from dist_template.cli.limits import Machine
from dist_template.parallel.spec import spec_of
from dist_template.parallel.spec.facts import Facts, Sent
from dist_template.strategies import MeshStrategy
from tests.support.limits import violations_of
from tests.support.mirror import FILE, install
from tests.support.parity import Trainings, assert_trains_alike, mask_labels

MIRRORED = {"class_path": "MeshStrategy", "dict_kwargs": {"mirror_size": 4}}
FACTS = Facts(world_size=4, parameters=10**6, trainable=10**6, layers=8, global_batch_size=8)


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    site = tmp_path / "site"
    site.mkdir()
    install(site)
    monkeypatch.syspath_prepend(site)
    plugins.loaded.cache_clear()
    yield
    plugins.loaded.cache_clear()


def test_a_new_axis_has_sizes_refusals_memory_messages_and_a_small_form() -> None:
    spec: Any = spec_of(MIRRORED)
    others = dict.fromkeys(("pp", "dp_replicate", "tp", "ep", "cp"), 1)
    assert spec.sizes(8) == others | {"fsdp": 2, "mirror": 4}
    assert spec.data_parallel(8) == 2 and spec.axes(8) == ["fsdp"]
    assert violations_of(MIRRORED, Machine("cuda", 8)) == ["mirror_size 4: two mirrors are enough"]
    refused = violations_of(MIRRORED, Machine("cuda", 6))
    assert any("mirror_size 4 does not make 6" in each for each in refused)
    memory, alone = spec.memory(FACTS), spec_of("ddp").memory(FACTS)
    assert memory["weights"] == alone["weights"] and memory["checksums"] == 64
    sent = [one for one in spec.traffic(FACTS) if one.size == 8]
    assert sent == [Sent("all_reduce", 8, 8, 4, 4)]
    small = spec_of(MIRRORED).reduced()
    assert (small.arguments["mirror_size"], small.processes, small.data_parallel) == (2, 4, 2)
    half = spec_of({**MIRRORED, "dict_kwargs": {"mirror_size": 2, "fsdp_size": 1}}).reduced(1)
    assert (half.arguments["mirror_size"], half.processes) == (1, 1)


def test_a_constructed_strategy_knows_the_axis() -> None:
    spec: Any = spec_of(MeshStrategy(mirror_size=2, fsdp_size=1))
    assert spec.sizes(2)["mirror"] == 2 and spec.data_parallel(2) == 1


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama"])
def test_a_mesh_with_it_trains_to_the_losses_of_one_process(train: Trainings, model: str) -> None:
    flags = [f"--config={FILE}", "--data.micro_batch_size=4"]
    mirrored = train.run("fit", model, "one", *flags, processes=2, prelude=mask_labels)
    assert_trains_alike(mirrored, train(model, "one"))
