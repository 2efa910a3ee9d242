"""How transformers finds, renames, converts and saves published weights. Private: its loading and
saving. Verified on transformers 5.23; tests/compat/test_names.py checks the names. transformers is
imported late."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..foreign import name_fault, text_of
from . import replaced


def safetensors_of(name: str) -> list[str]:
    """Returns the files with the weights of a folder, or of a name on the hub, from which they are
    downloaded. Raises OSError if there are none."""
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file
    from transformers.utils.hub import get_checkpoint_shard_files

    if_there: Any = {"_raise_exceptions_for_missing_entries": False}
    file = cached_file(name, SAFE_WEIGHTS_NAME, **if_there)
    if file:
        return [file]
    index = cached_file(name, SAFE_WEIGHTS_INDEX_NAME, **if_there)
    if not index:
        raise OSError(f"it has no {SAFE_WEIGHTS_NAME}")
    for file in _files_of(index):  # transformers would follow a name out of the folder
        why = name_fault(file)
        if why:
            raise OSError(f"its {SAFE_WEIGHTS_INDEX_NAME} has the file {file!r}: {why}")
    return get_checkpoint_shard_files(name, index)[0]


def _files_of(index: str) -> set[str]:
    """Returns the names of files in an index. Raises OSError if it is not one."""
    found = json.loads(text_of(Path(index)))
    names = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(names, dict) or not all(isinstance(each, str) for each in names.values()):
        raise OSError(f"its {Path(index).name} has no weight_map of tensors and files")
    return set(names.values())


def sources_of_weights(model: Any, keys: list[str]) -> dict[str, tuple[list[str], str | None]]:
    """Returns, for each tensor of `model` that files with `keys` have, its keys and a converter's
    pattern, if any."""
    from transformers import core_model_loading as loading
    from transformers.conversion_mapping import get_model_conversion_mapping

    mapping, state = get_model_conversion_mapping(model), model.state_dict()
    renamings = [each for each in mapping if isinstance(each, loading.WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, loading.WeightConverter)]
    sources: dict[str, tuple[list[str], str | None]] = {}
    for key in keys:
        for rules in ((renamings, converters), ([], [])):
            name, pattern = loading.rename_source_key(key, *rules, model.base_model_prefix, state)
            if name in state or key not in state:
                break
        names = [name]
        for converter in converters:
            if pattern in converter.source_patterns:
                first, *others = converter.target_patterns
                names += [name.replace(first, other) for other in others]
        for each in names:
            sources.setdefault(each, ([], pattern))[0].append(key)
    return sources


def converted(model: Any, sources: dict[str, Any], name: str) -> tuple[torch.Tensor | None, str]:
    """Returns the tensor `name` of a model on the meta device, from `sources`, slices of
    safetensors by key; None and the reason if it cannot be converted. `from_pretrained` converts
    all tensors at once."""
    from transformers import core_model_loading as loading
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.modeling_utils import LoadStateDictConfig

    mapping: Any = get_model_conversion_mapping(model)
    config = LoadStateDictConfig(dtype=torch.float32, weight_mapping=mapping)
    with replaced(loading, tqdm=lambda items, **_: items):
        info, _ = loading.convert_and_load_state_dict_in_model(model, sources, config)
    found = model.get_parameter_or_buffer(name).detach()
    # The model keeps no memory: what was loaded is put back on the meta device.
    for loaded, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not tensor.is_meta:
            owner, _, own = loaded.rpartition(".")
            empty = tensor.detach().to("meta")
            if isinstance(tensor, nn.Parameter):
                empty = nn.Parameter(empty, requires_grad=False)
            setattr(model.get_submodule(owner), own, empty)
    for key, shape, expected in info.mismatched_keys:
        return None, f"its {key} is {tuple(shape)}, and the model's {tuple(expected)}"
    if found.is_meta:
        return None, f"its {name} cannot be converted"
    return found, ""


def names_to_save(model: Any) -> list[str]:
    """Returns the names in a state dict that `save_pretrained` writes: of tied weights one."""
    from transformers.modeling_utils import remove_tied_weights_from_state_dict

    model.tie_weights()  # a move to the meta device separates them
    state = dict(model.state_dict())
    ignored = model._keys_to_ignore_on_save
    if ignored is not None:
        for name in ignored:
            state.pop(name, None)
    return list(remove_tied_weights_from_state_dict(state, model))


def to_published(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns tensors of `model` with the names and layouts of files."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, tensors)


def loaded_dtypes(model: Any, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Returns the type of each tensor of `model` where `from_pretrained` loads it with `dtype`."""
    from transformers.core_model_loading import build_glob_alternation

    with torch.device("meta"):
        like = type(model)._from_config(deepcopy(model.config), dtype=dtype)
    found: dict[str, torch.dtype] = {}
    for name, tensor in model.state_dict().items():
        found[name] = dtype if tensor.is_floating_point() else tensor.dtype
    for name, tensor in like.state_dict().items():
        found[name] = tensor.dtype
    plan = model._get_dtype_plan(dtype)
    if plan:
        pattern, *_ = build_glob_alternation(list(plan))
        found |= dict.fromkeys(filter(pattern.search, found), torch.float32)
    return found
