"""Estimates the memory of one rank by part, for a run as it is or with changed keys; without torch.

Weights, gradients and optimizer state follow from parameters, strategy and precision by the
formulas of docs/strategies; test_diagnosis_memory.py compares them with tensors.
Activations and logits are the rest of a measured peak; only their ratio is estimated, by counting
tensors (Korthikanti et al., arXiv:2205.05198, section 4.1) of blocks with a gated MLP, norms in
fp32, fused attention and no dropout. This is right within a factor of two.

Sizes are bytes of one rank.
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

from ...observe.history.run import History
from ...records import GIB

LOGIT_BYTES = 12  # per logit in backward: log-probability, its gradient and the logit's, in fp32
BYTES_IN_4_BITS = 1 / 2 + 1 / 64  # packed, and a scale of 64 weights in 8 bits
ADAMW_BYTES = 8  # per parameter in fp32: two moments
LIVE_PARAMETERS = 10**9  # stage3_max_live_parameters of DeepSpeed: what ZeRO-3 gathers at most
SELECTIVE = 0.5  # share of a block's activations that selective checkpointing keeps
BUCKET = 200_000_000  # elements of DeepSpeed's reduce bucket
# and their defaults
MESH_SIZES = {"pp_size": 1, "dp_replicate_size": 1, "fsdp_size": "auto", "tp_size": 1}
STRATEGY = "trainer.strategy.init_args."
FILES = {  # of configs/strategy: what remedies.py proposes as a change of "config"
    "configs/strategy/fsdp2.yaml": {"class_path": "MeshStrategy"},
    "configs/strategy/zero2.yaml": {"class_path": "ZeroStrategy", "init_args": {"stage": 2}},
}


class Estimate:
    """The memory of a rank, by the configuration and facts.json.

    Args:
        history: Of the run. The fact parameters.total is required.
        changes: Keys whose values differ from the run's configuration.
    """

    def __init__(self, history: History, changes: dict[str, Any] | None = None) -> None:
        self._history, self._changes = history, changes or {}
        self.precision = str(self._key("trainer.precision") or "32-true")
        self.is_half = self.precision not in ("32-true", "32", "64-true")  # 16-bit matrix products
        self.on_host = history.fact("machine.device", "cpu") == "cpu"  # offloading frees nothing
        self.checkpointing = self._key("model.blocks.checkpointing", "none")
        self.micro_batch_size = self._key("data.micro_batch_size", 1)
        self.seq_len = self._key("data.seq_len", 0)
        self.tokens = self.micro_batch_size * self.seq_len  # of a micro-batch
        self.loss_chunk = self._key("model.loss_chunk")  # tokens
        self.parameters = self.fact("parameters.total")
        self.trainable = self.fact("parameters.trainable") or self.parameters
        self.in_4_bits = self.fact("parameters.in_4_bits")
        self.in_blocks = self.parameters - self.fact("parameters.embedding")
        self.layers, self.width = max(self.fact("model.layers"), 1), self.fact("model.width")
        self.vocab_size = self.fact("model.vocab_size")
        self._set_strategy(
            FILES.get(self._changes.get("config", "")) or self._key("trainer.strategy")
        )
        self.tokens //= self.cp
        self.rows = self._key("data.global_batch_size", 0) // self.ranks  # per optimizer step
        self.accumulation = max(1, self.rows // self.micro_batch_size)
        self._set_stages()
        # ZeRO stores 16-bit weights under -mixed too, besides a sharded fp32 copy.
        is_small = self.is_half and (self.kind == "zero" or self.precision.endswith("true"))
        self.weight_bytes = 2 if is_small else 4
        full = (self.parameters - self.in_4_bits) * self.weight_bytes
        self.all_weights = full + self.in_4_bits * BYTES_IN_4_BITS

    def _key(self, path: str, default: Any = None) -> Any:
        return self._changes.get(path, self._history.key(path, default))

    def fact(self, path: str) -> int:
        return self._history.fact(path) or 0

    def _set_strategy(self, strategy: Any) -> None:
        """Sets kind (replicated, mesh, zero), ranks (data-parallel size) and the sharding."""
        name = strategy["class_path"].rpartition(".")[2] if isinstance(strategy, dict) else ""
        given = dict(strategy.get("init_args") or {}) if name else {}
        for key, value in self._changes.items():
            if key.startswith(STRATEGY):
                given[key.removeprefix(STRATEGY)] = value
        self.kind, self.ranks = "replicated", self.fact("machine.world_size") or 1
        self.shards = self.tp = self.ep = self.cp = self.pp = 1  # of a mesh; shards: fsdp x tp
        self.stage = self.bucket = 0  # of ZeRO
        self.offload_optimizer = self.offload_parameters = self.accumulates_full = False
        if name == "MeshStrategy":
            sizes = [given.get(key, default) for key, default in MESH_SIZES.items()]
            rest = max(self.ranks // prod(size for size in sizes if size != "auto"), 1)
            self.pp, replicate, fsdp, self.tp = (rest if size == "auto" else size for size in sizes)
            self.cp = given.get("cp_size", 1)
            self.kind, self.shards = "mesh", fsdp * self.tp
            self.ranks = max(replicate * fsdp // self.cp, 1)
            self.ep = self.shards if given.get("ep_size") == "auto" else given.get("ep_size", 1)
            self.offload_optimizer = self.offload_parameters = bool(given.get("cpu_offload"))
            self.accumulates_full = given.get("reduce_each_micro_batch") is False
        elif name == "ZeroStrategy":
            zero = _json(given.get("config")).get("zero_optimization") or {}
            bucket = zero.get("reduce_bucket_size", given.get("reduce_bucket_size", BUCKET))
            self.bucket = bucket if isinstance(bucket, int) else 0  # "auto" is small
            self.kind, self.stage = "zero", zero.get("stage") or given.get("stage") or 2
            optimizer, parameters = given.get("offload_optimizer"), given.get("offload_parameters")
            self.offload_optimizer = bool(optimizer) or _offloads(zero, "optimizer")
            self.offload_parameters = bool(parameters) or _offloads(zero, "param")

    def _set_stages(self) -> None:
        """Sets of a pipeline the share of the parameters on the rank that has most, the mean share,
        the layers whose activations a rank keeps, the micro-batches of which it does, and those of
        the last stage's rank; and the pairs of stages between which messages are sent."""
        self.share = self.mean_share = self.in_flight = self.in_flight_at_end = 1.0
        self.layers_kept, self.crossings, self.schedule = float(self.layers), 0, ""
        names = ("schedule", "stages", "blocks", "parameters")
        schedule, stages, blocks, sizes = (self._history.fact(f"pipeline.{n}") for n in names)
        if self.pp == 1 or not stages:
            return
        self.schedule = schedule
        self.share = max(sum(sizes[n] for n in own) for own in stages) / self.parameters
        self.mean_share = sum(sizes) / self.parameters / self.pp
        # As torch orders the passes: what runs before the first backward pass (Narayanan et al.,
        # arXiv:2104.04473, section 2.2). If the gradients of weights are computed later, gradients
        # of activations are kept for them: in the pass as many as activations, then half of them.
        p, v = self.pp, len(stages[0])
        is_v = schedule in ("ZBVZeroBubble", "DualPipeV")
        most = at_end = p + 1 / 2 if is_v else p + (p + 1) / v / 2  # InterleavedZeroBubble
        if schedule == "GPipe":
            most = at_end = self.accumulation
        elif schedule in ("1F1B", "Interleaved1F1B"):
            most, at_end = p + (p - 1) * (v > 1) / v, ((v - 1) * p + 1) / v
        elif schedule == "ZBVZeroBubble":
            most = (3 * p - 1) / 2
        self.crossings = 2 * (p - 1) if is_v else v * p - 1
        self.in_flight = min(most, self.accumulation)
        self.in_flight_at_end = min(at_end, self.accumulation)
        self.layers_kept = self.in_flight * max(sum(blocks[n] for n in own) for own in stages)

    def parts(self) -> dict[str, float]:
        """Returns all parts; in backward, the gradients of one block's activations are added."""
        activations = self.kept() + self.tokens * self._block()
        return self.state() | {"activations": activations, "logits": self.logits()}

    def state(self) -> dict[str, float]:
        """Returns weights, gradients, optimizer state and their buffers."""
        w, accumulates = self.weight_bytes, self.accumulation > 1
        part = self.part()
        parts = {
            "weights": self.all_weights * part,
            "gradients": self.trainable * w * part,
            "optimizer state": self.trainable * ADAMW_BYTES * w / 4 * part,
        }
        if self.kind == "zero":
            parts = self._zero()
        elif self.pp > 1 and self.ranks * self.cp > 1:  # ZeRO-1
            parts["gathered weights"] = self.of_stage() * (2 if self.is_half else w)
            parts["unsharded gradients"] = self.of_stage() * self.trainable / self.parameters * w
        elif self.kind == "mesh" and self.shards > self.tp:
            # The running block, the next one, and the embedding or the head.
            gathered = 2 * self.block() + self.vocab_size * self.width / self.tp
            parts["gathered weights"] = gathered * (2 if self.is_half else w)
            if self.accumulates_full and accumulates:
                parts["unsharded gradients"] = self.trainable / self.tp * w
        elif self.kind == "replicated" and self.ranks > 1 and accumulates:
            parts["communication buffers"] = self.trainable * w  # else gradients are views of them
        if self.offload_optimizer and not self.on_host:
            parts |= {"gradients": 0.0, "optimizer state": 0.0}
        if self.offload_parameters and not self.on_host:
            parts["weights"] = 0.0
        return parts

    def part(self) -> float:
        """Returns a rank's share of the parameters; tensor parallelism replicates some."""
        whole = self.fact("parameters.tp_replicates") if self.tp > 1 else 0
        return (1 + whole / self.parameters * (self.tp - 1)) / self.shards * self.share

    def of_stage(self) -> float:
        """Returns the parameters of a pipeline's rank, gathered."""
        experts = self.fact("parameters.experts") if self.ep > 1 else 0
        return ((self.parameters - experts) / self.tp + experts / self.ep) * self.share

    def block(self) -> float:
        """Returns the parameters of the largest block, gathered by FSDP2: other ranks' experts of
        expert parallelism are not."""
        largest, experts = self.fact("parameters.block"), self.fact("parameters.block_experts")
        largest = largest or self.in_blocks / self.layers
        if self.ep > 1:
            return (largest - experts) / self.tp + experts / self.ep
        return largest / self.tp

    def _zero(self) -> dict[str, float]:
        """DeepSpeed 0.19 keeps an fp32 copy of the weights at every stage and precision."""
        w, n, stage = self.weight_bytes, self.ranks, self.stage
        parts = {
            "weights": self.all_weights / (n if stage == 3 else 1),
            "gradients": self.trainable * (4 / n if stage > 1 else w),  # shards are fp32
            "optimizer state": self.trainable * (ADAMW_BYTES + 4) / n,
            "communication buffers": self.bucket * w * (1 if stage == 3 else 2),
        }
        if stage == 3:
            # A layer's experts are one module.
            most = max(LIVE_PARAMETERS, self.fact("parameters.block_experts"))
            parts["gathered weights"] = min(self.parameters, most) * w
        return parts

    def kept(self) -> float:
        """Returns the activations that the blocks keep from forward to backward."""
        casts = self.is_half and self.weight_bytes == 4  # autocast keeps 16-bit copies of matrices
        cast = 2 * self.in_blocks / self.shards * self.share if casts else 0
        if self.checkpointing == "none":
            return self.tokens * self.layers_kept * self._block() + cast
        block_input = self.width * (2 if self.is_half and self.precision.endswith("true") else 4)
        kept = block_input if self.checkpointing == "full" else self._block() * SELECTIVE
        # one block is recomputed
        return self.tokens * (self._block() + self.layers_kept * kept) + cast

    def _block(self) -> float:
        """Returns the activations of one block, per token."""
        norms = 4 * 4 * self.width  # two norms, input and output, in fp32
        attention = 5 * self.width  # queries, keys, values, output, input of the projection
        mlp = 4 * 8 / 3 * self.width  # gate, its activation, up, their product: 8/3 as wide
        return norms + (attention + mlp) * (2 if self.is_half else 4) / self.tp

    def logits(self) -> float:
        return LOGIT_BYTES * min(self.tokens, self.loss_chunk or self.tokens) * self.vocab_size


def _json(config: Any) -> dict[str, Any]:
    """Reads ZeroStrategy's `config`: None, a DeepSpeed configuration, or a file with one."""
    if isinstance(config, str):
        return json.loads(Path(config).read_text(encoding="utf-8")) if Path(config).exists() else {}
    return config or {}


def _offloads(zero: dict[str, Any], what: str) -> bool:
    return (zero.get(f"offload_{what}") or {}).get("device", "none") != "none"


def as_size(size: float) -> str:
    return f"{size / GIB:.3g} GiB" if size >= GIB / 10 else f"{size / 2**20:.3g} MiB"
