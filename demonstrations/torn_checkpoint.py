"""A damaged checkpoint that loads: torch.save, then this project, which resumes from the one before
it."""

from __future__ import annotations

from pathlib import Path

import torch
from shared import DATA, FOLDER, LLAMA, TRAINER, command, show, strategy


def damage(file: Path) -> None:
    """Sets 64 bytes in the middle to zero, as a disk or a copy that was cut off may do."""
    content = bytearray(file.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 64] = bytes(64)
    file.write_bytes(content)


if __name__ == "__main__":
    weights = {"weight": torch.full((4096,), 3.0)}
    torch.save(weights, FOLDER / "a.pt")
    damage(FOLDER / "a.pt")
    wrong = (torch.load(FOLDER / "a.pt")["weight"] != 3).sum().item()

    flags = [*DATA, *TRAINER, f"--model.architecture={LLAMA}", strategy("fsdp2")]
    saves = ["--last_checkpoint.every_n_steps=1", "--last_checkpoint.keep=4"]
    code, printed = command("fit", *flags, *saves)
    checkpoints = sorted(FOLDER.glob("runs/*/*/checkpoints/*.ckpt"))
    if code == 0:
        damage(max(checkpoints[-1].rglob("*.distcp"), key=lambda file: file.stat().st_size))
        code, printed = command(
            "fit", *flags, "--trainer.max_steps=6", "--ckpt_path", str(checkpoints[-1].parent)
        )
    said = printed.partition("damaged checkpoints are skipped")
    here = (
        (said[1] + said[2].splitlines()[0]).replace(f"{checkpoints[-1].parent}/", "")
        if said[1]
        else printed[-3000:]
    )
    show(
        f"loads without an error, {wrong} weights are wrong",
        here,
        wrong > 0 and code == 0 and bool(said[1]),
    )
