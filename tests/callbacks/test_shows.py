"""A custom network: errors in what only shows something end no training, `predict` refuses, scalars are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from dist_template import InputError
from dist_template.callbacks import Console
from dist_template.callbacks.samples import Samples
from dist_template.callbacks.summary import Summary
from dist_template.layout import refuse_scalars
from dist_template.wings.diagnose.callback import Diagnosis
from pytest import CaptureFixture, MonkeyPatch
from torch import Tensor, nn
from trainer_dev.module import LanguageModule

from tests.support.runs import logged, newest, only_run, run


class Network(nn.Module):
    """No transformers model: its forward has arguments of its own, and there is no `generate`."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 8)
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.output = nn.Linear(8, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.embedding(tokens)) / self.temperature


@pytest.fixture(autouse=True)
def own_network(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(LanguageModule, "build_model", lambda _, data: Network(data.vocab_size))
    monkeypatch.setattr(LanguageModule, "build_config", lambda *_: None)
    monkeypatch.setattr(
        LanguageModule, "forward", lambda self, batch: self.model(batch["input_ids"])
    )


def test_a_network_without_generate_trains_and_predict_refuses_it(
    flags: list[str], tmp_path: Path, capsys: CaptureFixture
) -> None:
    steps = ["--trainer.max_steps=4", "--trainer.val_check_interval=2", "--model.optim.warmup=0"]
    assert run("fit", *flags, *steps) == 0
    out = capsys.readouterr().out
    sentence = "Network has no generate: write LanguageModule.generate"
    assert out.count(sentence) == 1, "in two validations"
    assert set(logged(only_run(tmp_path), "eval/loss")) == {0, 2, 4}
    assert run("predict", *flags, f"--ckpt_path={newest(only_run(tmp_path))}") == 2
    assert capsys.readouterr().err == f"error: {sentence}\n"


@pytest.mark.parametrize(
    ("owner", "method"),
    [
        (Samples, "on_validation_end"),
        (Console, "on_log_step"),
        (Console, "_show_results"),
        (Diagnosis, "_diagnose"),
    ]
    + [(Summary, "show")],
)
def test_an_error_in_what_only_shows_ends_no_training(
    flags: list[str], monkeypatch: MonkeyPatch, capsys: CaptureFixture, owner: Any, method: str
) -> None:
    from dist_template.callbacks.console import only_shows

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("planted")

    inner = getattr(owner, method)
    monkeypatch.setattr(
        owner, method, only_shows(broken) if hasattr(inner, "__wrapped__") else broken
    )
    steps = ["--trainer.max_steps=2", "--trainer.val_check_interval=2", "--model.optim.warmup=0"]
    assert run("fit", *flags, *steps) == 0
    assert "RuntimeError: planted; training continues without it" in capsys.readouterr().out


def test_a_parameter_of_one_element_is_no_scalar() -> None:
    network = Network(5)
    with pytest.raises(
        InputError, match="temperature of Network is a scalar parameter, which FSDP2 cannot shard"
    ):
        refuse_scalars(network, "FSDP2")
    network.temperature = nn.Parameter(torch.ones(1))
    refuse_scalars(network, "FSDP2")
