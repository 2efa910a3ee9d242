"""Multi-token prediction by hand and exported; DeepSeek-V3.2, V4 and GLM-5: indexers, routers."""

import re
from collections.abc import Iterator
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor
from trainer_dev.module import LanguageModule
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import MtpModel

from dist_template import InputError
from dist_template.parallel.place import build_unsharded
from dist_template.text.batches.rows import NOT_COUNTED
from dist_template.text.model import mtp, safetensors_files
from dist_template.text.model.head import ChunkedLoss
from dist_template.text.objectives.mtp import ACCEPTED, COMPARED, MtpConfig, MultiToken, look_ahead
from dist_template.wings.rehearse.shrink_model import shrink_architecture
from tests.support.parity import MODELS
from tests.support.runs import refused, small

DATA: Any = SimpleNamespace(vocab_size=211, eos_token_id=1, seq_len=24)
LENGTHS = [[24], [10, 14], [3, 1, 20]]  # of the documents in each row


def build(kind: str, **more: Any) -> Any:
    torch.manual_seed(0)
    architecture = yaml.safe_load(MODELS[kind]) | more
    found: Any = LanguageModule(architecture, mtp=MtpConfig(weight=0.5), loss_chunk=None)
    found.model = mtp.add_modules(found.build_model(DATA))
    found.active_objective = found.objective_for(DATA)
    found.active_objective.attach(found)
    return found


@pytest.fixture
def module() -> Any:
    return build("mtp")


@pytest.fixture
def batch() -> dict[str, Tensor]:
    tokens = torch.randint(2, 211, (3, 25))
    labels, lengths = tokens[:, 1:].clone(), sum(LENGTHS, [])
    labels[0, :5] = NOT_COUNTED
    positions = torch.cat([torch.arange(length) for length in lengths]).view(3, 24)
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    found = {"input_ids": tokens[:, :-1], "labels": labels, "position_ids": positions}
    return found | {"cu_seq_lens": bounds}


