"""Adapters of a model: which layers get one, what is refused, and the 4-bit layers."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from trainer_dev.data import DataModule
from trainer_dev.module import LanguageModule
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

from dist_template import AdapterConfig, InputError, OptimConfig
from dist_template.model.flops import Size
from dist_template.parallel.shard import refuse_adapters
from dist_template.strategies import MeshStrategy
from dist_template.text.model import adapters
from dist_template.text.model.quantize import Linear4bit, dequantize
from tests.support.library import Machine, optim, quantize, violations
from tests.support.parity import MODELS
from tests.support.runs import run
from zoo.models import variants

LLAMA = "{model_type: llama, hidden_size: 128, intermediate_size: 192, num_hidden_layers: 1, num_attention_heads: 2}"


def built(architecture: str = LLAMA) -> Any:
    torch.manual_seed(0)
    fields = yaml.safe_load(architecture)
    fields |= {"vocab_size": 257, "max_position_embeddings": 64}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))


def trainable(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_all_linear_means_every_projection_and_the_experts() -> None:
    names = trainable(adapters.add_adapters(built(MODELS["deepseek_v3"]), AdapterConfig()))
    adapted = {name.split(".lora_")[0].rpartition(".")[2] for name in names}
    attention = {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}
    assert adapted == attention | {"experts", "base_layer"}  # the wrappers of the two stacked parameters


@pytest.mark.parametrize(
    ("architecture", "adapted"),
    [
        # Its router derives from nn.Linear and returns a tuple, to which no adapter's output can be added.
        ("{model_type: llama4_text, num_local_experts: 2, head_dim: 8, pad_token_id: 0, num_key_value_heads: 2}", 4),
        ("{model_type: falcon}", 4),  # of a class of its own
        # A convolution's 3-D weight is no stack of experts, for which w1, w2 and w3 would have no adapter.
        ("{model_type: lfm2, layer_types: [conv], num_key_value_heads: 2}", 5),
        ("{model_type: gpt2, n_embd: 16}", 3),  # linear layers of a class of transformers' own; c_proj is there twice
        # Weights of three dimensions in one matrix's place, of a gate's heads, and of a mixer's, are no experts either.
        ("{model_type: rwkv, attention_hidden_size: 16, num_hidden_layers: 2}", 4),
        ("{model_type: recurrent_gemma, num_key_value_heads: 2, lru_width: 16, block_types: [recurrent]}", 6),
        # Mamba's kernels take the weights of out_proj and dt_proj without their adapters.
        ("{model_type: mamba2, num_heads: 4, head_dim: 8, n_groups: 1}", 1),
        ("{model_type: mamba, state_size: 4}", 2),
    ],
)
def test_all_linear_means_layers_that_compute_as_one(architecture: str, adapted: int) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = adapters.add_adapters(built(yaml.safe_dump(sizes | yaml.safe_load(architecture))), AdapterConfig(rank=2))
    names = {name.split(".lora_")[0].rpartition(".")[2] for name in trainable(model)} - {"experts", "base_layer"}
    assert len(names) == adapted
    assert model(torch.arange(8)[None], use_cache=False).logits.isfinite().all()


def test_the_optimizer_gets_what_is_trained() -> None:
    config = AdapterConfig(targets=["layers.0.self_attn.q_proj"], trainable=["norm", "lm_head"])
    model = adapters.add_adapters(built(), config)
    path = "model.layers.0.self_attn.q_proj.lora"
    expected = {f"{path}_A.default.weight", f"{path}_B.default.weight", "model.norm.weight", "lm_head.weight"}
    assert trainable(model) == expected
    optimizer = optim.build_optimizer(model, OptimConfig())
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(expected)


@pytest.mark.parametrize("architecture", [LLAMA, MODELS["deepseek_v3"]], ids=["llama", "deepseek_v3"])
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
    assert packed.in_4_bits == sum(2 * m.weight.numel() for m in model.modules() if isinstance(m, Linear4bit))


def test_a_skeleton_has_the_tensors_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks build on the meta device, with 4-bit layers too, and quantize nothing."""
    config, kinds = AdapterConfig(), []
    for device in ("cpu", "meta"):
        if device == "meta":
            monkeypatch.setattr("bitsandbytes.functional.quantize_4bit", None)
        with torch.device(device):
            model = adapters.add_adapters(built(), config)
            quantize(model)
        tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        kinds.append({name: (tensor.shape, tensor.dtype, tensor.requires_grad) for name, tensor in tensors.items()})
    assert kinds[0] == kinds[1]


