"""Starting weights: recorded on the meta device, made by owners, equal in every division."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.init import orthogonal_, trunc_normal_

from dist_template.compat.torch import drop_weak_references
from dist_template.errors import InputError
from dist_template.parallel import scatter, starting
from dist_template.parallel.place import build_unsharded
from dist_template.parallel.zero import strategy as zero
from dist_template.text.model.causal_lm import causal_lm, causal_lm_config
from zoo.models import VOCABULARY, configured, variants


class Overridden(nn.Module):
    """Layers whose constructors compute values in many ways."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled = nn.Linear(64, 64)
        self.orthogonal, self.truncated = nn.Linear(32, 32), nn.Linear(64, 64)
        with torch.no_grad():
            nn.init.normal_(self.scaled.weight, std=0.02)
            self.scaled.weight /= 4
            self.scaled.bias.data.fill_(2)
        orthogonal_(self.orthogonal.weight)  # ignores meta tensors, as the next
        trunc_normal_(self.truncated.weight, std=0.5, a=-0.1, b=0.1)
        self.copied = copy.deepcopy(self.scaled)
        self.table = nn.Parameter(torch.tensor([1.0, 2.0]).log())
        self.drawn = nn.Parameter(torch.normal(0.0, 3.0, size=(256,)))
        self.register_buffer("mask", torch.ones(5, 5).tril(), persistent=False)


def test_every_way_to_compute_a_value_is_repeated() -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    made: Any = build_unsharded(Overridden)
    again = build_unsharded(Overridden)
    assert torch.equal(torch.get_rng_state(), state)
    assert made.scaled.weight.std().item() == pytest.approx(0.005, rel=0.1)
    assert (made.scaled.bias == 2).all()
    identity = made.orthogonal.weight @ made.orthogonal.weight.T
    assert torch.allclose(identity, torch.eye(32), atol=1e-5)
    assert 0.09 < made.truncated.weight.abs().max() <= 0.1
    assert torch.equal(made.copied.weight, made.scaled.weight), "copies of a layer are equal"
    assert torch.equal(made.table, torch.tensor([1.0, 2.0]).log())
    assert 2.5 < made.drawn.std() < 3.5
    assert torch.equal(made.mask, torch.ones(5, 5).tril())
    first, second = made.state_dict(), again.state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    torch.manual_seed(4)
    other: Any = build_unsharded(Overridden)
    assert not torch.equal(other.scaled.weight, made.scaled.weight)


class Unusual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        own = torch.Generator().manual_seed(1)
        self.drawn = nn.ParameterList(torch.randn(4, generator=own) for _ in range(2))
        torch.set_default_dtype(torch.float64)
        self.register_buffer("table", torch.arange(3) / 3)
        torch.set_default_dtype(torch.float32)
        self.register_buffer("column", torch.full((4, 2), 1j).imag[:, 0])


def test_a_tensor_does_not_depend_on_those_before_it() -> None:
    start: Any = starting.start_of(Unusual, lambda model: model, 3)
    for name, expected in reversed([*tensors(Unusual()).items()]):
        assert torch.equal(start.make([name])[name], expected), name
    assert torch.equal(tensors(build_unsharded(Unusual))["column"], torch.ones(4))


@pytest.mark.parametrize(
    "read", [lambda x: x.max().item(), lambda x: x.max().numpy(), lambda x: [x.max()]]
)
def test_a_constructor_that_reads_or_hides_values_builds_in_full(read: Any) -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.largest = read(self.linear.weight.detach())

    with pytest.warns(UserWarning, match="each rank builds it in full"):
        model: Any = build_unsharded(Reads)
    assert read(model.linear.weight.detach()) == model.largest
    with pytest.raises(InputError, match="weight has no shape before the first batch"):
        build_unsharded(lambda: nn.LazyLinear(3))


def test_a_parameter_without_starting_values_is_named() -> None:
    class Scaled(nn.Linear):
        def reset_parameters(self) -> None:
            nn.init.ones_(self.bias)

    with pytest.warns(UserWarning, match="weight has no starting values: write them in build_m"):
        build_unsharded(lambda: Scaled(3, 3))


def test_zero_gives_an_lstm_memory() -> None:
    with torch.device("meta"):
        lstm = nn.LSTM(3, 3)
    drop_weak_references(lstm)
    for parameter in lstm.parameters():
        zero._allocate(parameter, torch.device("cpu"))
    assert lstm(torch.ones(1, 3))[0].shape == (1, 3)


