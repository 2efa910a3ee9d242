"""`doctor` finds each planted problem, names what to do, and exits with 1."""

import json
import re
import shutil
import socket
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dist_template
from dist_template.wings.setup import docs, doctor
from tests.support.line import OURS, command, main

FOLDERS = {"run.root": Path("runs")}
OK, WARNING, PROBLEM = doctor.OK, doctor.WARNING, doctor.PROBLEM


def one(findings: doctor.Findings, verdict: str, found: str = "") -> str:
    """What to do about the one finding that is not ok; its text contains `found`."""
    bad = [finding for finding in findings if verdict == OK or finding[0] != OK]
    assert [finding[0] for finding in bad] == [verdict] * len(bad) and bad, bad
    assert any(found in finding[1] for finding in bad), bad
    return bad[0][2]


def test_packages_are_locked_and_none_is_blocked(tmp_path: Path, monkeypatch: Any) -> None:
    installed = {"packages": {"a-b": "1.0", "torch": "2.13.0+cu130"}}
    monkeypatch.setattr(doctor, "comparable", lambda: installed)
    one(doctor.check_packages(tmp_path), WARNING, "there is no")
    lock, chosen = tmp_path / doctor.LOCK, tmp_path / doctor.CHOSEN
    torch = "torch==2.13.0+cpu ; sys_platform != 'darwin' \\\n    --hash=sha256:ab\n"
    torch += "torch==2.12.0 ; sys_platform == 'darwin' \\\n    --hash=sha256:ab\n"
    chosen.write_text("")
    lock.write_text(f"# pins\nA.b==1.0 \\\n    --hash=sha256:ab\n{torch}")
    assert one(doctor.check_packages(tmp_path), OK, "2 as lock-cpu.txt has them") == ""
    lock.write_text(f"A_b==1.1\n{torch}nowhere==3\n")
    found = "2 of 3 differ: a-b 1.0 (locked: 1.1), nowhere missing (locked: 3)"
    assert "make setup" in one(doctor.check_packages(tmp_path), PROBLEM, found)
    chosen.write_text("tool.environment.pins = { A-b = '1.0', nowhere = '4' }")
    found = "1 of 3 differ: nowhere missing (locked: 4)"
    one(doctor.check_packages(tmp_path), PROBLEM, found)
    lock.write_text("")
    chosen.write_text("tool.environment.blocked.'A_b!=1.0,!=1.1' = 'malicious: GHSA-x'")
    found = "a-b 1.0 is blocked: malicious: GHSA-x"
    assert "make setup" in one(doctor.check_packages(tmp_path), PROBLEM, found)


def test_limits_and_torch_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "comparable", lambda: {"driver": "550.54"})
    todo = one(doctor.check_gpus(), PROBLEM, "driver 550.54, no GPU(s)")
    assert "torch's build for this driver" in todo and "CUDA_VISIBLE_DEVICES" in todo
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=2**26))
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda which: (-1, -1))
    assert "--shm-size" in one(doctor.check_limits(), WARNING, "0.06 GiB")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=2**40))
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda which: (1024, 8192))
    assert one(doctor.check_limits(), WARNING, "open files: 1024") == "ulimit -n 4096"


