"""Floating-point operations of training, and the peak of a device: the two numbers of MFU.

    operations of a token = 6 N + 12 L d T

6 N: each active parameter is multiplied and added once in the forward and twice in the backward
pass. 12 L d T: attention scores and their products with the values, in L layers of width d over T
tokens, without the causal mask and recomputation. This is PaLM's convention (arXiv:2204.02311,
appendix B). N is the number of parameters active for a token: of experts, the chosen and the shared
ones. An embedding table counts only where it is the output layer too (tied). A frozen parameter has
no gradient of its own: 4 instead of 6."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..compat.transformers import wrappers_of_parameters
from ..layout import full_shape

__all__ = ["PEAKS", "Size", "find_experts", "peak", "text_config"]


# Dense TFLOP/s in half precision by datasheet (figures with structured sparsity are halved), by a
# regular expression for the full name of torch.cuda.get_device_name: a slice of a GPU (MIG) or a
# custom part has another name, and none. Lightning's table (2.6.6, fabric/utilities/throughput.py)
# has the H200 with sparsity and the H100 NVL as two devices.
PEAKS = {
    "NVIDIA B200": 2250.0,
    "NVIDIA H200|NVIDIA GH200 (120|480)GB|NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H200 NVL|NVIDIA H100 NVL": 835.5,
    "NVIDIA H100 PCIe": 756.0,
    r"(NVIDIA )?A100(-SXM4-(40|80)GB|-PCIE-40GB| 80GB PCIe)": 312.0,
    "NVIDIA L40S": 362.0,
    "NVIDIA GeForce RTX 4090": 165.2,
    "AMD Instinct MI300X": 1307.4,
}


def peak(device: str, precision: str) -> float | None:
    """Returns the TFLOP/s of one device in half precision; None if it is not known, and in float32,
    where a matrix product has one of several speeds (TF32 or not, by torch's settings and by
    shape)."""
    if precision.partition("-")[0] not in ("bf16", "16"):
        return None
    for names, figure in PEAKS.items():
        if re.fullmatch(names, device):
            return figure
    return None


@dataclass(frozen=True)
class Size:
    """A model's sizes; None where its configuration lacks them, as for a model of your own."""

    total: int
    trainable: int
    in_4_bits: int
    matrices: int  # trainable ones that Muon would update
    active: int | None  # for one token, with embeddings, as in published counts ("37B active")
    embedding: int
    layers: int | None
    width: int | None
    experts: int | None  # of a layer, without shared ones
    experts_per_token: int | None
    _multiplied: float | None  # 6 N
    # Modules of multi-token prediction: each is a layer more, and the output layer once more.
    predicted: int = 0

    def flops_per_token(self, seq_len: int) -> float | None:
        if self._multiplied is None or not self.layers or not self.width:
            return None
        return self._multiplied + 12 * (self.layers + self.predicted) * self.width * seq_len

    @property
    def attention_tokens(self) -> float | None:
        """Length in tokens of a document whose causal attention costs as much as all else."""
        rest, with_one_token = self.flops_per_token(0), self.flops_per_token(1)
        if rest is None or with_one_token is None:
            return None
        return 2 * rest / (with_one_token - rest)  # a causal mask halves attention's operations

    @classmethod
    def of(cls, model: nn.Module) -> Size:
        """Returns unsharded sizes under any strategy; shared parameters once, no communication."""
        config = text_config(model)
        experts = find_experts(model)
        chosen = getattr(config, "num_experts_per_tok", None)
        num = getattr(config, "num_local_experts", None)
        if not num:
            num = getattr(config, "num_experts", None)
        share: float | None = 1.0  # of the experts' weights that a token uses; None: not known
        if experts:
            num = num_experts(experts[0])
            share = chosen / num if isinstance(chosen, int) and chosen else None
        elif num and num != 1:  # only stacked experts are found
            share = None
        # Parameters by their id; one may be in several of these.
        tables: set[int] = set()
        used: set[int] = set()
        of_experts: set[int] = set()
        packed: dict[int, int] = {}  # how many weights an element stands for
        for layer in model.modules():
            ids = set(map(id, layer.parameters(recurse=False)))
            if isinstance(layer, nn.Embedding):
                tables |= ids
            else:
                used |= ids
            if layer in experts:
                of_experts |= ids
            for name, count in getattr(layer, "weights_per_element", {}).items():
                packed[id(getattr(layer, name))] = count
            if wrappers_of_parameters(layer):  # around stacked experts
                of_experts |= {id(p) for p in layer.parameters() if p.requires_grad}
        total = trainable = embedding = in_4_bits = matrices = 0
        of_muon = matrices_of(model)
        active = multiplied = 0.0
        for parameter in model.parameters():
            key = id(parameter)
            size = full_shape(parameter).numel() * packed.get(key, 1)
            total += size
            if parameter.requires_grad:
                trainable += size
                if parameter in of_muon:
                    matrices += size
            if key in packed:
                in_4_bits += size
            if key in tables:
                embedding += size
            if key in of_experts and share is not None:
                size *= share
            active += size
            if key in used:
                multiplied += size * (6 if parameter.requires_grad else 4)
        predicted = getattr(model, "predicted_ahead", 0)  # text/model/mtp.py
        if predicted:
            output = full_shape(model.get_output_embeddings().weight).numel()  # ty: ignore
            multiplied += 6 * predicted * output
        return cls(
            total=total,
            trainable=trainable,
            in_4_bits=in_4_bits,
            active=None if share is None else round(active),
            embedding=embedding,
            matrices=matrices,
            layers=getattr(config, "num_hidden_layers", None),
            width=getattr(config, "hidden_size", None),
            experts=num,
            experts_per_token=chosen if num else None,
            _multiplied=None if share is None else multiplied,
            predicted=predicted,
        )


