"""What is known of a model under a strategy: proven, refused, or not compared yet."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig

from dist_template import AdapterConfig
from dist_template.cli.limits import proven
from dist_template.model import proof
from dist_template.strategies import MeshStrategy
from dist_template.text.model.adapters import proof_axes
from tests.support.runs import run

SWITCHES = proof.switches_of(AutoConfig.for_model("llama"))
PLAIN = {
    "switches": SWITCHES,
    "right": ["ddp", "fsdp", "tp", "fsdp+tp", "lora+tp"],
    "refused": {"pp": "it is odd", "lora+ddp": "A differs"},
}
BIASED = {
    "switches": SWITCHES | {"attention_bias": True},
    "right": ["tp"],
    "refused": {"fsdp+cp": "a bias"},
}
CLIPPED = proof.switches_of(AutoConfig.for_model("olmo", clip_qkv=3.0))
OLMO = {"switches": CLIPPED | {"clip_qkv": False}, "right": ["tp"], "refused": {}}
CAPPED = {"switches": CLIPPED, "right": [], "refused": {"tp": "it dies"}}
LLAMAS = {"olmo": {"variants": [OLMO, CAPPED]}, "llama": {"variants": [PLAIN, BIASED]}}
TABLE: dict[str, Any] = {"versions": proof.versions(), "models": LLAMAS}


@pytest.fixture(autouse=True)
def table(monkeypatch: Any) -> None:
    monkeypatch.setattr(proof, "_table", lambda: TABLE)


def llama(**fields: Any) -> Any:
    return AutoConfig.for_model("llama", **fields)


VERDICTS: Any = [
    ({}, "", "proven", ""),
    ({}, "fsdp+tp", "proven", ""),
    ({}, "pp", "refused", "it is odd"),
    ({"hidden_size": 96}, "tp", "proven", ""),  # no size is a switch
    ({}, "fsdp+pp", "refused", "it is odd"),  # a product of what is refused
    ({"attention_bias": True}, "fsdp+tp", "proven", ""),  # right under tp; the product without
    ({"attention_bias": True}, "fsdp+cp", "refused", "a bias"),
    ({}, "fsdp+cp", "refused", "a bias"),  # none that was tried is right
    ({"mlp_bias": True}, "fsdp+cp", "refused", "a bias"),
    ({"mlp_bias": True}, "pp", "refused", "it is odd"),  # switches that nobody tried
    ({"mlp_bias": True}, "fsdp+pp", "refused", "it is odd"),
    ({"mlp_bias": True}, "zero2", "unproven", "zero2"),
    ({"mlp_bias": True}, "tp", "unproven", "bias true"),
    ({"attention_bias": True}, "ddp", "proven", ""),  # no layer is divided
    ({}, "ddp", "proven", ""),  # what is refused with adapters holds for them only
    ({}, "lora+ddp", "refused", "A differs"),
    ({}, "lora+pp", "refused", "it is odd"),
    ({}, "lora+tp", "proven", ""),
    ({}, "lora+fsdp", "unproven", "of type 'llama' under lora+fsdp"),
    ({}, "lora with quantize nf4+tp", "unproven", "under lora with quantize nf4+tp"),
]


@pytest.mark.parametrize(("fields", "axes", "kind", "why"), VERDICTS)
def test_a_verdict_depends_on_type_switches_strategy_and_adapters(
    fields: dict[str, Any], axes: str, kind: str, why: str
) -> None:
    """Of the type, its switches, the strategy and adapters, which have verdicts of their own."""
    found = proof.verdict(llama(**fields), axes)
    assert found.kind == kind and why in found.why


def test_numbers_that_change_what_a_model_computes_are_switches(monkeypatch: Any) -> None:
    def olmo(**fields: Any) -> Any:
        return proof.verdict(AutoConfig.for_model("olmo", **fields), "tp")

    assert olmo().kind == "proven"
    assert olmo(clip_qkv=8.0) == ("refused", "it dies"), "a clip of another size"
    assert olmo(clip_qkv=8.0, attention_bias=True) == ("refused", "it dies"), "with another switch"
    monkeypatch.setitem(LLAMAS, "olmo", {"variants": [OLMO]})
    assert olmo(clip_qkv=0.5) == ("unproven", "clip_qkv 0.5 of type 'olmo' under tp")
    for kind, fields in {
        "gemma2": {"attn_logit_softcapping": None},
        "starcoder2": {"sliding_window": 8},
        "granite": {"residual_multiplier": 0.2},
        "deepseek_v3": {"q_lora_rank": None},
        "gemma3n_text": {"num_hidden_layers": 5, "activation_sparsity_pattern": [0.5] * 5},
    }.items():
        plain = {name: value for name, value in fields.items() if name == "num_hidden_layers"}
        one, other = (
            proof.switches_of(AutoConfig.for_model(kind, **each)) for each in (plain, fields)
        )
        assert {name for name in one if one[name] != other[name]} == {*fields} - {*plain}, kind


def test_another_version_is_unproven(monkeypatch: Any) -> None:
    monkeypatch.setattr(proof, "versions", lambda: {"transformers": "9.0", "torch": "2.13.0"})
    assert "transformers 9.0" in proof.verdict(llama(), "tp").why
    assert proof.verdict(llama(), "pp").kind == "refused", "a newer version is not taken to mend it"


def test_a_project_remembers_what_it_has_proven(tmp_path: Path, monkeypatch: Any) -> None:
    config = llama(mlp_bias=True)
    proof.remember(tmp_path / "package", config, MeshStrategy(fsdp_size=1, tp_size=2), 2)
    assert proof.verdict(config, "tp", tmp_path).kind == "proven"
    assert proof.verdict(config, "zero2", tmp_path).kind == "unproven"
    both = llama(mlp_bias=True, attention_bias=True)
    assert proof.verdict(both, "tp", tmp_path).kind == "unproven"
    monkeypatch.setattr(proof, "versions", lambda: {"transformers": "9.0", "torch": "2.13.0"})
    assert proof.verdict(config, "tp", tmp_path).kind == "unproven"


def test_lines_that_wait_are_of_the_code_as_it_is(tmp_path: Path, monkeypatch: Any) -> None:
    package, config = tmp_path / "package", llama(mlp_bias=True)
    package.mkdir()
    (package / "module.py").write_text("a = 1\n")
    assert proof.waits_of(package) is None
    proof.remember(package, waits=["module.py:1 reads a value"])
    proof.remember(package, config, MeshStrategy(fsdp_size=1, tp_size=2), 2)
    assert proof.waits_of(package) == ["module.py:1 reads a value"]
    assert proof.verdict(config, "tp", tmp_path).kind == "proven"
    on_gpu = SimpleNamespace(root_device=torch.device("cuda"))
    monkeypatch.setattr(proof, "axes_of", lambda *_: "")
    assert not [*proven.notes(config, None, None, on_gpu, 1, package)]
    (package / "module.py").write_text("a = 2\n")
    assert proof.waits_of(package) is None
    (note,) = proven.notes(config, None, None, on_gpu, 1, package)
    assert "rehearse --gpu`" in note


def test_a_proof_with_adapters_is_none_without_them(tmp_path: Path) -> None:
    def module(**keys: Any) -> SimpleNamespace:
        return SimpleNamespace(adapter_axes=proof_axes(AdapterConfig(**keys)))

    def axes(**keys: Any) -> str:
        return proof.axes_of("ddp", 2, module(**keys))

    config = AutoConfig.for_model("gpt2")
    proof.remember(tmp_path / "package", config, "ddp", 2, module(rank=2))
    assert proof.verdict(config, axes(rank=64, alpha=1.0), tmp_path).kind == "proven"
    others = ["ddp", axes(targets=["c_attn"]), axes(quantize="nf4"), axes(trainable=["wte"])]
    assert {proof.verdict(config, other, tmp_path).kind for other in others} == {"unproven"}


def test_fit_notes_what_is_not_proven(flags: list[str], monkeypatch: Any, capsys: Any) -> None:
    unproven = proof.Verdict("unproven", "a model of type 'own'")
    monkeypatch.setattr(proof, "verdict", lambda *_: unproven)
    assert run("fit", *flags, "--trainer.fast_dev_run=1") == 0
    assert f"note: not proven here: {unproven.why}. `" in capsys.readouterr().out


def test_fit_warns_of_a_type_whose_documents_depend_on_their_place(monkeypatch: Any) -> None:
    monkeypatch.setattr(proof, "leaks", lambda _: {"place": "the model.layers.0"})
    data = SimpleNamespace(cross_document_attention=False)
    (note,) = proven.notes(llama(), None, data, "ddp", 1, Path("nowhere/package"))
    assert "depends on where in its row it is (first in the model.layers.0)" in note


def test_the_shipped_table_is_of_the_pinned_versions_and_of_known_types() -> None:
    table = json.loads((Path(proof.__file__).parents[1] / "proof.json").read_text("utf-8"))
    assert set(table["models"]) <= set(CONFIG_MAPPING)
    assert table["versions"].keys() == set(proof.PACKAGES)
    for kind, entry in table["models"].items():
        for variant in entry.get("variants", []):
            assert not set(variant["right"]) & variant["refused"].keys(), kind
            assert all(variant["refused"].values()), kind
