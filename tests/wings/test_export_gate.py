"""The gate of `export` refuses a folder that is not what was trained; the versions of `promote`."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dist_template import InputError, Project
from dist_template.text.model import safetensors_files
from dist_template.wings.ship.export import command
from dist_template.wings.ship.export.trained import Trained, load_trained
from dist_template.wings.ship.promote import Registry
from tests import ROOT
from tests.support.chats import TAGGED, UNTAGGED
from tests.support.parity import FLAGS, MODELS
from tests.support.runs import OURS, newest, only_run, refused, run, small

TWO_STEPS = ["--trainer.max_steps=2", "--trainer.limit_val_batches=0"]


@pytest.fixture(scope="module")
def flags(corpus: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [*small(corpus, cache, tmp_path_factory.mktemp("fitted")), *TWO_STEPS]


@pytest.fixture(scope="module")
def folder(flags: list[str]) -> Path:
    assert run("fit", *flags) == 0
    return only_run(Path(flags[0].partition("=")[2]).parent)


@pytest.fixture
def trained(folder: Path) -> Trained:
    found = load_trained(str(folder), OURS)
    found.tokenizer.chat_template = TAGGED
    return found


def save_weights(folder: Path, state: dict[str, torch.Tensor]) -> None:
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def transposed(folder: Path) -> None:
    state, name = load_file(folder / "model.safetensors"), "model.layers.1.self_attn.q_proj.weight"
    save_weights(folder, state | {name: state[name].T.contiguous()})


def as_bfloat16(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    save_weights(folder, {name: each.bfloat16() for name, each in state.items()})
    replace(folder / "config.json", r'"float32"', '"bfloat16"')


def replace(file: Path, pattern: str, by: str) -> None:
    text, num = re.subn(pattern, by, file.read_text())
    assert num
    file.write_text(text)


def another_tokenizer(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    known = content["model"]["vocab"]
    known["e"], known["a"] = known["a"], known["e"]
    (folder / "tokenizer.json").write_text(json.dumps(content))


def another_template(folder: Path) -> None:
    changed = UNTAGGED.replace("system", "user").replace("<|im_end|>", "")
    (folder / "chat_template.jinja").write_text(changed)


def stale_sines(folder: Path) -> None:
    replace(folder / "config.json", r'("rope_theta": )[\d.]+', r"\g<1>77.0")


Fault = Callable[[Path], None]
FAULTS: dict[Fault, str] = {
    transposed: "its logits differ by up to",
    another_tokenizer: "its tokenizer gives other tokens for '",
    another_template: "its chat template gives .*, not .*im_end",
    stale_sines: "its logits differ by up to",
    as_bfloat16: r"its weights are torch\.bfloat16, and --dtype is float32",
}


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Callable[[Fault], None]:
    """Puts a fault into each folder before its check, as a faulty exporter would."""
    honest = command.write_pretrained

    def plant(fault: Fault) -> None:
        def faulty(*given: Any) -> None:
            honest(*given)
            fault(given[-1])

        monkeypatch.setattr(command, "write_pretrained", faulty)

    return plant


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named(trained: Any, tmp_path: Path, planted: Any, fault: Fault) -> None:
    planted(fault)
    output, sentence = tmp_path / "out", FAULTS[fault]
    with pytest.raises(InputError, match=sentence) as error, command.written_at_once(output) as out:
        command.write(trained, False, "float32", out)
    assert "\n" not in str(error.value).replace("\\n", "")
    assert not list(tmp_path.glob("*out*"))


def exported(run_folder: Path, output: Path, *flags: str) -> None:
    command.main(["export", str(run_folder), f"--output={output}", *flags], OURS)


@pytest.mark.slow
def test_a_model_larger_than_memory_is_exported_alike(
    folder: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    """Its weights are copied from the checkpoint's files to several files, a few at a time."""
    exported(folder, tmp_path / "whole", "--dtype=bfloat16")
    monkeypatch.setattr(safetensors_files, "memory_limit", lambda: 0)
    with pytest.raises(InputError, match="--max_shard_size is '40': give a number with KB, MB"):
        exported(folder, tmp_path / "parts", "--max_shard_size=40")
    exported(folder, tmp_path / "parts", "--dtype=bfloat16", "--max_shard_size=40KB")
    assert "  hf, bfloat16, each of 21 weights equals the checkpoint's\n" in capsys.readouterr().out
    files = sorted((tmp_path / "parts").glob("*.safetensors"))
    parts = {name: tensor for file in files for name, tensor in load_file(file).items()}
    whole = load_file(tmp_path / "whole/model.safetensors")
    assert len(files) > 1 and parts.keys() == whole.keys()
    assert all(torch.equal(parts[name], whole[name]) for name in whole)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "parts", dtype="auto")
    assert model.dtype == torch.bfloat16 and model.state_dict().keys() == whole.keys()