def text_config(model: nn.Module) -> Any:
    """Returns the transformers configuration of the model's language part, if it has one."""
    config = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        return config.get_text_config()
    return config


def find_experts(model: nn.Module) -> list[nn.Module]:
    """Returns the modules that store a layer's routed experts as stacked tensors (experts, ...), as
    in transformers 5. Experts that a router of your own calls one by one are not found."""
    found = []
    for module in model.modules():
        if isinstance(getattr(module, "num_experts", None), int) and num_experts(module):
            found.append(module)
    return found


def num_experts(experts: nn.Module) -> int:
    """Returns the number over all ranks (under expert parallelism the attribute is this rank's); 0
    if there is no stacked tensor."""
    for parameter in experts.parameters(recurse=False):
        shape = full_shape(parameter)
        if len(shape) == 3:
            return shape[0]
    return 0


def matrices_of(module: nn.Module) -> set[nn.Parameter]:
    """Returns the parameters that Muon updates: matrices (R, C) with R and C above 1, and stacked
    experts (E, R, C).

    AdamW updates embeddings, the output layer (without `get_output_embeddings`: the last
    nn.Linear), biases, convolutions, and adapters of stacked experts, whose matrices contain all
    experts. As in Moonlight, weights of routers are matrices. So are other adapters."""
    layers: list[Any] = list(module.modules())
    heads: list[nn.Module] = []
    linear: list[nn.Module] = []
    for layer in layers:
        if hasattr(layer, "get_output_embeddings"):
            heads.append(layer.get_output_embeddings())
        if isinstance(layer, nn.Linear):
            linear.append(layer)
    if not heads:
        heads = linear[-1:]
    others: set[nn.Parameter] = set()
    for layer in layers:
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) or layer in heads:
            others.update(layer.parameters(recurse=False))
        for wrapper in wrappers_of_parameters(layer):
            others.update(wrapper.lora_A.parameters())
            others.update(wrapper.lora_B.parameters())
    experts = find_experts(module)
    found: set[nn.Parameter] = set()
    for layer in layers:
        for name, parameter in layer.named_parameters(recurse=False):
            shape = full_shape(parameter)
            is_stack = len(shape) == 3 and layer in experts
            if len(shape) != 2 and not is_stack:
                continue
            if min(shape[-2:]) > 1 and not name.endswith("bias"):
                found.add(parameter)
    return found - others
