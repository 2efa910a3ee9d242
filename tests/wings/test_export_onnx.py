"""One ONNX graph computes prompts of any number and length, goes on with its cache, and allows padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dist_template import InputError
from dist_template.wings.ship.export import command
from dist_template.wings.ship.export.onnx import write_onnx
from tests.support.parity import MODELS
from tests.support.runs import OURS, SMALL_LLAMA, only_run, run
from tests.support.tiers import NIGHTLY, tiers
from tests.support.wings import Gate, Trained, load_trained

pytestmark = pytest.mark.slow
ARCHITECTURES = {
    "llama": SMALL_LLAMA,
    "qwen3": SMALL_LLAMA.replace("llama", "qwen3").replace("}", ", head_dim: 16}"),
    "deepseek_v3": MODELS["deepseek_v3"],
}


@pytest.fixture
def fitted(flags: list[str], tmp_path: Path) -> Any:
    def fit(architecture: str) -> Trained:
        short = ["--trainer.max_steps=2", "--trainer.limit_val_batches=0"]
        assert run("fit", *flags, *short, f"--model.architecture={ARCHITECTURES[architecture]}") == 0
        return load_trained(str(only_run(tmp_path)), OURS)

    return fit


def exported(tmp_path: Path, *flags: str) -> Trained:
    command.main(["export", str(only_run(tmp_path)), "--to=onnx", f"--output={tmp_path}/out", *flags], OURS)
    return load_trained(str(tmp_path / "out"), OURS)


@pytest.mark.parametrize("architecture", tiers(ARCHITECTURES, daily=["deepseek_v3"]))
def test_its_logits_are_torchs(fitted: Any, tmp_path: Path, capsys: pytest.CaptureFixture, architecture: str) -> None:
    trained = fitted(architecture)
    found = exported(tmp_path)
    printed = capsys.readouterr().out
    assert "onnx, float32, largest difference" in printed and "100.0% of the greedy tokens equal" in printed
    assert "[torch.onnx]" not in printed
    ours, onnx = trained.model, found.model
    assert found.tokenizer.decode([72, 105]) == "Hi"
    for rows, length in ((1, 1), (1, 7), (3, 20)):
        tokens = torch.randint(250, (rows, length + 3))
        with torch.no_grad():
            expected = ours(input_ids=tokens).logits
        start = onnx(input_ids=tokens[:, :length])
        rest = onnx(input_ids=tokens[:, length:], past_key_values=start.past_key_values)
        assert (torch.cat([start.logits, rest.logits], 1) - expected).abs().max() < 1e-5
    padded, mask = torch.randint(250, (2, 9)), torch.ones((2, 9), dtype=torch.long)
    mask[0, :4] = 0
    places = (mask.cumsum(1) - 1).clamp(min=0)
    alone = ours(input_ids=padded[:1, 4:]).logits
    together = onnx(input_ids=padded, attention_mask=mask, position_ids=places).logits[:1, 4:]
    assert (together - alone).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [pytest.param(dtype, marks=NIGHTLY) for dtype in ("float16", "int8")])
def test_smaller_weights_are_judged_by_their_loss(
    fitted: Any, tmp_path: Path, capsys: pytest.CaptureFixture, dtype: str
) -> None:
    fitted("llama")
    exported(tmp_path, f"--dtype={dtype}")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "nats per token" in line]
    loss = float(line.split("loss ")[1].split()[0])
    assert abs(loss) < 0.05
    assert (
        f"onnx, {dtype}" in (tmp_path / "out/README.md").read_text()
        and line.split(", ", 2)[2] in (tmp_path / "out/README.md").read_text()
    )


def test_a_graph_of_other_weights_is_refused(fitted: Any, tmp_path: Path) -> None:
    trained = fitted("llama")
    gate, folder = Gate(trained), tmp_path / "out"
    trained.tokenizer.save_pretrained(folder)
    with torch.no_grad():
        weight = trained.model.model.layers[0].self_attn.o_proj.weight
        weight.copy_(weight.T.clone())
    write_onnx(trained.model, "float32", folder)
    with pytest.raises(InputError, match="its logits differ by up to .*, in a graph or model with other layers"):
        gate.check(load_trained(str(folder), OURS), "float32")


def test_a_model_that_the_exporter_cannot_export_is_one_sentence(fitted: Any, tmp_path: Path) -> None:
    trained = fitted("llama")
    forward = trained.model.forward
    trained.model.forward = lambda *args, **given: forward(*args, **given) if torch.rand(1) < 2 else 1 / 0
    (tmp_path / "out").mkdir()
    with pytest.raises(InputError, match="--to onnx cannot export LlamaForCausalLM: .*; give hf") as error:
        write_onnx(trained.model, "float32", tmp_path / "out")
    assert "\n" not in str(error.value)
