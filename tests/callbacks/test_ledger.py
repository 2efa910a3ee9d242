"""The sample ledger, and the audit that proves from it that no sample was lost or repeated."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback

from dist_template.text.order import GlobalOrder, permutation, stream_position, with_jumps
from dist_template.tools.audit import audit, read_attempts
from tests.support import faults
from tests.support.runs import CONFIGS, SMALL_LLAMA, Workers, only_run, run

ROWS, GLOBAL = 20, 4


def test_jumped_intervals_are_read_by_nobody_and_all_else_once() -> None:
    jumps = with_jumps([(30, 34)], [(4, 8), (8, 10)])
    assert jumps == [(4, 10), (30, 34)]
    assert [stream_position(i, jumps) for i in (0, 3, 4, 5, 23, 24)] == [0, 3, 10, 11, 29, 34]
    ranks = [GlobalOrder(ROWS, GLOBAL, 2, rank, 2, 0, lambda: 0, jumps=lambda: jumps) for rank in (0, 1)]
    read = [row for batches in zip(*ranks, strict=True) for batch in batches for row in batch]
    stream = [int(permutation(ROWS, 0, epoch)[i]) for epoch in (0, 1) for i in range(ROWS)]
    assert read == (stream[:4] + stream[10:30])[: len(read)]


class Ledger:
    """A ledger as trainings of 5 steps an epoch would write it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.began = 0.0

    def attempt(self, ranks: int, after: int, upto: int, jumps: Any = (), lost: dict[int, int] | None = None) -> None:
        """Steps `after` + 1 to `upto`; `lost`: the last step that reached a rank's file."""
        self.began += 1
        jumped = sum(end - start for start, end in jumps if start < after * GLOBAL)
        size = GLOBAL // ranks
        for rank in range(ranks):
            header = {
                "attempt": self.began, "step": after, "consumed": after * GLOBAL, "ranks": ranks, "data": "d",
                "seed": 0, "num_rows": ROWS, "global_batch_size": GLOBAL, "jumps": list(jumps),
            }  # fmt: skip
            assert not jumped
            lines = [header]
            for step in range(after + 1, min(upto, (lost or {}).get(rank, upto)) + 1):
                places = [stream_position((step - 1) * GLOBAL + rank * size + i, jumps) for i in range(size)]
                lines.append({"step": step, "rows": [[int(permutation(ROWS, 0, p // ROWS)[p % ROWS]) for p in places]]})
            with (self.folder / f"rank{rank}.jsonl").open("a") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)

    def edit(self, rank: int, step: int, change: Callable[[Any], Any]) -> None:
        """Replace or, with None, remove a step's line in one rank's file."""
        path = self.folder / f"rank{rank}.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        changed = [change(line) if line["step"] == step and "rows" in line else line for line in lines]
        path.write_text("".join(json.dumps(line) + "\n" for line in changed if line))

    def audit(self) -> tuple[list[str], list[str]]:
        return audit(read_attempts(self.folder))


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    """Killed after step 6, of which rank 1's file has less; resumed from step 4 on another number of ranks, twice."""
    made = Ledger(tmp_path / "ledger")
    made.attempt(ranks=2, after=0, upto=6, lost={1: 5})
    (made.folder / "rank1.jsonl").open("a").write('{"step":6,"rows":[[1\n')
    made.attempt(ranks=4, after=4, upto=8)
    made.attempt(ranks=1, after=8, upto=12)
    yield made


def test_a_ledger_through_kills_and_resizes_passes(ledger: Ledger) -> None:
    told, wrong = ledger.audit()
    assert wrong == []
    assert "12 steps in 3 attempts, ranks 2 -> 4 -> 1" in told[0]
    assert "complete epochs: 0, 1" in told[1]


def test_jumps_are_told_apart(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger")
    ledger.attempt(ranks=2, after=0, upto=3)
    ledger.attempt(ranks=2, after=2, upto=12, jumps=[(8, 12)])
    told, wrong = ledger.audit()
    assert wrong == [] and "samples 8 to 11 of the stream" in told[-1]
    for path in ledger.folder.iterdir():
        path.write_text(path.read_text().replace("[[8, 12]]", "[]"))
    assert any("out of order" in sentence for sentence in ledger.audit()[1]), "without its jump it is another order"


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda line: None, "step 7 is not in the ledger of rank 2"),
        (lambda line: line | {"rows": [[int(permutation(ROWS, 0, 1)[0])]]}, "used twice in epoch 1: in steps 6 and 7"),
        (lambda line: line | {"rows": [[int(permutation(ROWS, 0, 1)[15])]]}, "step 7 used row"),
        (lambda line: line | {"rows": [[99]]}, "step 7 used row 99, and there are 20"),
        (lambda line: line | {"rows": [[1, 2]]}, "step 7 used 5 samples, not 4"),
    ],
)
def test_a_tampered_ledger_fails(ledger: Ledger, change: Callable[[Any], Any], found: str) -> None:
    ledger.edit(2, 7, change)
    wrong = ledger.audit()[1]
    assert any(found in sentence for sentence in wrong), wrong
    assert any("never used in epoch 1" in sentence for sentence in wrong)


def test_a_run_that_did_not_resume_where_it_was_saved_fails(ledger: Ledger) -> None:
    ledger.attempt(ranks=1, after=12, upto=13)
    path = ledger.folder / "rank0.jsonl"
    path.write_text(path.read_text().replace('"step": 12, "consumed": 48', '"step": 12, "consumed": 40'))
    assert any("begins at sample 40 of the stream, 48 was next" in sentence for sentence in ledger.audit()[1])


def test_the_command_passes_a_resumed_training_and_a_repeating_sampler_fails(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*flags, "--trainer.limit_val_batches=0", "--trainer.logger=false", "--sample_ledger.enabled=true"]
    assert run("fit", *flags, "--trainer.max_steps=4", "--model.optim.warmup=0") == 0
    resumed = ["--trainer.max_steps=7", "--ckpt_path=last", "--data.micro_batch_size=4", "--data.num_workers=1"]
    assert run("fit", *flags, *resumed, "--model.optim.warmup=0") == 0
    folder = only_run(tmp_path)
    assert run("audit", f"--run={folder}") == 0
    assert "7 steps in 2 attempts" in capsys.readouterr().out
    path = folder / "ledger" / "rank0.jsonl"
    path.write_text(path.read_text().replace('"seed":0', '"seed":1'))
    with pytest.raises(SystemExit) as stop:
        run("audit", f"--run={folder}")
    assert stop.value.code == 1
    assert "WRONG: step 1 used row" in capsys.readouterr().out
    assert run("audit", f"--run={tmp_path}") == 2, "there is no ledger"


class KillAfter(Callback):
    """kill -9 of one rank's process after a step, some lines of its ledger unwritten."""

    def __init__(self, step: int, rank: int) -> None:
        self.step, self.rank = step, rank

    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        if trainer.global_step == self.step and trainer.global_rank == self.rank:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [None, faults.repeating_sampler])
def test_killed_and_resumed_on_other_numbers_of_ranks(
    corpus: Path, cache: Path, tmp_path: Path, fault: Callable[[], None] | None
) -> None:
    flags = [
        f"--run.root={tmp_path / 'runs'}", "--data.source=TextFiles", f"--data.source.paths=[{corpus}/*.txt]",
        "--data.tokenizer=Bytes", f"--data.cache_dir={cache}", "--data.seq_len=256", "--data.global_batch_size=8",
        "--data.validation_share=0", "--data.test_share=0",
        "--data.micro_batch_size=2", f"--model.architecture={SMALL_LLAMA}", "--trainer.accelerator=cpu",
        "--trainer.max_steps=16", "--trainer.limit_val_batches=0", "--trainer.logger=false", "--model.optim.warmup=2",
        "--last_checkpoint.every_n_steps=3", "--sample_ledger.enabled=true", f"--config={CONFIGS}/strategy/fsdp2.yaml",
    ]  # fmt: skip
    with Workers(1) as workers:
        workers.run(["prepare", *flags], tmp_path / "prepare").check()
    folder = tmp_path / "runs" / "default" / "run"
    legs = [(2, 0)] if fault else [(2, 5), (1, 8), (2, 0)]  # ranks, the step after which one is killed
    for number, (ranks, kill) in enumerate(legs):
        callbacks = [KillAfter(kill, ranks - 1)] if kill else []
        argv = ["fit", *flags, f"--trainer.devices={ranks}"]
        with Workers(ranks) as workers:
            record = workers.run(argv, tmp_path / f"{number}", callbacks=callbacks, prelude=fault, run_id="run")
        assert record.ok == (kill == 0), record.error
    told, wrong = audit(read_attempts(folder / "ledger"))
    assert fault or "16 steps in 3 attempts, ranks 2 -> 1 -> 2" in told[0]
    assert "complete epochs: 0" in told[1], "at least one whole epoch is proven"
    assert bool(wrong) == bool(fault), wrong
    if fault:
        assert "twice in epoch 0: in steps 1 and 1" in wrong[0]
