"""`serve`: answers OpenAI's API with what a run trained, after it was exported and compared."""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ....cluster import signals
from ....errors import InputError, reason, require
from ....project import Flags, Project, program
from ...ranges import in_range

NEEDED = ("fastapi", "openai", "prometheus_client", "uvicorn")
FLAGS: dict[str, tuple[Any, ...]] = {  # default, what it is, least and most
    "host": ("127.0.0.1", "address to listen on; 0.0.0.0: all"),
    "port": (8000, "port to listen on", 0, 65_535),
    "name": ("", "the model's name in requests; default: the run's or the folder's"),
    "max_tokens": (1024, "most tokens of an answer", 1),
    "max_requests": (32, "requests at once; one more is answered with 429", 1),
    "max_body": (1 << 20, "most bytes of a request", 1),
    "timeout_s": (120.0, "seconds for a request, with its wait for others", 0.001, 1e8),
    "grace_s": (20.0, "seconds for running requests after SIGTERM", 0, 1e8),
    "api_key_env": ("SERVE_API_KEY", "environment variable with the key that requests present"),
}


def main(argv: list[str], project: Project) -> None:
    """Serves until SIGTERM or Ctrl-C.

    Raises:
        InputError: there is no model, it differs from what was trained, the port is in use, or the
            extra is missing.
    """
    given = flags(argv[1:])
    import torch

    has_gpu, key = torch.cuda.is_available(), os.environ.get(given.api_key_env, "")
    if given.engine == "auto":
        given.engine = "vllm" if has_gpu and find_spec("vllm") else "transformers"
    if given.engine == "vllm" and not find_spec("vllm"):
        raise InputError("--engine vllm needs the package vllm, 0.18 or newer: pip install vllm")
    for package in NEEDED if given.engine == "transformers" else ():
        require(package, program("serve"))
    try:
        family = socket.AF_INET6 if ":" in given.host else socket.AF_INET
        listening = socket.create_server((given.host, given.port), family=family)
    except (OSError, OverflowError) as error:
        where = f"--host {given.host} --port {given.port}"
        raise InputError(f"{where} cannot be used: {reason(error)}; give another") from error
    served = _compared(given, project)
    if given.engine == "vllm":
        listening.close()
        command = vllm_command(served.path, given)
        os.execvpe(command[0], command, os.environ | ({"VLLM_API_KEY": key} if key else {}))
    from .app import App

    model = on_device(served.model, "cuda" if has_gpu else "cpu")
    model.generation_config.do_sample = True  # as vLLM and OpenAI; not at temperature 0
    given.context = getattr(model.config, "max_position_embeddings", sys.maxsize)
    signals.ignore()  # uvicorn has handlers of its own, and raises what it received again
    asyncio.run(_serve(App(model, served.tokenizer, key, given), listening, given))


def on_device(model: Any, device: str) -> Any:
    """Moves `model` to `device`, with parameters in bf16 on a GPU that computes in it."""
    import torch

    from ....parallel.half import HalfParameters

    if device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        HalfParameters("bf16-true").convert_module(model)
    return model.to(device)


def flags(argv: list[str]) -> argparse.Namespace:
    """Returns the parsed flags of the verb."""
    parser = Flags("serve", description=__doc__)
    parser.add_argument("model", help="a run's folder, a checkpoint, or an exported folder")
    names, auto = ("auto", "transformers", "vllm"), "auto: vllm if it and a GPU are there"
    parser.add_argument("--engine", choices=names, default="auto", help=auto)
    for flag, (default, what, *limits) in FLAGS.items():
        shown = f"{what} (default: {default})" if default else what
        kind = in_range(type(default), *limits) if limits else str
        parser.add_argument(f"--{flag}", type=kind, default=default, help=shown)
    parser.add_argument("--log_prompts", action="store_true", help="add prompts to the log")
    return parser.parse_args(argv)


def vllm_command(folder: str, given: argparse.Namespace) -> list[str]:
    """Returns the command that serves `folder` by vLLM, 0.18 or newer, with the same limits."""
    flags = {"host": given.host, "port": given.port, "served-model-name": given.name}
    flags |= {"max-num-seqs": given.max_requests, "shutdown-timeout": round(given.grace_s)}
    words = [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
    return ["vllm", "serve", folder, *words]


def _compared(given: argparse.Namespace, project: Project) -> Any:
    """Returns the model of a folder; that of a run is exported, and compared with the run's."""
    from transformers.utils import logging

    from ..export import command
    from ..export.gate import Gate
    from ..export.trained import load_trained

    logging.set_verbosity_error()  # its server warns about each request
    logging.disable_progress_bar()
    trained = served = load_trained(given.model, project)
    if trained.run:
        folder = trained.run / "export" / Path(trained.path).stem
        if not folder.exists():
            command.main(["export", trained.path, f"--output={folder}", "--to=hf"], project)
        served = load_trained(str(folder), project)
        print(f"{folder}: {Gate(trained).check(served, 'float32')}", flush=True)
    if not served.tokenizer or not hasattr(served.model, "generate"):
        raise InputError(f"{served.path} has no tokenizer, or a model that is not of transformers")
    given.name = given.name or (trained.run.parent if trained.run else Path(served.path)).name
    return served


async def _serve(app: Any, listening: socket.socket, given: argparse.Namespace) -> None:
    """Serves until uvicorn receives SIGTERM or SIGINT; then running requests end."""
    import uvicorn

    from .connections import protocol

    quiet: Any = {"lifespan": "off", "log_level": "warning", "access_log": False}
    patience = given.grace_s + 5  # app.drain comes before
    server = uvicorn.Server(
        uvicorn.Config(app, http=protocol(), timeout_graceful_shutdown=patience, **quiet)
    )
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    await app.warm_up()
    print(f"{given.name} is ready at http://{given.host}:{given.port}/v1", flush=True)
    while not server.should_exit and not serving.done():
        await asyncio.sleep(0.05)
    app.drain()
    await serving