def test_four_bit_layers_have_the_values_that_transformers_gives_them(tmp_path: Path) -> None:
    """So that an exported adapter finds the base on which it was trained."""
    model = built()
    model.save_pretrained(tmp_path)
    settings = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32, **settings)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=quantization, dtype=torch.float32)
    tokens = torch.arange(60).view(2, 30)
    full = model(tokens).logits
    model.requires_grad_(False)
    quantize(model)
    embedded = model.get_input_embeddings()(tokens).requires_grad_()  # in evaluation theirs computes in bfloat16
    logits = model(inputs_embeds=embedded).logits
    assert torch.equal(logits, theirs.train()(inputs_embeds=embedded).logits)
    assert 0.01 < (logits - full).abs().max() < 1
    packed = sum(p.numel() * p.element_size() for n, p in model.named_parameters() if "proj" in n)
    assert packed == pytest.approx((0.5 + 1 / 64) * (4 * 128**2 + 3 * 128 * 192))
    dequantize(model)
    assert torch.equal(model(inputs_embeds=embedded).logits, logits)


REFUSED = {
    "no such layer": ("targets=[q_prj]", "targets has 'q_prj', .* the nearest names: q_proj"),
    "the output layer": ("targets=[lm_head]", "targets has 'lm_head', which"),
    "no target": ("targets=[]", "model.adapter: No `target_modules`"),
    "no such module": ("trainable=[nrm]", "trainable has 'nrm', .* the nearest names: norm"),
    "no rank": ("rank=0", "model.adapter.rank is 0; give 1 to 65,536"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_configuration_error_is_one_sentence(case: str, flags: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    key, sentence = REFUSED[case]
    assert run("fit", *flags, f"--model.adapter.{key}") == 2
    error = capfd.readouterr().err
    assert error.count("\n") == 1, error
    assert re.search(sentence, error), error


@pytest.mark.parametrize(("key", "value"), [("quantize", "nf4"), ("dora", True)])
def test_four_bits_and_dora_with_tensor_parallelism_are_refused(key: str, value: Any) -> None:
    module, strategy = LanguageModule(adapter=AdapterConfig(**{key: value})), MeshStrategy(tp_size=2)
    trainer: dict[str, Any] = {"strategy": strategy, "max_steps": 1000}
    (found,) = violations(Machine("cuda", 8), trainer, module, DataModule(), trains=False)
    assert re.search(f"{key} does not work with tensor parallelism: .*tp_size 2 to 1", found), found


def test_dropout_of_experts_and_another_kind_of_model_are_refused() -> None:
    with pytest.raises(InputError, match="model.adapter: .*lora_dropout"):
        adapters.add_adapters(built(MODELS["deepseek_v3"]), AdapterConfig(dropout=0.1))
    with pytest.raises(InputError, match="needs a model of transformers, not Linear"):
        adapters.add_adapters(nn.Linear(2, 2), AdapterConfig())


PLANS = {"aria_text": "packed_rowwise, colwise", "inkling2_text": "colwise, rowwise"}


@pytest.mark.parametrize("kind", PLANS)
def test_experts_that_tensor_parallelism_shards_in_another_way_get_no_adapters(kind: str) -> None:
    """Inkling-2 lost 7e-5 of its loss without a word; Llama-4, Aria and LongCat ended in an error."""
    architecture = yaml.safe_dump(variants(kind)["default"])
    with pytest.raises(InputError, match=rf"layers.0.mlp.experts are not sharded .*\({PLANS[kind]}\): name linear"):
        refuse_adapters(adapters.add_adapters(built(architecture), AdapterConfig()))
    refuse_adapters(adapters.add_adapters(built(architecture), AdapterConfig(["q_proj"])))
    refuse_adapters(adapters.add_adapters(built(MODELS["deepseek_v3"]), AdapterConfig()))


def test_a_model_without_linear_layers_is_refused() -> None:
    with pytest.raises(InputError, match="LlamaForCausalLM has neither linear layers nor"):
        adapters.add_adapters(built(LLAMA.replace("layers: 1", "layers: 0")), AdapterConfig())


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for package, act in (
        ("peft", lambda: adapters.add_adapters(built(), AdapterConfig())),
        ("bitsandbytes", quantize_all),
    ):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(InputError, match=rf"needs the package {package}: pip install 'dist-template\[adapters\]'"):
            act()


def quantize_all() -> None:
    quantize(built().requires_grad_(False))
