"""Measures all ranks before the first step, and names those that are slower than the others."""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback

from ...callbacks.console import only_shows
from ...errors import Ended, Exit
from ...records import write_atomically
from .compare import FIGURES, FILE, slow
from .interval import DEVICE_MTBF_H, DISK_GB_S


@dataclass(eq=False)
class Preflight(Callback):
    """Multiplies matrices, copies memory and joins all-reduces on every rank, for ten seconds at most, and compares.

    Args:
        enabled: null: on several nodes.
        least_share: Of the median; a slower rank is named, with its host, device and figure.
        refuse: Exit with code 78 in place of a warning.
        device_mtbf_h: Hours between two failures of a device, for the best interval of checkpoints.
        disk_gb_s: GB/s with which a node writes a checkpoint, for the same, until a run has measured it.
        folder: Where `preflight.json` is written.
    """

    enabled: bool | None = None
    least_share: float = 0.8
    refuse: bool = False
    device_mtbf_h: float = DEVICE_MTBF_H
    disk_gb_s: float = DISK_GB_S
    folder: str = "{run}"

    @only_shows  # a failed measurement does not end training
    def setup(self, trainer: Any, pl_module: object, stage: str) -> None:
        is_on = trainer.num_nodes > 1 if self.enabled is None else self.enabled
        if stage != "fit" or not is_on or trainer.fast_dev_run:
            return
        from .measure import measure

        begun = time.time()
        ranks = measure(trainer.strategy.root_device, trainer.num_nodes)
        if trainer.strategy.root_device.type != "cpu":
            torch.accelerator.empty_cache()  # for the weights
        found = slow(ranks, self.least_share, trainer.num_nodes)
        if trainer.is_global_zero:
            record = {"time": begun, "seconds": time.time() - begun, "slow": found, "ranks": ranks}
            (folder := Path(self.folder)).mkdir(parents=True, exist_ok=True)
            write_atomically(folder / FILE, json.dumps(record, indent=1))
            known = [name for name in FIGURES if name in ranks[0]]
            figures = ", ".join(f"{name} {ranks[0][name]:.3g} {FIGURES[name][0]}" for name in known)
            lines = [f"preflight         {len(ranks)} ranks in {record['seconds']:.1f} s; rank 0: {figures}"]
            print("\n".join([*lines, *map("preflight: {}".format, found)]), flush=True)
        if found and self.refuse:
            raise Ended(
                Exit.MISMATCH, f"preflight: {'; '.join(found)} (exclude the node, or set preflight.refuse false)"
            )
