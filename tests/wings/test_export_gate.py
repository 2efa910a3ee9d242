"""The gate of `export` refuses a folder that is not what was trained."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file

from dist_template import InputError, Project
from tests.support.chats import TAGGED, UNTAGGED
from tests.support.runs import OURS, newest, only_run, run
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


def edited(file: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def plant(folder: Path) -> None:
        content = json.loads((folder / file).read_text())
        change(content)
        (folder / file).write_text(json.dumps(content))

    return plant


def transpose(tensors: dict[str, torch.Tensor]) -> None:
    name = "model.layers.1.self_attn.q_proj.weight"
    tensors[name] = tensors[name].T.contiguous()


def swap(content: dict[str, Any]) -> None:
    known = content["model"]["vocab"]
    known["e"], known["a"] = known["a"], known["e"]


def other_template(folder: Path) -> None:
    changed = UNTAGGED.replace("system", "user").replace("<|im_end|>", "")
    (folder / "chat_template.jinja").write_text(changed)


def as_bfloat16(folder: Path) -> None:
    weights(lambda own: own.update({name: each.bfloat16() for name, each in own.items()}))(folder)
    edited("config.json", lambda content: content.update(dtype="bfloat16"))(folder)


def rotate(content: dict[str, Any]) -> None:
    content["rope_parameters"]["rope_theta"] = 77.0


FAULTS = {
    "transposed weight": (weights(transpose), "its logits differ by up to"),
    "wrong tokenizer": (edited("tokenizer.json", swap), "its tokenizer gives other tokens for '"),
    "wrong chat template": (other_template, "its chat template gives .*, not .*im_end"),
    "stale sines": (edited("config.json", rotate), "its logits differ by up to"),
    "another type": (as_bfloat16, r"its weights are torch\.bfloat16, and --dtype is float32"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named_and_nothing_is_written(
    trained: Trained, tmp_path: Path, monkeypatch: Any, fault: str
) -> None:
    """In the folder between its writing and its check, as a faulty exporter would leave it."""
    plant, sentence = FAULTS[fault]
    honest, output = command.write_pretrained, tmp_path / "out"

    def faulty(model: Any, dtype: str, folder: Path) -> None:
        honest(model, dtype, folder)
        plant(folder)

    monkeypatch.setattr(command, "write_pretrained", faulty)
    with (
        pytest.raises(InputError, match=sentence) as error,
        command.written_at_once(output) as folder,
    ):
        command.write(trained, False, "float32", folder)
    assert "\n" not in str(error.value).replace("\\n", "")
    assert not list(tmp_path.glob("*out*"))


def exported(run_folder: Path, output: Path, *flags: str) -> None:
    command.main(["export", str(run_folder), f"--output={output}", *flags], OURS)


def test_a_stale_token_cache_is_refused(flags: list[str], corpus: Path, tmp_path: Path) -> None:
    texts = shutil.copytree(corpus, tmp_path / "texts")
    own = [*flags, f"--data.source.paths=[{texts}/*.txt]", f"--data.cache_dir={tmp_path}/cache"]
    assert run("fit", *own, "--trainer.max_steps=1", "--trainer.limit_val_batches=0") == 0
    (texts / "00.txt").write_text("another text")
    with pytest.raises(InputError, match="token cache .* is stale"):
        exported(only_run(tmp_path), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_run_is_exported_with_its_own_configuration_and_a_card(
    trained: Any, tmp_path: Path
) -> None:
    folder, output = only_run(tmp_path), tmp_path / "out"
    (folder / "evaluation").mkdir()
    found = {"split": "test", "documents": 30, "worst": [{"text": "private"}]}
    found["comparisons"] = [{"name": "loss", "sentence": "better with 30 samples"}]
    (folder / "evaluation/standard.json").write_text(json.dumps(found))
    exported(folder, output, "--license=mit")
    card = ModelCard.load(output / "README.md")
    assert (card.data.license, card.data.library_name) == ("mit", "transformers")
    assert f"| checkpoint | {newest(folder)} |" in card.text and "private" not in card.text
    assert "| standard: loss | better with 30 samples |" in card.text
    assert (output / "model.safetensors").stat().st_mode & 0o044


def logits(found: Trained) -> torch.Tensor:
    assert not found.model.training and found.tokenizer.decode([72, 105]) == "Hi"
    with torch.no_grad():
        return found.model(torch.arange(60).view(2, 30)).logits


def test_a_run_a_checkpoint_and_a_folder_name_the_same_model(
    flags: list[str], tmp_path: Path
) -> None:
    assert run("fit", *flags, "--trainer.max_steps=2", "--trainer.limit_val_batches=0") == 0
    folder, output = only_run(tmp_path), tmp_path / "out"
    ours = [flag for flag in flags if not flag.startswith("--trainer.")]
    command.main(["export", *ours, "--checkpoint=last", f"--output={output}"], OURS)
    names = [tmp_path / "runs", folder, newest(folder), newest(folder) / "checkpoint.pt"]
    found = [load_trained(str(name), OURS) for name in names]
    assert {one.run for one in found} == {folder} and found[0].path == str(newest(folder))
    found.append(load_trained(str(output), Project("no_such_package")))
    assert found[-1].run is None
    for one in found[1:]:
        assert torch.equal(logits(one), logits(found[0])), one.path
    # its config.yaml has keys of `fit` that other verbs do not have
    given = f"--config={folder / 'config.yaml'}"
    assert run("doctor", given) in (0, 1) and run("prepare", given) == 0
    checkpoint = f"--ckpt_path={newest(folder)}"
    assert run("test", given, checkpoint, "--trainer.limit_test_batches=1") == 0
