"""A key that a training does not read is refused, unless it has its default value."""

from __future__ import annotations

import pytest
from trainer_dev.data import DataModule
from trainer_dev.module import LanguageModule

from dist_template.text import Preferences
from tests.support.library import PreferenceConfig
from tests.support.limits import violations_of
from tests.support.runs import run

IGNORED = {
    "a loss of pairs on texts": (
        ["--model.preference.beta=0.5"],
        "model.preference.beta is 0.5 and has no effect (data.source yields no pairs: set Preferences",
    ),
    "keys of AdamW for another optimizer": (
        ["--optimizer=torch.optim.SGD", "--model.optim.eps=1e-6"],
        "model.optim.eps is 1e-06 and has no effect (--optimizer SGD has its own",
    ),
}


@pytest.mark.parametrize("case", IGNORED)
def test_the_command_line_refuses_it(case: str, flags: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    wrong, sentence = IGNORED[case]
    assert run("fit", *flags, *wrong) == 2
    assert sentence in capfd.readouterr().err


def test_the_key_of_a_loss_of_pairs_is_refused_without_pairs() -> None:
    pairs = DataModule(Preferences(paths=["a"]), global_batch_size=1024, micro_batch_size=1)
    module = LanguageModule(preference=PreferenceConfig(beta=0.3))
    assert violations_of(data=pairs, module=module) == []
    (sentence,) = violations_of(module=module)
    assert "model.preference.beta is 0.3 and has no effect" in sentence
