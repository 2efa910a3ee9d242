"""Input that is wrong: one sentence names it and what to do, with exit code 2 and no traceback."""

import gzip
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import torch
import yaml

from dist_template.errors import Exit
from dist_template.text import Source
from tests.support.runs import SMALL_LLAMA, command, disk, newest, only_run, refused, run

LINES = b'{"text": "abc"}\n' * 10
BAD_LINE = LINES + b'{"text": "\xff"}\n'
LLAMA = json.dumps(yaml.safe_load(SMALL_LLAMA) | {"vocab_size": 300}).encode()
FILES = {
    "file": b"not a checkpoint",
    "empty.txt": b"",
    "empty.jsonl": b"",
    "section.yaml": b"wachdog: {timeout_s: 3}",
    "subclass.yaml": b"model:\n  class_path: my.Model\n  init_args: {width: 3}\n",
    "deep.yaml": b"trainer:\n  max_stepz: 3\n",
    "latin.jsonl": BAD_LINE + LINES,
    "latin.jsonl.gz": gzip.compress(BAD_LINE),
    "half_a_line.jsonl": LINES + b'{"text": "x"\n' + LINES,
    "half.jsonl.gz": gzip.compress(LINES)[:25],
    "half.jsonl.zst": pyarrow.compress(LINES, codec="zstd", asbytes=True)[:-5],
    "no_weights/config.json": LLAMA,
    "half/config.json": LLAMA,
    "half/model.safetensors": b"\x10\0\0\0\0\0\0\0{}",
    "layers/config.json": LLAMA.replace(
        b'"num_hidden_layers": 2', b'"num_hidden_layers": 1000000000'
    ),
    "negative/config.json": LLAMA.replace(b'"hidden_size": 32', b'"hidden_size": -32'),
    "deep/config.json": b"[" * 100_000,
    "dtype/config.json": LLAMA.replace(b"{", b'{"dtype": "os.system", ', 1),
    "method/config.json": LLAMA.replace(
        b"{", b'{"quantization_config": {"quant_method": "evil", "load_in_4bit": true}, ', 1
    ),
    "method/model.safetensors": b"\x08\0\0\0\0\0\0\0{}      ",
    "climbs/config.json": LLAMA,
    "climbs/model.safetensors.index.json": (
        b'{"metadata": {}, "weight_map": {"a": "../half/model.safetensors"}}'
    ),
    "others/config.json": LLAMA,
    "others/model.safetensors": b"\x08\0\0\0\0\0\0\0{}      ",
    "one_of_two/config.json": LLAMA,
    "one_of_two/model.safetensors.index.json": (
        b'{"metadata": {}, "weight_map": {"a": "model-00002.safetensors"}}'
    ),
}


@pytest.fixture(autouse=True)
def without_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRACEBACK", raising=False)


