"""A checkpoint of any strategy is read whole by one process, and nothing in it runs."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from dist_template.checkpoint.formats import format_of, read_full
from dist_template.checkpoint.optimizer import by_name, numbered
from dist_template.cli.run import check_checkpoint
from dist_template.errors import InputError

REST = {"global_step": 2, "loops": {"fit_loop": {}}, "DataModule": {"consumed_samples": 16}}
NAMES = [["second.weight", "first.weight"], ["first.bias", "second.bias"]]  # of the two parameter groups


class Tiny(nn.Module):
    """Odd sizes, so that no number of ranks divides them, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 7)
        self.register_buffer("counts", torch.arange(3))


@pytest.fixture
def trained() -> tuple[Tiny, torch.optim.AdamW]:
    """A model and its optimizer after two steps."""
    torch.manual_seed(0)
    model = Tiny()
    optimizer = build_optimizer(model)
    step(model, optimizer)
    step(model, optimizer)
    return model, optimizer


def build_optimizer(model: Tiny) -> torch.optim.AdamW:
    """In groups of another order than the model's; fused, as in training."""
    parameters = dict(model.named_parameters())
    decays = (0.1, 0.0)
    groups = [{"params": [parameters[n] for n in g], "weight_decay": d} for g, d in zip(NAMES, decays, strict=True)]
    return torch.optim.AdamW(groups, lr=0.01, fused=True)


def step(model: Tiny, optimizer: torch.optim.AdamW) -> None:
    optimizer.zero_grad()
    model.second(model.first(torch.ones(2, 3))).square().sum().backward()
    optimizer.step()


