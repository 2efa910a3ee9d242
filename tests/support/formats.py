"""Checkpoints of a tiny model in every format, written without a Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

REST = {"global_step": 2, "loops": {"fit_loop": {}}, "DataModule": {"consumed_samples": 16}}
# Of the two parameter groups.
NAMES = [["second.weight", "first.weight"], ["first.bias", "second.bias"]]


class Tiny(nn.Module):
    """Odd sizes, so that no number of ranks divides them, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 7)
        self.register_buffer("counts", torch.arange(3))


def build_optimizer(model: Tiny) -> torch.optim.AdamW:
    """In groups of another order than the model's; fused, as in training."""
    parameters = dict(model.named_parameters())
    groups = [{"params": [parameters[name] for name in group]} for group in NAMES]
    groups[0]["weight_decay"], groups[1]["weight_decay"] = 0.1, 0.0  # ty: ignore
    return torch.optim.AdamW(groups, lr=0.01, fused=True)


def step(model: Tiny, optimizer: torch.optim.AdamW) -> None:
    optimizer.zero_grad()
    model.second(model.first(torch.ones(2, 3))).square().sum().backward()
    optimizer.step()


def write_file(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    content = {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()]}
    torch.save(content | {"parameter_names": [sum(NAMES, [])], **REST}, path)


def write_distributed(
    path: Path, weights: dict[str, Tensor], state: dict[str, Any], rest: dict[str, Any]
) -> None:
    """As MeshStrategy does: torch's flattened optimizer state, and Lightning's rest in meta.pt."""
    flat: dict[str, Any] = {}
    for number, values in state["state"].items():
        flat |= {f"state.{number}.{key}": value for key, value in values.items()}
    for group in state["param_groups"]:
        settings = {key: value for key, value in group.items() if key != "params"}
        for number in group["params"]:
            flat |= {f"param_groups.{number}.{key}": value for key, value in settings.items()}
    dcp.save({"state_dict": weights, "optimizer_0": flat}, checkpoint_id=path, no_dist=True)
    torch.save(rest, path / "meta.pt")


def write_zero(
    path: Path, model: nn.Module, state: dict[str, Any], stage: int, ranks: int = 2
) -> None:
    """As DeepSpeed: ZeRO-1 and 2 shard a group's flat tensor, ZeRO-3 each parameter, padded."""
    weights, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    shapes = [{name: weights[name].shape for name in group} for group in NAMES]

    def cut(tensors: list[Tensor]) -> list[Tensor]:
        if stage < 3:
            flat = torch.cat([t.detach().flatten() for t in tensors])
            return list(nn.functional.pad(flat, (0, -len(flat) % (2 * ranks))).chunk(ranks))
        flats = [t.detach().flatten() for t in tensors]
        padded = [nn.functional.pad(t, (0, -len(t) % ranks)).chunk(ranks) for t in flats]
        return [torch.cat(parts) for parts in zip(*padded, strict=True)]

    kinds, moments = ("exp_avg", "exp_avg_sq"), []
    for group in NAMES:
        moments.append({kind: cut([state["state"][n][kind] for n in group]) for kind in kinds})
    masters = [cut([weights[n] for n in g]) for g in NAMES]
    groups = [g | {"params": [number]} for number, g in enumerate(state["param_groups"])]
    (path / "checkpoint").mkdir(parents=True)
    (path / "latest").write_text("checkpoint")
    for rank in range(ranks):
        flat = {n: {k: v[rank] for k, v in m.items()} for n, m in enumerate(moments)}
        for each in flat.values():
            each["step"] = torch.tensor(2.0)
        base, fp32 = {"state": flat, "param_groups": groups}, [parts[rank] for parts in masters]
        if stage < 3:
            own = {"single_partition_of_fp32_groups": fp32, "base_optimizer_state": base}
            own["partition_count"] = [ranks, 1]
        else:
            own = {"fp32_flat_groups": fp32, "optimizer_state_dict": base, "partition_count": ranks}
        name = f"zero_pp_rank_{rank}_mp_rank_00"
        torch.save({"optimizer_state_dict": own}, path / f"checkpoint/{name}_optim_states.pt")
        module = dict(model.state_dict())
        for name in weights:
            half = weights[name].detach().to(torch.bfloat16)
            module[name] = torch.empty(0) if stage == 3 else half
        common = {"module": module, "buffer_names": list(buffers), "param_shapes": shapes}
        file = "mp_rank_00" if stage < 3 else f"zero_pp_rank_{rank}_mp_rank_00"
        whole = common | {"shared_params": {}, **REST}
        torch.save(whole, path / f"checkpoint/{file}_model_states.pt")
