"""What the library and the project know of a model under a strategy; see model/proof.py."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ...errors import InputError
from ...model import proof
from ...parallel.configured import ARGS, NOT_READ_YET
from ...project import program
from .machine import Setup


def refused(setup: Setup) -> Iterator[str]:
    """Yields a sentence if a model of this type did not train to one process's numbers."""
    config = setup.model_config
    if config is NOT_READ_YET or not setup.trains:
        return
    try:
        axes = proof.axes_of(setup.spec, setup.machine.world_size, setup.module)
    except InputError:
        return  # the strategy reports that its sizes do not fit
    found = proof.verdict(config, axes)
    if found.kind == "refused":
        yield (
            f"a model of type {config.model_type!r} does not train correctly under {axes}"
            f" ({found.why}): edit {ARGS}, or choose another strategy of `config list`"
        )


def notes(
    config: Any, module: Any, data: Any, strategy: Any, world_size: int, package: Path
) -> Iterator[str]:
    """Yields notes: combinations that were not compared with one process, code that never ran on a
    fake GPU, and models that leak between documents."""
    found = proof.verdict(config, proof.axes_of(strategy, world_size, module), package.parent)
    device = getattr(strategy, "root_device", torch.device("cpu"))
    if device.type == "cuda" and proof.waits_of(package) is None:
        yield (
            f"note: this code was not rehearsed for a GPU: `{program('rehearse --gpu')}` names"
            " what fails or waits"
        )
    if found.kind == "unproven":
        cure = "with these flags compares it with one process in a minute, and records the result"
        yield f"note: not proven here: {found.why}. `{program('rehearse')}` {cure}"
    is_packed = getattr(data, "cross_document_attention", None) is False
    if config is None or not is_packed:
        return
    where = proof.leaks(config)
    if "documents" in where:
        yield (
            f"warning: in a model of type {config.model_type!r} a document sees the ones before it"
            f" in its row (first in {where['documents']}); data.cross_document_attention true"
            " accepts it"
        )
    if "place" in where:
        yield (
            f"warning: in a model of type {config.model_type!r} what a document gets depends on"
            f" where in its row it is (first in {where['place']}): layers that choose tokens take"
            " the first of those with equal scores"
        )