def write_file(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    names = {"parameter_names": [sum(NAMES, [])]}
    torch.save({"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()], **names, **REST}, path)


def write_distributed(path: Path, weights: dict[str, Tensor], state: dict[str, Any], rest: dict[str, Any]) -> None:
    """As MeshStrategy does: torch's flattened optimizer state, and Lightning's rest in meta.pt."""
    flat = {f"state.{n}.{key}": value for n, values in state["state"].items() for key, value in values.items()}
    for group in state["param_groups"]:
        settings = {key: value for key, value in group.items() if key != "params"}
        flat |= {f"param_groups.{n}.{key}": value for n in group["params"] for key, value in settings.items()}
    dcp.save({"state_dict": weights, "optimizer_0": flat}, checkpoint_id=path, no_dist=True)
    torch.save(rest, path / "meta.pt")


def write_zero(path: Path, model: nn.Module, state: dict[str, Any], stage: int, ranks: int = 2) -> None:
    """As DeepSpeed does on two ranks; ZeRO-1 and 2 cut a group's flat tensor, ZeRO-3 each parameter, both padded."""
    weights, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    shapes = [{name: weights[name].shape for name in group} for group in NAMES]

    def cut(tensors: list[Tensor]) -> list[Tensor]:
        if stage < 3:
            flat = torch.cat([t.detach().flatten() for t in tensors])
            return list(nn.functional.pad(flat, (0, -len(flat) % (2 * ranks))).chunk(ranks))
        padded = [nn.functional.pad(t.detach().flatten(), (0, -t.numel() % ranks)).chunk(ranks) for t in tensors]
        return [torch.cat(parts) for parts in zip(*padded, strict=True)]

    moments = [{k: cut([state["state"][n][k] for n in g]) for k in ("exp_avg", "exp_avg_sq")} for g in NAMES]
    masters = [cut([weights[n] for n in g]) for g in NAMES]
    groups = [g | {"params": [number]} for number, g in enumerate(state["param_groups"])]
    (path / "checkpoint").mkdir(parents=True)
    (path / "latest").write_text("checkpoint")
    for rank in range(ranks):
        flat = {n: {k: v[rank] for k, v in m.items()} | {"step": torch.tensor(2.0)} for n, m in enumerate(moments)}
        base, fp32 = {"state": flat, "param_groups": groups}, [parts[rank] for parts in masters]
        if stage < 3:
            own = {"single_partition_of_fp32_groups": fp32, "base_optimizer_state": base, "partition_count": [ranks, 1]}
        else:
            own = {"fp32_flat_groups": fp32, "optimizer_state_dict": base, "partition_count": ranks}
        name = f"zero_pp_rank_{rank}_mp_rank_00"
        torch.save({"optimizer_state_dict": own}, path / f"checkpoint/{name}_optim_states.pt")
        module = {n: (t if n in buffers else t.detach().to(torch.bfloat16)) for n, t in model.state_dict().items()}
        if stage == 3:
            module = {n: (t if n in buffers else torch.empty(0)) for n, t in module.items()}
        common = {"module": module, "buffer_names": list(buffers), "param_shapes": shapes, "shared_params": {}, **REST}
        torch.save(common, path / f"checkpoint/{'mp_rank_00' if stage < 3 else name}_model_states.pt")


@pytest.fixture(params=["file", "distributed", "zero2", "zero3"])
def checkpoint(request: pytest.FixtureRequest, trained: tuple[Tiny, torch.optim.AdamW], tmp_path: Path) -> Path:
    model, optimizer = trained
    path, state = tmp_path / "last.ckpt", by_name(optimizer.state_dict(), sum(NAMES, []))
    if request.param == "file":
        write_file(path, model, optimizer)
    elif request.param == "distributed":
        write_distributed(path, model.state_dict(), state, REST)
    else:
        write_zero(path, model, state, int(request.param[-1]))
    return path


# ---- reading -------------------------------------------------------------------------------------------------------


def test_every_format_reads_as_the_same_weights_moments_and_counters(
    checkpoint: Path, trained: tuple[Tiny, torch.optim.AdamW]
) -> None:
    full = read_full(checkpoint)
    assert {key: full[key] for key in REST} == REST
    for name, tensor in trained[0].state_dict().items():
        assert torch.equal(full["state_dict"][name], tensor) and full["state_dict"][name].dtype == tensor.dtype, name

    (state,) = full["optimizer_states"]
    back = numbered(state, NAMES, trained[1].param_groups)
    expected = trained[1].state_dict()
    assert [g["params"] for g in back["param_groups"]] == [[0, 1], [2, 3]]
    assert [g["weight_decay"] for g in back["param_groups"]] == [0.1, 0.0]
    for number, values in expected["state"].items():
        for key, value in values.items():
            assert torch.equal(back["state"][number][key], value), (number, key)


def test_training_goes_on_as_if_it_had_not_stopped(checkpoint: Path, trained: tuple[Tiny, torch.optim.AdamW]) -> None:
    full = read_full(checkpoint)
    model = Tiny()
    model.load_state_dict(full["state_dict"])
    optimizer = build_optimizer(model)
    optimizer.load_state_dict(numbered(full["optimizer_states"][0], NAMES, optimizer.param_groups))
    for _ in range(2):
        step(model, optimizer)
        step(*trained)
    for name, tensor in trained[0].state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


def test_a_parameter_without_saved_moments_is_named(trained: tuple[Tiny, torch.optim.AdamW]) -> None:
    state = by_name(trained[1].state_dict(), sum(NAMES, []))
    del state["state"]["first.bias"]
    assert len(numbered(state, NAMES, trained[1].param_groups)["state"]) == 3, "it had no gradient yet"
    state["param_groups"][1]["params"].remove("first.bias")
    with pytest.raises(InputError, match="no optimizer state for first.bias"):
        numbered(state, NAMES, trained[1].param_groups)


class Touch:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_nothing_in_a_checkpoint_runs(checkpoint: Path, tmp_path: Path) -> None:
    proof = tmp_path / "it ran"
    files = [checkpoint] if checkpoint.is_file() else [*checkpoint.rglob("*.pt"), *checkpoint.glob(".metadata")]
    for file in files:
        before = file.read_bytes()
        if file.name == ".metadata":
            file.write_bytes(pickle.dumps(Touch(proof)))
        else:
            torch.save(torch.load(file) | {"more": Touch(proof)}, file)
        with pytest.raises(InputError, match="cannot be read"):
            read_full(checkpoint)
        assert not proof.exists(), file.name
        file.write_bytes(before)
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ
    read_full(checkpoint)


def test_part_of_a_checkpoint_is_refused(checkpoint: Path) -> None:
    if checkpoint.is_file():
        checkpoint.write_bytes(checkpoint.read_bytes()[:-1000])
    else:
        (checkpoint / ("latest" if format_of(checkpoint) == "zero" else ".metadata")).unlink()
    with pytest.raises(InputError, match="only part of one"):
        check_checkpoint(checkpoint)


def test_a_missing_rank_is_noticed(checkpoint: Path) -> None:
    parts = sorted([*checkpoint.rglob("*_optim_states.pt"), *checkpoint.glob("*.distcp")])
    if parts:
        parts[-1].unlink()
        with pytest.raises(InputError, match="cannot be read"):
            read_full(checkpoint)
    else:
        assert format_of(checkpoint) == "file", "only one file has one part"
