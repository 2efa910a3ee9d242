"""`fit` on a CUDA device that computes on the host: equal to the CPU, and no plain step waits."""

from pathlib import Path

import pytest

from tests.support import fake_cuda
from tests.support.fake_cuda import Report
from tests.support.fake_cuda.counts import ERRORS
from tests.support.parity import MODELS
from tests.support.runs import logged, only_run, run, small
from tests.support.strategies import flags_of

LACKS = pytest.mark.skipif(fake_cuda.COMPILER is None, reason="needs g++ for the fake device")
pytestmark = [pytest.mark.slow, pytest.mark.nightly, LACKS]
STEPS = [
    f"--model.architecture={MODELS['llama']}", "--trainer.max_steps=12",
    "--trainer.log_every_n_steps=3", "--trainer.val_check_interval=16",
    "--last_checkpoint.every_n_steps=5", "--model.optim.learning_rate=0.01",
    "--model.optim.warmup=2", "--trainer.precision=32-true",
]  # fmt: skip
BOTH_READ_ALL = ("tp", "cp", "pp")  # ranks share their batches
# How often rank 0 waits for the device: in 15 micro-batches of which 6 end plain steps,
# in the last micro-batches of 3 log steps, and in 2 validations. A log step reads its metrics.
# DeepSpeed reads the gradients' norm in each step, FSDP2 waits for each offloaded gradient.
WAITS = {
    "one": (0, 3, 16), "ddp": (0, 3, 22), "fsdp2": (0, 3, 22), "tp": (0, 3, 22), "cp": (0, 3, 22),
    "pp": (0, 27, 28), "zero1": (48, 27, 22), "zero2": (57, 27, 22), "zero3": (45, 21, 54),
    "fsdp2_offload": (126, 66, 16),
}  # fmt: skip
FAULTS = "tests.support.faults"


class Fits:
    """Trainings on the fake device, each run once."""

    def __init__(self, folder: Path, corpus: Path, cache: Path) -> None:
        self.folder = folder
        self.flags = [*small(corpus, cache, folder), *STEPS]
        self._done: dict[str, Report] = {}
        name = [f"--run.root={folder}/cpu/runs", "--data.micro_batch_size=4"]
        assert run("fit", *self.flags, *name) == 0
        self.losses = logged(only_run(folder / "cpu"), "train/loss")

    def __call__(self, strategy: str, *extra: str, prelude: str = "") -> Report:
        key = " ".join((strategy, *extra, prelude))
        if key not in self._done:
            num = 1 if strategy == "one" else 2
            flags = [] if strategy == "one" else flags_of(strategy)
            if strategy == "zero3":  # else so small a model would not be sharded
                flags += ["--trainer.strategy.init_args.param_persistence_threshold=16"]
            rows = 4 if strategy in (*BOTH_READ_ALL, "one") else 2
            flags += ["--trainer.accelerator=gpu", f"--trainer.devices={num}"]
            flags.append(f"--data.micro_batch_size={rows}")
            folder = self.folder / str(len(self._done))
            argv = ["fit", *self.flags, f"--run.root={folder}/runs", *flags, *extra]
            self._done[key] = fake_cuda.run(folder, argv, num, prelude and f"{FAULTS}:{prelude}")
        return self._done[key]


@pytest.fixture(scope="module")
def fits(corpus: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Fits:
    return Fits(tmp_path_factory.mktemp("fake_cuda"), corpus, cache)


@pytest.mark.parametrize("strategy", WAITS)
def test_a_fit_equals_the_cpus_and_waits_for_the_device_so_often(fits: Fits, strategy: str) -> None:
    report = fits(strategy)
    assert report.code == 0, report.text
    assert logged(only_run(report.folder), "train/loss") == pytest.approx(fits.losses, rel=1e-5)
    assert not report.of(*ERRORS) and report.events_alive < 10
    waits = report.waits()
    found = tuple(waits.get(phase, 0) for phase in ("plain", "log", "validation"))
    assert found == WAITS[strategy], report.of("SYNC")


@pytest.mark.parametrize("strategy", ["one", "fsdp2"])
def test_an_asynchronous_save_waits_for_nothing_in_its_thread(fits: Fits, strategy: str) -> None:
    report = fits(strategy, "--last_checkpoint.asynchronous=true")
    assert report.code == 0, report.text
    assert not report.waits().get("background save")


@pytest.mark.parametrize("strategy", ["one", "fsdp2_offload"])
def test_a_step_that_is_not_a_number_is_skipped(fits: Fits, strategy: str) -> None:
    skips = "--numerics.on_non_finite=skip"
    report = fits(strategy, skips, prelude="loss_that_is_not_a_number")
    assert report.code == 0, report.text
    losses = logged(only_run(report.folder), "train/loss")
    assert all(loss == loss for step, loss in losses.items() if step > 6), losses


def test_planted_each_fault_is_found(fits: Fits) -> None:
    """The device would have found them before their mend."""
    assert not fits("pp").of("NCCL_MIXED_GROUP"), "messages have a group of their own"
    assert fits("zero3", prelude="parameters_left_on_the_host").code != 0
    synchronized = fits("zero2", prelude="deepspeeds_clock").waits()["plain"]
    assert synchronized > WAITS["zero2"][0]
    saves = "--last_checkpoint.asynchronous=true"
    copied = fits("fsdp2", saves, prelude="thread_that_copies_ahead").waits()
    assert copied["background save"] > 0
