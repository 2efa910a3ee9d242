"""`doctor` finds planted problems; `preflight` names a slow rank; the best interval of saves."""

import json
import os
import re
import shutil
import socket
import sysconfig
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dist_template
from dist_template.cluster.watchdog import WATCHDOG
from dist_template.errors import Ended, Exit
from dist_template.project import Project
from dist_template.wings.diagnose import read_run
from dist_template.wings.diagnose.engine import diagnose
from dist_template.wings.preflight import callback, interval
from dist_template.wings.preflight.callback import Preflight
from dist_template.wings.setup import docs, doctor
from tests.support.classifier import PLAIN
from tests.support.histories import a_run
from tests.support.line import OURS, command, main
from tests.support.runs import Workers, run

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
    assert one(doctor.check_packages(tmp_path), OK, "2 match lock-cpu.txt") == ""
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


def test_low_limits_and_a_torch_without_its_driver_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


def test_gpus_cuda_and_cudnn_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch reports of eight GPUs, in place of a machine with them."""
    card = SimpleNamespace(name="NVIDIA H100 80GB HBM3", total_memory=85_017_493_504)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91300)
    monkeypatch.setattr(doctor, "comparable", lambda: {"driver": "580.82"})
    found = "CUDA 13.0, its cuDNN 91300, driver 580.82, 8 GPU(s): 8 x NVIDIA H100 80GB HBM3 with 79"
    assert one(doctor.check_gpus(), OK, found) == ""


def test_infiniband_ports_that_are_down_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder as Linux has it in /sys."""
    monkeypatch.setattr(doctor, "INFINIBAND", tmp_path)
    monkeypatch.setattr(socket, "gethostbyname", lambda host: "127.0.0.1")
    one(doctor.check_network(), OK, "no InfiniBand: nodes would exchange by Ethernet")
    for device, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        port = tmp_path / device / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    (_, (verdict, active, _), _) = doctor.check_network()
    assert (verdict, active) == (OK, "InfiniBand: mlx5_0 port 1 (400 Gb/sec (4X NDR))")
    todo = one(doctor.check_network(), WARNING, "not active: mlx5_1 port 1 (1: DOWN)")
    assert "ibstat" in todo


