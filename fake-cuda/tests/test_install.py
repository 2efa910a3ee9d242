"""`install` says in one sentence why the device cannot work, and what it takes."""

from pathlib import Path

import pytest
import torch
from processes import run

import fake_cuda


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    monkeypatch.setattr(torch, "__version__", f"{fake_cuda.VERIFIED[0]}+cpu")
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return monkeypatch


def sentence() -> str:
    with pytest.raises(fake_cuda.Unsupported) as raised:
        fake_cuda.install()
    assert not fake_cuda.is_installed() and len(str(raised.value).splitlines()) == 1
    return str(raised.value)


def test_another_torch_is_refused(refused: pytest.MonkeyPatch) -> None:
    refused.setattr(torch, "__version__", "2.99.1+cpu")
    assert sentence() == "fake GPUs were verified with torch 2.13.0; this is 2.99.1"


def test_torch_for_real_gpus_is_refused(refused: pytest.MonkeyPatch) -> None:
    refused.setattr(torch.version, "cuda", "13.0")
    assert "need a CPU build of torch, as torch==2.13.0+cpu" in sentence()


def test_a_machine_without_a_compiler_is_told_what_to_install(
    refused: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    refused.setenv("PATH", str(tmp_path))
    assert "install g++ and Python's headers (apt-get install g++ python3-dev)" in sentence()


@pytest.mark.usefixtures("device")
def test_a_cache_that_cannot_be_written_is_named(
    refused: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    refused.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert "which cannot be written (Not a directory): set XDG_CACHE_HOME" in sentence()


@pytest.mark.usefixtures("device")
def test_a_source_that_does_not_compile_is_named(
    refused: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\necho 'error: no header' >&2\nexit 1\n")
    compiler.chmod(0o755)
    refused.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert sentence() == "g++ cannot compile fake GPUs (device.cpp): error: no header"


@pytest.mark.slow
@pytest.mark.usefixtures("device")
def test_a_number_of_devices_that_is_not_possible_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, "-c", "import fake_cuda; fake_cuda.install(gpus=17)")
    assert done.stderr.splitlines()[-1] == "ValueError: gpus is 17; 1 to 16 are possible"


@pytest.mark.slow
@pytest.mark.usefixtures("device")
def test_a_backward_pass_before_the_installation_is_no_obstacle(tmp_path: Path) -> None:
    script = """
import torch
torch.ones(2, requires_grad=True).sum().backward()
import fake_cuda
fake_cuda.install(gpus=2)
weight = torch.ones(2, device="cuda:1", requires_grad=True)
weight.sum().backward()
assert weight.grad.tolist() == [1, 1]
"""
    done = run(tmp_path, "-c", script)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("device")
def test_another_call_sets_devices_and_who_gets_events(tmp_path: Path) -> None:
    script = """
import fake_cuda, torch
fake_cuda.install()
found = []
fake_cuda.install(gpus=3, kernels=False, record=lambda *event: found.append(event) or "")
assert torch.cuda.device_count() == 3 and fake_cuda.is_installed()
(torch.ones(2, device="cuda:2") * 2).tolist()
assert [kind for kind, _, _ in found] == ["SYNC"], found
assert fake_cuda.events() == []
"""
    done = run(tmp_path, "-c", script)
    assert done.returncode == 0, done.stderr
