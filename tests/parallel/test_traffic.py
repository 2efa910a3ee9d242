"""What a strategy sends: `Spec.traffic` equals the collectives of real trainings and the pages.

They are as many as in a loop of the strategy's own library, and two numbers besides."""

import json
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from lightning.pytorch import Callback
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dist_template.callbacks import Preemption
from dist_template.parallel.spec import spec_of
from dist_template.parallel.spec.facts import Sent
from dist_template.text.model.facts import facts_of
from tests.support.modules import on_meta
from tests.support.runs import Workers, run
from tests.support.strategies import ARGS, NAMES, flags_of
from tests.support.tiers import tiers

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
LLAMA = SIZES | {"model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 4}
TIED = LLAMA | {"tie_word_embeddings": True}
EXPERTS: dict[str, Any] = {
    "model_type": "deepseek_v3", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
    "moe_intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2,
    "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "first_k_dense_replace": 1, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "num_mtp_layers": 0,
}  # fmt: skip
ALL_EXPERTS = EXPERTS | {"first_k_dense_replace": 0}  # in every stage


@dataclass(frozen=True)
class Setting:
    ranks: int
    tokens: int  # of a micro-batch on one rank
    accumulation: int = 1
    node: int = 8  # ranks that hold a replica under HSDP, and share matrices, experts or sequences
    half: bool = True  # bf16-mixed in place of 32-true
    reduces_each: bool = True  # FSDP2's `reduce_each_micro_batch`

    @property
    def shared(self) -> int:
        return min(self.ranks, self.node)


class Case(NamedTuple):
    sizes: Callable[[Setting], dict[str, Any] | int | None]  # of a mesh, or ZeRO's stage
    processes: int = 2  # two for each node
    architecture: dict[str, Any] = LLAMA
    calls: dict[str, int] = {}  # of a step of two micro-batches, by torch's operator


# Tied weights stay gathered for the backward pass.
FSDP2 = {"allgather_base": 12, "reduce_scatter_base": 8, "allreduce": 1}
ZERO3 = {"allgather_base": 2, "reduce_scatter_base": 2, "allreduce": 2}
HSDP = FSDP2 | {"allgather_base": 14, "allreduce": 5}  # gradients between copies, and their norm
CASES = {
    "ddp": Case(lambda at: None, calls={"allreduce": 1}),
    "fsdp2": Case(lambda at: {}, 2, TIED, FSDP2),
    "hsdp": Case(lambda at: {"dp_replicate_size": at.ranks // at.shared}, 4, calls=HSDP),
    "tp": Case(lambda at: {"fsdp_size": 1, "tp_size": at.ranks}),
    "fsdp2_tp": Case(lambda at: {"tp_size": at.shared}, 4),
    "fsdp2_ep": Case(lambda at: {"ep_size": at.shared}, 2, EXPERTS),
    "fsdp2_tp_ep": Case(lambda at: {"tp_size": at.shared, "ep_size": at.shared}, 4, EXPERTS),
    "cp": Case(lambda at: {"cp_size": at.shared}, 2, LLAMA | {"num_key_value_heads": 2}),
    "pp": Case(lambda at: {"pp_size": 2, "fsdp_size": 1, "dp_replicate_size": "auto"}, 2, TIED),
    "pp_fsdp2": Case(lambda at: {"pp_size": 2}, 4),
    "pp_ep": Case(
        lambda at: {"pp_size": 2, "ep_size": min(at.ranks // 2, at.node)}, 4, ALL_EXPERTS
    ),
    "zero1": Case(lambda at: 1, calls={"allgather_base": 2, "allreduce": 3}),
    "zero2": Case(lambda at: 2, calls={"allgather_base": 2, "allreduce": 4}),
    "zero3": Case(lambda at: 3, calls=ZERO3),
}
ONCE, CHUNKED = f"{ARGS}.reduce_each_micro_batch=false", "--model.loss_chunk=16"
SETTINGS = [(name, "") for name in CASES]
SETTINGS += [("fsdp2", ONCE), ("fsdp2", CHUNKED), ("zero3", CHUNKED)]
DAILY = [(name, "") for name in ("ddp", "tp", "pp", "zero2", "zero3")] + [("fsdp2", ONCE)]
MICRO_BATCH, SEQ_LEN = 2, 32
# torch's operators, in place and functional, and which of their arguments is the whole tensor.
OPERATORS = {
    "allreduce_": ("all_reduce", 0),
    "_allgather_base_": ("all_gather", 0),
    "send": ("send", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "alltoall_base_": ("all_to_all", 1),
    "all_reduce": ("all_reduce", 0),
    "reduce_scatter_tensor": ("reduce_scatter", 0),
    "all_to_all_single": ("all_to_all", 0),
    # a part of the tensor: times the number of ranks, the second argument
    "all_gather_into_tensor": ("all_gather", 0),
}
SMALL = 64  # elements: counts, norms and votes have fewer
# For a mean over the global batch's counted tokens, and the decision whether a step is taken.
OURS = Counter({"allreduce": 1, "allgather_base": 1})


class Collectives(TorchDispatchMode):
    """Counts what this thread hands to process groups, whoever calls them: torch's reducer in C++,
    DTensor, DeepSpeed. A CPU's backward runs in it too."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.elements = Counter[str](), Counter[str]()  # by operator; by kind

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # it becomes what is sent
        name = func._overloadpacket.__name__
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in name:
            self.calls[name.strip("_")] += 1
            kind, argument = OPERATORS.get(name, ("", 0))
            size = 0
            for leaf in tree_leaves(args[argument]):
                if isinstance(leaf, Tensor):
                    size += leaf.numel()
            if name == "all_gather_into_tensor":
                size *= args[1]
            if kind and size >= SMALL:
                self.elements[kind] += size
        return func(*args, **(kwargs or {}))


class CountCollectives(Callback):
    """Writes `<rank>.json`: what the third optimizer step sends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mode: Collectives | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        for callback in trainer.callbacks:
            if isinstance(callback, Preemption):
                callback._until_vote = 1000  # it comes once in seconds, not in steps

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        file = self.folder / f"{trainer.global_rank}.json"
        if trainer.global_step == 2 and self.mode is None:
            self.mode = Collectives()
            self.mode.__enter__()
        elif trainer.global_step == 3 and self.mode and not file.exists():
            self.mode.__exit__(None, None, None)
            file.write_text(json.dumps([self.mode.calls, self.mode.elements]), encoding="utf-8")


def traffic(name: str, model: Any, at: Setting) -> list[Sent]:
    given = CASES[name].sizes(at)
    strategy: Any = "ddp"
    if isinstance(given, int):
        strategy = {"class_path": "ZeroStrategy", "init_args": {"stage": given}}
    elif given is not None:
        sizes = {"reduce_each_micro_batch": at.reduces_each, **given}
        strategy = {"class_path": "MeshStrategy", "init_args": sizes}
    spec = spec_of(strategy)
    _, facts = facts_of(model, model)
    facts = replace(
        facts,
        world_size=at.ranks,
        precision="bf16-mixed" if at.half else "32-true",
        seq_len=at.tokens * at.shared if name == "cp" else at.tokens,
        global_batch_size=at.accumulation * spec.data_parallel(at.ranks),
        pipeline=spec.stage_facts(model, at.ranks),
    )
    return [one for one in spec.traffic(facts) if one.ranks > 1]


def test_every_strategy_that_sends_differently_is_in_the_cases() -> None:
    same = {name for name in NAMES if name.endswith(("_offload", "_nvme"))}  # as without
    assert CASES.keys() == set(NAMES) - same


def test_seven_billion_parameters_send_what_the_pages_of_the_strategies_say() -> None:
    model = on_meta(model_type="llama")  # Llama's defaults: 7 B
    size = sum(p.numel() for p in model.parameters())

    def sent(strategy: str, ranks: int = 8, **setting: Any) -> float:
        at = Setting(ranks, 4096, **setting)
        return sum(one.sent for one in traffic(strategy, model, at)) / size / (7 / 8)

    assert sent("ddp") == sent("ddp", accumulation=4) == pytest.approx(8, rel=1e-3)
    assert sent("zero1") == sent("zero1", accumulation=4) == pytest.approx(6, rel=1e-3)
    assert sent("zero2", accumulation=4) == pytest.approx(4 * 4 + 2, rel=1e-3)
    assert sent("zero3", accumulation=2) == pytest.approx(2 * 6, rel=1e-3)
    # norm and head, 0.13 B, are gathered once
    once = 2 * 32000 * 4096 / size
    assert sent("fsdp2", accumulation=2) == pytest.approx(2 * (8 - once), rel=1e-3)
    assert sent("fsdp2", half=False) == pytest.approx(12 - 2 * once, rel=1e-3)
    between = 7 / 8 * 4 * 2 / 8 / (7 / 8)  # 8 copies of 8: each shard's gradients all-reduced
    assert sent("hsdp", ranks=64) == pytest.approx(sent("fsdp2") + between, rel=1e-3)
    moved = 2 * 226 * 4096 * 4096 * 2 + 4096 * 32000 * 2  # 226 all-reduces of hidden states; logits
    assert sent("tp") * size == pytest.approx(moved, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "flag"), tiers(SETTINGS, daily=DAILY))
def test_a_step_sends_what_is_planned(strategy: str, flag: str, flags: Any, tmp_path: Path) -> None:
    """In a step of two micro-batches."""
    _, processes, architecture, calls = CASES[strategy]
    shares = strategy.startswith(("tp", "cp", "pp")) or "_tp" in strategy
    shared = 2 if shares else 1  # ranks with the same rows
    argv = ["fit", *flags, *flags_of(strategy), f"--model.architecture={architecture}"]
    argv += [f"--trainer.devices={processes}", f"--data.micro_batch_size={MICRO_BATCH}"]
    argv += [f"--data.global_batch_size={2 * MICRO_BATCH * processes // shared}"]
    argv += ["--trainer.max_steps=4", "--trainer.limit_val_batches=0", "--data.prompts=[]"]
    argv += ["--trainer.log_every_n_steps=100", "--last_checkpoint.every_n_steps=100"]
    argv += flag.split()
    if strategy == "zero3":
        argv += [f"{ARGS}.param_persistence_threshold=0"]
    assert run("prepare", *flags) == 0
    counted = tmp_path / "counted"
    counted.mkdir()
    counts = [CountCollectives(counted)]
    Workers(processes).run(argv, tmp_path / "record", callbacks=counts).check()
    ranks = [json.loads(path.read_text("utf-8")) for path in counted.glob("*.json")]
    assert len(ranks) == processes
    if flag == ONCE:
        calls = calls | {"reduce_scatter_base": 4}
    if calls:
        for called, _ in ranks:
            assert called == Counter(calls) + OURS
    tokens = MICRO_BATCH * SEQ_LEN
    if strategy == "cp":
        tokens //= shared
    at = Setting(processes, tokens, 2, 2, half=False, reduces_each=flag != ONCE)
    expected: dict[str, float] = defaultdict(float)
    for one in traffic(strategy, on_meta(**architecture, vocab_size=257), at):
        expected[one.kind] += one.elements
    sent: dict[str, float] = defaultdict(float)  # the ranks' mean
    for _, elements in ranks:
        for kind, number in elements.items():
            sent[kind] += number / processes
    for kind in expected.keys() | sent.keys():
        # 257 rows: shards differ by one
        assert sent[kind] == pytest.approx(expected[kind], rel=5e-3), kind
