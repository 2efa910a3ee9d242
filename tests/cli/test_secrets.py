"""No secret is in what a run records, whatever way it was given in."""

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

from dist_template.cluster import redaction
from tests.support.runs import only_run, run

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