def test_a_disk_without_space_or_permission_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    for gib, verdict in ((100, OK), (10, WARNING), (0.5, PROBLEM)):
        usage = SimpleNamespace(free=gib * 2**30)
        monkeypatch.setattr(shutil, "disk_usage", lambda path, usage=usage: usage)
        one(doctor.check_disks(FOLDERS), verdict, f"{gib:.1f} GiB free")

    def refuse(**options: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(doctor.tempfile, "TemporaryFile", refuse)
    assert "set run.root" in one(doctor.check_disks(FOLDERS), PROBLEM, "Permission denied")


def test_a_hosts_name_has_to_resolve_to_an_interface(monkeypatch: pytest.MonkeyPatch) -> None:
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


EQUAL = {"device": "H100", "matmul": 700.0, "world": 330.0}
RANKS_OF: dict[str, tuple[dict[str, Any], str]] = {  # what rank 3 differs in, a sentence
    "equal": ({"matmul": 600.0}, ""),
    "slow": ({"matmul": 350.0}, "rank 3 on node1 (H100): matrix products at 350 TFLOP/s, 0.50 of"),
    "another device": ({"matmul": 70.0, "device": "A10"}, ""),
    "network": ({"world": 90.0}, "all ranks (H100) reach 90 GB/s; expected is 330"),
    "unknown": ({"error": "CUDA out of memory"}, "rank 3 on node1 was not measured: CUDA out of"),
}


@pytest.mark.parametrize("case", RANKS_OF)
def test_a_slow_machine_is_named(case: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    change, sentence = RANKS_OF[case]
    ranks = [{"rank": rank, "host": f"node{rank // 2}", **EQUAL} for rank in range(4)]
    for each in ranks if "world" in change else ranks[3:]:
        each |= change
    monkeypatch.setattr(callback, "measure", lambda *_: ranks)
    trainer: Any = SimpleNamespace(num_nodes=2, fast_dev_run=False, is_global_zero=True)
    trainer.strategy = SimpleNamespace(root_device=torch.device("cpu"))
    Preflight(folder=str(tmp_path)).setup(trainer, Any, "fit")
    printed = capsys.readouterr().out
    assert sentence in printed and printed.count("preflight:") == bool(sentence)
    found = [each.evidence for each in diagnose(a_run(folder=tmp_path)) if "slow_m" in each.rule]
    assert bool(found) == bool(sentence) and all(sentence in each for each in found)
    if sentence:
        with pytest.raises(Ended, match="preflight.refuse") as ended:
            Preflight(refuse=True, folder=str(tmp_path)).setup(trainer, Any, "fit")
        assert ended.value.code == Exit.MISMATCH


def test_a_measurement_draws_nothing_is_progress_and_may_fail(monkeypatch: Any) -> None:
    alive, state = list[int](), torch.random.get_rng_state()
    monkeypatch.setattr(WATCHDOG, "keep_alive", lambda: alive.append(1))
    (found,) = callback.measure(torch.device("cpu"), 1)
    assert found["matmul"] > 0 and found["copy"] > 0 and len(alive) >= 8
    assert torch.equal(state, torch.random.get_rng_state())
    monkeypatch.setattr(torch, "mm", lambda *_: 1 / 0)
    assert "division" in callback.measure(torch.device("cpu"), 1)[0]["error"]


def two_nodes() -> None:
    """Of two ranks each; rank 3 multiplies slowly."""
    node, local = divmod(int(os.environ["RANK"]), 2)
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": f"{local}", "GROUP_RANK": f"{node}"}
    if node == local == 1:
        mm: Any = torch.mm
        torch.mm = lambda *matrices: time.sleep(0.02) or mm(*matrices)  # ty: ignore


@pytest.mark.slow
def test_training_is_the_same_and_the_slow_rank_is_named(flags: list[str], tmp_path: Path) -> None:
    run("prepare", *flags)
    argv = ["fit", *flags, "--trainer.max_steps=3", "--trainer.strategy=ddp"]
    on = Workers(4).run(argv, tmp_path / "on", prelude=two_nodes).check()
    argv.append("--preflight.enabled=false")
    off = Workers(4).run(argv, tmp_path / "off", prelude=two_nodes).check()
    assert on.loss == off.loss and on.random(3) == off.random(3)
    found = json.loads((on.run / "preflight.json").read_text())
    assert ["node" in each for each in found["ranks"]] == [True, False, True, False]
    assert found["ranks"][0]["world"] > 0 and "rank 3 on" in on.log()
    assert any(each.rule == "slow_machine" for each in diagnose(read_run(on.run)))
    assert not (off.run / "preflight.json").exists()


@pytest.mark.parametrize("save_s, mtbf_h", [(1, 1e4), (10, 3), (60, 1), (600, 1)])
def test_no_other_interval_loses_less(save_s: float, mtbf_h: float) -> None:
    best = interval.Interval(save_s, 3600 * mtbf_h)
    others = [best.lost(best.best_s * factor / 100) for factor in range(10, 1000)]
    assert 0 < best.lost(best.best_s) < min(others) + 1e-4 and best.lost(1e9) > 0.9


def test_a_finished_run_is_compared_with_the_best_interval() -> None:
    assert interval.DEVICE_MTBF_H == pytest.approx(54 * 24 * 16_384 / 419, rel=0.01)
    history = a_run(config={"preflight.device_mtbf_h": 80.0})  # 8 devices, steps of 0.5 s
    found = interval.of_run(history)  # saves of 2 s; Young: the root of 2 x 2 s x 10 h, less 2 s
    assert found and found.best_s == pytest.approx(378, rel=0.01)
    assert interval.compared(history).startswith("every 1,000 steps, 8.3 min: 1.1 % lost; best")


def test_a_plain_data_module_has_no_cache() -> None:
    assert [*doctor.written_folders([], PLAIN)] == ["run.root"]
    assert [*doctor.written_folders([], OURS)] == ["run.root", "data.cache_dir"]
    assert [*doctor.written_folders([], Project("of_no_package"))] == ["run.root", "data.cache_dir"]