@pytest.mark.slow
@pytest.mark.parametrize("memory", [None, 0])
def test_modules_for_later_tokens_are_exported_or_not(
    flags: list[str], tmp_path: Path, monkeypatch: Any, memory: int | None
) -> None:
    """vLLM and SGLang read `num_nextn_predict_layers`, and expect as many layers after the 2."""
    own = [f"--run.root={tmp_path}/runs", f"--model.architecture={MODELS['mtp']}"]
    assert run("fit", *flags, *own, *FLAGS["mtp"]) == 0
    if memory is not None:
        monkeypatch.setattr(safetensors_files, "memory_limit", lambda: memory)
    for name, number in (("true", 2), ("false", 0)):
        exported(only_run(tmp_path), tmp_path / name, f"--mtp={name}")
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config["num_nextn_predict_layers"] == number
        keys = load_file(tmp_path / name / "model.safetensors").keys()
        layers = {int(key.split(".")[2]) for key in keys if key.startswith("model.layers.")}
        assert layers == {*range(2 + number)} and not any("mtp" in key for key in keys)


OF_PARTS: dict[Fault, str] = {
    transposed: r"its model\.layers\.1\.self_attn\.q_proj\.weight has other values",
    another_tokenizer: FAULTS[another_tokenizer],
    stale_sines: "its configuration has other rope_parameters",
    as_bfloat16: "its configuration has other dtype",
}


@pytest.mark.parametrize("fault", OF_PARTS)
def test_a_fault_in_a_model_larger_than_memory_is_named(
    folder: Path, tmp_path: Path, monkeypatch: Any, planted: Any, fault: Fault
) -> None:
    planted(fault)
    monkeypatch.setattr(safetensors_files, "memory_limit", lambda: 0)
    with pytest.raises(InputError, match=OF_PARTS[fault]):
        exported(folder, tmp_path / "out")


