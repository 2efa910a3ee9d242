"""The module: every shipped architecture learns, loads and is measured right."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch.utils._python_dispatch import TorchDispatchMode

from ..metrics import MetricBuffer
from ..module import SMALL_DEEPSEEK_V3, LanguageModule
from .conftest import CONFIGS, logged, only_run, run
from .test_parallel_parity import MODELS

ARCHITECTURES = {"deepseek_v3": SMALL_DEEPSEEK_V3} | {
    path.stem: yaml.safe_load(path.read_text())["model"]["architecture"] for path in CONFIGS.glob("model/*.yaml")
}


CPU = torch.device("cpu")


class Standalone(LanguageModule):
    """The module with data of fixed size, without a Trainer."""

    @property
    def data(self) -> Any:
        return SimpleNamespace(vocab_size=50, eos_token_id=0, seq_len=16)


def build(seed: int = 0, **options: Any) -> LanguageModule:
    torch.manual_seed(seed)
    module = Standalone(**options)
    module.model = module.build_model(module.data)
    return module


def rows(seed: int = 0) -> dict[str, torch.Tensor]:
    tokens = torch.randint(1, 50, (4, 17), generator=torch.Generator().manual_seed(seed))
    positions = torch.arange(16).expand(4, 16).contiguous()
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:], "position_ids": positions}


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_every_architecture_overfits_one_batch(name: str) -> None:
    module, batch = build(architecture=ARCHITECTURES[name]), rows()
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    losses = []
    for _ in range(40):
        loss = module.loss(module(batch), batch["labels"]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(math.log(50), rel=0.1), "an untrained model knows nothing"
    assert losses[-1] < 1.0


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_packed_documents_do_not_see_each_other(name: str) -> None:
    module, batch = build(architecture=ARCHITECTURES[name]).eval(), rows()
    packed = batch | {"position_ids": torch.cat([torch.arange(6), torch.arange(10)]).expand(4, 16).contiguous()}
    alone = {key: value[:, 6:] for key, value in packed.items()}
    with torch.no_grad():
        assert torch.allclose(module(packed)[:, 6:], module(alone), atol=1e-5)
        assert not torch.allclose(module(batch)[:, 6:], module(alone), atol=1e-3), "the test can tell"


def test_a_local_folder_loads_and_a_larger_vocabulary_gets_rows(tmp_path: Path) -> None:
    saved = build(architecture=ARCHITECTURES["llama"]).eval()
    network: Any = saved.model
    network.save_pretrained(tmp_path)
    loaded = build(seed=1, pretrained=str(tmp_path)).eval()
    with torch.no_grad():
        assert torch.equal(saved(rows()), loaded(rows()))
    wide = SimpleNamespace(vocab_size=60, eos_token_id=0, seq_len=16)
    wider: Any = Standalone(pretrained=str(tmp_path)).build_model(wide)
    assert wider.get_input_embeddings().num_embeddings == wider.get_output_embeddings().out_features == 60


def test_generation_leaves_the_random_state_alone() -> None:
    module = build(architecture=ARCHITECTURES["llama"], sample_tokens=5)
    before = torch.get_rng_state()
    out = module.generate(torch.tensor([[1, 2, 3]]))
    assert out[0, :3].tolist() == [1, 2, 3] and 3 < out.shape[1] <= 8
    assert torch.equal(before, torch.get_rng_state())


def test_evaluation_does_not_depend_on_how_it_is_batched(flags: list[str], tmp_path: Path) -> None:
    for micro in (1, 8):
        flags_micro = [*flags, f"--data.micro_batch_size={micro}", "--trainer.max_steps=2", "--model.optim.warmup=0"]
        assert run("fit", *flags_micro, f"--run.name=m{micro}", "--trainer.val_check_interval=2") == 0
    one, two = (logged(only_run(tmp_path, name), "eval/bits_per_byte")[2] for name in ("m1", "m8"))
    assert one == pytest.approx(two, rel=1e-6)


def test_bits_per_byte_is_the_loss_in_bits_over_the_bytes_of_a_token(flags: list[str], tmp_path: Path) -> None:
    assert run("fit", *flags, "--trainer.max_steps=2", "--trainer.val_check_interval=2", "--model.optim.warmup=0") == 0
    folder = only_run(tmp_path)
    loss, bits = logged(folder, "eval/loss")[2], logged(folder, "eval/bits_per_byte")[2]
    # Byte tokens: one byte each, but for the end-of-document token, which has none.
    assert loss / math.log(2) < bits < 1.02 * loss / math.log(2)


def test_the_buffer_means_over_time_and_ranks_and_empties() -> None:
    buffer = MetricBuffer()
    for value in (1.0, 2.0, 6.0):
        buffer.add("a", torch.tensor(value))
    buffer.add("b", torch.tensor(4.0), weight=3.0)
    buffer.add("b", torch.tensor(8.0))
    buffer.put("host", 7.0)
    two_ranks = buffer.read(lambda t: t + t, CPU)
    assert two_ranks == {"a": 3.0, "b": 5.0, "host": 7.0}
    assert buffer.read(lambda t: t, CPU) == {}


class Reads(TorchDispatchMode):
    """Notes each operation that makes the host wait for the device: it reads a number, or needs one for a shape."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "bincount", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.removeprefix("aten::") in self.WAITING:
            self.seen.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("model", ["deepseek_v3", pytest.param("llama", marks=pytest.mark.slow)])
def test_nothing_reads_the_device_between_log_steps(
    flags: list[str], monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    """With every callback that always runs. `tolist` is the one read that torch does not dispatch on a CPU."""
    off = ["--trainer.limit_val_batches=0", "--trainer.logger=false", "--last_checkpoint.every_n_steps=1000"]
    off += ["--numerics.on_spike=skip", "--numerics.spike_window=8", "--numerics.spike_sigmas=1000"]  # at work too
    to_list = torch.Tensor.tolist

    def reads(steps: int, every: int) -> int:
        with Reads() as reads, monkeypatch.context() as patched:
            patched.setattr(torch.Tensor, "tolist", lambda tensor: reads.seen.append("tolist") or to_list(tensor))
            sizes = [f"--trainer.max_steps={steps}", f"--trainer.log_every_n_steps={every}"]
            assert run("fit", *flags, *sizes, *off, f"--model.architecture={MODELS[model]}") == 0
        return len(reads.seen)

    ten, five, longer = reads(20, 10), reads(20, 5), reads(40, 10)
    assert five - ten == 2, "20 steps logged every 5 instead of every 10 read twice more"
    assert longer == five, "as many log steps read as often, whatever the number of steps between"
