"""What holds a device's memory in a training, and what each part would be after a change; without torch.

Weights, gradients and AdamW's state follow from parameters, strategy and precision (docs/strategies has the formulas;
tests/test_diagnosis_memory.py compares them with the tensors of trainings). What one micro-batch needs is what is left
of a measured peak. Only where nothing was measured is it counted, tensor by tensor, by the method of Korthikanti et al.
(arXiv:2205.05198, section 4.1), for blocks as they are now: gated MLP, norms in float32, fused attention, no dropout.
That count leaves out what a model does on top (routing, latent attention): within a factor of two, so it is told as
"about".

Everything is of one rank. GiB = 2**30 bytes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any, Literal

from ...records import GIB
from ..history.run import History

LOGIT_BYTES = 12  # of a logit in backward: its log-probability, that one's gradient and its own, all in float32
ADAMW_BYTES = 8  # two moments in float32, of a parameter in float32
LIVE_PARAMETERS = 10**9  # DeepSpeed's stage3_max_live_parameters: what ZeRO-3 keeps gathered at most
SELECTIVE = 0.5  # of a block's activations, kept with selective checkpointing: results of products and of attention


@dataclass(frozen=True)
class Cut:
    """How a strategy lays the state out over ranks.

    Args:
        kind: whole (one device, DDP), mesh (FSDP2, HSDP, TP, EP) or zero.
        ranks: That see batches of their own, as DDP and ZeRO divide by.
        shards: Parts that a mesh cuts the state into: fsdp x tp.
        tp: Of them, along matrices.
        stage: Of ZeRO.
        bucket: Elements of a bucket in which ZeRO's stages 1 and 2 reduce.
        offload_optimizer: Gradients and optimizer state are in host memory.
        offload_parameters: Weights too.
        waits: A mesh reduces gradients once an accumulation, and keeps them whole until then.
    """

    kind: Literal["whole", "mesh", "zero"] = "whole"
    ranks: int = 1
    shards: int = 1
    tp: int = 1
    stage: int = 0
    bucket: int = 0
    offload_optimizer: bool = False
    offload_parameters: bool = False
    waits: bool = False


@dataclass(frozen=True)
class Training:
    """What memory depends on; widths in elements."""

    parameters: int
    trainable: int
    embedding: int  # parameters
    layers: int
    width: int
    heads: int
    mlp_width: int  # of the middle of an MLP; in a mixture of experts of all that one token passes
    vocab_size: int
    eager_attention: bool
    seq_len: int
    micro_batch_size: int  # rows
    precision: str
    cut: Cut
    checkpointing: str = "none"
    checkpoint_every: int = 1
    loss_chunk: int | None = None  # tokens
    rows: int = 0  # of an optimizer step, of this rank; 0: those of a micro-batch
    on_host: bool = False  # trains on a CPU: offloading moves nothing

    @property
    def half(self) -> bool:
        """Whether matrix products are in 16 bits."""
        return self.precision not in ("32-true", "32", "64-true")

    @property
    def weight_bytes(self) -> int:
        """Of a stored weight. ZeRO's are in half precision under -mixed too, beside a sharded copy in float32."""
        return 2 if self.half and (self.cut.kind == "zero" or self.precision.endswith("true")) else 4

    @property
    def accumulates(self) -> bool:
        return self.rows > self.micro_batch_size

    # ---- bytes, by part ----------------------------------------------------------------------------------------------

    def state(self) -> dict[str, float]:
        """Weights, gradients, optimizer state and what goes with them."""
        cut, w = self.cut, self.weight_bytes
        if cut.kind == "zero":
            parts = self._zero()
        else:
            moments = ADAMW_BYTES * w // 4
            parts = {"weights": self.parameters * w, "gradients": self.trainable * w}
            parts = {k: v / cut.shards for k, v in (parts | {"optimizer state": self.trainable * moments}).items()}
            if cut.kind == "mesh" and cut.shards > cut.tp:
                parts["gathered weights"] = self._gathered(w)
                if cut.waits and self.accumulates:
                    parts["whole gradients"] = self.trainable / cut.tp * w
            elif cut.kind == "whole" and cut.ranks > 1 and self.accumulates:
                parts["communication buffers"] = self.trainable * w  # DDP's; else the gradients lie in them
        if cut.offload_optimizer and not self.on_host:
            parts |= {"gradients": 0.0, "optimizer state": 0.0}
        if cut.offload_parameters and not self.on_host:
            parts["weights"] = 0.0
        return parts

    def _zero(self) -> dict[str, float]:
        """DeepSpeed 0.19 keeps a copy of the weights in float32 at every stage and precision."""
        stage, n, w, bucket = self.cut.stage, self.cut.ranks, self.weight_bytes, self.cut.bucket
        parts = {
            "weights": self.parameters * w / (n if stage == 3 else 1),
            "gradients": self.trainable * (4 / n if stage > 1 else w),  # sharded ones add up in float32 (zero.py)
            "optimizer state": self.trainable * (ADAMW_BYTES + 4) / n,
            "communication buffers": bucket * w * (1 if stage == 3 else 2),  # one is filled, one is reduced
        }
        return parts | ({"gathered weights": min(self.parameters, LIVE_PARAMETERS) * w} if stage == 3 else {})

    def _gathered(self, w: int) -> float:
        """Two blocks, one that runs and the next, and the largest of what is no block: the embedding or the head."""
        w = 2 if self.half else w
        block = (self.parameters - self.embedding) / max(self.layers, 1)
        return (2 * block + self.vocab_size * self.width) / self.cut.tp * w

    def activations(self) -> float:
        """What the blocks keep, by count, and in backward one block's gradients beside it."""
        return self.kept() + self.tokens * self._block

    def kept(self) -> float:
        """By the blocks, from forward to backward."""
        matrices = (self.parameters - self.embedding) / self.cut.shards
        cast = 2 * matrices if self.half and self.weight_bytes == 4 else 0  # autocast's copies
        if self.checkpointing == "none":
            return self.tokens * self.layers * self._block + cast
        slim = ceil(self.layers / self.checkpoint_every)
        its_input = self.width * (2 if self.half and self.precision.endswith("true") else 4)
        kept = its_input if self.checkpointing == "full" else self._block * SELECTIVE
        whole = self.layers - slim + 1  # the one that backward computes again
        return self.tokens * (whole * self._block + slim * kept) + cast

    @property
    def _block(self) -> float:
        """Of one block and token."""
        e = 2 if self.half else 4
        norms = 4 * self.width * 4  # two of them, input and result
        attention = 5 * self.width * e  # queries, keys, values, result, and the result as the projection takes it
        if self.eager_attention:
            attention += self.heads * self.seq_len * (4 if e == 4 else 6)  # probabilities, and cast
        mlp = 4 * self.mlp_width * e  # gate, its activation, up, their product
        return norms + (attention + mlp) / self.cut.tp

    def logits(self) -> float:
        """The loss's, (B, T, V) or a chunk of it."""
        return LOGIT_BYTES * min(self.tokens, self.loss_chunk or self.tokens) * self.vocab_size

    @property
    def tokens(self) -> int:
        """Of a micro-batch."""
        return self.micro_batch_size * self.seq_len

    def needs(self) -> dict[str, float]:
        return self.state() | {"activations": self.activations(), "logits": self.logits()}