LONG = "x" * 300
UNEVEN_HEADS = SMALL_LLAMA.replace("hidden_size: 32", "hidden_size: 65")
MESH = "--trainer.devices=2 --config=strategy/tp"
ZERO = "--trainer.devices=2 --trainer.strategy.class_path=ZeroStrategy"
JSONL = "--data.source=Jsonl --data.source.paths"
# Flags after a complete small training's -> a pattern in the sentence; {here} has the FILES.
FLAGS = {
    # names
    "--wachdog.enabled=true": "wachdog.enabled is not a key .* mean watchdog?",
    "--trainer.max_stepz=3": "trainer.max_stepz .* mean trainer.max_steps?",
    "--config={here}/subclass.yaml": "model.class_path: .* does not choose .* below `model`",
    "--model.init_args.width=3": "argument `module` of `main` in your __main__.py",
    "--config={here}/section.yaml": "wachdog.timeout_s .* mean watchdog.timeout_s?",
    "--config={here}/deep.yaml": "trainer.max_stepz .* mean trainer.max_steps?",
    "--model.optim={learning_rates: 3}": r"mean model.optim.learning_rate\?",
    "--data.source.encoding=nope": "data.source.encoding 'nope' is no encoding of text: give",
    "--data.source.pathz=3": r"data.source.pathz is not an argument of TextFiles; did you mean "
    r"data.source.paths\?",
    "--model.objective=NextTokn": "there is no class NextTokn; did you mean NextToken",
    "--model.objective.class=NextToken": r"did you mean model.objective.class_path\?",
    "--model.objective=dist_template.text.Bytes": "objective: dist_template.text.Bytes is no subcl",
    "--trainer.nothing_like_this=3": "trainer.nothing_like_this is not a key of this program",
    "--data.source=TextFile": "data.source.* no class TextFile",
    "--trainer.callbacks=EarlyStoping": "no class EarlyStoping; did you mean EarlyStopping",
    "--model.architecture={model_type: llama, "
    "num_hiden_layers: 2}": "architecture.num_hiden_layers is no field of LlamaConfig: did you "
    "mean num_hidden_layers?",
    "--model.architecture={model_type: gpt99}": "gpt99",
    "--model.architecture={class_path: {class_path: 9}, init_args: -3}": "Unrecognized model",
    '--model.balance={"\\e[2Jab": 1}': r"does not accept option 'model\.balance\.\\x1b\[2Jab'",
    # types
    "--data.seq_len=long": "data.seq_len is 'long': expected an integer; see",
    "--data.source.paths=x.txt": r"data.source.paths is 'x.txt': expected a list, as in \[x.txt\]",
    "--model.optim.learning_rate=[{value: 1, until: nan}, {value: 2}]": r"model.optim.learning_rate"
    r"\[0\].until: nan is not possible: expected a number",
    "--model.distillation.weight=1": "model.distillation.teacher is missing",
    "--model.adapter.rank=x": "model.adapter.rank is 'x': expected an integer",
    "--trainer.callbacks=3": "trainer.callbacks: there is no class 3",
    "--trainer.callbacks=[EarlyStopping, 3]": "trainer.callbacks: 3 is no class: give an import",
    "--trainer.limit_val_batches=x": "x is not possible: expected an integer, exp",
    "--model.optim=3": "model.optim is '3': it takes keys, as in model.optim.KEY",
    "--model.optim.schedule=exponential": "cosine",
    # ranges
    "--model.optim.learning_rate=.inf": "model.optim.learning_rate is inf; give more than 0",
    "--model.optim.betas=[0.9, 1]": r"model.optim.betas\[1\] is 1.0; give 0 or more, below",
    "--trainer.max_steps=0x1" + 20 * "0": "max_steps is 1208925819614629174706176; give fewer",
    "--model.architecture={model_type: llama, rms_norm_eps: .nan}": "rms_norm_eps is nan; give a",
    "--trainer.callbacks={class_path: EarlyStopping, init_args: {monitor: x, min_delta: "
    ".nan}}": "trainer.callbacks.min_delta is nan; give a number",
    "--optimizer={class_path: torch.optim.SGD, init_args: {lr: .inf}}": "lr is inf; give 0",
    "--trainer.callbacks=[DeviceStatsMonitor, {class_path: EarlyStopping, init_args: {monitor: x, "
    "min_delta: .nan}}]": r"trainer.callbacks\[1\].init_args.min_delta is nan; give a number",
    "--model.optim.learning_rate=[{value: 1, until: .nan}, {value: 2}]": r"rate\[0\].until is nan",
    "--optimizer=Muon --optimizer.ns_steps=200": "ns_steps is 200; give 1 to 99",
    "--lr_scheduler={class_path: StepLR, init_args: {step_size: 0}}": "size is 0; give 1 or more",
    "--data.tokenizer={class_path: ByteBPE, init_args: {train_mib: 0}}": "train_mib is 0; give 1",
    "--trainer.devices=0": "trainer.devices is 0; give 1 or more, or auto",
    f"--model.architecture={UNEVEN_HEADS}": r"hidden size \(65\) is not a multiple",
    # files and folders
    "--run.root={here}/file/x": r"run\.root .* cannot be written: .*Not a directory",
    "--run.name=../../x": r"run\.name '\.\./\.\./x' is not a folder below run\.root",
    f"--run.name={LONG}": r"run\.root .* cannot be written: .*too long",
    "--run.name=a\0b": r"run\.name has the character '\\x00'; give a text without it",
    "--last_checkpoint.dirpath={here}/file/x": r"dirpath .* cannot be written: .*Not a directory",
    "--data.source.paths=[nowhere/*.txt]": "nowhere",
    "--data.source.paths=[{here}/empty.txt]": "no text in it",
    "--data.seq_len=1000000": "seq_len",
    "--ckpt_path=nowhere.ckpt": "nowhere.ckpt.* does not exist",
    "--ckpt_path=best": "no checkpoint under",
    "--ckpt_path={here}/file": "is not a checkpoint",
    "--model.pretrained=./nowhere": "nowhere",
    "--model.pretrained=": "model.pretrained is ''; give a folder or a hub name, or null",
    "--model.distillation.teacher=": "model.distillation.teacher is ''; give a folder or a hub",
    # what cannot work together: test_limits.py has the rest
    "--data.validation_share=0.5 --data.test_share=0.5": "nothing to train on",
    "--model.optim.learning_rate=[{value: 1}] --optimizer=torch.optim.SGD "
    "--optimizer.lr=1": "remove one",
    "--data.global_batch_size=9": "data.global_batch_size 9 .* data.micro_batch_size 2",
    "--data.global_batch_size=5000": "edit data.seq_len or data.global_batch_size",
    "--data.global_batch_size=5000 --data.micro_batch_size=5000": "5000 are needed: .* edit "
    "data.seq_len or data.micro_batch_size 5000 with data.global_batch_size",
    "--trainer.accelerator=tpu": "trainer.accelerator 'tpu'.* this machine has no GPU",
    "--trainer.precision=transformer-engine": "trainer: .*transformer_engine",
    "--trainer.strategy=ZeroStrategy": "'ZeroStrategy' is no strategy; give ddp",
    f"{MESH} --model.architecture.num_key_value_heads=1": "heads 1 is not a multiple",
    f"{ZERO} --trainer.strategy.config=nowhere.json": "cannot read 'nowhere.json'",
    "--model.preference.beta=0.5": r"beta is 0.5 and has no effect \(data.source yields no pairs: "
    r"set Preferences",
    "--model.preference.loss=reward": "reward learns from pairs: set data.source Preferences",
    "--optimizer=torch.optim.SGD --model.optim.eps=1e-6": r"model.optim.eps is 1e-06 and has no "
    r"effect \(--optimizer SGD has its own",
    # what is replaced, with what to use
    "--trainer.overfit_batches=4": "data.repeat_first_batch true",
    "--trainer.barebones=true": "remove the key",
    "--trainer.accumulate_grad_batches=2 --data.global_batch_size=[{value: 4, until: 100}, "
    "{value: 8}]": "accumulate_grad_batches 2 and phases of data.global_batch_size both give",
    "--trainer.use_distributed_sampler=true": "remove the key",
    "--trainer.model_registry=mine": "--ckpt_path a folder",
    "--trainer.callbacks={class_path: StochasticWeightAveraging, init_args: {swa_lrs: "
    "0.1}}": "EMAWeightAveraging",
    "--trainer.callbacks=[{class_path: EarlyStopping, init_args: {monitor: x}}, "
    "{class_path: EarlyStopping, init_args: {monitor: x}}]": "more than one stateful callback",
    "--trainer.callbacks=[LearningRateFinder]": "model.optim.learning_rate",
    "--trainer.callbacks+=BatchSizeFinder": "the verb `compare`",
    "--optimizer=torch.optim.Muon --optimizer.momentum=-1": "--optimizer Muon: momentum should be",
    "--optimizer=torch.optim.SGD --model.optim.optimizer=muon": "optimizer is 'muon' and has no",
    f"{ZERO} --optimizer=Muon": "Muon does not work under ZeRO.*model.optim.optimizer adamw",
    f"{ZERO} --model.optim.optimizer=muon": "Muon does not work under ZeRO",
    "--optimizer=LBFGS": "--optimizer LBFGS: .*parameter groups",
    "--lr_scheduler={class_path: OneCycleLR, init_args: {max_lr: 1}}": "OneCycleLR: .*total_steps",
}
LATER = {  # found when the run has a folder
    "--model.distillation.teacher=./nowhere": "model.distillation.teacher './nowhere' cannot be",
    "--model.pretrained={here}/no_weights": "model.pretrained '.*no_weights' cannot be loaded: ",
    "--model.pretrained={here}/half": "model.pretrained '.*half' cannot be loaded: ",
    "--model.pretrained={here}/layers": "has num_hidden_layers 1000000000; give 0 to 10,000",
    "--model.pretrained={here}/negative": "has hidden_size -32; give 1 to 2,147,483,648",
    "--model.pretrained={here}/deep": "model.pretrained '.*deep' cannot be loaded: ",
    "--model.pretrained={here}/dtype": "model.pretrained '.*dtype' cannot be loaded: ",
    "--model.pretrained={here}/method": "quantization_config has the method 'evil', which transf",
    "--model.pretrained={here}/climbs": "has the file '../half/model.safetensors': it has the part",
    "--model.pretrained={here}/others": "its files have none of the model's 21 tensors",
    "--model.pretrained={here}/one_of_two": "model.pretrained '.*one_of_two' cannot be loaded: ",
    f"{JSONL}=[{{here}}/empty.jsonl]": "data.source Jsonl has no text in it",
    f"{JSONL}=[{{here}}/latin.jsonl]": r"is not in UTF-8: byte \d+ \(0x..\) of line",
    f"{JSONL}=[{{here}}/latin.jsonl.gz]": "is not in UTF-8: byte",
    f"{JSONL}=[{{here}}/half_a_line.jsonl]": "does not end in line 11",
    f"{JSONL}=[{{here}}/half.jsonl.zst]": "cannot be read after record 0: Truncated",
    "--data.source.paths=[{here}/latin.jsonl]": r"is not in UTF-8: byte \d+ \(0xff\), .*encoding",
    "--data.source.separator=!!": "data.source.separator '!!' is in none of the",
    f"{JSONL}=[{{here}}/half.jsonl.gz]": "cannot be read after record 0: ",
    "--best_checkpoint.monitor=eval/mine": "monitor 'eval/mine' was never logged; logged:",
}