def test_a_model_above_host_memory_is_refused_before_it_is_allocated(monkeypatch: Any) -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)
            self.other = torch.ones(3)  # neither a parameter nor a buffer

    with pytest.warns(UserWarning, match="each rank builds it in full"):
        build_unsharded(Sparse)
    monkeypatch.setattr(starting, "memory_limit", lambda: 64 * 64 * 4)
    with pytest.raises(InputError, match="nor a buffer.*, and 0.0 GiB do not fit this machine's"):
        build_unsharded(Sparse)
    for read in (lambda x: x.data[0].zero_().max().item(), lambda x: x.to(torch.complex64).conj()):
        with pytest.raises(InputError, match="0.0 GiB do not fit this machine's memory"):
            build_unsharded(lambda read=read: read(nn.Linear(64, 64).weight))


def tensors(model: nn.Module) -> dict[str, Tensor]:
    named = dict(model.named_parameters(remove_duplicate=False))
    return named | dict(model.named_buffers(remove_duplicate=False))


KINDS = "apertus gpt2 kimi_linear modernbert-decoder openai-gpt qwen3_moe rwkv".split()


@pytest.mark.parametrize("kind", KINDS)
def test_weights_have_the_distribution_of_transformers(kind: str) -> None:
    """Tied weights, values computed by constructors, layers of its own."""
    config = configured(variants(kind)["default"])
    torch.manual_seed(5)
    expected = tensors(causal_lm(copy.deepcopy(config), None, 257))
    made = tensors(build_unsharded(lambda: causal_lm(config, None, 257)))
    assert made.keys() == expected.keys()
    for name, values in expected.items():
        values, found = values.double(), made[name].double()
        assert found.shape == values.shape
        if values.std() == 0:
            assert torch.equal(found, values), name
        elif values.numel() >= 16:
            chance = 5 / values.numel() ** 0.5
            assert abs(found.std() / values.std() - 1) < chance, name
            assert abs(found.mean() - values.mean()) < 2 * chance * values.std(), name


def published(kind: str, folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model: Any = causal_lm(configured(variants(kind)["default"]), None, 257)
    model.save_pretrained(folder, max_shard_size="100KB")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def loaded(folder: Path, vocab_size: int = 257) -> Any:
    config = causal_lm_config({}, str(folder), None, VOCABULARY)
    return build_unsharded(lambda: causal_lm(config, str(folder), vocab_size))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["deepseek_v3", "diffllama", "gpt2", "llama", "mixtral"])
def test_published_weights_are_those_of_from_pretrained(kind: str, tmp_path: Path) -> None:
    """Several files, stacked experts, tied layers."""
    expected = tensors(published(kind, tmp_path))
    assert len([*tmp_path.glob("*.safetensors")]) > 1
    found = tensors(loaded(tmp_path))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_new_tokens_start_from_the_mean(tmp_path: Path, capsys: Any) -> None:
    rows = published("llama", tmp_path).get_input_embeddings().weight
    found = loaded(tmp_path, 300).get_input_embeddings().weight
    assert len(found) == 300 and torch.equal(found[:257], rows)
    assert torch.allclose(found[257:], rows.mean(0).expand(43, -1), atol=1e-4)
    assert len({*map(tuple, found[257:].tolist())}) == 43
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_missing_weights_are_named_and_damaged_files_refused(tmp_path: Path, capsys: Any) -> None:
    published("gpt2", tmp_path / "a").save_pretrained(tmp_path / "b")
    file, name = tmp_path / "b" / "model.safetensors", "transformer.h.0.attn.c_attn.weight"
    weights = load_file(file)
    first = weights.pop(name)
    save_file(weights, file, {"format": "pt"})
    loaded(tmp_path / "b")
    assert f"has no {name} (1 such tensors)" in capsys.readouterr().out
    save_file(weights | {name: first[:7]}, file, {"format": "pt"})
    with pytest.raises(InputError, match=rf"its {name} is \(7, "):
        loaded(tmp_path / "b")
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(InputError, match="cannot be loaded: model.safetensors: "):
        loaded(tmp_path / "b")
    index = tmp_path / "a" / "model.safetensors.index.json"
    index.write_text("{}")
    with pytest.raises(InputError, match="index.json has no weight_map of tensors and files"):
        loaded(tmp_path / "a")


def test_pieces_are_the_bytes_in_order() -> None:
    parts = [torch.arange(size, dtype=torch.uint8) for size in (5, 1, 12)]
    pieces = scatter.pieces(parts, 4)
    assert [sum(map(len, piece)) for piece in pieces] == [4, 4, 4, 4, 2]
    assert torch.equal(torch.cat(sum(pieces, [])), torch.cat(parts))
