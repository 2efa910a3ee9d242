"""`serve`: answers OpenAI's API, or /pooling of a reward model, with what a run trained, exported
and compared."""

# 1  The flags are checked, and the port is opened: both fail at once, before the model is loaded.
# 2  A thread answers /health from then on, while the main one loads the model. A run's is exported
#    first, unless it has been, and the export's logits are compared with the checkpoint's.
# 3  The model answers requests until SIGTERM or Ctrl-C; running ones then get `--grace_s` seconds.

from __future__ import annotations

import argparse
import logging
import os
import re
import signal
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....cluster.signals import STOP
from ....errors import InputError, reason, require
from ....project import Flags, Project, program
from ...ranges import in_range

KEY = "SERVE_API_KEY"
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s]+/?", re.IGNORECASE)
HOST = re.compile(r"[\w.:\[\]-]+", re.ASCII)

if TYPE_CHECKING:
    import uvicorn
    from transformers import PreTrainedModel

    from ..export.trained import Trained
    from .app import App
    from .service import Service


def main(argv: list[str], project: Project) -> None:
    """Serves until SIGTERM or Ctrl-C. Raises InputError if there is no model, it differs from what
    was trained, the port is in use, or the extra is missing."""
    given = flags(argv[1:])
    _check(given)
    require("fastapi", program("serve"), extra="serve")
    try:
        family = socket.AF_INET6 if ":" in given.host else socket.AF_INET
        listening = socket.create_server((given.host, given.port), family=family)
    except (OSError, OverflowError) as error:
        why = f"cannot be used: {reason(error)}; give another"
        raise InputError(f"--host {given.host} --port {given.port} {why}") from error
    from .service import Service, is_of_a_client

    service = Service(given.max_requests)
    server = http_server(service, given)
    # uvicorn would log the start and end of its thread, and what a cluster asks every few seconds.
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    logging.getLogger("uvicorn.access").addFilter(is_of_a_client)
    # It answers /health while this thread loads the model: a signal ends the process until then.
    answering = threading.Thread(target=server.run, args=([listening],), name="http")
    answering.start()
    try:
        service.start(_application(given, project))
    except BaseException:
        server.should_exit = True
        answering.join()
        raise
    for number in (*STOP, signal.SIGINT):
        signal.signal(number, lambda *_: service.stop(server, given.grace_s))
    print(f"{given.name} is ready at http://{given.host}:{given.port}/v1", flush=True)
    answering.join()


def http_server(service: Service, given: argparse.Namespace) -> uvicorn.Server:
    """Returns the HTTP server around `service`."""
    import uvicorn
    from starlette.middleware.cors import CORSMiddleware

    from ....compat.uvicorn import TimedProtocol

    # What a browser asks before a page of an allowed origin may, and reads in each answer.
    pages: Any = {"allow_origins": given.allow_origin, "allow_headers": ["*"]}
    config = uvicorn.Config(
        CORSMiddleware(service, **pages, allow_methods=["GET", "POST"]),
        http=TimedProtocol,
        ws="none",
        lifespan="off",
        log_level="info",
        use_colors=False,  # output is plain text (terminal.py)
        timeout_graceful_shutdown=given.grace_s + 5,
    )
    return uvicorn.Server(config)


def _application(given: argparse.Namespace, project: Project) -> App:
    """Loads and compares the model, and returns what answers for it."""
    served = _compared(given, project)
    import torch

    from .app import App

    model = on_device(served.model, "cuda" if torch.cuda.is_available() else "cpu")
    if model.can_generate():
        # As vLLM and OpenAI's service do; at temperature 0, transformers does not sample.
        model.generation_config.do_sample = True
    return App(model, served.tokenizer, os.environ.get(given.api_key_env, ""), given)


def on_device(model: PreTrainedModel, device: str) -> PreTrainedModel:
    """Moves `model` to `device`, with parameters in bf16 on a GPU that computes in it."""
    import torch

    if device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        # Buffers stay in fp32: rotary frequencies in bf16 are wrong in long texts.
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.bfloat16()
    return model.to(torch.device(device))


def flags(argv: list[str]) -> argparse.Namespace:
    """Returns the parsed flags of the verb."""
    parser = Flags(
        "serve", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add, count = parser.add_argument, in_range(int, 1)
    add("model", help="a run's folder, a checkpoint, or an exported folder")
    add("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0: all")
    add("--port", type=in_range(int, 0, 65_535), default=8000, help="port to listen on")
    add("--name", help="the model's name in requests, instead of the run's or the folder's")
    add("--max_tokens", type=count, default=1024, help="most tokens of an answer")
    add(
        "--max_requests",
        type=count,
        default=32,
        help="requests at once; one more is answered with 429",
    )
    add(
        "--grace_s",
        type=in_range(float, 0, 1e8),
        default=20.0,
        help="seconds for running requests after SIGTERM",
    )
    add(
        "--api_key_env", default=KEY, help="environment variable with the key that requests present"
    )
    pages: Any = {"action": "append", "default": []}
    add(
        "--allow_origin",
        metavar="ORIGIN",
        help="origin of a web page that may ask, as https://chat.example.org; repeatable",
        **pages,
    )
    add(
        "--allow_host",
        metavar="HOST",
        help="a name with dots by which clients without a key reach this service; repeatable",
        **pages,
    )
    return parser.parse_args(argv)


def _check(given: argparse.Namespace) -> None:
    """Raises InputError for flags that would open the service wider than their user thinks, or
    that no request can match."""
    if not given.host.strip():  # sockets take it as all addresses
        raise InputError("--host is empty; give an address, or 0.0.0.0 for all")
    if given.name is not None and not given.name.strip():
        raise InputError("--name is empty; give the model's name in requests, or remove the flag")
    if given.api_key_env != KEY and not os.environ.get(given.api_key_env):
        raise InputError(
            f"--api_key_env {given.api_key_env!r} is not set or empty, and anybody could ask: set"
            " the variable, or remove the flag"
        )
    for origin in given.allow_origin:
        if origin != "*" and not ORIGIN.fullmatch(origin):
            raise InputError(
                f"--allow_origin {origin!r} is no origin; give a scheme and a host, as"
                " https://chat.example.org"
            )
    for host in given.allow_host:
        if host != "*" and not HOST.fullmatch(host):
            raise InputError(f"--allow_host {host!r} is no host; give a name, as serve.example.org")


def _compared(given: argparse.Namespace, project: Project) -> Trained:
    """Loads the model to serve; a run is exported first, and the export is compared with it."""
    from transformers.utils import logging

    from ..export import command
    from ..export.gate import Gate
    from ..export.trained import load_trained

    logging.set_verbosity_error()  # its server warns about each request
    logging.disable_progress_bar()
    trained = served = load_trained(given.model, project)
    name = Path(served.path).name
    if trained.run:
        name = trained.run.parent.name
        folder = trained.run / "export" / Path(trained.path).stem
        if not folder.exists():
            command.main(
                ["export", trained.path, f"--output={folder}", "--adapter=merged"], project
            )
        served = load_trained(str(folder), project)
        print(f"{folder}: {Gate(trained).check(served, 'float32')}", flush=True)
    if not served.tokenizer or not hasattr(served.model, "can_generate"):
        raise InputError(f"{served.path} has no tokenizer, or a model that is not of transformers")
    if given.name is None:
        given.name = name
    return served
