"""An image classifier, as either kind of module, trains as language models do."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from dist_template import Project
from dist_template.checkpoint import manifest
from dist_template.wings.rehearse.interventions import KillAt
from dist_template.wings.rehearse.record import RunRecord
from tests.support.classifier import BUILT, CLASSIFIER, MANUAL, PLAIN
from tests.support.runs import Workers, logged
from tests.support.strategies import flags_of
from tests.support.tiers import tiers

pytestmark = pytest.mark.slow
MODULES = {"TrainingModule": CLASSIFIER, "plain": PLAIN}
MANUALLY = {"TrainingModule": BUILT, "two optimizers": MANUAL}
STEPS, EVERY, KILLED = 10, 2, 7
BATCH, GLOBAL = 2, 8
STRATEGIES = {"auto": 1, "ddp": 2, "fsdp2": 2, "zero2": 2, "zero3": 2, "hsdp": 4}  # ranks


class Trainings:
    """Trainings of a module, each from 40 samples: an epoch is five steps."""

    def __init__(self, folder: Path, project: Project) -> None:
        self.folder, self.project = folder, project
        self.whole = cache(lambda strategy: self.run(strategy, strategy).check())
        of_others = "--best_checkpoint.monitor=val_loss"
        self.flags = [
            f"--run.root={folder / 'runs'}",
            "--run.report=false",
            "--trainer.accelerator=cpu",
            f"--trainer.max_steps={STEPS}",
            "--data.num_train=40",
            "--trainer.log_every_n_steps=1",
            "--trainer.val_check_interval=5",
            "--last_checkpoint.keep=9",
            f"--last_checkpoint.every_n_steps={EVERY}",
            "--model.optim.learning_rate=3e-3" if project is CLASSIFIER else of_others,
        ]

    def run(
        self,
        name: str,
        strategy: str,
        *more: str,
        verb: str = "fit",
        run: str = "",
        batch: int = BATCH,
        **options: Any,
    ) -> RunRecord:
        ranks = STRATEGIES[strategy]
        given = [verb, *self.flags, f"--trainer.devices={ranks}", f"--run.name={run or name}"]
        given += [f"--data.batch_size={batch}", *more]
        given += [f"--trainer.accumulate_grad_batches={GLOBAL // batch // ranks}"]
        given += flags_of(strategy) if strategy != "auto" else []
        return Workers(ranks, self.project).run(given, self.folder / name, **options)


@pytest.fixture(scope="module", params=tiers(MODULES, daily=["plain"]))
def trainings(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    """A TrainingModule under each strategy is daily in parallel/test_parity.py."""
    return Trainings(tmp_path_factory.mktemp("any"), MODULES[request.param])


@pytest.mark.parametrize("strategy", tiers([*STRATEGIES][1:], daily=["ddp", "fsdp2", "zero3"]))
def test_a_strategy_has_the_losses_of_one_process(trainings: Trainings, strategy: str) -> None:
    one, several = trainings.whole("auto"), trainings.whole(strategy)
    assert list(one.loss) == list(range(1, STEPS + 1)) and one.loss[STEPS] < one.loss[1]
    assert several.loss == pytest.approx(one.loss, rel=1e-6)
    assert several.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)
    assert several.eval()[STEPS] == pytest.approx(one.eval()[STEPS], rel=1e-6)
    for step, rows in one.rows().items():
        assert sorted(several.rows()[step]) == sorted(rows)


@pytest.mark.parametrize("strategy", tiers(STRATEGIES, daily=["fsdp2", "zero3"]))
def test_a_killed_run_resumes_at_the_next_sample(trainings: Trainings, strategy: str) -> None:
    name = f"{strategy}-killed"
    assert trainings.run(name, strategy, callbacks=[KillAt(KILLED)]).was_killed
    resumed = trainings.run(f"{strategy}-resumed", strategy, "--ckpt_path=last", run=name).check()
    steps = range(KILLED // EVERY * EVERY + 1, STEPS + 1)
    whole = trainings.whole(strategy)
    assert resumed.loss == {step: whole.loss[step] for step in steps}


OTHERS = [("ddp", "fsdp2"), ("fsdp2", "zero3"), ("zero3", "auto")]


@pytest.mark.parametrize(("first", "second"), tiers(OTHERS, [("ddp", "fsdp2")]))
def test_a_checkpoint_resumes_under_another(trainings: Trainings, first: str, second: str) -> None:
    whole = trainings.whole("auto")
    checkpoint = trainings.whole(first).run / "checkpoints" / manifest.name(6)
    resumed = trainings.run(f"{first}-{second}", second, f"--ckpt_path={checkpoint}").check()
    expected = {step: whole.loss[step] for step in range(7, STEPS + 1)}
    assert resumed.loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("strategy", tiers(["auto", "fsdp2", "zero3"], daily=["fsdp2"]))
def test_a_checkpoint_is_validated_tested_and_predicts(trainings: Trainings, strategy: str) -> None:
    trained = trainings.whole(strategy)
    checkpoint = f"--ckpt_path={trained.run / 'checkpoints' / manifest.name(STEPS)}"
    validated, tested, predicted = (
        trainings.run(f"{strategy}-{verb}", strategy, checkpoint, verb=verb).check()
        for verb in ("validate", "test", "predict")
    )
    assert validated.eval()[0] == pytest.approx(trained.eval()[STEPS], rel=1e-6)
    assert all(0 < value < 2 for value in tested.eval("test")[0].values())
    lines = (predicted.run / "predictions.jsonl").read_text(encoding="utf-8").splitlines()
    assert [len(json.loads(line)) for line in lines] == [BATCH] * 4


MANUAL_CELLS = [(kind, way) for kind in MANUALLY for way in ("ddp", "fsdp2", "hsdp")]


@pytest.mark.parametrize(
    ("kind", "strategy"), tiers(MANUAL_CELLS, daily=[("two optimizers", "fsdp2")])
)
def test_manual_optimization_equals_one_process(tmp_path: Path, kind: str, strategy: str) -> None:
    trainings = Trainings(tmp_path, MANUALLY[kind])
    one = trainings.run("auto", "auto", batch=GLOBAL).check()
    batch = GLOBAL // STRATEGIES[strategy]
    two = trainings.run(strategy, strategy, batch=batch).check()
    losses = logged(one.run, "my/loss")
    assert len(losses) >= 4
    assert logged(two.run, "my/loss") == pytest.approx(losses, rel=1e-5)
    for step, results in one.eval().items():
        assert two.eval()[step] == pytest.approx(results, rel=1e-5)


def test_manual_optimization_is_refused_where_an_engine_steps(tmp_path: Path) -> None:
    refusal = Trainings(tmp_path, MANUAL).run("refused", "zero2", batch=GLOBAL // 2).refusal
    assert "Manual optimizes manually" in refusal and "--config strategy/fsdp2" in refusal
