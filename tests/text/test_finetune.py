"""Fine-tuning teaches a small model a format; which layers get adapters, and 4-bit layers."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from trainer_dev.module import LanguageModule
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig

from dist_template import AdapterConfig, InputError
from dist_template.model.flops import Size
from dist_template.parallel.mesh.shard import refuse_adapters
from dist_template.strategies import MeshStrategy
from dist_template.text import causal_lm, causal_lm_config
from dist_template.text.model import adapters
from dist_template.text.model.quantize import Linear4bit, dequantize, quantize
from dist_template.wings.rehearse.record import RunRecord
from dist_template.wings.ship.export import command as export
from tests.support import chats
from tests.support.limits import violations_of
from tests.support.parity import MODELS
from tests.support.runs import CONFIGS, OURS, Workers, newest, run
from tests.support.strategies import flags_of
from tests.support.tiers import tiers
from zoo.models import variants

ANSWER = "Aye aye, captain."
COMMON = [
    "--run.report=false",
    "--data.seq_len=128",
    "--data.global_batch_size=8",
    "--data.micro_batch_size=2",
    "--data.validation_share=0.1",
    "--data.test_share=0",
    "--model.sample_tokens=48",
    "--model.optim.learning_rate=0.01",
    "--trainer.max_epochs=-1",
    "--trainer.accelerator=cpu",
    "--trainer.log_every_n_steps=1",
    "--trainer.logger=false",
]


def flags(folder: Path, source: Path, *more: str) -> list[str]:
    return [
        f"--config={CONFIGS}/finetune.yaml",
        f"--data.source.paths=[{source}]",
        f"--model.pretrained={folder}",
        f"--data.tokenizer.path={folder}",
        f"--run.root={folder}/runs",
        f"--data.cache_dir={folder}/cache",
        *COMMON,
        *more,
    ]


def answers(samples: str, step: int) -> list[str]:
    """The generated answers of one validation."""
    part = samples.split(f"--- step {step}\n")[1].split("--- step")[0]
    return [one.split("\n[reference] ")[0] for one in part.split("[answer] ")[1:]]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", tiers(["ddp", "fsdp2"], daily=["fsdp2"]))
def test_a_model_learns_a_format_of_answers(strategy: str, tmp_path: Path, capfd: Any) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = chats.weights(chats.tokenizer(tmp_path / "model"))
    given = flags(model, chats.taught(tmp_path / "chats.jsonl"))
    given += ["--trainer.max_steps=40", "--trainer.val_check_interval=10"]
    assert run("prepare", *given) == 0
    shown = capfd.readouterr().out
    assert f"assistant\n<think>\n\n</think>\n\n[[{ANSWER}<|im_end|>]]\n" in shown
    argv = ["fit", *given, "--trainer.devices=2", *flags_of(strategy)]
    record = Workers(2).run(argv, tmp_path / strategy).check()
    losses = [metrics["eval/loss"] for _, metrics in sorted(record.eval().items())]
    assert losses[-1] < 0.3 * losses[0] and record.loss[40] < 0.3 * record.loss[1]
    assert all("eval/bits_per_byte" not in metrics for metrics in record.eval().values())
    samples = (record.run / "samples.txt").read_text(encoding="utf-8")
    assert samples.count("[reference] Aye aye, captain.<|im_end|>") >= 4
    assert not [answer for answer in answers(samples, 10) if ANSWER in answer]
    assert all(ANSWER in answer for answer in answers(samples, 40)) and answers(samples, 40)

    into = [f"--checkpoint={newest(record.run)}", f"--output={tmp_path}/out"]
    export.main(["export", *given, *into], OURS)
    exported: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer: Any = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template == chats.published("qwen3"), "it serves with this template"
    question = chats.messages(("user", "99: a gnu?"))
    options: Any = {"add_generation_prompt": True, "return_tensors": "pt"}
    options["enable_thinking"] = False  # as in what it has learned from
    prompt = tokenizer.apply_chat_template(question, **options)
    said = exported.generate(**prompt, max_new_tokens=48, do_sample=False)[0]
    assert ANSWER in tokenizer.decode(said[prompt["input_ids"].shape[1] :])


SPANS = {  # a flag of the source: what is shown of the first conversation, and of the sixth
    "train_on=assistant": (
        ["[[Uno.<|im_end|>]]", "14 trained on", "[[Due, ok.<|im_end|>]]"],
        ["((Uno.<|im_end|>))", "5 not by train or weight", "9 trained on"],
    ),
    "train_on=last": (
        ["((Uno.<|im_end|>))", "5 not by train_on", "[[Due, ok.<|im_end|>]]", "9 trained on"],
        ["((Uno.<|im_end|>))", "5 not by train or weight"],
    ),
    "roles=[user]": (
        ["[[One?<|im_end|>]]", "10 trained on", "((Due, ok.<|im_end|>))", "14 not by roles"],
        ["5 not by train or weight", "9 not by roles"],
    ),
}


@pytest.mark.parametrize("flag", SPANS)
def test_prepare_shows_each_kind_of_tokens(flag: str, tmp_path: Path, capfd: Any) -> None:
    """Of the first three conversations, and of the sixth, whose kind the others lack."""
    talk = chats.messages(*chats.TURNS)
    flagged = [*talk[:2], talk[2] | {"weight": 0}, *talk[3:]]
    records = [{"messages": each} for each in (*[talk] * 5, flagged, flagged)]
    source = chats.write(tmp_path / "chats.jsonl", records)
    model = chats.tokenizer(tmp_path / "model", "chatml", chats.UNTAGGED)
    shares = ["--data.validation_share=0", "--data.test_share=0", f"--data.source.{flag}"]
    assert run("prepare", *flags(model, source, *shares), "--data.global_batch_size=2") == 0
    shown = capfd.readouterr().out.split(f"{source}:")[1:]
    assert [each.partition(",")[0] for each in shown] == ["1", "2", "3", "6"]
    for expected, text in zip(SPANS[flag], (shown[0], shown[3]), strict=True):
        assert all(each in text for each in expected), text
        numbers = re.findall(r"(\d+) (?:trained|of|not)", text)
        assert sum(map(int, numbers)) == sum(len(a + b) + 4 for a, b in chats.TURNS)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], RunRecord]:
    """Flags that teach weights without a chat template one with two more tokens; their training."""
    folder = tmp_path_factory.mktemp("base")
    model = chats.weights(chats.tokenizer(folder / "model", "base"))
    template = folder / "own.jinja"
    template.write_text(chats.TAGGED)
    given = flags(model, chats.taught(folder / "chats.jsonl"), f"--data.source.template={template}")
    given += ['--data.tokenizer.special_tokens=["<|im_start|>", "<|im_end|>"]']
    given += ["--data.tokenizer.eos_token=<|im_end|>", "--trainer.max_steps=3"]
    assert run("prepare", *given) == 0
    return given, Workers(1).run(["fit", *given, "--trainer.devices=1"], folder / "one").check()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", tiers("ddp fsdp2 tp zero2 zero3".split(), ["fsdp2", "zero3"]))
def test_embeddings_get_rows_for_new_tokens(strategy: str, base: Any, tmp_path: Path) -> None:
    given, one = base
    more = ["--trainer.devices=2", *flags_of(strategy), f"--run.root={tmp_path}"]
    record = Workers(2).run(["fit", *given, *more], tmp_path / strategy).check()
    (name,) = [name for name in one.start if name.endswith("embed_tokens.weight")]
    assert one.start[name].shape[0] == 256 + 2 + 2, "bytes, the base model's, the two new ones"
    assert torch.equal(record.start[name], one.start[name]), "the new rows equal one process's"
    assert record.loss == pytest.approx(one.loss, rel=1e-5)
    assert (record.end[name][-2:] != one.start[name][-2:]).any(), "they are trained"


def test_all_ranks_sample_and_stop_alike(tmp_path: Path) -> None:
    """Only rank 0 loads weights, and the folder's generation_config.json with them."""
    folder = str(chats.weights(chats.tokenizer(tmp_path / "model")))
    data = SimpleNamespace(vocab_size=259, eos_token_id=9, seq_len=64)
    built: list[Any] = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            config = causal_lm_config({}, folder, None, data)
            built.append(causal_lm(config, folder, data.vocab_size).generation_config.to_dict())
    assert built[0] == built[1] and built[0]["top_k"] == 20
    assert built[0]["eos_token_id"] == [257, 0, 9], "the folder's and the tokenizer's"


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
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
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


