"""No secret is in what a run records, whatever way it was given in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback

from dist_template.cluster import redaction
from dist_template.cluster.redaction import redacted_command
from tests.support.runs import only_run, run

HIDDEN = redaction.HIDDEN


def variables(names: str, value: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), value)


RECORDED = variables("NCCL_DEBUG TORCH_NCCL_BLOCKING_WAIT PYTHONPATH MKL_NUM_THREADS", "1")
NOT_RECORDED = variables("CUDA_VISIBLE_DEVICES OMP_NUM_THREADS TORCHELASTIC_RESTART_COUNT", "1")
NOT_RECORDED |= variables("WANDB_API_KEY HF_TOKEN TORCH_REGISTRY NCCL_OWN_PLUGIN_LOGIN", "s3cr3t")
NOT_RECORDED |= variables("DS_STORAGE_PASSWORD PYTHON_KEYRING_BACKEND", "s3cr3t")


def test_variables_are_those_of_an_allow_list() -> None:
    given: Any = RECORDED | NOT_RECORDED
    assert redaction.recorded_variables(given) == RECORDED
    secret = ("KEY", "TOKEN", "SECRET", "PASS", "PW")
    assert not [name for name in redaction.RECORDED.split() if any(word in name for word in secret)]
    with_password = {"PYTHONPATH": "http://me:s3cr3t@host/x"}
    assert redaction.recorded_variables(with_password) == {"PYTHONPATH": f"http://{HIDDEN}@host/x"}
    keys = "api_key --a.init_args.api_key WANDB_API_KEY hf_token dbPassword pw".split()
    others = (
        "eos_token text_key num_key_value_heads sample_tokens tokenizer bypass_cache monkey".split()
    )
    assert [key for key in [*keys, *others, ""] if redaction.names_a_secret(key)] == keys


def test_a_configuration_keeps_all_but_the_text_of_secrets() -> None:
    section = {"api_key": "k", "token": None, "key": 3, "eos_token": "</s>"}
    given: dict[str, Any] = {"a": section, "b": ["://u:p@h", 1]}
    kept = {"a": given["a"] | {"api_key": HIDDEN}, "b": [f"://{HIDDEN}@h", 1]}
    assert redaction.redacted(given) == kept
    below = redaction.redacted({"credentials": {"user": "u", "a": ["x"]}})
    assert below == {"credentials": {"user": HIDDEN, "a": [HIDDEN]}}


def test_a_command_line_keeps_all_but_secrets() -> None:
    given = [
        "python", "-m", "trainer", "fit", "--a.api_key=s", "--b.token", "s", "--c", "d",
        "--x={password: s, y: 1}",
    ]  # fmt: skip
    kept = ["python", "-m", "trainer", "fit", f"--a.api_key={HIDDEN}", "--b.token", HIDDEN]
    kept += ["--c", "d", f'--x={{"password": "{HIDDEN}", "y": 1}}']
    assert redacted_command(given) == kept
    plain = [
        "fit", "--config", "a.yaml", "--model.architecture={model_type: llama, eos_token: x}",
        "--y=1:2",
    ]  # fmt: skip
    assert redacted_command(plain) == plain


class Uploader(Callback):
    """Somebody's own."""

    def __init__(self, api_key: str) -> None:
        assert api_key == "s3cr3t"


def test_a_run_writes_down_no_secret(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    for name, value in NOT_RECORDED.items():
        monkeypatch.setenv(name, value)
    secret = [f"--trainer.callbacks+={__name__}.Uploader", "--trainer.callbacks.api_key=s3cr3t"]
    monkeypatch.setattr("sys.orig_argv", ["python", "-m", "trainer", "fit", *secret])
    flags = [flag for flag in flags if flag != "--run.report=false"]
    assert run("fit", *flags, *secret, "--trainer.max_steps=1") == 0
    written = [path for path in only_run(tmp_path).rglob("*") if path.is_file()]
    assert {"config.yaml", "environment.json", "report.html"} <= {path.name for path in written}
    assert any("tfevents" in path.name for path in written)
    assert [path for path in written if b"s3cr3t" in path.read_bytes()] == []
    shown = capfd.readouterr()
    assert "s3cr3t" not in shown.out + shown.err