@pytest.mark.parametrize(
    "words", [*FLAGS, *LATER], ids=lambda words: words[-60:].replace("\0", "NUL")
)
def test_a_wrong_flag_or_file_is_one_sentence(
    words: str, flags: list[str], tmp_path: Path, capfd: Any
) -> None:
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    if words.startswith(("--model.architecture=", "--model.pretrained=")):
        assert run("prepare", *flags) == 0
    before = sorted(tmp_path.rglob("*"))
    wrong = re.split(" (?=--)", words.replace("{here}", str(tmp_path)))
    error = refused("prepare" if JSONL in words else "fit", [*flags, *wrong], capfd)
    assert re.search((FLAGS | LATER)[words], error) and "object at 0x" not in error, error
    assert words in LATER or sorted(tmp_path.rglob("*")) == before, "a refused run leaves nothing"


def test_a_disk_that_fills_up_is_one_sentence(flags: list[str], tmp_path: Path, capfd: Any) -> None:
    with disk(tmp_path / "full", "4k") as folder:
        (folder / "all").write_bytes(bytes(4096))
        error = refused("fit", [*flags, f"--run.root={folder}"], capfd)
        assert "full: No space left on device" in error
    with disk(tmp_path / "small", "16k") as folder:
        assert command(["fit", *flags, f"--run.root={folder}"]) == 1
        error = capfd.readouterr().err
        sentences = re.findall("^error: a disk is full .*resumes", error, re.MULTILINE)
        assert "Traceback" not in error and len(sentences) == 1


