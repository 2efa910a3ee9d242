"""What a start, a save and a hang take at thousands of ranks, which this one machine plays.

Threads play the ranks of a store (wall time of all on these cores). In collectives this process is
rank 0, and gets as many pickled answers as there are ranks. Saves are planned for layers of
DeepSeek-V3 on the meta device, over 256 shards and their replicas. One rank of 256 is given its
share of a start of all of DeepSeek-V3, whose tensors of other ranks arrive as zeros. CPU time is
rank 0's unless said. Networks, disks and torch's process groups are not measured.

Targets: a start below 10 s in all at 4,096 ranks; every rank gets the report of a hang.
"""

import pickle
import resource
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard

from dist_template import processes
from dist_template.callbacks.global_order import GlobalOrder
from dist_template.callbacks.random_state import RandomState
from dist_template.checkpoint import commit
from dist_template.checkpoint.untrusted import DataReader
from dist_template.cluster import watchdog
from dist_template.cluster.fingerprint import SameEnvironment
from dist_template.cluster.rendezvous import Rendezvous
from dist_template.errors import Ended
from dist_template.model.metrics import MetricBuffer
from dist_template.parallel import scatter
from dist_template.parallel.blocks import find_blocks
from dist_template.parallel.mesh import planning
from dist_template.parallel.starting import start_of
from dist_template.wings.launch import nodes
from dist_template.wings.values import free_port
from tests.support.many_ranks import RankZero, state_of

from .arms import Clock
from .ranks import on_ranks
from .record import Figure, Options, Result

NAME = "scale"
# at most, of a store and a plan: sockets, minutes
RANKS, QUICK, MOST = ((64, 512, 4096, 16384), (4, 8), 4096)
SHARDS, LAYERS = 256, 8  # ranks that shard DeepSeek-V3; its layers of 61 that are planned
FACTS = {"config": {f"key.{number}": "a value of a usual length" for number in range(300)}}
STATUS = {"beats": 7, "place": "step 7, backward", "line": "model.py:77", "waits": True}
START = (
    "environments are compared, s",
    "names and replicas are gathered, CPU s",
    "nodes are reached, s",
)

Measured = dict[str, float]
Act = Callable[[Any, int, int], float]  # when a rank of so many had its result from the store, or 0


