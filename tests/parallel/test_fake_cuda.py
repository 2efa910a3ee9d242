"""`fit` on fake GPUs equals the CPU, and waits for them as often as docs/rehearse.md says."""

import math
import re
from pathlib import Path

import pytest

import fake_cuda
from dist_template.wings.rehearse.gpu.devices import run_on_devices
from dist_template.wings.rehearse.record import RunRecord
from tests import ROOT
from tests.support import faults
from tests.support.line import OURS
from tests.support.parity import MODELS
from tests.support.runs import logged, only_run, run, small
from tests.support.strategies import flags_of

LACKS = pytest.mark.skipif(bool(fake_cuda.refusal()), reason=fake_cuda.refusal())
pytestmark = [pytest.mark.slow, LACKS]
STEPS = [
    f"--model.architecture={MODELS['llama']}",
    "--trainer.max_steps=12",
    "--trainer.log_every_n_steps=3",
    "--trainer.val_check_interval=8",
    "--last_checkpoint.every_n_steps=5",
    "--model.optim.learning_rate=0.01",
    "--model.optim.warmup=2",
    "--trainer.precision=32-true",
]
NUMBERS = {"plain": 6, "log": 4, "validation": 2}  # of these steps, the first two apart
ROWS_OF = {"one": 8, "tp": 8, "cp": 8}  # whose ranks share their batches; others: 4
ERRORS = ("RACE_H2D", "EARLY_READ", "BAD_GENERATOR")
PAGE = (ROOT / "docs" / "rehearse.md").read_text("utf-8")
ROWS = re.findall(r"^\| ([a-z0-9_]+) \| (\d+) \| (\d+) \| (\d+) \|$", PAGE, re.MULTILINE)


class Fits:
    """Trainings on fake GPUs, each run once."""

    def __init__(self, folder: Path, corpus: Path, cache: Path) -> None:
        self.folder = folder
        self.flags = [*small(corpus, cache, folder), *STEPS]
        self._done: dict[str, RunRecord] = {}
        root = [f"--run.root={folder}/cpu/runs", "--data.micro_batch_size=8"]
        assert run("fit", *self.flags, *root) == 0
        self.losses = logged(only_run(folder / "cpu"), "train/loss")
        self.norms = logged(only_run(folder / "cpu"), "train/grad_norm")

    def __call__(self, strategy: str, *extra: str, prelude: str = "") -> RunRecord:
        key = " ".join((strategy, *extra, prelude))
        if key not in self._done:
            num, flags = 1, list[str]()
            if strategy != "one":
                num, flags = 2, flags_of(strategy)
            if strategy == "zero3":  # else so small a model would not be sharded
                flags += ["--trainer.strategy.init_args.param_persistence_threshold=16"]
            folder = self.folder / str(len(self._done))
            flags += ["--trainer.accelerator=gpu", f"--trainer.devices={num}"]
            flags += [f"--data.micro_batch_size={ROWS_OF.get(strategy, 4)}"]
            flags += [f"--run.root={folder}/runs"]
            argv = ["fit", *self.flags, *flags, *extra]
            planted = getattr(faults, prelude, None)
            self._done[key] = run_on_devices(num, OURS, argv, folder, prelude=planted)
        return self._done[key]


@pytest.fixture(scope="module")
def fits(corpus: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Fits:
    return Fits(tmp_path_factory.mktemp("fake_cuda"), corpus, cache)


def waits(record: RunRecord, phase: str) -> int:
    """Without DDP's copies of what gloo has reduced, which NCCL leaves on the device."""
    count = 0
    for event in record.device.events:
        if event.phase != phase or event.kind != "SYNC":
            continue
        if event.inner or event.operation != "H2D blocking copy":
            count += event.count
    return count


@pytest.mark.parametrize("row", ROWS, ids=[name for name, *_ in ROWS])
def test_a_fit_equals_the_cpus_and_waits_as_the_table_says(fits: Fits, row: tuple) -> None:
    strategy, *expected = row
    record = fits(strategy).check()
    folder = only_run(record.folder)
    assert logged(folder, "train/loss") == pytest.approx(fits.losses, rel=1e-5)
    assert logged(folder, "train/grad_norm") == pytest.approx(fits.norms, rel=1e-4)
    assert not [event for event in record.device.events if event.kind in ERRORS]
    counts = [round(waits(record, phase) / number) for phase, number in NUMBERS.items()]
    assert list(map(str, counts)) == expected, record.device.events


def test_the_table_has_all_strategies() -> None:
    names = "one ddp fsdp2 fsdp2_offload tp cp pp zero1 zero2 zero3"
    assert [name for name, *_ in ROWS] == names.split()


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["one", "fsdp2"])
def test_an_asynchronous_save_waits_for_nothing_in_its_thread(fits: Fits, strategy: str) -> None:
    record = fits(strategy, "--last_checkpoint.asynchronous=true").check()
    assert not waits(record, "background save")


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["one", "fsdp2_offload"])
def test_a_step_that_is_not_a_number_is_skipped(fits: Fits, strategy: str) -> None:
    skips = "--numerics.on_non_finite=skip"
    record = fits(strategy, skips, prelude="loss_that_is_not_a_number").check()
    losses = logged(only_run(record.folder), "train/loss")
    later = [loss for step, loss in losses.items() if step > 6]
    assert not any(map(math.isnan, later)), losses


@pytest.mark.nightly
def test_each_planted_fault_is_found(fits: Fits) -> None:
    """The device would have found them before their mend."""
    kinds = {event.kind for event in fits("pp").device.events}
    assert "NCCL_MIXED_GROUP" not in kinds, "messages have a group of their own"
    assert not fits("zero3", prelude="parameters_left_on_the_host").ok
    synchronized = waits(fits("zero2", prelude="deepspeeds_clock"), "plain")
    assert synchronized > waits(fits("zero2"), "plain")
    saves = "--last_checkpoint.asynchronous=true"
    copied = fits("fsdp2", saves, prelude="thread_that_copies_ahead")
    assert waits(copied, "background save") > 0