def test_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    for gib, verdict in ((100, OK), (10, WARNING), (0.5, PROBLEM)):
        usage = SimpleNamespace(free=gib * 2**30)
        monkeypatch.setattr(shutil, "disk_usage", lambda path, usage=usage: usage)
        one(doctor.check_disks(FOLDERS), verdict, f"{gib:.1f} GiB free")

    def refuse(**options: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", refuse)
    assert "set run.root" in one(doctor.check_disks(FOLDERS), PROBLEM, "Permission denied")


def test_the_hosts_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolves(host: str) -> str:
        if isinstance(known := next(answers), str):
            return known
        raise known

    answers = iter(["127.0.0.1", "192.0.2.1", socket.gaierror(-2, "Name or service not known")])
    monkeypatch.setattr(socket, "gethostbyname", resolves)
    one(doctor.check_network(), OK, "is 127.0.0.1 on lo")
    nowhere = one(doctor.check_network(), WARNING, "is 192.0.2.1 on no interface")
    assert "GLOO_SOCKET_IFNAME" in nowhere
    assert "/etc/hosts" in one(doctor.check_network(), PROBLEM, "Name or service not known")


def test_a_problem_is_exit_code_1_and_json_has_more(monkeypatch: Any, capsys: Any) -> None:
    for name in ("versions", "packages", "gpus", "limits", "network"):
        monkeypatch.setattr(doctor, f"check_{name}", lambda *_: iter([]))
    monkeypatch.setattr(doctor, "check_disks", lambda _: iter([(PROBLEM, "full", "free it")]))
    with pytest.raises(SystemExit) as ended:
        main(["doctor"])
    assert ended.value.code == 1 and "-> free it\n" in capsys.readouterr().out
    monkeypatch.setattr(doctor, "check_disks", lambda _: iter([(WARNING, "full", "free it")]))
    assert main(["doctor", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    finding = {"check": "disks", "verdict": "warning", "found": "full", "todo": "free it"}
    assert printed["findings"] == [finding] and printed["environment"]["packages"]["torch"]


DOCS = Path(__file__).parents[2] / "docs"


def test_pages_are_listed_found_and_read(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    assert main(["docs"]) == 0
    listed, pages = "\n" + capsys.readouterr().out, DOCS.rglob("*.md")
    assert all(f"\n{page.relative_to(DOCS).with_suffix('')} " in listed for page in pages)
    for name in ("strategies/zero", "zero", "docs/strategies/zero.md"):
        assert main(["docs", name]) == 0
        assert capsys.readouterr().out.startswith((DOCS / "strategies" / "zero.md").read_text())
    assert main(["docs", "zer"]) == 2 and "there is no page 'zer'" in capsys.readouterr().err
    installed = tmp_path / "lib" / "dist_template" / "wings" / "setup" / "docs.py"
    monkeypatch.setattr(docs, "__file__", str(installed))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(docs.InputError, match="no page is installed here"):
        docs.main(["docs"], OURS)
    place = tmp_path / "share" / "doc" / "dist-template"
    place.mkdir(parents=True)
    (place / "index.md").write_text("# What it is\n")
    docs.main(["docs"], OURS)
    assert capsys.readouterr().out == f"{'index':<26} What it is\n"


TOOLS = Path(dist_template.__file__).parent / "wings"
SERVE = "--max_tokens=0 --max_tokens=99999999999 --max_requests=0 --grace_s=nan --grace_s=-1"
BAD = {
    "serve MODEL": f"{SERVE} --grace_s=inf --port=99999 --max_tokens=many",
    "plan": "--tflops=0 --tflops=nan --tflops=inf --nodes=0 --nodes=1000000 --devices=99999999999",
    "plan --bandwidth 1": "nan inf 0",
    "sweep --space=lr.yaml": "--trials=0 --trials=-1 --prune_after=-1",
    "rehearse": "--processes=0 --nodes=0 --devices=-1 --nodes=1e3",
}
CASES = [(verb, flag) for verb, flags in BAD.items() for flag in flags.split()]


@pytest.mark.parametrize(("verb", "flag"), CASES, ids=" ".join)
def test_a_number_out_of_range_is_one_sentence(verb: str, flag: str, capsys: Any) -> None:
    assert command([*verb.split(), flag]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and "give" in error
    name, _, value = flag.rpartition("=")
    assert (name or "--bandwidth") in error and f"'{value}'" in error


def test_every_numeric_flag_has_a_range() -> None:
    """argparse's int and float accept -1, nan and 10**12."""
    texts = {path.name: path.read_text(encoding="utf-8") for path in TOOLS.rglob("*.py")}
    assert [n for n, text in texts.items() if re.search(r"type=(int|float)\b", text)] == []
