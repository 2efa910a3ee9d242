"""Private names of transformers, and its functions that are replaced. Verified on transformers
5.23, which changes them in minor versions; tests/compat/test_names.py checks them.

transformers is imported late."""

import functools
import logging
import re
import sys
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from . import replaced
from .torch import coordinate_of

NUMBERS_OF_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")

# transformers imports peft, and peft bitsandbytes, which reports a missing package on a CPU.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def attention_of(model: Any) -> str | None:
    """Returns the attention kernel of a model or its configuration, which has no public getter;
    None for a model that is not of transformers."""
    return getattr(getattr(model, "config", model), "_attn_implementation", None)


def set_attention(config: Any, kernel: str) -> None:
    """Sets the attention kernel before there is a model with `set_attn_implementation`."""
    config._attn_implementation = kernel


def initialize(model: Any, layer: nn.Module) -> None:
    """Initializes a new layer as `model` initializes its own; the public `init_weights` does all
    layers."""
    model._init_weights(layer)


def wrap_attention(module: nn.Module, wrapper: Callable[..., Any]) -> None:
    """Lets the kernel of an attention module run inside `wrapper(kernel, module, queries, …)`, once
    however often it is called. Kernels are in a registry of the process; `eager` is a function of
    the module's own file. A wrapper gets the calls of other models too."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

    file: Any = sys.modules[type(module).__module__]
    kernel = attention_of(module)
    is_eager = not kernel or kernel == "eager"
    attend: Any = file.eager_attention_forward if is_eager else ALL_ATTENTION_FUNCTIONS[kernel]
    if getattr(attend, "wrapper", None) is wrapper:
        return
    wrapped: Any = functools.wraps(attend)(functools.partial(wrapper, attend))
    wrapped.wrapper = wrapper
    if is_eager:
        vars(file)["eager_attention_forward"] = wrapped
    else:
        AttentionInterface.register(kernel, wrapped)


def names_of_blocks(model: nn.Module) -> set[str]:
    """Returns the class names of the model's repeated layers."""
    names = getattr(model, "_no_split_modules", None)
    return set() if names is None else set(names)


def reason_against_sequence_shards(model: Any) -> str:
    """Returns what combines a model's tokens besides an attention kernel with a mask; "" if nothing
    does. The public `supports_context_parallel` refuses windows, which torch's cannot mask."""
    kernels = getattr(model, "_supports_attention_backend", False) and model._supports_sdpa
    if not kernels or attention_of(model) == "eager":  # others may have a bias for each head
        return "its attention is not one of transformers' kernels (sdpa, flash, flex)"
    config = model.config.get_text_config()
    masked = {"full_attention", "sliding_attention", "chunked_attention"}
    kinds = getattr(config, "layer_types", None)
    has_others = kinds is not None and not masked.issuperset(kinds)
    if has_others or model._is_stateful:
        return "layers other than attention to all tokens combine its tokens"
    if re.search("longrope|'dynamic'", str(getattr(config, "rope_parameters", None))):
        return "its rotary embedding depends on a batch's largest position"
    return ""


def wrappers_of_parameters(module: Any) -> list[Any]:
    """Returns peft's wrappers around a module whose parameters have adapters, outermost first."""
    found: list[Any] = []
    while hasattr(module, "parameter_name") and hasattr(module, "lora_A"):
        found.append(module)
        module = module.base_layer
    return found


@contextmanager
def without_adapters(model: nn.Module) -> Generator[None]:
    """Inside, a forward pass bypasses the adapters. peft's public functions change `requires_grad`
    too, which FSDP2 reads when it gathers."""
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "lora_A")]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def without_search() -> Any:
    """Inside, transformers does not search positions for documents, a device sync in every pass."""
    from transformers import masking_utils

    return replaced(masking_utils, find_packed_sequence_indices=lambda position_ids: None)