@pytest.mark.parametrize("kind", ["rslora", "dora", "none"])
def test_adapters_train_as_those_of_peft(kind: str, tmp_path: Path) -> None:
    """A plain loop of torch with `peft.get_peft_model`: equal losses, gradients and weights."""
    from peft import LoraConfig, get_peft_model

    built().save_pretrained(tmp_path)
    variant: Any = {kind: True} if kind != "none" else {}
    config = AdapterConfig(["q_proj", "o_proj", "up_proj"], rank=5, alpha=7.0, **variant)
    data = SimpleNamespace(vocab_size=257, eos_token_id=0, seq_len=64)
    ours = LanguageModule(pretrained=str(tmp_path), adapter=config).build_on_host(data)
    base = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    variant = {f"use_{kind}": True} if kind != "none" else {}
    targets: Any = config.targets
    options: Any = {"r": 5, "lora_alpha": 7, "target_modules": targets, "task_type": "CAUSAL_LM"}
    peft_config = LoraConfig(**options, **variant)
    theirs: Any = get_peft_model(base, peft_config)
    prefix = "base_model.model."
    expected = {n.removeprefix(prefix): p for n, p in theirs.named_parameters() if p.requires_grad}
    got = {name: p for name, p in ours.named_parameters() if p.requires_grad}
    assert got.keys() == expected.keys()
    assert any("magnitude" in name for name in got) == (kind == "dora")
    torch.manual_seed(5)
    for name, parameter in got.items():
        if "magnitude" in name:  # the norms of the rows of the loaded weights, of each its own
            assert torch.allclose(parameter, expected[name], rtol=1e-6), name
        elif "lora_B" in name:
            parameter.data.normal_(std=0.3)
        expected[name].data.copy_(parameter)
    losses: list[list[float]] = [[], []]
    models = [(ours, got), (theirs, expected)]
    optimizers = [torch.optim.SGD(each.values(), lr=0.5) for _, each in models]
    for step in range(3):
        tokens = torch.arange(step, step + 26).view(2, 13) * 9 % 257
        for i, (model, _) in enumerate(models):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            losses[i].append(loss.item())
            optimizers[i].zero_grad()
            loss.backward()
        for name, parameter in got.items():
            gradient, known = parameter.grad, expected[name].grad
            assert gradient is not None and known is not None and known.abs().max() > 0
            assert torch.allclose(gradient, known, rtol=1e-6, atol=1e-7), name
        for optimizer in optimizers:
            optimizer.step()
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert losses[0][2] != losses[0][0]


@pytest.mark.parametrize(("key", "value"), [("quantize", "nf4"), ("dora", True)])
def test_four_bits_and_dora_with_tensor_parallelism_are_refused(key: str, value: Any) -> None:
    module = LanguageModule(adapter=AdapterConfig(**{key: value}))
    (found,) = violations_of(MeshStrategy(tp_size=2), module=module)
    assert re.search(f"{key} does not work with tensor parallelism: .*tp_size 2 to 1", found), found


def test_dora_of_stacked_experts_is_refused_by_their_names() -> None:
    model = built(MODELS["deepseek_v3"])
    with pytest.raises(InputError, match=r"dora true .*\(down_proj, gate_up_proj\): set it to fal"):
        adapters.add_adapters(model, AdapterConfig(dora=True))
    adapters.add_adapters(model, AdapterConfig(["o_proj"], dora=True))


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
