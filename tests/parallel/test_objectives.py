"""An objective of a package: its numbers are torch's, and the same under every strategy."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from trainer_dev.module import LanguageModule

from dist_template import InputError
from dist_template.checkpoint.identity import compare
from dist_template.text import NextToken, Preferences, TextFiles
from dist_template.text.objectives.mtp import MtpConfig
from dist_template.text.objectives.pairs import PreferenceConfig
from dist_template.text.objectives.ratings import Kto
from tests.support import pairs, parity
from tests.support.objectives import Hinge, Smoothed
from tests.support.parity import PROCESSES, STEPS, Trainings
from tests.support.tiers import tiers

SMOOTHED = ["--model.objective=tests.support.objectives.Smoothed", "--model.objective.penalty=0.01"]
HINGE = ["--model.objective=tests.support.objectives.Hinge", "--model.objective.beta=0.3"]
HINGE += ["--model.optim.warmup=0"]


def test_the_objective_is_torchs() -> None:
    """Label smoothing is torch's own; the penalty is written out."""
    torch.manual_seed(0)
    logits, labels = torch.randn(2, 5, 7, requires_grad=True), torch.randint(7, (2, 5))
    labels[0, 3] = -100
    module = LanguageModule()
    found = Smoothed(0.2, 0.5).blend(module.sums(logits, labels), logits, labels)
    flat, kept = logits.flatten(0, 1), labels.flatten() != -100
    expected = F.cross_entropy(flat, labels.flatten(), reduction="sum", label_smoothing=0.2)
    penalty = flat[kept].exp().sum(-1).log().square().sum()
    assert next(iter(found)) == "objective"
    torch.testing.assert_close(found["objective"], expected + 0.5 * penalty)


COMBINED = {"zero2_offload", "zero3_offload", "fsdp2_tp_ep"}
CASES = [name for name in PROCESSES if name not in COMBINED]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", tiers(CASES, daily=["fsdp2", "pp"]))
def test_it_trains_to_one_processs_numbers(train: Trainings, strategy: str) -> None:
    one = train("deepseek_v3", "one", *SMOOTHED)
    parity.assert_trains_alike(train("deepseek_v3", strategy, *SMOOTHED), one)
    objective, loss = (one.metric(f"train/{name}").values() for name in ("objective", "loss"))
    assert len(objective) == STEPS and all(a > b for a, b in zip(objective, loss, strict=True))
    chunked = train("deepseek_v3", "one", *SMOOTHED, "--model.loss_chunk=16")
    parity.assert_trains_alike(chunked, one)
    assert train("deepseek_v3", "one").loss != one.loss, "another loss is minimized"


@pytest.fixture(scope="module")
def on_pairs(tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    folder: Path = tmp_path_factory.mktemp("hinge")
    flags = [*pairs.flags(folder, pairs.LENGTHS), f"--run.root={folder / 'runs'}"]
    flags += ["--trainer.accelerator=cpu", "--trainer.logger=false", "--run.report=false"]
    flags += ["--trainer.max_steps=4", "--trainer.log_every_n_steps=1", "--data.seq_len=64"]
    flags += ["--trainer.limit_val_batches=0"]
    return Trainings(folder, flags)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", tiers(["ddp", "fsdp2", "tp", "zero3"], daily=["fsdp2"]))
def test_a_loss_of_pairs_does_too(on_pairs: Trainings, strategy: str) -> None:
    one = on_pairs("llama", "one", *HINGE, prelude=parity.keep_labels)
    many = on_pairs("llama", strategy, *HINGE, prelude=parity.keep_labels)
    assert one.loss[1] == pytest.approx(1.0), "the model is its reference"
    assert one.loss[4] < one.loss[1]
    assert many.loss == pytest.approx(one.loss, rel=1e-5)


def setup_of(source: Any, **given: Any) -> tuple[LanguageModule, Any]:
    module = LanguageModule(**given)
    data = SimpleNamespace(source=source)
    setup: Any = SimpleNamespace(trains=True, data=data, model_config=object())
    setup.setting = lambda key: getattr(module, key)
    return module, setup


@pytest.mark.parametrize(
    ("source", "given", "sentence"),
    [
        (TextFiles(["a.txt"]), {"objective": Hinge()}, "model.objective learns from pairs: set"),
        (
            Preferences(["a.jsonl"]),
            {"objective": Smoothed()},
            "model.objective learns from texts or conversations, and data.source yields pairs",
        ),
        (
            TextFiles(["a.txt"]),
            {"objective": Kto(PreferenceConfig(loss="kto"))},
            "model.objective Kto is chosen by model.preference: set that instead",
        ),
        (
            TextFiles(["a.txt"]),
            {"objective": Smoothed(), "mtp": MtpConfig()},
            "model.objective does not work with model.mtp: set one of them to null",
        ),
    ],
)
def test_an_objective_that_cannot_be_is_one_sentence(
    source: Any, given: Any, sentence: str
) -> None:
    module, setup = setup_of(source, **given)
    found = list(module.refusals(setup))
    assert [each for each in found if each.startswith(sentence)], found


def test_a_resume_compares_what_is_learned() -> None:
    """By class, and by each argument of a plain type, null among them."""

    class Options(NextToken):
        def __init__(self, scale: float | None = None, table: dict[str, float] | None = None):
            self.scale, self.table = scale, table
            self.seen = 0  # no argument

    def settings(**given: Any) -> dict[str, object]:
        module = LanguageModule(**given)
        data = SimpleNamespace(source=None, vocab_size=50, seq_len=8, eos_token_id=0)
        found = module.fixed_settings(data)
        return {key: value for key, value in found.items() if key.startswith("model.objective")}

    before = settings(objective=Options())
    after = settings(objective=Options(3.0, {"drop": 1.0}))
    assert before.keys() == after.keys() and len(before) == 3
    assert before["model.objective.scale"] is None and after["model.objective.scale"] == 3.0
    assert settings() != settings(mtp=MtpConfig()), "another key, another class"
    with pytest.raises(InputError, match="model.objective.scale None, now 3.0"):
        compare(Path("step2.ckpt"), before, after, [])