OF_VERBS = {
    "fitt": "allowed are fit",
    "fit --help modle": r"there is no section modle; did you mean model\? see",
    "fit --help q": "there is no section q; give one of .*model, data",
    "--help dat": r"there is no section dat; did you mean data\?",
    "plan --bandwidth=300": "argument --bandwidth: expected 2 arguments",
    "launch --on=torch": "argument --on: invalid choice: 'torch'",
    "launch --config=x.yaml": "arguments are required: --on.* launch --help` explains every flag",
    "rehearse --nodes=two": "argument --nodes: 'two' is not allowed, give a whole number from 1",
    "promote --roll_back a/run": "withdraws a version, and takes no run: remove a/run",
    "promote --roll_back --registry=": "--registry is empty; give the folder",
    "serve x --host=": "--host is empty; give an address",
    "serve x --name=": "--name is empty; give the model's name",
    "serve x --api_key_env=SET_NOWHERE": "'SET_NOWHERE' is not set or empty, and anybody could ask",
    "serve x --allow_origin=chat.example.org": "'chat.example.org' is no origin; give a scheme",
    "serve x --allow_host=https://a.example.org": "'https://a.example.org' is no host; give a name",
    "sweep --space=x --name=": "--name is empty; give the name of the sweep's folder",
    "config": "action",
    "config show": "config show needs a name",
    "config copy strategy/fsdp3": "did you mean strategy/fsdp2",
}


