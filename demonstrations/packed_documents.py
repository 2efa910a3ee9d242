"""Packed documents that attend to each other: transformers with its defaults, then this project, in
two kernels."""

from __future__ import annotations

import torch
from shared import DATA, LLAMA, plain_llama, show

from dist_template import Project
from dist_template.testing import batches, build


@torch.no_grad()
def change(forward, batch: dict[str, torch.Tensor]) -> float:
    """The largest change of a later document's logits when the first document's tokens change."""
    starts = (batch["position_ids"][0] == 0).nonzero().flatten().tolist()
    first, before = starts[1], forward(batch)
    edited = batch["input_ids"].clone()
    edited[0, :first] = (edited[0, :first] + 1) % 200
    return (forward(batch | {"input_ids": edited}) - before)[0, first:].abs().max().item()


if __name__ == "__main__":
    plain = plain_llama().eval()
    packed = {"input_ids": torch.arange(32)[None], "position_ids": torch.arange(16).repeat(2)[None]}
    elsewhere = change(lambda batch: plain(**batch).logits, packed)
    here = {}
    for kernel in ("sdpa", "eager"):
        flags = [*DATA, "--data.seq_len=512", f"--model.attention={kernel}", "--data.test_share=0"]
        flags += ["--data.validation_share=0", f"--model.architecture={LLAMA}"]
        module, data = build(Project("trainer"), *flags)
        rows = [b for b in batches(data, 40) if (b["position_ids"][0] == 0).sum() > 1]
        here[kernel] = change(module.eval().forward, rows[0])
    show(
        f"another document changes logits by {elsewhere:.2g}",
        f"by {here}",
        elsewhere > 1e-4 > max(here.values()),
    )
