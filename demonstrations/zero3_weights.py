"""Weights that were never initialised under ZeRO-3: a module's own init, then this project's
starting weights."""

from __future__ import annotations

import deepspeed
import torch
from shared import built_under_zero3, rehearse, show, strategy


class Net(torch.nn.Module):
    """Initializes its layers after they are built, as many models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
        for layer in self.layers:
            torch.nn.init.normal_(layer.weight, std=0.5)


if __name__ == "__main__":
    asked = Net().layers[0].weight.std().item()
    weight = built_under_zero3(Net).layers[0].weight
    with deepspeed.zero.GatheredParameters([weight]):
        found = weight.std().item()
    holds, line = rehearse("starting weights", strategy("zero3"), "--trainer.devices=2")
    holds = holds and abs(found / asked - 1) > 0.2
    show(f"standard deviation {asked:.3f} without ZeRO-3, {found:.3f} with it", line, holds)
