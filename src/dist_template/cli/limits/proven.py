"""What the library and the project know of a model under a strategy; see model/proof.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ...errors import InputError
from ...model import proof
from ...project import program
from .machine import ARGS, NOT_READ_YET, Setup


def refused(setup: Setup) -> Iterator[str]:
    """Yields a sentence if a model of this type did not train to one process's numbers."""
    found = _verdict(setup, None)
    if found and found.kind == "refused":
        kind = setup.model_config.model_type
        yield (
            f"a model of type {kind!r} does not train right under {_axes(setup)} ({found.why}):"
            f" edit {ARGS}, or choose another strategy of configs/strategy"
        )


def notes(setup: Setup, project: Path) -> Iterator[str]:
    """Yields lines about what nobody has compared with one process, and about what leaks."""
    found = _verdict(setup, project)
    if found and found.kind == "unproven":
        cure = "with these flags compares it with one process in a minute, and remembers it"
        yield f"note: not proven here: {found.why}. `{program('rehearse')}` {cure}"
    config, data = setup.model_config, setup.data
    is_packed = getattr(data, "cross_document_attention", None) is False
    if config in (None, NOT_READ_YET) or not is_packed:
        return
    kind, where = config.model_type, proof.leaks(config)
    if "documents" in where:
        yield (
            f"warning: in a model of type {kind!r} a document sees the ones before it in its row"
            f" (first in {where['documents']}); data.cross_document_attention true accepts it"
        )


def _verdict(setup: Setup, project: Path | None) -> proof.Verdict | None:
    axes = _axes(setup)
    if axes is None or setup.model_config is NOT_READ_YET or not setup.trains:
        return None
    return proof.verdict(setup.model_config, axes, project)


def _axes(setup: Setup) -> str | None:
    """Returns None where mesh.py reports that the sizes do not fit."""
    try:
        return proof.axes_of(setup.strategy, setup.machine.world_size)
    except InputError:
        return None
