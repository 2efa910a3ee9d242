"""How many floating-point operations training needs, and how many a device can do: what MFU is made of.

    operations of a token = 6 N + 12 L d T

6 N: each parameter that a token meets is multiplied and added, once forward and twice backward. 12 L d T: attention's
scores and their products with the values, in L layers of width d over T tokens, causality not subtracted, nothing that
is computed again counted. This is PaLM's convention (arXiv:2204.02311, appendix B), which nanoGPT and llm-foundry use
too. d is the model's width (`hidden_size`); where heads x head size is more, as in latent attention, the true number is
higher. Linear and windowed attention count as full attention.

N is the parameters that are active for a token: of experts, the chosen and the shared ones. A table of embeddings is
looked up, not multiplied: it counts where it is the output layer as well (as in PaLM and nanoGPT, which tie them).
A frozen parameter has no gradient of its own: 4 instead of 6.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from ..layout import whole_shape


class Peak(NamedTuple):
    """Dense operations per second, without structured sparsity, which datasheets like to include: halved there."""

    devices: str  # a regular expression of whole names, as torch.cuda.get_device_name tells them
    bf16: float | None  # TFLOP/s, sums in float32
    fp16: float | None
    source: str


_NVIDIA = "https://www.nvidia.com/content/dam/en-zz/Solutions"
_HOPPER = "https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet"
_H200 = "https://nvdam.widen.net/s/nb5zzzsjdf/hpc-datasheet-sc23-h200-datasheet-3002446"
_VOLTA = "https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf"

# A slice of a GPU (MIG), a power-limited or a custom part has another name, and so no figure rather than a wrong one.
# Lightning has a table too (2.6.6, fabric/utilities/throughput.py); H200 stands in it with sparsity, H100 NVL as two.
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
    Peak("Tesla T4", None, 65, f"{_NVIDIA}/Data-Center/tesla-t4/t4-tensor-core-datasheet-951643.pdf"),
    Peak("AMD Instinct MI300X", 1307.4, 1307.4, "https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html"),
)  # fmt: skip


def peak(device: str, precision: str) -> tuple[float, str] | None:
    """TFLOP/s of one device in a precision of Lightning's, and where that stands; None where it is not known.

    Half precision only. In float32 a matrix product runs at one of several speeds (TF32 or not, by torch's settings and
    by shape), so a share of "the" peak would say nothing: `perf/model_tflops` is there all the same.
    """
    for row in PEAKS:
        if re.fullmatch(row.devices, device):
            figure = row.bf16 if precision.startswith("bf16") else row.fp16 if precision.startswith("16") else None
            return (figure, row.source) if figure else None
    return None


@dataclass(frozen=True)
class Size:
    """A model in numbers; None where its configuration does not tell, as that of your own model need not."""

    total: int
    trainable: int
    active: int | None  # for one token, tables of embeddings included, as published counts have it ("37B active")
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
        """Whole sizes, however the model is cut over ranks; each shared parameter once. Without communication."""
        config = text_config(model)
        experts = find_experts(model)
        of_experts = {id(p) for module in experts for p in module.parameters(recurse=False)}
        chosen, share = getattr(config, "num_experts_per_tok", None), 1.0
        told = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
        if experts:
            told = num_experts(experts[0])
            share = chosen / told if isinstance(chosen, int) else 0.0
        knows = bool(share) and bool(experts or not told or told == 1)  # experts that are not stacked are not found
        tables = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
        used = {id(p) for m in model.modules() if not isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
        total = trainable = embedding = 0
        active = multiplied = 0.0
        for parameter in model.parameters():
            size = whole_shape(parameter).numel()
            meets = size * (share if id(parameter) in of_experts else 1.0)
            total += size
            trainable += size * parameter.requires_grad
            embedding += size * (id(parameter) in tables)
            active += meets
            if id(parameter) in used:
                multiplied += meets * (6 if parameter.requires_grad else 4)
        return cls(
            total=total,
            trainable=trainable,
            active=round(active) if knows else None,
            embedding=embedding,
            layers=getattr(config, "num_hidden_layers", None),
            width=getattr(config, "hidden_size", None),
            experts=told,
            experts_per_token=chosen if told else None,
            _multiplied=multiplied if knows else None,
        )


def text_config(model: nn.Module) -> Any:
    """The transformers configuration of its language model, if it has one."""
    config = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def find_experts(model: nn.Module) -> list[nn.Module]:
    """The modules that hold a layer's routed experts as stacked tensors (experts, …), as transformers 5 has them.

    A router of your own that calls its experts one by one is not among them.
    """
    return [
        module
        for module in model.modules()
        if isinstance(getattr(module, "num_experts", None), int)
        and any(len(whole_shape(p)) == 3 for p in module.parameters(recurse=False))
    ]


def num_experts(experts: nn.Module) -> int:
    """Of all ranks: under expert parallelism the module's own attribute tells this rank's."""
    return next(whole_shape(p)[0] for p in experts.parameters(recurse=False) if len(whole_shape(p)) == 3)
