"""Clipping under FSDP2 with parameters of two layouts: torch alone, then this project in mixed
precision."""

from __future__ import annotations

from shared import FOLDER, rehearse, show, strategy, two_processes


def plain(rank: int) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 1, bias=False)
    )
    rows = torch.ones(4, 8)
    model(rows).sum().backward()
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).item()
    model.zero_grad()
    fully_shard(model[0], mesh=init_device_mesh("cpu", (2,)))  # the last one is replicated
    model(rows).sum().backward()
    try:
        got = str(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).item())
    except RuntimeError as error:
        got = str(error).splitlines()[0]
    (FOLDER / f"{rank}").write_text(f"{expected:.4f}|{got.split(',')[0]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    two_processes(plain)
    expected, got = (FOLDER / "0").read_text().split("|")
    flags = [strategy("fsdp2_ep"), "--trainer.precision=bf16-mixed", "--trainer.devices=2"]
    holds, line = rehearse("gradient norm", *flags)
    show(f"the norm is {expected}; torch: {got}", line, holds and got != expected)
