"""Run folders without secrets, loggers and the verbs after training."""

import json
import shutil
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from lightning.pytorch import Callback

from dist_template.cluster import redaction
from tests.support.runs import logged, only_run, run, small


class Trained(NamedTuple):
    folder: Path
    flags: list[str]
    printed: str


@pytest.fixture(scope="module")
def trained(corpus: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("trained")
    flags = small(corpus, cache, folder)
    with redirect_stdout(StringIO()) as printed:
        assert run("fit", *flags) == 0
    return Trained(only_run(folder), flags, printed.getvalue())


@pytest.mark.slow
def test_a_run_records_what_ran_and_where(trained: Trained) -> None:
    folder, _, printed = trained
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["data"]["seq_len"] == 32
    assert config["last_checkpoint"]["dirpath"] == "{run}/checkpoints"
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["packages"]["torch"] == torch.__version__ and environment["command"]
    assert (folder / "samples.txt").read_text().startswith("--- step 10")
    assert list(folder.glob("events.*")), "TensorBoard names it by this folder"
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == ["best-step00000020.ckpt", "step00000020.ckpt"]
    assert str(folder) in printed and "unigram" in printed
    assert "\r" not in printed, "a log file gets lines"
    learned = logged(folder, "eval/bits_per_byte")
    assert learned[20] < learned[0]


@pytest.mark.slow
def test_test_and_predict_use_the_checkpoint(trained: Trained, capfd: Any) -> None:
    assert run("test", *trained.flags, "--ckpt_path=last") == 0
    assert "bits_per_byte" in capfd.readouterr().out
    assert run("predict", *trained.flags, "--ckpt_path=last", "--data.prompts=[the quick]") == 0
    (line,) = (trained.folder / "predictions.jsonl").read_text().splitlines()
    assert json.loads(line)["prompt"] == "the quick" and json.loads(line)["continuation"]


@pytest.mark.slow
def test_an_evaluation_takes_the_newest_runs_best(trained: Trained, capfd: Any) -> None:
    best = trained.folder / "checkpoints" / "best-step00000020.ckpt"
    loss = f"loss {logged(trained.folder, 'eval/loss')[20]:.4f}"
    for given, is_kept in (["--ckpt_path=best"], True), ([], True), ([], False):
        if not is_kept:
            shutil.rmtree(best)
        assert run("validate", *trained.flags, *given) == 0
        shown = capfd.readouterr().out
        place = best if is_kept else best.parent
        assert f"validate: the weights come from {place}\n" in shown and loss in shown
    assert run("validate", *trained.flags, "--ckpt_path=best") == 2
    assert "has no best-*.ckpt: give `last`" in capfd.readouterr().err


HIDDEN = redaction.HIDDEN
RECORDED = "NCCL_DEBUG TORCH_NCCL_BLOCKING_WAIT PYTHONPATH MKL_NUM_THREADS".split()
NOT_RECORDED = "WANDB_API_KEY HF_TOKEN TORCH_REGISTRY NCCL_OWN_PLUGIN_LOGIN".split()
NOT_RECORDED += "DS_STORAGE_PASSWORD PYTHON_KEYRING_BACKEND".split()
OF_A_RANK = "CUDA_VISIBLE_DEVICES OMP_NUM_THREADS TORCHELASTIC_RESTART_COUNT".split()


def test_variables_are_those_of_an_allow_list() -> None:
    names = [*RECORDED, *NOT_RECORDED, *OF_A_RANK]
    given: dict[str, str] = dict.fromkeys(names, "http://me:s3cr3t@host/x")
    kept = dict.fromkeys(RECORDED, f"http://{HIDDEN}@host/x")
    assert redaction.recorded_variables(given) == kept
    keys = "api_key --a.init_args.api_key WANDB_API_KEY hf_token dbPassword pw".split()
    others = "eos_token text_key num_key_value_heads sample_tokens tokenizer bypass_cache monkey"
    assert [key for key in [*keys, *others.split(), ""] if redaction.names_a_secret(key)] == keys


def test_a_configuration_keeps_all_but_the_text_of_secrets() -> None:
    section = {"api_key": "k", "token": None, "key": 3, "eos_token": "</s>"}
    given: dict[str, Any] = {"a": section, "b": ["://u:p@h", 1]}
    given["credentials"] = {"user": "u", "a": ["x"]}
    kept = {"a": section | {"api_key": HIDDEN}, "b": [f"://{HIDDEN}@h", 1]}
    kept["credentials"] = {"user": HIDDEN, "a": [HIDDEN]}
    assert redaction.redacted(given) == kept


def test_a_command_line_keeps_all_but_secrets() -> None:
    plain = ["python", "-m", "trainer", "fit", "--c", "d", "--y=1:2"]
    plain += ["--model.architecture={model_type: llama, eos_token: x}"]
    secret = ["--a.api_key=s", "--b.token", "s", "--x={password: s, y: 1}"]
    hidden = [f"--a.api_key={HIDDEN}", "--b.token", HIDDEN]
    hidden += [f'--x={{"password": "{HIDDEN}", "y": 1}}']
    assert redaction.redacted_command([*plain, *secret]) == [*plain, *hidden]


class Uploader(Callback):
    """Somebody's own."""

    def __init__(self, api_key: str) -> None:
        assert api_key == "s3cr3t"


def test_a_run_writes_no_secret(flags: Any, tmp_path: Path, monkeypatch: Any, capfd: Any) -> None:
    for name in NOT_RECORDED:
        monkeypatch.setenv(name, "s3cr3t")
    secret = [f"--trainer.callbacks+={__name__}.Uploader", "--trainer.callbacks.api_key=s3cr3t"]
    monkeypatch.setattr("sys.orig_argv", ["python", "-m", "trainer", "fit", *secret])
    flags = [flag for flag in flags if flag != "--run.report=false"]
    assert run("fit", *flags, *secret, "--trainer.max_steps=1") == 0
    written = [path for path in only_run(tmp_path).rglob("*") if path.is_file()]
    names = " ".join(path.name for path in written)
    assert all(name in names for name in "config.yaml environment report.html tfevents".split())
    assert [path for path in written if b"s3cr3t" in path.read_bytes()] == []
    shown = capfd.readouterr()
    assert "s3cr3t" not in shown.out + shown.err
