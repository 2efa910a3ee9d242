"""A loss divided by the wrong count: the mean of micro-batches in transformers, then this
project."""

from __future__ import annotations

import torch
from shared import plain_llama, rehearse, show, strategy

if __name__ == "__main__":
    torch.manual_seed(0)
    model = plain_llama()
    model.lm_head.weight.data.mul_(20)
    ids = torch.randint(300, (2, 32))
    labels = ids.clone()
    labels[0, 4:] = -100  # three labels count in the first row, 31 in the second
    full = model(input_ids=ids, labels=labels).loss.item()
    parts = [model(input_ids=ids[i : i + 1], labels=labels[i : i + 1]).loss.item() for i in (0, 1)]
    elsewhere = sum(parts) / 2
    holds, line = rehearse("one big batch", strategy("ddp"), "--trainer.devices=2")
    error = abs(elsewhere / full - 1)
    show(
        f"one batch {full:.4f}, two micro-batches {elsewhere:.4f} ({error:.1%} off)",
        line,
        holds and error > 1e-3,
    )
