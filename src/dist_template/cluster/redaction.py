"""Keeps secrets out of what a run records and prints.

Only the environment variables that are listed here are recorded, and none whose name suggests a secret. In the
configuration and in the command line, text below a key such as `api_key` or `password` is replaced."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

__all__ = ["redacted_command", "redacted_environment"]

HIDDEN = "(not recorded)"
SECRET_VARIABLE = re.compile(r"KEY|TOKEN|SECRET|PASS|PW", re.IGNORECASE)
# By prefix, variables of the libraries that training depends on: for reports, and for the comparison between ranks.
# Excluded: torchrun's own (TORCHELASTIC_*), which differ by rank and restart; CUDA_VISIBLE_DEVICES, because a scheduler
# may assign each process its own devices; OMP_NUM_THREADS, which by default depends on the number of processes.
RECORDED = {
    "NCCL_": "ALGO BUFFSIZE COLLNET_ENABLE COMM_BLOCKING CROSS_NIC CUMEM_ENABLE DEBUG DEBUG_SUBSYS"
    " GRAPH_FILE IB_DISABLE IB_GID_INDEX IB_HCA IB_QPS_PER_CONNECTION IB_RETRY_CNT IB_SL IB_TC"
    " IB_TIMEOUT LAUNCH_MODE MAX_CTAS MAX_NCHANNELS MIN_CTAS MIN_NCHANNELS MNNVL_ENABLE NET"
    " NET_GDR_LEVEL NET_GDR_READ NET_PLUGIN NSOCKS_PERTHREAD NTHREADS NVLS_ENABLE P2P_DISABLE"
    " P2P_LEVEL PROTO PXN_DISABLE RAS_ENABLE SHM_DISABLE SOCKET_FAMILY SOCKET_IFNAME"
    " SOCKET_NTHREADS TOPO_FILE TUNER_PLUGIN",
    "TORCH_": "ALLOW_TF32_CUBLAS_OVERRIDE BLAS_PREFER_CUBLASLT COMPILE_DISABLE CPP_LOG_LEVEL"
    " CUDA_ARCH_LIST DISABLE_SHARE_RDZV_TCP_STORE DISTRIBUTED_DEBUG EXTENSIONS_DIR"
    " FORCE_NO_WEIGHTS_ONLY_LOAD FORCE_WEIGHTS_ONLY_LOAD HOME LOGS NCCL_ASYNC_ERROR_HANDLING"
    " NCCL_AVOID_RECORD_STREAMS NCCL_BLOCKING_WAIT NCCL_CUDA_EVENT_CACHE NCCL_DESYNC_DEBUG"
    " NCCL_DUMP_ON_TIMEOUT NCCL_ENABLE_MONITORING NCCL_HEARTBEAT_TIMEOUT_SEC NCCL_HIGH_PRIORITY"
    " NCCL_NAN_CHECK NCCL_TRACE_BUFFER_SIZE NCCL_USE_COMM_NONBLOCKING SHOW_CPP_STACKTRACES",
    "PYTORCH_": "ALLOC_CONF CUDA_ALLOC_CONF JIT KERNEL_CACHE_PATH NO_CUDA_MEMORY_CACHING NVML_BASED_CUDA_CHECK",
    "CUDA_": "CACHE_DISABLE CACHE_MAXSIZE CACHE_PATH DEVICE_MAX_CONNECTIONS DEVICE_ORDER HOME"
    " LAUNCH_BLOCKING MODULE_LOADING MPS_ACTIVE_THREAD_PERCENTAGE MPS_PIPE_DIRECTORY PATH VERSION",
    "DS_": "ACCELERATOR BUILD_OPS SKIP_CUDA_CHECK",
    "PYTHON": "DEVMODE DONTWRITEBYTECODE FAULTHANDLER HASHSEED HOME IOENCODING MALLOC NOUSERSITE"
    " OPTIMIZE PATH UNBUFFERED UTF8 WARNINGS",
    "": "CUBLAS_WORKSPACE_CONFIG MKL_NUM_THREADS NVIDIA_TF32_OVERRIDE",
}
NAMES: set[str] = set()
for _prefix, _names in RECORDED.items():
    NAMES.update(_prefix + _name for _name in _names.split())

# Last words of a key whose text is a secret, unless the word before is in NO_SECRETS: `eos_token`, `text_key`.
SECRET_KEYS = "apikey credential credentials key pass passphrase passwd password pw pwd secret token"
NO_SECRETS = "bos cls eos image label mask pad sep sort text unk"
PASSWORD_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")


def recorded_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that may be recorded, by name."""
    recorded = {}
    for name in sorted(NAMES & environment.keys()):
        if not SECRET_VARIABLE.search(name):
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
    return HIDDEN if is_secret and value else PASSWORD_IN_URL.sub(HIDDEN, value)


def redacted_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns variables with a text in place of each secret; all are kept."""
    shown = redacted(dict(environment))
    for name in shown:
        if SECRET_VARIABLE.search(name):
            shown[name] = HIDDEN
    return shown


def names_a_secret(key: str) -> bool:
    """Returns whether the text below `key` is a secret, by the last two words of the name."""
    words = ["", "", *re.findall(r"[A-Z]?[a-z]+|[A-Z]+", key)]
    before, last = words[-2].lower(), words[-1].lower()
    return last in SECRET_KEYS.split() and before not in NO_SECRETS.split()


def redacted_command(words: Iterable[str]) -> list[str]:
    """Returns a command line without secrets after `--key=`, after `--key`, and in YAML values."""
    found, is_secret = [], False
    for word in words:
        flag, has_value, value = word.partition("=") if word.startswith("--") else ("", "", word)
        if flag:
            is_secret = names_a_secret(flag)
        if not flag or has_value:
            found.append(f"{flag}{has_value}{_redacted_text(value, is_secret)}")
            is_secret = False
        else:
            found.append(word)
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
    return hidden if isinstance(hidden, str) else json.dumps(hidden, default=str)
