"""Multi-token prediction: modules that predict later tokens than the next one (DeepSeek-V3,
arXiv:2412.19437, 2.2).

Module k combines the hidden state of token i, from the module before or the model, with the
embedding of token i + k, runs a block and predicts token i + k + 1 by the model's own output layer.
transformers (5.23) has the modules, and runs them to draft tokens; its loss of them fails. Here
they run inside of the model's forward pass, before its output layer, so that every strategy
gathers, divides and recomputes them as the model's own blocks, with the last block's masks and
positions.

Shapes: B sequences, T tokens of a sequence, W width, D modules."""

import re
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ...compat import published as compat
from ...compat.transformers import initialize
from ...errors import InputError, reason
from ...parallel.blocks import find_blocks
from .head import head_of

NAME = "mtp"  # of the modules in the model
PLANS = ("tp_plan", "ep_plan", "fsdp_plan")
OWN = ("enorm.", "hnorm.", "eh_proj.", "post_norm.")  # of a module, besides its block


class Predictor(nn.Module):
    """The modules, and an embedding that shares the model's weight: in a pipeline the last stage
    has a copy of it."""

    def __init__(self, model: Any, number: int) -> None:
        super().__init__()
        from transformers.modeling_layers import MtpModel

        embedding = model.get_input_embeddings()
        if type(embedding) is not nn.Embedding:
            raise InputError(
                f"model.mtp: the embedding of {type(model).__name__} is of a class of its own: set"
                " null"
            )
        self.depth = number
        try:
            self.layers = MtpModel(model, number).layers
        except (AttributeError, StopIteration, TypeError, ValueError) as error:
            what = f"transformers builds no modules for {type(model).__name__} ({reason(error)})"
            raise InputError(f"model.mtp: {what}: set model.mtp null") from error
        for layer in self.layers.modules():  # MtpModel does not know the model's experts
            initialize(model, layer)
        self.embed_tokens = nn.Embedding(*embedding.weight.shape, _weight=embedding.weight)
        self.embed_tokens.weight = embedding.weight
        self.given: list[Tensor] = []  # (B, T) of each module, while it predicts
        self.options: dict[str, Any] = {}  # of the model's last block
        self.attach(model)

    def attach(self, model: nn.Module) -> None:
        """Lets the modules run after the last block of `model`, and before its output layer."""
        own = {*self.modules()}
        blocks = [block for block in find_blocks(model) if block not in own]
        self._ends: Any = blocks[-1], head_of(model)  # no submodules of this one

    @contextmanager
    def predicting(self, given: list[Tensor]) -> Generator[None]:
        """Inside, the model's output has the modules' predictions after its own. Lightning removes
        hooks that stay."""

        def keep_options(block: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            self.options = dict(options)
            hidden = self.options.pop("hidden_states", *args[:1])
            if hidden.dim() != 3:
                shape = f"hidden states of shape {[*hidden.shape]}, not (B, T, W)"
                raise InputError(
                    f"model.mtp: {type(block).__name__} has {shape}: set model.mtp null"
                )

        def extend(head: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
            return (self(inputs[0]),)

        self.given = given
        block, head = self._ends
        hooks = [
            block.register_forward_pre_hook(keep_options, with_kwargs=True),
            head.register_forward_pre_hook(extend, prepend=True),
        ]
        for layer in self.layers.children():  # on the first stage of a pipeline, none
            hooks.append(layer.get_submodule("mtp_block").register_forward_hook(_hidden_alone))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self.given, self.options = [], {}

    def forward(self, hidden: Tensor) -> Tensor:
        """Maps hidden states (B, T, W) to (B + B D, T, W): these, and what each module makes of
        them."""
        states = [hidden]
        for layer, tokens in zip(self.layers, self.given, strict=True):
            states.append(layer(self.embed_tokens(tokens), states[-1], **self.options))
        return torch.cat(states)


def _hidden_alone(block: nn.Module, inputs: Any, output: Any) -> Any:
    """Returns a block's hidden states, without what it returns beside them (GLM-5: the indices of
    attended tokens)."""
    return output[0] if isinstance(output, tuple) else output


def add_modules(model: Any) -> nn.Module:
    """Adds the modules to a model of transformers, and to its plans. Raises InputError if its
    architecture has none."""
    config = getattr(model, "config", None)
    number = getattr(config, "num_mtp_layers", None) or 0
    if number < 1:
        raise InputError(
            "model.mtp needs num_mtp_layers of 1 or more, in model.architecture or the config.json"
            " of model.pretrained, and a model type that has it"
        )
    # unless the architecture names others, a module has the last block's kind
    for name in ("layer_types", "mlp_layer_types"):
        kinds = getattr(config, name, None)
        if kinds and not getattr(config, f"mtp_{name}", None):
            setattr(config, f"mtp_{name}", kinds[-1:] * number)
    model.add_module(NAME, Predictor(model, number))
    model.predicted_ahead = number  # model/flops.py
    _extend_plans(model)
    return model


def _extend_plans(model: Any) -> None:
    """Gives the modules the rules of the model's blocks and embedding."""
    names = {module: name for name, module in model.named_modules()}
    blocks = names[find_blocks(model)[0]].removesuffix("0") + "*"
    embedding = names[model.get_input_embeddings()]
    parts = set[str]()
    for named in (model.named_modules(), model.named_parameters()):
        for name, _ in named:
            parts.add(re.sub(r"\.\d+", ".*", name))
    for plan in PLANS:
        rules = dict(getattr(model, plan, None) or {})
        for name, style in list(rules.items()):
            own = name.replace(blocks, f"{NAME}.layers.*.mtp_block")
            if name.startswith(blocks) and own in parts:  # transformers warns of a rule for none
                rules[own] = style
            elif name == embedding:
                rules[f"{NAME}.embed_tokens"] = style
        setattr(model, plan, rules)


def published(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Converts tensors to the names and layouts of published files: MTP modules follow the model's
    layers, each with a copy of the embedding and of the output layer, as transformers, vLLM and
    SGLang read them."""
    converted, modules = compat.to_published(model, tensors), getattr(model, NAME, None)
    if modules is None:
        return converted
    names = {id(module): f"{name}.weight" for name, module in model.named_modules()}
    embedding, head = names[id(model.get_input_embeddings())], names[id(head_of(model))]
    if model.config.tie_word_embeddings:  # the files have one tensor for both
        head = embedding
    first = model.config.num_hidden_layers

    def name_of(k: int, part: str) -> str:
        return f"{model.base_model_prefix}.layers.{first + k}.{part}"

    result: dict[str, Tensor] = {}
    for name, tensor in converted.items():
        own = re.fullmatch(rf"{NAME}\.layers\.(\d+)\.(?:mtp_block\.)?(.*)", name)
        if own:
            name = name_of(int(own[1]), own[2].replace("post_norm.", "shared_head.norm."))
        result[name] = tensor
        for k in range(modules.depth):
            if name == embedding:
                result[name_of(k, "embed_tokens.weight")] = tensor
            if name == head:
                result[name_of(k, "shared_head.head.weight")] = tensor
    return result


def names_to_save(model: Any) -> list[str]:
    """Returns the names in a state dict that files have: of shared weights one."""
    modules = getattr(model, NAME, None)
    if modules is None:
        return compat.names_to_save(model)
    # transformers refuses what it has not tied itself
    shared = modules.embed_tokens
    modules.embed_tokens = None
    try:
        return compat.names_to_save(model)
    finally:
        modules.embed_tokens = shared


def name_in_model(key: str, config: Any) -> str | None:
    """Returns the model's name for a key of a file: the inverse of `published`. None: a copy of
    what the model has."""
    of_layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", key)
    if not of_layer:
        return key
    number = int(of_layer[1]) - config.get_text_config().num_hidden_layers
    if number < 0:
        return key
    name = of_layer[2].replace("shared_head.norm.", "post_norm.")
    if name.startswith(("embed_tokens.", "shared_head.")):
        return None
    if not name.startswith(OWN):
        name = f"mtp_block.{name}"
    return f"{NAME}.layers.{number}.{name}"
