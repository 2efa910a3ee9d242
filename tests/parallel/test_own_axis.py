"""An axis of another package: a class and a YAML; a mesh is built with it, planned and reduced."""

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from trainer_dev.module import LanguageModule

from dist_template import InputError, plugins
from dist_template.cli.limits import Machine
from dist_template.parallel.mesh.axes import Axis
from dist_template.parallel.spec import spec_of
from dist_template.parallel.spec.candidates import Candidate
from dist_template.parallel.spec.facts import Facts, Sent
from dist_template.strategies import MeshStrategy
from dist_template.wings.plan.estimate import Machine as Devices
from dist_template.wings.plan.planner import Planner
from tests.support.extras import write_metadata
from tests.support.limits import violations_of
from tests.support.mirror import FILE, install
from tests.support.parity import Trainings, assert_trains_alike, mask_labels
from tests.support.runs import CONFIGS, run_in_subprocess

REPOSITORY = Path(__file__).parents[2]
LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96}
LLAMA |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
MIRRORED = {"class_path": "MeshStrategy", "dict_kwargs": {"mirror_size": 4}}
KEY, OF_PICKY = "trainer.strategy.init_args.picky_size", f"{__name__}:Picky"
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
    assert "mirror_size" not in spec_of({"class_path": "MeshStrategy"}).reduced().arguments
    small = spec_of(MIRRORED).reduced()
    assert (small.arguments["mirror_size"], small.processes, small.data_parallel) == (2, 4, 2)
    half = spec_of({**MIRRORED, "dict_kwargs": {"mirror_size": 2, "fsdp_size": 1}}).reduced(1)
    assert (half.arguments["mirror_size"], half.processes) == (1, 1)


def test_a_constructed_strategy_knows_the_axis() -> None:
    spec: Any = spec_of(MeshStrategy(mirror_size=2, fsdp_size=1))
    assert spec.sizes(2)["mirror"] == 2 and spec.data_parallel(2) == 1


class Picky(Axis):
    name = "picky"

    def __init__(self, spec: Any, sizes: Any) -> None:
        super().__init__(spec, sizes)
        if self.size == 4:
            raise ValueError("four is too many. Really")


def test_an_axis_that_refuses_its_size_is_one_sentence(tmp_path: Path) -> None:
    write_metadata(tmp_path / "site", "picky", {"dist_template.axes": {"picky": OF_PICKY}})
    plugins.loaded.cache_clear()
    of_size: Any = {"class_path": "MeshStrategy", "dict_kwargs": {"picky_size": 2}}
    assert violations_of(of_size, Machine("cuda", 8)) == []
    of_size["dict_kwargs"] = {"picky_size": 4}
    with pytest.raises(InputError, match=f"{KEY}: Picky refuses it: ValueError: four is too many"):
        violations_of(of_size, Machine("cuda", 8))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama"])
def test_a_mesh_with_it_trains_to_the_losses_of_one_process(train: Trainings, model: str) -> None:
    flags = [f"--config={FILE}", "--data.micro_batch_size=4"]
    mirrored = train.run("fit", model, "one", *flags, processes=2, prelude=mask_labels)
    assert_trains_alike(mirrored, train(model, "one"))


@pytest.mark.slow
def test_a_mesh_with_it_is_planned_and_rehearsed(tmp_path: Path) -> None:
    """`plan` weighs the library's own strategies, and its planner any."""
    given = yaml.safe_load(FILE.read_text())["trainer"]["strategy"]
    module = LanguageModule(architecture=LLAMA | {"vocab_size": 257})
    sizes = {"seq_len": 256, "global_batch_size": 8, "batch_sizes": (8, 8)}
    data = SimpleNamespace(**sizes, cross_document_attention=False)
    made = Planner(module, data, {}, Machine("cuda", 1, 1, "bf16-mixed"))
    mirrors = Candidate("mirrors", "", {}, spec_of(given))
    planned = made.option(mirrors, Devices(1, 2, 8e10, 6e14, 3e11, 4e10), 4, "none")
    assert planned.parts()["buffers"] > 0 and planned.seconds() > 0

    path = os.pathsep.join([str(tmp_path / "site"), str(REPOSITORY), os.environ["PYTHONPATH"]])
    flags = [f"--config={CONFIGS}/quickstart.yaml", f"--config={FILE}", f"--output={tmp_path}/out"]
    done = run_in_subprocess("rehearse", *flags, "--devices=2", PYTHONPATH=path)
    assert done.returncode == 0, done.stdout + done.stderr
