"""Refusals that several strategies share."""

import re
from collections.abc import Iterator

from ..configured import Configured

ROW_BYTES = 16  # of which grouped products (torch 2.13) need a multiple in each row


def widths_of_experts(setup: Configured, parts: int) -> Iterator[str]:
    """Refuses experts whose rows do not fill ROW_BYTES; `parts` ranks share the width of each."""
    from ...compat.transformers import fields_of_experts  # it imports torch

    config = setup.text_config
    if config is None or not (fields := fields_of_experts(config)):
        return
    bits = re.findall(r"16|32|64", setup.machine.precision)
    multiple = ROW_BYTES * 8 // int(bits[0] if bits else 32)
    for name, number in ((fields.width, parts), (fields.hidden, 1)):
        size = getattr(config, name, None)
        if not isinstance(size, int) or size % (multiple * number) == 0:
            continue
        shared = f" x {number} ranks that share an expert" if number > 1 else ""
        yield (
            f"model.architecture.{name} {size} is not a multiple of {multiple * number}, which"
            f" grouped products of experts need ({multiple} numbers fill {ROW_BYTES} bytes at"
            f" trainer.precision {setup.machine.precision}{shared}): edit it"
        )
        return


def selective_refusal(setup: Configured, what: str) -> Iterator[str]:
    """Refuses selective checkpointing of blocks that communicate (torch 2.13: "not found in
    storage" in backward)."""
    if setup.setting("blocks.checkpointing") == "selective":
        why = f"{what}, which communicates inside of a block again in backward"
        yield f"model.blocks.checkpointing 'selective' does not work with {why}: set full"


def measured_refusal(
    setup: Configured,
    what: str,
    why: str = "where ranks wait for each other inside of a forward pass",
) -> Iterator[str]:
    """Refuses to measure the ranks' speeds where a rank's own time cannot be told."""
    if getattr(setup.data, "rank_speeds", None) == "measured":
        yield (
            f"data.rank_speeds measured does not work with {what}, {why}: give a number for each"
            " data-parallel rank"
        )


def manual_refusal(name: str, what: str) -> str:
    """Returns why the module `name`, which steps by itself, is not trained under `what`: an engine
    or a pipeline takes steps of its own."""
    return (
        f"{name} optimizes manually (automatic_optimization is False), which does not work under"
        f" {what}: use --config strategy/fsdp2, strategy/ddp or one device"
    )
