"""Adapters of a model: which layers get one, what is refused, and the 4-bit layers."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from trainer_dev.module import LanguageModule
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

from dist_template import AdapterConfig, InputError
from dist_template.model.flops import Size
from dist_template.parallel.shard import refuse_adapters
from dist_template.strategies import MeshStrategy
from dist_template.text.model import adapters
from dist_template.text.model.quantize import Linear4bit, dequantize
from tests.support.library import quantize
from tests.support.limits import violations_of
from tests.support.parity import MODELS
from zoo.models import variants

LLAMA = "{model_type: llama, hidden_size: 128, intermediate_size: 192, num_hidden_layers: 1,"
LLAMA += " num_attention_heads: 2}"


def built(architecture: str = LLAMA) -> Any:
    torch.manual_seed(0)
    fields = yaml.safe_load(architecture)
    fields |= {"vocab_size": 257, "max_position_embeddings": 64}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))


OF_2 = "num_key_value_heads: 2"
LAYERS = [  # fields, number of kinds of layers that have adapters, besides stacked experts
    (MODELS["deepseek_v3"][1:-1], 5),
    # Its router derives from nn.Linear and returns a tuple, to which nothing can be added.
    (f"model_type: llama4_text, num_local_experts: 2, head_dim: 8, pad_token_id: 0, {OF_2}", 4),
    ("model_type: falcon", 4),  # of a class of its own
    # A convolution's 3-D weight is no stack of experts: w1, w2 and w3 would have no adapter.
    (f"model_type: lfm2, layer_types: [conv], {OF_2}", 5),
    ("model_type: gpt2, n_embd: 16", 3),  # of a class of transformers' own; c_proj is there twice
    # Weights of three dimensions in one matrix's place, of a gate's heads or a mixer's, too.
    ("model_type: rwkv, attention_hidden_size: 16, num_hidden_layers: 2", 4),
    (f"model_type: recurrent_gemma, {OF_2}, lru_width: 16, block_types: [recurrent]", 6),
    # Mamba's kernels take the weights of out_proj and dt_proj without their adapters.
    ("model_type: mamba2, num_heads: 4, head_dim: 8, n_groups: 1", 1),
    ("model_type: mamba, state_size: 4", 2),
]
SIZES = "hidden_size: 16, intermediate_size: 24, num_attention_heads: 2"


@pytest.mark.parametrize(("fields", "number"), LAYERS)
def test_all_linear_means_layers_that_compute_as_one(fields: str, number: int) -> None:
    layers = "" if "num_hidden_layers" in fields else ", num_hidden_layers: 1"
    model = adapters.add_adapters(built(f"{{{SIZES}, {fields}{layers}}}"), AdapterConfig(rank=2))
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    names, stacked = {name.split(".lora_")[0].split(".")[-1] for name in trained}, {"experts"}
    assert len(names - stacked - {"base_layer"}) == number
    assert (stacked <= names) == ("expert" in fields)
    assert model(torch.arange(8)[None], use_cache=False).logits.isfinite().all()


@pytest.mark.parametrize("architecture", [LLAMA, MODELS["deepseek_v3"]])
def test_sizes_and_operations_count_frozen_and_packed_weights(architecture: str) -> None:
    """Four operations for a frozen weight and six for one of an adapter; experts by their share."""
    full = Size.of(built(architecture))
    model = adapters.add_adapters(built(architecture), AdapterConfig(rank=4))
    size = Size.of(model)
    assert size.total == full.total + size.trainable
    assert size.trainable == sum(p.numel() for p in model.parameters() if p.requires_grad)
    flops, of_full = size.flops_per_token(0), full.flops_per_token(0)
    assert flops and of_full and size.active and full.active
    assert flops == pytest.approx(of_full * 4 / 6 + 6 * (size.active - full.active), rel=1e-3)
    quantize(model)
    packed = Size.of(model)
    assert (packed.total, packed.flops_per_token(0)) == (size.total, flops)
    layers = [module for module in model.modules() if isinstance(module, Linear4bit)]
    assert packed.in_4_bits == sum(2 * layer.weight.numel() for layer in layers)


def test_four_bit_layers_have_the_values_that_transformers_gives_them(tmp_path: Path) -> None:
    """So that an exported adapter finds the base on which it was trained."""
    model = built()
    model.save_pretrained(tmp_path)
    settings = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )  # fmt: skip
    options: Any = {"quantization_config": settings, "dtype": torch.float32}
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, **options)
    tokens = torch.arange(60).view(2, 30)
    full = model(tokens).logits
    model.requires_grad_(False)
    quantize(model)
    # In evaluation theirs computes in bfloat16.
    embedded = model.get_input_embeddings()(tokens).requires_grad_()
    logits = model(inputs_embeds=embedded).logits
    assert torch.equal(logits, theirs.train()(inputs_embeds=embedded).logits)
    assert 0.01 < (logits - full).abs().max() < 1
    packed = sum(p.numel() * p.element_size() for n, p in model.named_parameters() if "proj" in n)
    assert packed == pytest.approx((0.5 + 1 / 64) * (4 * 128**2 + 3 * 128 * 192))
    dequantize(model)
    assert torch.equal(model(inputs_embeds=embedded).logits, logits)


@pytest.mark.parametrize(("key", "value"), [("quantize", "nf4"), ("dora", True)])
def test_four_bits_and_dora_with_tensor_parallelism_are_refused(key: str, value: Any) -> None:
    module = LanguageModule(adapter=AdapterConfig(**{key: value}))
    (found,) = violations_of(MeshStrategy(tp_size=2), module=module)
    assert re.search(f"{key} does not work with tensor parallelism: .*tp_size 2 to 1", found), found


PLANS = {"aria_text": "packed_rowwise, colwise", "inkling2_text": "colwise, rowwise"}


@pytest.mark.parametrize("kind", PLANS)
def test_experts_that_tensor_parallelism_shards_in_another_way_get_no_adapters(kind: str) -> None:
    """Inkling-2 lost 7e-5 of its loss silently; Llama-4, Aria and LongCat ended in an error."""
    architecture = yaml.safe_dump(variants(kind)["default"])
    said = rf"layers.0.mlp.experts are not sharded .*\({PLANS[kind]}\): name linear"
    with pytest.raises(InputError, match=said):
        refuse_adapters(adapters.add_adapters(built(architecture), AdapterConfig()))
    refuse_adapters(adapters.add_adapters(built(architecture), AdapterConfig(["q_proj"])))
    refuse_adapters(adapters.add_adapters(built(MODELS["deepseek_v3"]), AdapterConfig()))
