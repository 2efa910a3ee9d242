"""Computes a function of full matrices whose shards are on several ranks: each matrix on one rank,
its owner.

An owner gathers the shards of a matrix, computes, and sends each rank its shard of the result.
Ranks that have equal matrices (DDP, replicas of HSDP) share the work too. Messages are in rounds of
about `ROUND` elements for each owner: while it computes one round, the next one's shards arrive and
the last one's results leave."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..compat.torch import coordinate_of
from ..compat.transformers import shard_for
from ..layout import local_shard

ROUND = 1 << 25  # elements; a larger matrix is a round of its own
Function = Callable[[Any], Tensor]
# waits, and returns flat tensors by the rank that sent them
Arrival = Callable[[], dict[int, list[Tensor]]]


@dataclass(eq=False)
class Matrix:
    """A parameter (..., R, C), and the ranks that have it or its shards along R and C.

    Leading dimensions are a batch: a shard along them contains full matrices."""

    parameter: Tensor
    peers: list[int]  # ranks
    owner: int
    sources: list[int]  # from which the owner gathers: one replica
    # on the owner: rank to its rows and columns
    indices: dict[int, Any] = field(default_factory=dict)
    # this rank's shard of the round's input or result
    own: Tensor = field(default_factory=lambda: torch.empty(0))


class Owners:
    """Assigns matrices to owners, and runs a function on them.

    Args:
        group: The ranks that call `run` together, with the same parameters. None: all."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group, self._ranks, self._here = group, [0], 0
        if dist.is_initialized():
            self._ranks, self._here = dist.get_process_group_ranks(group), dist.get_rank()
        self._planned: list[int] = []
        self._rounds: list[list[Matrix]] = []

    def run(
        self, parameters: list[Any], shard_of: Function, function: Function
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields each parameter with this rank's shard of the result. Collective over the group.
        `shard_of` returns this rank's shard of a parameter's input, in new memory; `function` maps
        full inputs (..., R, C)."""
        if self._planned != (planned := [*map(id, parameters)]):
            self._rounds, self._planned = self._plan(parameters), planned
        arriving: Arrival | None = None
        leaving: Arrival | None = None
        for number in range(len(self._rounds) + 1):
            following = None
            if number < len(self._rounds):
                following = self._send_shards(self._rounds[number], shard_of)
            if arriving is not None:
                results = self._send_results(self._rounds[number - 1], arriving(), function)
                if leaving is not None:
                    yield from self._results(self._rounds[number - 2], leaving())
                leaving = results
            arriving = following
        if leaving is not None:
            yield from self._results(self._rounds[-1], leaving())

    def _plan(self, parameters: list[Tensor]) -> list[list[Matrix]]:
        """Returns rounds, equally many on each rank. The next most expensive matrix gets the owner
        with the least work, which is counted as rows x columns x the smaller of both."""
        work: dict[int, dict[int, int]] = {}
        rounds, size = list[list[Matrix]](), float(ROUND)
        for parameter in sorted(parameters, key=_cost, reverse=True):
            peers = self._peers(parameter)
            of_peers = work.setdefault(hash(tuple(peers)), dict.fromkeys(peers, 0))
            owner = min(peers, key=of_peers.__getitem__)
            of_peers[owner] += _cost(parameter)
            matrix = Matrix(parameter, peers, owner, [owner])
            if isinstance(parameter, DTensor):
                matrix.sources = _sources(parameter, peers, owner)
            if owner == self._here and len(peers) > 1:
                matrix.indices = {rank: _index(parameter, rank) for rank in peers}
            size += parameter.numel() / len(peers)
            if size > ROUND:
                rounds.append([])
                size = parameter.numel() / len(peers)
            rounds[-1].append(matrix)
        return rounds

    def _peers(self, parameter: Tensor) -> list[int]:
        if not isinstance(parameter, DTensor):
            return self._ranks
        index: list[Any] = list(parameter.device_mesh.get_coordinate() or ())
        for number, placement in enumerate(parameter.placements):
            dimension = getattr(placement, "dim", None)
            if dimension is None or dimension % parameter.ndim >= parameter.ndim - 2:
                index[number] = slice(None)
        return parameter.device_mesh.mesh[tuple(index)].flatten().tolist()

    def _send_shards(self, matrices: list[Matrix], shard_of: Function) -> Arrival:
        outgoing, incoming = defaultdict[int, list[Tensor]](list), defaultdict[int, list[int]](list)
        for matrix in matrices:
            matrix.own = shard_of(matrix.parameter)
            if matrix.owner != self._here:
                if self._here in matrix.sources:
                    outgoing[matrix.owner].append(matrix.own.flatten())
                continue
            for rank in matrix.sources:
                if rank != self._here:
                    incoming[rank].append(_shape(matrix, rank).numel())
        return self._exchange(outgoing, incoming, matrices[0].own)

    def _send_results(
        self, matrices: list[Matrix], arrived: dict[int, list[Tensor]], function: Function
    ) -> Arrival:
        outgoing, incoming = defaultdict[int, list[Tensor]](list), defaultdict[int, list[int]](list)
        for matrix in matrices:
            if matrix.owner != self._here:
                incoming[matrix.owner].append(matrix.own.numel())
                continue
            full = matrix.own
            if len(matrix.sources) > 1:
                full = full.new_empty(*full.shape[:-2], *matrix.parameter.shape[-2:])
                for rank in matrix.sources:
                    part = matrix.own if rank == self._here else arrived[rank].pop(0)
                    full[matrix.indices[rank]] = part.view(_shape(matrix, rank))
            result = function(full)
            for rank in matrix.peers:
                part = result[matrix.indices[rank]] if matrix.indices else result
                if rank == self._here:
                    matrix.own = part
                else:
                    outgoing[rank].append(part.flatten())
        return self._exchange(outgoing, incoming, matrices[0].own)

    def _results(
        self, matrices: list[Matrix], arrived: dict[int, list[Tensor]]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        for matrix in matrices:
            if matrix.owner != self._here:
                matrix.own = arrived[matrix.owner].pop(0)
            yield matrix.parameter, matrix.own.view(local_shard(matrix.parameter).shape)
            matrix.own = matrix.own.new_empty(0)

    def _exchange(
        self, outgoing: dict[int, list[Tensor]], incoming: dict[int, list[int]], like: Tensor
    ) -> Arrival:
        """Starts to send flat tensors by rank, and to receive those of the sizes in `incoming`."""
        if len(self._ranks) == 1:
            return dict
        parts, sent, received = [like.new_empty(0)], list[int](), list[int]()
        for rank in self._ranks:
            parts += outgoing[rank]
            sent.append(sum(map(len, outgoing[rank])))
            received.append(sum(incoming[rank]))
        message, buffer = torch.cat(parts), like.new_empty(sum(received))
        running: Any = dist.all_to_all_single(
            buffer, message, received, sent, self._group, async_op=True
        )

        def arrived() -> dict[int, list[Tensor]]:
            running.wait()
            found = {}
            for rank, of_rank in zip(self._ranks, buffer.split(received), strict=True):
                found[rank] = [*of_rank.split(incoming[rank])] if incoming[rank] else []
            return found

        return arrived


def _cost(parameter: Tensor) -> int:
    return parameter.numel() * min(parameter.shape[-2:])


def _sources(parameter: DTensor, peers: list[int], owner: int) -> list[int]:
    """Returns the peers with the shards of the owner's replica."""
    mesh, found = parameter.device_mesh, []
    of_owner = coordinate_of(owner, mesh)
    for rank in peers:
        coordinates = zip(coordinate_of(rank, mesh), of_owner, parameter.placements, strict=True)
        if all(
            here == there or not placement.is_replicate() for here, there, placement in coordinates
        ):
            found.append(rank)
    return found


def _index(parameter: Tensor, rank: int) -> tuple[Any, ...]:
    """Returns the rows and columns of a rank's shard in the full matrix, as an index; one of both
    is consecutive."""
    found: list[Any] = [...]
    for dimension in (-2, -1):
        size = parameter.shape[dimension]
        part = torch.arange(size)
        if isinstance(parameter, DTensor):
            # every rank has some of as many in the other dimensions
            enough = 4 * parameter.device_mesh.size()
            sizes = [min(each, enough) for each in parameter.shape]
            sizes[dimension] = size
            numbers = part.view(-1, *[1] * (-1 - dimension)).expand(sizes)
            part = (
                shard_for(parameter, numbers, rank)
                .movedim(dimension, 0)
                .flatten(1)[:, :1]
                .flatten()
            )
        first = int(part[0]) if len(part) else 0
        is_consecutive = torch.equal(part, torch.arange(first, first + len(part)))
        found.append(
            slice(first, first + len(part))
            if is_consecutive
            else part.to(local_shard(parameter).device)
        )
    return tuple(found)


def _shape(matrix: Matrix, rank: int) -> torch.Size:
    """Returns the shape of a rank's shard."""
    sizes = [*local_shard(matrix.parameter).shape[:-2]]
    for part in matrix.indices[rank][1:]:
        sizes.append(part.stop - part.start if isinstance(part, slice) else len(part))
    return torch.Size(sizes)
