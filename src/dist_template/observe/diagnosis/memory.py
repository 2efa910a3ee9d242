"""Estimates the memory of one rank by part, for a run as it is or with changed keys; without torch.

Weights, gradients and optimizer state follow from parameters, strategy and precision (docs/strategies has
the formulas, tests/test_diagnosis_memory.py compares them with the tensors of trainings). Activations and
logits are the rest of a measured peak; only their ratio is estimated, tensor by tensor, as in Korthikanti et
al. (arXiv:2205.05198, section 4.1), for blocks with a gated MLP, norms in fp32, fused attention and no
dropout. The estimate omits routing and latent attention: it is right within a factor of two.

Sizes are bytes of one rank. GiB = 2**30 bytes.
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

from ...records import GIB
from ..history.run import History

LOGIT_BYTES = 12  # per logit in backward: log-probability, its gradient and the logit's, in fp32
ADAMW_BYTES = 8  # per parameter in fp32: two moments
LIVE_PARAMETERS = 10**9  # DeepSpeed's stage3_max_live_parameters: gathered at the same time by ZeRO-3
SELECTIVE = 0.5  # share of a block's activations that selective checkpointing keeps
BUCKET = 200_000_000  # elements of DeepSpeed's reduce bucket
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
        self.history, self.changes = history, changes or {}
        fact, key = self._fact, self._key
        self.precision = str(key("trainer.precision") or "32-true")
        self.is_half = self.precision not in ("32-true", "32", "64-true")  # matrix products in 16 bits
        self.on_host = history.fact("machine.device", "cpu") == "cpu"  # offloading saves nothing
        self.checkpointing = key("model.blocks.checkpointing", "none")
        self.micro_batch_size, self.seq_len = key("data.micro_batch_size", 1), key("data.seq_len", 0)
        self.tokens = self.micro_batch_size * self.seq_len  # of a micro-batch
        self.loss_chunk = key("model.loss_chunk")  # tokens
        self.parameters, self.layers = fact("parameters.total"), max(fact("model.layers"), 1)
        self.trainable = fact("parameters.trainable") or self.parameters
        self.width, self.vocab_size = fact("model.width"), fact("model.vocab_size")
        self._set_strategy(FILES.get(self.changes.get("config", "")) or key("trainer.strategy"))
        self.rows = key("data.global_batch_size", 0) // self.ranks  # per optimizer step
        # ZeRO stores 16-bit weights under -mixed too, besides a sharded fp32 copy.
        is_small = self.is_half and (self.kind == "zero" or self.precision.endswith("true"))
        self.weight_bytes = 2 if is_small else 4

    def _key(self, path: str, default: Any = None) -> Any:
        return self.changes.get(path, self.history.key(path, default))

    def _fact(self, path: str) -> int:
        return self.history.fact(path) or 0

    def _set_strategy(self, strategy: Any) -> None:
        """Sets kind (replicated, mesh, zero), ranks (data-parallel size) and how the strategy shards."""
        name = strategy["class_path"].rpartition(".")[2] if isinstance(strategy, dict) else ""
        given = (strategy.get("init_args") or {}) if name else {}
        given = given | {k.rpartition(".")[2]: v for k, v in self.changes.items() if k.startswith("trainer.strategy.")}
        self.kind, self.ranks, self.shards, self.tp = "replicated", self._fact("machine.world_size") or 1, 1, 1
        self.stage = self.bucket = 0  # of ZeRO
        self.offload_optimizer = self.offload_parameters = self.accumulates_full = False
        if name == "MeshStrategy":
            sizes = [given.get(k, d) for k, d in (("dp_replicate_size", 1), ("fsdp_size", "auto"), ("tp_size", 1))]
            rest = max(self.ranks // prod(size for size in sizes if size != "auto"), 1)
            replicate, fsdp, self.tp = (rest if size == "auto" else size for size in sizes)
            self.kind, self.ranks, self.shards = "mesh", replicate * fsdp, fsdp * self.tp
            self.offload_optimizer = self.offload_parameters = bool(given.get("cpu_offload"))
            self.accumulates_full = given.get("reduce_each_micro_batch") is False
        elif name == "ZeroStrategy":
            config = given.get("config") or {}
            if isinstance(config, str):
                config = json.loads(Path(config).read_text(encoding="utf-8")) if Path(config).exists() else {}
            zero = config.get("zero_optimization") or {}
            device = {k: (zero.get(f"offload_{k}") or {}).get("device", "none") for k in ("optimizer", "param")}
            bucket = zero.get("reduce_bucket_size", given.get("reduce_bucket_size", BUCKET))
            self.bucket = bucket if isinstance(bucket, int) else 0  # "auto" is small
            self.kind, self.stage = "zero", zero.get("stage") or given.get("stage") or 2
            self.offload_optimizer = device["optimizer"] != "none" or bool(given.get("offload_optimizer"))
            self.offload_parameters = device["param"] != "none" or bool(given.get("offload_parameters"))

    def parts(self) -> dict[str, float]:
        """Returns all parts; in backward, the gradients of one block's activations are added."""
        activations = self.kept() + self.tokens * self._block()
        return self.state() | {"activations": activations, "logits": self.logits()}

    def state(self) -> dict[str, float]:
        """Returns weights, gradients, optimizer state and their buffers."""
        w, accumulates = self.weight_bytes, self.rows > self.micro_batch_size
        parts = {
            "weights": self.parameters * w / self.shards,
            "gradients": self.trainable * w / self.shards,
            "optimizer state": self.trainable * ADAMW_BYTES * w / 4 / self.shards,
        }
        if self.kind == "zero":
            parts = self._zero()
        elif self.kind == "mesh" and self.shards > self.tp:
            # The running block, the next one, and the embedding or the head.
            gathered = 2 * self._of_blocks() / self.layers + self.vocab_size * self.width
            parts["gathered weights"] = gathered / self.tp * (2 if self.is_half else w)
            if self.accumulates_full and accumulates:
                parts["unsharded gradients"] = self.trainable / self.tp * w
        elif self.kind == "replicated" and self.ranks > 1 and accumulates:
            parts["communication buffers"] = self.trainable * w  # else gradients are views of them
        if self.offload_optimizer and not self.on_host:
            parts |= {"gradients": 0.0, "optimizer state": 0.0}
        if self.offload_parameters and not self.on_host:
            parts["weights"] = 0.0
        return parts

    def _zero(self) -> dict[str, float]:
        """DeepSpeed 0.19 keeps an fp32 copy of the weights at every stage and precision."""
        w, is_third = self.weight_bytes, self.stage == 3
        parts = {
            "weights": self.parameters * w / (self.ranks if is_third else 1),
            "gradients": self.trainable * (4 / self.ranks if self.stage > 1 else w),  # shards are fp32
            "optimizer state": self.trainable * (ADAMW_BYTES + 4) / self.ranks,
            "communication buffers": self.bucket * w * (1 if is_third else 2),
        }
        return parts | ({"gathered weights": min(self.parameters, LIVE_PARAMETERS) * w} if is_third else {})

    def kept(self) -> float:
        """Returns the activations that the blocks keep from forward to backward."""
        cast = 2 * self._of_blocks() / self.shards if self.is_half and self.weight_bytes == 4 else 0  # autocast
        if self.checkpointing == "none":
            return self.tokens * self.layers * self._block() + cast
        block_input = self.width * (2 if self.is_half and self.precision.endswith("true") else 4)
        kept = block_input if self.checkpointing == "full" else self._block() * SELECTIVE
        return self.tokens * (self._block() + self.layers * kept) + cast  # backward recomputes one block

    def _of_blocks(self) -> int:
        return self.parameters - self._fact("parameters.embedding")

    def _block(self) -> float:
        """Returns the activations of one block, per token."""
        size = 2 if self.is_half else 4
        norms = 4 * self.width * 4  # two norms, input and output
        attention = 5 * self.width * size  # queries, keys, values, output, input of the projection
        if self.history.fact("model.attention") == "eager":  # probabilities, and their cast
            attention += self._fact("model.heads") * self.seq_len * (6 if self.is_half else 4)
        mlp = 4 * self._mlp_width() * size  # gate, its activation, up, their product
        return norms + (attention + mlp) / self.tp

    def _mlp_width(self) -> int:
        """Returns the intermediate size; in a mixture of experts, of all experts that one token passes."""
        architecture = {} if self._key("model.pretrained") else self._key("model.architecture") or {}
        if expert := architecture.get("moe_intermediate_size"):
            num = (self._fact("model.experts_per_token") or 1) + (architecture.get("n_shared_experts") or 0)
            return expert * num
        return architecture.get("intermediate_size") or 8 * self.width // 3

    def logits(self) -> float:
        return LOGIT_BYTES * min(self.tokens, self.loss_chunk or self.tokens) * self.vocab_size


def as_size(size: float) -> str:
    return f"{size / GIB:.3g} GiB" if size >= GIB / 10 else f"{size / 2**20:.3g} MiB"
