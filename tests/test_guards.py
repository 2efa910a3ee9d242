"""Each promise of docs/promises.md has a guard in the source, and a test that fails when the guard
is removed.

A guard is removed in a copy of the repository: one text of one file is replaced by another.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
COPIED = ("src", "tests", "{{cookiecutter.project_slug}}")


class Guard(NamedTuple):
    """A text of a file of src/dist_template, what it is replaced by, and the test (file::function)
    that must fail."""

    file: str
    text: str
    replacement: str
    test: str


GUARDS = {
    "a strategy trains to the numbers of one process": Guard(
        "text/batches/loader.py",
        "return total, dist.all_reduce(total, async_op=True) if several else None",
        "return total, None",
        "parallel/test_parity.py"
        "::test_a_strategy_trains_to_the_numbers_of_one_process[deepseek_v3-fsdp2]",
    ),
    "the order of samples depends on no rank": Guard(
        "callbacks/global_order.py",
        "yield self._entries(position + self.rank * self.micro_batch_size, self.micro_batch_size)",
        "yield self._entries(position, self.micro_batch_size)",
        "text/test_order.py::test_a_run_of_any_attempts_reads_the_stream_without_a_gap",
    ),
    "a resumed run continues with the next sample": Guard(
        "callbacks/global_order.py",
        'self._base = self._loaded["consumed_samples"]',
        "self._base = 0",
        "checkpoint/test_exact_resume.py"
        "::test_a_killed_run_resumes_bit_identically[ddp-mid-epoch 0]",
    ),
    "evaluation counts each sample once": Guard(
        "callbacks/global_order.py",
        "first + row if row < size else PADDING - number for row",
        "first + row % size for row",
        "text/test_order.py::test_evaluation_reads_every_row_once_in_equally_many_full_batches",
    ),
    "packed documents do not attend to each other": Guard(
        "text/batches/rows.py",
        "ends = inputs == self.eos_token_id",
        "ends = inputs < 0",
        "text/test_cache.py::test_positions_restart_after_each_end_of_a_document",
    ),
    "a damaged checkpoint is never loaded": Guard(
        "checkpoint/manifest.py",
        "if every_byte and crc32(path / file) != expected:",
        "if False:",
        "checkpoint/test_commit.py::test_every_changed_bit_and_every_truncation_is_refused",
    ),
    "nothing in a checkpoint runs": Guard(
        "checkpoint/untrusted.py",
        "if is_type or name in DESCRIPTIONS.get(module, ()):",
        "if True:",
        "checkpoint/test_formats.py::test_nothing_in_a_checkpoint_runs",
    ),
    "a non-finite step changes no weight": Guard(
        "callbacks/numerics.py",
        "self.skipped = torch.nan_to_num(both - both, nan=1.0)",
        "self.skipped = torch.zeros_like(both)",
        "callbacks/test_numerics.py::test_an_optimizer_that_is_not_fused_skips_the_step_too",
    ),
    "all ranks skip a step that is anomalous on one": Guard(
        "callbacks/numerics.py",
        "loss, norm = figures[::2].mean(), figures[1::2].amax()",
        "loss = figures[::2].mean()",
        "callbacks/test_numerics_recovery.py"
        "::test_all_ranks_skip_a_step_whose_reduced_gradient_is_damaged_on_one[hsdp-nan]",
    ),
    "replicas that differ are never saved": Guard(
        "callbacks/replicas.py",
        "        if differ:",
        "        if False:",
        "callbacks/test_replicas.py::test_what_changes_later_is_found_before_it_is_saved",
    ),
    "a hang is named": Guard(
        "cluster/hang.py",
        'behind = [rank for rank in behind if not statuses[rank]["waits"]] or behind',
        "behind = behind[:1]",
        "cluster/test_watchdog.py::test_the_stalled_rank_is_named",
    ),
    "ranks with different environments do not train": Guard(
        "cluster/fingerprint.py",
        "if all(of_rank == found[0] for of_rank in found):",
        "if True:",
        "cluster/test_fingerprint.py::test_one_table_says_which_ranks_have_what",
    ),
    "an exit by decision is not restarted": Guard(
        "compat/torchrun.py",
        "return any(code in DECIDED for code in self.codes)",
        "return False",
        "cluster/test_exit_codes.py::test_a_process_that_exits_by_decision_is_not_restarted",
    ),
    "two launches of one run are refused": Guard(
        "cluster/run_lock.py",
        'if holder.get("machine") == claim["machine"]:',
        "if False:",
        "cluster/test_run_lock.py::test_a_second_process_is_refused_while_the_first_lives",
    ),
    "secrets are not written": Guard(
        "cluster/redaction.py",
        "return HIDDEN if is_secret and value else PASSWORD_IN_URL.sub(HIDDEN, value)",
        "return value",
        "cli/test_secrets.py::test_a_configuration_keeps_all_but_the_text_of_secrets",
    ),
    "experts are balanced": Guard(
        "model/balance.py",
        "torch.sign(total / self._num - loads)",
        "torch.sign(loads - total / self._num)",
        "model/test_balance.py::test_the_bias_moves_against_the_load_and_not_in_a_skipped_step",
    ),
    "an export has the trained model's logits": Guard(
        "checkpoint/formats.py",
        'module.load_state_dict(read_full(path, module, False)["state_dict"], strict=True)',
        "pass",
        "checkpoint/test_export.py::test_the_exported_folder_gives_the_trained_modules_logits",
    ),
}


@pytest.mark.parametrize("promise", GUARDS)
def test_the_guard_and_its_test_exist(promise: str) -> None:
    guard = GUARDS[promise]
    file, _, name = guard.test.partition("::")
    assert (ROOT / "src" / "dist_template" / guard.file).read_text(encoding="utf-8").count(
        guard.text
    ) == 1
    name = name.partition("[")[0]
    assert f"def {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8")
    assert f"`{file}::{name}`" in (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")


def test_every_guard_and_test_file_of_the_page_exists() -> None:
    page = (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")
    for file, name in re.findall(r"`(\w+/[\w/]+\.py)(?::(\w+))?[`:.]", page):
        path = next(
            p
            for folder in ("src/dist_template", "tests", ".")
            if (p := ROOT / folder / file).exists()
        )
        assert re.search(rf"(def|class) {name}", path.read_text(encoding="utf-8")), (file, name)


def copied(folder: Path) -> Path:
    for name in COPIED:
        skipped = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=skipped)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def outcome(folder: Path, *tests: str) -> str:
    """The last line of pytest, run in `folder`."""
    command = [
        sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not nightly",
    ]  # fmt: skip
    environment = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("PYTEST", "PYTHONPATH"))
    }
    environment["PYTHONPATH"] = str(folder / "src")
    command += [f"tests/{test}" for test in tests]
    ended = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    return ended.stdout.strip().splitlines()[-1] if ended.stdout.strip() else ended.stderr


@pytest.mark.slow
@pytest.mark.nightly
def test_with_the_guards_the_tests_pass(tmp_path: Path) -> None:
    last_line = outcome(copied(tmp_path / "copy"), *(guard.test for guard in GUARDS.values()))
    assert (
        re.search(r"\d+ passed", last_line)
        and "failed" not in last_line
        and "error" not in last_line
    ), last_line


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("promise", GUARDS)
def test_without_its_guard_the_test_fails(promise: str, tmp_path: Path) -> None:
    guard = GUARDS[promise]
    folder = copied(tmp_path / "copy")
    file = folder / "src" / "dist_template" / guard.file
    file.write_text(
        file.read_text(encoding="utf-8").replace(guard.text, guard.replacement), encoding="utf-8"
    )
    last_line = outcome(folder, guard.test)
    assert re.search(r"\d+ failed", last_line), last_line