def shard_for(target: DTensor, full: Any, rank: int | None = None) -> torch.Tensor:
    """Returns a rank's shard of `full` with the placements of `target`, interleaved ones too. None:
    this rank. The module is internal; torch's `distribute_tensor` does not know interleaved
    shards."""
    from transformers.distributed.sharding_utils import DtensorShardOperation

    mesh = target.device_mesh
    coordinate: Any = mesh.get_coordinate() if rank is None else coordinate_of(rank, mesh)

    class OfRank(DtensorShardOperation):
        def _get_sub_mesh(self, mesh_dim: int) -> Any:
            size, number = mesh.size(mesh_dim), coordinate[mesh_dim]
            return SimpleNamespace(get_local_rank=lambda: number, size=lambda: size)

        def _slice_and_cat(
            self, source: Any, intervals: Any, device: Any, dtype: Any
        ) -> torch.Tensor:
            if not all(intervals):  # the rank has none of it
                empty = []
                for dim, found in enumerate(intervals):
                    empty.append(slice(0, full.shape[dim] if found else 0))
                return source[tuple(empty)]
            return super()._slice_and_cat(source, intervals, device, dtype)

    shard = OfRank(target).shard_tensor(full)
    assert shard is not None  # it is None for single experts only
    return shard


@cache
def cast_experts() -> None:
    """Applies autocast to the experts' grouped products, for the whole process. torch's autocast
    does not support `grouped_mm` (pytorch#174763): under bf16-mixed experts would multiply in
    float32, for which a GPU has no grouped kernel, and wait for the device."""
    from transformers.integrations import moe

    experts: Any = moe
    grouped_mm = experts._grouped_mm

    def cast_and_multiply(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
        device = weight.device.type
        if torch.is_autocast_enabled(device):
            weight = weight.to(torch.get_autocast_dtype(device))
        return grouped_mm(input, weight, offs)

    experts._grouped_mm = cast_and_multiply


class ExpertFields(NamedTuple):
    """The fields of a configuration that have the sizes of an expert's matrices."""

    hidden: str
    width: str


def fields_of_experts(config: Any) -> ExpertFields | None:
    """Returns the sizes of experts that torch's grouped products compute; None for a model without
    experts, or that computes them otherwise. transformers decorates such experts, and lets a
    configuration choose another way."""
    chosen = getattr(config, "_experts_implementation", None)
    numbers = [getattr(config, name, None) for name in NUMBERS_OF_EXPERTS]
    if chosen not in (None, "grouped_mm") or not any(isinstance(each, int) for each in numbers):
        return None
    return _fields_in_code(type(config))


@cache
def _fields_in_code(config_class: type) -> ExpertFields | None:
    file = find_spec(config_class.__module__.replace(".configuration_", ".modeling_"))
    if file is None or file.origin is None:
        return None
    _, _, experts = Path(file.origin).read_text("utf-8").partition("@use_experts_implementation")
    if experts:  # the text of the decorated class alone
        experts = re.split(r"\nclass |\ndef |\n@", experts, maxsplit=2)[1]
    width = re.search(r"= config\.(\w*(?:intermediate|ffn)\w*)", experts)
    hidden = re.search(r"hidden\w* = config\.(\w+)", experts)
    if width is None or hidden is None:
        return None
    return ExpertFields(hidden[1], width[1])


@contextmanager
def sharding(offload_policy: Callable[[], Any], prepare: Callable[[], None]) -> Generator[None]:
    """Inside, `maybe_distribute_model` offloads with `offload_policy()`, and calls `prepare()`
    before FSDP2 wraps. transformers pins offloaded memory, which fails without a GPU. It has no
    hook between tensor parallelism, which needs each of the tied parameters, and FSDP2, which needs
    them tied."""
    from transformers.distributed import fsdp, mixin

    apply = mixin.apply_fully_sharded_data_parallelism

    def prepared(model: Any, *args: Any) -> Any:
        prepare()
        return apply(model, *args)

    policies: AbstractContextManager[None] = replaced(fsdp, CPUOffloadPolicy=offload_policy)
    with policies, replaced(mixin, apply_fully_sharded_data_parallelism=prepared):
        yield
