"""One ONNX graph computes prompts of any number and length, and continues with its cache."""

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

from dist_template import InputError
from dist_template.wings.ship.export import command
from dist_template.wings.ship.export.gate import Gate
from dist_template.wings.ship.export.onnx import OnnxModel, write_onnx
from dist_template.wings.ship.export.trained import Trained, load_trained
from tests import ROOT
from tests.support.adapters import flags as adapter_flags
from tests.support.parity import MODELS
from tests.support.runs import OURS, SMALL_LLAMA, only_run, refused, run
from tests.support.tiers import tiers

SMALL = SMALL_LLAMA.replace("{model_type: llama, ", "").rstrip("}")
DENSE = MODELS["deepseek_v3"].rstrip("}") + ", first_k_dense_replace: 9}"  # of 2 layers
ARCHITECTURES = {
    "llama": SMALL_LLAMA,
    "qwen3": f"{{model_type: qwen3, {SMALL}, head_dim: 16}}",
    "deepseek_v3": MODELS["deepseek_v3"],  # a mixture of experts
    "dense deepseek_v3": DENSE,
    "olmo2": f"{{model_type: olmo2, {SMALL}}}",
}
OTHERS = {  # a sliding window, a recurrent state
    "gemma3": f"{{model_type: gemma3_text, {SMALL}, head_dim: 16, sliding_window: 8}}",
    "mamba": "{model_type: mamba, hidden_size: 32, num_hidden_layers: 2, state_size: 8}",
}


@pytest.fixture
def fitted(flags: list[str], tmp_path: Path) -> Any:
    def fit(architecture: str, *further: str) -> Trained:
        short = ["--trainer.max_steps=2", "--trainer.limit_val_batches=0", *further]
        sizes = (ARCHITECTURES | OTHERS)[architecture]
        short.append(f"--model.architecture={sizes}")
        assert run("fit", *flags, *short) == 0
        return load_trained(str(only_run(tmp_path)), OURS)

    return fit


