"""`rehearse` fails on what it is there to find, and points at it. A check that cannot fail proves nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ..tools.rehearse import main
from . import faults
from .conftest import CONFIGS

SMALL = "{model_type: llama, hidden_size: 64, num_attention_heads: 8, num_key_value_heads: 8, num_hidden_layers: 4}"


def rehearse(fault: Callable[[], None], strategy: str, only: str, folder: Path, capsys: pytest.CaptureFixture) -> str:
    """What `rehearse` prints on a project with `fault` in it; it must fail."""
    flags = [f"--config={CONFIGS}/quickstart.yaml", f"--config={CONFIGS}/strategy/{strategy}.yaml"]
    flags += [f"--model.architecture={SMALL}", f"--output={folder / 'rehearsal'}", f"--only={only}", "--steps=6"]
    with pytest.raises(SystemExit) as stopped:
        main(["rehearse", *flags], prelude=fault)
    assert stopped.value.code == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "1 of 2 checks FAILED" in printed  # the real sizes fit; what is planted does not
    return printed


def test_a_loss_averaged_per_rank_is_found(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    printed = rehearse(faults.loss_per_rank, "ddp", "one big batch", tmp_path, capsys)
    assert "from step 1 on" in printed
    assert "every module's output agrees and all gradients differ" in printed
    assert "tokens_per_micro_batch" in printed


@pytest.mark.slow
def test_a_layer_that_fsdp_leaves_out_is_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    printed = rehearse(faults.layer_outside_of_fsdp, "fsdp2", "ranks agree", tmp_path, capsys)
    assert "layers.1.mlp.gate_proj.weight on rank 1 differs from rank 0's after step 1" in printed
    assert "its gradient is not reduced" in printed


def test_a_layer_left_out_of_the_tensor_parallel_plan_is_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    fault = faults.layer_outside_of_the_tensor_parallel_plan
    printed = rehearse(fault, "tp", "ranks agree", tmp_path, capsys)
    assert "in the forward pass of model.model.layers.0.mlp.down_proj" in printed


@pytest.mark.slow
def test_a_gradient_that_is_counted_twice_is_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    printed = rehearse(faults.gradients_reduced_twice, "tp", "each gradient", tmp_path, capsys)
    assert "1 of 21 parameters differ" in printed
    assert "first in model.model.layers.1.input_layernorm.weight" in printed


def test_a_sampler_that_repeats_is_found(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    printed = rehearse(faults.repeating_sampler, "ddp", "samples once", tmp_path, capsys)
    assert "step 1 of rank 1 repeats a sample of step 1 of rank 0" in printed


@pytest.mark.slow
def test_a_parameter_without_a_seed_is_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    printed = rehearse(faults.unseeded_parameter, "ddp", "starting weights", tmp_path, capsys)
    assert "first in model.model.norm.weight" in printed


@pytest.mark.slow
def test_dropout_that_begins_anew_after_a_resume_is_found(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    printed = rehearse(faults.random_state_not_saved, "ddp", "kill and resume", tmp_path, capsys)
    assert "from step 3 on: rank 0 resumes step 3 with another random state, so dropout is drawn anew" in printed


@pytest.mark.slow
def test_a_buffer_that_differs_by_rank_is_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    printed = rehearse(faults.buffer_by_rank, "fsdp2", "ranks agree", tmp_path, capsys)
    assert "temperature on rank 1 differs from rank 0's before the first step" in printed