def run(options: Options) -> Result:
    found: dict[str, dict[int, float]] = {}
    for num in QUICK if options.quick else RANKS:
        for measure in (gathered, reached, on_store, planned)[: 4 if num <= MOST else 2]:
            for what, value in measure(num, options.quick).items():
                found.setdefault(what, {})[num] = value
            print(f"  {num} ranks: {measure.__name__}", flush=True)
    most = max(found[START[0]])
    start = Figure(
        f"a start with {most:,} ranks",
        [sum(found[what][most] for what in START)],
        at_most=10,
        unit="s",
    )
    figures = [Figure(what, [*of.values()], ranks=[*of]) for what, of in found.items()]
    share = on_ranks(1, [partial(started, options.quick)], timeout_s=1200)[0][0]
    figures += [
        Figure(f"a start of DeepSeek-V3 on {SHARDS} ranks: {what}", [value])
        for what, value in share.items()
    ]
    return Result(
        NAME, figures=[start, *figures, *order(10**5 if options.quick else 10**12 // 4096)]
    )


@contextmanager
def clocked(found: Measured, what: str) -> Iterator[None]:
    clock = Clock()
    clock.start()
    yield
    found[what] = clock.stop().cpu_s


def on_store(num: int, quick: bool) -> Measured:
    found: Measured = {}
    acts: dict[str, Act] = {"environments are compared": meet, "a hang is reported": report}
    acts["one differs"] = lambda store, rank, num: meet(store, rank, num, f"{rank == 0}")
    for what, act in acts.items():
        found[f"{what}, s"], sent, without = play(num, act)
        found[f"{what}, MB of the store"] = sent / 1e6
        found["ranks without a result"] = found.get("ranks without a result", 0.0) + without
    return found


def meet(store: Any, rank: int, num: int, python: str = "3.11") -> float:
    with suppress(Ended):
        SameEnvironment().compare(Rendezvous(store, rank, num, 300.0), FACTS | {"python": python})
    return time.monotonic()


def report(store: Any, rank: int, num: int) -> float:
    """The last rank is stopped; the others wait for it in a collective."""
    dog, verdict = watchdog.WatchdogThread(), []
    dog.connect(store, rank, num)
    if rank < num - 1:
        dog._exchange(store, STATUS, verdict)
    return (
        time.monotonic()
        if rank == num - 1 or f"rank {num - 1} is unresponsive" in "".join(verdict)
        else 0.0
    )


class Counted:
    """A store that counts the bytes that it sends and receives."""

    def __init__(self, store: Any) -> None:
        self.store, self.bytes = store, 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            answer = getattr(self.store, name)(*arguments)
            self.bytes += len(str((arguments, answer)))
            return answer

        return call


def play(num: int, act: Act) -> tuple[float, int, int]:
    """Returns seconds until all ranks had their results, the store's bytes, and the number of ranks
    without one."""
    port, stores, ended, connected = free_port(), [], [], threading.Barrier(num + 1)
    master = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)

    def be(rank: int) -> None:
        stores.append(store := Counted(dist.TCPStore("127.0.0.1", port, wait_for_workers=False)))
        connected.wait()
        ended.append(act(store, rank, num))

    threading.stack_size(1 << 18)
    # else thousands of threads wake 200 times a second to ask for Python's lock
    sys.setswitchinterval(10.0)
    threads = [threading.Thread(target=be, args=(rank,)) for rank in range(num)]
    for thread in threads:
        thread.start()
    connected.wait()
    began = time.monotonic()
    for thread in threads:
        thread.join()
    assert master
    return max(ended) - began, sum(store.bytes for store in stores), ended.count(0.0)


def gathered(num: int, quick: bool) -> Measured:
    found: Measured = {}

    def here(
        what: str,
        act: Callable[[], object],
        of: Callable[[Any, int], Any] = lambda value, rank: value,
    ) -> None:
        with RankZero(num, of) as world, clocked(found, f"{what}, CPU s"):
            act()
        found[f"{what}, MB of rank 0"] = world.bytes / 1e6

    def names() -> None:
        processes.distinct({f"model.layers.{n // 15}.weight_{n}": (7168, 2048) for n in range(909)})
        processes.broadcast(
            len(processes.to_rank_zero([*range(2**60, 2**60 + 909)]))
        )  # of replicas

    def hash_own(value: Any, rank: int) -> Any:
        return (None, {f"__{rank}_0.distcp": [1, 0]}) if isinstance(value[1], dict) else value

    buffer = MetricBuffer()
    for name in ("own_step_s", "allocated_gib", "reserved_gib", "peak_share"):
        buffer.put_of_rank(name, 1.0)
    here("names and replicas are gathered", names)
    with clocked(found, "metrics of ranks at a log step, CPU s"):
        buffer.read(lambda vector: vector, torch.device("cpu"), 0, num)
    here("a save's random states", lambda: RandomState().on_save_checkpoint(None, None, {}))  # ty: ignore
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step00000001.ckpt"
        temporary = commit.begin(path)
        for rank in range(num):
            (temporary / f"__{rank}_0.distcp").write_bytes(b"0")
        here("a save's files, hashes and manifest", lambda: commit.finish(path, {}, None), hash_own)
    return found


def planned(num: int, quick: bool) -> Measured:
    return on_ranks(1, [partial(plan, num, 1 if quick else LAYERS)], timeout_s=580)[0][0]


def plan(num: int, layers: int) -> Measured:
    """On a mesh of replicas and shards, with a fake process group: every rank's plan, then rank 0's
    part."""
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from transformers import AutoModelForCausalLM, DeepseekV3Config

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num)
    shards = min(num // 2, SHARDS)
    mesh = dist.init_device_mesh("cpu", (num // shards, shards))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(DeepseekV3Config(num_hidden_layers=layers))
    state, strategy = state_of(dict(model.named_parameters()), mesh), torch.nn.Module()
    flat, found, texts, what = (
        (state, {name: (name,) for name in state}),
        {},
        [],
        f"of {layers} layers of DeepSeek-V3",
    )
    for rank in range(num):
        mesh._coordinate_on_dim = [rank // shards, rank % shards]
        planner = planning.planner(strategy)  # ty: ignore[invalid-argument-type]
        is_flat = patch.object(dcp.default_planner, "flatten_state_dict", lambda _: flat)
        with is_flat, clocked(found, f"a save's plan {what}, CPU s of a rank"):
            planner.set_up_planner(state)
            texts.append(pickle.dumps(planner.create_local_plan()))
    found[f"plans {what}, first save, MB of rank 0"] = sum(map(len, texts)) / 1e6
    with clocked(found, f"plans {what}, first save, CPU s"):
        plans, metadata = planner.create_global_plan([*map(pickle.loads, texts)])
    with clocked(found, f"plans {what}, next save, CPU s"):
        planner.create_global_plan([dcp.SavePlan([], usable=False)] * num)
    at = dcp.filesystem._StorageInfo("__0_0.distcp", 0, 1)
    text = pickle.dumps(
        [[dcp.storage.WriteResult(item.index, 1, at) for item in each.items] for each in plans]
    )
    with tempfile.TemporaryDirectory() as folder:
        with clocked(found, f"metadata {what}, each save, CPU s"):
            planning.Writer(folder).finish(metadata, pickle.loads(text))
        found[f"metadata {what}, MB"] = (Path(folder) / ".metadata").stat().st_size / 1e6
        with clocked(found, f"a load's plan {what}, CPU s of a rank"):
            load = dcp.DefaultLoadPlanner()
            load.set_up_planner(state, DataReader(folder).read_metadata())
            load.create_local_plan()
    return found


def started(quick: bool) -> Measured:
    """A rank's share of a start in bfloat16, with a fake process group."""
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from transformers import AutoModelForCausalLM, DeepseekV3Config

    dist.init_process_group("fake", store=FakeStore(), rank=SHARDS - 56, world_size=SHARDS)
    config = DeepseekV3Config(**{"num_hidden_layers": 2, "vocab_size": 1024} if quick else {})
    found, exchange = {"GB sent": 0.0, "GB received": 0.0}, scatter._exchange

    def counted(
        outgoing: list[list[torch.Tensor]], incoming: list[list[torch.Tensor]], group: Any
    ) -> None:
        for what, parts in zip(found, (outgoing, incoming), strict=False):
            found[what] += sum(len(part) for of_rank in parts for part in of_rank) / 1e9
        largest = max(sum(map(len, parts)) for parts in (*outgoing, *incoming))
        of_others = {"all_reduce": lambda most, *_: most.fill_(largest)}
        with patch.multiple(dist, all_to_all_single=lambda into, *_: into.zero_(), **of_others):
            exchange(outgoing, incoming, group)

    # a fake group sends nothing
    alone = patch.object(processes, "broadcast", lambda value, _=None: value)
    with clocked(found, "CPU s of a rank"), patch.object(scatter, "_exchange", counted), alone:
        start = start_of(
            lambda: AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16),
            lambda model: model,
            0,
        )
        for module in (*find_blocks(start.model), start.model):
            fully_shard(module)
        scatter.allocate(start.model, torch.device("cpu"))
        start.fill(start.model)
    found["GB of shards"] = sum(each.to_local().nbytes for each in start.model.parameters()) / 1e9  # ty: ignore
    return found | {
        "GB of host memory at most": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    }


def reached(num: int, quick: bool) -> Measured:
    """A command on every node of 8 ranks, by an ssh that answers after half a second."""
    hosts, began = [f"node-{number}" for number in range(max(1, num // 8))], time.monotonic()
    answers = nodes._on_all(hosts, "sh -c 'sleep 0.5'", ["true"] * len(hosts))
    assert all(code == 0 for _, code, _ in answers)
    return {"nodes are reached, s": time.monotonic() - began}


def order(rows: int) -> list[Figure]:
    found: Measured = {}
    for step in (0, 10**6):
        at = GlobalOrder(rows, 4096, 1, 0, 4096, consumed=lambda step=step: step * 4096 % rows)
        with clocked(
            found,
            f"the first batch from step {step:,}, of 10^12 tokens in rows of 4,096,"
            " CPU s of a rank",
        ):
            next(iter(at))
    return [Figure(what, [value], at_most=0.1) for what, value in found.items()]
