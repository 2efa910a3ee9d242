"""The gate of `export` refuses a folder that is not what was trained: each planted fault by its sentence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dist_template import InputError, Project
from dist_template.wings.ship.export.gate import PROMPTS, prompts_of
from tests.support.chats import TAGGED, UNTAGGED
from tests.support.runs import OURS, disk, newest, only_run, run
from tests.support.wings import Trained, load_trained
from tests.support.wings import export as command


@pytest.fixture
def trained(flags: list[str], tmp_path: Path) -> Trained:
    """A run of two steps; its tokenizer has a chat template."""
    assert run("fit", *flags, "--trainer.max_steps=2", "--trainer.limit_val_batches=0") == 0
    found = load_trained(str(only_run(tmp_path)), OURS)
    found.tokenizer.chat_template = TAGGED
    return found


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def plant(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return plant


def transpose(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.1.self_attn.q_proj.weight"
    tensors[name] = tensors[name].T.contiguous()


def halve(tensors: dict[str, torch.Tensor]) -> None:
    tensors |= {name: tensor.bfloat16() for name, tensor in tensors.items()}


def other_ids(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["e"], vocabulary["a"] = vocabulary["a"], vocabulary["e"]
    (folder / "tokenizer.json").write_text(json.dumps(content))


def other_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(
        UNTAGGED.replace("system", "user").replace("<|im_end|>", "")
    )


def other_rotation(folder: Path) -> None:
    content = json.loads((folder / "config.json").read_text())
    content["rope_parameters"]["rope_theta"] = 77.0
    (folder / "config.json").write_text(json.dumps(content))


def as_bfloat16(folder: Path) -> None:
    weights(halve)(folder)
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"dtype": "bfloat16"}))


FAULTS = {
    "transposed weight": (weights(transpose), "its logits differ by up to"),
    "wrong tokenizer": (other_ids, "its tokenizer gives other tokens for '"),
    "wrong chat template": (other_template, "its chat template gives .*, not .*im_end"),
    "stale sines": (other_rotation, "its logits differ by up to"),
    "another type": (as_bfloat16, r"its weights are torch\.bfloat16, and --dtype is float32"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named_and_nothing_is_written(
    trained: Trained, tmp_path: Path, monkeypatch: Any, fault: str
) -> None:
    """In the folder between its writing and its check, as a faulty exporter would leave it."""
    plant, sentence = FAULTS[fault]
    honest = command.write_pretrained

    def faulty(model: Any, dtype: str, folder: Path) -> None:
        honest(model, dtype, folder)
        plant(folder)

    monkeypatch.setattr(command, "write_pretrained", faulty)
    output = tmp_path / "out"
    with (
        pytest.raises(InputError, match=sentence) as error,
        command.written_at_once(output) as folder,
    ):
        command.write(trained, False, "float32", folder)
    assert "\n" not in str(error.value).replace("\\n", "")
    assert not list(tmp_path.glob("*out*"))


def test_a_stale_token_cache_is_refused_before_anything_is_read(
    flags: list[str], corpus: Path, tmp_path: Path
) -> None:
    texts = shutil.copytree(corpus, tmp_path / "texts")
    own = [*flags, f"--data.source.paths=[{texts}/*.txt]", f"--data.cache_dir={tmp_path}/cache"]
    assert run("fit", *own, "--trainer.max_steps=1", "--trainer.limit_val_batches=0") == 0
    (texts / "00.txt").write_text("another text")
    with pytest.raises(InputError, match="token cache .* is stale"):
        command.main(["export", str(only_run(tmp_path)), f"--output={tmp_path}/out"], OURS)
    assert not (tmp_path / "out").exists()


def test_prompts_are_held_out_and_else_those_of_the_configuration(trained: Trained) -> None:
    texts = prompts_of(trained.data)
    assert len(texts) == PROMPTS and len(set(texts)) > PROMPTS / 2
    trained.data.corpus.manifest["splits"]["validation"]["tokens"] = 0
    held_out = trained.data.corpus.tokens("validation")
    trained.data._corpus = type("Empty", (), {"tokens": lambda self, split: held_out[:0]})()
    trained.data.prompts = ["def", "", "import"]
    assert prompts_of(trained.data) == ["def", "import"]


# ---- the command -----------------------------------------------------------------------------------------------------


def test_a_run_is_exported_with_its_own_configuration_and_a_card(
    trained: Trained, tmp_path: Path
) -> None:
    from huggingface_hub import ModelCard

    folder = only_run(tmp_path)
    (folder / "evaluation").mkdir()
    found = {"split": "test", "documents": 30, "worst": [{"text": "private"}]}
    found["comparisons"] = [{"name": "loss", "sentence": "better with 30 samples"}]
    (folder / "evaluation/standard.json").write_text(json.dumps(found))
    command.main(["export", str(folder), f"--output={tmp_path}/out", "--license=mit"], OURS)
    card = ModelCard.load(tmp_path / "out/README.md")
    assert card.data.license == "mit" and card.data.library_name == "transformers"
    table = [line for line in card.text.splitlines() if line.startswith("| ") and line != "| | |"]
    rows = dict(line.strip("| ").split(" | ") for line in table)
    expected = {
        "architecture": "LlamaForCausalLM", "parent": "none: trained from scratch", "licence": "mit",
        "checkpoint": str(newest(folder)), "standard: loss": "better with 30 samples",
    }  # fmt: skip
    assert {name: rows.get(name) for name in expected} == expected
    assert (
        "private" not in card.text and (tmp_path / "out/model.safetensors").stat().st_mode & 0o044
    )
    assert "100 prompts" in rows["verified"] and "dist-template" in rows["format"]


def test_a_full_disk_is_one_sentence_and_leaves_nothing(trained: Trained, tmp_path: Path) -> None:
    with disk(tmp_path / "disk", "64k") as small:
        with pytest.raises(
            InputError, match="cannot be written: (.*No space left on device|problem writing)"
        ) as error:
            command.main(["export", str(only_run(tmp_path)), f"--output={small}/out"], OURS)
        assert "\n" not in str(error.value) and not list(small.iterdir())


def test_a_project_is_needed_only_for_a_run(trained: Trained, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    trained.model.save_pretrained(folder)
    trained.tokenizer.save_pretrained(folder)
    found = load_trained(str(folder), Project("no_such_package"))
    assert torch.equal(
        found.model(torch.arange(9)[None]).logits, trained.model(torch.arange(9)[None]).logits
    )
