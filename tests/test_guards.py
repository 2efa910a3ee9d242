"""Each promise of docs/promises.md has a guard, and a test that fails when the guard is removed.

A guard is removed in a copy of the repository: one text of one file is replaced by another."""

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.repository import copied, outcome

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")
ROWS = {  # promise: file of its guard, and test
    promise: (Path("src", "dist_template", file), f"tests/{test}")
    for promise, file, test in re.findall(r"- (.+): `([\w/.]+):[\w.]+`, `([\w/.]+::\w+)`", PAGE)
}


class Guard(NamedTuple):
    """A text of the guard's file, what replaces it, and the case of the test that must fail."""

    text: str
    replacement: str
    case: str = ""


GUARDS = {
    "a strategy trains to the numbers of one process": Guard(
        "return total, dist.all_reduce(total, async_op=True)",
        "return total, None", "[deepseek_v3-fsdp2]"),
    "the order of samples depends on no rank": Guard(
        "yield self._entries(position + self.rank * self.micro_batch_size, self.micro_batch_size)",
        "yield self._entries(position, self.micro_batch_size)"),
    "a resumed run continues with the next sample": Guard(
        'self._base = self._loaded["consumed_samples"]', "self._base = 0",
        "[zero3-inside a save]"),
    "evaluation counts each sample once": Guard(
        "first + row if row < size else PADDING - number for row", "first + row % size for row"),
    "packed documents do not attend to each other": Guard(
        "ends = window[:, :-1] == self.eos_token_id", "ends = window[:, :-1] < 0"),
    "a damaged checkpoint is never loaded": Guard(
        "if every_byte and crc32(path / file) != expected:", "if False:"),
    "nothing in a checkpoint runs": Guard(
        "if is_type or name in DESCRIPTIONS.get(module, ()):", "if True:"),
    "a non-finite step changes no weight": Guard(
        "self.skipped = torch.nan_to_num(both - both, nan=1.0)",
        "self.skipped = torch.zeros_like(both)"),
    "all ranks skip a step that is anomalous on one": Guard(
        "loss, norm = figures[::2].mean(), figures[1::2].amax()", "loss = figures[::2].mean()",
        "[ddp-nan]"),
    "replicas that differ are never saved": Guard("        if differ:", "        if False:"),
    "a hang is named": Guard(
        'busy = {rank for rank in behind if not statuses[rank]["waits"]}', "busy = {min(behind)}"),
    "ranks with different environments do not train": Guard("if len(ranks) == 1:", "if True:"),
    "an exit by decision is not restarted": Guard(
        "return any(code in DECIDED for code in self.codes)", "return False"),
    "two launches of one run are refused": Guard(
        'if holder.get("machine") == claim["machine"]:', "if False:"),
    "secrets are not written": Guard(
        "if is_secret and value:", "if False:"),
    "experts are balanced": Guard(
        "torch.sign(total / self._num_experts - loads)",
        "torch.sign(loads - total / self._num_experts)"),
    "an export has the trained model's logits": Guard(
        "copy_shard(targets[name], stored.pop(name))", "stored.pop(name)"),
}  # fmt: skip


def test_each_guard_is_one_text_of_its_file() -> None:
    assert ROWS.keys() == GUARDS.keys()
    for promise, guard in GUARDS.items():
        assert (ROOT / ROWS[promise][0]).read_text(encoding="utf-8").count(guard.text) == 1, promise


def test_every_guard_and_test_of_the_page_exists() -> None:
    for file, name in re.findall(r"`(\w+/[\w/]+\.py)(?:::?(\w+))?[`:.]", PAGE):
        paths = [ROOT / folder / file for folder in ("src/dist_template", "tests", ".")]
        (path,) = [path for path in paths if path.exists()]
        assert re.search(rf"(def|class) {name}", path.read_text(encoding="utf-8")), (file, name)


@pytest.mark.nightly
def test_with_the_guards_the_tests_pass(tmp_path: Path) -> None:
    tests = [ROWS[promise][1] + guard.case for promise, guard in GUARDS.items()]
    last_line = outcome(copied(tmp_path / "copy"), *tests)
    assert re.match(r"\d+ passed", last_line) and "error" not in last_line, last_line


@pytest.mark.nightly
@pytest.mark.parametrize("promise", GUARDS)
def test_without_its_guard_the_test_fails(promise: str, tmp_path: Path) -> None:
    guard, (file, test), folder = GUARDS[promise], ROWS[promise], copied(tmp_path / "copy")
    text = (folder / file).read_text(encoding="utf-8")
    (folder / file).write_text(text.replace(guard.text, guard.replacement), encoding="utf-8")
    last_line = outcome(folder, test + guard.case)
    assert re.search(r"\d+ failed", last_line), last_line