def test_a_stale_token_cache_is_refused(flags: list[str], corpus: Path, tmp_path: Path) -> None:
    texts = shutil.copytree(corpus, tmp_path / "texts")
    own = [*flags, f"--data.source.paths=[{texts}/*.txt]", f"--data.cache_dir={tmp_path}/cache"]
    assert run("fit", *own, f"--run.root={tmp_path}/runs") == 0
    (texts / "00.txt").write_text("another text")
    with pytest.raises(InputError, match="token cache .* is stale"):
        exported(only_run(tmp_path), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_export_has_a_card_without_private_text(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
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


@pytest.mark.slow
def test_a_program_for_a_saved_model_gives_its_logits(folder: Path, tmp_path: Path) -> None:
    """The code that docs/evaluate.md gives to users of TensorFlow's SavedModel."""
    from transformers.exporters import DynamoConfig, DynamoExporter

    exported(folder, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    page = (ROOT / "docs" / "evaluate.md").read_text("utf-8")
    (code,) = re.findall(r"`(DynamoExporter.*)`", page)
    names = {"DynamoExporter": DynamoExporter, "DynamoConfig": DynamoConfig, "model": model}
    names["inputs"] = {"input_ids": torch.arange(16).view(2, 8)}
    program = tmp_path / "program"
    eval(code.replace('"program"', repr(str(program))), names)
    tokens = torch.arange(90).view(3, 30)  # another shape than the traced one
    with torch.no_grad():
        found = torch.export.load(program / "model.pt2").module()(input_ids=tokens)
        assert torch.allclose(found.logits, model(tokens).logits, atol=1e-5)


def logits(found: Trained) -> torch.Tensor:
    assert not found.model.training and found.tokenizer.decode([72, 105]) == "Hi"
    with torch.no_grad():
        return found.model(torch.arange(60).view(2, 30)).logits


@pytest.mark.slow
def test_run_checkpoint_and_folder_name_one_model(folder: Path, flags: Any, tmp_path: Path) -> None:
    output = tmp_path / "out"
    ours = [flag for flag in flags if not flag.startswith("--trainer.")]
    command.main(["export", *ours, "--checkpoint=last", f"--output={output}"], OURS)
    names = [folder.parents[1], folder, newest(folder), newest(folder) / "checkpoint.pt"]
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


def promoted(registry: Registry, *texts: str) -> list[str]:
    names = []
    for text in texts:
        folder = registry.folder / f".{text}"
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_text(text)
        names.append(registry.add(folder, {"run": text}).name)
    return names


def test_a_version_that_is_rolled_back_keeps_its_number(tmp_path: Path, capsys: Any) -> None:
    registry = Registry(tmp_path / "registry")
    assert registry.latest is None
    with pytest.raises(InputError, match="has no version: promote a run first"):
        registry.roll_back()
    assert promoted(registry, "a", "b", "c") == ["v1", "v2", "v3"]
    first = json.loads((registry.folder / "v1" / "version.json").read_text())
    assert first["sha256"]["model.safetensors"].startswith("ca978112ca1bbdca")  # of "a", FIPS 180-2
    assert [path.name for path in registry.roll_back()] == ["v3", "v2"]
    assert promoted(registry, "d") == ["v4"]
    assert [path.name for path in registry.roll_back()] == ["v4", "v2"], "v3 stays withdrawn"
    assert run("promote", "--roll_back", f"--registry={registry.folder}") == 0
    assert capsys.readouterr().out == f"v2 is withdrawn; {registry.folder}/latest is v1\n"
    with pytest.raises(InputError, match="v1 is the first version that is not withdrawn"):
        registry.roll_back()
    assert registry.latest == registry.folder / "v1"
    assert (registry.folder / "v4" / "model.safetensors").exists()


@pytest.mark.parametrize("kind", ["another folder", "outside", "no link", "a loop"])
def test_a_changed_link_to_the_latest_version_is_named(
    kind: str, tmp_path: Path, capfd: Any
) -> None:
    registry, outside = Registry(tmp_path / "registry"), tmp_path / "v1"
    promoted(registry, "a", "b")
    link = registry.folder / "latest"
    link.unlink()
    (registry.folder / "other").mkdir()
    outside.mkdir()
    targets = {"another folder": "other", "outside": str(outside), "a loop": "latest"}
    if kind in targets:
        link.symlink_to(targets[kind])
    else:
        link.mkdir()
    said = refused("promote", ["--roll_back", f"--registry={registry.folder}"], capfd)
    assert "and has to be a link to one of its versions" in said
    assert not list(tmp_path.rglob("withdrawn"))


def test_a_killed_promotion_leaves_the_latest_version(tmp_path: Path, monkeypatch: Any) -> None:
    def killed(*_: Any) -> Path:
        raise KeyboardInterrupt

    registry = Registry(tmp_path)
    promoted(registry, "a")
    with monkeypatch.context() as patch:
        patch.setattr(Registry, "_point_to", killed)
        with pytest.raises(KeyboardInterrupt):
            promoted(registry, "b")
    assert registry.latest == tmp_path / "v1"
    assert promoted(registry, "c") == ["v3"] and registry.latest == tmp_path / "v3"
    assert (tmp_path / "latest" / "model.safetensors").read_text() == "c"