def training_of(history: History) -> Training | None:
    """What a run's configuration and facts.json say; None where the model's size is not known."""
    parameters, architecture = history.fact("parameters.total"), history.key("model.architecture", {}) or {}
    world_size = history.fact("machine.world_size") or 1
    if not parameters:
        return None
    cut = cut_of(history.key("trainer.strategy", "auto"), world_size)
    width = history.fact("model.width") or architecture.get("hidden_size") or 0
    return Training(
        parameters=parameters,
        trainable=history.fact("parameters.trainable") or parameters,
        embedding=history.fact("parameters.embedding") or 0,
        layers=history.fact("model.layers") or 0,
        width=width,
        heads=history.fact("model.heads") or 0,
        mlp_width=_mlp_width(history, architecture) or 8 * width // 3,
        vocab_size=history.fact("model.vocab_size") or 0,
        eager_attention=history.fact("model.attention") == "eager",
        seq_len=history.key("data.seq_len", 0),
        micro_batch_size=history.key("data.micro_batch_size", 1),
        precision=str(history.key("trainer.precision") or "32-true"),
        cut=cut,
        checkpointing=history.key("model.blocks.checkpointing", "none"),
        checkpoint_every=max(history.key("model.blocks.checkpoint_every", 1), 1),
        loss_chunk=history.key("model.loss_chunk"),
        rows=history.key("data.global_batch_size", 0) // cut.ranks,
        on_host=history.fact("machine.device", "cpu") == "cpu",
    )


def _mlp_width(history: History, architecture: dict[str, Any]) -> int:
    each = architecture.get("moe_intermediate_size")
    if history.key("model.pretrained") or not each:
        return 0 if history.key("model.pretrained") else architecture.get("intermediate_size") or 0
    return each * ((history.fact("model.experts_per_token") or 1) + (architecture.get("n_shared_experts") or 0))


def cut_of(strategy: Any, world_size: int) -> Cut:
    """`trainer.strategy` as the configuration has it: a name, or class_path and init_args."""
    if not isinstance(strategy, dict):
        return Cut(ranks=world_size)
    name, arguments = strategy["class_path"].rpartition(".")[2], strategy.get("init_args") or {}
    if name == "MeshStrategy":
        sizes = {key: arguments.get(key, "auto" if key == "fsdp_size" else 1) for key in _SIZES}
        known = 1
        for size in sizes.values():
            known *= size if size != "auto" else 1
        replicate, fsdp, tp = (size if size != "auto" else max(world_size // known, 1) for size in sizes.values())
        offloads = bool(arguments.get("cpu_offload"))
        ranks = replicate * fsdp
        waits = arguments.get("reduce_each_micro_batch") is False
        return Cut("mesh", ranks, fsdp * tp, tp, offload_optimizer=offloads, offload_parameters=offloads, waits=waits)
    if name == "ZeroStrategy":
        return _zero_cut(arguments, world_size)
    return Cut(ranks=world_size)


_SIZES = ("dp_replicate_size", "fsdp_size", "tp_size")


def _zero_cut(arguments: dict[str, Any], world_size: int) -> Cut:
    given = arguments.get("config") or {}
    if isinstance(given, str):
        given = json.loads(Path(given).read_text(encoding="utf-8")) if Path(given).exists() else {}
    zero = given.get("zero_optimization") or {}
    bucket = zero.get("reduce_bucket_size", arguments.get("reduce_bucket_size", 200_000_000))
    return Cut(
        "zero",
        world_size,
        stage=zero.get("stage") or arguments.get("stage") or 2,
        bucket=bucket if isinstance(bucket, int) else 0,  # "auto": by the model's width, small
        offload_optimizer=_offloads(zero, "offload_optimizer") or bool(arguments.get("offload_optimizer")),
        offload_parameters=_offloads(zero, "offload_param") or bool(arguments.get("offload_parameters")),
    )


def _offloads(zero: dict[str, Any], section: str) -> bool:
    return (zero.get(section) or {}).get("device", "none") != "none"


def as_size(size: float) -> str:
    """Bytes, for people."""
    return f"{size / GIB:.3g} GiB" if size >= GIB / 10 else f"{size / 2**20:.3g} MiB"