def exported(tmp_path: Path, *flags: str) -> OnnxModel:
    argv = ["export", str(only_run(tmp_path)), "--to=onnx", f"--output={tmp_path}/out", *flags]
    command.main(argv, OURS)
    return OnnxModel(tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("architecture", tiers(ARCHITECTURES, daily=["deepseek_v3"]))
def test_an_exported_model_gives_the_trained_logits_in_onnxruntime(
    fitted: Any, tmp_path: Path, capsys: Any, architecture: str
) -> None:
    """At shapes that were not exported, in two parts by its cache, and with padding on the left."""
    ours = fitted(architecture).model
    graph = exported(tmp_path)
    printed = capsys.readouterr().out
    assert "onnx, float32, largest difference" in printed and "3 x 20 tokens" in printed
    assert "100.0% of the greedy tokens equal" in printed and "[torch.onnx]" not in printed
    torch.manual_seed(0)
    for rows, length in ((1, 1), (2, 9), (5, 21)):
        tokens = torch.randint(250, (rows, length + 3))
        with torch.no_grad():
            expected = ours(input_ids=tokens).logits
        start = graph(input_ids=tokens[:, :length])
        rest = graph(input_ids=tokens[:, length:], past_key_values=start.past_key_values)
        assert (torch.cat([start.logits, rest.logits], 1) - expected).abs().max() < 1e-5
    padded, mask = torch.randint(250, (2, 9)), torch.ones((2, 9), dtype=torch.long)
    mask[0, :4] = 0
    places = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        alone = ours(input_ids=padded[:1, 4:]).logits
    together = graph(input_ids=padded, attention_mask=mask, position_ids=places)
    assert (together.logits[:1, 4:] - alone).abs().max() < 1e-5
    _check_card(tmp_path / "out", ours)


@pytest.mark.nightly
def test_a_graph_of_one_length_alone_is_refused(
    fitted: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fitted("mamba")
    argv = [str(only_run(tmp_path)), "--to=onnx", f"--output={tmp_path}/out"]
    sentence = "--to onnx: the graph of MambaForCausalLM does not run in onnxruntime ("
    assert sentence in refused("export", argv, capfd) and not (tmp_path / "out").exists()


@pytest.mark.nightly
def test_a_graph_without_a_cache_gives_the_trained_logits(
    fitted: Any, tmp_path: Path, capsys: Any
) -> None:
    ours = fitted("gemma3").model
    graph = exported(tmp_path)
    assert "onnx, float32, without a cache, largest difference" in capsys.readouterr().out
    for rows, length in ((1, 1), (5, 21)):
        tokens = torch.randint(250, (rows, length))
        with torch.no_grad():
            expected = ours(input_ids=tokens).logits
        assert (graph(input_ids=tokens).logits - expected).abs().max() < 1e-5


def _check_card(folder: Path, ours: Any) -> None:
    """Runs the lines of the model card as they are, and compares their logits."""
    card = (folder / "README.md").read_text("utf-8")
    assert "library_name: onnx" in card and "onnx, float32" in card
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    page = (ROOT / "docs" / "evaluate.md").read_text("utf-8")
    assert code in page, "the page has the card's lines"
    found: dict[str, Any] = {}
    before = Path.cwd()
    os.chdir(folder)
    try:
        exec(code, found)
    finally:
        os.chdir(before)
    with torch.no_grad():
        expected = ours(input_ids=torch.tensor([[1, 2, 3]])).logits.numpy()
    assert np.abs(found["logits"] - expected).max() < 1e-5
    weights = (folder / "model.onnx.data").stat().st_size
    assert weights > 4 * 20_000, "weights are beside the graph, whose size is limited to 2 GB"
    assert {"tokenizer.json", "generation_config.json"} <= {each.name for each in folder.iterdir()}
    assert onnxruntime.InferenceSession(folder / "model.onnx").get_inputs()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", tiers(["float16", "int8"], daily=[]))
def test_smaller_weights_are_compared_too(
    fitted: Any, tmp_path: Path, capsys: Any, dtype: str
) -> None:
    fitted("llama")
    exported(tmp_path, f"--dtype={dtype}")
    assert f"onnx, {dtype}, largest difference" in capsys.readouterr().out


@pytest.mark.nightly
def test_adapters_are_merged(flags: list[str], tmp_path: Path, fitted: Any) -> None:
    trained = fitted("llama", *adapter_flags("all-linear"))
    tokens = torch.randint(250, (2, 9))
    with torch.no_grad():
        expected = trained.model(input_ids=tokens).logits
    assert (exported(tmp_path)(input_ids=tokens).logits - expected).abs().max() < 1e-5


@pytest.mark.slow
def test_what_cannot_be_exported_is_one_sentence(
    fitted: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    trained = fitted("llama")
    here, out = str(only_run(tmp_path)), f"--output={tmp_path}/out"
    sentences = {
        "--to=onx": "--to is 'onx': give hf or onnx or safetensors",
        "--to=savedmodel": "give --to onnx, or --to hf and make a program",
        "--to=onnx --dtype=bfloat16": "bfloat16 is not possible with --to onnx: give float32, fl",
        "--dtype=int8": "--dtype int8 is not possible with --to hf: give float32, bfloat16",
    }
    for words, sentence in sentences.items():
        assert sentence in refused("export", [here, out, *words.split()], capfd)
    (folder := tmp_path / "graph").mkdir()
    trained.model.forward = lambda *args, **given: trained.model.no_such_part
    with pytest.raises(
        InputError, match="--to onnx: LlamaForCausalLM cannot be exp.*: give --to hf"
    ):
        write_onnx(trained.model, "float32", folder)
    assert not (tmp_path / "out").exists()


@pytest.mark.nightly
def test_a_graph_of_other_weights_is_refused(fitted: Any, tmp_path: Path) -> None:
    trained = fitted("llama")
    gate, folder = Gate(trained), tmp_path / "out"
    folder.mkdir()
    with torch.no_grad():
        weight = trained.model.model.layers[0].self_attn.o_proj.weight
        weight.copy_(weight.T.clone())
    write_onnx(trained.model, "float32", folder)
    with pytest.raises(InputError, match="its logits differ by up to"):
        gate.check(Trained(OnnxModel(folder), None, str(folder)), "float32")
    with pytest.raises(InputError, match="has an ONNX graph: give a folder of export --to hf"):
        load_trained(str(folder), OURS)


pytestmark = pytest.mark.filterwarnings("ignore")
