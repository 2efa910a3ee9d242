"""Weights that were never initialised under ZeRO-3: a module's own init, then this project's starting weights."""

from __future__ import annotations

import os

import torch
from shared import rehearse, show, strategy


class Net(torch.nn.Module):
    """Initializes its layers as many models do: by `apply`, after they are built."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
        self.apply(self.initialize)

    @staticmethod
    def initialize(module: torch.nn.Module) -> None:
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.normal_(module.weight, std=0.5)


def plain() -> tuple[float, float]:
    """The spread of a weight, asked for and found under ZeRO-3."""
    import deepspeed

    names = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29612"}
    os.environ |= names
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # or it is compiled, for minutes
    torch.distributed.init_process_group("gloo")
    deepspeed.init_distributed("gloo", verbose=False)
    with deepspeed.zero.Init(
        config_dict_or_path={"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    ):
        net = Net()
    weight = net.layers[0].weight
    with deepspeed.zero.GatheredParameters([weight]):
        found = weight.std().item()
    torch.distributed.destroy_process_group()
    for name in names:
        del os.environ[name]
    return Net().layers[0].weight.std().item(), found


if __name__ == "__main__":
    asked, found = plain()
    holds, line = rehearse("starting weights", strategy("zero3"), "--trainer.devices=2")
    show(
        f"standard deviation {asked:.3f} without ZeRO-3, {found:.3f} with it",
        line,
        holds and abs(found / asked - 1) > 0.2,
    )
