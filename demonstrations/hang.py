"""A hang in a checkpoint: which rank? torch with gloo, then this project's watchdog."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

from lightning.pytorch import Callback
from shared import DATA, FOLDER, LLAMA, TRAINER, command, show, strategy, two_processes

STUCK_S = 60


class StuckSave(Callback):
    """Rank 1 hangs while the checkpoint of step 2 is collected."""

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 2:
            time.sleep(STUCK_S)


def plain(rank: int) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=4))
    if rank == 1:
        # a file server that does not answer, while rank 0 waits with its part of the checkpoint
        time.sleep(7)
        return
    try:
        dist.barrier()
    except RuntimeError as error:
        (FOLDER / "error").write_text(str(error).partition("] ")[2] or str(error))


if __name__ == "__main__":
    two_processes(plain)
    elsewhere = (FOLDER / "error").read_text()
    flags = [strategy("ddp"), f"--model.architecture={LLAMA}", "--trainer.callbacks=hang.StuckSave"]
    flags += ["--watchdog.timeout_s=4", "--last_checkpoint.every_n_steps=1"]
    code, printed = command("fit", *DATA, *TRAINER, *flags)
    lines = [line for line in printed.splitlines() if line.startswith("no progress for")]
    here = max(lines, key=lambda line: "is stalled" in line, default=printed[-2000:])
    names_it = "rank 1 is stalled" in here and "hang.py" in here
    show(elsewhere, f"{here} (exit code {code})", names_it and "rank 1" not in elsewhere)
