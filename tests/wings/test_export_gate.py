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

from dist_template import Ended, InputError, Project
from dist_template.errors import Exit
from dist_template.wings.ship import promote
from tests.support.chats import TAGGED, UNTAGGED
from tests.support.runs import OURS, newest, only_run, run
from tests.support.wings import Registry, Trained, load_trained
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
def test_a_planted_fault_is_named(
    trained: Any, tmp_path: Path, monkeypatch: Any, fault: str
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


def test_an_export_has_a_card_without_private_text(trained: Any, tmp_path: Path) -> None:
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


def test_a_run_a_checkpoint_and_a_folder_name_the_same_model(flags: Any, tmp_path: Path) -> None:
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


PROJECT = Project("trainer_dev")


class Verbs:
    """Writes what `evaluate` and `export` write, or exits with a code."""

    def __init__(self) -> None:
        self.started: list[list[str]] = []
        self.failing = ""

    def __call__(self, argv: list[str], project: Project) -> None:
        verb, *flags = argv
        self.started.append(argv)
        if verb == "evaluate":
            (Path(flags[0]) / "evaluation").mkdir(exist_ok=True)
            (Path(flags[0]) / "evaluation" / "promotion.json").write_text('{"loss": 1.5}')
        else:
            folder = Path(flags[flags.index("--output") + 1])
            folder.mkdir()
            (folder / "config.json").write_text("{}")
        if verb == self.failing:
            raise Ended(Exit.BAD_INPUT, f"{verb} has a reason")


@pytest.fixture
def verbs(monkeypatch: pytest.MonkeyPatch) -> Verbs:
    verbs = Verbs()
    monkeypatch.setattr(promote.evaluate, "main", verbs)
    monkeypatch.setattr(promote.export, "main", verbs)
    return verbs


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "x" / "1"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("{}")
    return str(folder)


def version(name: str) -> dict[str, Any]:
    return json.loads(Path("registry", name, "version.json").read_text())


def test_a_run_is_compared_with_the_latest_version(folder: str, verbs: Verbs, capsys: Any) -> None:
    promote.main(["promote", folder], PROJECT)
    evaluate, export = verbs.started
    assert evaluate[evaluate.index("--baseline") + 1] == "start"
    assert "--require=eval/loss better" in evaluate and "--adapter=merged" in export
    assert version("v1")["figures"] == {"loss": 1.5} and version("v1")["run"] == folder
    assert "config.json" in version("v1")["sha256"]

    required = ["acc not worse by 0.1", "loss better"]
    promote.main(["promote", "runs", *(f"--require={each}" for each in required)], PROJECT)
    evaluate = verbs.started[2]
    baseline = evaluate[evaluate.index("--baseline") + 1]
    assert baseline.endswith("registry/v1"), "not the link, which may change meanwhile"
    given = [word for word in evaluate if word.startswith("--require")]
    assert given == [f"--require={each}" for each in required]
    assert version("latest")["required"] == required
    promote.main(["promote", "--roll_back"], PROJECT)
    assert capsys.readouterr().out.endswith("v2 is withdrawn; registry/latest is v1\n")


@pytest.mark.parametrize("verb", ["evaluate", "export"])
def test_a_verb_that_fails_promotes_nothing(verb: str, folder: str, verbs: Any) -> None:
    verbs.failing = verb
    with pytest.raises(Ended, match=f"{verb} has a reason") as ended:
        promote.main(["promote", folder], PROJECT)
    assert ended.value.code == Exit.BAD_INPUT
    assert [*Path().glob("registry/*")] == []


def promoted(registry: Registry, *texts: str) -> list[str]:
    names = []
    for text in texts:
        folder = registry.folder / f".{text}"
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_text(text)
        names.append(registry.add(folder, {"run": text}).name)
    return names


def test_a_roll_back_withdraws_a_version_and_its_number_is_not_used_again(tmp_path: Path) -> None:
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
    registry.roll_back()
    with pytest.raises(InputError, match="v1 is the first version that is not withdrawn"):
        registry.roll_back()
    assert registry.latest == registry.folder / "v1"
    assert (registry.folder / "v4" / "model.safetensors").exists()


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
