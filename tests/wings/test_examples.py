"""The library's examples: planned with the published sizes as docs/plan.md says, trained small."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from dist_template.parallel.estimates import estimate_of
from dist_template.parallel.estimates.candidates import Candidate
from dist_template.wings.plan.estimate import Planned
from dist_template.wings.plan.planner import Planner
from tests import ROOT
from tests.support.runs import CONFIGS, OURS, SHIPPED, run
from tests.support.wings import rehearse_main

GB = 1e9
QWEN: dict[str, Any] = {"head_dim": 128, "vocab_size": 151_936, "max_position_embeddings": 40_960}
QWEN |= {"rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
SMALL = QWEN | {"model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072}
SMALL |= {"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8}
SMALL |= {"tie_word_embeddings": True}
LLAMA: dict[str, Any] = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14_336}
LLAMA |= {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
LLAMA |= {"vocab_size": 128_256, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5}
LLAMA |= {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
EXPERTS = QWEN | {"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144}
EXPERTS |= {"num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4}
EXPERTS |= {"moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
EXPERTS |= {"norm_topk_prob": True, "router_aux_loss_coef": 0.001}
PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {  # weights: parameters, and config.json's sizes
    "Qwen/Qwen3-0.6B": (596_049_920, SMALL),
    "meta-llama/Llama-3.1-8B-Instruct": (8_030_261_248, LLAMA),
    "Qwen/Qwen3-30B-A3B": (30_532_122_624, EXPERTS),
}
EXAMPLES = sorted(path.stem for path in (SHIPPED / "example").glob("*.yaml"))
ROW = re.compile(r"^\| `example/(\w+)` \| (.+) \| (\d+) x (\d+) x (\S+) \| ([\d.]+) \|", re.M)


def content(name: str) -> dict[str, Any]:
    return yaml.safe_load((SHIPPED / "example" / f"{name}.yaml").read_text("utf-8"))


def flags_of(name: str, folder: Path) -> list[str]:
    """As typed, but for the weights: a folder with the published configuration alone."""
    _, sizes = PUBLISHED[content(name)["model"]["pretrained"]]
    (folder / "config.json").write_text(json.dumps(sizes | {"eos_token_id": 0}), "utf-8")
    files = [f"--config={CONFIGS}/finetune.yaml", f"--config=example/{name}"]
    return [*files, f"--model.pretrained={folder}"]


def test_every_example_has_a_row_and_names_its_tokenizer_and_machine() -> None:
    rows = ROW.findall((ROOT / "docs" / "plan.md").read_text("utf-8"))
    assert sorted(row[0] for row in rows) == EXAMPLES and len(EXAMPLES) == 4
    for name in EXAMPLES:
        given = content(name)
        trainer, site, data = given["trainer"], given["cluster"], given["data"]
        assert data["tokenizer"]["init_args"]["path"] == given["model"]["pretrained"]
        assert trainer["devices"] == site["devices_per_node"]
        assert trainer["num_nodes"] == site.get("nodes", 1)
        world = trainer["devices"] * trainer["num_nodes"]
        assert data["global_batch_size"] % (world * data["micro_batch_size"]) == 0
        assert f"--config example/{name} " in (SHIPPED / "example" / f"{name}.yaml").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_as_planned(name: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """The verb `plan`, for the file's own strategy, micro-batch and checkpointing alone."""
    given, found = content(name), list[tuple[Planner, Planned]]()

    def own(planner: Planner, machine: Any) -> list[Planned]:
        strategy = estimate_of(given["trainer"].get("strategy"))
        rows, mode = given["data"]["micro_batch_size"], given["model"]["blocks"]["checkpointing"]
        option = planner.option(Candidate("its own", "", {}, strategy), machine, rows, mode)
        found.append((planner, option))
        return [option]

    monkeypatch.setattr(Planner, "options", own)
    assert run("plan", *flags_of(name, tmp_path)) == 0
    printed = capsys.readouterr().out
    ((planner, option),) = found
    parameters, _ = PUBLISHED[given["model"]["pretrained"]]
    size, adapters = planner.traced.size, "adapter" in given["model"]
    assert size.total - adapters * size.trainable == parameters
    assert option.is_allowed and option.fits and "Nothing fits" not in printed
    assert option.machine.memory == GB * int(given["cluster"]["device_memory"].removesuffix("GB"))
    rows = {row[0]: row[1:] for row in ROW.findall((ROOT / "docs/plan.md").read_text("utf-8"))}
    weights, nodes, devices, memory, total = rows[name]
    assert weights.startswith(given["model"]["pretrained"].split("/")[1].removesuffix("-Instruct"))
    machine = (option.machine.nodes, option.machine.devices, given["cluster"]["device_memory"])
    assert (int(nodes), int(devices), memory) == machine
    print(f"{name}: {option.total() / GB:.1f} GB of {memory}")
    assert total == f"{option.total() / GB:.1f}"


def verdicts(name: str, folder: Path, only: str) -> list[str]:
    """Of the checks of a rehearsal that passed as a whole."""
    flags = [*flags_of(name, folder), f"--only={only}", f"--output={folder / 'out'}"]
    rehearse_main(["rehearse", *flags], OURS)
    report = json.loads((folder / "out" / "rehearsal.json").read_text("utf-8"))
    assert report["ok"]
    return [check["verdict"] for check in report["checks"]]


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_fit_would_accept_an_example_on_its_machine(name: str, tmp_path: Path) -> None:
    """All checks before a start, at full size."""
    assert verdicts(name, tmp_path, "the real sizes fit together") == ["pass"]


@pytest.mark.nightly
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_reduced_example_trains_like_one_process(name: str, tmp_path: Path) -> None:
    assert {*verdicts(name, tmp_path, "loss curve")} == {"pass"}
