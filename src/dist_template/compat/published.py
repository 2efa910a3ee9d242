"""How transformers finds, renames and converts published weights. Private: its loading. Verified on transformers 5.23;
tests/compat/test_names.py checks the names. transformers is imported late."""

from typing import Any

import torch
from torch import nn

from . import replaced


def safetensors_of(name: str) -> list[str]:
    """Returns the files with the weights of a folder, or of a name on the hub, from which they are downloaded. Raises
    OSError if there are none."""
    from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file
    from transformers.utils.hub import get_checkpoint_shard_files

    if file := cached_file(name, SAFE_WEIGHTS_NAME, _raise_exceptions_for_missing_entries=False):
        return [file]
    if not (index := cached_file(name, SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False)):
        raise OSError(f"it has no {SAFE_WEIGHTS_NAME}")
    return get_checkpoint_shard_files(name, index)[0]


def sources_of_weights(model: Any, keys: list[str]) -> dict[str, list[str]]:
    """Returns, for each tensor of `model` that is in files with these keys, the keys from which it is converted."""
    from transformers import core_model_loading as loading
    from transformers.conversion_mapping import get_model_conversion_mapping

    mapping, state = get_model_conversion_mapping(model), model.state_dict()
    renamings = [each for each in mapping if isinstance(each, loading.WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, loading.WeightConverter)]
    sources: dict[str, list[str]] = {}
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
            sources.setdefault(each, []).append(key)
    return sources


def converted(model: Any, sources: dict[str, Any], name: str) -> tuple[torch.Tensor | None, str]:
    """Returns the tensor `name` of a model on the meta device, from `sources`, slices of safetensors by key; None and
    the reason if it cannot be converted. `from_pretrained` converts all tensors at once."""
    from transformers import core_model_loading as loading
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.modeling_utils import LoadStateDictConfig

    config = LoadStateDictConfig(dtype=torch.float32, weight_mapping=get_model_conversion_mapping(model))
    with replaced(loading, tqdm=lambda items, **_: items):
        info, _ = loading.convert_and_load_state_dict_in_model(model, sources, config)
    found = model.get_parameter_or_buffer(name).detach()
    for loaded, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not tensor.is_meta:
            owner, _, own = loaded.rpartition(".")
            empty = tensor.detach().to("meta")
            is_parameter = isinstance(tensor, nn.Parameter)
            setattr(model.get_submodule(owner), own, nn.Parameter(empty, False) if is_parameter else empty)
    for key, shape, expected in info.mismatched_keys:
        return None, f"its {key} is {tuple(shape)}, and the model's {tuple(expected)}"
    return (None, f"its {name} cannot be converted") if found.is_meta else (found, "")
