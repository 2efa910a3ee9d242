"""Runs Lightning's own tests with this library's training loop in every Trainer.

    git clone --branch 2.6.6 https://github.com/Lightning-AI/pytorch-lightning /tmp/lightning
    python -m tests.lightning.upstream /tmp/lightning [tests_pytorch/loops …]

The wheel has no tests, so a checkout is needed; its sources are not used: the tests run with the
Lightning that is installed. What fails is run again, without the rest, with both loops: what
fails with both is for the machine, or for a package that is missing. KNOWN names the rest,
with reasons; any other test that fails with this library's loop alone gives exit code 1."""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

from tests import ROOT

FOLDERS = [
    f"tests_pytorch/{name}" for name in "loops trainer callbacks checkpointing core models".split()
]
PLUGIN = ["-p", "tests.lightning.every_trainer"]
TIMEOUT_S = 120
# These tests load files that Lightning's CI downloads.
DOWNLOADED = "--ignore=tests_pytorch/checkpointing/test_legacy_checkpoints.py"
KNOWN: dict[str, str] = {  # test, without its parameters: why it differs
    "tests_pytorch/loops/test_loop_state_dict.py::test_loops_state_dict_structure": (
        "the loops' state has one more key, resume_point, which Lightning's loops ignore"
    ),
    "tests_pytorch/loops/test_loops.py::test_fit_loop_reset": (
        "a checkpoint of an epoch's last batch does not count the epoch as finished, because"
        " its end has not run"
    ),
    "tests_pytorch/models/test_hooks.py"
    "::test_trainer_model_hook_system_fit_no_val_and_resume_max_steps": (
        "a resumed epoch calls on_train_epoch_start again, as a module may set there what it trains"
        " with"
    ),
}


def run(checkout: Path, tests: list[str], plugin: list[str]) -> dict[str, str]:
    """Runs tests of the checkout; returns "passed", "skipped" or "failed" by their names."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        argv = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir=.", "-q", "--tb=line"]
        argv += [
            DOWNLOADED,
            "-o",
            "junit_family=xunit1",
            "-p",
            "no:cacheprovider",
            f"--timeout={TIMEOUT_S}",
            f"--junitxml={report}",
        ]
        env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        subprocess.run([*argv, *plugin, *tests], cwd=checkout / "tests", env=env, check=False)
        cases = ElementTree.parse(report).iter("testcase") if report.exists() else ()
        return {_name(case): _result(case) for case in cases}


def _name(case: ElementTree.Element) -> str:
    """Returns a test's name as pytest takes it."""
    file = case.attrib["file"]
    of_class = case.attrib["classname"][len(file.removesuffix(".py")) :].lstrip(".")
    return "::".join(part for part in (file, of_class, case.attrib["name"]) if part)


def _result(case: ElementTree.Element) -> str:
    tags = {child.tag for child in case}
    return "failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"


def failing(checkout: Path, names: list[str], plugin: list[str]) -> list[str]:
    """Returns which of these tests fail when they run without the others."""
    results = run(checkout, names, plugin) if names else {}
    return [name for name in names if results.get(name) != "passed"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("tests", nargs="*", default=FOLDERS)
    given = parser.parse_args()
    results = run(given.checkout, given.tests, PLUGIN)
    if not results:
        print("no test has run: is it a checkout of Lightning?", file=sys.stderr)
        return 2
    failed = [name for name, result in results.items() if result == "failed"]
    with_ours = failing(given.checkout, failed, PLUGIN)
    with_lightnings = failing(given.checkout, with_ours, [])
    differ = [name for name in with_ours if name not in with_lightnings]
    num_run = sum(result != "skipped" for result in results.values())
    print(f"{num_run - len(with_ours)} of {num_run} tests pass with this library's loop")
    print(f"{len(with_lightnings)} of the others fail with Lightning's loop as well:")
    for name in sorted(with_lightnings):
        print(f"    {name}")
    print(f"{len(differ)} pass with Lightning's loop alone:")
    for name in differ:
        print(f"    {name}: {KNOWN.get(name.partition('[')[0], 'UNKNOWN')}")
    return int(any(name.partition("[")[0] not in KNOWN for name in differ))


if __name__ == "__main__":
    raise SystemExit(main())
