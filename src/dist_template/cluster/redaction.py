"""Keeps secrets out of what a run records and prints.

Only the environment variables that are listed here are recorded, and none whose name suggests a
secret. In the configuration and in the command line, text below a key such as `api_key` or
`password` is replaced."""

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

__all__ = ["redacted_command"]

HIDDEN = "(not recorded)"
SECRET_VARIABLE = re.compile(r"KEY|TOKEN|SECRET|PASS|PW", re.IGNORECASE)
# Variables of the libraries that training depends on: for reports, and for the comparison between
# ranks. Excluded: torchrun's own (TORCHELASTIC_*), which differ by rank and restart;
# CUDA_VISIBLE_DEVICES, because a scheduler may assign each process its own devices;
# OMP_NUM_THREADS, which by default depends on the number of processes.
RECORDED = """NCCL_ALGO NCCL_CUMEM_ENABLE NCCL_DEBUG NCCL_IB_DISABLE NCCL_IB_GID_INDEX NCCL_IB_HCA
NCCL_IB_TC NCCL_IB_TIMEOUT NCCL_MNNVL_ENABLE NCCL_NET NCCL_NET_PLUGIN NCCL_NVLS_ENABLE
NCCL_P2P_DISABLE NCCL_P2P_LEVEL NCCL_PROTO NCCL_SHM_DISABLE NCCL_SOCKET_IFNAME NCCL_SOCKET_NTHREADS
NCCL_TOPO_FILE NCCL_TUNER_PLUGIN TORCH_DISTRIBUTED_DEBUG TORCH_ALLOW_TF32_CUBLAS_OVERRIDE
TORCH_COMPILE_DISABLE TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD TORCH_NCCL_AVOID_RECORD_STREAMS
TORCH_NCCL_ASYNC_ERROR_HANDLING TORCH_NCCL_BLOCKING_WAIT TORCH_NCCL_HIGH_PRIORITY PYTORCH_ALLOC_CONF
PYTORCH_CUDA_ALLOC_CONF CUDA_DEVICE_MAX_CONNECTIONS CUDA_DEVICE_ORDER CUDA_HOME CUDA_LAUNCH_BLOCKING
CUDA_MODULE_LOADING DS_ACCELERATOR DS_BUILD_OPS PYTHONHASHSEED PYTHONPATH CUBLAS_WORKSPACE_CONFIG
MKL_NUM_THREADS NVIDIA_TF32_OVERRIDE"""

# Last words of a key whose text is a secret, unless the word before is in NO_SECRETS: `eos_token`,
# `text_key`.
SECRET_KEYS = """apikey auth authorization bearer cookie cookies credential credentials dsn jwt key
pass passphrase passwd password passwords pw pwd secret sig signature token"""
# Words that make a key's text a secret wherever they are: client_secret_value, webhook_url
SECRET_WORDS = "credential credentials passphrase passwd password passwords secret webhook"
# A word after one of them that changes nothing, as in private_key_pem and api_keys
ENDINGS = "json pem text value"
NO_SECRETS = "bos cls eos image label mask pad sep sort text unk"
PASSWORD_IN_URL = re.compile(r"(?<=://)[^/\s,'\"]+(?=@)")  # a password may have an @
# A parameter of an address: whoever has a presigned one may read what it leads to.
PARAMETER = re.compile(r"([?&]([\w.-]+)=)[^&#\s'\",\]})]+")
# Tokens that are known by their beginnings: Hugging Face, GitHub, GitLab, AWS, OpenAI, Slack
TOKEN = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{30,}|glpat-[\w-]{20,}"
    r"|AKIA[0-9A-Z]{16}|sk-(?:proj-)?[A-Za-z0-9_]{20,}|xox[abprs]-[\w-]{10,})"
)


def recorded_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that may be recorded, by name."""
    recorded = {}
    for name in RECORDED.split():
        if name in environment and not SECRET_VARIABLE.search(name):
            recorded[name] = redacted(environment[name])
    return recorded


def redacted(value: Any, is_secret: bool = False) -> Any:
    """Returns a configuration of plain types, with the text below each secret key replaced."""
    if isinstance(value, dict):
        found = {}
        for key, below in value.items():
            found[key] = redacted(below, is_secret or names_a_secret(str(key)))
        return found
    if isinstance(value, list):
        return [redacted(item, is_secret) for item in value]
    if not isinstance(value, str):
        return value
    if is_secret and value:
        return HIDDEN
    return _without_tokens(value)


def _without_tokens(text: str) -> str:
    """Returns a text without passwords and signatures of addresses, and without known tokens."""

    def parameter(found: re.Match[str]) -> str:
        if names_a_secret(found[2]):
            return found[1] + HIDDEN
        return found[0]

    text = PASSWORD_IN_URL.sub(HIDDEN, text)
    text = PARAMETER.sub(parameter, text)
    return TOKEN.sub(HIDDEN, text)


def redacted_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns variables with a text in place of each secret; all are kept."""
    shown = redacted(dict(environment))
    for name in shown:
        if SECRET_VARIABLE.search(name):
            shown[name] = HIDDEN
    return shown


def names_a_secret(key: str) -> bool:
    """Returns whether the text below `key` is a secret, by the last two words of the name, or by
    one that always says so."""
    words = [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", key.rpartition(".")[2])]
    if not set(words).isdisjoint(SECRET_WORDS.split()):
        return True
    if len(words) > 1 and words[-1] in ENDINGS.split():
        words.pop()
    before, last = ["", "", *words][-2:]
    if last == "keys":
        return before == "api"
    if last == "id":  # access_key_id, AWSAccessKeyId
        return before == "key"
    return last in SECRET_KEYS.split() and before not in NO_SECRETS.split()


def redacted_command(words: Iterable[str]) -> list[str]:
    """Returns a command line without secrets after `--key=`, after `--key`, and in YAML values."""
    found, is_secret = [], False
    for word in words:
        flag, has_value, value = word.partition("=") if word.startswith("--") else ("", "", word)
        if flag:
            is_secret = names_a_secret(flag)
        if flag and not has_value:
            found.append(word)
            continue
        found.append(f"{flag}{has_value}{_redacted_text(value, is_secret)}")
        is_secret = False
    return found


def _redacted_text(text: str, is_secret: bool) -> str:
    import yaml

    if is_secret or ":" not in text:
        return redacted(text, is_secret)
    value: object = text
    with suppress(yaml.YAMLError):
        value = yaml.safe_load(text)
    hidden = redacted(value)
    if hidden == value:
        return text
    if isinstance(hidden, str):
        return hidden
    return json.dumps(hidden, default=str)
