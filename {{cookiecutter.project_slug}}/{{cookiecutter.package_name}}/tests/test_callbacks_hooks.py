"""Lightning calls no hook that does nothing."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.profilers import PassThroughProfiler

from .. import cli
from .conftest import run


def empty_ones(flags: list[str], monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Of the callbacks' hooks of each batch that a training calls, those that are the base class's."""
    called: set[str] = set()
    by_name: dict[str, Any] = {}

    class Listening(PassThroughProfiler):
        def start(self, action_name: str) -> None:
            called.add(action_name)

        def describe(self) -> None:
            pass

    def with_a_profiler(self: Any, **kwargs: Any) -> Any:
        trainer: Any = instantiate(self, **kwargs)
        trainer.profiler = Listening()
        by_name.update({each.state_key: type(each) for each in trainer.callbacks})
        return trainer

    instantiate = cli.CLI.instantiate_trainer
    with monkeypatch.context() as patch:
        patch.setattr(cli.CLI, "instantiate_trainer", with_a_profiler)
        assert (
            run("fit", *flags, "--trainer.max_steps=2", "--trainer.limit_val_batches=0", "--model.optim.warmup=0") == 0
        )
    hooks = [name.removeprefix("[Callback]").rsplit(".", 1) for name in called if name.startswith("[Callback]")]
    assert hooks
    of_each_batch = [(key, hook) for key, hook in hooks if "batch" in hook or "before" in hook or "after" in hook]
    return {
        f"{key}.{hook}"
        for key, hook in of_each_batch
        if key in by_name and getattr(by_name[key], hook) is getattr(Callback, hook)
    }


def test_no_empty_hook_is_called_in_a_batch(flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert not empty_ones(flags, monkeypatch)
    monkeypatch.setattr(cli, "spare_empty_hooks", lambda callbacks: None)
    assert len(empty_ones(flags, monkeypatch)) > 20, "without it there are many"
