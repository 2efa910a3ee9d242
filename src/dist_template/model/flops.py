"""Floating-point operations of training, and the peak of a device: the two numbers of MFU.

    operations of a token = 6 N + 12 L d T

6 N: each active parameter is multiplied and added once in the forward and twice in the backward
pass. 12 L d T: attention scores and their products with the values, in L layers of width d over T
tokens, without subtracting the causal mask and without recomputation. This is PaLM's convention (arXiv:2204.02311,
appendix B), as in nanoGPT and llm-foundry. d is `hidden_size`; where heads x head size is larger, as in latent
attention, the true number is higher. Linear and windowed attention count as full attention.

N is the number of parameters active for a token: of experts, the chosen and the shared ones. An
embedding table counts only where it is the output layer too (tied). A frozen parameter has no
gradient of its own: 4 instead of 6.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from ..compat.transformers import wrappers_of_parameters
from ..layout import full_shape

__all__ = ["PEAKS", "Size", "find_experts", "peak", "text_config"]


class Peak(NamedTuple):
    """Dense operations per second; datasheet figures with structured sparsity are halved."""

    devices: str  # a regular expression for the full names of torch.cuda.get_device_name
    bf16: float | None  # TFLOP/s, sums in float32
    fp16: float | None
    source: str


_NVIDIA = "https://www.nvidia.com/content/dam/en-zz/Solutions"
_HOPPER = "https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet"
_H200 = "https://nvdam.widen.net/s/nb5zzzsjdf/hpc-datasheet-sc23-h200-datasheet-3002446"
_VOLTA = "https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf"

# A slice of a GPU (MIG) or a custom part has another name and so no figure. Lightning's table (2.6.6,
# fabric/utilities/throughput.py) has the H200 with sparsity and the H100 NVL as two devices.
PEAKS = (
    Peak("NVIDIA B200", 2250, 2250, "https://nvdam.widen.net/s/wwnsxrhm2w/blackwell-datasheet-3384703"),
    Peak("NVIDIA H200", 989.4, 989.4, _H200),
    Peak("NVIDIA H200 NVL", 835.5, 835.5, _H200),
    Peak("NVIDIA GH200 (120|480)GB", 989.4, 989.4, "https://resources.nvidia.com/en-us-grace-cpu/grace-hopper-superchip"),
    Peak("NVIDIA H100 80GB HBM3", 989.4, 989.4, _HOPPER),
    Peak("NVIDIA H100 NVL", 835.5, 835.5, _HOPPER),
    Peak("NVIDIA H100 PCIe", 756, 756, _HOPPER),
    Peak(
        r"(NVIDIA )?A100(-SXM4-(40|80)GB|-PCIE-40GB| 80GB PCIe)", 312, 312,
        f"{_NVIDIA}/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf",
    ),
    Peak("NVIDIA L40S", 362, 362, "https://resources.nvidia.com/en-us-l40s/l40s-datasheet-28413"),
    Peak("NVIDIA L4", 121, 121, "https://resources.nvidia.com/en-us-data-center-overview/l4-gpu-datasheet"),
    Peak("NVIDIA A10", 125, 125, f"{_NVIDIA}/Data-Center/a10/pdf/a10-datasheet.pdf"),
    Peak(
        "NVIDIA GeForce RTX 4090", 165.2, 165.2,
        "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf",
    ),
    Peak("Tesla V100-SXM2-(16|32)GB", None, 125, _VOLTA),
    Peak("Tesla V100-PCIE-(16|32)GB", None, 112, _VOLTA),
    Peak("Tesla T4", None, 65,
         f"{_NVIDIA}/Data-Center/tesla-t4/t4-tensor-core-datasheet-951643.pdf"),
    Peak("AMD Instinct MI300X", 1307.4, 1307.4, "https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html"),
)  # fmt: skip


def peak(device: str, precision: str) -> tuple[float, str] | None:
    """Returns the TFLOP/s of one device in a precision of Lightning, and its source; None if it is not known.

    Half precision only: in float32 a matrix product has one of several speeds (TF32 or not, by
    torch's settings and by shape).
    """
    for row in PEAKS:
        figure = {"bf16": row.bf16, "16": row.fp16}.get(precision.partition("-")[0])
        if figure and re.fullmatch(row.devices, device):
            return figure, row.source
    return None


@dataclass(frozen=True)
class Size:
    """A model's sizes; None where its configuration lacks them, as for a model of your own."""

    total: int
    trainable: int
    in_4_bits: int
    active: int | None  # for one token, with embeddings, as in published counts ("37B active")
    embedding: int
    layers: int | None
    width: int | None
    experts: int | None  # of a layer, without shared ones
    experts_per_token: int | None
    _multiplied: float | None  # 6 N

    def flops_per_token(self, seq_len: int) -> float | None:
        if self._multiplied is None or not self.layers or not self.width:
            return None
        return self._multiplied + 12 * self.layers * self.width * seq_len

    @classmethod
    def of(cls, model: nn.Module) -> Size:
        """Returns unsharded sizes under any strategy; shared parameters once, no communication."""
        config = text_config(model)
        experts = find_experts(model)
        chosen, share = getattr(config, "num_experts_per_tok", None), 1.0
        num = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
        if experts:
            num = num_experts(experts[0])
            share = chosen / num if isinstance(chosen, int) else 0.0
        # only stacked experts are found
        is_known = bool(share) and bool(experts or not num or num == 1)
        # ids of parameters
        tables, used, of_experts = set[int](), set[int](), set[int]()
        packed: dict[int, int] = {}  # how many weights an element stands for
        for layer in model.modules():
            ids = set(map(id, layer.parameters(recurse=False)))
            (tables if isinstance(layer, nn.Embedding) else used).update(ids)
            if layer in experts:
                of_experts |= ids
            for name, count in getattr(layer, "weights_per_element", {}).items():
                packed[id(getattr(layer, name))] = count
            if wrappers_of_parameters(layer):  # around stacked experts
                of_experts |= {id(p) for p in layer.parameters() if p.requires_grad}
        total = trainable = embedding = in_4_bits = 0
        active = multiplied = 0.0
        for parameter in model.parameters():
            key = id(parameter)
            size = full_shape(parameter).numel() * packed.get(key, 1)
            total += size
            trainable += size * parameter.requires_grad
            in_4_bits += size * (key in packed)
            embedding += size * (key in tables)
            if key in of_experts:
                size *= share
            active += size
            if key in used:
                multiplied += size * (6 if parameter.requires_grad else 4)
        return cls(
            total=total,
            trainable=trainable,
            in_4_bits=in_4_bits,
            active=round(active) if is_known else None,
            embedding=embedding,
            layers=getattr(config, "num_hidden_layers", None),
            width=getattr(config, "hidden_size", None),
            experts=num,
            experts_per_token=chosen if num else None,
            _multiplied=multiplied if is_known else None,
        )


def text_config(model: nn.Module) -> Any:
    """Returns the transformers configuration of the model's language part, if it has one."""
    config = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


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