@pytest.mark.parametrize("words", OF_VERBS)
def test_a_wrong_word_of_a_verb_is_one_sentence(words: str, capfd: Any) -> None:
    verb, *flags = words.split()
    assert re.search(f"^error: .*{OF_VERBS[words]}", refused(verb, flags, capfd))


class AsksToRun:
    def __reduce__(self) -> Any:
        return print, ("it ran",)


CHECKPOINTS = {
    "step00000009.ckpt": "its manifest says step 1, its name step 9",
    "asks_to_run.ckpt": "cannot be read: it names the class print; only tensors",
    "list.ckpt": "has no `state_dict`",
    ".metadata": "its .metadata is damaged",
    "__0_0.distcp": "cannot be read",
}


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_read_is_one_sentence(
    flags: list[str], tmp_path: Path, capfd: Any
) -> None:
    """Several in one test: each needs the same trained checkpoint."""
    flags = [*flags, "--config=strategy/fsdp2", "--trainer.devices=1", "--trainer.accelerator=cpu"]
    assert run("fit", *flags, "--trainer.max_steps=1") == 0
    path = newest(only_run(tmp_path))
    shutil.copytree(path, tmp_path / "step00000009.ckpt")
    torch.save({"state_dict": {}, "x": AsksToRun()}, tmp_path / "asks_to_run.ckpt")
    torch.save([1], tmp_path / "list.ckpt")
    for damaged in (".metadata", "__0_0.distcp"):
        foreign = shutil.copytree(path, tmp_path / damaged)
        (foreign / "manifest.json").unlink()  # which would notice, by its CRC-32
        content = (foreign / damaged).read_bytes()
        (foreign / damaged).write_bytes(content[:100] + b"\xff\x00zz")
    for name, words in CHECKPOINTS.items():
        said = refused("fit", [*flags, f"--ckpt_path={tmp_path / name}"], capfd)
        assert words in said and "weights_only" not in said and "it ran" not in said


class Mistaken(Source):
    """Somebody's own, in data.py for instance."""

    def documents(self) -> Iterator[tuple[str, str]]:
        yield "first", "a text\n" * 99
        yield "second", {"body": "a text"}["text"]


def test_an_error_in_a_users_source_has_its_line(
    flags: Any, tmp_path: Path, capfd: Any, monkeypatch: Any
) -> None:
    flags = ["fit", *(flag for flag in flags if not flag.startswith("--data.source."))]
    flags += [f"--data.source={__name__}.Mistaken", f"--data.cache_dir={tmp_path}/cache"]
    assert command(flags) == Exit.FAILED
    error = capfd.readouterr().err
    assert "Traceback" not in error and "error: KeyError: 'text'\n" in error
    assert """in documents: yield "second", {"body": "a text"}["text"]\n""" in error
    assert not (tmp_path / "runs").exists()
    monkeypatch.setenv("TRACEBACK", "1")
    assert command(flags) == Exit.FAILED
    assert "Traceback" in capfd.readouterr().err
