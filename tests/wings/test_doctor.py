"""`doctor` finds each planted problem, names what to do, and exits with 1."""

from __future__ import annotations

import json
import shutil
import socket
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_dev.data import DataModule

from dist_template.wings.setup import doctor
from tests.support.runs import OURS, main

Usage = namedtuple("Usage", "total used free")
FOLDERS = {"run.root": Path("runs")}


def one(findings: doctor.Findings, verdict: str, found: str = "") -> str:
    """Returns what to do about the one finding that is not ok; its text contains `found`."""
    bad = [finding for finding in findings if verdict == doctor.OK or finding[0] != doctor.OK]
    assert [finding[0] for finding in bad] == [verdict] * len(bad) and bad, bad
    assert any(found in finding[1] for finding in bad), bad
    return bad[0][2]


def test_the_package_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "packages", lambda: {"a-b": "1.0", "torch": "2.13.0+cu130"})
    lock = tmp_path / "constraints.txt"
    lock.write_text("# pins\nA.b==1.0,!=0.9\ntorch==2.13.0\n")
    assert one(doctor.check_packages(tmp_path), doctor.OK, "2 as constraints.txt has them") == ""
    lock.write_text("A_b==1.1\ntorch==2.13.0\nnowhere==3\n")
    found = "2 of 3 differ: A_b 1.0 (locked: 1.1), nowhere missing (locked: 3)"
    assert "pip install" in one(doctor.check_packages(tmp_path), doctor.PROBLEM, found)
    lock.unlink()
    one(doctor.check_packages(tmp_path), doctor.WARNING, "there is no")


def test_a_blocked_version_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "constraints.txt").write_text("")
    (tmp_path / "requirements").mkdir()
    (tmp_path / doctor.BLOCKED).write_text("# why\nA_b!=1.0,!=1.1  # malicious: GHSA-x\n")
    monkeypatch.setattr(doctor, "packages", lambda: {"a-b": "1.1"})
    found = "A_b 1.1 is blocked: malicious: GHSA-x"
    assert "make setup" in one(doctor.check_packages(tmp_path), doctor.PROBLEM, found)
    monkeypatch.setattr(doctor, "packages", lambda: {"a-b": "1.2"})
    one(doctor.check_packages(tmp_path), doctor.OK)


def test_torch_and_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "comparable", lambda: {"driver": "550.54"})
    todo = one(doctor.check_gpus(), doctor.PROBLEM, "driver 550.54, no GPU(s)")
    assert "torch's build for this driver" in todo and "CUDA_VISIBLE_DEVICES" in todo
    monkeypatch.setattr(doctor, "comparable", lambda: {"driver": None})
    one(doctor.check_gpus(), doctor.OK, "no GPU(s)")


@pytest.mark.parametrize(
    ("gib", "verdict"), [(100, doctor.OK), (10, doctor.WARNING), (0.5, doctor.PROBLEM)]
)
def test_free_disk(gib: float, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, gib * 2**30))
    one(doctor.check_disks(FOLDERS), verdict, f"{gib:.1f} GiB free")


def test_folders_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**options: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", refuse)
    assert "set run.root" in one(doctor.check_disks(FOLDERS), doctor.PROBLEM, "Permission denied")


def test_shared_memory_and_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(64 * 2**20, 0, 0))
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda which: (-1, -1))
    assert "--shm-size" in one(doctor.check_limits(), doctor.WARNING, "0.06 GiB")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(2**40, 0, 0))
    one(doctor.check_limits(), doctor.OK, "open files: -1")
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda which: (1024, 8192))
    assert one(doctor.check_limits(), doctor.WARNING, "open files: 1024") == "ulimit -n 4096"


def test_the_hosts_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostbyname", lambda host: "127.0.0.1")
    one(doctor.check_network(), doctor.OK, "is 127.0.0.1 on lo")
    monkeypatch.setattr(socket, "gethostbyname", lambda host: "192.0.2.1")
    assert "GLOO_SOCKET_IFNAME" in one(
        doctor.check_network(), doctor.WARNING, "is 192.0.2.1 on no interface"
    )

    def unknown(host: str) -> str:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "gethostbyname", unknown)
    assert "/etc/hosts" in one(doctor.check_network(), doctor.PROBLEM, "Name or service not known")


def test_a_problem_is_exit_code_1_and_json_has_the_environment(
    monkeypatch: Any, capsys: Any
) -> None:
    for name in ("check_versions", "check_packages", "check_gpus", "check_limits", "check_network"):
        monkeypatch.setattr(doctor, name, lambda *_: iter([]))
    monkeypatch.setattr(
        doctor, "check_disks", lambda _: iter([(doctor.PROBLEM, "full", "free it")])
    )
    with pytest.raises(SystemExit) as ended:
        main(["doctor"])
    assert (
        ended.value.code == 1
        and capsys.readouterr().out == f"problem  disks          full\n{'':<23} -> free it\n"
    )
    monkeypatch.setattr(
        doctor, "check_disks", lambda _: iter([(doctor.WARNING, "full", "free it")])
    )
    assert main(["doctor", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["findings"] == [
        {"check": "disks", "verdict": "warning", "found": "full", "todo": "free it"}
    ]
    assert printed["environment"]["packages"]["torch"]


def test_it_looks_where_the_configuration_writes(flags: list[str], tmp_path: Path) -> None:
    assert doctor.written_folders(flags, OURS)["run.root"] == tmp_path / "runs"
    assert DataModule().cache_dir == str(doctor.written_folders([], OURS)["data.cache_dir"])
    assert f"torch {torch.__version__}, lightning 2." in next(doctor.check_versions())[1]
