"""The module: documents do not see each other, objectives are measured right, no host waits."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from trainer_dev.module import LanguageModule

from tests.support.library import BOUNDS
from tests.support.modules import ARCHITECTURES, TINY, Ops, build
from tests.support.parity import MODELS
from tests.support.runs import logged, only_run, run
from tests.support.tiers import tiers

TWO_STEPS = ["--trainer.max_steps=2", "--trainer.val_check_interval=2", "--model.optim.warmup=0"]
TWO = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
FOUR = {"intermediate_size": 16, "num_local_experts": 4, "num_key_value_heads": 2, "head_dim": 8}
OF_AFMOE = {"num_experts": 4, "num_experts_per_tok": 2, "num_dense_layers": 1}
WITHOUT_POSITIONS = {  # their masks need no positions, by which transformers knows documents
    "gpt_oss": TWO | FOUR | {"model_type": "gpt_oss"},
    "afmoe": TINY | OF_AFMOE | {"model_type": "afmoe"},
    "falcon": TWO | {"model_type": "falcon"},
    "bloom": {"model_type": "bloom", "hidden_size": 16, "n_layer": 2, "n_head": 2},
}


@pytest.mark.parametrize("name", sorted(ARCHITECTURES | WITHOUT_POSITIONS))
def test_packed_documents_do_not_see_each_other(name: str) -> None:
    module = build(architecture=(ARCHITECTURES | WITHOUT_POSITIONS)[name]).eval()
    tokens = torch.randint(1, 50, (4, 16), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(6), torch.arange(10)])
    batch = {"input_ids": tokens, "position_ids": torch.arange(16).expand(4, 16).contiguous()}
    packed = batch | {"position_ids": positions.expand(4, 16).contiguous()}
    alone = {key: value[:, 6:] for key, value in packed.items()}
    places = [start for row in range(4) for start in (16 * row, 16 * row + 6)]
    starts = torch.tensor([*places, 64], dtype=torch.int32)
    with torch.no_grad():
        for bounds in ({}, {BOUNDS: starts}):
            assert torch.allclose(module(packed | bounds)[:, 6:], module(alone), atol=1e-5)
        assert not torch.allclose(module(batch)[:, 6:], module(alone), atol=1e-3)


def smoothed(self: Any, logits: Tensor, labels: Tensor, cross_entropy: Tensor) -> Tensor:
    """Label smoothing and z-loss, as users write them."""
    flat, counted = logits.float().flatten(0, 1), labels.flatten() != -100
    smooth = F.cross_entropy(flat, labels.flatten(), reduction="none", label_smoothing=0.2)
    return smooth + 0.1 * flat.logsumexp(-1).square() * counted


@pytest.mark.slow
@pytest.mark.parametrize("chunk", ["null", "16"])
def test_an_edited_objective_leaves_the_reported_cross_entropy_alone(
    flags: list[str], tmp_path: Path, monkeypatch: Any, chunk: str
) -> None:
    """No step changes a weight, so that both runs measure the same model."""
    sums = LanguageModule.sums

    def with_top_5(self: Any, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hits = (logits.topk(5).indices == labels[..., None]).sum()
        return sums(self, logits, labels) | {"top_5_accuracy": hits}

    flags = [*flags, *TWO_STEPS, "--model.optim.learning_rate=1e-20", "--seed_everything=3"]
    flags.append(f"--model.loss_chunk={chunk}")
    assert run("fit", *flags, "--run.name=plain") == 0
    monkeypatch.setattr(LanguageModule, "loss", smoothed)
    monkeypatch.setattr(LanguageModule, "sums", with_top_5)
    assert run("fit", *flags, "--run.name=edited") == 0
    plain, edited = only_run(tmp_path, "plain"), only_run(tmp_path, "edited")
    for name in ("train/loss", "train/perplexity", "eval/loss", "eval/bits_per_byte"):
        assert logged(edited, name) == pytest.approx(logged(plain, name), rel=1e-6), name
    for split in ("train", "eval"):
        assert logged(edited, f"{split}/objective")[2] > 1.5 * logged(edited, f"{split}/loss")[2]
        one, five = (logged(edited, f"{split}/{n}_accuracy")[2] for n in ("token", "top_5"))
        assert one < five < 1
    norms = [logged(each, "train/grad_norm")[2] for each in (plain, edited)]
    assert norms[1] != pytest.approx(norms[0], rel=0.05), "the objective is trained"


@pytest.mark.slow
@pytest.mark.parametrize("model", tiers(["deepseek_v3", "llama"], daily=["deepseek_v3"]))
def test_only_log_steps_read_the_device(flags: list[str], monkeypatch: Any, model: str) -> None:
    """With every callback that always runs. torch does not dispatch `tolist` on a CPU."""
    off = ["--trainer.limit_val_batches=0", "--trainer.logger=false", "--numerics.on_spike=skip"]
    off += ["--last_checkpoint.every_n_steps=1000", "--numerics.spike_window=8"]
    off += ["--numerics.spike_sigmas=1000"]
    to_list = torch.Tensor.tolist

    def reads(steps: int, every: int) -> int:
        with Ops() as ops, monkeypatch.context() as patched:
            noted = lambda tensor: ops.reads.append("tolist") or to_list(tensor)  # noqa: E731
            patched.setattr(torch.Tensor, "tolist", noted)
            sizes = [f"--trainer.max_steps={steps}", f"--trainer.log_every_n_steps={every}"]
            assert run("fit", *flags, *sizes, *off, f"--model.architecture={MODELS[model]}") == 0
        return len(ops.reads)

    ten, five, longer = reads(20, 10), reads(20, 5), reads(40, 10)
    assert five - ten == 2, "20 steps logged every 5 instead of every 10 read twice more"
    assert longer == five, "as many log steps read as often, whatever the number of steps between"
