"""Sends full (unsharded) tensors from the ranks that have them to the shards of all ranks.

    distribute        each rank has the tensors of some units of a model, in turns
    from_rank_zero    rank 0 has all of them

torch's `set_model_state_dict(broadcast_from_rank0=True)` and `distribute_tensor` do not support
non-persistent buffers, the interleaved shards of transformers' packed plans, or DeepSpeed's
partitions."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .. import processes, weights
from ..compat.transformers import shard_for
from ..layout import local_shard

PIECE = 1 << 26  # bytes that a rank sends at once


def move_to_meta(module: nn.Module) -> dict[str, Tensor]:
    """Moves `module` to the meta device; returns its weights on rank 0, {} on other ranks."""
    full = {}
    if processes.is_rank_zero():
        full = {name: each.detach() for name, each in weights.named_tensors(module).items()}
    with weights.kept_ties(module):
        module.to("meta")
    return full


def allocate(module: nn.Module, device: torch.device) -> None:
    """Gives a meta-device module memory on `device`, without values. Shared parameters stay
    shared."""
    with weights.kept_ties(module):
        module.to_empty(device=device)


@torch.no_grad()
def distribute(
    units: list[list[str]],
    targets: dict[str, Tensor],
    make: Callable[[list[str]], dict[str, Tensor]],
    group: dist.ProcessGroup | None,
) -> None:
    """Fills `targets`, this rank's shards by name. Collective over `group`; None: all ranks. In
    each round every rank calls `make` for the names of one unit, which returns full tensors in host
    memory, and all ranks exchange shards, in pieces of `PIECE` bytes: a rank has one unit, and its
    shards of the others."""
    ranks = dist.get_process_group_ranks(group) if dist.is_initialized() else [0]
    here = ranks.index(processes.rank())
    for start in range(0, len(units), len(ranks)):
        of_round = units[start : start + len(ranks)]
        full: dict[str, Tensor] = {}
        if here < len(of_round):
            full = make(of_round[here])
        outgoing: list[list[Tensor]] = [[] for _ in ranks]
        incoming: list[list[Tensor]] = [[] for _ in ranks]
        for name in full:
            full[name] = full[name].to(targets[name].dtype)
            for number, rank in enumerate(
                ranks if weights.has_own_partition(targets[name]) else ()
            ):
                outgoing[number].append(_bytes(_part(targets[name], full[name], rank)))
        scattered = list[tuple[Tensor, Tensor]]()  # memory that is not contiguous, and its values
        for number, unit in enumerate(of_round):
            for name in unit:
                if not weights.has_own_partition(targets[name]):
                    with weights.gathered_from_zero(targets[name], ranks[number]):
                        if number == here:
                            targets[name].copy_(full[name])
                    continue
                shard = local_shard(targets[name]).detach()
                values = shard.contiguous()
                incoming[number].append(_bytes(values))
                if values is not shard:
                    scattered.append((shard, values))
        full.clear()
        _exchange(outgoing, incoming, group)
        for shard, values in scattered:
            shard.copy_(values)


def from_rank_zero(targets: dict[str, Tensor], full: dict[str, Tensor]) -> None:
    """Fills `targets`, equal names on all ranks, from rank 0's `full` tensors. Collective."""
    units: list[list[str]] = []
    for name in targets:
        units += [[name]] + [[]] * (processes.world_size() - 1)
    distribute(units, targets, lambda names: {name: full[name] for name in names}, None)


def _part(target: Tensor, full: Tensor, rank: int) -> Tensor:
    """Returns the shard of `full` of a rank that has `target`'s layout."""
    if isinstance(target, DTensor):
        return shard_for(target, full, rank)
    if weights.is_partitioned_by_zero(target):
        size = target.ds_tensor.numel()  # ty: ignore[missing-attribute]
        part = full.reshape(-1)[size * rank :][:size]
        return nn.functional.pad(part, (0, size - part.numel()))
    return full


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _exchange(
    outgoing: list[list[Tensor]], incoming: list[list[Tensor]], group: dist.ProcessGroup | None
) -> None:
    """Sends the bytes in `outgoing`, a list for each rank, into the memory in `incoming`, a list
    from each rank."""
    if not dist.is_initialized():
        for target, source in zip(incoming[0], outgoing[0], strict=True):
            target.copy_(source)
        return
    device, size = device_of_messages(), PIECE // len(outgoing)
    most = torch.tensor(max(sum(map(len, parts)) for parts in outgoing), device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX, group)
    sent = [pieces(parts, size) for parts in outgoing]
    received = [pieces(parts, size) for parts in incoming]
    for number in range(-(-int(most) // size)):
        sources, targets = list[Tensor](), list[Tensor]()
        lengths: tuple[list[int], list[int]] = [], []
        for from_rank, to_rank in zip(received, sent, strict=True):
            for found, parts, length in (
                (targets, from_rank, lengths[0]),
                (sources, to_rank, lengths[1]),
            ):
                piece = parts[number] if number < len(parts) else []
                found += piece
                length.append(sum(map(len, piece)))
        buffer = torch.empty(sum(lengths[0]), dtype=torch.uint8, device=device)
        message = torch.cat([buffer[:0], *(source.to(device) for source in sources)])
        dist.all_to_all_single(buffer, message, *lengths, group)
        for target, arrived in zip(targets, buffer.split([*map(len, targets)]), strict=True):
            target.copy_(arrived)


def pieces(parts: list[Tensor], size: int) -> list[list[Tensor]]:
    """Divides the concatenation of `parts` into pieces of `size` bytes, each a list of views."""
    pieces, room = list[list[Tensor]](), 0
    for part in parts:
        while len(part):
            if not room:
                pieces.append([])
                room = size
            pieces[-1].append(part[:room])
            part, room = part[room:], room - len(pieces[-1][-1])
    return pieces


def device_of_messages() -> torch.device:
    """Returns the GPU if the process group is NCCL's, else the CPU."""
    if dist.is_initialized() and "nccl" in dist.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