def documents(batch: dict[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    for row, lengths in enumerate(LENGTHS):
        tokens, labels = (batch[name][row].split(lengths) for name in ("input_ids", "labels"))
        yield from zip((each[None] for each in tokens), labels, strict=True)


def loss_of(logits: Tensor, labels: Tensor) -> float:
    return F.cross_entropy(logits, labels, ignore_index=NOT_COUNTED, reduction="sum").item()


@torch.no_grad()
def by_hand(model: Any, batch: dict[str, Tensor]) -> tuple[float, float, float]:
    """The model's loss, the modules', and the share of accepted tokens; each document alone."""
    own, ahead, accepted, compared = 0.0, 0.0, 0, 0
    for tokens, labels in documents(batch):
        hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden)[0]
        own, greedy = own + loss_of(logits, labels), logits.argmax(-1)
        for k, layer in enumerate(model.mtp.layers, start=1):
            if tokens.shape[1] <= k:
                break
            given = model.model.embed_tokens(tokens[:, k:])
            hidden, positions = hidden[:, : given.shape[1]], torch.arange(given.shape[1])[None]
            mask = create_causal_mask(model.config, given, None, None, positions)
            rotary = model.model.rotary_emb(given, positions)
            hidden = layer(given, hidden, rotary, mask, positions, None)
            drafted, later = model.lm_head(hidden)[0], labels[k:]
            ahead += loss_of(drafted, later) / len(model.mtp.layers)
            accepted += ((drafted.argmax(-1) == greedy[k:]) & (later != NOT_COUNTED)).sum().item()
            compared += (later != NOT_COUNTED).sum().item()
    return own, ahead, accepted / compared


@pytest.mark.parametrize("chunk", [None, 7])
def test_losses_are_those_of_each_document_alone(
    module: Any, batch: dict[str, Tensor], chunk: int | None
) -> None:
    module.chunked_loss = ChunkedLoss(module.model, module.sums, chunk)
    ahead = look_ahead(batch, 2)
    own, later, share = by_hand(module.model, batch)
    module.train()
    sums = module.sums_of(ahead)
    assert sums["loss"].item() == pytest.approx(own, rel=1e-6)
    assert sums["mtp_loss"].item() == pytest.approx(later, rel=1e-6)
    assert next(iter(sums.values())).item() == pytest.approx(own + 0.5 * later, rel=1e-6)
    sums["objective"].backward()
    assert all(p.grad is not None for p in module.model.mtp.layers[1].eh_proj.parameters())
    with torch.no_grad():
        found = module.sums_of(ahead)
    assert (found[ACCEPTED] / found[COMPARED]).item() == pytest.approx(share)
    assert module(batch).shape == (3, 24, 211), "without them the output is the model's own"


class Doubled(MultiToken):
    """Minimizes twice the cross-entropy."""

    def blend(self, sums: dict[str, Tensor], logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"objective": 2 * sums["loss"], **sums}


@pytest.mark.parametrize("chunk", [None, 7])
def test_a_class_that_derives_from_it_changes_the_loss_of_each_module(
    module: Any, batch: dict[str, Tensor], chunk: int | None
) -> None:
    ahead = look_ahead(batch, 2)
    expected = 2 * module.sums_of(ahead)["objective"].item()
    module.loss_chunk = chunk
    module.active_objective = Doubled(MtpConfig(weight=0.5))
    module.active_objective.attach(module)
    assert module.sums_of(ahead)["objective"].item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kind", ["mtp", "deepseek_v32", "glm_moe_dsa"])
def test_transformers_reads_the_exported_modules(kind: str, tmp_path: Path) -> None:
    trained, tokens = build(kind).model.eval(), torch.randint(2, 211, (1, 12))
    expected = trained(input_ids=tokens, use_cache=False).logits
    weights = {name: tensor.clone() for name, tensor in trained.state_dict().items()}
    safetensors_files.write_weights(trained, dict(weights), torch.float32, "5GB", tmp_path)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(model(input_ids=tokens, use_cache=False).logits, expected)
    # transformers looks for the layer after the 61 of DeepSeek-V3
    model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.[23]\..*"]
    for name, tensor in MtpModel.from_pretrained(model).layers.state_dict().items():
        assert torch.equal(tensor, weights[f"mtp.layers.{name}"]), name


def test_published_modules_are_read(module: Any, tmp_path: Path, capsys: Any) -> None:
    weights = {name: tensor.clone() for name, tensor in module.model.state_dict().items()}
    safetensors_files.write_weights(module.model, dict(weights), torch.float32, "5GB", tmp_path)
    given: Any = LanguageModule(pretrained=str(tmp_path), mtp=MtpConfig())
    for read in (lambda build: build(), build_unsharded):
        found = read(partial(given.build_network, DATA)).state_dict()
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
    assert "note: " not in capsys.readouterr().out
    file = tmp_path / "model.safetensors"
    kept = {name: each for name, each in load_file(file).items() if "layers.3." not in name}
    save_file(kept, file, metadata={"format": "pt"})
    found = build_unsharded(partial(given.build_network, DATA)).state_dict()
    assert torch.equal(*(each["mtp.layers.0.enorm.weight"] for each in (found, weights)))
    assert not torch.equal(*(each["mtp.layers.1.eh_proj.weight"] for each in (found, weights)))
    (note,) = re.findall("note: .*", capsys.readouterr().out)
    assert "later tokens (mtp.layers.1.enorm.weight, 20 in all): they start from random" in note


def test_architectures_without_modules_are_refused(batch: dict[str, Tensor]) -> None:
    with pytest.raises(InputError, match="num_mtp_layers of 1 or more"):
        build("llama")
    MODELS["gpt2"] = "{model_type: gpt2, n_embd: 32, n_head: 2, n_layer: 2}"
    with pytest.raises(InputError, match="builds no modules for GPT2LMHeadModel"):
        build("gpt2", num_mtp_layers=1)
    module = build("deepseek_v4", num_mtp_layers=1)
    with pytest.raises(InputError, match="states of shape .*3, 32.* set model.mtp null"):
        module.sums_of(look_ahead(batch, 1))


def test_a_block_may_return_more_than_hidden_states(batch: dict[str, Tensor]) -> None:
    module = build("glm_moe_dsa")
    module.sums_of(look_ahead(batch, 1))["objective"].backward()
    assert all(p.grad is not None for p in module.model.mtp.layers[0].eh_proj.parameters())


def built(kind: str) -> Any:
    return LanguageModule(yaml.safe_load(MODELS[kind])).build_network(DATA)


@pytest.mark.parametrize("kind", ["deepseek_v32", "deepseek_v4", "glm_moe_dsa", "llama"])
def test_only_what_no_gradient_reaches_is_frozen(kind: str) -> None:
    model = built(kind)
    tokens = torch.randint(2, 211, (2, 24))
    model(input_ids=tokens, use_cache=False).logits.square().sum().backward()
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {name for name, p in model.named_parameters() if p.grad is None}
    assert frozen == {name for name, _ in model.named_parameters() if ".indexer." in name}


def test_hash_routers_spread_tokens_over_all_experts() -> None:
    table = built("deepseek_v4").model.layers[0].mlp.gate.tid2eid
    assert len(table) == 211
    assert (table[:, 0] != table[:, 1]).all(), "a token's experts differ"
    assert table.flatten().bincount(minlength=4).min() > 60, "of 105 on average"


@pytest.mark.parametrize("kind", ["deepseek_v32", "deepseek_v4", "glm_moe_dsa"])
def test_reduced_models_leave_tokens_out_as_the_full_ones_do(kind: str) -> None:
    small = shrink_architecture(CONFIG_MAPPING[kind](), seq_len=32)
    assert small["index_topk"] == 8
    assert all(rate <= 8 for rate in small.get("compress_rates", {}).values())


@pytest.mark.slow
def test_ddp_names_what_gets_no_gradient(
    corpus: Path, cache: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = [*small(corpus, cache, tmp_path), "--trainer.strategy=ddp", "--trainer.logger=false"]
    flags += ["--model.architecture={model_type: bart, is_decoder: true, d_model: 32}"]
    sentence = refused("fit", [*flags, "--trainer.num_sanity_val_steps=0"], capfd)
    assert "DDP needs a gradient of each parameter, and model." in sentence
    assert "ddp_find_unused_parameters_true" in sentence
