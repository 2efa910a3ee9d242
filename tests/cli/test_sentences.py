"""Input that is wrong in a way that only a library would notice: one sentence, exit code 2, no traceback."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.runs import SMALL_LLAMA, command, disk, newest, only_run, refused, run

LLAMA = json.dumps({"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
                    "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 300})  # fmt: skip
LINES = b'{"text": "abc"}\n' * 10


@pytest.fixture(autouse=True)
def without_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRACEBACK", raising=False)


# ---- flags -----------------------------------------------------------------------------------------------------------

FLAGS = {
    "a root that is a file": (["--run.root={here}/file"], r"run\.root .*file' cannot be written: .*Not a directory"),
    "a root below a file": (["--run.root={here}/file/x"], r"run\.root .* cannot be written: .*Not a directory"),
    "a root that takes nothing": (["--run.root=/proc/x"], r"run\.root '/proc/x' cannot be written: /"),
    "a name outside of the root": (["--run.name=../../x"], r"run\.name '\.\./\.\./x' is not a folder below run\.root"),
    "a name from the top": (["--run.name=/x"], r"run\.name '/x' is not a folder below run\.root"),
    "no name": (["--run.name="], r"run\.name '' is not a folder below run\.root"),
    "a name of 300 letters": (["--run.name=" + "x" * 300], r"run\.root .* cannot be written: .*too long"),
    "a name with NUL": (["--run.name=a\0b"], r"run\.name has the character '\\x00'; give a text without it"),
    "a negative limit": (["--watchdog.timeout_s=-5"], r"watchdog\.timeout_s is -5\.0; give 0 to 100,000,000 seconds"),
    "a limit that is no number": (["--watchdog.start_timeout_s=.nan"], r"watchdog\.start_timeout_s is nan; give 0"),
    "a precision without its package": (
        ["--trainer.precision=transformer-engine"], r"trainer: .*transformer_engine"
    ),
    "checkpoints where nothing can be written": (
        ["--last_checkpoint.dirpath={here}/file/x"], r"last_checkpoint\.dirpath .* cannot be written: .*Not a directory"
    ),
    "checkpoints in a folder with a name of 300 letters": (
        ["--last_checkpoint.dirpath={here}/" + "x" * 300], r"last_checkpoint\.dirpath .* cannot be written: .*too long"
    ),
    "a key that steers the terminal": (
        ['--model.balance={"\\e[2Jab": 1}'], r"does not accept option 'model\.balance\.\\x1b\[2Jab'"
    ),
    "a validation every 0 steps": (["--trainer.val_check_interval=0"], r"val_check_interval is 0; give more than 0"),
    "a log line every 0 steps": (["--trainer.log_every_n_steps=0"], r"trainer\.log_every_n_steps is 0; give 1 or more"),
    "a negative norm": (["--trainer.gradient_clip_val=-1"], r"trainer\.gradient_clip_val is -1"),
    "fewer than no workers": (["--data.num_workers=-1"], r"data\.num_workers is -1; give 0 to 1,024"),
    "heads that do not divide": (
        ["--model.architecture=" + SMALL_LLAMA.replace("hidden_size: 32", "hidden_size: 65")],
        r"model\.architecture .*hidden size \(65\) is not a multiple of the number of attention heads \(2\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FLAGS)
def test_of_a_flag(case: str, flags: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    wrong, error = FLAGS[case]
    (tmp_path / "file").write_text("x")
    if "--model.architecture=" in wrong[0]:
        assert run("prepare", *flags) == 0
    before = sorted(tmp_path.parent.rglob("*"))
    assert re.search(error, refused("fit", [*flags, *(flag.replace("{here}", str(tmp_path)) for flag in wrong)], capfd))
    assert sorted(tmp_path.parent.rglob("*")) == before, "a refused run leaves nothing"


def test_a_metric_that_is_not_measured_is_refused_before_the_first_step(
    flags: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    assert run("fit", *flags, "--best_checkpoint.monitor=eval/of_my_own") == 2
    shown = capfd.readouterr()
    assert "best_checkpoint.monitor is 'eval/of_my_own', and what is measured is eval/bits_per_byte" in shown.err
    assert "step 1/" not in shown.out + shown.err


def test_of_a_disk_that_fills_up(flags: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with disk(tmp_path / "full", "4k") as folder:
        (folder / "all").write_bytes(bytes(4096))
        assert "full: No space left on device" in refused("fit", [*flags, f"--run.root={folder}"], capfd)
    with disk(tmp_path / "small", "16k") as folder:
        assert command(["fit", *flags, f"--run.root={folder}"]) == 1
        error = capfd.readouterr().err
        sentences = re.findall("^error: a disk is full .*resumes", error, re.MULTILINE)
        assert "Traceback" not in error and len(sentences) == 1


# ---- data ------------------------------------------------------------------------------------------------------------

JSONL: dict[str, tuple[bytes, str, str]] = {
    "empty": (b"", "x.jsonl", "data.source Jsonl has no text in it"),
    "empty, compressed": (gzip.compress(b""), "x.jsonl.gz", "data.source Jsonl has no text in it"),
    "no UTF-8": (
        LINES + b'{"text": "\xff"}\n' + LINES,
        "x.jsonl",
        "x.jsonl of data.source cannot be read after record 10: 'utf-8'",
    ),
    "no UTF-8, compressed": (gzip.compress(LINES + b'{"text": "\xff"}\n'), "x.jsonl.gz", "after record 10: 'utf-8'"),
    "no JSON": (
        LINES + b'{"text": "x"\n' + LINES,
        "x.jsonl",
        "x.jsonl of data.source cannot be read after record 10: ",
    ),
    "half a gzip file": (
        gzip.compress(LINES)[:25],
        "x.jsonl.gz",
        "x.jsonl.gz of data.source cannot be read after record 0: ",
    ),
}


@pytest.mark.parametrize("case", JSONL)
def test_of_a_jsonl_file(case: str, flags: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    content, name, error = JSONL[case]
    (tmp_path / name).write_bytes(content)
    given = [*flags, "--data.source=Jsonl", f"--data.source.paths=[{tmp_path / name}]"]
    assert error in refused("prepare", given, capfd)


# ---- weights ---------------------------------------------------------------------------------------------------------


def no_file(folder: Path) -> None:
    pass


def half_a_file(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")


def an_empty_file(folder: Path) -> None:
    (folder / "model.safetensors").touch()


def one_of_two(folder: Path) -> None:
    index = {"metadata": {}, "weight_map": {"a": "model-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("made", [no_file, half_a_file, an_empty_file, one_of_two])
def test_of_published_weights(
    made: Callable[[Path], None], flags: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "published"
    folder.mkdir()
    (folder / "config.json").write_text(LLAMA)
    made(folder)
    assert run("prepare", *flags) == 0
    error = refused("fit", [*flags, f"--model.pretrained={folder}"], capfd)
    assert f"model.pretrained '{folder}' cannot be loaded: " in error


# ---- flags of other verbs --------------------------------------------------------------------------------------------

OF_VERBS = {
    "plan --bandwidth=300": "argument --bandwidth: expected 2 arguments",
    "launch --on=torch": "argument --on: invalid choice: 'torch'",
    "launch --config=x.yaml": "the following arguments are required: --on",
    "sweep --trials=1": "the following arguments are required: --space",
    "rehearse --nodes=two": "argument --nodes: 'two' is not allowed, give a whole number from 1 to 100,000",
    "compare": "the following arguments are required: runs",
}  # fmt: skip


@pytest.mark.parametrize("words", OF_VERBS)
def test_of_a_verbs_own_flag(words: str, capfd: pytest.CaptureFixture[str]) -> None:
    verb, *flags = words.split()
    error = refused(verb, flags, capfd)
    assert f"error: {OF_VERBS[words]}" in error and f" {verb} --help` explains every flag" in error


# ---- checkpoints -----------------------------------------------------------------------------------------------------


class AsksToRun:
    def __reduce__(self) -> Any:
        return print, ("it ran",)


@pytest.mark.parametrize("strategy", ["one process", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_of_a_checkpoint(strategy: str, flags: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Several in one test: each needs the same trained checkpoint."""
    if strategy == "fsdp2":
        flags = [*flags, "--config=strategy/fsdp2", "--trainer.devices=1", "--trainer.accelerator=cpu"]
    assert run("fit", *flags, "--trainer.max_steps=1") == 0
    path = newest(only_run(tmp_path))
    larger = SMALL_LLAMA.replace("hidden_size: 32", "hidden_size: 64")
    error = refused("fit", [*flags, f"--ckpt_path={path}", f"--model.architecture={larger}"], capfd)
    assert "was trained with model.architecture.hidden_size 32, now 64" in error and "restore what it was" in error

    renamed = shutil.copytree(path, tmp_path / "step00000009.ckpt")
    error = refused("fit", [*flags, f"--ckpt_path={renamed}"], capfd)
    assert "its manifest says step 1, and its name another" in error

    for content, expected in (
        ({"state_dict": {}, "x": AsksToRun()}, "cannot be read: it names the class print; only tensors"),
        ([1], "has no `state_dict`"),
    ):
        torch.save(content, tmp_path / "made.ckpt")
        error = refused("fit", [*flags, f"--ckpt_path={tmp_path}/made.ckpt"], capfd)
        assert expected in error and "weights_only" not in error and "it ran" not in error
    if strategy == "fsdp2":
        for damaged, expected in ((".metadata", "its .metadata is damaged"), ("__0_0.distcp", "cannot be read")):
            foreign = shutil.copytree(path, tmp_path / damaged)
            (foreign / "manifest.json").unlink()  # which would notice, by its CRC-32
            content = (foreign / damaged).read_bytes()
            (foreign / damaged).write_bytes(content[:100] + b"\xff\x00zz")
            assert expected in refused("fit", [*flags, f"--ckpt_path={foreign}"], capfd)
