"""`doctor` finds each planted problem, names what to do, and exits with 1."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from trainer_dev.data import DataModule

from dist_template.wings.setup import doctor
from tests.support.runs import OURS, main
from tests.support.wings import free_port

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def where(tmp_path: Path) -> doctor.Where:
    return doctor.Where(tmp_path / "runs", tmp_path / "cache", num_workers=0)


def one(findings: doctor.Findings, verdict: str, found: str = "") -> str:
    """Returns what to do about the one finding that is not ok; its text contains `found`."""
    bad = [finding for finding in findings if verdict == doctor.OK or finding[0] != doctor.OK]
    assert [finding[0] for finding in bad] == [verdict] * len(bad) and bad, bad
    assert any(found in finding[1] for finding in bad), bad
    return bad[0][2]


def test_the_package_lock(where: doctor.Where, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"a-b": "1.0", "torch": "2.13.0+cu130"}
    lock = tmp_path / "constraints.txt"
    where = replace(where, project=tmp_path)
    monkeypatch.setattr(doctor, "packages", lambda: installed)
    lock.write_text("# pins\nA.b==1.0,!=0.9\ntorch==2.13.0\n")
    assert one(doctor.check_packages(where), doctor.OK, "2 as constraints.txt has them") == ""
    lock.write_text("A_b==1.1\ntorch==2.13.0\nnowhere==3\n")
    todo = one(
        doctor.check_packages(where),
        doctor.PROBLEM,
        "2 of 3 differ: A_b 1.0 (locked: 1.1), nowhere missing (locked: 3)",
    )
    assert "pip install" in todo
    lock.unlink()
    one(doctor.check_packages(where), doctor.WARNING, "there is no")


def test_a_blocked_version_is_found(where: doctor.Where, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = replace(where, project=tmp_path)
    assert list(doctor.check_blocked(where)) == []
    (tmp_path / "requirements").mkdir()
    (tmp_path / doctor.BLOCKED).write_text("# why\nA_b!=1.0,!=1.1  # malicious: GHSA-x\n")
    monkeypatch.setattr(doctor, "packages", lambda: {"a-b": "1.1"})
    assert "make setup" in one(doctor.check_blocked(where), doctor.PROBLEM, "A_b 1.1 is blocked: malicious: GHSA-x")
    monkeypatch.setattr(doctor, "packages", lambda: {"a-b": "1.2"})
    assert list(doctor.check_blocked(where)) == []


def test_torch_and_the_driver(where: doctor.Where, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # a training in this process may have set it
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "driver", lambda: "550.54")
    monkeypatch.setattr(torch.version, "cuda", None)
    one(doctor.check_gpus(where), doctor.PROBLEM, "has no CUDA; the driver is 550.54")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "driver for CUDA 13.0" in one(doctor.check_gpus(where), doctor.PROBLEM, "sees no GPU under driver 550.54")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert one(doctor.check_gpus(where), doctor.PROBLEM) == "unset CUDA_VISIBLE_DEVICES"
    monkeypatch.setattr(doctor, "driver", lambda: None)
    one(doctor.check_gpus(where), doctor.OK, "no GPU(s)")


@pytest.mark.parametrize(
    ("script", "verdict", "found"),
    [
        ("echo '0, NVIDIA H100, 0, 1'", doctor.OK, "GPU 0, NVIDIA H100"),
        ("echo '0, RTX 4090, [N/A], 1'", doctor.OK, "RTX 4090"),
        (
            "echo '0, NVIDIA H100, 0, 1'; echo '1, NVIDIA H100, 3, 1'",
            doctor.PROBLEM,
            "GPU 1, NVIDIA H100: 3 uncorrected",
        ),
        ("echo '0, NVIDIA H100, 0, 70000'", doctor.WARNING, "70000 MiB are in use"),
        ("echo 'Unable to determine the device handle: GPU is lost'; exit 15", doctor.PROBLEM, "GPU is lost"),
        ("sleep 30", doctor.PROBLEM, "does not answer"),
    ],
)
def test_what_nvidia_smi_reports(
    script: str, verdict: str, found: str, where: doctor.Where, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script.replace('sleep', 'exec sleep')}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(doctor, "TIMEOUT_S", 0.5)
    one(doctor.check_gpus(where), verdict, found)


@pytest.mark.parametrize(("gib", "verdict"), [(100, doctor.OK), (10, doctor.WARNING), (0.5, doctor.PROBLEM)])
def test_free_disk(gib: float, verdict: str, where: doctor.Where, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, gib * 2**30))
    one(doctor.check_disks(where), verdict, f"{gib:.1f} GiB free")


def test_inodes_and_folders_that_cannot_be_written(where: doctor.Where, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, 2**40))
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_files=10**6, f_favail=7))
    one(doctor.check_disks(where), doctor.PROBLEM, "7 inodes")

    def refuse(**options: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", refuse)
    assert "set run.root" in one(doctor.check_disks(where), doctor.PROBLEM, "Permission denied")


def test_shared_memory(where: doctor.Where, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(64 * 2**20, 0, 0))
    one(doctor.check_shared_memory(where), doctor.OK, "num_workers is 0")
    assert "--shm-size" in one(doctor.check_shared_memory(doctor.Where(num_workers=2)), doctor.PROBLEM, "0.06 GiB")


def test_open_files(where: doctor.Where, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda which: (1024, 8192))
    assert one(doctor.check_open_files(where), doctor.WARNING, "open files: 1024") == "ulimit -n 8192"
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda which: (-1, -1))
    one(doctor.check_open_files(where), doctor.OK, "no limit")


def test_processes_that_do_not_meet(where: doctor.Where, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    monkeypatch.setattr(sys, "executable", str(python))
    for script, found in (
        ("echo no route to host; exit 3", "exit codes [3, 3]; no route"),
        ("exec sleep 30", "not finished"),
    ):
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
        monkeypatch.setattr(doctor, "TIMEOUT_S", 1.0)
        assert "GLOO_SOCKET_IFNAME" in one(doctor.check_all_reduce(where), doctor.PROBLEM, found)


def test_each_process_uses_its_own_gpu_before_nccl_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: done.append(str(device)))
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: done.append("start"))
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: tensor.mul_(2))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr(torch, "ones", lambda size, device: torch.full((size,), 1.0))
    doctor.reduce_once(1, 0, "nccl")
    doctor.reduce_once(1, 0, "gloo")
    assert done == ["cuda:1", "start", "start"]


@pytest.mark.slow
def test_two_processes_meet(where: doctor.Where) -> None:
    one(doctor.check_all_reduce(where), doctor.OK, "4 MB in")


def test_a_problem_is_exit_code_1_and_json_has_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "CHECKS", {"disks": lambda where: iter([(doctor.PROBLEM, "full", "free it")])})
    with pytest.raises(SystemExit) as ended:
        main(["doctor"])
    assert ended.value.code == 1 and capsys.readouterr().out == f"problem  disks          full\n{'':<23} -> free it\n"
    monkeypatch.setattr(doctor, "CHECKS", {"disks": lambda where: iter([(doctor.WARNING, "full", "free it")])})
    assert main(["doctor", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["findings"] == [{"check": "disks", "verdict": "warning", "found": "full", "todo": "free it"}]
    assert printed["environment"]["packages"]["torch"]


def test_it_looks_where_the_configuration_writes(flags: list[str], tmp_path: Path) -> None:
    found = doctor.read([*flags, "--data.num_workers=3"], OURS)
    assert found.root == tmp_path / "runs" and found.num_workers == 3
    sharded = doctor.read([*flags, "--trainer.strategy=MeshStrategy", "--trainer.strategy.tp_size=2"], OURS)
    (_, versions, _), (_, machine, _) = doctor.check_versions(sharded)
    assert f"torch {torch.__version__}, lightning 2." in versions and "MeshStrategy fsdp_size=auto" in machine
    assert DataModule().cache_dir == str(doctor.Where().cache)


@pytest.mark.slow
def test_one_of_two_processes_prints_the_time(tmp_path: Path) -> None:
    """Both wrote "4 MB in 5.3 ms" into one file, which had one line of them under PYTHONUNBUFFERED."""
    code = f"from dist_template.wings.setup.doctor import reduce_once; reduce_once(%d, {free_port()}, 'gloo')"
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen([sys.executable, "-c", code % rank], **options) for rank in (0, 1)]
    first, second = (rank.communicate(timeout=120)[0] for rank in ranks)
    assert re.fullmatch(r"4 MB in \d+\.\d ms\n", first) and second == ""
